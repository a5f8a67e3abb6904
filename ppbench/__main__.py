"""Entry point of the command `ppbench`, and of `python -m ppbench`.

It imports almost nothing, so that Ctrl-C ends the process quietly while the rest is imported.
"""

import _signal  # type: ignore[import-not-found]  # part of Python; `signal` imports more
import os

INTERRUPTED = 130
SIGNALS = (_signal.SIGINT, _signal.SIGTERM, _signal.SIGHUP)


def main() -> None:
    """Run the command line."""
    for number in SIGNALS:
        if _signal.getsignal(number) != _signal.SIG_IGN:  # as under nohup
            _signal.signal(number, _leave)
    from ppbench import cli

    cli.main()


def _leave(_number: int, _frame: object) -> None:
    """End the process at once: nothing has to be cleaned up yet."""
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    main()
