"""Every command of every page is run in the order of the page, over a recorded store.

Where a command measures, a sweep is only listed and the options of the others are only parsed;
`--thorough` runs them as they are written, on the pages that a newcomer follows. A transcript of
what no machine influences has to be what is printed; `--record` writes it into the page.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import typer.main
from pages import (
    ANYTHING,
    PAGES,
    ROOT,
    File,
    Line,
    matches,
    parts_of,
    steps_in,
    steps_of,
    trimmed,
)
from recordings import RECORDED, SETTINGS, ppbench
from traces import ONE_STEP, complete, trace

from engine.train_options import read_options
from ppbench.cli.app import app

pytestmark = pytest.mark.usefixtures("warm_starts")
SCENES: dict[str, dict[str, str]] = {
    "howto/commits.md": {
        "": "empty",
        "Compare two commits": "tracked",
        "Look at the history": "history",
        "Measure past commits": "bisected",
    },
    "howto/attach-to-a-training.md": {"": "traces"},
}
"""Where the commands of a page run, from its top and from some headings; by default in `swept`."""
WORDS = {
    "tracked": {"pipeline.toml": "demo.toml"},
    "bisected": {"pipeline.toml": "sweep.toml"},
    "traces": {"traces/rank*.json.gz": "rank0.json rank1.json"},
}
"""Words of pages, and what they are called in a scene."""
REAL = "20261122T222656 20261122T222659 20261122T2227008 20261122T2227023"
DRAWN = {
    **{f"figure {name}": f"figure {name} {REAL}" for name in ("pareto", "memory", "throughput")},
    "figure levels_of_memory": f"figure levels_of_memory {REAL.split()[1]}",
}
"""Figures for which the last sweep of `swept`, which is emulated, has no numbers."""
FOLLOWED = (
    "tutorial.md",
    "howto/choose.md",
    "howto/own-model-and-data.md",
    "howto/own-schedule.md",
    "howto/emulate.md",
    "howto/commits.md",
)
"""Pages whose every command, up to another scene, `--thorough` runs as it is written."""
OF_ANOTHER_PAGE = "ppbench plan mine.toml"
"""What needs the model that a reader has made on another page."""
SEES_NO_MACHINE = ("schedules", "simulate", "sweep wrong.toml")
ELSEWHERE = (
    "python -m ppbench.run.launch.supervisor",
    "srun ",
    "python3 -m venv",
    ". .venv",
    "pip install torch ",
    "pip install -e",
    "pip install ppbench-torch",
    "pip install torchtitan triton ppbench-torch",
    "pip install megatron-core",
    "DS_BUILD_OPS=0 pip install deepspeed",
    "torchrun --nproc-per-node 2 packaging/",
    "torchrun --nproc-per-node 2 train.py",
)
"""What needs other machines or the network, or is run by tests/test_docs.py."""
MEASURES = ("noise", "bisect", "models check", "plan")
FUNCTIONS = {
    "megatron-traces": "megatron/core/pipeline_parallel/schedules.py(265): {}_step",
    "deepspeed-traces": "deepspeed/runtime/pipe/engine.py(712): _exec_{}_pass",
}
"""Folders of traces of other trainers, and the functions whose calls are in them."""
INSUFFICIENT = "compare --across"
"""What ends with 3 in `swept`, which has one launch of each case."""
_RUN_ID = re.compile(r"\b\d{8}T\d{9}-[0-9a-f]{6}\b|\bRUN\b")
_EXTRA = re.compile(r"pip install (?:-e )?'(?:\.|ppbench-torch)\[(\w+)\]'")
_PICTURE = re.compile(r"\.png\b")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MAKEFILE = (ROOT / "Makefile").read_text()


def as_a_reader_has_it(folder: Path) -> Path:
    """A scene, with the sweeps that come with ppbench and a reader's own files."""
    shutil.copytree(ROOT / "sweeps", folder / "sweeps")
    shutil.copy(ROOT / "sweeps" / "quick.toml", folder / "sweeps" / "mine.toml")
    (folder / "my-texts.txt").write_text((ROOT / "LICENSE").read_text() * 20)
    for name, function in FUNCTIONS.items():
        (folder / name).mkdir()
        for rank, actions in ONE_STEP.items():
            calls = [complete("ProfilerStep#1", 0, 110)]
            for action, (start, end) in actions.items():
                if action != "OPT":
                    op = {"F": "forward", "B": "backward"}[action[1]]
                    calls.append(complete(function.format(op), start, end, "python_function"))
            trace(folder / name, rank, calls)
    return folder


