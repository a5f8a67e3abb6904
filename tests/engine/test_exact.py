"""Ranks train what the author's module trains on one device, however it is cut and scheduled.

Each case is a schedule, a number of ranks and of microbatches, and what else is not as usual. Those
of `--thorough` are further cases of a mechanism that another one shows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import models
import pytest
import torch
from drawn_programs import shuffled_program
from models import configuration_folder
from pipeline import (
    CPU,
    SEQ_LEN,
    TOLERANCE,
    VOCABULARY,
    assert_as_unsplit,
    assert_exact,
    config,
    memory_of,
    over_gloo,
    train,
    with_trainer,
)
from torch import Tensor, nn
from transformers import GPT2Model

from engine.configuration import program_of
from engine.connection import broadcast
from engine.exactness import InexactError, compare
from engine.model.data import TextLoader
from engine.model.factory import seed_from
from engine.model.presets import PRESETS
from engine.plan.action import COMPUTE_OPS, Op
from engine.plan.check import check
from engine.plan.collectives import DataParallel, NoCollectives, TorchWindow, Zero1, Zero2, Zero3
from engine.plan.lower import Policy, lower
from engine.plan.program import to_csv
from engine.plan.rules import peak_activations
from engine.plan.schedules.registry import SCHEDULES
from engine.plan.spans import Lane
from engine.run.optimizer import OptimizerSpec
from engine.trainer import Trainer, agree

THOROUGH = pytest.mark.thorough
GLOO = (over_gloo, with_trainer)
MEMORY = (with_trainer,)
TWICE = {"microbatch_size": 2}
TIED = {"preset": "llama-tiny-tied"}
CLIPPED = {"optimizer": OptimizerSpec(learning_rate=1e-3, clip_norm=0.1)}
VARIABLE = {"seq_len": "variable", "max_seq_len": 120, "microbatch_size": 2}


def case(
    *shape: Any, ways: Any = MEMORY, thorough: bool = False, tol: float = TOLERANCE, **changes
):
    """A schedule, its ranks and microbatches; then how messages go, and what else is changed."""
    words = [*map(str, shape), *("gloo" for _ in ways[1:]), *map(str, changes.values())]
    name = "-".join(words).replace("_models:", ":")[:70]
    return pytest.param(shape, ways, tol, changes, marks=[THOROUGH] * thorough, id=name)


def assert_case(ranks, shape, ways=MEMORY, tol=TOLERANCE, changes=None, around=None):
    settings = config(*shape, **(changes or {}))
    outcomes = assert_exact(ranks, settings, *ways, tolerance=tol, around=around)
    peaks = peak_activations(program_of(settings))
    assert [one.peak_held for one in outcomes] == peaks * settings.replicas
    return outcomes


# schedules and options of training, on a Llama or on a chain with almost no computation

THIN = {"preset": "models:thin_sequential"}
KINDS = ("1f1b", "interleaved_1f1b", "zb_h1", "dualpipev")
"""A schedule of each kind, where nothing but its kind matters."""
LOOP_AND_V = ("zb_h1", "dualpipev")
SPECIAL = [
    *((name, 4, 2, {"stages_per_rank": 2}) for name in ("interleaved_1f1b", "zbv", "v_half")),
    ("zb_h2", 4, 2, {}),
    ("v_min", 4, 2, {}),
    ("interleaved_zb", 2, 4, {"stages_per_rank": 3}),
    ("1f1b", 4, 3, {"partition": (2, 0, 0, 4)}),
    ("zb_h1", 4, 8, {"partition": (0, 6, 0, 0)}),
    ("dualpipev", 4, 8, {"partition": (0, 1, 0, 3, 0, 0, 2, 0)}),
    ("interleaved_zb", 2, 4, {"policy": Policy.JUST_IN_TIME}),
    ("interleaved_zb", 2, 4, {"look_ahead": 4}),
]
OF_SCHEDULES = [
    *(case(name, 4, 8, **THIN) for name in SCHEDULES),
    *(case(name, p, 8, thorough=p != 2 or name not in KINDS) for name in SCHEDULES for p in (2, 4)),
    *(case(name, 1, 4, **THIN) for name in KINDS),  # without any message
    *(
        case("1f1b", p, m, thorough=(p, m) not in {(3, 1), (3, 8)}, **THIN)
        for p in (1, 2, 3, 4)
        for m in (1, 2, 3, 8)
    ),
    *(case(name, 2, 4, ways=GLOO, thorough=name not in KINDS, **THIN) for name in SCHEDULES),
    *(case(name, 4, 8, ways=GLOO, thorough=name != "dualpipev", **THIN) for name in SCHEDULES),
    *(case(*shape, **THIN, **changes) for *shape, changes in SPECIAL),
    case("zb_h1", 2, 4, recompute=(False, True)),
    case("dualpipev", 2, 4, recompute=(True, False, False, True)),
    # In a V both stages of a tied weight are on rank 0; in a loop, on the first and the last rank.
    *(case(name, p, 2 * p, thorough=p == 4, **TIED) for name in LOOP_AND_V for p in (1, 2, 4)),
    *(case("1f1b", p, 3, thorough=p == 2, **CLIPPED, **TIED) for p in (1, 2, 4)),
    *(case("1f1b", p, 3, thorough=p == 2, **CLIPPED) for p in (2, 4)),
    *(case("1f1b", 4, 4, ways=ways, **VARIABLE) for ways in (MEMORY, GLOO)),
    *(case("afab", p, 4, ways=GLOO, thorough=True, **VARIABLE) for p in (1, 2, 4)),
]


@pytest.mark.parametrize(("shape", "ways", "tol", "changes"), OF_SCHEDULES)
def test_a_schedule_trains_as_on_one_device(ranks, shape, ways, tol, changes):
    outcomes = assert_case(ranks, shape, ways, tol, changes)
    is_variable = "seq_len" in changes
    assert (len({result.num_tokens for result in outcomes[0].results}) > 1) == is_variable


def test_a_program_file_is_exact(ranks, tmp_path):
    """Uneven: rank 0 has the first and the last stage, rank 1 the one between."""
    file = tmp_path / "program.csv"
    file.write_text("0F0,2F0,2I0,0F1,2F1,2W0,2B1,0B0,,0I1,0W1\n0UNSHARD,,1F0,1F1,1I0,1B1,1W0\n")
    assert_case(ranks, (f"csv:{file}", 2, 2))


@pytest.mark.parametrize("ways", [MEMORY, GLOO], ids=["memory", "gloo"])
@pytest.mark.parametrize(
    ("first", "few", "many", "lengths"),
    [(0, 5, 2000, {"seq_len": 4}), (10_000, 4, 200, {"seq_len": "variable", "max_seq_len": 24})],
    ids=["equal lengths", "variable lengths"],
)
def test_shuffled_legal_programs_train_exactly(
    ranks, tmp_path, ways, is_thorough, first, few, many, lengths
):
    """Most take messages in another order than they were sent; the model is cut anywhere."""
    num_layers = len(models.thin_sequential())  # fewer than stages: some are empty
    for seed in range(first, first + (many if is_thorough else few)):
        drawn, program = random.Random(seed), shuffled_program(seed, 2 + seed % 5)
        program = lower(program, look_ahead=seed % 4) if seed % 3 == 0 else program
        check(program)
        cuts = sorted(drawn.choices(range(num_layers + 1), k=program.num_stages - 1))
        borders = itertools.pairwise([0, *cuts, num_layers])
        (tmp_path / f"{seed}.csv").write_text(to_csv(program))
        settings = config(
            *(f"csv:{tmp_path}/{seed}.csv", program.world_size, program.num_microbatches),
            preset="models:thin_sequential",
            partition=tuple(end - start for start, end in borders),
            look_ahead=drawn.randint(0, 3),
            **lengths,
        )
        assert_exact(ranks, settings, *ways)


@pytest.mark.parametrize("ways", [MEMORY, GLOO], ids=["memory", "gloo"])
def test_messages_that_wait_for_their_action_count_in_the_peak_and_its_prediction(
    ranks, tmp_path, ways
):
    num, peaks = 8, []
    for order in (list(range(num)), list(reversed(range(num)))):  # in which rank 1 takes them
        rows = (
            [*(f"0F{m}" for m in range(num)), *(f"0B{m}" for m in order)],
            [f"1{op}{m}" for m in order for op in "FB"],
        )
        (tmp_path / "program.csv").write_text("\n".join(map(",".join, rows)))
        uses = ranks.run(2, *ways, config(f"csv:{tmp_path}/program.csv", 2, num), memory_of)
        assert all(abs(use.predicted_peak_bytes / use.peak_bytes - 1) <= 0.02 for use in uses)
        peaks.append(uses[1])
    least_bytes = num / 2 * 8 * SEQ_LEN * PRESETS["llama-tiny"].hidden_size
    assert peaks[1].predicted_peak_bytes - peaks[0].predicted_peak_bytes >= least_bytes
    if ways is MEMORY:  # over gloo, what was sent may lie about as well, if rank 0 is slow
        assert peaks[1].peak_bytes - peaks[0].peak_bytes >= least_bytes


def bytes_moved(trainer):
    """The bytes of each message in two steps, sent and received."""
    spans = [span for step in range(2) for span in trainer.step(step).spans]
    return [sorted(s.num_bytes for s in spans if s.lane is lane) for lane in (Lane.SEND, Lane.RECV)]


@pytest.mark.parametrize("ways", [MEMORY, GLOO], ids=["memory", "gloo"])
def test_messages_that_vary_are_as_long_as_their_microbatch(ranks, ways):
    settings = config("1f1b", 2, 4, **VARIABLE)
    data = TextLoader(settings.data, VOCABULARY)
    lengths = [x.shape[1] for step in range(2) for x in data.step(step).inputs]
    expected = sorted(8 * 64 * 2 * length for length in lengths)
    for moved in ranks.run(2, *ways, settings, bytes_moved):
        assert moved == [expected, expected]


# architectures of transformers

ARCHITECTURES = ("qwen2", "qwen3", "gemma2", "gpt_neox", "phi3", "olmo2")
FROM_FOLDERS = [
    *(
        case("1f1b", p, 3, name, tied, thorough=p == 4 or (tied and name != "gpt_neox"))
        for name in ARCHITECTURES
        for tied in (False, True)
        for p in (2, 4)
    ),
    *(
        case("1f1b", p, 3, "mixtral", tied, tol=1e-5, dtype="float32", thorough=p == 4 or tied)
        for tied in (False, True)
        for p in (2, 4)
    ),
    case("1f1b", 3, 2, "gemma2", None, seq_len=40),  # longer than its sliding windows
]


@pytest.mark.parametrize(("shape", "ways", "tol", "changes"), FROM_FOLDERS)
def test_an_architecture_with_a_plan_is_exact(ranks, tmp_path, shape, ways, tol, changes):
    *shape, architecture, tied = shape
    folder = configuration_folder(tmp_path, architecture, tied=tied)
    assert_case(ranks, shape, ways, tol, {"preset": folder, **changes})


FOUND = ("gpt2", "opt", "bloom", "gptj")


@pytest.mark.parametrize(
    ("architecture", "schedule", "world_size", "is_folder"),
    [
        *((name, "zb_h1", 3, True) for name in FOUND),
        *((name, "interleaved_1f1b", 2, False) for name in FOUND[:2]),
        *(pytest.param(name, "interleaved_1f1b", 2, False, marks=THOROUGH) for name in FOUND[2:]),
        *(pytest.param(name, "1f1b", 2, True, marks=THOROUGH) for name in FOUND),
    ],
)
def test_an_architecture_without_a_plan_is_exact(
    ranks, tmp_path, architecture, schedule, world_size, is_folder
):
    preset = f"models:{architecture}"
    if is_folder:
        getattr(models, architecture)().save_pretrained(preset := str(tmp_path / architecture))
    assert_case(ranks, (schedule, world_size, 4), changes={"preset": preset, **TWICE})


def test_a_list_that_is_named_is_cut(ranks):
    keys = {"layers": "transformer.h", "after_layers": ("tail", "transformer.ln_f")}
    assert_case(ranks, ("1f1b", 2, 3), changes={"preset": "models:two_lists", **keys})


def test_a_checkpoint_of_the_base_model_alone_is_read(ranks, tmp_path):
    """As the hub's gpt2 is: its names begin below the head's model."""
    GPT2Model(models.configuration("gpt2")).save_pretrained(tmp_path)
    assert_case(ranks, ("1f1b", 2, 3), changes={"preset": str(tmp_path)})


# models of users

SGD = OptimizerSpec("sgd", 0.05, momentum=0.9)
ADAMW = OptimizerSpec("adamw", 1e-3, weight_decay=0.1)
"""Leaves alone what has no gradient, and decays what has one of zeros."""
SHORT = {"seq_len": 6, "microbatch_size": 2, "optimizer": SGD}
USUAL = {1: "afab", 2: "1f1b", 3: "zb_h1"}


def awkward(name, p=3, *, schedule=None, **changes):
    place = "models" if hasattr(models, name) else "awkward_models"
    shape = schedule or USUAL[p], p, changes.pop("m", 4)
    return case(*shape, preset=f"{place}:{name}", **{**SHORT, **changes})


def traced(name, *points, p=3, **changes):
    trace = {"split": "trace", "split_points": points or ("second", "third")}
    place = "models" if hasattr(models, name) else "traced_models"
    return case(USUAL[p], p, 4, preset=f"{place}:{name}", **{**SHORT, **trace, **changes})


UNTRAINED = {"optimizer": ADAMW}
VARYING = {**UNTRAINED, "seq_len": "variable", "max_seq_len": 12}
AWKWARD = {
    **{
        name: {}
        for name in (
            *("thrice", "subclassed_in_name", "hooked", "tied_over_three", "normed", "in_place"),
            *("in_place_on_ids", "statistics", "structured", "tuple_of_one", "sends_half"),
            *("renormed", "drawn", "recurrent", "shared_layer", "shared_layer_with_cache"),
            *("shared_projection", "tied_and_used_again", "hooked_llama"),
        )
    },
    **dict.fromkeys(("complex_weights_and_buffers", "shared_at_times", "frozen_llama"), UNTRAINED),
    "used_by_some": VARYING,
}
POINTS = {
    **dict.fromkeys(
        ("Blocks", "Frame", "Mixed", "Hooked", "used_twice", "tuple_output", "WrittenSkip"),
        ("second", "third"),
    ),
    "Encoder": ("down.1", "up.1"),
    "Trunk": ("blocks.1", "blocks.2"),
    "TiedTutorial": ("layers.1", "layers.2"),
}
RECOMPUTED = (
    *("in_place", "in_place_on_ids", "one_object_as_two", "normed", "statistics", "recurrent"),
    "sequential",
)
REPLICATED = (
    *("thrice", "shared_projection", "complex_weights_and_buffers"),
    *("used_by_some", "frozen_llama", "drawn", "quantised"),
)
STOPPED = ("stopped", "frozen_front", "one_branch_stopped", "one_number_unused", "quantised")
UNEVEN = {2: [(3, 4), (4, 3), (1, 6)], 3: [(3, 1, 3), (2, 2, 3), (1, 4, 2), (4, 1, 2), (1, 1, 5)]}
"""Cuts before, within and after the child of seven through which no gradient comes."""
OF_USERS = [
    *(
        awkward(name, p, thorough=p < 3, **changes)
        for name, changes in AWKWARD.items()
        for p in (3, 2, 1)
    ),
    awkward("sequential", partition=(0, 5, 3)),  # with an empty stage
    awkward("tied_sequential"),
    traced("Frame", "second"),  # with an empty stage
    traced("with_dropout", "third", p=1),
    *(traced(name, *POINTS[name], p=p, thorough=p < 3) for name in POINTS for p in (3, 2, 1)),
    # A second forward sees the input and the buffers of the first, and changes neither.
    *(awkward(name, 2, recompute=True) for name in RECOMPUTED),
    traced("Frame", p=2, recompute=True),
    *(
        awkward(name, 2, schedule="zbv", thorough=name == "thrice")
        for name in ("shared_projection", "thrice")
    ),
    # What no replica has used stays without a gradient; what one has used has one on all.
    *(
        awkward(
            *(name, 2),
            schedule="zbv",
            m=2,
            replicas=2,
            sharding=policy,
            **AWKWARD.get(name, UNTRAINED),
            thorough=policy in (DataParallel(), Zero2()),
        )
        for name in REPLICATED
        for policy in (Zero3(), DataParallel(), Zero2())
    ),
    awkward("used_by_some", 2, schedule="zbv", m=2, replicas=2, sharding=Zero1(), **VARYING),
    case(
        *("zbv", 2, 2),
        preset="traced_models:Encoder",
        split="trace",
        replicas=2,
        sharding=Zero3(),
        **{"split_points": ("down.1", "up.0", "up.1"), **SHORT, **UNTRAINED},
    ),
    # Where no gradient comes back none is made: weight decay makes zeros and a missing one differ.
    *(
        awkward(
            *(name, p),
            schedule=schedule,
            partition=partition,
            ways=ways,
            optimizer=dataclasses.replace(ADAMW, clip_norm=clip_norm),
            thorough=p == 2 or partition != UNEVEN[3][0] or (ways is GLOO and at > 1),
        )
        for at, name in enumerate(STOPPED)
        for p, schedule, ways, clip_norm in (
            *((3, "zb_h1", MEMORY, 0.0), (3, "1f1b", GLOO, 0.01)),
            *((2, "1f1b", MEMORY, 0.0), (2, "zb_h1", GLOO, 0.01)),
        )
        for partition in UNEVEN[p]
    ),
]
WITH_OWN_BATCHES = {
    **dict.fromkeys(("vit", "sequential_encoder", "classified_llama"), ()),
    "traced_vit": ("blocks.0", "blocks.2", "head"),
    "encoder": ("layers.0", "layers.1", "layers.2", "restore"),
    "transformers_vit": ("vit.layers.1", "vit.layers.2", "vit.layers.3"),
}


def own(name, schedule, p, m=4, **changes):
    points = WITH_OWN_BATCHES[name]
    trace = {"split": "trace", "split_points": points} if points else {}
    rest = {"preset": f"own_models:{name}", "optimizer": SGD, **TWICE, **trace}
    return case(schedule, p, m, **{**rest, **changes})


OWN = [
    # Traced pieces are candidates for stages, not their number.
    *(own(name, "zb_h1", 3) for name in WITH_OWN_BATCHES),
    *(own(name, "interleaved_1f1b", 2, thorough=name != "encoder") for name in ("vit", "encoder")),
    *(
        own(name, *shape, thorough=True)
        for name in WITH_OWN_BATCHES
        for shape in (("afab", 1), ("1f1b", 2))
    ),
    own("vit", "1f1b", 2, 2, replicas=2, sharding=DataParallel()),
    own("encoder", "1f1b", 2, 2, replicas=2, sharding=Zero1()),
]


@pytest.mark.parametrize(("shape", "ways", "tol", "changes"), [*OF_USERS, *OWN])
def test_a_module_of_a_user_trains_as_on_one_device(ranks, shape, ways, tol, changes):
    assert_case(ranks, shape, ways, tol, changes)


class Streams:
    """Gives each rank's children the random numbers of that rank, for a module in one process."""

    def __init__(self, seed: int, cuts: tuple[int, ...]) -> None:
        self._seed, self._cuts = seed, cuts

    @contextlib.contextmanager
    def around(self, module: nn.Sequential, step: int) -> Iterator[None]:
        states: dict[int, Tensor] = {}

        def enter(rank: int) -> Callable[..., None]:
            def before(*_: object) -> None:
                if rank in states:
                    torch.set_rng_state(states[rank])
                else:
                    torch.manual_seed(seed_from(self._seed, step, rank))

            return before

        def leave(rank: int) -> Callable[..., None]:
            return lambda *_: states.update({rank: torch.get_rng_state()})

        handles = []
        for index, child in enumerate(module):
            rank = sum(cut <= index for cut in self._cuts)
            handles.append(child.register_forward_pre_hook(enter(rank)))
            handles.append(child.register_forward_hook(leave(rank)))
        yield
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize(
    "partition", [*(pytest.param(few, marks=THOROUGH) for few in ((7,), (3, 4))), (2, 3, 2)]
)
def test_dropout_is_drawn_from_the_seed_of_step_and_rank(ranks, partition, recompute):
    """The author's module draws the same numbers, from one state per rank, by microbatch."""
    streams = Streams(0, tuple(itertools.accumulate(partition[:-1])))
    changes = {"preset": "awkward_models:dropped", "recompute": recompute, "partition": partition}
    shape = "1f1b", len(partition), 4
    assert_case(ranks, shape, changes={**SHORT, **changes}, around=streams.around)


