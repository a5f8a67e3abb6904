"""The gallery: sweeps small enough to run while the site is built, and the pages made from them.

Each exhibit has a folder of its own, in which its commands run as the page of the gallery shows
them. Its store is kept there, so that the next build runs only what is missing.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

_COMMIT = (
    "git -c user.name=gallery -c user.email=gallery@localhost -c commit.gpgsign=false commit -q"
)


@dataclass(frozen=True)
class Exhibit:
    """A page of the gallery: what it shows, and the commands that make it."""

    name: str
    title: str
    text: str
    commands: tuple[str, ...]
    pages: dict[str, str]
    """The pages that the commands write: the kind of each, and its file."""
    files: dict[str, str] = field(default_factory=dict)
    picture: str = ""
    """The command that draws `picture.svg`; it needs a browser, and the gallery does without."""


_EMULATED = """\
name = "{name}"
device = "emulated"
world_size = {ranks}
num_microbatches = {microbatches}

[emulated]
F_ms = {forward}
I_ms = 20
W_ms = 20

[measure]
warmup_steps = 1
steps = 3
{more}
[grid]
schedule = {schedules}
"""
_COSTS = "F_ms = 20\nI_ms = 20\nW_ms = [20, {stage_1}, 20]\n"
_TRACKED = """\
name = "pipeline"
device = "emulated"
schedule = "1f1b"
world_size = 3
num_microbatches = 4

[emulated]
costs = "costs.toml"

