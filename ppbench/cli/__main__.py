"""`python -m ppbench.cli`: the same as the command `ppbench`."""

from ppbench.__main__ import main

if __name__ == "__main__":
    main()
