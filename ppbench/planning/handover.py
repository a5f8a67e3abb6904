"""Writes a chosen pipeline for those who will run it: a sweep file, its program, its partition.

    NAME.toml         a sweep file of one case: `ppbench sweep NAME.toml`
    NAME.csv          the program in torch's form: torchtitan's `pipeline_parallel_schedule_csv`
    NAME.layout       Megatron-LM's `--pipeline-model-parallel-layout`
    NAME.modules.json torchtitan's `module_fqns_per_model_part`

For layers by stage of 2, 2, 3, 1 on two ranks of two stages the last two say:

    Et*2|t*2|t*3|tL
    [["tok_embeddings", "layers.0", "layers.1"], ["layers.2", "layers.3"], ...]
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from engine.plan.program import Placement, Program, loop_placement, to_csv, v_placement
from engine.plan.schedules.registry import CSV_PREFIX, SCHEDULES
from ppbench.config.case import CASE_KEYS, Case, Measure, Planned, setting_of
from ppbench.config.reader import read_sweep
from ppbench.config.sweep import Sweep
from ppbench.config.toml import as_toml, key_text
from ppbench.errors import UsageError
from ppbench.files import write_file
from ppbench.planning.layout import partition_of
from ppbench.planning.plan import AUTO, Configuration, Plan

_ALWAYS = (
    *("schedule", "world_size", "num_microbatches", "stages_per_rank", "model.partition"),
    *("train.microbatch_size", "train.recompute"),
)
"""Keys of a sweep file that say which pipeline it is; others only where they are not as usual."""
EMBEDDINGS, NORM, HEAD = "tok_embeddings", "norm", "output"
"""torchtitan's modules around the layers; its latest models call the head `lm_head`."""


class HandoverError(UsageError):
    """A form of another trainer cannot express a pipeline; the message says why."""


def chosen_case(plan: Plan, sweep: Sweep) -> Planned:
    """The settings of a sweep file's case, with the policy that a plan chose for its replicas."""
    case, measured = sweep.cases[0]
    return replace(case, sharding_policy=plan.request.sharding), measured


def case_of(one: Configuration, case: Case, file: Path) -> Case:
    """The given case with a configuration's pipeline; `file` is for a program of the solver."""
    is_mixed, is_sliced = len(set(one.recompute)) > 1, one.num_slices > 1
    return replace(
        case,
        schedule=f"{CSV_PREFIX}{file}" if one.schedule == AUTO else one.schedule,
        program_digest="",
        memory_limit=Case.memory_limit,
        world_size=one.ranks,
        stages_per_rank=one.stages_per_rank,
        num_microbatches=one.num_microbatches,
        slices_number=one.num_slices,
        slices_lengths=case.slices_lengths if is_sliced else Case.slices_lengths,
        slices_attention=case.slices_attention if is_sliced else Case.slices_attention,
        train_microbatch_size=one.microbatch_size,
        model_partition=one.layers,
        train_recompute=any(one.recompute),
        train_recompute_stages=one.recompute if is_mixed else (),
    )


@dataclass(frozen=True)
class Form:
    """One form of a pipeline: its file, or why the form cannot express it."""

    name: str  # sweep, program, megatron or torchtitan
    path: Path | None
    text: str
    refusal: str = ""


@dataclass(frozen=True)
class Handover:
    """Every form of a pipeline, and the schedule that torchtitan is given beside the program."""

    forms: tuple[Form, ...]
    torchtitan_schedule: str  # empty: torchtitan cannot place the stages

    def form(self, name: str) -> Form:
        """One form by name."""
        return next(form for form in self.forms if form.name == name)


def write_handover(
    case: Case,
    program: Program,
    folder: Path,
    name: str,
    measure: Measure = Measure(),  # noqa: B008  # it is frozen
    head: str = HEAD,
) -> Handover:
    """Write every form of a case, whose partition is listed, and read the sweep file back.

    The sweep file names a program that has no name of its own by the folder as it is given, so both
    are read from the working directory. `head` is what torchtitan's model calls its output
    projection. Raises UsageError for a folder that cannot be written, SweepFileError for settings
    that cannot be run.
    """
    layers, placement = case.model_partition, program.placement
    if isinstance(layers, str):
        raise UsageError(f'model.partition: expected the layers of each stage, got "{layers}"')
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{folder}: cannot be made: {error.strerror}; name another") from None
    csv, toml = folder / f"{name}.csv", folder / f"{name}.toml"
    makers: dict[str, tuple[Path, Callable[[], str]]] = {
        "program": (csv, lambda: program_text(program)),
        "sweep": (toml, lambda: sweep_text(case, measure, name, csv)),
        "megatron": (folder / f"{name}.layout", lambda: megatron_layout(layers, placement)),
        "torchtitan": (folder / f"{name}.modules.json", lambda: torchtitan_modules(layers, head)),
    }
    if placement.directions > 1:
        for form, trainer in (("megatron", "Megatron-LM's layout"), ("torchtitan", "torchtitan")):
            makers[form] = makers[form][0], functools.partial(_refuse_copies, trainer)
    forms = []
    for form, (file, make) in makers.items():
        try:
            text = make()
        except HandoverError as error:
            file.unlink(missing_ok=True)  # no older file of the name is left
            forms.append(Form(form, None, "", str(error)))
            continue
        write_file(file, [text if text.endswith("\n") else f"{text}\n"])
        forms.append(Form(form, file, text))
    read_sweep(toml, [], "cpu")  # as `ppbench sweep` does
    return Handover(tuple(forms), torchtitan_schedule(placement))