def test_the_manual_cut_and_the_trace_of_the_tutorial_train_alike(ranks):
    traced = {"split": "trace", "split_points": ("layers.1", "layers.3")}
    manual, traced = (
        ranks.run(3, with_trainer, config("1f1b", 3, 4, preset=preset, **rest))[-1].losses
        for preset, rest in (("models:sequential", {}), ("traced_models:Tutorial", traced))
    )
    assert traced == pytest.approx(manual, rel=1e-12)


# replicas

POLICIES = (
    *(NoCollectives(), DataParallel(), Zero1(), Zero2(), Zero2(every_backward=False)),
    *(Zero3(), Zero3(1, 0), TorchWindow()),
)
TIED_AND_CLIPPED = {**TIED, **CLIPPED}
TWO_WAY = [name for name, schedule in SCHEDULES.items() if schedule.is_two_way]
KINDS_OF_REPLICAS = {
    "plain": THIN,
    "tied and clipped": TIED_AND_CLIPPED,
    "uneven and recomputed": {
        **THIN,
        "seq_len": "variable",
        "max_seq_len": 40,
        "microbatch_size": 2,
        "recompute": True,
    },
    "empty": {"partition": "with an empty stage"},
}
EVERY = list(
    itertools.product(
        ((2, 2), (2, 1), (4, 1), (1, 4), (3, 2)),  # D x p; three do not divide what they share
        POLICIES,
        ("afab", "1f1b", "interleaved_1f1b", "zb_h1", "zbv", "looped_bfs"),
        KINDS_OF_REPLICAS,
    )
)


