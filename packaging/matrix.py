"""Tries ppbench with the oldest and the newest of everything that it may be installed with.

    make matrix                                      # all rows, each in a fresh environment
    python packaging/matrix.py --only oldest         # some of them; the others' rows stay
    python packaging/matrix.py --keep FOLDER         # the environments stay there, for later

Each row installs the wheel, runs a first sweep with its report in an empty folder, and then those
tests that depend most on other packages. docs/reference/versions.md has the table; a cell is the
version that was installed, the last one what became of it.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference" / "versions.md"
SHOWN = ("torch", "transformers", "numpy", "pandas", "pyarrow", "duckdb", "plotly", "typer")
TESTS = ("tests/engine/model", "tests/engine/run", "tests/ppbench/external", "tests/ppbench/store")
FOR_TESTS = ("click>=8.2", "hypothesis", "pytest", "pytest-timeout", "pytest-xdist")
FIRST_SWEEP = (
    "ppbench sweep quick",
    "ppbench report",
    "ppbench schedules draw 1f1b --ranks 4 --microbatches 8",
    "ppbench query 'select count(*) from runs'",
)


@dataclasses.dataclass(frozen=True)
class Row:
    """One environment: an interpreter, and which version of each dependency it has."""

    name: str
    python: str
    pins: str  # "oldest" of each bound, "constraints" as in the file, or "newest"


ROWS = (
    Row("oldest", "python3.11", "oldest"),
    Row("as tested", "python3.11", "constraints"),
    Row("newest", "python3.11", "newest"),
    Row("newest, 3.13", "python3.13", "newest"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=[row.name for row in ROWS])
    parser.add_argument("--keep", type=Path, help="folder of the environments")
    asked = parser.parse_args()
    rows = [row for row in ROWS if not asked.only or row.name in asked.only]
    with tempfile.TemporaryDirectory() as name:
        folder = asked.keep or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
        subprocess.run(build, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        (wheel,) = folder.glob("ppbench_torch-*.whl")
        lines = [tried(row, folder / row.name.replace(" ", "-"), wheel) for row in rows]
    write_page(lines)
    failed = [line[0] for line in lines if not line[-1].startswith("ok")]
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


def requirements(kind: str) -> list[str]:
    """What pip is told of the dependencies, extras and test tools besides the wheel."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    names = ("fast", "gpu", "hf", "images", "slurm")
    bounds = [*project["dependencies"], *(bound for name in names for bound in extras[name])]
    if kind == "oldest":  # of the version that the bound names, the newest patch
        bounds = [re.sub(r">=(\d+\.\d+)(\.\d+)?$", r"==\1.*", bound) for bound in bounds]
    return [*bounds, *FOR_TESTS]


def tried(row: Row, folder: Path, wheel: Path) -> list[str]:
    """Make the environment, try it, and return the row's cells."""
    python = shutil.which(row.python)
    if python is None:
        return [row.name, row.python, *("" for _ in SHOWN), "not tried: no such Python here"]
    bin_folder = folder / "bin"
    if not bin_folder.is_dir():
        subprocess.run([python, "-m", "venv", str(folder)], check=True)
    pip = [str(bin_folder / "python"), "-m", "pip", "install", "--quiet", "--no-compile"]
    constraint = ["--constraint", "constraints.txt"] if row.pins == "constraints" else []
    wanted = [f"{wheel}", *requirements(row.pins)]
    began, log = time.monotonic(), folder / "matrix.log"
    with log.open("w") as output:

        def run(command: Sequence[str], where: Path) -> bool:
            own = {"PATH": f"{bin_folder}:{os.environ['PATH']}", "PYTHONPATH": ""}
            print("$", *command, file=output, flush=True)
            done = subprocess.run(
                command,
                cwd=where,
                stdout=output,
                stderr=output,
                env={**os.environ, **own},
                check=False,
            )
            return done.returncode == 0

        outcome = "not installed"
        again = [*pip, "--force-reinstall", "--no-deps", str(wheel)]  # of the same version
        if run([*pip, *constraint, *wanted], ROOT) and run(again, ROOT):
            outcome = "first sweep fails"
            with tempfile.TemporaryDirectory() as empty:
                if all(run(["sh", "-c", command], Path(empty)) for command in FIRST_SWEEP):
                    outcome = "tests fail"
            command = [str(bin_folder / "python"), "-m", "pytest", "-q", "-n", "2", *TESTS]
            if outcome == "tests fail" and run([*command, "--dist", "loadfile"], ROOT):
                outcome = "ok"
    tests = re.findall(r"(\d+ passed|\d+ failed)", log.read_text())
    outcome = ", ".join([outcome, *tests[-2:]])
    print(f"{row.name}: {outcome}; {time.monotonic() - began:.0f} s, {log}", flush=True)
    listing = subprocess.run(
        [*pip[:3], "list", "--format=freeze"], capture_output=True, text=True, check=True
    ).stdout
    versions = dict(line.split("==") for line in listing.split() if "==" in line)
    version = subprocess.run(
        [str(bin_folder / "python"), "-V"], capture_output=True, text=True, check=True
    ).stdout.split()[1]
    return [row.name, version, *(versions.get(name, "") for name in SHOWN), outcome]


def write_page(lines: Sequence[Sequence[str]]) -> None:
    """Put the rows into the page's table; those that were not tried stay as they are."""
    head, _, rest = PAGE.read_text().partition("<!-- the table -->\n")
    before, _, tail = rest.partition("<!-- its end -->")
    rows = {line.split("|")[1].strip(): line for line in before.splitlines() if "|" in line}
    rows |= {cells[0]: f"| {' | '.join(cells)} |" for cells in lines}
    heads = ["", "Python", *SHOWN, "outcome"]
    table = [f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads))]
    table += [rows[row.name] for row in ROWS if row.name in rows]
    text = "\n".join(table)
    PAGE.write_text(f"{head}<!-- the table -->\n{text}\n<!-- its end -->{tail}")


if __name__ == "__main__":
    main()
