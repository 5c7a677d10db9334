"""Checks of what magicrl promises, on the user's machine with the user's versions: ``magicrl selfcheck``."""