def pairwise(cases):
    """Few of the cases, in which each two values of different settings come together."""

    def pairs(case):
        return set(itertools.combinations(enumerate(case), 2))

    todo = set().union(*map(pairs, cases))
    while todo:
        best = max(cases, key=lambda case: len(pairs(case) & todo))
        todo -= pairs(best)
        yield best


CHIEF = (
    ((2, 2), (4, 1), (3, 2)),
    (Zero1(), Zero2(), Zero3()),
    ("1f1b", "interleaved_1f1b", "zbv"),
)
FEW = [
    *pairwise(list(itertools.product(*CHIEF, KINDS_OF_REPLICAS))),
    ((3, 2), DataParallel(), "zbv", "tied and clipped"),  # what ZeRO-1 does to gradients
    # what ZeRO-3 does, elsewhere in the row
    ((2, 2), TorchWindow(), "interleaved_1f1b", "tied and clipped"),
]


def settings_of(shape, policy, schedule, kind):
    (replicas, p), changes = shape, KINDS_OF_REPLICAS[kind]
    rest = {"replicas": replicas, "sharding": policy}
    if kind == "empty":
        num_inner = program_of(config(schedule, p, max(2, p), **rest)).num_stages - 2
        changes = {"partition": (2, *[0] * num_inner, 4) if num_inner >= 0 else "uniform", **THIN}
    return config(schedule, p, max(2, p), **rest, **changes)


