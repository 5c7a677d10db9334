"""A server of the Tinker API on one machine: ``magicrl serve``."""
