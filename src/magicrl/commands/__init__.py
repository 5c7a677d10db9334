"""Commands, one file each. The Python function of ``import magicrl`` is the command of ``magicrl``."""
