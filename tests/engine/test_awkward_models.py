"""Models that are easily trained wrong are exact on one, two and three ranks, or refused.

The oracle is the author's own module, called as its author would: `factory()(ids)` after
`torch.manual_seed`, one microbatch after the other, and torch's own optimizer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import awkward_models
import models
import numpy as np
import pytest
import torch
import traced_models
from pipeline import (
    CPU,
    accumulate,
    by_memory,
    config,
    lone_trainer,
    optimizer_of,
    over_gloo,
    relative_difference,
    with_trainer,
)
from torch import Tensor, nn

from engine.exactness import InexactError, compare
from engine.model.data import Data
from engine.model.factory import find_factory
from engine.model.stage_module import ModelError
from engine.plan.collectives import DataParallel, Zero1, Zero2, Zero3
from engine.run.optimizer import OptimizerSpec
from engine.trainer import Trainer, TrainerConfig, seed_of

NUM_STEPS = 2
SCHEDULES = {1: "afab", 2: "1f1b", 3: "zb_h1"}
SGD = OptimizerSpec("sgd", 0.05, momentum=0.9)
BATCH = {"source": "synthetic", "seq_len": 6, "microbatch_size": 2}
"""Drawn: each rank would shuffle a corpus in windows of six bytes."""

ADAMW = OptimizerSpec("adamw", 1e-3, weight_decay=0.1)
"""Leaves alone what has no gradient, and decays what has one of zeros."""


@dataclass
class Trained:
    """The results of two steps of training."""

    losses: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor | None] = field(default_factory=dict)  # of the first step
    state: dict[str, Tensor] = field(default_factory=dict)


def settings_of(name: str, world_size: int, **changes: object) -> TrainerConfig:
    changes = {"optimizer": SGD, **BATCH, **changes}
    schedule = changes.pop("schedule", SCHEDULES[world_size])
    places = (awkward_models, models, traced_models)
    place = next(place.__name__ for place in places if hasattr(place, name))
    return config(schedule, world_size, 4, preset=f"{place}:{name}", **changes)


def train(trainer: Trainer) -> Trained:
    """Train on this rank; returns the results by unsplit names."""
    names = {
        name: weight.name
        for weight in trainer.model.shared_weights(trainer.partition)
        for _, name in weight.owners
    }
    trained = Trained()
    for step in range(NUM_STEPS):
        trained.losses.append(trainer.step(step).loss)
        if step == 0:
            trained.gradients = {
                names.get(name, name): None if gradient is None else gradient.clone()
                for name, gradient in trainer.gathered(lambda held: held.grad).items()
            }
    state = trainer.gathered(lambda held: held.detach())
    for module in trainer.modules.values():
        theirs = module.own_parameters()
        state |= {n: t for n, t in module.own_state().items() if n not in theirs}
    trained.state = {names.get(name, name): t.detach().clone() for name, t in state.items()}
    return trained


def unsplit(
    settings: TrainerConfig, around: Callable[[nn.Module, int], Iterator[None]] | None = None
) -> Trained:
    """The author's module, trained as its author would."""
    seed = settings.model.seed
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002  # as a factory draws
    module = find_factory(settings.model.name)()
    assert settings.model.torch_dtype == torch.float64
    module.double()  # of complex tensors `to` would take the real part, and this takes none
    module._apply(lambda t: t.to(torch.complex128) if t.is_complex() else t)
    module.train()
    trained, optimizer = Trained(), optimizer_of(settings.optimizer, module)
    data = Data(settings.data, awkward_models.VOCABULARY)
    for step in range(NUM_STEPS):
        torch.manual_seed(seed_of(seed, step, 0))
        with contextlib.nullcontext() if around is None else around(module, step):
            trained.losses.append(accumulate(module, data, step))
        if settings.optimizer.clip_norm:
            nn.utils.clip_grad_norm_(module.parameters(), settings.optimizer.clip_norm)
        if step == 0:
            trained.gradients = {
                n: None if p.grad is None else p.grad.clone() for n, p in module.named_parameters()
            }
        optimizer.step()
    trained.state = {n: t.detach() for n, t in module.state_dict().items()}
    return trained


def assert_equal(ours: list[Trained], theirs: Trained, tolerance: float) -> None:
    (losses,) = (o.losses for o in ours if o.losses[0] is not None)
    assert losses == pytest.approx(theirs.losses, rel=tolerance)
    gradients = {name: g for o in ours for name, g in o.gradients.items()}
    assert gradients.keys() == theirs.gradients.keys()
    for name, gradient in gradients.items():
        assert_close(name, gradient, theirs.gradients[name], tolerance)
    for part in ours:
        for name, tensor in part.state.items():
            assert_close(name, tensor, theirs.state[name], tolerance)
    assert {name for o in ours for name in o.state} >= theirs.gradients.keys()


