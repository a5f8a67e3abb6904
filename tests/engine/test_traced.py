"""A traced module trains as its author's, is refused in one line, or the comparison says why.

That modules are exact at one, two and three stages is shown with other awkward models.
"""

import pytest
import torch
from pipeline import CPU, config, lone_trainer, with_trainer

from engine.configuration import model_of
from engine.exactness import InexactError, compare
from engine.model.stage_module import ModelError

POINTS = ("second", "third")
REFUSED = {
    "flat": r"returns a tensor \[32, 256\]; expected logits \[2, 16, vocabulary\]",
    "nameless": r"forward returns a dict without logits; return them alone",
    "branching": r"traced_models.py, line \d+: .*control flow may not depend",
    "complex_skip": r"traced piece 1 returns torch.complex128, which cannot be sent",
    "number_across": r"fails: DataDependentOutputException",
    "in_a_block": r"a split point lies within a block \(no_grad, autocast, \.\.\.\) of forward",
}
DIFFERENT = {
    "custom_backward": r"gradient of second.weight .* is 2.0e\+00 away",
    "hooked_backward": r"gradient of first\.\w+ .* away",
    "tensor_hook": r"gradient of second.weight .* is 5.0e-01 away",
    "python_counter": r"the loss in step 0 is .* away",
    "python_random": r"the loss in step 0 is .* away",
    "shared_buffer": r"the loss in step 0 is .* away",
    "written_view": r"the loss in step 0 is .* away",
}


def settings(name, points=POINTS, **rest):
    """All stages on one rank."""
    model = {"preset": f"traced_models:{name}", "split": "trace", "split_points": points}
    many = {"stages_per_rank": len(points) + 1, "microbatch_size": 2}
    return config("looped_bfs", 1, 3, **{**many, **model, **rest})


@pytest.mark.parametrize(("name", "message"), REFUSED.items())
def test_what_cannot_be_exported_or_sent_is_refused(name, message):
    with pytest.raises(ModelError, match=message) as caught:
        lone_trainer(settings(name))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("name", "message"), DIFFERENT.items())
def test_what_a_trace_leaves_out_is_found_by_the_comparison(name, message):
    asked = settings(name, ("second", "head") if name == "written_view" else POINTS)
    with pytest.raises(InexactError, match=message) as caught:
        compare(lone_trainer(asked), asked, CPU)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "point", "message"),
    [
        ("Mixed", "spare", 'does not call the split point "spare"'),
        ("Frame", "embed", "nothing is computed between two split points, or before the first"),
    ],
)
def test_a_split_point_that_begins_no_piece_is_refused(name, point, message):
    with pytest.raises(ModelError, match=message):
        model_of(settings(name, (point,)), CPU)


def losses_of(trainer):
    return [trainer.step(step).loss for step in range(3)]


def test_the_manual_cut_and_the_trace_of_the_tutorial_train_alike(ranks):
    model = {"split": "trace", "split_points": ("layers.1", "layers.3")}
    manual, traced = (
        ranks.run(3, with_trainer, config("1f1b", 3, 4, preset=preset, **rest), losses_of)[-1]
        for preset, rest in (("models:sequential", {}), ("traced_models:Tutorial", model))
    )
    assert traced == pytest.approx(manual, rel=1e-12)


def test_a_traced_module_takes_no_other_shape():
    model = model_of(settings("Frame", seq_len=8), CPU)
    stage = model.build_stage([range(3)], 0, CPU)
    stage(torch.zeros(2, 8, dtype=torch.int64))
    with pytest.raises(ModelError, match=r"traced for microbatches of \[2, 8\].*given \[2, 4\]"):
        stage(torch.zeros(2, 4, dtype=torch.int64))
    with pytest.raises(ModelError, match='seq_len cannot be "variable"'):
        model_of(settings("Frame", seq_len="variable", source="text"), CPU)
