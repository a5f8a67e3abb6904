"""Combinations of valid settings that cannot run, found before anything starts.

Each check is a pure function that yields problems; the caller knows the file and the line. Of
runtimes, only our own are checked here; those of other packages refuse cases on the ranks.

Stages that a partition leaves without parameters are noted. A list of layers with a 0 in it is
deliberate, so it is not; the result of `model.partition = "measured"` is known only to the run,
which then has the caution `bare_stage`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from engine.model.descriptions import Facts, Identity, Problem
from engine.model.local_files import LOCAL_KINDS, local_files, why_no_file
from engine.model.partition import PartitionError, balance, partition_layers, totals_of
from engine.packages import is_installed, missing
from engine.plan.lower import Policy
from engine.plan.program import TRAIN
from engine.plan.rules import ProgramError
from engine.plan.schedules.registry import (
    CSV_PREFIX,
    ScheduleError,
    ShapeError,
    check_slices,
    shape_of,
)
from ppbench.config.case import SETTINGS, TIMES, VARIABLE, Case, Measure, setting_of
from ppbench.config.conditions import Condition, Conditions, read_conditions
from ppbench.config.programs import (
    depth_of,
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

NUM_BYTE_VALUES = 256
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
_OF_TEXT: Final = (
    *("seq_len", "data.source", "data.tokenizer", "data.text_column", "data.max_seq_len"),
    "data.shuffle",
)
"""The keys that say on what text a model is trained."""
_ANY_MEASURE: Final = Measure()


def problems_of_settings(
    case: Case, measure: Measure, *, is_of_this_tree: bool = True
) -> Iterator[Problem]:
    """Problems that do not depend on the model.

    With `is_of_this_tree` false the case runs where other files are, so files are not checked.
    """
    has_program = is_of_this_tree or not case.schedule.startswith(CSV_PREFIX)
    if problem := _of_slices(case):
        yield problem
        return
    if has_program:
        yield from _of_schedule(case)
    yield from _of_needs(case, measure)
    yield from problems_of_runtime(case)
    try:
        sharding_of(case)
    except ValueError as error:
        yield Problem("sharding.look_ahead", str(error))
    if case.emulated_costs and is_of_this_tree:
        try:
            read_costs(case.emulated_costs)
        except ValueError as error:
            yield Problem("emulated.costs", str(error))
            return
    if has_program:
        yield from _of_stages(case)
    if case.is_automatic:
        yield from _of_memory_limit(case)
    if has_program and case.is_emulated and (is_of_this_tree or not case.emulated_costs):
        yield from _of_emulation(case)
    decay, warmup = case.train_lr_decay_steps, case.train_lr_warmup_steps
    if case.train_lr_schedule == "cosine" and decay <= warmup:
        message = f"{decay} must be greater than train.lr_warmup_steps {warmup}: lr_schedule "
        yield Problem("train.lr_decay_steps", message + '"cosine" reaches zero there')
    kind = case.data_source.partition(":")[0]
    if kind in LOCAL_KINDS and is_of_this_tree and (why := look_at_files(case.data_source)[0]):
        yield Problem("data.source", f"{why} (relative to the working directory)")
    is_looked_for = is_of_this_tree or kind not in LOCAL_KINDS
    if kind in ("files", "hf") and is_looked_for and not is_installed("datasets"):
        yield Problem("data.source", missing("datasets", kind))


def _of_schedule(case: Case) -> Iterator[Problem]:
    """Check a registered schedule's shape; prove a program file correct."""
    if case.is_automatic:
        return
    try:
        if not case.schedule.startswith(CSV_PREFIX):
            shape = case.world_size, case.num_microbatches, case.stages_per_rank
            shape_of(case.schedule, *shape, case.mode)
            check_slices(case.schedule, case.slices_number, case.mode)
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


def _of_slices(case: Case) -> Problem | None:
    """The problem of slices that the sequences cannot be cut into."""
    num, seq_len, listed = case.slices_number, case.seq_len, case.slices_lengths
    if not isinstance(seq_len, int):
        return None
    if num > seq_len:
        return Problem(
            "slices.number", f"{num} slices of {seq_len} tokens; at most seq_len {seq_len}"
        )
    if not isinstance(listed, str) and (len(listed), sum(listed)) != (num, seq_len):
        given = f"{brief(listed)} has {len(listed)} slices of {sum(listed)} tokens in all"
        expected = f"expected slices.number {num}, of seq_len {seq_len}"
        return Problem("slices.lengths", f"{given}; {expected}")
    return None


