"""Combinations of valid settings that cannot run, found before anything starts.

Each check is a pure function that yields problems; the caller knows the file and the line. Of
runtimes, only our own are checked here; those of other packages refuse cases on the ranks.

Stages that a partition leaves without parameters are noted. A list of layers with a 0 in it is
deliberate, so it is not; the result of `model.partition = "measured"` is known only to the run,
which then has the caution `bare_stage`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from typing import Final

from engine.model.descriptions import Facts, Identity, Problem
from engine.model.local_files import LOCAL_KINDS, local_files, why_no_file
from engine.model.partition import Costs, PartitionError, balance, partition_layers
from engine.plan.lower import DEFAULT_LOOK_AHEAD, Policy
from engine.plan.rules import ProgramError
from engine.plan.schedules.registry import (
    CSV_PREFIX,
    ScheduleError,
    ShapeError,
    shape_of,
)
from ppbench.config.case import TIMES, VARIABLE, Case, Measure
from ppbench.config.programs import (
    identity_of,
    is_plain_preset,
    most_stages_per_rank,
    num_stages_of,
    program_of,
    prove,
    read_costs,
    sharding_of,
)
from ppbench.config.toml import brief, printable
from ppbench.runtimes import ENGINE

NUM_BYTE_VALUES = 256
_TIMES_GIVEN = "--set emulated.F_ms=2 --set emulated.I_ms=2 --set emulated.W_ms=2"
_NEED_DATASETS = ("files", "hf")


def problems_of_settings(
    case: Case, measure: Measure, *, is_of_this_tree: bool = True
) -> Iterator[Problem]:
    """Problems that do not depend on the model.

    With `is_of_this_tree` false the case runs where other files are, so files are not checked.
    """
    has_program = is_of_this_tree or not case.schedule.startswith(CSV_PREFIX)
    if has_program:
        yield from _of_schedule(case)
        yield from _of_split(case)
        yield from _of_memory_limit(case)
    yield from problems_of_runtime(case)
    yield from _of_sharding(case)
    if case.transfer_policy == "just_in_time" and case.transfer_look_ahead != DEFAULT_LOOK_AHEAD:
        message = 'applies only with transfer.policy = "early"'
        yield Problem("transfer.look_ahead", message)
    if has_program and (is_of_this_tree or not case.emulated_costs):
        yield from _of_emulation(case, measure)
    if has_program:
        given, num_stages = case.train_recompute_stages, num_stages_of(case)
        if given and len(given) != num_stages:
            message = (
                f"{brief(given)} has {len(given)} values for {num_stages} stages ({_shape(case)}); "
                "give true, false, or one of them for each stage; values to compare go into [grid]"
            )
            yield Problem("train.recompute", message)
    warmup, decay = case.train_lr_warmup_steps, case.train_lr_decay_steps
    if case.train_lr_schedule == "cosine" and decay <= warmup:
        message = (
            f'{decay} must be greater than train.lr_warmup_steps {warmup}: lr_schedule "cosine" '
            "reaches zero there"
        )
        yield Problem("train.lr_decay_steps", message)
    kind = case.data_source.partition(":")[0]
    if is_of_this_tree or kind not in LOCAL_KINDS:
        if kind in LOCAL_KINDS and (reason := look_at_files(case.data_source)[0]):
            yield Problem("data.source", f"{reason} (relative to the working directory)")
        if kind in _NEED_DATASETS and find_spec("datasets") is None:
            message = (
                f"{kind} needs the datasets package; install it with, in ppbench's folder: "
                "pip install -e '.[hf]'"
            )
            yield Problem("data.source", message)


def problems_of_fit(case: Case, facts: Facts, *, is_max_seq_len_set: bool) -> Iterator[Problem]:
    """Problems with this model, which may lower a `data.max_seq_len` left at its default."""
    if facts.problem is not None:
        yield facts.problem
        return
    is_variable = case.seq_len == VARIABLE
    longest = case.data_max_seq_len if case.seq_len == VARIABLE else case.seq_len
    most = facts.max_positions
    if most is not None and longest > most and (is_max_seq_len_set or not is_variable):
        key = "data.max_seq_len" if is_variable else "seq_len"
        message = f"{longest} is longer than the {most} positions of {case.model_preset}"
        yield Problem(key, message)
    partition = case.model_partition
    if not isinstance(partition, str) and facts.num_layers is not None:
        try:
            partition_layers(partition, facts.num_layers, num_stages_of(case))
        except PartitionError as error:
            reason = str(error).replace(str(list(partition)), brief(partition))
            message = f"{reason} (model {case.model_preset}, {_shape(case)})"
            yield Problem("model.partition", message)
    # Text without a tokenizer is read as bytes, as `stdlib` always is.
    size = None if case.data_source == "stdlib" else facts.tokenizer_size
    needed = NUM_BYTE_VALUES if size is None else size
    is_drawn = case.data_source == "synthetic"  # from the vocabulary itself
    vocab_size = None if is_drawn else facts.vocab_size
    if vocab_size is not None and vocab_size < needed:
        tokens = "text as bytes" if size is None else f"tokenizer {case.data_tokenizer}"
        message = f"{tokens} needs a vocabulary of {needed}; {case.model_preset} has {vocab_size}"
        is_chosen = size is not None and case.data_tokenizer != "auto"
        yield Problem("data.tokenizer" if is_chosen else "model.preset", message)
    kind, _, path = case.data_source.partition(":")
    if kind == "text" and size is None:
        num_bytes = look_at_files(case.data_source)[1]
        if num_bytes <= (1 if case.seq_len == VARIABLE else case.seq_len):
            message = f"{printable(path)} has {num_bytes} bytes; seq_len {case.seq_len} needs more"
            yield Problem("data.source", message)
    if case.replicas > 1 and facts.num_parameters == 0:
        message = f"{case.replicas} replicas share nothing: {case.model_preset} has no parameters"
        yield Problem("replicas", message)


def is_known_by_name(case: Case) -> bool:
    """Whether the model's fit to the case depends on no file."""
    source = case.data_source.partition(":")[0]
    is_program = case.schedule.startswith(CSV_PREFIX)
    return is_plain_preset(identity_of(case)) and not is_program and source not in LOCAL_KINDS


