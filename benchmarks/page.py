"""Makes `benchmarks/README.md` of the results, all of one clean commit.

python -m benchmarks.page
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from benchmarks.claims import CLAIMS, GPU_CHECKS, OTHERS, Claim, Standing
from benchmarks.rows import RESULTS, ROOT, Result, Row

PAGE, GPU_PAGE = (ROOT / "benchmarks" / name for name in ("README.md", "gpu.md"))
NOT_MEASURED = "not measured at this commit"
HEAD = """\
# Benchmarks

`python -m benchmarks.page` makes this page of `results/*.json`, which have every figure; do not
edit it. `make bench` measures all rows within an hour, on a quiet machine; a row's command one row.

**How it is measured.** Two things are compared in turns, in the order of rounds of `ppbench sweep`,
so that whatever slows the machine slows both. Launches start new processes, because a start decides
something too. The judge of `ppbench compare` says the ratio and its 95 % interval (in brackets). A
share has its exact interval, a median that of order statistics. What is counted or computed, or the
largest of all, has none. A goal is *held* if the whole interval keeps it, *missed* if the whole
interval lies beyond it, else *not decided*. All rows are of one commit without changes.
"""
GPU_HEAD = """\
# On a GPU

This page is made by `make gpu` from `results/gpu.*.json`; do not edit it. Every figure has a
bound. It is `held` or `missed`; it is `not decided` where the figure is not known well enough.
"""


class MixedResultsError(Exception):
    """The results are not of one clean commit."""


def main(page: Path = PAGE) -> int:
    """Write the page of the benchmarks, or that of a GPU."""
    try:
        text = (gpu_page_of if page == GPU_PAGE else page_of)(RESULTS)
    except MixedResultsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    page.write_text(text, encoding="utf-8")
    print(f"wrote benchmarks/{page.name}")
    return 0


def page_of(folder: Path) -> str:
    """The page of the results in a folder. Raises MixedResultsError."""
    results = _read(folder, (*CLAIMS, *OTHERS), "make bench")
    table = ["| claim | result [95 %] | goal | | machine | date |", "|---|---|---|---|---|---|"]
    for claim in CLAIMS:
        words, result = f"{claim.words}: `{claim.command}`", results.get(claim)
        cells = [words, NOT_MEASURED, str(claim.goal or ""), "", "", ""]
        if result is not None:
            here = result.surroundings
            cells = [words, *_cells(result.rows[0]), here.machine, here.date]
        table.append(_line(cells))
    missed = [
        f"- {claim.name}: {row.name}: {row.amount}, goal {row.goal}"
        for claim, result in results.items()
        for row in result.rows
        if row.standing is Standing.missed
    ]
    others = ", ".join(f"`{claim.name}`" for claim in OTHERS)
    last = f"Also measured, in `results/`: {others}. What only a GPU can prove: `make gpu`, "
    missed = ["## Missed", "", *missed, ""] if missed else []
    parts = [HEAD, _surroundings(results), *table, "", *missed, f"{last}[its page](gpu.md).", ""]
    return "\n".join(parts)


def gpu_page_of(folder: Path) -> str:
    """The page of the results of the checks on a GPU. Raises MixedResultsError."""
    results = _read(folder, GPU_CHECKS, "make gpu")
    table = ["| check | figure | value | bound | |", "|---|---|---|---|---|"]
    for claim in GPU_CHECKS:
        if claim not in results:
            table.append(_line([claim.part, claim.words, NOT_MEASURED, "", ""]))
            continue
        table += [_line([claim.part, row.name, *_cells(row)]) for row in results[claim].rows]
    return "\n".join([GPU_HEAD, _surroundings(results), *table, ""])


def _read(folder: Path, claims: Iterable[Claim], command: str) -> dict[Claim, Result]:
    """The results of these claims that are there, of one clean commit."""
    results = {}
    by_state: dict[str, list[str]] = {}
    for claim in claims:
        file = folder / f"{claim.name}.json"
        if file.exists():
            results[claim] = Result.from_json(file.read_text("utf-8"))
            here = results[claim].surroundings
            state = f"{here.commit or 'no commit'}"[:12] + " with changes" * here.is_dirty
            by_state.setdefault(state, []).append(claim.name)
    if len(by_state) > 1 or any("changes" in state for state in by_state):
        found = "; ".join(f"{', '.join(names)}: {state}" for state, names in by_state.items())
        raise MixedResultsError(
            f"benchmarks/results: {found}; expected one commit without changes; commit, then run "
            f"{command}, or delete the files of other commits"
        )
    return results


def _surroundings(results: Mapping[Claim, Result]) -> str:
    """The commit and the software of all results; empty without any."""
    here = [result.surroundings for result in results.values()]
    every = {(str(one.commit)[:12], one.software) for one in here}
    return "".join(f"Commit `{commit}`; {software}.\n" for commit, software in sorted(every))


def _cells(row: Row) -> list[str]:
    return [row.amount, str(row.goal or ""), str(row.standing or "")]


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


if __name__ == "__main__":
    sys.exit(main())