@functools.cache
def _refusals() -> tuple[list[tuple[str, object, Condition]], list[tuple[str, Conditions, str]]]:
    """Return the two tables that `refusals.txt` holds.

    The first has the settings that do nothing in some cases, each with its default and the
    condition of the others; the second the keys of cases that cannot be, with their conditions and
    the reason.
    """
    idle, never, rows = [], [], Path(__file__).with_name("refusals.txt").read_text().splitlines()
    for row in rows:
        begin, *words = (cell.strip() for cell in row.split("|")) if row[:1] != "#" else ("",)
        if len(words) == 2:
            never.append((begin, read_conditions(words[:1], ""), words[1]))
        for declared in SETTINGS.values() if len(words) == 1 else ():
            if declared.key.startswith(begin):
                default = getattr(declared.owner, declared.field)
                idle.append((declared.key, default, read_conditions(words, "").each[0]))
    return idle, never


def _of_needs(case: Case, measure: Measure) -> Iterator[Problem]:
    """Problems of settings that are given and do nothing."""
    value_of = functools.partial(setting_of, case, measure)
    for key, default, need in _refusals()[0]:
        if value_of(key) != default and not need.holds(value_of):
            yield Problem(
                key, f"applies only with {need}; {need.key} is {brief(value_of(need.key))}"
            )


def problems_of_runtime(case: Case) -> Iterator[Problem]:
    """Problems of the case's runtime, and other settings that do not go together."""
    value_of = functools.partial(setting_of, case, _ANY_MEASURE)
    for key, met, why in _refusals()[1]:
        if met.holds(value_of):
            yield Problem(key, why.format(case=case))
    if case.runtime == "torch" and case.schedule not in TORCH_SCHEDULES:
        known = ", ".join(TORCH_SCHEDULES)
        yield Problem("runtime", f'"torch" has no schedule "{case.schedule}". It has: {known}')
    is_short = case.num_microbatches < case.world_size
    if case.runtime == "torch" and case.schedule == "1f1b" and is_short:
        got = f"num_microbatches {case.num_microbatches}, world_size {case.world_size}"
        message = f'"torch": its 1F1B needs num_microbatches >= world_size; got {got}'
        yield Problem("runtime", message)


def _of_stages(case: Case) -> Iterator[Problem]:
    """Problems of settings that name stages, or have a value for each."""
    num_stages, given, shape = num_stages_of(case), case.train_recompute_stages, _shape(case)
    if given and len(given) != num_stages:
        message = (
            f"{brief(given)} has {len(given)} values for {num_stages} stages ({shape}); give true, "
            "false, or one of them for each stage; values to compare go into [grid]"
        )
        yield Problem("train.recompute", message)
    if case.model_split == "trace" and not case.model_split_points:
        message = "is empty; name the submodules before which the model may be cut"
        yield Problem("model.split_points", message)


def _shape(case: Case) -> str:
    stages = f", stages_per_rank {case.stages_per_rank}" if case.stages_per_rank > 1 else ""
    return f"world_size {case.world_size}{stages}"


def _of_emulation(case: Case) -> Iterator[Problem]:
    times = {name.removeprefix("emulated_"): getattr(case, name) for name in TIMES}
    ops, num_stages = ("F_ms", "I_ms", "W_ms") if case.trains else ("F_ms",), num_stages_of(case)
    for name in ops:
        if not times[name]:
            example = " ".join(f"--set emulated.{one}=2" for one in ops)
            needed = "F_ms, I_ms and W_ms" if case.trains else "F_ms"
            message = f'"emulated" needs {needed}; emulated.{name} is missing: {example}'
            yield Problem("device", message)
    for name, listed in times.items():
        what, num = ("link", num_stages - 1) if name == "link_ms" else ("stage", num_stages)
        if len(listed) > 1 and len(listed) != num:
            message = f"{len(listed)} times for {num} {what}s"
            if num < 2:
                message = f"{len(listed)} times, but {num_stages} stages have {num} {what}s"
            yield Problem(f"emulated.{name}", f"{message}; give one number, or one for each {what}")
    if case.emulated_FB_ms and case.mode == TRAIN and not program_of(case).paired:
        message = f"does nothing: {case.schedule} puts no forward and backward side by side; "
        yield Problem("emulated.FB_ms", f"{message}remove it, or take dualpipe or dualpipev")
    if not any(any(times[name]) for name in ops):
        yield Problem("emulated.F_ms", "is 0, like I_ms and W_ms: nothing to measure")
    if (num := len(case.emulated_replica_factors)) not in (0, case.replicas):
        message = f"{num} factors for replicas = {case.replicas}; give one for each"
        yield Problem("emulated.replica_factors", message)


def _of_memory_limit(case: Case) -> Iterator[Problem]:
    limit, stages = case.memory_limit, case.stages_per_rank
    if limit == Case.memory_limit:
        return
    if not case.is_emulated:
        if limit.isdecimal():
            message = f'{limit} has no unit; give a size, such as "{limit} GiB"'
            yield Problem("memory_limit", message)
    elif not limit.isdecimal():
        message = f"{brief(limit)}: emulated stages hold no bytes; give a number of activations"
        yield Problem("memory_limit", message)
    elif int(limit) < stages:
        message = f"{limit} is less than any program needs: a rank holds one microbatch of each of "
        yield Problem("memory_limit", f"{message}its {stages} stages; at least {stages}")