def _of_schedule(case: Case) -> Iterator[Problem]:
    """Check a registered schedule's shape; prove a program file correct."""
    if case.is_automatic:
        return
    try:
        if not case.schedule.startswith(CSV_PREFIX):
            shape_of(case.schedule, case.world_size, case.num_microbatches, case.stages_per_rank)
            return
        program = program_of(case)
        prove(program, case)
    except ShapeError as error:
        yield Problem(error.key, printable(str(error)))
    except ProgramError as error:
        yield Problem("schedule", str(error))
    except ScheduleError as error:
        yield Problem("schedule", f"{printable(str(error))} (relative to the working directory)")
    else:
        if program.has_transfers and case.transfer_policy != Policy.EARLY:
            message = f"{case.schedule} has its own transfers; remove transfer.policy"
            yield Problem("transfer.policy", message)
        most = most_stages_per_rank(program)
        if most != case.stages_per_rank:
            message = f"{case.schedule} has {most} stages on a rank, got {case.stages_per_rank}"
            yield Problem("stages_per_rank", message)


def _of_memory_limit(case: Case) -> Iterator[Problem]:
    limit, stages = case.memory_limit, case.stages_per_rank
    if limit == Case.memory_limit:
        return
    if not case.is_automatic:
        message = 'applies only with schedule = "auto", which keeps within it; got '
        message += case.schedule
    elif case.is_emulated and not limit.isdecimal():
        message = f"{brief(limit)}: emulated stages hold no bytes; give a number of activations"
    elif case.is_emulated and int(limit) < stages:
        message = (
            f"{limit} is less than any program needs: a rank holds one microbatch of each of its "
            f"{stages} stages; at least {stages}"
        )
    elif limit.isdecimal() and not case.is_emulated:
        message = f'{limit} has no unit; give a size, such as "{limit} GiB"'
    else:
        return
    yield Problem("memory_limit", message)


_ONLY_OF: Final = {
    "residency": "zero3",
    "look_ahead": "zero3",
    "every_backward": "zero2",
    "max_active_stages": "torch",
}
"""The policy that each further setting of `[sharding]` is for."""


def _of_sharding(case: Case) -> Iterator[Problem]:
    policy = case.sharding_policy
    if case.replicas == 1 and policy != Case.sharding_policy:
        message = f'"{policy}" is for replicas, of which there is 1; exclude it, or set replicas'
        yield Problem("sharding.policy", message)
    for name, owner in _ONLY_OF.items():
        field = f"sharding_{name}"
        if policy != owner and getattr(case, field) != getattr(Case, field):
            message = f'applies only with sharding.policy = "{owner}", got "{policy}"'
            yield Problem(f"sharding.{name}", message)
            return
    try:
        sharding_of(case)
    except ValueError as error:
        yield Problem("sharding.look_ahead", str(error))


