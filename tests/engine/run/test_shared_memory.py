"""Messages through mapped memory: whole, in order, never blocking, over when the peer is dead."""

import functools
import gc
import os
from pathlib import Path

import pytest
import torch
from pipeline import config
from processes import wait_until
from ranks import Alone, Ranks

from engine.model.stage_module import TensorSpec
from engine.plan.action import Action, Op
from engine.plan.messages import Edge
from engine.run.clock import HostClock
from engine.run.host import can_share_memory
from engine.run.p2p.channel import TransferError
from engine.run.p2p.fabric import Fabric
from engine.run.p2p.shared_memory import make_room, open_channels
from engine.trainer import Trainer, agree

EDGE = Edge(0, 1)
MIB = 2**20
LONGEST = (
    TensorSpec((2, 64, 8), torch.float32),
    TensorSpec((2, 64), torch.int64),
    TensorSpec((2, 64, 8), torch.bfloat16),
)
NUM = 8


def send(microbatch):
    return Action(0, Op.SEND_F, microbatch)


def receive(microbatch):
    return Action(1, Op.RECV_F, microbatch)


def opened(fabric, message=LONGEST, num_slots=NUM):
    ranks = (0, 1)
    fabric.connect([EDGE], ranks, [])
    gather = functools.partial(fabric.gather_objects, processes=ranks)
    me = torch.distributed.get_rank()
    (channel,) = open_channels([EDGE], ranks, me, [message], num_slots, gather, {}).values()
    return channel, me


def message_of(number, length):
    """A message that both ranks can compute, with a tensor that is not contiguous."""
    generator = torch.Generator().manual_seed(number)
    values = torch.randn(2, length, 8, generator=generator)
    ids = torch.randint(0, 99, (length, 2), generator=generator).t()
    return values, ids, values.bfloat16() * 2


def exchange(fabric, is_member, lengths):
    """The receiver's whether each message came whole, and both ends' transfers of the step."""
    if not is_member:
        fabric.connect([EDGE], (0, 1), [])
        return None
    channel, me = opened(fabric)
    same = []
    for number, length in enumerate(lengths):
        if me == 0:
            channel.send(send(number), message_of(number, length))
        else:
            channel.post(receive(number), LONGEST)
    for number, length in enumerate(lengths if me == 1 else ()):
        expected = message_of(number, length)
        got = channel.take(receive(number))
        same.append(all(map(torch.equal, got, expected)) and got[2].dtype == torch.bfloat16)
    transfers = channel.finish_step()
    again = channel.finish_step()
    channel.close()
    return same, transfers, again


def test_messages_come_whole_and_in_order_whatever_their_shapes(ranks: Ranks):
    lengths = [64, 1, 17, 0, 64, 3, 33, 2]
    (_, sent, _), (same, received, again) = ranks.run(2, exchange, lengths)
    assert same == [True] * NUM
    assert again == []
    num_bytes = [2 * n * (8 * 4 + 8 + 8 * 2) for n in lengths]
    assert [t.num_bytes for t in sent] == [t.num_bytes for t in received] == num_bytes
    for ours, theirs in zip(sent, received, strict=True):
        assert ours.start <= ours.end <= theirs.end
        assert theirs.start <= theirs.end
        assert ours.action.microbatch == theirs.action.microbatch


def run_a_step_ahead(fabric, is_member):
    """With two slots: a third message waits until one is taken, and a fifth for nobody."""
    if not is_member:
        fabric.connect([EDGE], (0, 1), [])
        return None
    channel, me = opened(fabric, num_slots=2)
    for number in range(2 + 2 * (me == 0)):
        if me == 0:
            channel.send(send(number), message_of(number, 1))
        else:
            channel.post(receive(number), LONGEST)
            channel.take(receive(number))
    fabric.gather_objects(None, (0, 1))
    words = ""
    if me == 0:
        with pytest.raises(TransferError) as caught:
            channel.send(send(4), message_of(4, 1))
        words = str(caught.value)
    channel.close()
    return words


def test_a_sender_that_is_a_step_ahead_waits_for_a_slot(ranks: Ranks):
    assert ranks.run(2, run_a_step_ahead) == ["send to rank 1: it is gone", ""]


def run_far_ahead(fabric, is_member):
    """More messages wait than a pipe has room for headers, unless it is made larger."""
    if not is_member:
        fabric.connect([EDGE], (0, 1), [])
        return None
    message, count = (TensorSpec((1, 2, 1, 1), torch.float32),), 3000
    channel, me = opened(fabric, message, num_slots=count)
    for number in range(count if me == 0 else 0):
        channel.send(send(number), (torch.full((1, 2, 1, 1), float(number)),))
    fabric.gather_objects(None, (0, 1))
    for number in range(count if me == 1 else 0):
        channel.post(receive(number), message)
    values = [float(channel.take(receive(n))[0].sum()) for n in range(count if me == 1 else 0)]
    channel.close()
    return values


def test_thousands_of_messages_may_wait_at_once(ranks: Ranks):
    _, values = ranks.run(2, run_far_ahead)
    assert values == [2.0 * number for number in range(3000)]