@pytest.mark.parametrize("case", FEW, ids=lambda case: "-".join(map(str, case)))
def test_replicas_train_as_one_device_does(ranks, case):
    assert_exact(ranks, settings_of(*case))


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS_OF_REPLICAS)
def test_replicas_train_so_with_every_policy_and_schedule(ranks, kind):
    for case in (case for case in EVERY if case[-1] == kind):
        assert_exact(ranks, settings_of(*case))


@pytest.mark.parametrize(
    ("shape", "ways", "tol", "changes"),
    [
        *(case(name, 2, 4, **TIED_AND_CLIPPED) for name in TWO_WAY),
        *(case(name, 4, 8, thorough=True, **TIED_AND_CLIPPED) for name in TWO_WAY),
        *(
            case(TWO_WAY[at % 2], 2, 4, replicas=2, sharding=policy, **TIED_AND_CLIPPED)
            for at, policy in enumerate((DataParallel(), Zero1(), Zero2(), Zero3()))
        ),
        case("chimera", 4, 4, partition=(1, 0, 0, 3), recompute=(True, *[False] * 7)),
        awkward("tied_over_three", 4, schedule="dualpipe", m=8),
        case("dualpipe", 4, 8, ways=GLOO, has_pairs=True, **THIN),
        case("dualpipev", 2, 6, has_pairs=True, replicas=2, sharding=Zero3(), **TIED_AND_CLIPPED),
        awkward("used_by_some", 2, schedule="chimera", **VARYING),
        awkward("complex_weights_and_buffers", 2, schedule="chimera", **UNTRAINED),
    ],
)
def test_two_owners_of_a_stage_train_as_one_device_does(ranks, shape, ways, tol, changes):
    assert_case(ranks, shape, ways, tol, changes)


