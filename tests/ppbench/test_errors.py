"""Text of errors: bounded, printable, named by type whatever exceptions do; who failed first."""

import itertools
import json
import random
import signal
import sys
import time
import unicodedata

import pytest
from command import output_of
from stored_runs import demo_store, run_row

from engine.flight import FlightRecord
from ppbench.cli.export import export
from ppbench.cli.runs import list_runs, show
from ppbench.config.case import Case
from ppbench.display.formats import ExportFormat, Format
from ppbench.errors import (
    LONGEST_LINE,
    MOST_OF_ERROR,
    bounded,
    chain_of,
    describe,
    first_line,
    printable,
    readable,
    system_problem,
)
from ppbench.report.pages.report import report_runs
from ppbench.run.failures.evidence import PEER_LOST, RankError, collect, diagnose, write_rank_error
from ppbench.run.machine.node_folder import Exit, flight_path, note, start_folder
from ppbench.store import Store

UNSAFE = {"Cc", "Cf", "Cs", "Zl", "Zp"}
NASTY = "\x1b]0;owned\x07\x1b[31mred\x00\u202eevil\u2066\u200b\u2028\ud800\rover\x9b2J"


def is_safe(text):
    return not any(unicodedata.category(c) in UNSAFE for c in text if c not in "\n\t")


def test_printable_text_has_no_character_that_unicode_calls_control_format_or_surrogate():
    every = "".join(map(chr, range(sys.maxunicode + 1)))
    text = printable(every)
    assert is_safe(text)
    lost = {unicodedata.category(c) for c in set(every) - set(text)}
    assert lost <= UNSAFE | {"Cn"}  # no character, as yet
    text.encode()


def test_printable_text_says_what_was_there_and_is_itself_printable():
    assert printable("a\x1b[0m\u202e\ud800\U000e0041\tb\r\nc\rd") == (
        "a\\x1b[0m\\u202e\\ud800\\U000e0041\tb\nc\\x0dd"
    )
    assert printable(printable(NASTY)) == printable(NASTY)


def test_bounded_text_keeps_head_and_tail_and_tells_how_much_is_missing_and_where_it_is():
    text = "".join(map(chr, random.Random(1).choices(range(97, 123), k=10**6)))
    for most in (500, 4000, 40_000):
        cut = bounded(text, most, "the.log")
        head, notice, tail = cut.split("\n")
        assert len(cut) <= most
        assert text.startswith(head)
        assert text.endswith(tail)
        missing = len(text) - len(head) - len(tail)
        assert notice == f"[{missing:,} characters left out; the whole is in the.log]"
    assert bounded("short", 500) == "short"
    assert readable(readable(NASTY * 10**4)) == readable(NASTY * 10**4)


def caught(error, cause=None):
    """The error as it is when it has been raised."""
    try:
        raise error from cause
    except type(error):
        return error


def test_the_error_of_a_rank_is_written_with_its_type_message_and_traceback(tmp_path):
    write_rank_error(
        tmp_path, 3, caught(ValueError("x" * 10**7)), lambda _error, _message: "error", "the.log"
    )
    left = json.loads((tmp_path / "error-rank3.json").read_text())
    assert (left["rank"], left["status"]) == (3, "error")
    assert left["message"].startswith("ValueError: xxx")
    assert "test_errors.py" in left["traceback"]
    assert len(left["message"]) + len(left["traceback"]) < 30_000


def test_members_of_groups_and_explicit_causes_are_named():
    inner = ExceptionGroup("in", [ValueError("one"), KeyError("two")])
    group = ExceptionGroup("out", [inner, OSError("three"), TypeError("four")])
    assert describe(group) == (
        "ExceptionGroup: out (3 sub-exceptions): "
        "ValueError: one; KeyError: 'two'; OSError: three; and 1 more"
    )
    error = RuntimeError("step")
    error.__cause__ = MemoryError()
    error.__cause__.__cause__ = error  # a circle
    assert describe(error) == "RuntimeError: step; caused by MemoryError"
    assert describe(MemoryError()) == "MemoryError"


def test_a_first_line_is_short():
    assert first_line(" one \ntwo") == "one"
    assert len(first_line("x" * 10**6)) == LONGEST_LINE
    assert first_line("") == ""


def test_what_the_system_refused_is_found_behind_the_error_of_a_library():
    hidden = caught(ValueError("not written"), OSError(28, "No space left", "/some/where"))
    assert (system_problem(hidden) or "").startswith("/some/where: No space left; make room")
    assert system_problem(ValueError("a fault of the program")) is None


def test_an_error_that_was_handled_before_is_left_out_where_only_causes_count():
    error = ValueError("another")
    error.__cause__, error.__context__ = KeyError("its cause"), MemoryError()
    error.__suppress_context__ = False
    kinds = [[type(one) for one in chain_of(error, has_contexts=both)] for both in (True, False)]
    assert kinds == [[ValueError, KeyError, MemoryError], [ValueError, KeyError]]


