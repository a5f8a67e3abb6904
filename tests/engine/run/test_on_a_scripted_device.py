"""The clock, channels, executor and memory code on a device that is known to the nanosecond.

A fault shows because the device itself raises `Fault`, or because a figure is no longer the known
one.
"""

import functools
import threading
import types
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from scripted_device import DEVICE, POOL, Link, scripted

from engine.flight import Phase
from engine.model.data import StepBatch
from engine.model.stage_module import TensorSpec
from engine.plan.action import NO_INDEX, Action, Op, parse_action
from engine.plan.lower import Policy, lower
from engine.plan.messages import Edge
from engine.plan.schedules.registry import build_program
from engine.run import device as devices
from engine.run import streams
from engine.run.clock import DeviceClock, HostClock
from engine.run.collective_lane import StreamLane
from engine.run.executor import Executor
from engine.run.issue_limit import IssueLimit
from engine.run.memory import Owned, measure_memory
from engine.run.p2p import gloo
from engine.run.p2p.gloo import GlooChannel
from engine.run.p2p.nccl import NcclChannel
from engine.run.progress import DeviceProgress
from engine.run.recording import Recording
from engine.run.streams import Streams, TooManyEdgesError

US = 1_000
F_NS, B_NS, MOVE_NS, COPY_NS = 300 * US, 500 * US, 70 * US, 40 * US
MESSAGE = (TensorSpec((1024,), torch.float32),)
MESSAGE_BYTES = 4096
NUM_MICROBATCHES = 4
ACTIVATION_BYTES = 64 * 1024


@pytest.fixture
def device(monkeypatch):
    with scripted(monkeypatch, COPY_NS) as one:
        yield one


class ScriptedStage:
    """A stage whose computations take a set time and keep an activation in between."""

    is_first = False

    def __init__(self, device, *, is_last):
        self._device, self.is_last, self._held = device, is_last, {}
        self.now_ns_of = {}  # of the host, when a computation was issued

    @property
    def num_held(self):
        return len(self._held)

    def begin_step(self, step, num_tokens):
        pass

    def forward(self, microbatch, inputs, targets):
        self.now_ns_of["F", microbatch] = self._device.now_ns
        kept = torch.empty(ACTIVATION_BYTES, dtype=torch.uint8, device=DEVICE)
        output = torch.empty(1024, device=DEVICE)
        self._device.launch(f"F{microbatch}", F_NS, reads=inputs, writes=[kept, output])
        self._held[microbatch] = kept
        return (output,)

    def backward(self, microbatch, gradients):
        self.now_ns_of["B", microbatch] = self._device.now_ns
        gradient, kept = torch.empty(1024, device=DEVICE), self._held.pop(microbatch)
        reads = [kept, *(gradients or ())]
        self._device.launch(f"B{microbatch}", B_NS, reads=reads, writes=[gradient])
        return (gradient,)


@dataclass
class Rank:
    """The last rank of two, whose peer sends and takes its messages at set times."""

    device: object
    executor: Executor
    stage: ScriptedStage
    channels: dict
    clock: DeviceClock
    forth_ns: list
    back_ns: list

    def issue(self, number):
        with self.device.no_synchronisation():
            self.device.is_in_step = False  # until the clock has been tied
            tie, self.clock.begin = self.clock.begin, lambda: self._begin(tie)
            self.executor.run(number, _batch(), Recording.spans)
            timed = self.executor.end_step(number)
        self.clock.begin = tie
        return timed

    def read(self, timed):
        return {(s.op, s.microbatch): s for s in timed.read(self.clock)[0]}

    def step(self, number):
        timed = self.issue(number)
        self.clock.end()
        return self.read(timed)

    def _begin(self, tie):
        tie()
        self.device.is_in_step = True


