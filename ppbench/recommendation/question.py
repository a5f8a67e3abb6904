"""What to run: a plan for a sweep file's model, on the devices that its `[plan]` describes.

    plan = ppbench.plan("mine.toml")
    plan.first.configuration        # what to run
    plan.frame                      # the best few, and 1F1B
    plan.sentences                  # the same in words

The costs are measured here, layer by layer, or are read from a file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from engine.model.descriptions import Problem
from ppbench.config.case import Case, PlanSettings
from ppbench.config.programs import identity_of, sharding_of, slices_of
from ppbench.config.reader import read_sweep
from ppbench.config.sweep import Sweep, note_unmet
from ppbench.planning.cost_file import read_costs_file
from ppbench.planning.cost_set import CostSet
from ppbench.planning.handover import Handover, case_of, chosen_case, write_handover
from ppbench.planning.plan import AUTO, NoPlanError, Plan, PlanRequest, Proposal
from ppbench.planning.planner import make_plan
from ppbench.planning.replicas import unplanned
from ppbench.planning.search import OnProgress
from ppbench.run.costs import costs_here, of_one_replica
from ppbench.run.machine.environment import default_device

SIZES = (1, 2, 4, 8)
"""Microbatch sizes that are measured where none are asked for."""
_DECISIVE = (
    *("model_preset", "model_weights", "model_dtype", "model_split", "model_split_points"),
    *("model_layers", "model_before_layers", "model_after_layers"),
    *("replicas", "sharding_policy", "seq_len", "device", "mode"),
    *("slices_number", "slices_lengths", "slices_attention"),
    *("train_optimizer", "train_autocast", "train_compile", "launch_threads_per_rank"),
)
"""Settings of the cases that a plan is made for: they must be the same in all."""


def plan(
    file: str | Path | Sweep,
    overrides: Sequence[str] = (),
    *,
    results: str | Path = "results",
    effort: float = 1.0,
    remeasure: bool = False,
    on_progress: OnProgress = lambda _what, _done, _all: None,
) -> Plan:
    """The best pipelines for the model of a sweep file, within what its `[plan]` says.

    `file` may be one that was read with these `overrides`, which are `KEY=VALUE`.
    `effort` is proportional to the time of the search.
    Measures the costs of the model's layers here, and keeps them in the folder `results`, unless
    that has them (then only with `remeasure`), or `plan.costs` says where they are from.
    Raises SweepFileError for what cannot be, with the place, also where nothing fits: then with
    the least memory that would do.
    """
    sweep = file if isinstance(file, Sweep) else read_question(file, overrides)
    request, asked = request_of(sweep), sweep.cases[0][0]
    kind, _, name = sweep.plan.costs.partition(":")
    if kind == "file":
        costs = read_costs_file(Path(name))
    else:
        costs = _measured(asked, request, Path(results), on_progress, remeasure=remeasure)
    costs.check_is_of(asked.model_preset, asked.model_dtype, request.seq_len, asked.train_optimizer)
    try:
        found = make_plan(request, of_one_replica(costs, asked), on_progress, effort)
    except NoPlanError as error:
        problem = Problem(f"plan.{error.key}", str(error))
        raise sweep.said.error_of(problem.key, (), problem.message) from error
    if costs.is_busy:
        how = "" if kind == "file" else ", with --remeasure"
        text = (
            "Other processes kept more than a tenth of the cores busy while the costs were "
            "measured, so the prediction may be far off: stop them, and measure the costs again"
        )
        found = replace(found, notes=(*found.notes, f"{text}{how}."))
    if request.replicas == 1:
        return found
    text = (
        f"That is each of {request.replicas} replicas, which share by {request.sharding}; tokens "
        "are those of all. What they sum and gather is counted at the bandwidth of the link, and "
        "as if computations hid nothing of it."
    )
    return replace(found, notes=(*found.notes, text))


def read_question(file: str | Path, overrides: Sequence[str] = ()) -> Sweep:
    """Read a sweep file that a plan can be made for. Raises SweepFileError."""
    sweep = read_sweep(Path(file), overrides, default_device(), is_question=True)
    note_unmet(sweep)
    problem = next(problems_of_plan(sweep), None)
    if problem is not None:
        raise sweep.said.error_of(problem.key, (), problem.message)
    return sweep


def hand_over(plan: Plan, sweep: Sweep, folder: Path, proposal: Proposal | None = None) -> Handover:
    """Write a proposal of a sweep file's plan for those who will run it, into a folder.

    It is the first choice unless another is given. The case's other settings go into the sweep
    file. Raises UsageError.
    """
    one, (case, measure) = proposal or plan.first, chosen_case(plan, sweep)
    case = case_of(one.configuration, case, folder / f"{sweep.name}.csv")
    return write_handover(case, one.program, folder, sweep.name, measure)


def request_of(sweep: Sweep) -> PlanRequest:
    """What a sweep file asks for."""
    case, settings = sweep.cases[0][0], sweep.plan
    own = sweep.facts[identity_of(case)].targets_per_sample  # of a factory's own batches
    assert isinstance(case.seq_len, int)
    given = PlanRequest(
        settings.ranks or (case.world_size,),
        settings.memory_bytes,
        batch_of(case, settings) // case.replicas,
        own or case.seq_len,
        stages_per_rank=settings.stages_per_rank,
        microbatch_sizes=settings.microbatch_sizes,
        recompute=settings.recompute,
        replicas=case.replicas,
        sharding=case.sharding_policy,
        meets=case.meets,
        slices=slices_of(case),
    )
    return replace(given, schedules=settings.schedules) if settings.schedules else given


def batch_of(case: Case, settings: PlanSettings) -> int:
    """The sequences of a step, of all replicas."""
    of_one = case.num_microbatches * case.train_microbatch_size
    return settings.global_batch or case.replicas * of_one


def problems_of_plan(sweep: Sweep) -> Iterator[Problem]:
    """What cannot be planned, whatever the costs are."""
    case, settings = sweep.cases[0][0], sweep.plan
    for name in _DECISIVE:
        values = {getattr(one, name) for one, _ in sweep.cases}
        if len(values) > 1:
            key = name.replace("_", ".", 1) if "_" in name and name != "seq_len" else name
            text = f"has {len(values)} values in the grid; a plan is for one, as with --set {key}=…"
            yield Problem(key, text)
    if not isinstance(case.seq_len, int):
        yield Problem("seq_len", 'is "variable"; a plan needs a number of tokens, such as 128')
    if not case.trains:
        yield Problem("mode", f'"{case.mode}" has no backward to plan for; expected "train"')
    if case.is_emulated:
        yield Problem("device", '"emulated" has no layers to plan for; expected cpu, cuda or xpu')
    num_ranks = len({case.world_size for case, _ in sweep.cases})
    if not settings.ranks and num_ranks > 1:
        yield Problem("plan.ranks", f"is left out, and the grid has {num_ranks}; give them here")
    num_batches = len({batch_of(case, settings) for case, _ in sweep.cases})
    if num_batches > 1:
        text = f"is left out, and the grid has {num_batches}; a plan is for one: give it here"
        yield Problem("plan.global_batch", text)
    if case.replicas > 1:
        if found := unplanned(sharding_of(case), max(settings.stages_per_rank)):
            yield Problem(*found)
        if (batch := batch_of(case, settings)) % case.replicas:
            text = f"{batch} sequences cannot be shared by {case.replicas} replicas"
            yield Problem("plan.global_batch", f"{text}; give a multiple")
    batch, sizes = batch_of(case, settings) // case.replicas, settings.microbatch_sizes
    if sizes and not any(batch % size == 0 for size in sizes):
        listed = ", ".join(map(str, sizes))
        text = f"{listed}: none divides the global batch of {batch} sequences"
        yield Problem("plan.microbatch_sizes", f"{text}; give a divisor of it")
    if settings.recompute == "all" and case.train_compile:
        yield Problem("plan.recompute", '"all" is not possible with train.compile')


def _measured(
    case: Case, request: PlanRequest, results: Path, on_progress: OnProgress, *, remeasure: bool
) -> CostSet:
    """Costs measured here, of every size of microbatch that the plan may choose."""
    sizes = request.microbatch_sizes or tuple(
        size
        for size in SIZES
        if request.global_batch % size == 0
        and (size == 1 or request.global_batch // size >= min(request.ranks))
    )
    modes = {AUTO: (False, True), "none": (False,), "all": (True,)}[request.recompute]
    settings = tuple((size, mode) for size in sizes for mode in modes)
    lines = 0

    def tell(line: str) -> None:
        nonlocal lines
        lines += 1
        on_progress(line, lines, 0)

    on_progress("measuring the costs of layers", 0, 1)
    return costs_here(case, request.seq_len, settings, results, tell, remeasure=remeasure)
