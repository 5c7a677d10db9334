"""``python -m magicrl`` is the ``magicrl`` command."""

from magicrl.commands.main import main

main()
