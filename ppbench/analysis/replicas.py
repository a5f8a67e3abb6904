"""Costs of replicas that train together.

All replicas run one program, so its mean costs are those of all of them; what one replica takes
more or less than that is skew. A replica's mean differs from that of all by chance too: it is
shrunk towards it as `ppbench.analysis.costs` does with stages, and is the same where the F test
does not reject that all replicas are alike.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import pandas as pd

from engine.arrays import Ints
from engine.plan.action import COMPUTE_OPS, RECV_OPS, SEND_OPS, Action, Op
from engine.plan.messages import edge_of
from engine.plan.program import Program
from ppbench.analysis.collectives import Moving, mean_moving
from ppbench.analysis.costs import Costs, link_ns, share_of_difference, stage_ns
from ppbench.analysis.metrics import compute_spans


@dataclass(frozen=True)
class ReplicaCosts:
    """Mean costs of all replicas, of each, and of the collectives that join them."""

    mean: Costs
    own: tuple[Costs, ...]  # by replica
    moving: Moving

    def alike(self) -> ReplicaCosts:
        """Every replica at the mean costs of all."""
        return replace(self, own=(self.mean,) * len(self.own))

    def changed(self, change: Callable[[Costs], Costs]) -> ReplicaCosts:
        """The same with a change of the mean costs and of each replica's."""
        new = {id(each): change(each) for each in _once(self.own)}
        own = tuple(new[id(each)] for each in self.own)
        return replace(self, mean=change(self.mean), own=own)

    def without_collectives(self) -> ReplicaCosts:
        """Collectives that take no time, but join the replicas."""
        return replace(self, moving={})

    def times(self, lowered: Program) -> list[Ints]:
        """The times of each replica's step."""
        took = {id(each): each.times(lowered, self.moving) for each in _once(self.own)}
        return [took[id(each)] for each in self.own]


def _once(every: Sequence[Costs]) -> list[Costs]:
    return list({id(each): each for each in every}.values())


def stored_replica_costs(run: pd.Series, mean: Costs, collectives: pd.DataFrame) -> ReplicaCosts:
    """The costs that a run was attributed with; `collectives` are its rows of that table."""
    own = tuple(replace(one, of_pairs=mean.of_pairs) for one in _stored_own(run))
    return ReplicaCosts(mean, own, mean_moving(collectives))


def replica_ns(run: pd.Series) -> list[float]:
    """Each replica's mean time for a microbatch, over all its stages."""
    return [sum(stage_ns(own)) for own in _stored_own(run)]


class SlowLink(NamedTuple):
    """A link of one replica beside that of the others."""

    link: int  # its first stage
    replica: int
    ns: float  # mean moving time of a message, over both directions
    others_ns: float  # the median of the other replicas'


def slowest_link(run: pd.Series) -> SlowLink | None:
    """The link of a replica whose messages take most beside those of the others; None without."""
    by_replica = [link_ns(own) for own in _stored_own(run)]
    found = []
    for link in by_replica[0]:
        taken = [links.get(link, 0.0) for links in by_replica]
        slowest = max(range(len(taken)), key=taken.__getitem__)
        others = statistics.median(ns for replica, ns in enumerate(taken) if replica != slowest)
        found.append(SlowLink(link, slowest, taken[slowest], others))
    return max(found, key=lambda one: one.ns - one.others_ns, default=None)


def own_as_json(costs: ReplicaCosts) -> str:
    """Each replica's costs by op and stage, a message's at its SEND."""
    rows = []
    for own in costs.own:
        stages = range(len(own.by_stage[Op.F]))
        sends = {
            op: [own.by_channel.get(edge_of(Action(stage, op, 0))) for stage in stages]
            for op in SEND_OPS
        }
        rows.append({**own.by_stage, **sends})
    return json.dumps(rows)


def _stored_own(run: pd.Series) -> tuple[Costs, ...]:
    own = []
    for stored in json.loads(str(run["replica_costs_ns"])):
        by_op = {Op(op): tuple(of_op) for op, of_op in stored.items()}
        by_channel = {
            edge_of(Action(stage, op, 0)): ns
            for op in SEND_OPS & by_op.keys()
            for stage, ns in enumerate(by_op[op])
            if ns is not None
        }
        by_stage = {op: ns for op, ns in by_op.items() if op not in SEND_OPS}
        own.append(Costs(by_stage, by_channel))
    return tuple(own)


def replica_costs(
    mean: Costs, spans: pd.DataFrame, messages: pd.DataFrame, joined: pd.DataFrame
) -> ReplicaCosts:
    """The mean costs of each replica beside those of all, from the spans of all.

    `messages` and `joined` are those of `analysis.transfers` and `analysis.collectives`.
    """
    compute = compute_spans(spans)
    taken = compute.assign(ns=compute["end_ns"] - compute["start_ns"])
    computed = _offsets(taken, ["op", "stage"])
    sent = _offsets(messages.assign(ns=messages["moving_ns"]), ["source", "target"])
    own = []
    for replica in range(int(spans["replica"].max()) + 1):
        by_stage = {
            op: tuple(
                None
                if ns is None
                else max(0, ns + round(computed.get((op.value, stage), {}).get(replica, 0.0)))
                for stage, ns in enumerate(of_op)
            )
            for op, of_op in mean.by_stage.items()
        }
        by_channel = {
            edge: max(0, ns + round(sent.get((edge.source, edge.target), {}).get(replica, 0.0)))
            for edge, ns in mean.by_channel.items()
        }
        own.append(Costs(by_stage, by_channel, mean.of_pairs))
    return ReplicaCosts(mean, tuple(own), mean_moving(joined))


def _offsets(timed: pd.DataFrame, keys: list[str]) -> dict[tuple[object, object], dict[int, float]]:
    """By op and stage, or by both ends of a channel: by how much each replica's mean is more."""
    offsets: dict[tuple[object, object], dict[int, float]] = {}
    for (first, second), group in timed.groupby(keys, observed=True):
        samples = {
            int(str(replica)): own.to_numpy()
            for replica, own in group["ns"].groupby(group["replica"])
        }
        weight, overall = share_of_difference(samples), float(group["ns"].mean())
        offsets[first, second] = {
            replica: weight * (float(own.mean()) - overall) for replica, own in samples.items()
        }
    return offsets


def slowest_replica(spans: pd.DataFrame) -> int:
    """The replica with the most time of its own: of computations, and of messages that move.

    `spans` are of all replicas, with the column `waiting_ns`.
    """
    own = spans[spans["op"].isin([*COMPUTE_OPS, *RECV_OPS])]
    took = (own["end_ns"] - own["start_ns"] - own["waiting_ns"]).groupby(own["replica"]).sum()
    return int(str(took.idxmax()))
