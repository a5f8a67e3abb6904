"""What a rank left behind says of it, whatever its supervisor happened to see first."""

import time

from engine.flight import Entry, Record
from engine.plan.lower import lower
from engine.plan.schedules.registry import build_program
from ppbench.run.failures.evidence import PEER_LOST, CrashReport, RankError, diagnose
from ppbench.run.machine.node_folder import ALIVE, DEAD, Ending


def test_a_rank_that_wrote_its_error_is_dead_and_one_that_lost_its_peer_is_not():
    """The one that fails writes its error before it exits: the other may be seen to end first."""
    now_ns = time.monotonic_ns()
    lowered = lower(build_program("1f1b", 2, 4))
    entry = Entry(1, 0, None, now_ns, now_ns)
    records = [Record(rank, 100 + rank, 7, now_ns, None, (entry,)) for rank in (0, 1)]
    errors = [
        RankError(1, now_ns + 1, "error", "boom", ""),
        RankError(0, now_ns + 2, PEER_LOST, "connection closed by peer", ""),
    ]
    for ending in (Ending(0, "exit", now_ns + 3, {0: ALIVE, 1: ALIVE}), None):
        node = CrashReport("host", 0, records, errors, ending=ending)
        found = diagnose([node], lowered, 7, 10.0)
        assert (found.status, found.rank) == ("error", 1)
        assert found.post_mortem is not None
        assert [rank.seen.process for rank in found.post_mortem.ranks] == [ALIVE, DEAD]
