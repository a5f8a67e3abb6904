"""Runs every check that this machine has the GPUs for, and makes the page of their findings.

    python -m benchmarks.gpu [--only NAME...]

Without a GPU it says so, writes nothing and ends with exit code 0. A missed bound is a result, not
a failure. Each check runs in a process of its own, `… --measure NAME FILE`, which is ended after
its time.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

import torch

from benchmarks.gpu import CHECKS, TIME_LIMIT_S, Check
from benchmarks.gpu.findings import Finding
from benchmarks.gpu.page import page_of
from benchmarks.surroundings import ROOT, Surroundings, read_surroundings
from engine.run import device as devices

PAGE = ROOT / "benchmarks" / "gpu.md"
RESULT = ROOT / "benchmarks" / "gpu.json"
LAST_CHARACTERS = 300

Measure = Callable[[Check, float], object]
"""Runs a check for at most so many seconds; raises CheckError."""


class CheckError(RuntimeError):
    """A check that ended without measurements."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    if options.measure:
        name, path = options.measure
        _measure_here(name, Path(path), options.device)
        return 0
    num_gpus = devices.count()
    if not num_gpus:
        print("no GPU here: nothing is measured, and no page is written")
        return 0
    names = options.only or [check.name for check in CHECKS]
    checks = [check for check in CHECKS if check.name in names]
    began, machine = time.monotonic(), machine_in_words(num_gpus, read_surroundings())
    measure = functools.partial(measure_aside, device=devices.kind() or "cpu")
    findings: list[Finding] = []
    for finding in findings_of(checks, num_gpus, measure, time.monotonic):
        findings.append(finding)
        print(f"{time.monotonic() - began:4.0f} s  {finding.in_words()}", flush=True)
        reached = {finding.check for finding in findings}
        missing = [
            Finding.not_run(
                check.name,
                "left out by --only" if check not in checks else "the run ended before it",
            )
            for check in CHECKS
            if check.name not in reached
        ]
        write(machine, [*findings, *missing])  # what is known is kept, whatever happens next
    print(f"wrote {PAGE.name} in {time.monotonic() - began:.0f} s")
    return 0


def _parser() -> argparse.ArgumentParser:
    names = [check.name for check in CHECKS]
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME")
    parser.add_argument("--measure", nargs=2, metavar=("NAME", "FILE"), help="used by itself")
    parser.add_argument("--device", default="cuda", help="of --measure")
    return parser


def findings_of(
    checks: Sequence[Check], num_gpus: int, measure: Measure, now_s: Callable[[], float]
) -> Iterator[Finding]:
    """The findings of each check, in order, as they come."""
    deadline_s = now_s() + TIME_LIMIT_S
    for check in checks:
        left_s = deadline_s - now_s()
        if num_gpus < check.num_gpus:
            yield Finding.not_run(check.name, f"needs {check.num_gpus} GPUs; there is {num_gpus}")
        elif left_s <= 0:
            yield Finding.not_run(check.name, f"no time was left of {TIME_LIMIT_S} s")
        else:
            yield from _findings_of(check, min(check.limit_s, left_s), measure)


def _findings_of(check: Check, limit_s: float, measure: Measure) -> Iterator[Finding]:
    try:
        yield from module_of(check.name).judge(measure(check, limit_s))
    except CheckError as error:
        yield Finding.not_run(check.name, str(error))


def module_of(name: str) -> ModuleType:
    """The module of a check, with `measure` and `judge`."""
    return importlib.import_module(f"benchmarks.gpu.{name}")


def measure_aside(check: Check, limit_s: float, device: str = "cuda") -> object:
    """Run a check in a process of its own, in a group that is ended with it.

    Raises CheckError where it takes longer, or fails.
    """
    with tempfile.TemporaryDirectory(prefix="ppbench-gpu-") as folder:
        path, log = Path(folder) / "measurements", Path(folder) / "log"
        command = [sys.executable, "-m", "benchmarks.gpu", "--device", device]
        with log.open("w") as output:
            process = subprocess.Popen(
                [*command, "--measure", check.name, str(path)],
                cwd=ROOT,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            _wait(process, check, limit_s)
        if process.returncode != 0 or not path.exists():
            end = " ".join(log.read_text(errors="replace")[-LAST_CHARACTERS:].split())
            raise CheckError(f"ended with exit code {process.returncode}: {end}")
        measured: object = pickle.loads(path.read_bytes())  # noqa: S301  # of our own process
        return measured


def _wait(process: subprocess.Popen[bytes], check: Check, limit_s: float) -> None:
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        raise CheckError(f"{check.name} took longer than {limit_s:.0f} s") from None
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _measure_here(name: str, path: Path, device_type: str) -> None:
    if device_type == "cpu":
        torch.set_num_threads(1)
    device = torch.device("cpu") if device_type == "cpu" else torch.device(device_type, 0)
    path.write_bytes(pickle.dumps(module_of(name).measure(device)))


def machine_in_words(num_gpus: int, surroundings: Surroundings) -> str:
    """The GPUs and what else the figures depend on."""
    name = devices.name_of(torch.device(devices.kind() or "cpu", 0))
    cuda = f", CUDA {torch.version.cuda}" if torch.version.cuda else ""
    return f"{num_gpus} x {name}{cuda}; {surroundings.in_words()}"


def write(machine: str, findings: Sequence[Finding], folder: Path | None = None) -> None:
    """Write the findings as JSON, and the page of that JSON."""
    result, page = (RESULT, PAGE) if folder is None else (folder / RESULT.name, folder / PAGE.name)
    values = {"machine": machine, "findings": [asdict(finding) for finding in findings]}
    text = json.dumps(values, indent=1, ensure_ascii=False)
    result.write_text(text + "\n", encoding="utf-8")
    read = [Finding.from_json(one) for one in json.loads(text)["findings"]]
    page.write_text(page_of(machine, read), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
