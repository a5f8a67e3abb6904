"""`python -m ppbench` is the command `ppbench`."""

from ppbench.cli import main

main()
