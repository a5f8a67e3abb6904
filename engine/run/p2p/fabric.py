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
from engine.run.clock import Clock
from engine.run.host import can_share_memory
from engine.run.p2p.channel import Channel
from engine.run.p2p.gloo import GlooChannel
from engine.run.p2p.nccl import NcclChannel, options_of
from engine.run.p2p.shapes import Shapes
from engine.run.p2p.shared_memory import open_channels
from engine.run.streams import MOST_EDGES, Streams, TooManyEdgesError

Ranks = tuple[int, ...]
"""Ranks of a pipeline."""
Processes = tuple[int, ...]
"""Processes by their number in the default process group, which counts those of all replicas."""
_NO_LIMIT = timedelta(days=365)


class Link(NamedTuple):
    """One of the ways from a process to another: cases with other stages use it as well."""

    source: int
    target: int
    number: int  # among those with both ends in common


class DelayError(ValueError):
    """Messages cannot be delayed on the way that they go."""


class Fabric:
    """Opens channels between processes of the default process group.

    Made once per process and used for case after case: communicators are expensive, so they are
    kept. The constructor and `connect` are collective: every process of the default group calls
    them, in the same order, whether it takes part in the case or not.
    """

    def __init__(self, device: torch.device, clock: Clock, is_device_shared: bool) -> None:
        self.device, self.clock = device, clock
        self._is_direct = devices.is_accelerator(device) and not is_device_shared
        self._backend = devices.backend_of(device) if self._is_direct else "gloo"
        self._streams = Streams(device)
        self._timeout = _NO_LIMIT
        self._host_group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self._links: dict[Link, dist.ProcessGroup] = {}
        self._sum_groups: dict[Processes, dist.ProcessGroup] = {}
        self._host_groups: dict[Processes, dist.ProcessGroup] = {}
        gather = functools.partial(_gather, group=self._host_group)
        self.shares_memory = device.type == "cpu" and can_share_memory(gather)

    @property
    def transport(self) -> str:
        """How messages go: `memory`, `gloo via host memory`, or by a backend such as `nccl`."""
        if self._is_direct:
            return self._backend
        if self.shares_memory:
            return "memory"
        return "gloo" if self.device.type == "cpu" else "gloo via host memory"

    def connect(
        self, edges: list[Edge], owners: Ranks, sharing: Sequence[Ranks], replicas: int = 1
    ) -> None:
        """Make the communicators that are missing. Collective; blocks until they exist.

        `owners[stage]` is the rank that owns a stage; each of `sharing` are ranks that share a
        weight. The processes of replica d come d x world size later than these ranks.
        """
        world_size = len(set(owners))
        everyone = tuple(range(replicas * world_size))
        pipelines = [everyone[at : at + world_size] for at in everyone[::world_size]]
        across = [everyone[rank::world_size] for rank in range(world_size)] + [everyone]
        across = across if replicas > 1 else []
        within = sorted({tuple(range(world_size)), *sharing})
        sums = [tuple(pipeline[rank] for rank in some) for pipeline in pipelines for some in within]
        if self._is_direct:
            check_streams(edges, owners)
            # What only earlier cases used is freed: each holds memory of the device, and its
            # stream is one of a pool. One number goes through each link, so that it is ready
            # before any timing: NCCL builds it at first use and blocks the host until both ends
            # are there. Inside a step, with ends used in different orders, that could hang.
            links = [link for p in pipelines for link in links_of(edges, owners, p)]
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

    def mesh_of(
        self, counterparts: Processes, pipeline: Processes, everyone: Processes
    ) -> DeviceMesh:
        """The processes as torch's mesh of the communicators that `connect` has made.

        `counterparts`: those of this rank in all replicas; `pipeline`: those of this replica.
        """
        return DeviceMesh.from_group(
            [self._sum_groups[counterparts], self._sum_groups[pipeline]],
            self.device.type,
            mesh=torch.tensor(everyone).view(len(counterparts), len(pipeline)),
            mesh_dim_names=("replica", "pipeline"),
        )

    def _new_group(self, processes: Sequence[int], *, is_edge: bool) -> dist.ProcessGroup:
        """A communicator for tensors of the device. Collective over the default group."""
        more: dict[str, Any] = {}
        if self._is_direct:
            options = options_of(self._backend, is_edge=is_edge)
            more = {"timeout": self._timeout, "pg_options": options}
        group: dist.ProcessGroup = dist.new_group(list(processes), backend=self._backend, **more)
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
        owners: Processes,
        messages: Sequence[Message],
        num_microbatches: int,
        *,
        with_shapes: bool,
        delays_ns: Mapping[Edge, int] | None = None,
    ) -> dict[Edge, Channel]:
        """Return this process's end of each edge that it has one of.

        `owners[stage]` is the process that owns a stage. Collective over these, which must have
        been connected.

        `messages[stage]` is what a stage sends to the next, at its longest. `with_shapes`: shapes
        vary, and travel with each message. `delays_ns`: by how much longer the messages of an edge
        shall take, for emulation. Raises DelayError where they do not go through shared memory.
        """
        everyone = tuple(sorted(set(owners)))
        if len(everyone) == 1:
            return {}
        me = dist.get_rank()
        if self.transport == "memory":
            gather = functools.partial(self.gather_objects, processes=everyone)
            expected = messages, num_microbatches, gather, delays_ns or {}
            return {**open_channels(edges, owners, me, *expected)}
        if delays_ns:
            raise DelayError(
                f"delayed messages would go by {self.transport} here, and only those through "
                "memory can be delayed; run all emulated ranks on one machine, or without delays"
            )
        channels: dict[Edge, Channel] = {}
        links = dict(zip(edges, links_of(edges, owners, range(max(owners) + 1)), strict=True))
        num_edges = len(edges)
        num_tags = 2 * num_edges * num_microbatches  # an edge's data and shapes, by microbatch
        for index, edge in enumerate(edges):
            source, target = owners[edge.source], owners[edge.target]
            if me not in (source, target):
                continue
            peer = target if me == source else source
            assert self._host_group is not None
            tags, shape_tags = (
                range(first, num_tags, 2 * num_edges) for first in (index, num_edges + index)
            )
            shapes = Shapes(self._host_group, peer, shape_tags) if with_shapes else None
            if (group := self._links.get(links[edge])) is not None:
                # The place of the edge among this rank's chooses its stream.
                stream = self._streams.of_edge(len(channels))
                channels[edge] = NcclChannel(group, peer, self.device, self.clock, shapes, stream)
            else:
                channels[edge] = GlooChannel(self._host_group, peer, tags, shapes, self.device)
        return channels

    def group_of(self, processes: Processes) -> dist.ProcessGroup:
        """The communicator of processes that have been connected, for tensors of the device."""
        return self._sum_groups[processes]

    def host_group_of(self, processes: Processes) -> dist.ProcessGroup:
        """The communicator of processes that have been connected, for what is in host memory."""
        return self._host_groups[processes]

    def sum_over(self, tensor: Tensor, processes: Processes) -> None:
        """Add their tensors in place. Blocks until all are here; equal bit for bit."""
        dist.all_reduce(tensor, group=self._sum_groups[processes])

    def gather_objects(self, ours: Any, processes: Processes) -> list[Any]:
        """Every process's object, in their order, on all of them. Blocks until all are here."""
        return _gather(ours, self._host_groups[processes])

    def place_in(self, processes: Processes) -> int:
        """The place of this process among some that have been connected."""
        return processes.index(dist.get_rank())

    def send(self, tensor: Tensor, place: int, processes: Processes) -> None:
        """Send a tensor of the host to one of them, over gloo, where nothing is timed. Blocks."""
        dist.send(tensor, processes[place], self._host_groups[processes])

    def receive(self, tensor: Tensor, place: int, processes: Processes) -> None:
        """Fill a tensor of the host with what one of them sends. Blocks."""
        dist.recv(tensor, processes[place], self._host_groups[processes])