def test_every_collective_of_the_program_leaves_one_span_in_the_order_of_its_lane(ranks):
    settings = settings_of((2, 2), Zero3(1, 0), "interleaved_1f1b", "plain")
    for process, outcome in enumerate(ranks.run(4, with_trainer, settings)):
        replica, rank = divmod(process, 2)
        spans = outcome.results[-1].spans
        assert {(span.replica, span.rank) for span in spans} == {(replica, rank)}
        joined = [span for span in spans if span.lane is Lane.COLLECTIVE]
        issued = [a for a in outcome.lowered.actions[rank] if a.op in (Op.UNSHARD, Op.REDUCE_GRAD)]
        assert [(span.stage, span.op) for span in joined] == [(a.stage, a.op) for a in issued]
        for before, after in itertools.pairwise(joined):
            assert before.start_ns < before.end_ns <= after.start_ns
        at = {(s.op, s.stage, s.microbatch): s for s in spans}
        begun, unsharded = iter(joined), {}
        for action in outcome.lowered.actions[rank]:
            if action.op in (Op.UNSHARD, Op.REDUCE_GRAD):
                unsharded[action.stage] = next(begun).end_ns
            elif action.op in COMPUTE_OPS:
                computed = at[action.op, action.stage, action.microbatch]
                assert computed.start_ns >= unsharded[action.stage]


