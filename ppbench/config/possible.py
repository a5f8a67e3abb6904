"""Combinations of settings whose parts are valid but that nothing can run.

Each check is a pure function that yields what is wrong; whoever asks knows the file and the line.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from engine.model.answers import Facts, Problem
from engine.model.partition import PartitionError, partition_layers
from engine.plan.lower import DEFAULT_LOOK_AHEAD, Policy, lower
from engine.plan.program import Program
from engine.plan.rules import ProgramError, check
from engine.plan.schedules.registry import (
    CSV_PREFIX,
    ProgramFileError,
    ScheduleError,
    ShapeError,
    build_program,
    shape_of,
)
from ppbench.config.case import VARIABLE, Case, Measure
from ppbench.config.costs import read_costs
from ppbench.config.models import identity_of, is_plain_preset
from ppbench.config.problems import brief, printable

NUM_BYTE_VALUES = 256
LOCAL_SOURCES = ("text", "json", "parquet")
_TIMES_GIVEN = "--set emulated.F_ms=2 --set emulated.I_ms=2 --set emulated.W_ms=2"
_NEED_DATASETS = ("json", "parquet", "hf")


def problems_of_settings(
    case: Case, measure: Measure, *, is_of_this_tree: bool = True
) -> Iterator[Problem]:
    """What is wrong whatever the model is.

    Of a case that is to be run where other files lie, what they say is left out.
    """
    has_program = is_of_this_tree or not case.schedule.startswith(CSV_PREFIX)
    if has_program:
        yield from _of_schedule(case)
        yield from _of_split(case)
    yield from _of_transfers(case)
    if has_program and (is_of_this_tree or not case.emulated_costs):
        yield from _of_emulation(case, measure)
    yield from _of_learning_rate(case)
    if is_of_this_tree or case.data_source.partition(":")[0] not in LOCAL_SOURCES:
        yield from _of_source(case)


def problems_of_fit(case: Case, facts: Facts, *, is_max_seq_len_set: bool) -> Iterator[Problem]:
    """What is wrong with this model. A `data.max_seq_len` left at its default gives way to it."""
    if facts.problem is not None:
        yield facts.problem
        return
    yield from _of_positions(case, facts, is_max_seq_len_set)
    yield from _of_partition(case, facts)
    yield from _of_vocabulary(case, facts)
    yield from _of_text_size(case, facts)


def program_of(case: Case) -> Program:
    """The case's program. Raises what building it raises."""
    if not case.schedule.startswith(CSV_PREFIX):
        return build_program(
            case.schedule, case.world_size, case.num_microbatches, case.stages_per_rank
        )
    shape = (case.schedule, case.world_size, case.num_microbatches)
    return _program_of_file(*shape, case.program_digest)


@functools.lru_cache(maxsize=16)
def _program_of_file(
    schedule: str, world_size: int, num_microbatches: int, _digest: str
) -> Program:
    """Read once for all cases of a grid; another content has another digest."""
    return build_program(schedule, world_size, num_microbatches, None)


def digest_of(path: Path) -> str:
    """Short hash of a program file's content. Raises OSError."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]


def check_file_unchanged(case: Case) -> None:
    """Raise ProgramFileError if the case's program file is not what it was when it was read."""
    path = Path(case.schedule.removeprefix(CSV_PREFIX))
    try:
        is_same = not case.program_digest or digest_of(path) == case.program_digest
    except OSError as error:
        raise ProgramFileError(f"{path}: cannot be read: {error.strerror}") from None
    if not is_same:
        raise ProgramFileError(f"{path}: has changed since the sweep began; start it again")


def is_known_by_name(case: Case) -> bool:
    """Whether no file has a say in whether the model fits the case."""
    source = case.data_source.partition(":")[0]
    is_program = case.schedule.startswith(CSV_PREFIX)
    return is_plain_preset(identity_of(case)) and not is_program and source not in LOCAL_SOURCES


def num_stages_of(case: Case) -> int:
    """Stages over all ranks."""
    if case.schedule.startswith(CSV_PREFIX):
        return program_of(case).num_stages
    return case.world_size * case.stages_per_rank


