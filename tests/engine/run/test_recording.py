"""Recording changes no result of a step, and only what is asked for is recorded."""

import collections
import json
import re

import torch
from fake_clock import FakeClock
from pipeline import config, with_trainer
from ranks import Ranks
from torch.profiler import ProfilerActivity, profile

from engine.plan.lower import lower
from engine.plan.schedules.registry import build_program
from engine.run.p2p.fabric import Fabric
from engine.run.recording import Recording
from engine.trainer import Trainer, TrainerConfig, agree

NO_TIMES = FakeClock([])  # fails when it is asked for one


def in_turns(trainer: Trainer, recordings: list[Recording]):
    """The numbers of spans of the steps, and what was learned in them."""
    num_spans = [
        len(trainer.step(step, recording).spans) for step, recording in enumerate(recordings)
    ]
    return num_spans, {name: p.detach() for name, p in trainer.parameters().items()}


def without_clock(fabric: Fabric, is_member: bool, settings: TrainerConfig):
    """Steps on clocks that have no time to give."""
    agreement = agree(settings, fabric)
    if not is_member:
        return None
    timeless = Fabric.__new__(Fabric)  # the same communicators
    timeless.__dict__.update(fabric.__dict__, clock=NO_TIMES)
    trainer = Trainer(agreement, timeless)
    for channel in trainer.runner._channels.values():
        channel._clock = NO_TIMES
    losses = [trainer.step(step, Recording.flight_only).loss for step in range(2)]
    left = [t for channel in trainer.runner._channels.values() for t in channel.finish_step()]
    trainer.close()
    return losses, left


def profiled(trainer: Trainer, path):
    """Two steps under torch's profiler; the ranges in its trace."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for step in range(2):
            assert trainer.step(step, Recording.profiler_ranges).spans == []
    file = path / f"rank{trainer.rank}.json"
    profiler.export_chrome_trace(str(file))
    events = json.loads(file.read_text())["traceEvents"]
    return [event["name"] for event in events if event.get("cat") == "user_annotation"]


def test_what_is_learned_does_not_depend_on_what_is_recorded(ranks: Ranks):
    settings = config("zbv", 2, 4, seq_len="variable", max_seq_len=16)
    turns = [
        [Recording.spans] * 3,
        [Recording.flight_only] * 3,
        [Recording.flight_only, Recording.spans, Recording.profiler_ranges],
    ]
    always, never, mixed = (ranks.run(2, with_trainer, settings, in_turns, turn) for turn in turns)
    for (of_all, learned), (of_none, plain), (of_some, changed) in zip(
        always, never, mixed, strict=True
    ):
        assert of_none == [0, 0, 0]
        assert of_some == [0, of_all[0], 0]
        assert all(torch.equal(learned[name], plain[name]) for name in plain)
        assert all(torch.equal(learned[name], changed[name]) for name in changed)


def test_without_spans_no_clock_is_read_and_no_transfer_written_down(ranks: Ranks):
    for losses, left in ranks.run(2, without_clock, config("1f1b", 2, 3)):
        assert len(losses) == 2
        assert left == []


def test_every_action_of_every_step_is_a_range_of_its_name(ranks: Ranks, tmp_path):
    settings = config("1f1b", 2, 3)
    lowered = lower(build_program("1f1b", 2, 3), settings.policy, settings.look_ahead)
    profiles = ranks.run(2, with_trainer, settings, profiled, tmp_path)
    for names, row in zip(profiles, lowered.actions, strict=True):
        expected = [*map(str, row), "OPT"] * 2
        ours = [name for name in names if re.fullmatch(r"\d+[A-Z_]+\d+|OPT", name)]
        assert collections.Counter(ours) == collections.Counter(expected)