def links_of(edges: Sequence[Edge], owners: Ranks, pipeline: Sequence[int]) -> list[Link]:
    """The link of each edge, in their order; `pipeline` has the process of each rank."""
    used: dict[tuple[int, int], int] = {}
    links = []
    for edge in edges:
        ends = pipeline[owners[edge.source]], pipeline[owners[edge.target]]
        links.append(Link(*ends, used.get(ends, 0)))
        used[ends] = used.get(ends, 0) + 1
    return links


def check_streams(edges: Sequence[Edge], owners: Ranks) -> None:
    """Raises TooManyEdgesError, on all ranks alike, if a rank has more edges than streams."""
    ends = [owners[stage] for edge in edges for stage in (edge.source, edge.target)]
    for rank in sorted(set(ends)):
        if (num_edges := ends.count(rank)) > MOST_EDGES:
            raise TooManyEdgesError(
                f"rank {rank} sends or receives over {num_edges} edges, and a device has streams "
                f"for {MOST_EDGES}: two would share one and wait for each other; use fewer stages "
                "on each rank"
            )


def _gather(ours: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """The object of each process of a group; of this one alone where there is no group."""
    if group is None:
        return [ours]
    theirs: list[Any] = [None] * group.size()
    dist.all_gather_object(theirs, ours, group=group)
    return theirs


def _free(group: dist.ProcessGroup) -> None:
    if _is_member(group):
        dist.destroy_process_group(group)


def _is_member(group: dist.ProcessGroup) -> bool:
    """Whether this rank is in it; who is not has a number instead."""
    return isinstance(group, dist.ProcessGroup)