def most_stages_per_rank(program: Program) -> int:
    return max(len(program.placement.stages_of(rank)) for rank in range(program.world_size))


def _of_schedule(case: Case) -> Iterator[Problem]:
    """A registered schedule is legal where its shape is; a file is checked and proved."""
    try:
        if not case.schedule.startswith(CSV_PREFIX):
            shape_of(case.schedule, case.world_size, case.num_microbatches, case.stages_per_rank)
            return
        program = program_of(case)
        _prove(program, case.transfer_policy, case.transfer_look_ahead)
    except ShapeError as error:
        yield Problem(error.key, printable(str(error)))
    except ProgramError as error:
        yield Problem("schedule", str(error))
    except ScheduleError as error:
        yield Problem("schedule", f"{printable(str(error))} (relative to the working directory)")
    else:
        yield from _of_program(case, program)


@functools.lru_cache(maxsize=16)
def _prove(program: Program, policy: str, look_ahead: int) -> None:
    """Raises ProgramError for a program that is not legal or could hang."""
    check(program)
    lower(program, Policy(policy), look_ahead)


def _of_program(case: Case, program: Program) -> Iterator[Problem]:
    if program.has_transfers and case.transfer_policy != Policy.EARLY:
        message = f"{case.schedule} has transfers of its own; leave the policy out"
        yield Problem("transfer.policy", message)
    most = most_stages_per_rank(program)
    if most != case.stages_per_rank:
        message = f"{case.schedule} has {most} stages on a rank, got {case.stages_per_rank}"
        yield Problem("stages_per_rank", message)


def _of_transfers(case: Case) -> Iterator[Problem]:
    if case.transfer_policy == "just_in_time" and case.transfer_look_ahead != DEFAULT_LOOK_AHEAD:
        message = 'has a meaning only with transfer.policy = "early"'
        yield Problem("transfer.look_ahead", message)


def _of_emulation(case: Case, measure: Measure) -> Iterator[Problem]:
    times = {op: getattr(case, f"emulated_{op}_ms") for op in "FIW"}
    if case.emulated_costs:
        try:
            read_costs(case.emulated_costs)
        except ValueError as error:
            yield Problem("emulated.costs", str(error))
            return
    if not case.is_emulated:
        given = {**{f"{op}_ms": ms for op, ms in times.items()}, "link_ms": case.emulated_link_ms}
        if any(given.values()) or case.emulated_jitter or case.emulated_seed or case.emulated_costs:
            known = [*(name for name in given if given[name]), "jitter"]
            key = f"emulated.{'costs' if case.emulated_costs else known[0]}"
            yield Problem(key, 'has a meaning only with device = "emulated"')
        return
    for op, milliseconds in times.items():
        key = f"emulated.{op}_ms"
        if not milliseconds:
            message = f'"emulated" needs F_ms, I_ms and W_ms; {key} is missing: {_TIMES_GIVEN}'
            yield Problem("device", message)
        elif len(milliseconds) not in (1, num_stages_of(case)):
            message = f"{len(milliseconds)} times for {num_stages_of(case)} stages"
            yield Problem(key, f"{message}; give one number, or one for each stage")
    if not any(map(any, times.values())):
        yield Problem("emulated.F_ms", "is 0, as are I_ms and W_ms: there is nothing to measure")
    yield from _of_emulated_links(case)
    yield from _of_emulated_model(case, measure)


def _of_emulated_links(case: Case) -> Iterator[Problem]:
    num_links, given = num_stages_of(case) - 1, len(case.emulated_link_ms)
    if given > 1 and given != num_links:
        message = f"{given} times for {num_links} links between {num_stages_of(case)} stages"
        if num_links < 2:
            message = f"{given} times, and {num_stages_of(case)} stages have {num_links} links"
        yield Problem("emulated.link_ms", f"{message}; give one number, or one for each link")


def _of_emulated_model(case: Case, measure: Measure) -> Iterator[Problem]:
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
            yield Problem("model.split_points", 'has a meaning only with model.split = "trace"')
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
        message = 'has no meaning with model.split = "trace", where model.split_points decide'
        yield Problem("model.partition", message)