def rank_of(device, monkeypatch, schedule="1f1b", most=8, flight=None, num_steps=3):
    """A rank whose peer sends microbatch k of step s after 200 us x k, and 5 ms x s."""
    first_ns = device.now_ns + 100 * US
    times = [
        first_ns + 5000 * US * step + 200 * US * k
        for step in range(num_steps)
        for k in range(NUM_MICROBATCHES)
    ]
    links = {
        "forth": Link(device, "forth", times, MOVE_NS),
        "back": Link(device, "back", [t + 2000 * US for t in times], MOVE_NS),
    }
    monkeypatch.setattr(dist, "isend", lambda tensor, peer, group: links[group].send(tensor))
    monkeypatch.setattr(dist, "irecv", lambda tensor, peer, group: links[group].receive(tensor))
    clock_, own = DeviceClock(DEVICE), Streams(DEVICE)
    channels = {
        Edge(0, 1): NcclChannel("forth", 0, DEVICE, clock_, None, own.of_edge(0)),
        Edge(1, 0): NcclChannel("back", 0, DEVICE, clock_, None, own.of_edge(1)),
    }
    stage = ScriptedStage(device, is_last=True)
    lowered = lower(build_program(schedule, 2, NUM_MICROBATCHES), Policy.EARLY, 1)
    monkeypatch.setattr(torch, "stack", lambda losses: losses[0])
    more = {} if flight is None else {"flight": flight}
    executor_ = Executor(
        lowered,
        1,
        {1: stage},
        channels,
        clock_,
        [MESSAGE],
        issue_limit=IssueLimit(DEVICE, most),
        **more,
    )
    return Rank(device, executor_, stage, channels, clock_, times, [t + 2000 * US for t in times])


def test_timings(device, monkeypatch):
    """Three steps of 1F1B on the last rank: spans are those of the kernels, to the nanosecond."""
    rank = rank_of(device, monkeypatch)
    for step in range(3):
        device.kernels.clear()
        device.now_ns = max(device.now_ns, rank.forth_ns[4 * step] - 90 * US)
        spans, free_ns, sent_ns = rank.step(step), 0, 0
        kernels = {name: (start, end) for name, _, start, end in device.kernels}
        sends = [k for k in device.kernels if k[0] == "send on back"]
        for k in range(NUM_MICROBATCHES):
            arrival_ns = rank.forth_ns[4 * step + k] + MOVE_NS
            assert spans[Op.RECV_F, k].end_ns == arrival_ns
            start_ns = max(arrival_ns, free_ns)
            middle_ns, free_ns = start_ns + F_NS, start_ns + F_NS + B_NS
            assert spans[Op.F, k][-4:-2] == (start_ns, middle_ns) == kernels[f"F{k}"]
            assert spans[Op.B, k][-4:-2] == (middle_ns, free_ns) == kernels[f"B{k}"]
            begun_ns = max(free_ns, sent_ns)
            sent_ns = max(begun_ns, rank.back_ns[4 * step + k]) + MOVE_NS
            assert spans[Op.SEND_B, k].start_ns == begun_ns == sends[k][2]
            assert spans[Op.SEND_B, k].end_ns == sent_ns
            assert spans[Op.SEND_B, k].num_bytes == MESSAGE_BYTES
        assert rank.clock.error_ns < 2_500
    rank.executor._losses.clear()
    device.settle()
    device.synchronize()


def test_turn(device, monkeypatch):
    """Steps in a row: the device is waited for before and after them, and all their marks are read.

    What a step receives comes after all that the step before has computed.
    """
    device.drift = 300e-6
    rank, turn = rank_of(device, monkeypatch), []
    for step in range(3):
        turn.append(rank.issue(step))
        assert device.now_ns < device.default.ready_ns  # the host does not wait for the last B
    assert device.calls.count("host waits for the device") == 1
    rank.clock.end()
    assert device.calls.count("host waits for the device") == 2
    error_ns, free_ns = rank.clock.error_ns, 0
    assert error_ns < 10 * US
    for step, timed in enumerate(turn):
        spans = rank.read(timed)
        for k in range(NUM_MICROBATCHES):
            for op, name in ((Op.F, f"F{k}"), (Op.B, f"B{k}")):
                kernels = [k[2:] for k in device.kernels if k[0] == name]
                assert len(kernels) == 3
                for read_ns, true_ns in zip(spans[op, k][-4:-2], kernels[step], strict=True):
                    assert abs(read_ns - true_ns) <= error_ns
            assert spans[Op.RECV_F, k].start_ns >= free_ns
        free_ns = spans[Op.B, NUM_MICROBATCHES - 1].end_ns
    rank.executor._losses.clear()
    device.settle()
    device.synchronize()