@pytest.mark.parametrize("policy", [DataParallel(), Zero3()], ids=str)
def test_replicas_of_bfloat16_stay_equal_bit_for_bit(ranks, policy):
    optimizer = OptimizerSpec(learning_rate=0.1, clip_norm=0.1)
    changes = {"optimizer": optimizer, "dtype": "bfloat16", "replicas": 2, "sharding": policy}
    outcomes = ranks.run(4, with_trainer, config("zbv", 2, 2, **TIED, **changes))
    for one, other in zip(outcomes[:2], outcomes[2:], strict=True):
        assert one.losses == other.losses
        for name, tensor in one.state.items():
            assert torch.equal(tensor, other.state[name]), name
            if name in one.gradients:
                assert tensor.dtype is torch.bfloat16
                assert not torch.equal(tensor, one.initial[name]), name


HELD = {  # of the bytes of its parameters: parameters, gradients, two moments
    DataParallel(): 1 + 1 + 2,
    Zero1(): 1 + 1 + 2 / 2,
    Zero2(): 1 + 1 / 2 + 2 / 2,
    Zero3(): 1 / 2 + 1 / 2 + 2 / 2,
}


@pytest.mark.parametrize("policy", HELD, ids=str)
def test_a_rank_holds_the_bytes_that_its_policy_leaves_it(ranks, policy):
    """Measured at the end of a step: what the profiler saw come and go, on what was there."""
    settings = config("1f1b", 2, 2, replicas=2, sharding=policy)
    for parameter_bytes, held_bytes in ranks.run(4, with_trainer, settings, held_bytes_of):
        assert held_bytes == pytest.approx(HELD[policy] * parameter_bytes, rel=0.05)