def _of_emulation(case: Case, measure: Measure) -> Iterator[Problem]:
    if case.emulated_costs:
        try:
            read_costs(case.emulated_costs)
        except ValueError as error:
            yield Problem("emulated.costs", str(error))
            return
    given = {name.removeprefix("emulated_"): getattr(case, name) for name in TIMES}
    if not case.is_emulated:
        others = ("replica_factors", "jitter", "seed")
        given |= {name: getattr(case, f"emulated_{name}") for name in others}
        is_set = [*(["costs"] if case.emulated_costs else []), *filter(given.get, given)]
        if is_set:
            yield Problem(f"emulated.{is_set[0]}", 'applies only with device = "emulated"')
        return
    num_stages, num_links = num_stages_of(case), num_stages_of(case) - 1
    ops = ("F_ms", "I_ms", "W_ms")
    for name in ops:
        if not given[name]:
            message = f'"emulated" needs F_ms, I_ms and W_ms; emulated.{name} is missing: '
            yield Problem("device", message + _TIMES_GIVEN)
    for name, listed in given.items():
        what, num = ("link", num_links) if name == "link_ms" else ("stage", num_stages)
        if len(listed) > 1 and len(listed) != num:
            message = f"{len(listed)} times for {num} {what}s"
            if num < 2:
                message = f"{len(listed)} times, but {num_stages} stages have {num} {what}s"
            message += f"; give one number, or one for each {what}"
            yield Problem(f"emulated.{name}", message)
    if not any(any(given[name]) for name in ops):
        yield Problem("emulated.F_ms", "is 0, like I_ms and W_ms: nothing to measure")
    if (num := len(case.emulated_replica_factors)) not in (0, case.replicas):
        message = f"{num} factors for replicas = {case.replicas}; give one for each"
        yield Problem("emulated.replica_factors", message)
    if case.seq_len == VARIABLE:
        yield Problem("seq_len", 'cannot be "variable" with device = "emulated": no data is read')
    if case.model_partition == "measured":
        message = 'cannot be "measured" with device = "emulated": layers take no time of their own'
        yield Problem("model.partition", message)
    if measure.verify:
        message = 'cannot be true with device = "emulated": nothing is computed'
        yield Problem("measure.verify", message)


def _of_split(case: Case) -> Iterator[Problem]:
    num_points, num_stages = len(case.model_split_points), num_stages_of(case)
    if case.model_split != "trace":
        if num_points:
            yield Problem("model.split_points", 'applies only with model.split = "trace"')
        return
    if num_points == 0 and num_stages > 1:
        most = num_stages - 1
        message = f"is empty; {_shape(case)} needs at least 1 module to cut at, at most {most}"
        yield Problem("model.split_points", message)
    if num_points >= num_stages:
        message = (
            f"{num_points} split points make {num_points + 1} stages; {_shape(case)} "
            f"has {num_stages}"
        )
        yield Problem("model.split_points", message)
    if case.model_partition != "uniform":
        message = 'does not apply with model.split = "trace", where model.split_points decide'
        yield Problem("model.partition", message)


def _shape(case: Case) -> str:
    stages = f", stages_per_rank {case.stages_per_rank}" if case.stages_per_rank > 1 else ""
    return f"world_size {case.world_size}{stages}"


@functools.lru_cache(maxsize=16)
def look_at_files(source: str) -> tuple[str, int]:
    """Why a local source cannot be read, empty if it can; and the bytes of all its files.

    The answer is kept for the many cases of a grid; each sweep that is read forgets it.
    """
    try:
        files = local_files(source)
        for file in files:
            file.open("rb").close()
    except OSError as error:
        return f"{printable(str(error.filename))}: cannot be read: {error.strerror}", 0
    reason = "" if files else f"{why_no_file(source)}: {printable(source.partition(':')[2])}"
    return reason, sum(file.stat().st_size for file in files)


def notes_on_sources(cases: Iterable[Case], facts: Mapping[Identity, Facts]) -> list[str]:
    """A line on each local source: its files, bytes and, where text is bytes, its sequences.

    A sequence is as long as `seq_len`, and the token after its last one is its last target.
    How many tokens another tokenizer makes of a text is not known without reading all of it.
    """
    lengths: dict[str, set[int]] = {}
    for case in cases:
        kind = case.data_source.partition(":")[0]
        if kind not in LOCAL_KINDS:
            continue
        found = lengths.setdefault(case.data_source, set())
        known = facts.get(identity_of(case))
        is_bytes = kind == "text" and known is not None and known.tokenizer_size is None
        if is_bytes and isinstance(case.seq_len, int):
            found.add(case.seq_len)
    notes = []
    for source, found in lengths.items():
        num_files, num_bytes = len(local_files(source)), look_at_files(source)[1]
        files = f"{num_files:,} file{'s' if num_files != 1 else ''}"
        sequences = (f"{(num_bytes - 1) // n:,} sequences of {n:,} tokens" for n in sorted(found))
        notes.append(", ".join([f"{source}: {files}", f"{num_bytes:,} bytes", *sequences]))
    return notes


