"""Traced modules against the author's own: loss, every gradient, buffers, the next step's loss."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import traced_models
from pipeline import CPU, accumulate, config, merged
from torch import Tensor, nn

from engine.configuration import model_of
from engine.model.data import Data
from engine.model.stage_module import ModelError
from engine.run.p2p.fabric import Fabric
from engine.trainer import Trainer, TrainerConfig, connect, seed_of

POINTS = ("second", "third")
PER_CALL = 5
EXACT = (
    "Blocks",
    "Frame",
    "Twice",
    "WrittenSkip",
    "ComplexSkip",
    "Hooked",
    "Unused",
    "Spectral",
    "WithoutGradient",
    "DictOutput",
    "BranchingOnShape",
)
REFUSED = {
    "TupleOutput": r"returns a tuple of 2 values.*return the logits alone",
    "Flat": r"returns \[32, 256\] at .*traced_models.py.* return logits of shape",
    "Branching": r"traced_models.py, line \d+: .*control flow may not depend",
    "CustomBackward": r"traced_models.py, line \d+: .*autograd.Function.*torch's own operations",
    "BackwardHook": r'submodule "second" has a backward hook.*remove the hook',
    "TensorHook": r"traced_models.py, line \d+: .*registers a hook on a tensor",
    "PythonCounter": r"forward changes self.calls.*keep it in a buffer",
    "PythonRandom": r"draws random numbers by Python.*by torch",
    "SharedBuffer": r"traced_models.py\", line \d+.* changes scale .*pieces 0, 1 .*move",
    "WrittenView": r"traced_models.py\", line \d+.*views of each other.*clone",
    "NumberAcross": r"traced_models.py\", line \d+.*only dense tensors pass",
}


@dataclass
class Result:
    """The result of training on a rank, or of the author's module."""

    loss: float | None
    next_loss: float | None
    gradients: dict[str, Tensor | None]
    initial: dict[str, Tensor]
    state: dict[str, Tensor]


def settings(name: str, world_size: int, points: tuple[str, ...], **rest: object) -> TrainerConfig:
    model = {"preset": f"traced_models:{name}", "split": "trace", "split_points": points}
    return config("1f1b", world_size, 3, microbatch_size=2, **model, **rest)


def train(fabric: Fabric, is_member: bool, every: list[TrainerConfig]) -> list[Result | str]:
    """Train each configuration; returns its result, or why it is refused."""
    return [_train(fabric, is_member, each) for each in every]


def _train(fabric: Fabric, is_member: bool, given: TrainerConfig) -> Result | str:
    try:
        agreed = connect(given, fabric)
        if not is_member:
            return ""
        trainer = Trainer(agreed, fabric)
    except ModelError as error:
        return str(error)
    initial = _state(trainer)
    loss = trainer.compute_gradients(0)
    gradients = {
        n: None if p.grad is None else p.grad.clone() for n, p in trainer.parameters().items()
    }
    state = _state(trainer)
    result = Result(loss, trainer.compute_gradients(1), gradients, initial, state)
    trainer.close()
    return result


def _state(trainer: Trainer) -> dict[str, Tensor]:
    modules = trainer.modules.values()
    return {n: t.detach().clone() for m in modules for n, t in m.own_state().items()}


def authors(given: TrainerConfig, initial: dict[str, Tensor]) -> Result:
    """The author's module with these weights, called by its author, over the same batches."""
    name = given.model.name.partition(":")[2]
    module = getattr(traced_models, name)()
    for own in (*module.parameters(), *module.buffers()):
        own.data = own.data.double() if own.is_floating_point() else own.data
    aliases = _aliases(module)
    assert module.state_dict().keys() - aliases.keys() == initial.keys()
    module.load_state_dict(initial | {a: initial[n] for a, n in aliases.items()})
    data = Data(given.data, traced_models.VOCABULARY, None)
    loss = accumulate(module, data, 0)
    gradients = {
        n: None if p.grad is None else p.grad.clone() for n, p in module.named_parameters()
    }
    state = {n: t.clone() for n, t in module.state_dict().items() if n not in aliases}
    return Result(loss, accumulate(module, data, 1), gradients, initial, state)