def test_pools(device, monkeypatch):
    """After the first step no event is made, and between steps none is lent but the marks."""
    rank = rank_of(device, monkeypatch)
    rank.step(0)
    made = device.num_events
    for step in (1, 2):
        rank.step(step)
        assert device.num_events == made
        assert all(not channel._arrivals._lent for channel in rank.channels.values())


def test_issue_limit(device, monkeypatch, most=2):
    """The host issues a computation when the one `most` before is done, and no sooner."""
    rank = rank_of(device, monkeypatch, most=most)
    spans = rank.step(0)
    row = [(op, k) for k in range(NUM_MICROBATCHES) for op in (Op.F, Op.B)]
    for before, after in zip(row, row[most:], strict=False):
        issued_ns = rank.stage.now_ns_of[after[0].value, after[1]]
        assert issued_ns >= spans[before].end_ns, (before, after)


def test_memory(device, monkeypatch):
    """Peaks are those of the step alone, read when it is done."""
    rank = rank_of(device, monkeypatch, "afab", most=2)
    device.outside_bytes = 3 * 2**20
    before = torch.empty(2**20, dtype=torch.uint8, device=DEVICE)
    del before  # a higher peak, of something else
    device.settle()
    calls = len(device.calls)
    rank.clock.begin()
    with rank.executor.timed_by(HostClock()):
        use = measure_memory(DEVICE, lambda: list(rank.step(0).values()), Owned)
    activations = NUM_MICROBATCHES * ACTIVATION_BYTES
    messages = use.peak_bytes - activations
    assert 0 < messages < NUM_MICROBATCHES * ACTIVATION_BYTES
    assert use.active_bytes >= use.peak_bytes
    assert use.in_flight_bytes > 0
    assert use.outside_bytes == 3 * 2**20
    made = device.calls[calls:]
    last_kernel = max(n for n, call in enumerate(made) if call.startswith("send on back"))
    read = made.index("peak active read") if "peak active read" in made else len(made)
    assert made.index("peaks reset") < last_kernel < read
    assert "host waits for the device" in made[: made.index("peaks reset")]
    assert "host waits for the device" in made[last_kernel:read]
    assert use.timeline[0].num_bytes == 0


class HeldThread:
    """A thread that never runs: the test does its work, one message at a time."""

    def __init__(self, target, daemon):
        self.target = target

    def start(self):
        pass


def test_through_the_host(device, monkeypatch):
    """Ranks that share a device: what is sent is computed, the copies are in the spans."""
    monkeypatch.setattr(gloo.threading, "Thread", HeldThread)
    sent = []

    def isend(tensor, peer, group, tag):
        device.host_reads("isend", tensor)
        sent.append(device.now_ns)
        return types.SimpleNamespace(wait=lambda: None)

    def irecv(tensor, peer, group, tag):
        return types.SimpleNamespace(wait=lambda: None)

    monkeypatch.setattr(dist, "isend", isend)
    monkeypatch.setattr(dist, "irecv", irecv)
    channel = GlooChannel("host", 1, range(4), None, DEVICE)
    output = torch.empty(1024, device=DEVICE)
    _, made_ns = device.launch("F0", F_NS, writes=[output])
    channel.send(parse_action("0SEND_F0"), (output,))
    del output
    assert sent == [made_ns + COPY_NS]
    channel._complete(channel._pending.get())
    channel._let_go_of_sent()
    receive = parse_action("0RECV_B0")
    channel.post(receive, MESSAGE)
    (taken,) = channel.take(receive)
    start_ns, _ = device.launch("B0", B_NS, reads=[taken])
    del taken
    device.settle()
    send, received = channel._transfers
    assert (send.start, send.end) == (made_ns, sent[0])
    assert received.end == start_ns == sent[0] + COPY_NS


