"""Asks a process of its own, which has torch, about models."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

from ppbench.errors import UsageError
from ppbench.runtimes import check_can_train

COMMAND = (sys.executable, "-m", "engine.describe")
_NOISE = ("USDT:", "[W")  # what torch's profiler prints


def ask(
    question: str, request: object, failure: str, tell: Callable[[str], None] = lambda _line: None
) -> Any:
    """The answer of `python -m engine.describe` to a question of its; `tell` receives its notes.

    Blocks until the process is over. Raises UsageError, which begins with `failure` and ends with
    the last note, if it dies.
    """
    check_can_train()
    last = "no output"
    with tempfile.TemporaryFile("w+") as asked, tempfile.TemporaryFile("w+") as answer:
        json.dump(request, asked)
        asked.seek(0)
        with subprocess.Popen(
            (*COMMAND, question), stdin=asked, stdout=answer, stderr=subprocess.PIPE, text=True
        ) as process:
            assert process.stderr is not None
            try:
                for line in process.stderr:
                    if text := line.strip():
                        last = text
                        if not text.startswith(_NOISE):
                            tell(text)
            except BaseException:
                process.kill()
                raise
        answer.seek(0)
        lines = answer.read().splitlines()
    if process.returncode != 0 or not lines:
        raise UsageError(
            f"{failure}; python -m engine.describe {question} ended with exit code "
            f"{process.returncode}: {last}"
        )
    return json.loads(lines[-1])  # what is printed at import comes before the answer