def assert_close(name: str, ours: Tensor | None, theirs: Tensor | None, tolerance: float) -> None:
    if ours is None or theirs is None:
        assert ours is theirs, f"{name} has a gradient on one side only"
        return
    assert ours.shape == theirs.shape, name
    if not theirs.numel() or torch.equal(ours, theirs.to(ours.dtype)):
        return
    if float(theirs.abs().max()) < 1e-12:  # nothing but rounding, such as a bias before a norm
        assert float(ours.abs().max()) < 1e-12, name
        return
    assert relative_difference(ours, theirs) < tolerance, name


EXACT: dict[str, dict[str, object]] = {
    "thrice": {},
    "subclassed_in_name": {},
    "hooked": {},
    "tied_over_three": {},
    "normed": {},
    "in_place": {},
    "in_place_on_ids": {},
    "statistics": {},
    "structured": {},
    "tuple_of_one": {},
    "complex_weights_and_buffers": {"optimizer": ADAMW},
    "used_by_some": {"optimizer": ADAMW, "seq_len": "variable", "max_seq_len": 12},
    "sends_half": {},
    "renormed": {},
    "drawn": {},
    "recurrent": {},
    "shared_layer": {},
    "shared_layer_with_cache": {},
    "shared_at_times": {"optimizer": ADAMW},
    "shared_projection": {},
    "tied_and_used_again": {},
    "hooked_llama": {},
    "frozen_llama": {"optimizer": ADAMW},
}


@pytest.mark.parametrize("name", EXACT)
def test_an_awkward_model_is_exact_wherever_it_is_cut(ranks, name, is_thorough):
    theirs = unsplit(settings_of(name, 1, **EXACT[name]))
    for world_size in SCHEDULES if is_thorough else (3,):  # three ranks cut where two do
        ours = ranks.run(
            world_size, with_trainer, settings_of(name, world_size, **EXACT[name]), train
        )
        assert_equal(ours, theirs, 1e-10)


TRACE = {"split": "trace", "split_points": ("second", "third")}
TRACED = {
    **dict.fromkeys(("Blocks", "Frame", "Mixed", "Hooked", "used_twice", "tuple_output"), TRACE),
    "WrittenSkip": TRACE,
    "Encoder": {**TRACE, "split_points": ("down.1", "up.1")},
    "Trunk": {**TRACE, "split_points": ("blocks.1", "blocks.2")},
    "TiedTutorial": {**TRACE, "split_points": ("layers.1", "layers.2")},
}
OTHERS = [
    ("sequential", 3, {"partition": (0, 5, 3)}),  # with an empty stage
    ("tied_sequential", 3, {}),
    ("Frame", 3, {**TRACE, "split_points": ("second",)}),  # with an empty stage
    ("with_dropout", 1, {**TRACE, "split_points": ("third",)}),
    *((name, 3, changes) for name, changes in TRACED.items()),
    *(
        pytest.param(name, world_size, changes, marks=pytest.mark.thorough)
        for name, changes in TRACED.items()
        for world_size in (1, 2)
    ),
]


@pytest.mark.parametrize(("name", "world_size", "changes"), OTHERS)
def test_chains_of_usual_layers_and_traced_modules_are_exact(ranks, name, world_size, changes):
    settings = settings_of(name, world_size, **changes)
    ours = ranks.run(world_size, with_trainer, settings, train)
    assert_equal(ours, unsplit(settings_of(name, 1, **{**changes, "partition": "uniform"})), 1e-10)