def test_streams(device, monkeypatch):
    """Every edge has a stream that no other has, and keeps it from case to case."""
    own = Streams(DEVICE)
    assert (
        len({own.of_edge(n).name for n in range(streams.MOST_EDGES)} | {own.of_lane().name}) == POOL
    )
    again = [own.of_edge(n) for n in range(streams.MOST_EDGES)]
    devices.new_stream(DEVICE)  # somebody else draws from the pool
    assert [own.of_edge(n) for n in range(streams.MOST_EDGES)] == again
    with pytest.raises(TooManyEdgesError, match="two edges would share one"):
        own.of_edge(streams.MOST_EDGES)


def test_progress(device, monkeypatch):
    """The record tells where the device is when the host has issued all of the step."""
    noted = []
    flight = types.SimpleNamespace(
        begin_step=lambda step: noted.append(("step", step)),
        come_to=lambda index: noted.append(("comes to", index)),
        work=lambda: noted.append("works"),
        enter=noted.append,
    )
    told = DeviceProgress(flight, DEVICE)
    rank = rank_of(device, monkeypatch, flight=told, most=64)
    rank.executor.run(0, _batch(), Recording.flight_only)
    row = [str(a) for a in lower(build_program("1f1b", 2, 4), Policy.EARLY, 1).actions[1]]
    first, then = row.index("1F0"), row.index("1B0")
    told.catch_up()
    assert noted[-1] == ("comes to", first)  # its message has not come
    device.now_ns = rank.forth_ns[0] + MOVE_NS
    told.catch_up()
    assert noted[-1] == "works"
    device.now_ns += F_NS
    told.catch_up()
    assert ("comes to", then) in noted and ("comes to", row.index("1B1")) not in noted
    rank.executor.enter(Phase.DRAINS)
    told.catch_up()
    assert Phase.DRAINS not in noted
    device.synchronize()
    told.catch_up()
    assert noted[-1] is Phase.DRAINS


def test_nothing_writes_the_record_once_progress_is_closed(device):
    told, before = DeviceProgress(types.SimpleNamespace(), DEVICE), threading.enumerate()
    told.watch()
    assert len(threading.enumerate()) == len(before) + 1
    told.close()
    assert threading.enumerate() == before


def test_lane(device, monkeypatch):
    """A collective is ordered after what it reads, and before who waits for it; and its time.

    Steps follow each other without a wait: tensors and events of one are free for the next.
    """
    clock_, own = DeviceClock(DEVICE), Streams(DEVICE)
    lane, transfers = StreamLane(DEVICE, clock_, own.of_lane()), []
    for _ in range(3):
        clock_.begin()
        shard, whole = (torch.empty(n, device=DEVICE) for n in (1024, 4096))
        device.launch("fill", 10 * US, writes=[shard])
        gather = functools.partial(device.launch, "gather", 200 * US, reads=[shard], writes=[whole])
        job = lane.issue(Action(0, Op.UNSHARD, NO_INDEX), gather, 4096)
        lane.wait(job)
        device.launch("F", F_NS, reads=[whole])
        transfers += lane.finish()
        lane.wait(job)  # of an earlier step: nothing is left to wait for
        del shard, whole, gather, job
        device.settle()
        assert len(lane._events._free) == 1
    assert device.calls.count("host waits for the device") == 1
    clock_.end()
    kernels = [k for k in device.kernels if k[0] == "gather"]
    for transfer, kernel in zip(transfers, kernels, strict=True):
        assert (clock_.read_ns(transfer.start), clock_.read_ns(transfer.end)) == kernel[2:]
        assert kernel[1] == own.of_lane().name


def _batch():
    token = torch.zeros(1, 1, dtype=torch.int64)
    return StepBatch((token,) * NUM_MICROBATCHES, (token,) * NUM_MICROBATCHES, 4)


def test_drift(device, monkeypatch):
    """A device whose clock runs 300 ppm fast is read within the error that the clock tells."""
    device.drift = 300e-6
    rank = rank_of(device, monkeypatch)
    spans = rank.step(0)
    kernels = {name: (start, end) for name, _, start, end in device.kernels}
    for k in range(NUM_MICROBATCHES):
        for op, name in ((Op.F, f"F{k}"), (Op.B, f"B{k}")):
            for read_ns, true_ns in zip(spans[op, k][-4:-2], kernels[name], strict=True):
                assert abs(read_ns - true_ns) <= rank.clock.error_ns < 10 * US
