"""`ppbench env`: the hardware and software that timings depend on."""

from __future__ import annotations

from ppbench.cli.commands import MEASURE
from ppbench.cli.emit import answers
from ppbench.display.document import Facts, Result
from ppbench.display.rows import Record


@answers("env", MEASURE, 5)
def env() -> Result:
    """Show the hardware and software that timings depend on."""
    import os
    from dataclasses import asdict

    from engine import device_variables
    from ppbench.run.machine.environment import default_device, read_environment

    environment, device = read_environment(), default_device()
    fingerprint = environment.fingerprint(device, num_ranks=1, threads_per_rank=1)
    variables = dict(os.environ)
    device_variables.prepare(variables)
    values = {
        **asdict(environment),
        "device_variables": device_variables.recorded(variables),
        "refused_variable": device_variables.refused(variables),
        "default_device": device,
        "fingerprint": fingerprint,
    }
    return Result([Facts(values)], Record(values), key="")
