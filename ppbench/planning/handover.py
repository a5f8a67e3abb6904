"""Writes a chosen pipeline for those who will run it: a sweep file, its program, its partition.

    NAME.toml         a sweep file of one case: `ppbench sweep NAME.toml`
    NAME.csv          the program in torch's form: torchtitan's `pipeline_parallel_schedule_csv`
    NAME.layout       Megatron-LM's `--pipeline-model-parallel-layout`
    NAME.modules.json torchtitan's `module_fqns_per_model_part`

What is written is read back, each form by a reader of its own, before anyone relies on it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from engine.plan.program import Program, from_csv, to_csv
from engine.plan.schedules.registry import AUTO, CSV_PREFIX
from ppbench.config.programs import program_of
from ppbench.config.reader import read_sweep
from ppbench.config.toml import as_toml, key_text
from ppbench.errors import UsageError
from ppbench.files import write_file
from ppbench.planning.configuration import Configuration
from ppbench.planning.grammars import layers_in_layout, layers_in_modules
from ppbench.planning.partition_text import (
    HEAD,
    HandoverError,
    megatron_layout,
    torchtitan_modules,
    torchtitan_schedule,
)


@dataclass(frozen=True)
class Chosen:
    """A pipeline that is to be run.

    `layers` are counts by stage, `recompute` says by stage whether its layers recompute their
    activations. `schedule` is the registered name of the program, or empty for one of the solver.
    `settings` are further keys of the sweep file, such as `model.preset` and `seq_len`.
    """

    program: Program
    layers: tuple[int, ...]
    recompute: tuple[bool, ...]
    microbatch_size: int
    schedule: str = ""
    settings: Mapping[str, object] = field(default_factory=dict)


def chosen_from(configuration: Configuration, program: Program, **settings: object) -> Chosen:
    """What is handed over of a plan's configuration, with its program.

    `settings` are further keys of the sweep file, given as `**{"model.preset": "llama-8m"}`.
    """
    has_name = configuration.schedule != AUTO
    return Chosen(
        program,
        configuration.layers,
        configuration.recompute,
        configuration.microbatch_size,
        configuration.schedule if has_name else "",
        settings,
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


def write_handover(chosen: Chosen, folder: Path, name: str, head: str = HEAD) -> Handover:
    """Write every form into a folder, and read each back.

    The sweep file names the program by the folder as it is given, so both are read from the
    working directory. `head` is what torchtitan's model calls its output projection. Raises
    UsageError for a folder that cannot be written, SweepFileError for settings that cannot be run.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{folder}: cannot be made: {error.strerror}; name another") from None
    files = {
        form: folder / f"{name}.{ending}"
        for form, ending in (
            ("program", "csv"),
            ("sweep", "toml"),
            ("megatron", "layout"),
            ("torchtitan", "modules.json"),
        )
    }
    placement = chosen.program.placement
    makers: dict[str, Callable[[], str]] = {
        "program": lambda: program_text(chosen.program),
        "sweep": lambda: sweep_text(chosen, name, files["program"]),
        "megatron": lambda: megatron_layout(chosen.layers, placement),
        "torchtitan": lambda: torchtitan_modules(chosen.layers, head),
    }
    forms = []
    for form, make in makers.items():
        try:
            text = make()
        except HandoverError as error:
            files[form].unlink(missing_ok=True)  # no older file of the name is left
            forms.append(Form(form, None, "", str(error)))
            continue
        write_file(files[form], [text if text.endswith("\n") else f"{text}\n"])
        forms.append(Form(form, files[form], text))
    try:
        schedule = torchtitan_schedule(placement)
    except HandoverError:
        schedule = ""
    handover = Handover(tuple(forms), schedule)

    ((case, _),) = read_sweep(files["sweep"], [], "cpu").cases  # as `ppbench sweep` does
    program, compute = program_of(case), chosen.program.compute_only()
    recompute = case.recompute
    if isinstance(recompute, bool):
        recompute = (recompute,) * program.num_stages
    checks = [
        ("sweep", "program", _table_of(program), _table_of(compute)),
        ("sweep", "microbatch size", case.train_microbatch_size, chosen.microbatch_size),
        ("sweep", "stages that recompute", recompute, chosen.recompute),
        (
            "torchtitan",
            "layers by stage",
            layers_in_modules(handover.form("torchtitan").text, head),
            chosen.layers,
        ),
    ]
    if layout := handover.form("megatron").text:
        read = layers_in_layout(layout, placement.world_size)
        checks.append(("megatron", "layers by stage", read, chosen.layers))
    for form, what, read_back, expected in checks:
        if read_back != expected:
            raise _changed(str(files[form]), what, read_back, expected)
    return handover


def _table_of(program: Program) -> str:
    return f"stages on ranks {program.placement.ranks}\n{to_csv(program).rstrip()}"


def _changed(where: str, what: str, read_back: object, expected: object) -> UsageError:
    """The error for a form that says something else than what was chosen."""
    return UsageError(
        f"{where}: its {what}, read back, is {read_back}; expected {expected}; do not use it: "
        "choose another pipeline, and report this fault of ppbench"
    )


def program_text(program: Program) -> str:
    """The program's computations as CSV in torch's form, read back. Raises UsageError."""
    compute = program.compute_only()
    text = to_csv(compute)
    read = from_csv(text, program.schedule)
    if (read.actions, read.placement) != (compute.actions, compute.placement):
        raise _changed("CSV in torch's form", "program", _table_of(read), _table_of(compute))
    return text


def sweep_text(chosen: Chosen, name: str, program: Path) -> str:
    """A sweep file of the one case; `program` is the file of a program that has no name.

    The settings of `chosen` do not change the pipeline.
    """
    keys: dict[str, object] = {
        "schedule": chosen.schedule or f"{CSV_PREFIX}{program}",
        "world_size": chosen.program.world_size,
        "num_microbatches": chosen.program.num_microbatches,
    }
    if chosen.schedule:
        keys["stages_per_rank"] = chosen.program.num_stages // chosen.program.world_size
    if chosen.settings.get("model.split") != "trace":  # whose stages are cut at split points
        keys["model.partition"] = chosen.layers
    keys["train.microbatch_size"] = chosen.microbatch_size
    is_uniform = len(set(chosen.recompute)) == 1
    keys["train.recompute"] = chosen.recompute[0] if is_uniform else chosen.recompute
    sections: dict[str, list[str]] = {"": [f"name = {as_toml(name)}"]}
    keys |= {key: value for key, value in chosen.settings.items() if key not in keys}
    for key, value in keys.items():
        section, _, inner = key.partition(".") if "." in key else ("", "", key)
        lines = sections.setdefault(section, ["", f"[{section}]"])
        lines.append(f"{key_text(inner)} = {as_toml(value)}")
    return "\n".join([line for lines in sections.values() for line in lines]) + "\n"