@pytest.fixture
def flooded(tmp_path):
    """A store with a run whose error is long and nasty."""
    demo_store(tmp_path)
    error = NASTY + "\n" + "y" * 10**7 + "\nthe end"
    new = run_row(8, Case(seq_len=1024), status="error", error=error, error_rank=1)
    store = Store(tmp_path)
    store.write_run(new, {})
    return tmp_path, new["run_id"]


def test_an_error_is_bounded_and_printable_wherever_it_is_shown(flooded):
    folder, run_id = flooded
    texts = [output_of(show, run_id, folder, how=how) for how in Format]
    texts += [output_of(list_runs, [], None, folder, how=how) for how in Format]
    for how in (ExportFormat.csv, ExportFormat.markdown):
        texts.append(output_of(export, how, [run_id], None, None, folder))
    page = report_runs(Store(folder), [run_id], folder / "page.html", folder / "reports")
    written = page.read_text()
    for text in texts:
        assert is_safe(text)
        assert len(text) < 6 * MOST_OF_ERROR
    for unsafe in "\x1b\x00\x07\u202e\u2066\u200b\x9b":
        assert unsafe not in written
    assert len(written) < 6_000_000  # a page with its drawing library; the error alone was more


def evidence(folder, errors=(), exits=(), num_ranks=2):
    """Evidence as `collect` returns it: errors as (rank, ms, status), exits as (rank, ms, code)."""
    local = start_folder(folder, 3)
    local.mkdir(parents=True)
    now_ns = time.monotonic_ns()
    for rank in range(num_ranks):
        FlightRecord(flight_path(local, rank), rank)
    note(folder, Exit(2, 0, 9, -11, now_ns))  # of another start
    for rank, ms, status in errors:
        at_ns = now_ns + ms * 10**6
        error = RankError(rank, at_ns, status, f"{status} of rank {rank}", "")
        (local / f"error-rank{rank}.json").write_text(json.dumps(vars(error)))
    for rank, ms, code in exits:
        note(folder, Exit(3, rank, 10 + rank, code, now_ns + ms * 10**6))
    return collect(folder)


BLAMED = {  # errors (rank, ms, status), exits (rank, ms, code): status, rank, words
    "a report before the exit that it is of": (
        [(0, 1, PEER_LOST)], [(0, 12, 1), (1, 20, -9)], "crash", 1, "was killed by SIGKILL"),
    "an echo that looks like an error of its own": (
        [(0, 1, "error")], [(1, 5, -9), (0, 12, 1)], "crash", 1, "was killed by SIGKILL"),
    "an echo of a rank that was ended before it was gone": (
        [(0, 1, "error")], [(1, 5, 7)], "crash", 1, "exited with code 7"),
    "an error, and what came of it": (
        [(1, 1, "error")], [(1, 9, 1), (0, 30, -6)], "error", 1, "error of rank 1"),
    "two errors": ([(0, 9, "error"), (1, 3, "oom")], [(1, 10, 1), (0, 15, 1)], "oom", 1, "oom of"),
    "a rank that left with 0": ([(0, 4, PEER_LOST)], [(1, 2, 0), (0, 9, 1)], "crash", 1, "code 0"),
    "a rank that somebody ended": (
        [(0, 4, PEER_LOST)], [(1, 2, -15), (0, 9, 1)], "crash", 1, "killed by SIGTERM"),
    "a bus error": ([(0, 4, PEER_LOST)], [(1, 2, -7)], "crash", 1, "killed by SIGBUS"),
    "a real-time signal": ([], [(1, 2, -40)], "crash", 1, "killed by signal 40"),
}  # fmt: skip


@pytest.mark.parametrize("name", BLAMED)
def test_the_rank_that_failed_first_is_blamed_not_the_one_that_reported_it(tmp_path, name):
    errors, exits, status, rank, words = BLAMED[name]
    for order in (1, -1):  # in whichever order it was written
        node = evidence(tmp_path / str(order), errors[::order], exits[::order])
        judgement = diagnose([node], None, 0, 300)
        assert (judgement.status, judgement.rank) == (status, rank), judgement.error
        assert words in first_line(judgement.error)


def test_blame_does_not_depend_on_which_rank_is_which(tmp_path):
    number = itertools.count()
    for first, other in itertools.permutations(range(3), 2):
        errors = [(other, 1, PEER_LOST)]
        exits = [(other, 30, 1), (first, 40, -signal.SIGSEGV)]
        node = evidence(tmp_path / str(next(number)), errors, exits, 3)
        assert diagnose([node], None, 0, 300).rank == first