def _refuse_copies(trainer: str) -> str:
    raise HandoverError(
        f"{trainer} cannot put a stage on two ranks, as this schedule does; choose a schedule "
        "of one direction"
    )


def program_text(program: Program) -> str:
    """The program's computations as CSV in torch's form."""
    return to_csv(program.compute_only())


def sweep_text(case: Case, measure: Measure, name: str, program: Path) -> str:
    """A sweep file of one case; `program` is the file of a program that has no name."""
    has_name = case.schedule in SCHEDULES
    case = case if has_name else replace(case, schedule=f"{CSV_PREFIX}{program}")
    usual = Case(), Measure()
    sections: dict[str, list[str]] = {"": [f"name = {as_toml(name)}"]}
    for key in CASE_KEYS:
        is_left_out = (
            key == "memory_limit"
            or (key == "stages_per_rank" and not has_name)  # the program has its own
        )
        value = None if is_left_out else setting_of(case, measure, key)
        if value is not None and (key in _ALWAYS or value != setting_of(*usual, key)):
            section, _, inner = key.rpartition(".")
            lines = sections.setdefault(section, ["", f"[{section}]"])
            lines.append(f"{key_text(inner)} = {as_toml(value)}")
    return "\n".join([line for lines in sections.values() for line in lines]) + "\n"


def megatron_layout(layers: Sequence[int], placement: Placement) -> str:
    """The value of Megatron-LM's `--pipeline-model-parallel-layout`, as short as repeats make it.

    `layers` are counts by stage. E is the embedding, t a layer, L the loss, | the end of a stage,
    `*n` repeats. Raises HandoverError for a placement other than loops over all ranks: stage s
    belongs to rank s mod p there.
    """
    if len(layers) != placement.num_stages:
        raise ValueError(f"{len(layers)} counts of layers for {placement.num_stages} stages")
    p, num_stages = placement.world_size, placement.num_stages
    if num_stages % p or placement != loop_placement(p, num_stages // p):
        loops = (stage % p for stage in range(num_stages))
        stage = next((s for s, r in enumerate(loops) if placement.ranks[s] != r), num_stages - 1)
        raise HandoverError(
            f"Megatron-LM's layout cannot express this placement: there stage {stage} of "
            f"{num_stages} belongs to rank {stage % p} (loops over {p} ranks, as many stages on "
            f"each), here to rank {placement.ranks[stage]}; choose a schedule with loop placement"
        )
    texts = ["t" * count if count < 2 else f"t*{count}" for count in layers]
    texts[0] = f"E{texts[0]}"
    texts[-1] = f"{texts[-1]}L"
    stages = [f"{text}|" for text in texts[:-1]]
    # At each place the repeat that saves most is taken, in parentheses, which cannot be nested.
    # The comma after a repeat means nothing and parts its number from what follows.
    parts, begin = [], 0
    while begin < len(stages):
        (period, times), most_saved = (1, 1), 0
        for length in range(1, (len(stages) - begin) // 2 + 1):
            repeated, num = stages[begin : begin + length], 1
            while stages[begin + num * length : begin + (num + 1) * length] == repeated:
                num += 1
            size = sum(map(len, repeated))
            saved = size * num - (size + len(f"()*{num},"))
            if saved > most_saved:
                (period, times), most_saved = (length, num), saved
        pattern = "".join(stages[begin : begin + period])
        parts.append(pattern if times == 1 else f"({pattern})*{times},")
        begin += period * times
    return "".join([*parts, texts[-1]])


def torchtitan_modules(layers: Sequence[int], head: str = HEAD) -> str:
    """The value of torchtitan's `module_fqns_per_model_part`: names of modules by stage.

    As a list of lists, which JSON, TOML and Python write alike. `layers` are counts by stage;
    `head` is what the model calls its output projection.
    """
    names = [[f"layers.{layer}" for layer in own] for own in partition_of(layers)]
    names[0].insert(0, EMBEDDINGS)
    names[-1] += [NORM, head]
    return json.dumps(names)


def torchtitan_schedule(placement: Placement) -> str:
    """The schedule to name beside the program's file: torchtitan places stages by it.

    It is empty for a placement that none of them has.
    """
    p, num_stages = placement.world_size, placement.num_stages
    if placement == loop_placement(p):
        return "1F1B"
    if num_stages % p == 0 and placement == loop_placement(p, num_stages // p):
        return "Interleaved1F1B"
    if placement == v_placement(p):
        return "ZBVZeroBubble"
    return ""
