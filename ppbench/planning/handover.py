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
from ppbench.config.case import Case
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
    _make(folder)
    program = folder / f"{name}.csv"
    placement, ranks = chosen.program.placement, chosen.program.world_size
    written = [
        _form("program", program, lambda: program_text(chosen.program)),
        _form("sweep", folder / f"{name}.toml", lambda: sweep_text(chosen, name, program)),
        _form(
            "megatron", folder / f"{name}.layout", lambda: megatron_layout(chosen.layers, placement)
        ),
        _form(
            "torchtitan",
            folder / f"{name}.modules.json",
            lambda: torchtitan_modules(chosen.layers, head),
        ),
    ]
    handover = Handover(tuple(written), _schedule_or_nothing(chosen))
    _check_sweep(chosen, folder / f"{name}.toml")
    layout, modules = handover.form("megatron"), handover.form("torchtitan")
    assert layout.refusal or layers_in_layout(layout.text, ranks) == chosen.layers
    assert layers_in_modules(modules.text, head) == chosen.layers
    return handover


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{folder}: cannot be made: {error.strerror}; name another") from None


def program_text(program: Program) -> str:
    """The program's computations as CSV in torch's form, read back."""
    compute = program.compute_only()
    text = to_csv(compute)
    read = from_csv(text, program.schedule)
    assert (read.actions, read.placement) == (compute.actions, compute.placement)
    return text


def sweep_text(chosen: Chosen, name: str, program: Path) -> str:
    """A sweep file of the one case; `program` is the file of a program that has no name."""
    keys = _keys(chosen, program)
    top = {key: value for key, value in keys.items() if "." not in key}
    sections: dict[str, dict[str, object]] = {}
    for key, value in keys.items():
        section, _, inner = key.partition(".")
        if inner:
            sections.setdefault(section, {})[inner] = value
    lines = [f"name = {as_toml(name)}", *_lines(top)]
    for section, settings in sections.items():
        lines += ["", f"[{section}]", *_lines(settings)]
    return "\n".join(lines) + "\n"


def _keys(chosen: Chosen, program: Path) -> dict[str, object]:
    """Every key of the sweep file with its value; `settings` do not change the pipeline."""
    made: dict[str, object] = {
        "schedule": chosen.schedule or f"{CSV_PREFIX}{program}",
        "world_size": chosen.program.world_size,
        "num_microbatches": chosen.program.num_microbatches,
    }
    if chosen.schedule:
        made["stages_per_rank"] = chosen.program.num_stages // chosen.program.world_size
    if chosen.settings.get("model.split") != "trace":  # whose stages are cut at split points
        made["model.partition"] = chosen.layers
    made["train.microbatch_size"] = chosen.microbatch_size
    is_uniform = len(set(chosen.recompute)) == 1
    made["train.recompute"] = chosen.recompute[0] if is_uniform else chosen.recompute
    return {**made, **{key: v for key, v in chosen.settings.items() if key not in made}}


def _lines(settings: Mapping[str, object]) -> list[str]:
    return [f"{key_text(key)} = {as_toml(value)}" for key, value in settings.items()]


def _form(name: str, path: Path, make: Callable[[], str]) -> Form:
    """Write a form, or note why it cannot be written; then no older file of the name is left."""
    try:
        text = make()
    except HandoverError as error:
        path.unlink(missing_ok=True)
        return Form(name, None, "", str(error))
    write_file(path, [text if text.endswith("\n") else f"{text}\n"])
    return Form(name, path, text)


def _schedule_or_nothing(chosen: Chosen) -> str:
    try:
        return torchtitan_schedule(chosen.program.placement)
    except HandoverError:
        return ""


def _check_sweep(chosen: Chosen, file: Path) -> None:
    """Read the sweep file as `ppbench sweep` does. Raises SweepFileError."""
    ((case, _),) = read_sweep(file, [], "cpu").cases
    program = program_of(case)
    compute = chosen.program.compute_only()
    assert (program.actions, program.placement) == (compute.actions, compute.placement)
    assert case.train_microbatch_size == chosen.microbatch_size
    assert _recomputed(case, program.num_stages) == chosen.recompute


def _recomputed(case: Case, num_stages: int) -> tuple[bool, ...]:
    given = case.recompute
    return (given,) * num_stages if isinstance(given, bool) else given
