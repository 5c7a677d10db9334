"""``python -m magicrl`` is the ``magicrl`` command."""

from magicrl.cli.main import main

main()
