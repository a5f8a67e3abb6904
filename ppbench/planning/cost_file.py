"""Costs in a file, so that one can plan for a cluster that one does not have.

`docs/howto/choose.md` shows one. Its tables are:

    busy_machine        true if other processes kept the machine busy while they were measured
    [link]              between two ranks: latency_ms, gb_per_s (1e9 bytes per second), error
    [[setting]]         one for each microbatch_size, recompute or not; action_ms is what the
                        runtime adds to each action
    [setting.before]    what stands before the layers: embeddings
    [[setting.layers]]  one entry for a layer, or for `repeat` equal ones in a row
    [setting.after]     what follows the layers: final norm, head and loss

and the costs of a part are:

    forward_ms, backward_ms   or the halves, input_ms and weight_ms, or all three
    held_after_forward_mib    by one microbatch, from its forward on
    held_after_input_mib      what a split backward's first half leaves of it
    transient_mib             more while an action runs: messages, and what it recomputes
    first_transient_mib       the same of the first backward, which makes the gradients
    weight_transient_mib      the same of a split backward's second half
    gradient_mib              gradients, which the first backward makes
    static_mib                parameters, optimizer state, buffers
    message_mib, optimizer_ms, error (relative standard error)

Needed of a layer are its times, `held_after_forward`, `static` and `message`; of the other two
their times and `static`. Without halves, each is half of the backward; without a backward, it is
both; without `held_after_input`, a first half leaves all.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.plan.model_costs import LinkCosts, ModelCosts, StageCosts
from ppbench.config.case import required, setting, subtable
from ppbench.config.kinds import FLAG, NAME, NOT_NEGATIVE, POSITIVE, TABLE, TABLES, TEXT, whole
from ppbench.config.toml import Place, Source, as_toml, quoted, read_source
from ppbench.files import whole_file
from ppbench.planning.cost_set import CostSet, Setting

NS_PER_MS = 1_000_000
MIB = 2**20
BYTES_PER_GB = 1e9
MOST_LAYERS = 10_000
_TIMES = ("forward", "backward", "input", "weight", "optimizer")
_SIZES = (
    *("held_after_forward", "held_after_input"),
    *("transient", "first_transient", "weight_transient", "gradient", "static", "message"),
)
_NAMES = {name: name if name.startswith("held") else f"{name}_bytes" for name in _SIZES}
"""Fields of `StageCosts`, by the names of their sizes."""
_TEXTS = ("model", "dtype", "optimizer", "device")
_COUNT = whole(1, 2**62)


@dataclass(frozen=True)
class _Link:
    latency_ms: float = setting(0.0, NOT_NEGATIVE)
    gb_per_s: float = setting(math.inf, POSITIVE)
    error: float = setting(0.0, NOT_NEGATIVE)


@dataclass(frozen=True, kw_only=True)
class _Part:
    forward_ms: float = required(NOT_NEGATIVE)
    backward_ms: float | None = setting(None, NOT_NEGATIVE)
    input_ms: float | None = setting(None, NOT_NEGATIVE)
    weight_ms: float | None = setting(None, NOT_NEGATIVE)
    optimizer_ms: float = setting(0.0, NOT_NEGATIVE)
    held_after_forward_mib: float = setting(0.0, NOT_NEGATIVE)
    held_after_input_mib: float | None = setting(None, NOT_NEGATIVE)
    transient_mib: float = setting(0.0, NOT_NEGATIVE)
    first_transient_mib: float = setting(0.0, NOT_NEGATIVE)
    weight_transient_mib: float = setting(0.0, NOT_NEGATIVE)
    gradient_mib: float = setting(0.0, NOT_NEGATIVE)
    static_mib: float = required(NOT_NEGATIVE)
    message_mib: float = setting(0.0, NOT_NEGATIVE)
    error: float = setting(0.0, NOT_NEGATIVE)


@dataclass(frozen=True, kw_only=True)
class _Layers(_Part):
    repeat: int = setting(1, _COUNT)
    held_after_forward_mib: float = required(NOT_NEGATIVE)
    message_mib: float = required(NOT_NEGATIVE)


@dataclass(frozen=True, kw_only=True)
class _Setting:
    microbatch_size: int = required(_COUNT)
    recompute: bool = setting(False, FLAG)
    action_ms: float = setting(0.0, NOT_NEGATIVE)
    before: Mapping[str, object] = required(TABLE)
    layers: Sequence[object] = required(TABLES)
    after: Mapping[str, object] = required(TABLE)


@dataclass(frozen=True, kw_only=True)
class _File:
    model: str = required(NAME)
    dtype: str = required(NAME)
    optimizer: str = required(NAME)
    device: str = required(NAME)
    seq_len: int = required(_COUNT)
    device_name: str = setting("", TEXT)
    busy_machine: bool = setting(False, FLAG)
    link: Mapping[str, object] = subtable(TABLE)
    setting: Sequence[object] = required(TABLES)


def read_costs_file(file: Path) -> CostSet:
    """Read costs from a TOML file.

    Raises UsageError for a file that cannot be read, SweepFileError with file, line and key.
    """
    source = read_source(file, "the costs file")
    given = source.read(_File, source.tree, ())
    link = source.read(_Link, given.link, ("link",))
    by_setting: dict[Setting, ModelCosts] = {}
    for entry_of_setting, at in source.tables(given.setting, ("setting",)):
        table = source.read(_Setting, entry_of_setting, at)
        layers: list[StageCosts] = []
        for entry_of_layers, place in source.tables(table.layers, (*at, "layers")):
            entry = source.read(_Layers, entry_of_layers, place)
            if len(layers) + entry.repeat > MOST_LAYERS:
                problem = f"more than {MOST_LAYERS:,} layers; expected fewer"
                raise source.error((*place, "repeat"), problem)
            layer = _costs_of(entry, source, place)
            if not layer.forward_ns + layer.backward_ns + layer.input_ns + layer.weight_ns:
                raise source.error((*place, "forward_ms"), "the layer takes no time at all")
            layers += [layer] * entry.repeat
        before, after = (
            _costs_of(source.read(_Part, part, place), source, place)
            for part, place in ((table.before, (*at, "before")), (table.after, (*at, "after")))
        )
        setting = Setting(table.microbatch_size, table.recompute)
        if setting in by_setting:
            raise source.error(at, f"a second entry for {setting}; leave out one")
        num_layers = len(next(iter(by_setting.values())).layers) if by_setting else len(layers)
        if not layers or len(layers) != num_layers:
            raise source.error(
                (*at, "layers"),
                f"{len(layers)} layers, but the first setting has {num_layers or 'none'}; expected "
                "the same model in every setting",
            )
        action_ns = table.action_ms * NS_PER_MS
        by_setting[setting] = ModelCosts(before, tuple(layers), after, action_ns)
    return CostSet(
        **{key: getattr(given, key) for key in (*_TEXTS, "seq_len", "device_name")},
        origin=f"file {file.name}",
        is_busy=given.busy_machine,
        by_setting=by_setting,
        link=LinkCosts(link.latency_ms * NS_PER_MS, link.gb_per_s * BYTES_PER_GB, link.error),
    )


def _costs_of(part: _Part, source: Source, place: Place) -> StageCosts:
    """The costs of a part; what it leaves out of a backward follows from the rest."""
    backward_ms, input_ms, weight_ms = part.backward_ms, part.input_ms, part.weight_ms
    if input_ms is None and weight_ms is None and backward_ms is not None:
        input_ms = weight_ms = backward_ms / 2
    if input_ms is None or weight_ms is None:
        both = input_ms is None and weight_ms is None
        key = "backward_ms" if both else "input_ms" if input_ms is None else "weight_ms"
        raise source.error((*place, key), "is missing")
    held = part.held_after_forward_mib
    sizes = {name: getattr(part, f"{name}_mib") for name in _SIZES}
    if part.held_after_input_mib is None:
        sizes["held_after_input"] = held
    return StageCosts(
        forward_ns=part.forward_ms * NS_PER_MS,
        backward_ns=(input_ms + weight_ms if backward_ms is None else backward_ms) * NS_PER_MS,
        input_ns=input_ms * NS_PER_MS,
        weight_ns=weight_ms * NS_PER_MS,
        error=part.error,
        **{_NAMES[name]: round(mib * MIB) for name, mib in sizes.items()},
        optimizer_ns=part.optimizer_ms * NS_PER_MS,
    )


def write_costs_file(costs: CostSet, file: Path, option: str = "") -> None:
    """Write costs as a file that `read_costs_file` reads; `option` is named where it cannot be.

    Raises StoreError.
    """
    lines = [*(f"{key} = {quoted(getattr(costs, key))}" for key in _TEXTS)]
    lines.append(f"seq_len = {costs.seq_len}")
    if costs.device_name:
        lines.append(f"device_name = {quoted(costs.device_name)}")
    if costs.is_busy:
        lines.append("busy_machine = true")
    lines += ["", f"# {costs.origin}", "[link]", f"latency_ms = {_ms(costs.link.latency_ns)}"]
    if math.isfinite(costs.link.bytes_per_s):
        lines.append(f"gb_per_s = {as_toml(costs.link.bytes_per_s / BYTES_PER_GB)}")
    lines.append(f"error = {as_toml(costs.link.error)}")
    for one, of_model in costs.by_setting.items():
        lines += ["", "[[setting]]", f"microbatch_size = {one.microbatch_size}"]
        lines.append(f"recompute = {as_toml(one.recompute)}")
        lines.append(f"action_ms = {_ms(of_model.action_ns)}")
        lines += ["", "[setting.before]", *_lines_of_part(of_model.before)]
        for layer, equal in itertools.groupby(of_model.layers):
            lines += ["", "[[setting.layers]]", f"repeat = {len(list(equal))}"]
            lines += _lines_of_part(layer)
        lines += ["", "[setting.after]", *_lines_of_part(of_model.after)]
    with whole_file(file, option) as opened:
        opened.write("\n".join([*lines, ""]).encode())


def _lines_of_part(part: StageCosts) -> Iterator[str]:
    for name in _TIMES:
        yield f"{name}_ms = {_ms(getattr(part, f'{name}_ns'))}"
    for name in _SIZES:
        yield f"{name}_mib = {as_toml(getattr(part, _NAMES[name]) / MIB)}"
    yield f"error = {as_toml(part.error)}"


def _ms(ns: float) -> str:
    return as_toml(float(ns / NS_PER_MS))