def held_bytes_of(trainer):
    held = memory_of(trainer).timeline[-1].num_bytes
    return sum(p.nbytes for p in trainer.parameters().values()), held


# odd uses of weights are exact or refused, whatever shards them and splits their backward

ODD = (
    *("viewed", "assigned", "scaled", "swapped", "called", "growing", "differentiating"),
    *("normalised", "hooked_when_accumulated", "hooked_gradients", "transposed"),
)
ODD_POLICIES = (None, DataParallel(), Zero1(), Zero2(), Zero3())
ODD_CASES = list(itertools.product(ODD, ODD_POLICIES, ("1f1b", "zb_h1", "zbv"), (False, True)))
FEW_ODD = [ODD_CASES[number] for number in range(0, len(ODD_CASES), 21)]
LEAST = {False: TOLERANCE, True: 5e-3}
"""The largest relative difference of a loss that is rounding, of which bfloat16 has more."""


def trained_if_exact(fabric, is_member, settings):
    """Some steps, or why the comparison with the author's module does not call them exact."""
    agreement = agree(settings, fabric)
    if not is_member:
        return None
    trainer = Trainer(agreement, fabric)
    group = fabric.host_group_of(trainer.everyone)
    try:
        compare(
            *(trainer, settings, CPU),
            gather=trainer.gather,
            decide=lambda work: work() if len(trainer.everyone) == 1 else broadcast(work, group),
        )
    except InexactError as error:
        return str(error)
    finally:
        trainer.close()
    trainer = Trainer(agreement, fabric)
    outcome = train(trainer)
    trainer.close()
    return outcome


