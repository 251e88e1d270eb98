"""`python -m specdecode.cli`: the same as `specdecode`."""

from specdecode.cli import main

main()