def problems_of_fit(case: Case, facts: Facts, is_set: Callable[[str], bool]) -> Iterator[Problem]:
    """Problems with this model, which may lower a `data.max_seq_len` left at its default.

    `is_set` tells whether a key has a value in the file, or by an option.
    """
    if facts.problem is not None:
        yield facts.problem
        return
    model, partition = case.model_preset, case.model_partition
    if not isinstance(partition, str) and facts.num_layers is not None:
        try:
            partition_layers(partition, facts.num_layers, depth_of(case))
        except PartitionError as error:
            reason = str(error).replace(str(list(partition)), brief(partition))
            yield Problem("model.partition", f"{reason} (model {model}, {_shape(case)})")
    if case.replicas > 1 and facts.num_parameters == 0:
        message = f"{case.replicas} replicas share nothing: {model} has no parameters"
        yield Problem("replicas", message)
    if facts.targets_per_sample is None:
        yield from _of_text(case, facts, is_max_seq_len_set=is_set("data.max_seq_len"))
    else:
        for key in filter(is_set, _OF_TEXT):
            message = f"does nothing: {model} brings its own batches; remove it"
            yield Problem(key, message)


def _of_text(case: Case, facts: Facts, *, is_max_seq_len_set: bool) -> Iterator[Problem]:
    """Problems of the text that a model is trained on."""
    model = case.model_preset
    is_variable, most = case.seq_len == VARIABLE, facts.max_positions
    longest = case.data_max_seq_len if case.seq_len == VARIABLE else case.seq_len
    if most is not None and longest > most and (is_max_seq_len_set or not is_variable):
        message = f"{longest} is longer than the {most} positions of {model}"
        yield Problem("data.max_seq_len" if is_variable else "seq_len", message)
    # Text without a tokenizer is read as bytes, as `stdlib` always is; synthetic tokens are drawn.
    size = None if case.data_source == "stdlib" else facts.tokenizer_size
    needed, kind = NUM_BYTE_VALUES if size is None else size, case.data_source.partition(":")[0]
    if kind != "synthetic" and facts.vocab_size is not None and facts.vocab_size < needed:
        tokens = "text as bytes" if size is None else f"tokenizer {case.data_tokenizer}"
        message = f"{tokens} needs a vocabulary of {needed}; {model} has {facts.vocab_size}"
        is_chosen = size is not None and case.data_tokenizer != "auto"
        yield Problem("data.tokenizer" if is_chosen else "model.preset", message)
    if kind == "text" and size is None:
        num_bytes = look_at_files(case.data_source)[1]
        if num_bytes <= (1 if case.seq_len == VARIABLE else case.seq_len):
            path = printable(case.data_source.partition(":")[2])
            message = f"{path} has {num_bytes} bytes; seq_len {case.seq_len} needs more"
            yield Problem("data.source", message)


def is_known_by_name(case: Case) -> bool:
    """Whether the model's fit to the case depends on no file."""
    source = case.data_source.partition(":")[0]
    is_program = case.schedule.startswith(CSV_PREFIX)
    return is_plain_preset(identity_of(case)) and not is_program and source not in LOCAL_KINDS


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
        kind, known = case.data_source.partition(":")[0], facts.get(identity_of(case))
        if kind in LOCAL_KINDS:
            found = lengths.setdefault(case.data_source, set())
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


def notes_on_stages(cases: Iterable[Case], facts: Mapping[Identity, Facts]) -> list[str]:
    """A sentence for each partition of a model that leaves stages with nothing to train."""
    notes: dict[tuple[Identity, str, int], str] = {}
    for case in cases:
        partition, num_stages = case.model_partition, depth_of(case)
        known = facts.get(identity := identity_of(case))
        if isinstance(partition, tuple) or known is None or not known.part_sizes:
            continue
        key = (identity, partition, num_stages)
        if key not in notes and (bare := stages_without(known.part_sizes, partition, num_stages)):
            stages = ", ".join(map(str, bare))
            have = f"stage {stages} has" if len(bare) == 1 else f"stages {stages} have"
            remedy = "split points" if case.model_split == "trace" else "model.partition"
            notes[key] = (
                f"{case.model_preset} on {num_stages} stages (world_size {case.world_size}): "
                f"{have} no parameters, so nothing is trained there; use fewer ranks or stages per "
                f"rank, or change {remedy}"
            )
    return list(notes.values())


def stages_without(part_sizes: Sequence[int], partition: str, num_stages: int) -> list[int]:
    """The stages without parameters; empty for a partition that only the run knows."""
    if partition == "measured":
        return []
    if partition == "parameters":
        layers = balance(part_sizes, num_stages)
    else:
        layers = partition_layers(partition, len(part_sizes) - 2, num_stages)
    return [stage for stage, size in enumerate(totals_of(part_sizes, layers)) if size == 0]
