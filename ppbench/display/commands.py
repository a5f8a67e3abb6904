"""Command lines that pages and messages print: whole, quoted for a shell, and as they go on."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from ppbench.config.shipped import from_here

_DEFAULTS = {"results": Path("results"), "reports": Path("reports")}
LAUNCHES, BUDGET = "measure.launches", "measure.budget"
_OPTIONS = {
    "sweep": {BUDGET: "--budget"},
    "plan": {BUDGET: "--budget", LAUNCHES: "--max-launches"},
    "compare": {BUDGET: "--budget", LAUNCHES: "--max-launches"},
    "check": {BUDGET: "--budget", LAUNCHES: "--max-launches"},
}
"""Commands that measure, and which settings are options of theirs; others are given by `--set`."""
_ONCE = ("--rerun", "--retry-failed")
"""Options that would begin anew instead of going on."""
_SPARE, _MORE = 1.25, 1.5


def command(*words: str, **options: object) -> str:
    """A command line of ppbench, quoted for a shell.

    An option is left out if it is None, False or empty, or the default folder for results or
    reports; a list repeats it.
    """
    return shlex.join(["ppbench", *words, *option_words(**options)])


def option_words(**options: object) -> list[str]:
    """The words of options on a command line; see `command`."""
    words: list[str] = []
    for name, value in options.items():
        if value is None or value is False or value in ((), [], _DEFAULTS.get(name)):
            continue
        option = f"--{name.replace('_', '-')}"
        if value is True:
            words.append(option)
        else:
            values = value if isinstance(value, list | tuple) else [value]
            words += [word for one in values for word in (option, str(one))]
    return words


def from_anywhere(command: str) -> str:
    """Return a command as it works in any folder, where a page is read; other text as it is."""
    is_command = command.startswith("ppbench ")
    return f"cd {shlex.quote(str(Path.cwd()))} && {command}" if is_command else command


def near(sweep: str | None) -> str:
    """A sweep file as it would be typed here; `SWEEP` if it is not known."""
    if sweep is None:
        return "SWEEP"
    path = Path(sweep)
    return sweep if from_here(path) == path else str(from_here(path))


def repeated(command: str, settings: Mapping[str, str], options: Sequence[str] = ()) -> str:
    """Return a command with these settings in place of its own, and more options.

    The settings are keys of a sweep file. The answer is empty for a command that measures nothing.
    What stands before it, `cd FOLDER && `, stays there.
    """
    begin = ""
    if command.startswith("cd "):
        begin, _, command = command.partition(" && ppbench ")
        begin, command = f"{begin} && ", f"ppbench {command}"
    program, name, *words = [*shlex.split(command), "", ""]
    if program != "ppbench" or name not in _OPTIONS:
        return ""
    own = _OPTIONS[name]
    replaced = {own[key] for key in settings if key in own}
    replaced |= {"--launches"} if LAUNCHES in settings else set()  # a fixed number
    kept, left = [program, name], iter(word for word in words if word)
    for word in left:
        if word in replaced:
            next(left, None)  # its value
        elif word == "--set":
            value = next(left, "")
            if value.partition("=")[0].strip() not in settings:
                kept += [word, value]
        elif word not in (*_ONCE, *options):
            kept.append(word)
    for key, value in settings.items():
        kept += [own[key], value] if key in own else ["--set", f"{key}={value}"]
    return begin + shlex.join([*kept, *options])


def larger_budget(num_launches: int, launch_s: float, former_s: float) -> str:
    """The time for so many launches, well above the one that was spent: `110s`, or `4m`."""
    needed_s = max(_SPARE * num_launches * launch_s, _MORE * former_s)
    if needed_s <= 120:
        return f"{10 * math.ceil(needed_s / 10)}s"
    return f"{math.ceil(needed_s / 60)}m"
