"""The costs of a model's layers here: measured once, and kept in the folder of results."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

from engine.model.descriptions import CostRequest
from engine.plan.model_costs import ModelCosts
from ppbench.config.case import Case
from ppbench.config.programs import identity_of, is_plain_preset, sharding_of
from ppbench.planning.cost_file import read_costs_file, write_costs_file
from ppbench.planning.cost_measurement import measure_costs
from ppbench.planning.cost_set import MEASURED, CostSet, Setting
from ppbench.planning.replicas import of_replica
from ppbench.run.machine.environment import fingerprint_here
from ppbench.run.machine.measuring_code import MEASURING, OF_COSTS, code_hash
from ppbench.run.machine.sampler import Sample, host_of
from ppbench.run.machine.telemetry import is_disturbed, summarize
from ppbench.store import check_writable


def costs_here(
    case: Case,
    seq_len: int,
    settings: tuple[tuple[int, bool], ...],
    results: Path,
    tell: Callable[[str], None] = lambda _line: None,
    *,
    remeasure: bool = False,
) -> CostSet:
    """Costs measured here by this code: kept ones, or new ones, which are kept in a costs file.

    The file's name has a hash of all that costs depend on besides their settings. The sizes and
    times of the files of a model in a folder count: another model may get the same name. Those of a
    factory are measured each time, as its code may have changed. Raises UsageError.
    """
    wanted = CostRequest(
        identity_of(case),
        seq_len,
        settings,
        case.device,
        case.train_autocast,
        {
            "name": case.train_optimizer,
            "learning_rate": case.train_learning_rate,
            "weight_decay": case.train_weight_decay,
            "momentum": case.train_momentum,
        },
        case.launch_threads_per_rank,
    )
    model = Path(wanted.identity.spec.name)
    files = sorted(model.glob("*")) if not is_plain_preset(wanted.identity) else []
    states = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    machine = fingerprint_here(case.device, 1, case.launch_threads_per_rank)
    way = code_hash((*MEASURING, *OF_COSTS)), machine, states, replace(wanted, settings=())
    kept_in = results / "costs" / f"{model.name}-{sha256(repr(way).encode()).hexdigest()[:12]}.toml"
    kept: Mapping[Setting, ModelCosts] = {}
    was_busy = False
    is_factory = ":" in wanted.identity.spec.name
    if kept_in.exists() and not remeasure and not is_factory:
        costs = read_costs_file(kept_in)
        kept, was_busy = costs.by_setting, costs.is_busy
        if set(wanted.settings) <= set(kept):
            return replace(costs, origin=MEASURED)
    check_writable(results, "--results")  # before the work of measuring
    host = host_of(os.getpid())
    before = Sample(time.monotonic_ns(), host.read(), [], {})
    costs = measure_costs(wanted, tell)
    after = Sample(time.monotonic_ns(), host.read(), [], {})
    figures = summarize([before, after], [(before.time_ns, after.time_ns)], None)
    costs = replace(costs, is_busy=is_disturbed(figures))
    together = {**kept, **costs.by_setting}
    is_busy = was_busy or costs.is_busy
    write_costs_file(replace(costs, by_setting=together, is_busy=is_busy), kept_in, "--results")
    return costs


def of_one_replica(costs: CostSet, case: Case) -> CostSet:
    """The costs of one of a case's replicas, with what they sum and gather."""
    num_states = 2 if case.train_optimizer == "adamw" else int(case.train_momentum > 0)
    return of_replica(costs, case.replicas, sharding_of(case), num_states)
