"""Opens channels between ranks, and keeps the communicators that they use."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from engine.model.stage_module import Message
from engine.plan.messages import Edge
from engine.run import device as devices
from engine.run.clock import Clock, HostClock, Ping
from engine.run.p2p.channel import Channel
from engine.run.p2p.gloo import GlooChannel, Staging
from engine.run.p2p.nccl import NcclChannel, options_of
from engine.run.p2p.shapes import Shapes
from engine.run.p2p.shared_memory import can_share_memory, open_channels
from engine.run.streams import MOST_EDGES, Streams, TooManyEdgesError

Ranks = tuple[int, ...]
_NO_LIMIT = timedelta(days=365)


class Link(NamedTuple):
    """One of the ways from a process to another: cases with other stages use it as well."""

    source: int
    target: int
    number: int  # among those with both ends in common


class Fabric:
    """Opens channels between ranks of the default process group.

    Made once per process and used for case after case: communicators are expensive, so they are
    kept. The constructor and `connect` are collective: every rank of the default group calls them,
    in the same order, whether it takes part in the case or not.
    """

    def __init__(self, device: torch.device, clock: Clock, is_device_shared: bool) -> None:
        self.device, self.clock = device, clock
        self._is_direct = devices.is_accelerator(device) and not is_device_shared
        self._backend = devices.backend_of(device) if self._is_direct else "gloo"
        self._streams = Streams(device)
        self._timeout = _NO_LIMIT
        self._host_group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self._links: dict[Link, dist.ProcessGroup] = {}
        self._sum_groups: dict[Ranks, dist.ProcessGroup] = {}
        self._host_groups: dict[Ranks, dist.ProcessGroup] = {}
        self.shares_memory = device.type == "cpu" and can_share_memory(self._gather_from_all)

    @property
    def transport(self) -> str:
        """How messages go: `memory`, `gloo via host memory`, or by a backend such as `nccl`."""
        if self._is_direct:
            return self._backend
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
        pipelines = [everyone[at : at + world_size] for at in everyone[::world_size]]
        across = [everyone[rank::world_size] for rank in range(world_size)] + [everyone]
        across = across if replicas > 1 else []
        within = sorted({tuple(range(world_size)), *shared})
        sums = [tuple(pipeline[rank] for rank in some) for pipeline in pipelines for some in within]
        if devices.is_accelerator(self.device):
            check_streams(edges, ranks)
        if self._is_direct:
            # What only earlier cases used is freed: each holds memory of the device, and its
            # stream is one of a pool. One number goes through each link, so that it is ready
            # before any timing: NCCL builds it at first use and blocks the host until both ends
            # are there. Inside a step, with ends used in different orders, that could hang.
            links = [link for p in pipelines for link in links_of(edges, ranks, p)]
            for link in [link for link in self._links if link not in links]:
                _free(self._links.pop(link))
            for some in [some for some in self._sum_groups if some not in (*sums, *across)]:
                _free(self._sum_groups.pop(some))
            for link in links:
                if link not in self._links:
                    group = self._links[link] = self._new_group(link[:2], is_edge=True)
                    number = torch.zeros(1, device=self.device)
                    if dist.get_rank() == link.source:
                        dist.send(number, link.target, group)
                    elif dist.get_rank() == link.target:
                        dist.recv(number, link.source, group)
                    devices.wait_for_all(self.device)
        for some in [*pipelines, *across]:
            if some not in self._host_groups:
                self._host_groups[some] = dist.new_group(list(some), backend="gloo")
        for some in [*sums, *across]:
            if some not in self._sum_groups:
                self._sum_groups[some] = self._new_group(some, is_edge=False)
                if dist.get_rank() in some:  # as for edges: ready before anything is timed
                    self.sum_over(torch.zeros(1, device=self.device), some)

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

    def _new_group(self, ranks: Sequence[int], *, is_edge: bool) -> dist.ProcessGroup:
        """A communicator for tensors of the device. Collective over the default group."""
        more: dict[str, Any] = {}
        if self._is_direct:
            options = options_of(self._backend, is_edge=is_edge)
            more = {"timeout": self._timeout, "pg_options": options}
        group: dist.ProcessGroup = dist.new_group(list(ranks), backend=self._backend, **more)
        return group

    def limit(self, timeout_s: float) -> None:
        """Give what the device's backend does from now on so many seconds; 0: as long as it likes.

        Its own limit, ten minutes of NCCL, would end a case that may take longer.
        """
        self._timeout = timedelta(seconds=timeout_s) if timeout_s else _NO_LIMIT
        if self._is_direct:
            for group in (*self._links.values(), *self._sum_groups.values()):
                if _is_member(group):
                    dist.distributed_c10d._set_pg_timeout(self._timeout, group)

    def lane_stream(self) -> torch.Stream:
        """The stream of the lane of collectives."""
        return self._streams.of_lane()

    def close(self) -> None:
        """Free the communicators of the device. Collective; the fabric is not used again."""
        if self._is_direct:
            for group in (*self._links.values(), *self._sum_groups.values()):
                _free(group)
        self._links.clear()
        self._sum_groups.clear()

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
        links = dict(zip(edges, links_of(edges, ranks, range(max(ranks) + 1)), strict=True))
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
                is_accelerator = devices.is_accelerator(self.device)
                # The place of the edge among this rank's chooses its stream.
                stream = self._streams.of_edge(len(channels)) if is_accelerator else None
                if (group := self._links.get(links[edge])) is not None:
                    assert stream is not None
                    channels[edge] = NcclChannel(
                        group, peer, self.device, self.clock, shapes, stream
                    )
                else:
                    staging = None if stream is None else Staging(self.device, self.clock, stream)
                    delay_ns = (delays_ns or {}).get(edge, 0)
                    channels[edge] = GlooChannel(
                        self._host_group, peer, tags, shapes, delay_ns, staging
                    )
        return channels

    def group_of(self, ranks: Ranks) -> dist.ProcessGroup:
        """The communicator of ranks that have been connected, for the tensors of its device."""
        return self._sum_groups[ranks]

    def host_group_of(self, ranks: Ranks) -> dist.ProcessGroup:
        """The communicator of ranks that have been connected, for what is in host memory."""
        return self._host_groups[ranks]

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
        group, asker, me = self._host_groups[ranks], ranks[0], dist.get_rank()
        clock, number = HostClock(), torch.zeros(1)
        times: list[tuple[int, int]] = []
        if me == asker:
            for peer in peers:
                times.clear()
                for _ in range(count):
                    sent_ns = clock.mark()
                    dist.send(number, peer, group)
                    dist.recv(number, peer, group)
                    times.append((sent_ns, clock.mark()))
                dist.send(torch.tensor(times, dtype=torch.int64), peer, group)
        if me not in peers:
            return []
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


def links_of(edges: Sequence[Edge], ranks: Ranks, processes: Sequence[int]) -> list[Link]:
    """The link of each edge, in their order; `processes` are those of the ranks."""
    used: dict[tuple[int, int], int] = {}
    links = []
    for edge in edges:
        ends = processes[ranks[edge.source]], processes[ranks[edge.target]]
        links.append(Link(*ends, used.get(ends, 0)))
        used[ends] = used.get(ends, 0) + 1
    return links


def check_streams(edges: Sequence[Edge], ranks: Ranks) -> None:
    """Raises TooManyEdgesError, on all ranks alike, if a rank has more edges than streams."""
    ends = [ranks[stage] for edge in edges for stage in (edge.source, edge.target)]
    for rank in sorted(set(ends)):
        if (num_edges := ends.count(rank)) > MOST_EDGES:
            raise TooManyEdgesError(
                f"rank {rank} sends or receives over {num_edges} edges, and a device has streams "
                f"for {MOST_EDGES}: two would share one and wait for each other; use fewer stages "
                "on each rank"
            )


def _free(group: dist.ProcessGroup) -> None:
    if _is_member(group):
        dist.destroy_process_group(group)


def _is_member(group: dist.ProcessGroup) -> bool:
    """Whether this rank is in it; who is not has a number instead."""
    return isinstance(group, dist.ProcessGroup)