WIDE = tuple(TensorSpec((1, 2, 1), torch.float32) for _ in range(2000))  # 6,000 sizes, 48 kB


def exchange_wide(fabric, is_member):
    """A message of so many tensors that its header is larger than a page."""
    if not is_member:
        fabric.connect([EDGE], (0, 1), [])
        return None
    channel, me = opened(fabric, WIDE, num_slots=2)
    channel.post(receive(0), WIDE) if me == 1 else None
    if me == 0:
        channel.send(send(0), tuple(torch.full(s.shape, float(n)) for n, s in enumerate(WIDE)))
    got = [float(t.sum()) for t in channel.take(receive(0))] if me == 1 else None
    channel.close()
    return got


def send_more_than_the_longest(fabric, is_member):
    """What the sender is told, and whether the message beside the slot is as it was."""
    if not is_member:
        fabric.connect([EDGE], (0, 1), [])
        return None
    message = (TensorSpec((1, 2, 4), torch.float32),)
    channel, me = opened(fabric, message, num_slots=2)
    told = None
    if me == 0:
        channel.send(send(0), (torch.ones(1, 2, 4),))
        with pytest.raises(TransferError) as caught:
            channel.send(send(1), (torch.ones(1, 2, 40),))
        told = str(caught.value)
        channel.send(send(1), (torch.full((1, 2, 4), 2.0),))
    fabric.gather_objects(None, (0, 1))
    for number in (0, 1) if me == 1 else ():
        channel.post(receive(number), message)
    values = [float(channel.take(receive(n))[0].sum()) for n in ((0, 1) if me == 1 else ())]
    channel.close()
    return told, values


def test_a_message_that_exceeds_its_slot_is_refused_and_touches_no_other(ranks: Ranks):
    (told, _), (_, values) = ranks.run(2, send_more_than_the_longest)
    assert told == "0SEND_F1: more than the longest microbatch sends; none may"
    assert values == [8.0, 16.0]


def test_a_header_may_be_larger_than_a_page(ranks: Ranks):
    _, values = ranks.run(2, exchange_wide)
    assert values == [2.0 * number for number in range(2000)]


def test_more_messages_than_the_system_lets_wait_are_refused_before_training():
    reads, writes = os.pipe()
    with pytest.raises(TransferError, match="give fewer microbatches, or raise"):
        make_room(writes, 2**27)
    os.close(reads)
    os.close(writes)


def held(fabric, is_member, settings):
    """Open files and mappings before trainers were made, and after they were closed."""
    agreement = agree(settings, fabric)
    if not is_member:
        return None

    def count():
        gc.collect()
        maps = Path("/proc/self/maps").read_text().count("memfd:engine")
        return len(list(Path("/proc/self/fd").iterdir())), maps

    def used():
        trainer = Trainer(agreement, fabric)
        trainer.step(0)
        trainer.close()

    used()  # what is opened once and kept, is
    before = count()
    for _ in range(3):
        used()
    return before, count()


def test_closed_channels_leave_nothing_open(ranks: Ranks):
    for before, after in ranks.run(2, held, config("interleaved_1f1b", 2, 4)):
        assert after == before


def exchange_with_who_dies(rank, folder, dier):
    """What the rank that is left is told."""
    meeting = f"file://{folder}/meeting"
    torch.distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
    fabric = Fabric(torch.device("cpu"), HostClock(), is_device_shared=False)
    assert fabric.transport == "memory"
    channel, _ = opened(fabric)
    other = fabric.gather_objects(os.getpid(), (0, 1))[1 - rank]
    (folder / f"ready-{rank}").touch()
    wait_until((folder / f"ready-{1 - rank}").exists)  # a rank that died earlier ends the meeting
    if rank == dier:
        os._exit(9)
    with pytest.raises(TransferError) as lost:
        if rank == 1:
            channel.post(receive(0), LONGEST)
            channel.take(receive(0))
        wait_until(lambda: not Path(f"/proc/{other}").exists())  # none of its threads is left
        for number in range(NUM):
            channel.send(send(number), message_of(number, 4))
    return str(lost.value)


@pytest.mark.parametrize(
    ("dier", "words"), [(0, "receive from rank 0: it is gone"), (1, "send to rank 1: it is gone")]
)
def test_who_waits_for_a_dead_rank_is_told(tmp_path, dier, words):
    processes = [Alone(exchange_with_who_dies, rank, tmp_path, dier) for rank in range(2)]
    assert processes[1 - dier].result() == words


def told(change):
    """Whether a rank may share memory with one that differs from it as `change` says."""

    def gather(ours):
        return [ours] if isinstance(ours, bool) else [ours, change(ours)]

    return can_share_memory(gather)


def test_memory_is_shared_only_with_ranks_of_the_same_place_whose_memory_can_be_read():
    assert told(lambda ours: ours)
    assert not told(lambda ours: ours._replace(place="elsewhere"))
    assert not told(lambda ours: ours._replace(path="/proc/self/fd/none"))
    assert not told(lambda ours: ours._replace(token=b"another"))
    assert not told(lambda _: None)


def test_a_rank_that_cannot_offer_memory_shares_none(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    assert not told(lambda ours: ours)
