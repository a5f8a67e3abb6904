"""Opens channels between ranks, and keeps the communicators that they use."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from engine.model.stage_module import Message
from engine.plan.lower import Edge
from engine.run.clock import Clock, HostClock, Ping
from engine.run.p2p.channel import Channel
from engine.run.p2p.gloo import GlooChannel
from engine.run.p2p.nccl import NcclChannel
from engine.run.p2p.shapes import Shapes
from engine.run.p2p.shared_memory import can_share_memory, open_channels

Ranks = tuple[int, ...]


class Fabric:
    """Opens channels between ranks of the default process group.

    Made once per process and used for case after case: communicators are expensive, so they are
    kept. The constructor and `connect` are collective: every rank of the default group calls them,
    in the same order, whether it takes part in the case or not.
    """

    def __init__(self, device: torch.device, clock: Clock, is_device_shared: bool) -> None:
        self.device, self.clock = device, clock
        self._uses_nccl = device.type == "cuda" and not is_device_shared
        self._host_group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self._nccl_groups: dict[tuple[Edge, int, int], dist.ProcessGroup] = {}
        self._sum_groups: dict[Ranks, dist.ProcessGroup] = {}
        self._host_groups: dict[Ranks, dist.ProcessGroup] = {}
        self.shares_memory = device.type == "cpu" and can_share_memory(self._gather_from_all)

    @property
    def transport(self) -> str:
        """The way that messages take: `memory`, `gloo`, `nccl` or `gloo via host memory`."""
        if self._uses_nccl:
            return "nccl"
        if self.shares_memory:
            return "memory"
        return "gloo" if self.device.type == "cpu" else "gloo via host memory"

    def transport_with(self, delays_ns: Mapping[Edge, int] | None) -> str:
        """What moves messages that are delayed, for emulation: gloo holds them up on both ends."""
        return "gloo" if delays_ns and self.transport == "memory" else self.transport

    def connect(
        self, edges: list[Edge], ranks: Ranks, shared: Sequence[Ranks], replicas: int = 1
    ) -> None:
        """Make the communicators that are missing. Collective; blocks until they exist.

        `ranks[stage]` owns a stage; each of `shared` are ranks that share a weight. All are ranks
        within a pipeline; those of replica d come d x world size later.
        """
        world_size = len(set(ranks))
        everyone = tuple(range(replicas * world_size))
        for pipeline in (everyone[at : at + world_size] for at in everyone[::world_size]):
            if self._uses_nccl:
                for edge in edges:
                    source, target = ranks[edge.source], ranks[edge.target]
                    self._connect_edge(edge, pipeline[source], pipeline[target])
            self._connect_hosts(pipeline)
            for some in sorted({tuple(range(world_size)), *shared}):
                self._connect_sum(tuple(pipeline[rank] for rank in some))
        if replicas > 1:
            for some in [everyone[rank::world_size] for rank in range(world_size)] + [everyone]:
                self._connect_hosts(some)
                self._connect_sum(some)

    def mesh_of(self, replica: Ranks, pipeline: Ranks, everyone: Ranks) -> DeviceMesh:
        """The processes as torch's mesh of the communicators that `connect` has made.

        `replica`: this process and those of its rank in the other replicas; `pipeline`: those of
        its own replica.
        """
        return DeviceMesh.from_group(
            [self._sum_groups[replica], self._sum_groups[pipeline]],
            self.device.type,
            mesh=torch.tensor(everyone).view(len(replica), len(pipeline)),
            mesh_dim_names=("replica", "pipeline"),
        )

    def _connect_hosts(self, ranks: Ranks) -> None:
        if ranks not in self._host_groups:
            self._host_groups[ranks] = dist.new_group(list(ranks), backend="gloo")

    def _connect_sum(self, ranks: Ranks) -> None:
        if ranks not in self._sum_groups:
            backend = "nccl" if self._uses_nccl else "gloo"
            self._sum_groups[ranks] = dist.new_group(list(ranks), backend=backend)
            if dist.get_rank() in ranks:  # as for edges: ready before anything is timed
                self.sum_over(torch.zeros(1, device=self.device), ranks)

    def _connect_edge(self, edge: Edge, source: int, target: int) -> None:
        """One communicator, and one number through it, so that it is ready before any timing.

        NCCL builds it at first use and blocks the host until both ends are there: inside a step,
        with ends used in different orders, that could hang.
        """
        key = (edge, source, target)
        if key in self._nccl_groups:
            return
        group = self._nccl_groups[key] = dist.new_group([source, target], backend="nccl")
        number = torch.zeros(1, device=self.device)
        if dist.get_rank() == source:
            dist.send(number, target, group)
        elif dist.get_rank() == target:
            dist.recv(number, source, group)
        torch.cuda.synchronize(self.device)

    def open_channels(
        self,
        edges: list[Edge],
        ranks: tuple[int, ...],
        messages: Sequence[Message],
        num_microbatches: int,
        *,
        with_shapes: bool,
        delays_ns: Mapping[Edge, int] | None = None,
    ) -> dict[Edge, Channel]:
        """Return this rank's end of each edge that it has one of.

        Collective over `ranks`, which must have been connected.

        `messages[stage]` is what a stage sends to the next, at its longest. `with_shapes`: shapes
        vary, and travel with each message. `delays_ns`: by how much longer the messages of an edge
        shall take, for emulation over gloo.
        """
        everyone = tuple(sorted(set(ranks)))
        if len(everyone) == 1:
            return {}
        me = dist.get_rank()
        if self.transport_with(delays_ns) == "memory":
            gather = functools.partial(self.gather_objects, ranks=everyone)
            return {**open_channels(edges, ranks, me, messages, num_microbatches, gather)}
        channels: dict[Edge, Channel] = {}
        num_edges = len(edges)
        num_tags = 2 * num_edges * num_microbatches  # an edge's data and shapes, by microbatch
        for index, edge in enumerate(edges):
            source, target = ranks[edge.source], ranks[edge.target]
            if me in (source, target):
                peer = target if me == source else source
                assert self._host_group is not None
                tags, shape_tags = (
                    range(first, num_tags, 2 * num_edges) for first in (index, num_edges + index)
                )
                shapes = Shapes(self._host_group, peer, shape_tags) if with_shapes else None
                group = self._nccl_groups.get((edge, source, target))
                delay_ns = (delays_ns or {}).get(edge, 0)
                channels[edge] = self._open(group, peer, tags, shapes, delay_ns)
        return channels

    def _open(
        self,
        group: dist.ProcessGroup | None,
        peer: int,
        tags: range,
        shapes: Shapes | None,
        delay_ns: int,
    ) -> Channel:
        if group is not None:
            return NcclChannel(group, peer, self.device, self.clock, shapes)
        assert self._host_group is not None
        return GlooChannel(self._host_group, peer, tags, self.device, shapes, delay_ns)

    def group_of(self, ranks: Ranks) -> dist.ProcessGroup:
        """The communicator of ranks that have been connected, for the tensors of its device."""
        return self._sum_groups[ranks]

    def sum_over(self, tensor: Tensor, ranks: Ranks) -> None:
        """Add the ranks' tensors in place. Blocks until all are here; equal bit for bit."""
        dist.all_reduce(tensor, group=self._sum_groups[ranks])

    def gather_objects(self, ours: Any, ranks: Ranks) -> list[Any]:
        """Every rank's object, in order of rank, on all of them. Blocks until all are here."""
        theirs: list[Any] = [None] * len(ranks)
        dist.all_gather_object(theirs, ours, group=self._host_groups[ranks])
        return theirs

    def _gather_from_all(self, ours: Any) -> list[Any]:
        """Gather as `gather_objects` does, over the default group."""
        if self._host_group is None:
            return [ours]
        theirs: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(theirs, ours, group=self._host_group)
        return theirs

    def exchange_pings(self, peers: Ranks, count: int, ranks: Ranks) -> list[Ping]:
        """The first of the ranks and each of the peers in turn: `count` round trips one by one.

        Over gloo, where nothing is timed. Blocks until this rank's are over. Returns the pings that
        it answered: none where it is no peer.
        """
        group, first, me = self._host_groups[ranks], ranks[0], dist.get_rank()
        if me in peers:
            return _answer_pings(first, count, group)
        if me == first:
            for peer in peers:
                _ping(peer, count, group)
        return []


def _ping(peer: int, count: int, group: dist.ProcessGroup) -> None:
    """Ask `count` times, then tell the peer when each ping was sent and was back."""
    clock, number, times = HostClock(), torch.zeros(1), []
    for _ in range(count):
        sent_ns = clock.mark()
        dist.send(number, peer, group)
        dist.recv(number, peer, group)
        times.append((sent_ns, clock.mark()))
    dist.send(torch.tensor(times, dtype=torch.int64), peer, group)


def _answer_pings(asker: int, count: int, group: dist.ProcessGroup) -> list[Ping]:
    clock, number, times = HostClock(), torch.zeros(1), []
    for _ in range(count):
        dist.recv(number, asker, group)
        received_ns, answered_ns = clock.mark(), clock.mark()
        dist.send(number, asker, group)
        times.append((received_ns, answered_ns))
    theirs = torch.zeros(count, 2, dtype=torch.int64)
    dist.recv(theirs, asker, group)
    return [
        Ping(sent_ns, *ours, returned_ns)
        for (sent_ns, returned_ns), ours in zip(theirs.tolist(), times, strict=True)
    ]
