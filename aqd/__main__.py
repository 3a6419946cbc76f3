"""``python -m aqd``: the same as the ``aqd`` command."""

from aqd.cli import main

main()
