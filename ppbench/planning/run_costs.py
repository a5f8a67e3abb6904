"""The costs of layers that a stored run shows of its stages.

A run knows stages, a plan needs layers. The stages between the first and the last have nothing but
layers, which share what their stage takes. What the first and the last take beyond that, for as
many layers, is what stands before and after the layers:

    stage 0          stage 1         stage 2         stage 3
    before + 2 f     3 f             3 f             2 f + after

With two stages, nothing is taken to stand before the layers. What a microbatch holds is the peak's
activations over the microbatches held; as much again is counted for what an action takes besides,
which a run does not tell apart: a plan from a run errs on the side of too much memory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from engine.plan.action import Op
from engine.plan.model_costs import LayerCosts, LinkCosts, ModelCosts
from ppbench.analysis.costs import StageCosts, stored_costs
from ppbench.config.case import EMULATED, UNKNOWN, VARIABLE
from ppbench.errors import UsageError
from ppbench.planning.cost_set import CostSet, Setting, problem_of
from ppbench.store import Store, check_ok

LEAST_ERROR = 0.01
"""The least relative error: launches differ by so much, however many actions one had."""
_MEMORY = ("parameter_bytes", "gradient_bytes", "optimizer_bytes", "activation_bytes")


@dataclass(frozen=True)
class _Spread:
    """An amount of each stage, spread over the parts of a model."""

    before: float
    layers: tuple[float, ...]
    after: float

    def parts(self) -> tuple[float, ...]:
        return (self.before, *self.layers, self.after)


def costs_of_run(store: Store, name: str) -> CostSet:
    """The costs of the layers of a run's model, in the setting that it was run in.

    `name` is the run's id or what stands for it. Raises UsageError for a run that does not tell
    what its layers cost.
    """
    run = store.find(name)
    ranks = store.table("ranks", [run["run_id"]]).sort_values("rank")
    _check(run, ranks)
    edges = store.table("edges", [run["run_id"]])
    if edges.empty:
        raise _refused(run, "the sizes and times of its messages cannot be read")
    costs = stored_costs(run, edges)
    stages = _Stages(run, ranks)
    by_action = _by_action(costs.by_stage)
    spread = {field: stages.spread(totals) for field, totals in by_action.items()}
    of_model = stages.model_costs(spread, _error_of(run), _message_bytes(edges))
    setting = Setting(int(run["train_microbatch_size"]), bool(run["train_recompute"]))
    found = CostSet(
        *(str(run["model_preset"]), str(run["model_dtype"]), int(run["seq_len"])),
        *(str(run["train_optimizer"]), str(run["device"]), f"run {run['run_id']}"),
        {setting: of_model},
        _link_of(edges),
    )
    if (problem := problem_of(found)) is not None:
        raise _refused(run, f"its costs cannot be used: {problem}")
    return found


def _check(run: pd.Series, ranks: pd.DataFrame) -> None:
    """Raise UsageError for a run that does not tell what its layers cost."""
    check_ok(run, "costs")
    if run["device"] == EMULATED:
        raise _refused(run, "it is emulated: its stages only take a set time, and hold nothing")
    if run.get("replicas", 1) > 1:
        raise _refused(run, "its replicas share what its stages take and hold")
    if UNKNOWN in (run["model_preset"], run["train_optimizer"]):
        raise _refused(run, "its model or optimizer is not known, since ppbench did not start it")
    if run["seq_len"] in (VARIABLE, UNKNOWN):
        raise _refused(run, "its microbatches are of many lengths, or of unknown ones")
    if len(set(json.loads(str(run["train_recompute_stages"])))) > 1:
        raise _refused(run, "it recomputes on some stages only; expected all or none")
    if run[["op_costs_ns", "layers_per_stage", "parameters_per_stage", "program"]].isna().any():
        raise _refused(run, "it has no costs of its stages, or not their numbers of layers")
    if (num_stages := len(json.loads(str(run["layers_per_stage"])))) < 2:
        raise _refused(
            run,
            f"it has {num_stages} stage, whose layers and head cannot be told apart; expected 2",
        )
    lacking = [key for key in _MEMORY if not len(ranks) or ranks[key].isna().any()]
    if lacking or (ranks["peak_held_microbatches"].fillna(0) < 1).any():
        what = ", ".join(lacking) or "the number of microbatches held"
        raise _refused(run, f"its memory was not measured: {what} is missing on some rank")


def _refused(run: pd.Series, reason: str) -> UsageError:
    return UsageError(
        f"run {run['run_id']}: {reason}; take another run, a costs file, or measure the costs here"
    )


class _Stages:
    """A run's stages: their layers, and what their ranks tell of their memory."""

    def __init__(self, run: pd.Series, ranks: pd.DataFrame) -> None:
        self._run, self._ranks = run, ranks
        self._counts: list[int] = json.loads(str(run["layers_per_stage"]))
        self._parameters: list[int] = json.loads(str(run["parameters_per_stage"]))

    def spread(self, totals: Sequence[float]) -> _Spread:
        """An amount of each stage over its layers, and what is left over before and after them."""
        counts, last = self._counts, len(self._counts) - 1
        usual = self._usual(totals)
        layers: list[float] = []
        rests = {}
        for stage, (total, count) in enumerate(zip(totals, counts, strict=True)):
            is_end = stage in (0, last)
            each = min(usual, total / count) if is_end and count else total / max(1, count)
            layers += [each] * count
            rests[stage] = total - each * count if is_end else 0.0
        return _Spread(max(0.0, rests[0]), tuple(layers), max(0.0, rests[last]))

    def _usual(self, totals: Sequence[float]) -> float:
        """What a layer takes where there are only layers; of two stages, in the first."""
        inner = range(1, len(totals) - 1)
        if num_layers := sum(self._counts[stage] for stage in inner):
            return sum(totals[stage] for stage in inner) / num_layers
        stage = 0 if self._counts[0] else len(totals) - 1
        return totals[stage] / self._counts[stage]

    def model_costs(
        self, times: dict[str, _Spread], error: float, message_bytes: int
    ) -> ModelCosts:
        """Put the parts together from the actions' times and the memory of the ranks."""
        held = self._held()
        of_stage = [held[stage] for stage, count in enumerate(self._counts) for _ in range(count)]
        besides = [held[0], *of_stage, held[-1]]
        kept, static = self.spread(held).parts(), self.spread(self._static()).parts()
        optimizer = self.spread(self._optimizer_ns()).parts()
        by_part = zip(*(spread.parts() for spread in times.values()), strict=True)
        parts = [
            LayerCosts(
                **dict(zip(times, of_part, strict=True)),
                error=error,
                held_after_forward=math.ceil(kept[index]),
                held_after_input=math.ceil(kept[index]),
                transient_bytes=math.ceil(besides[index]),
                static_bytes=math.ceil(static[index]),
                message_bytes=message_bytes if index < len(kept) - 1 else 0,
                optimizer_ns=optimizer[index],
            )
            for index, of_part in enumerate(by_part)
        ]
        before, *layers, after = parts
        return ModelCosts(before, tuple(layers), after)

    def _held(self) -> list[float]:
        """Bytes of one microbatch on each stage; the stages of a rank hold equally much."""
        held = self._ranks["activation_bytes"] / self._ranks["peak_held_microbatches"]
        return self._of_stages(list(held))

    def _static(self) -> list[float]:
        """Bytes that are always there; gradients may not all have been at the peak."""
        ranks = self._ranks
        gradients = ranks[["gradient_bytes", "parameter_bytes"]].max(axis=1)
        buffers = ranks["buffer_bytes"].fillna(0)
        of_ranks = ranks["parameter_bytes"] + gradients + ranks["optimizer_bytes"] + buffers
        whole = self._of_stages(list(of_ranks))
        return [n * share for n, share in zip(whole, self._shares(), strict=True)]

    def _optimizer_ns(self) -> list[float]:
        """By parameters: a run tells the longest time of any rank."""
        ns = 0.0 if pd.isna(self._run["optimizer_ns"]) else float(self._run["optimizer_ns"])
        most = max(self._of_rank(stage) for stage in range(len(self._counts)))
        return [ns * number / max(1, most) for number in self._parameters]

    def _shares(self) -> list[float]:
        """Each stage's part of its rank's parameters."""
        return [n / max(1, self._of_rank(stage)) for stage, n in enumerate(self._parameters)]

    def _of_rank(self, stage: int) -> int:
        """Parameters of the rank of a stage."""
        owned = next(stages for stages in self._owned() if stage in stages)
        return sum(self._parameters[other] for other in owned)

    def _of_stages(self, of_ranks: Sequence[float]) -> list[float]:
        """By stage, the amount of its rank."""
        by_stage = {s: n for owned, n in zip(self._owned(), of_ranks, strict=True) for s in owned}
        return [float(by_stage[stage]) for stage in range(len(self._counts))]

    def _owned(self) -> list[list[int]]:
        return [json.loads(str(stages)) for stages in self._ranks["stages"]]