def _shape(case: Case) -> str:
    stages = f", stages_per_rank {case.stages_per_rank}" if case.stages_per_rank > 1 else ""
    return f"world_size {case.world_size}{stages}"


def _of_learning_rate(case: Case) -> Iterator[Problem]:
    warmup, decay = case.train_lr_warmup_steps, case.train_lr_decay_steps
    if case.train_lr_schedule == "cosine" and decay <= warmup:
        message = (
            f'{decay} must be greater than train.lr_warmup_steps {warmup}: lr_schedule "cosine" '
            "reaches zero there"
        )
        yield Problem("train.lr_decay_steps", message)


def _of_source(case: Case) -> Iterator[Problem]:
    kind, _, path = case.data_source.partition(":")
    if kind in LOCAL_SOURCES and not local_files(case.data_source):
        message = f"no such file: {printable(path)} (relative to the working directory)"
        yield Problem("data.source", message)
    if kind in _NEED_DATASETS and find_spec("datasets") is None:
        message = f"{kind} needs the datasets package; install it with: pip install 'ppbench[hf]'"
        yield Problem("data.source", message)


def _of_positions(case: Case, facts: Facts, is_max_seq_len_set: bool) -> Iterator[Problem]:
    if facts.max_positions is None:
        return
    is_variable = case.seq_len == VARIABLE
    longest = case.data_max_seq_len if case.seq_len == VARIABLE else case.seq_len
    if longest > facts.max_positions and (is_max_seq_len_set or not is_variable):
        key = "data.max_seq_len" if is_variable else "seq_len"
        positions = f"{facts.max_positions} positions of {case.model_preset}"
        yield Problem(key, f"{longest} is longer than the {positions}")


def _of_partition(case: Case, facts: Facts) -> Iterator[Problem]:
    partition = case.model_partition
    if isinstance(partition, str) or facts.num_layers is None:
        return
    try:
        partition_layers(partition, facts.num_layers, num_stages_of(case))
    except PartitionError as error:
        told = str(error).replace(str(list(partition)), brief(partition))
        message = f"{told} (model {case.model_preset}, {_shape(case)})"
        yield Problem("model.partition", message)


def _of_vocabulary(case: Case, facts: Facts) -> Iterator[Problem]:
    """Synthetic tokens are drawn from the vocabulary itself."""
    if facts.vocab_size is None or case.data_source == "synthetic":
        return
    size = _tokenizer_size(case, facts)
    needed = NUM_BYTE_VALUES if size is None else size
    if facts.vocab_size < needed:
        tokens = "text as bytes" if size is None else f"tokenizer {case.data_tokenizer}"
        message = (
            f"{tokens} needs a vocabulary of {needed}; {case.model_preset} has {facts.vocab_size}"
        )
        is_chosen = size is not None and case.data_tokenizer != "auto"
        yield Problem("data.tokenizer" if is_chosen else "model.preset", message)


def _tokenizer_size(case: Case, facts: Facts) -> int | None:
    """None where text is read as bytes; the standard library's always is."""
    return None if case.data_source == "stdlib" else facts.tokenizer_size


def _of_text_size(case: Case, facts: Facts) -> Iterator[Problem]:
    """Of text as bytes: how many tokens another tokenizer makes of it is not known."""
    kind, _, path = case.data_source.partition(":")
    if kind != "text" or _tokenizer_size(case, facts) is not None:
        return
    size = sum(file.stat().st_size for file in local_files(case.data_source))
    if size <= (1 if case.seq_len == VARIABLE else case.seq_len):
        message = f"{printable(path)} has {size} bytes; seq_len {case.seq_len} needs more"
        yield Problem("data.source", message)


def local_files(source: str) -> list[Path]:
    """The files of a local source, whose path may be a pattern; none of any other source."""
    kind, _, name = source.partition(":")
    if kind not in LOCAL_SOURCES:
        return []
    path = Path(name)
    try:
        if path.is_file():
            return [path]
        found = Path(path.anchor).glob(str(path.relative_to(path.anchor)))
        return sorted(file for file in found if file.is_file())
    # A name too long, with a null byte, of the root alone, or a pattern of a thousand folders.
    except (OSError, ValueError, IndexError, RecursionError):
        return []