@pytest.mark.parametrize(("kind", "policy", "schedule", "is_mixed"), FEW_ODD, ids=str)
def test_an_odd_use_of_weights_is_exact_or_refused(
    ranks, monkeypatch, kind, policy, schedule, is_mixed
):
    assert_exact_or_refused(ranks, monkeypatch, kind, policy, schedule, is_mixed)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ODD)
def test_it_is_so_under_every_policy_schedule_and_precision(ranks, monkeypatch, kind):
    for case in (case for case in ODD_CASES if case[0] == kind):
        assert_exact_or_refused(ranks, monkeypatch, *case)


def assert_exact_or_refused(ranks, monkeypatch, kind, policy, schedule, is_mixed):
    replicas = 1 if policy is None else 2
    settings = config(
        *(schedule, 2, 4 // replicas),
        preset=f"odd_weights:{kind}",
        dtype="float32" if is_mixed else "float64",
        autocast="bfloat16" if is_mixed else "none",
        optimizer=OptimizerSpec("sgd", 0.2, momentum=0.9),
        seq_len=6,
        replicas=replicas,
        sharding=policy or DataParallel(),
    )
    monkeypatch.setattr("ranks.GRACE_S", 1)  # for the others, where one rank refuses
    try:
        told = ranks.run(settings.num_processes, trained_if_exact, settings)
    except Exception as refusal:
        cannot_be_cast = kind == "viewed" and not is_mixed  # its views stay in float32
        expected = r"ModelError: \S" + "|same dtype" * cannot_be_cast
        assert re.search(expected, str(refusal)), refusal
        return
    if isinstance(told[0], str):
        assert set(told) == {told[0]}
        return
    assert_as_unsplit(told, settings, LEAST[is_mixed], losses_alone=is_mixed)