def _by_action(by_stage: StageCosts) -> dict[str, list[float]]:
    """Times of each stage by the fields of `LayerCosts`; halves, or a whole, follow from others."""
    num_stages = len(by_stage[Op.F])
    none = (None,) * num_stages
    columns = zip(*(by_stage.get(op, none) for op in (Op.F, Op.B, Op.I, Op.W)), strict=True)
    rows = []
    for forward, whole, first, second in columns:
        halves = None if first is None or second is None else (first, second)
        both = sum(halves) if halves else 0
        backward = both if whole is None else whole
        rows.append((forward or 0, backward, *(halves or (backward / 2, backward / 2))))
    names = ("forward_ns", "backward_ns", "input_ns", "weight_ns")
    return {n: list(map(float, c)) for n, c in zip(names, zip(*rows, strict=True), strict=True)}


def _error_of(run: pd.Series) -> float:
    """The relative standard error of mean costs, from how single actions vary."""
    num = max(1, int(run["num_microbatches"]) * int(run["measure_steps"]))
    variation = 0.0 if pd.isna(run["op_variation"]) else float(run["op_variation"])
    return max(LEAST_ERROR, variation / math.sqrt(num))


def _message_bytes(edges: pd.DataFrame) -> int:
    forward = edges[edges["target"] > edges["source"]]
    return math.ceil(float(forward["num_bytes"].max()))


def _link_of(edges: pd.DataFrame) -> LinkCosts:
    """All messages of a run are of one size, so that it tells a bandwidth and no latency."""
    if not edges["moving_ns"].sum():
        return LinkCosts()
    bytes_per_s = edges["num_bytes"].sum() / edges["moving_ns"].sum() * 1e9
    spread = edges["moving_ns"].std() / edges["moving_ns"].mean() if len(edges) > 1 else 0.0
    return LinkCosts(0.0, float(bytes_per_s), float(spread) / math.sqrt(len(edges)))