REFUSED = {
    "subclassed": "is a Backwards with a forward of its own",
    "container_forward_hook": "the nn.Sequential has a forward hook",
    "container_backward_pre_hook": "the nn.Sequential has a backward pre-hook",
    "a_slice": "0.weight and 2.weight lie in the same memory",
    "several_outputs": "returns a tuple; expected logits",
    "wrong_output": "returns a tensor [12, 256]; expected logits [2, 6, vocabulary]",
    "sparse": "0 has sparse gradients",
    "lazy": "1.weight is a lazy parameter",
    "nothing_to_train": "no parameter requires a gradient",
    "stopped_before_a_frozen_end": "the output depends on no parameter that requires a gradient",
    "with_none": "the nn.Sequential has no children, or one that is None",
    "with_own_parameter": "scale belongs to the nn.Sequential itself",
    "hooks_everywhere": "registers hooks for all modules",
    "another_each_time": "must return the same module each time",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_trained_as_something_else_is_refused(name):
    """It is refused in two stages, and in one, where nothing is cut."""
    for stages_per_rank in (2, 1):
        assert REFUSED[name] in refusal_of(name, stages_per_rank=stages_per_rank)


def refusal_of(name: str, **changes: object) -> str:
    """Why a model is refused on one rank, before anything is trained."""
    settings = settings_of(name, 1, schedule="looped_bfs", **changes)
    with pytest.raises(ModelError) as caught:
        lone_trainer(settings)
    return str(caught.value)


REFUSED_WHERE_CUT = {
    "hooked_shared_weight": "1.weight has a hook on its gradient and is shared by stages 0 and 1",
    "sends_a_number": "1 returns int, which cannot be sent",
    "sends_complex": "1 returns torch.complex128, which cannot be sent",
    "hooked_whole_llama": "LlamaForCausalLM has a forward pre-hook",
    "hooked_shared_llama": "model.layers.0.mlp.up_proj.weight and model.layers.3.mlp.up_proj",
}
DIFFERENT_WHERE_CUT = {
    "twice_with_statistics": r"1.norm.running_mean .* in step 0 is .* away",
    "renormed_and_tied": r"the loss in step 0 is .* away: .*; gradient of 0.weight",
    "one_tensor_as_two": r"the loss in step 0 is .* away",
}
CUTS = {
    "renormed_and_tied": (2, 2),
    "one_tensor_as_two": (4, 2),
    "sends_a_number": (2, 2),
    "sends_complex": (2, 2),
}


def difference_of(name: str, **changes: object) -> str:
    """How a model trains differently from the author's, which the comparison says."""
    settings = settings_of(name, 1, schedule="looped_bfs", **changes)
    with pytest.raises(InexactError) as caught:
        compare(lone_trainer(settings), settings, CPU)
    return str(caught.value)


@pytest.mark.parametrize("name", [*REFUSED_WHERE_CUT, *DIFFERENT_WHERE_CUT])
def test_what_cannot_be_cut_is_refused_or_found_and_exact_on_one_rank(ranks, name):
    cut = {"stages_per_rank": 2, "partition": CUTS.get(name, "uniform")}
    if name in REFUSED_WHERE_CUT:
        assert REFUSED_WHERE_CUT[name] in refusal_of(name, **cut)
    else:
        assert re.search(DIFFERENT_WHERE_CUT[name], difference_of(name, **cut))
    alone = settings_of(name, 1, schedule="1f1b")
    assert_equal(ranks.run(1, with_trainer, alone, train), unsplit(alone), 1e-10)


@pytest.mark.parametrize("name", ["stopped_llama", "stopped_in_its_backward"])
def test_a_gradient_that_turns_out_not_to_come_back_ends_the_first_step(ranks, name):
    """Zeros instead would let the weights before decay. Two stages of one rank, then a whole."""
    looped = settings_of(name, 1, optimizer=ADAMW, schedule="interleaved_1f1b", stages_per_rank=2)
    (reason,) = ranks.run(1, with_trainer, looped, error_of)
    assert "no gradient comes back to the stage before" in reason
    alone = settings_of(name, 1, optimizer=ADAMW)
    assert_equal(ranks.run(1, with_trainer, alone, train), unsplit(alone), 1e-10)


def test_a_tensor_that_is_cached_outside_the_module_ends_the_first_step(ranks):
    """It was made when the shapes were found, so it has no values."""
    (reason,) = ranks.run(1, with_trainer, settings_of("cached_aside", 1), error_of)
    assert "an earlier call has left outside the module" in reason


def error_of(trainer: Trainer) -> str:
    with pytest.raises(ModelError) as caught:
        train(trainer)
    return str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        "in_place",
        "in_place_on_ids",
        "one_object_as_two",
        "normed",
        "statistics",
        "recurrent",
        "sequential",
        "Frame",
    ],
)
def test_recomputation_of_an_awkward_model_is_exact(ranks, name):
    """Its second forward sees the input and the buffers of the first, and changes neither."""
    changes = TRACE if name == "Frame" else {}
    theirs = unsplit(settings_of(name, 1, **changes))
    settings = settings_of(name, 2, recompute=True, **changes)
    assert_equal(ranks.run(2, with_trainer, settings, train), theirs, 1e-10)