def _aliases(module: nn.Module) -> dict[str, str]:
    """The second names of its parameters."""
    names = {id(p): n for n, p in module.named_parameters()}
    every = module.named_parameters(remove_duplicate=False)
    return {n: names[id(p)] for n, p in every if names[id(p)] != n}


def assert_equal(given: TrainerConfig, results: list[Result]) -> None:
    what = f"{given.model.name} on {given.world_size}"
    initial = _merged([r.initial for r in results])
    expected = authors(given, initial)
    (loss,) = (r.loss for r in results if r.loss is not None)
    (next_loss,) = (r.next_loss for r in results if r.next_loss is not None)
    assert abs(loss - expected.loss) < 1e-10 * abs(expected.loss), what
    assert abs(next_loss - expected.next_loss) < 1e-10 * abs(expected.next_loss), what
    gradients = {n: g for r in results for n, g in r.gradients.items()}
    assert gradients.keys() == expected.gradients.keys(), what
    for name, theirs in expected.gradients.items():
        _assert_close(gradients[name], theirs, f"{what}: gradient of {name}")
    for name, theirs in expected.state.items():
        _assert_close(_merged([r.state for r in results])[name], theirs, f"{what}: {name}")


def _assert_close(ours: Tensor | None, theirs: Tensor | None, what: str) -> None:
    if ours is None or theirs is None:
        assert all(t is None or not t.any() for t in (ours, theirs)), what
        return
    scale = max(float(theirs.abs().max()), 1e-6)
    assert float((ours - theirs).abs().max()) < 1e-10 * scale, what


def _merged(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    names = {name: name for part in parts for name in part}  # any may be on several ranks
    return merged(parts, names)


def run_all(ranks, every: list[TrainerConfig]) -> dict[TrainerConfig, list[Result | str]]:
    """Each configuration's results by rank; few to a call, whose answer is waited for patiently."""
    results: dict[TrainerConfig, list[Result | str]] = {}
    for first in range(0, len(every), PER_CALL):
        some = every[first : first + PER_CALL]
        by_rank = ranks.run(every[0].world_size, train, some)
        results.update({each: [part[i] for part in by_rank] for i, each in enumerate(some)})
    return results


@pytest.mark.parametrize(
    "world_size", [*(pytest.param(few, marks=pytest.mark.thorough) for few in (1, 2)), 3]
)
def test_awkward_modules_are_exact(ranks, world_size):
    every = [settings(name, world_size, POINTS) for name in EXACT]
    for each, results in run_all(ranks, every).items():
        assert all(isinstance(r, Result) for r in results), results
        assert_equal(each, results)


def test_dropout_and_random_operations_draw_as_the_authors_do(ranks):
    given = settings("Dropped", 1, POINTS)
    (result,) = run_all(ranks, [given])[given]
    seed = seed_of(0, 0, 0)
    torch.manual_seed(seed)
    module = traced_models.Dropped().double()
    module.load_state_dict(result.initial)
    torch.manual_seed(seed)
    data = Data(given.data, traced_models.VOCABULARY, None)
    assert accumulate(module, data, 0) == pytest.approx(result.loss, rel=1e-12)


@pytest.mark.parametrize(("name", "message"), REFUSED.items())
def test_what_tracing_cannot_keep_is_refused_with_its_place(name, message):
    with pytest.raises(ModelError, match=message) as caught:
        model_of(settings(name, 3, POINTS), CPU)
    assert "\n" not in str(caught.value)


def test_a_split_point_that_is_not_called_is_refused():
    with pytest.raises(ModelError, match='does not call the split point "spare"'):
        model_of(settings("Unused", 2, ("spare",)), CPU)


def test_a_traced_module_takes_no_other_shape():
    model = model_of(settings("Frame", 1, POINTS, seq_len=8), CPU)
    stage = model.build_stage([range(3)], 0, CPU)
    stage(torch.zeros(2, 8, dtype=torch.int64))
    with pytest.raises(ModelError, match=r"traced for microbatches of \[2, 8\].*given \[2, 4\]"):
        stage(torch.zeros(2, 4, dtype=torch.int64))
    with pytest.raises(ModelError, match='seq_len cannot be "variable"'):
        model_of(settings("Frame", 1, POINTS, seq_len="variable", source="text"), CPU)
