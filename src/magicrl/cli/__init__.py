"""The magicrl command."""
