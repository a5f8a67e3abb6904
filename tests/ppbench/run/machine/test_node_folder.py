"""A node's folder: where it is, and what is read from it."""

from __future__ import annotations

import tempfile

from engine.flight import FlightRecord
from ppbench.run.machine import node_folder
from ppbench.run.machine.node_folder import (
    Ending,
    Exit,
    Started,
    flight_path,
    last_start,
    make_node_folder,
    note,
    read_events,
    start_folder,
)


def test_the_folder_is_on_disk_where_shared_memory_is_full(tmp_path, monkeypatch):
    monkeypatch.setattr(node_folder, "ROOM_BYTES", 2**62)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert make_node_folder("a").parent == tmp_path


def test_events_are_read_as_they_were_noted_but_for_a_line_that_a_kill_cut_short(tmp_path):
    assert read_events(tmp_path).first_failure() is None
    ended = [Exit(0, 1, 10, -9, 1), Exit(1, 0, 11, 0, 2), Exit(1, 1, 12, 1, 3)]
    note(tmp_path, Started(0))
    note(tmp_path, ended[0])
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write('{"event": "Exit", "ra\n')
    ending = Ending(0, "exit", 5, {0: "alive", 1: "dead"}, 1)
    note(tmp_path, ending)
    for one in ended[1:]:
        note(tmp_path, one)
    events = read_events(tmp_path)
    assert (events.num_starts, events.exits, events.endings) == (1, ended, [ending])
    assert events.first_failure() == ended[2]  # of the newest start, and not the one that left


def test_a_start_whose_ranks_left_no_records_hides_none_that_did(tmp_path):
    for start in (2, 9, 10, 11):
        start_folder(tmp_path, start).mkdir()
    assert last_start(tmp_path) is None
    for start in (2, 10):
        FlightRecord(flight_path(start_folder(tmp_path, start), 0), 0)
    assert last_start(tmp_path) == start_folder(tmp_path, 10)
    assert last_start(tmp_path, before=10) == start_folder(tmp_path, 2)
