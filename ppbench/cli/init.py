"""`ppbench init`: a first sweep file with comments, sized for this machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

from ppbench.cli.commands import MEASURE
from ppbench.cli.declare import argument
from ppbench.cli.emit import answers
from ppbench.display.commands import command
from ppbench.display.document import Result
from ppbench.errors import UsageError


@answers("init", MEASURE, 1)
def init(
    file: Annotated[Path, argument("FILE", "The file to write.")] = Path("sweep.toml"),
) -> Result:
    """Write a commented sweep file for this machine, and list its cases."""
    from ppbench.cli.sweep import cases_of
    from ppbench.config.reader import read_sweep
    from ppbench.config.template import sweep_template
    from ppbench.display.units import counted
    from ppbench.run.machine.environment import default_device, read_environment
    from ppbench.run.sweep.plan import Choice

    environment = read_environment()
    num_gpus = len(environment.gpus) if default_device() == "cuda" else 0
    try:
        with file.open("x", encoding="utf-8") as opened:
            opened.write(sweep_template(file.stem, environment.num_cores, num_gpus))
    except FileExistsError:
        raise UsageError(f"{file}: is there already and is not overwritten; name another") from None
    except OSError as error:
        raise UsageError(f"{file}: cannot be written: {error.strerror}") from None
    read = read_sweep(file, [], default_device())
    cases = cases_of(read, Choice())
    launches = counted(read.cases[0][1].launches, "launch")
    asides = [
        f"{file}: {counted(len(read.cases), 'case')}, {launches} of each",
        f"measure them: {command('sweep', str(file))}",
    ]
    return replace(cases, asides=asides)