@pytest.mark.parametrize(
    ("name", "number"),
    [
        (name, number)
        for name, page in PAGES.items()
        if any(steps_of(page))
        for number in range(len(SCENES.get(name, " ")))
    ],
)
def test_every_command_of_a_page_runs(
    name: str,
    number: int,
    scene: Callable[[str, Path], Path],
    tmp_path: Path,
    is_recording: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for variable in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"):
        monkeypatch.delenv(variable, raising=False)  # --open then says where the page is
    scenes = SCENES.get(name, {"": "swept"})
    here = [*scenes.values()][number]
    part = [*parts_of(PAGES[name], [*scenes][1:])][number]
    folder = as_a_reader_has_it(scene(here, tmp_path / "here"))
    for step in steps_in(part):
        if isinstance(step, File):
            (folder / step.name).write_text(step.text)
        elif is_recording and _sees_no_machine(step):
            _record(step, PAGES[name], folder)
        else:
            code = 3 if here == "swept" and INSUFFICIENT in step.text else step.exit_code
            text = _as_in_scene(step.text, WORDS.get(here, {}))
            _check(replace(step, exit_code=code), text, folder)


def test_the_errors_that_troubleshooting_explains_are_printed() -> None:
    """Each is among the recorded outputs, `…` standing for any words."""
    recorded = "".join(path.read_text() for path in sorted(RECORDED.glob("*/*.txt")))
    section = PAGES["troubleshooting.md"].read_text().partition("## A command ends")[2]
    quoted = re.findall(r"^\| `([^`]+)` \|", section.partition("## It is not")[0], re.MULTILINE)
    assert len(quoted) > 20
    for text in quoted:
        pattern = ".*".join(re.escape(part.strip()) for part in text.split("…"))
        assert re.search(f"^error: {pattern}", recorded, re.MULTILINE), text


@pytest.mark.thorough
@pytest.mark.timeout(7200)  # the sweeps of a page are measured as they are written
@pytest.mark.parametrize("name", FOLLOWED)
def test_a_page_can_be_followed_to_its_end(
    name: str, scene: Callable[[str, Path], Path], tmp_path: Path
) -> None:
    folder = as_a_reader_has_it(scene("empty", tmp_path / "here"))
    first = next(parts_of(PAGES[name], [*SCENES.get(name, {"": "empty"})][1:]))
    for step in steps_in(first):
        if isinstance(step, File):
            (folder / step.name).write_text(step.text)
        elif not step.text.startswith((*ELSEWHERE, OF_ANOTHER_PAGE)) and not _is_of_a_store(
            step, folder
        ):
            code = _in_shell(step.text, folder)
            assert code == step.exit_code, step.text


def _is_of_a_store(step: Line, folder: Path) -> bool:
    """Whether a command reads a store before its page has made one: it is about the reader's."""
    reads = ("ppbench explain", "ppbench ls", "ppbench show", "ppbench timeline", "ppbench figure")
    return step.text.startswith(reads) and not (folder / "results").exists()


def _as_in_scene(text: str, words: dict[str, str]) -> str:
    for word, in_scene in {**DRAWN, **words}.items():
        text = re.sub(rf"(?<![\w./]){re.escape(word)}(?!\w)", in_scene, text)
    return _PICTURE.sub(".html", _RUN_ID.sub("last", text))


def _check(step: Line, text: str, folder: Path) -> None:
    """Run one command of a page, as far as it can be run here in a moment."""
    program, _, rest = text.partition(" ")
    if program == "make":
        assert re.search(rf"^{rest}:", MAKEFILE, re.MULTILINE), text
    elif extra := _EXTRA.match(text):
        assert extra[1] in PROJECT["optional-dependencies"], text
    elif "-m engine.train" in text:
        assert read_options(shlex.split(text.partition("-m engine.train ")[2])) is not None
    elif program == "ppbench":
        _check_ppbench(step, shlex.split(rest), folder)
    elif not text.startswith(ELSEWHERE):
        assert program in ("git", "printf", "python"), f"no rule for the command {text!r}"
        assert _in_shell(text, folder) == step.exit_code, text


def _check_ppbench(step: Line, words: Sequence[str], folder: Path) -> None:
    if " ".join(words).startswith(MEASURES) or "--run" in words:
        _parse(words)
        return
    lists = ["--dry-run"] if words[0] in ("sweep", "backfill") and "--dry-run" not in words else []
    done = ppbench([*words, *lists], folder)
    assert done.exit_code == step.exit_code, f"{step.text}\n{done.stdout}{done.stderr}"
    if step.shown is not None and _sees_no_machine(step):
        printed = done.stdout + done.stderr
        assert matches(step.shown, printed), f"{step.text} prints:\n{printed}"


def _sees_no_machine(step: Line) -> bool:
    return step.text.removeprefix("ppbench ").startswith(SEES_NO_MACHINE)


def _record(step: Line, page: Path, folder: Path) -> None:
    """Write what a command prints into its page, where that shows all of it."""
    if step.shown is None or ANYTHING in step.shown:
        return
    done = ppbench(shlex.split(step.text)[1:], folder)
    page.write_text(page.read_text().replace(step.shown, trimmed(done.stdout + done.stderr)))


def _parse(words: Sequence[str]) -> None:
    """Read a command line as the program would, and run nothing."""
    command, names = typer.main.get_command(app), list(words)
    while hasattr(command, "commands"):
        command = command.commands[names.pop(0)]
    command.make_context(command.name, names)


def _in_shell(text: str, folder: Path) -> int:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    own = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@localhost"}
    own |= {name.replace("AUTHOR", "COMMITTER"): value for name, value in own.items()}
    env = {**os.environ, **SETTINGS, **own, "PATH": path, "PYTHON": sys.executable}
    if text.startswith("python "):
        command = [sys.executable, *shlex.split(text)[1:]]
    else:
        command = ["bash", "-c", text]
    done = subprocess.run(command, cwd=folder, env=env, timeout=900, check=False)
    return done.returncode
