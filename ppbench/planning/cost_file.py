"""Costs in a file, so that one can plan for a cluster that one does not have.

`docs/howto/plan.md` shows one. Its tables are:

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
    transient_mib             while an action runs
    static_mib                parameters, gradients, optimizer state, buffers
    message_mib, optimizer_ms, error (relative standard error)

Needed of a layer are its times, `held_after_forward`, `static` and `message`; of the other two
their times and `static`. Without halves, each is half of the backward; without a backward, it is
both; without `held_after_input`, a first half leaves all.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from engine.plan.model_costs import LayerCosts, LinkCosts, ModelCosts
from ppbench.config.toml import (
    Place,
    Source,
    Tree,
    as_toml,
    parse,
    quoted,
    read_text,
    shown,
    unknown_key,
)
from ppbench.errors import UsageError
from ppbench.files import whole_file
from ppbench.planning.cost_set import CostSet, Setting

NS_PER_MS = 1_000_000
MIB = 2**20
BYTES_PER_GB = 1e9
MOST_LAYERS = 10_000
_TIMES = ("forward", "backward", "input", "weight", "optimizer")
_SIZES = ("held_after_forward", "held_after_input", "transient", "static", "message")
_NAMES = {name: name if name.startswith("held") else f"{name}_bytes" for name in _SIZES}
"""Fields of `LayerCosts`, by the names of their sizes."""
_OF_PART = (
    *(f"{name}_ms" for name in _TIMES),
    *(f"{name}_mib" for name in _SIZES),
    "error",
)
_TEXTS = ("model", "dtype", "optimizer", "device")
_TOP = (*_TEXTS, "seq_len", "device_name", "link", "setting")
_OF_SETTING = ("microbatch_size", "recompute", "action_ms", "before", "layers", "after")


def read_costs_file(file: Path) -> CostSet:
    """Read costs from a TOML file.

    Raises UsageError for a file that cannot be read, SweepFileError with file, line and key.
    """
    try:
        text = read_text(file)
        tree = parse(file, text)
    except UsageError as error:
        raise UsageError(str(error).replace("sweep file", "costs file")) from None
    return _Reader(Source(str(file), text, frozenset())).read(tree, f"file {file.name}")


def write_costs_file(costs: CostSet, file: Path, option: str = "") -> None:
    """Write costs as a file that `read_costs_file` reads; `option` is named where it cannot be.

    Raises StoreError.
    """
    lines = [*(f"{key} = {quoted(getattr(costs, key))}" for key in _TEXTS)]
    lines.append(f"seq_len = {costs.seq_len}")
    if costs.device_name:
        lines.append(f"device_name = {quoted(costs.device_name)}")
    lines += ["", f"# {costs.origin}", "[link]", f"latency_ms = {_ms(costs.link.latency_ns)}"]
    if math.isfinite(costs.link.bytes_per_s):
        lines.append(f"gb_per_s = {as_toml(costs.link.bytes_per_s / BYTES_PER_GB)}")
    lines.append(f"error = {as_toml(costs.link.error)}")
    for setting, of_model in costs.by_setting.items():
        lines += ["", "[[setting]]", f"microbatch_size = {setting.microbatch_size}"]
        lines.append(f"recompute = {as_toml(setting.recompute)}")
        lines.append(f"action_ms = {_ms(of_model.action_ns)}")
        lines += ["", "[setting.before]", *_lines_of_part(of_model.before)]
        for layer, equal in itertools.groupby(of_model.layers):
            lines += ["", "[[setting.layers]]", f"repeat = {len(list(equal))}"]
            lines += _lines_of_part(layer)
        lines += ["", "[setting.after]", *_lines_of_part(of_model.after)]
    with whole_file(file, option) as opened:
        opened.write("\n".join([*lines, ""]).encode())


class _Reader:
    """Reads the tables of a costs file; every error names the place."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def read(self, tree: Tree, origin: str) -> CostSet:
        self._check_keys(tree, (), _TOP)
        texts = {}
        for key in _TEXTS:
            if key not in tree:
                raise self._missing((), key)
            if not isinstance(text := tree[key], str) or not text:
                raise self._source.error((key,), f"expected a name, got {shown(text)}")
            texts[key] = text
        seq_len = self._whole(tree, (), "seq_len")
        link = LinkCosts()
        if "link" in tree:
            table, place = self._table(tree, (), "link"), ("link",)
            self._check_keys(table, place, ("latency_ms", "gb_per_s", "error"))
            latency_ms = self._amount(table, place, "latency_ms", 0.0)
            gb_per_s = self._amount(table, place, "gb_per_s", math.inf)
            if gb_per_s == 0:
                problem = "is 0; expected more, or none: no limit"
                raise self._source.error((*place, "gb_per_s"), problem)
            error = self._amount(table, place, "error", 0.0)
            link = LinkCosts(latency_ms * NS_PER_MS, gb_per_s * BYTES_PER_GB, error)
        by_setting: dict[Setting, ModelCosts] = {}
        for index, table in enumerate(self._tables(tree, (), "setting")):
            at = ("setting", index)
            self._check_keys(table, at, _OF_SETTING)
            size = self._whole(table, at, "microbatch_size")
            recompute = table.get("recompute", False)
            if not isinstance(recompute, bool):
                problem = f"expected true or false, got {shown(recompute)}"
                raise self._source.error((*at, "recompute"), problem)
            before, after = (
                self._part(self._table(table, at, name), (*at, name), is_layer=False)
                for name in ("before", "after")
            )
            layers: list[LayerCosts] = []
            for number, layer in enumerate(self._tables(table, at, "layers")):
                of_layer = (*at, "layers", number)
                repeat = self._whole(layer, of_layer, "repeat", 1)
                if len(layers) + repeat > MOST_LAYERS:
                    problem = f"more than {MOST_LAYERS:,} layers; expected fewer"
                    raise self._source.error((*of_layer, "repeat"), problem)
                layers += [self._part(layer, of_layer, is_layer=True)] * repeat
            action_ms = self._amount(table, at, "action_ms", 0.0)
            costs = ModelCosts(before, tuple(layers), after, action_ms * NS_PER_MS)
            setting = Setting(size, recompute)
            if setting in by_setting:
                raise self._source.error(at, f"a second entry for {setting}; leave out one")
            first = next(iter(by_setting.values()), costs)
            if len(costs.layers) != len(first.layers):
                raise self._source.error(
                    (*at, "layers"),
                    f"{len(costs.layers)} layers, but the first setting has {len(first.layers)}; "
                    "expected the same model in every setting",
                )
            by_setting[setting] = costs
        device_name = str(tree.get("device_name", ""))
        return CostSet(
            **texts,
            seq_len=seq_len,
            origin=origin,
            by_setting=by_setting,
            link=link,
            device_name=device_name,
        )

    def _part(self, table: Tree, place: Place, *, is_layer: bool) -> LayerCosts:
        self._check_keys(table, place, (*_OF_PART, *(["repeat"] * is_layer)))
        needed = ("held_after_forward", "static", "message") if is_layer else ("static",)
        sizes: dict[str, int] = {}
        for name in _SIZES:
            if name in needed and f"{name}_mib" not in table:
                raise self._missing(place, f"{name}_mib")
            usual = sizes["held_after_forward"] / MIB if name == "held_after_input" else 0.0
            sizes[name] = round(self._amount(table, place, f"{name}_mib", usual) * MIB)
        times = {name: self._amount(table, place, f"{name}_ms", -1.0) for name in _TIMES}
        if times["forward"] < 0:
            raise self._missing(place, "forward_ms")
        lacking = [name for name in ("input", "weight") if times[name] < 0]
        if len(lacking) == 1 or (lacking and times["backward"] < 0):
            key = "backward_ms" if len(lacking) == 2 else f"{lacking[0]}_ms"
            raise self._missing(place, key)
        if lacking:
            times["input"] = times["weight"] = times["backward"] / 2
        elif times["backward"] < 0:
            times["backward"] = times["input"] + times["weight"]
        times["optimizer"] = max(0.0, times["optimizer"])
        if is_layer and not any(ms for name, ms in times.items() if name != "optimizer"):
            raise self._source.error((*place, "forward_ms"), "the layer takes no time at all")
        return LayerCosts(
            forward_ns=times["forward"] * NS_PER_MS,
            backward_ns=times["backward"] * NS_PER_MS,
            input_ns=times["input"] * NS_PER_MS,
            weight_ns=times["weight"] * NS_PER_MS,
            error=self._amount(table, place, "error", 0.0),
            **{_NAMES[name]: size for name, size in sizes.items()},
            optimizer_ns=times["optimizer"] * NS_PER_MS,
        )

    def _amount(self, table: Tree, place: Place, key: str, default: float) -> float:
        if key not in table:
            return default
        value = table[key]
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._source.error((*place, key), f"expected a number, got {shown(value)}")
        if not math.isfinite(value) or value < 0:
            problem = f"{shown(value)} is out of range; expected a finite number of at least 0"
            raise self._source.error((*place, key), problem)
        return float(value)

    def _whole(self, table: Tree, place: Place, key: str, default: int | None = None) -> int:
        if key not in table and default is not None:
            return default
        if key not in table:
            raise self._missing(place, key)
        value = table[key]
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._source.error((*place, key), f"expected an integer, got {shown(value)}")
        if not 1 <= value <= 2**62:
            problem = f"{shown(value)} is out of range; expected at least 1"
            raise self._source.error((*place, key), problem)
        return value

    def _table(self, table: Tree, place: Place, key: str) -> Tree:
        if key not in table:
            raise self._missing(place, key)
        if not isinstance(value := table[key], dict):
            raise self._source.error((*place, key), f"expected a table, got {shown(value)}")
        return value

    def _tables(self, table: Tree, place: Place, key: str) -> list[Tree]:
        value = table.get(key, [])
        if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
            problem = f"expected tables, [[{key}]], got {shown(value)}"
            raise self._source.error((*place, key), problem)
        if not value:
            raise self._missing(place, key)
        return value

    def _check_keys(self, table: Mapping[str, object], place: Place, known: Sequence[str]) -> None:
        for key, value in table.items():
            if key not in known:
                raise self._source.error((*place, key), unknown_key(key, value, known))

    def _missing(self, place: Place, key: str) -> UsageError:
        return self._source.error((*place, key), "is missing; costs must have it")


def _lines_of_part(part: LayerCosts) -> Iterator[str]:
    for name in _TIMES:
        yield f"{name}_ms = {_ms(getattr(part, f'{name}_ns'))}"
    for name in _SIZES:
        yield f"{name}_mib = {as_toml(getattr(part, _NAMES[name]) / MIB)}"
    yield f"error = {as_toml(part.error)}"


def _ms(ns: float) -> str:
    return as_toml(float(ns / NS_PER_MS))