def test_recomputation_of_what_writes_to_memory_that_others_read_is_found_to_differ(ranks):
    """A view beside its source, in one value; without recomputation it is exact."""
    settings = settings_of("writes_under_a_view", 1)
    assert_equal(ranks.run(1, with_trainer, settings, train), unsplit(settings), 1e-10)
    reason = difference_of("writes_under_a_view", stages_per_rank=1, recompute=True)
    assert re.match(r"the loss in step 0 is .* away", reason)


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize(
    "world_size", [*(pytest.param(few, marks=pytest.mark.thorough) for few in (1, 2)), 3]
)
def test_dropout_is_drawn_from_the_seed_of_step_and_rank(ranks, world_size, recompute):
    """The author's module draws the same numbers, from one state per rank, by microbatch."""
    partition = {1: (7,), 2: (3, 4), 3: (2, 3, 2)}[world_size]
    settings = settings_of(
        "dropped", world_size, recompute=recompute, schedule="1f1b", partition=partition
    )
    ours = ranks.run(world_size, with_trainer, settings, train)
    streams = _Streams(settings.model.seed, tuple(itertools.accumulate(partition[:-1])))
    assert_equal(ours, unsplit(settings, streams.around), 1e-10)


class _Streams:
    """Gives each rank's children the random numbers of that rank."""

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
                    torch.manual_seed(seed_of(self._seed, step, rank))

            return before

        def leave(rank: int) -> Callable[..., None]:
            def after(*_: object) -> None:
                states[rank] = torch.get_rng_state()

            return after

        handles = []
        for index, child in enumerate(module):
            rank = sum(cut <= index for cut in self._cuts)
            handles.append(child.register_forward_pre_hook(enter(rank)))
            handles.append(child.register_forward_hook(leave(rank)))
        yield
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("name", ["thrice", "shared_projection"])
def test_what_is_shared_is_exact_where_a_rank_has_several_stages(ranks, name, is_thorough):
    theirs = unsplit(settings_of(name, 1))
    for schedule in ("interleaved_1f1b", "zbv") if is_thorough else ("zbv",):
        ours = ranks.run(2, with_trainer, settings_of(name, 2, schedule=schedule), train)
        assert_equal(ours, theirs, 1e-10)


REPLICATED = (
    *("thrice", "shared_projection", "complex_weights_and_buffers"),
    *("used_by_some", "frozen_llama", "drawn", "quantised", "Encoder"),
)


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        *((name, Zero3()) for name in REPLICATED),
        ("used_by_some", Zero1()),  # gradients stay whole
        *(
            pytest.param(name, policy, marks=pytest.mark.thorough)
            for name in REPLICATED
            for policy in (DataParallel(), Zero2())
        ),
    ],
    ids=str,
)
def test_an_awkward_model_is_exact_on_replicas(ranks, name, policy):
    """What no replica has used stays without a gradient, and what one has used has one on all."""
    traced = {"split": "trace", "split_points": ("down.1", "up.0", "up.1")}
    changes = traced if name == "Encoder" else EXACT.get(name, {"optimizer": ADAMW})
    theirs = unsplit(settings_of(name, 1, **changes))
    settings = settings_of(name, 2, **changes, schedule="zbv", replicas=2, sharding=policy)
    data = dataclasses.replace(settings.data, num_microbatches=settings.data.num_microbatches // 2)
    ours = ranks.run(4, with_trainer, dataclasses.replace(settings, data=data), train)
    for pipeline in (ours[:2], ours[2:]):
        assert_equal(pipeline, theirs, 1e-10)


UNEVEN = {2: [(3, 4), (4, 3), (1, 6)], 3: [(3, 1, 3), (2, 2, 3), (1, 4, 2), (4, 1, 2), (1, 1, 5)]}
"""Cuts before, within and after the child of seven through which no gradient comes."""
SPLIT_BACKWARD = {by_memory: {2: "1f1b", 3: "zb_h1"}, over_gloo: {2: "zb_h1", 3: "1f1b"}}
"""The backward whole and in two halves, over both transports."""


@pytest.mark.parametrize(("way", "clip_norm"), [(by_memory, 0.0), (over_gloo, 0.01)])
@pytest.mark.parametrize(
    "name", ["stopped", "frozen_front", "one_branch_stopped", "one_number_unused", "quantised"]
)
def test_where_no_gradient_comes_back_none_is_made_whatever_the_cut(
    ranks, name, way, clip_norm, is_thorough
):
    """Weight decay makes a gradient of zeros and a missing one differ."""
    optimizer = dataclasses.replace(ADAMW, clip_norm=clip_norm)
    theirs = unsplit(settings_of(name, 1, optimizer=optimizer))
    for world_size, schedule in SPLIT_BACKWARD[way].items():
        if world_size == 2 and not is_thorough:  # three ranks cut where two do
            continue
        for partition in UNEVEN[world_size][: None if is_thorough else 1]:
            settings = settings_of(
                name, world_size, optimizer=optimizer, schedule=schedule, partition=partition
            )
            assert_equal(ranks.run(world_size, way, with_trainer, settings, train), theirs, 1e-10)