[measure]
warmup_steps = 1
steps = 3
"""


def _commit_of(subject: str, stage_1: int) -> str:
    costs = shlex.quote(_COSTS.format(stage_1=stage_1))
    return f"printf %s {costs} > costs.toml; git add -A; {_COMMIT} -m {shlex.quote(subject)}"


_PAST = (
    "git init -q -b main",
    "printf 'results/\\nreports/\\n' > .gitignore",
    _commit_of("A pipeline", 20),
    f"{_COMMIT} --allow-empty -m 'Say what it is'",
    _commit_of("Exact attention in stage 1", 30),
    f"{_COMMIT} --allow-empty -m 'Say it better'",
)
"""The repository of the exhibit on commits; made once, and not shown."""

EXHIBITS = (
    Exhibit(
        "afab-against-1f1b",
        "AFAB against 1F1B",
        "Two cases of a real transformer on two CPU ranks, five launches of each: does 1F1B match "
        "AFAB's throughput, and what does it save?",
        (
            "ppbench sweep quick --set measure.launches=5 --no-report",
            "ppbench report -o report.html",
            "ppbench compare --across schedule -o compared.html",
        ),
        {"the report": "report.html", "the comparison": "compared.html"},
        picture="ppbench figure pareto -o picture.svg",
    ),
    Exhibit(
        "every-schedule",
        "Every schedule on four ranks",
        "Every schedule with emulated stages of equal time: measured bubbles beside the theory.",
        (
            (
                "ppbench sweep schedules_emulated --set world_size=4 "
                "--set num_microbatches=8 --no-report"
            ),
            "ppbench report -o page.html",
        ),
        {"the report": "page.html"},
        picture="ppbench figure bubble -o picture.svg",
    ),
    Exhibit(
        "memory",
        "What a rank must hold",
        "Peak memory of AFAB and 1F1B, with and without recomputation, measured beside predicted.",
        (
            "ppbench sweep memory --only num_microbatches=8 --no-report",
            "ppbench report -o page.html",
        ),
        {"the report": "page.html"},
        picture="ppbench figure memory -o picture.svg",
    ),
    Exhibit(
        "slow-stage",
        "A slow stage, measured above planned",
        "Stage 2 takes 1.6 times as long as the others. The timeline shows who waits for it; the "
        "plan below is the same program replayed with the run's own mean costs.",
        (
            "ppbench sweep slow_stage.toml --no-report",
            "ppbench timeline last --planned -o page.html",
        ),
        {"the timeline": "page.html"},
        {
            "slow_stage.toml": _EMULATED.format(
                name="slow_stage", ranks=4, microbatches=8, forward="[20, 20, 32, 20]", more="",
                schedules='["1f1b"]',
            )
        },
        "ppbench figure timeline last --planned --path -o picture.svg",
    ),
    Exhibit(
        "past-its-time",
        "A run that ended past its time",
        "Stage 2 needs a minute for a forward and the run may take eight seconds: every rank is "
        "drawn up to the moment at which the supervisor ended the run.",
        (
            "ppbench sweep stuck.toml --no-report",
            "ppbench timeline last -o page.html",
        ),
        {"the timeline": "page.html"},
        {
            "stuck.toml": _EMULATED.format(
                name="stuck", ranks=4, microbatches=8, forward="[20, 20, 60000, 20]",
                more="timeout_s = 8\n", schedules='["1f1b"]',
            )
        },
        "ppbench figure timeline last -o picture.svg",
    ),
    Exhibit(
        "over-commits",
        "Throughput over commits",
        "Four commits, of which the third makes stage 1 slower, measured by `ppbench backfill`.",
        (
            "ppbench backfill HEAD~3..HEAD pipeline.toml --launches 3",
            "ppbench history -o page.html",
        ),
        {"the history": "page.html"},
        {"pipeline.toml": _TRACKED},
    ),
)  # fmt: skip
_MAY_FAIL = {"ppbench sweep stuck.toml --no-report"}
"""Commands whose run is meant to fail."""


def make(folder: Path) -> Path:
    """Run every exhibit below a folder, and return the folder of the pages."""
    pages = folder / "pages"
    shutil.rmtree(pages, ignore_errors=True)
    for exhibit in EXHIBITS:
        work = folder / exhibit.name
        _prepare(exhibit, work)
        for command in exhibit.commands:
            _run(command, work)
        kept = pages / "gallery" / exhibit.name
        kept.mkdir(parents=True)
        for file in exhibit.pages.values():
            shutil.copy(work / file, kept)
        if exhibit.picture and _has_browser():
            _run(exhibit.picture, work)
            shutil.copy(work / "picture.svg", kept)
    return pages


def _has_browser() -> bool:
    return any(map(shutil.which, ("chromium", "chromium-browser", "google-chrome")))


def _prepare(exhibit: Exhibit, work: Path) -> None:
    is_new = not work.exists()
    work.mkdir(parents=True, exist_ok=True)
    for name, text in exhibit.files.items():
        (work / name).write_text(text)
    if is_new and exhibit.name == "over-commits":
        for command in _PAST:
            _run(command, work)


def _run(command: str, work: Path) -> None:
    """Run a command line of a page; `ppbench` is the one of this environment."""
    print(f"{work.name}: {command}", file=sys.stderr)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "GIT_CEILING_DIRECTORIES": str(work.parent)}
    done = subprocess.run(  # noqa: S602  # lines of this file
        command, shell=True, cwd=work, env=env, stdout=sys.stderr, check=False
    )
    if done.returncode and command not in _MAY_FAIL:
        raise SystemExit(f"{work.name}: {command}: ended with {done.returncode}")


def listing(pages: Path | None) -> str:
    """The gallery as Markdown: every exhibit with its commands, and its page where there is one."""
    return "\n\n".join("\n\n".join(_part(exhibit, pages)) for exhibit in EXHIBITS)


def _part(exhibit: Exhibit, pages: Path | None) -> Iterator[str]:
    yield f"## {exhibit.title}"
    yield exhibit.text
    folder = f"gallery/{exhibit.name}"
    addresses = {label: f"{folder}/{file}" for label, file in exhibit.pages.items()}
    if pages:
        links = (f'<a href="{address}">{label}</a>' for label, address in addresses.items())
        yield f"<p>Open {' or '.join(links)}</p>"
        if (pages / folder / "picture.svg").exists():
            first = next(iter(addresses.values()))
            image = f'<img src="{folder}/picture.svg" alt="{exhibit.title}">'
            yield f'<p><a href="{first}">{image}</a></p>'
    yield f"```sh\n{chr(10).join(exhibit.commands)}\n```"
    for name, text in exhibit.files.items():
        yield f"`{name}`:\n\n```toml\n{text}```"