TORCH_SCHEDULES: Final = {
    "afab": "GPipe",
    "1f1b": "1F1B",
    "interleaved_1f1b": "Interleaved1F1B",
    "looped_bfs": "LoopedBFS",
    "interleaved_zb": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}
"""Our name -> torch's: the same order of actions."""
SPLIT: Final = ("interleaved_zb", "zbv", "dualpipev")
"""Schedules that split the backward."""


def problems_of_runtime(case: Case) -> Iterator[Problem]:
    """Problems of the case's runtime."""
    if case.runtime == ENGINE:
        return
    if case.replicas > 1 and case.runtime != "torch":
        message = f'{case.replicas} replicas need runtime = "{ENGINE}" or "torch"'
        yield Problem("runtime", f'{message}, got "{case.runtime}"')
        return
    if case.is_emulated:
        message = f'device = "emulated" needs runtime = "{ENGINE}"'
        yield Problem("runtime", f"{message}, got {case.runtime!r}".replace("'", '"'))
        return
    if case.runtime == "single":
        if case.world_size != 1:
            message = f'"single" has no pipeline and needs world_size 1, got {case.world_size}'
            yield Problem("runtime", message)
        elif case.schedule != "1f1b":
            message = (
                '"single" runs each microbatch forward and backward, which on one rank is "1f1b"; '
                f'got schedule "{case.schedule}"'
            )
            yield Problem("runtime", message)
    if case.runtime != "torch":
        return
    if case.schedule not in TORCH_SCHEDULES:
        known = ", ".join(TORCH_SCHEDULES)
        yield Problem("runtime", f'"torch" has no schedule "{case.schedule}". It has: {known}')
        return
    if case.seq_len == VARIABLE:
        message = '"torch" fixes the shape of a microbatch; seq_len cannot be "variable"'
        yield Problem("runtime", message)
    if case.schedule == "1f1b" and case.num_microbatches < case.world_size:
        message = (
            f'"torch": its 1F1B needs num_microbatches >= world_size; got num_microbatches '
            f"{case.num_microbatches}, world_size {case.world_size}"
        )
        yield Problem("runtime", message)
    if case.train_compile and case.schedule in SPLIT:
        message = '"torch" cannot split the backward of compiled stages; remove train.compile'
        yield Problem("runtime", message)
    for name in ("policy", "look_ahead"):
        if getattr(case, f"transfer_{name}") != getattr(Case, f"transfer_{name}"):
            message = 'applies only with runtime = "engine": torch places its own receives'
            yield Problem(f"transfer.{name}", message)
    if case.replicas > 1 and case.sharding_policy in ("zero1", "zero2"):
        message = f'"torch" has no policy "{case.sharding_policy}". It has: none, ddp, zero3, torch'
        yield Problem("sharding.policy", message)
    most, usual = case.sharding_max_active_stages, Case.sharding_max_active_stages
    if case.replicas > 1 and most != usual:
        message = f'"torch" unshards {usual} stages, got {most}'
        yield Problem("sharding.max_active_stages", message)


def notes_on_stages(cases: Iterable[Case], facts: Mapping[Identity, Facts]) -> list[str]:
    """A sentence for each partition of a model that leaves stages with nothing to train."""
    notes: dict[str, None] = {}
    seen: set[tuple[Identity, str, int]] = set()
    for case in cases:
        identity, partition = identity_of(case), case.model_partition
        known = facts.get(identity)
        if isinstance(partition, tuple) or known is None or known.costs is None:
            continue
        key = (identity, partition, num_stages_of(case))
        if key in seen:
            continue
        seen.add(key)
        if bare := stages_without(known.costs, partition, num_stages_of(case)):
            stages = ", ".join(map(str, bare))
            have = f"stage {stages} has" if len(bare) == 1 else f"stages {stages} have"
            is_traced = case.model_split == "trace"
            remedy = "other split points" if is_traced else "another model.partition"
            note = (
                f"{case.model_preset} on {num_stages_of(case)} stages (world_size "
                f"{case.world_size}): {have} no parameters, so nothing is trained there; use fewer "
                f"ranks or stages per rank, or {remedy}"
            )
            notes[note] = None
    return list(notes)


def stages_without(costs: Costs, partition: str, num_stages: int) -> list[int]:
    """The stages without parameters; empty for a partition that only the run knows."""
    if partition == "measured":
        return []
    if partition == "parameters":
        layers = balance(costs, num_stages)
    else:
        layers = partition_layers(partition, len(costs.layers), num_stages)
    return [stage for stage, size in enumerate(costs.of_stages(layers)) if size == 0]
