"""What would be trained as something else is refused, or the comparison says how it differs.

A message is one line. The first table is of models that are refused before anything is trained; the
second of those that the comparison with the author's module finds; the third of the first step.
"""

from __future__ import annotations

import re

import models
import own_models
import pytest
import torch
import traced_models
from pipeline import CPU, assert_exact, config, lone_trainer

from engine.configuration import model_of
from engine.exactness import InexactError, NoRoomError, compare, try_author
from engine.model.stage_module import ModelError
from engine.model.task import FactoryTask
from engine.run.optimizer import OptimizerSpec

ADAMW = OptimizerSpec("adamw", 1e-3, weight_decay=0.1)
WHOLE, CUT = {"stages_per_rank": 1}, {"stages_per_rank": 2}
TRACED = {"split": "trace", "split_points": ("second", "third"), "stages_per_rank": 3}


def settings_of(name, schedule="looped_bfs", **changes):
    """All stages on one rank."""
    place = next(
        (m.__name__ for m in (own_models, traced_models, models) if hasattr(m, name)), None
    )
    shape = {"microbatch_size": 2, "seq_len": 6}
    preset = f"{place or 'awkward_models'}:{name}"
    return config(schedule, 1, 4, preset=preset, **{**shape, **changes})


def refusal_of(name, **changes):
    """Why a model is refused on one rank, before anything is trained."""
    with pytest.raises(ModelError) as caught:
        lone_trainer(settings_of(name, **changes))
    return str(caught.value)


def difference_of(name, **changes):
    """How a model trains differently from the author's, which the comparison says."""
    settings = settings_of(name, **changes)
    with pytest.raises(InexactError) as caught:
        compare(lone_trainer(settings), settings, CPU)
    return str(caught.value)


def fault_of(name, **changes):
    """How the first step of a model ends."""
    trainer = lone_trainer(settings_of(name, **changes))
    with pytest.raises(ModelError) as caught:
        trainer.step(0)
    return str(caught.value)


HOWEVER_CUT = {
    "subclassed": "is a Backwards with a forward of its own",
    "several_outputs": "returns a tuple; expected logits",
    "wrong_output": r"returns a tensor \[12, 256\]; expected logits \[2, 6, vocabulary\]",
    "lazy": "1.weight is a lazy parameter",
    "nothing_to_train": "no parameter requires a gradient",
    "stopped_before_a_frozen_end": "the output depends on no parameter that requires a gradient",
    "with_none": "the nn.Sequential has no children, or one that is None",
    "with_own_parameter": "scale belongs to the nn.Sequential itself",
    "another_each_time": "must return the same module each time",
}
WHERE_CUT = {
    "sends_a_number": "1 returns int, which cannot be sent",
    "sends_complex": "1 returns torch.complex128, which cannot be sent",
    "reversing_llama": "this LlamaForCausalLM has a forward pre-hook, which only the last stage",
    "patched_llama": "has a forward of its own instead of its class's, which only the last stage",
}
WHERE_TRACED = {
    "flat": r"returns a tensor \[12, 256\]; expected logits \[2, 6, vocabulary\]",
    "nameless": "forward returns a dict without logits; return them alone",
    "branching": r"traced_models.py, line \d+: .*control flow may not depend",
    "complex_skip": "traced piece 1 returns torch.complex128, which cannot be sent",
    "number_across": "fails: DataDependentOutputException",
    "in_a_block": r"a split point lies within a block \(no_grad, autocast, \.\.\.\) of forward",
}
OF_OWN_BATCHES = {
    "two_values": r"\(module, batches, loss\).*tuple \(Sequential, function\)",
    "no_functions": r"it returned a tuple \(Sequential, function, float\)",
    "too_few_rows": r"targets of shape \[2\]; expected 1 in the first dimension of both",
    "three_tensors": r"batches\(0, 1\) returned a tuple; expected inputs and targets, two tensors",
    "failing_batches": r"batches\(0, 1\) failed: TypeError: .*takes 1 positional argument",
    "not_again": r"batches\(0, 1\) returns other values when it is called again",
    "loss_with_weights": "the loss has parameters, which no stage would train",
    "loss_of_each": r"the loss is a Tensor of shape \[2\]; expected a tensor of one number",
    "detached_loss": "no gradient comes from the loss",
    "failing_loss": r"the loss fails for an output of shape \[2, 10\] and targets of shape \[2\]: ",
    "several_results": "returns a tuple; expected one tensor",
}
LENGTHS = {"seq_len": "variable"}
PARTITIONS = {"sends_a_number": (2, 2), "sends_complex": (2, 2)}
REFUSED = [
    *((name, cut, why) for name, why in HOWEVER_CUT.items() for cut in (WHOLE, CUT)),
    *(
        (name, {**CUT, "partition": PARTITIONS.get(name, "uniform")}, why)
        for name, why in WHERE_CUT.items()
    ),
    *((name, TRACED, why) for name, why in WHERE_TRACED.items()),
    ("Mixed", {**TRACED, "split_points": ("spare",)}, 'does not call the split point "spare"'),
    (
        *("Frame", {**TRACED, "split_points": ("embed",)}),
        "nothing is computed between two split points, or before the first",
    ),
    ("Frame", {**TRACED, **LENGTHS}, 'seq_len cannot be "variable"'),
    *((name, WHOLE, f'^"own_models:{name}": .*{why}') for name, why in OF_OWN_BATCHES.items()),
    ("vit", {**WHOLE, **LENGTHS}, 'brings its own batches; seq_len cannot be "variable"'),
    (
        *("sequential", {**CUT, "recompute": (True, False, True)}),
        "3 values for 2 stages",
    ),
]


@pytest.mark.parametrize(("name", "changes", "message"), REFUSED)
def test_what_cannot_be_trained_as_its_authors_is_refused(name, changes, message):
    """However it is cut, or where it is cut, or traced."""
    found = refusal_of(name, **changes)
    assert re.search(message, found), found
    assert "\n" not in found


RECOMPUTED = {**WHOLE, "recompute": True}
LOSS = "the loss in step 0 is .* away"
DIFFERENT = [
    ("hooked_container", WHOLE, LOSS),  # stages run its children only
    ("a_slice", {**CUT, "dtype": "float32"}, "weight on rank 0 after the update in step 0 is"),
    ("hooked_shared_weight", CUT, "gradient of 1.weight .* in step 0 is .* away"),
    (
        "hooked_shared_llama",
        CUT,
        r"gradient of model\.layers\.\d\.mlp\.up_proj\.weight .* is .* away",
    ),
    ("twice_with_statistics", CUT, r"1.norm.running_mean .* in step 0 is .* away"),
    ("renormed_and_tied", {**CUT, "partition": (2, 2)}, f"{LOSS}: .*; gradient of 0.weight"),
    ("one_tensor_as_two", {**CUT, "partition": (4, 2)}, LOSS),
    ("writes_under_a_view", RECOMPUTED, LOSS),  # a view beside its source, in one value
    ("custom_backward", TRACED, r"gradient of second.weight .* is 2.0e\+00 away"),
    ("hooked_backward", TRACED, r"gradient of first\.\w+ .* away"),
    ("tensor_hook", TRACED, "gradient of second.weight .* is 5.0e-01 away"),
    *((name, TRACED, LOSS) for name in ("python_counter", "python_random", "shared_buffer")),
    ("written_view", {**TRACED, "split_points": ("second", "head")}, LOSS),
]


@pytest.mark.parametrize(("name", "changes", "message"), DIFFERENT)
def test_what_trains_otherwise_is_found_by_the_comparison(name, changes, message):
    found = difference_of(name, **changes)
    assert re.search(message, found), found
    assert "\n" not in found


FAULTS = {
    **dict.fromkeys(
        ("stopped_llama", "stopped_in_its_backward"),
        "no gradient comes back to the stage before",  # zeros would let weights before decay
    ),
    "cached_aside": "an earlier call has left outside the module",  # without values
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_turns_out_in_the_first_step_ends_it(name):
    assert FAULTS[name] in fault_of(name, optimizer=ADAMW, **CUT)


@pytest.mark.parametrize(
    "name",
    [
        *(
            *WHERE_CUT,
            "hooked_shared_weight",
            "hooked_shared_llama",
            "twice_with_statistics",
            "renormed_and_tied",
            "one_tensor_as_two",
        ),
        *("writes_under_a_view", "stopped_llama", "stopped_in_its_backward"),
    ],
)
def test_what_is_refused_where_it_is_cut_is_exact_where_it_is_not(ranks, name):
    assert_exact(ranks, settings_of(name, "1f1b", optimizer=ADAMW))


def test_a_traced_module_takes_no_other_shape():
    model = model_of(settings_of("Frame", **TRACED), CPU)
    stage = model.build_stage([range(3)], 0, CPU)
    stage(torch.zeros(2, 6, dtype=torch.int64))
    with pytest.raises(ModelError, match=r"traced for microbatches of \[2, 6\].*given \[2, 4\]"):
        stage(torch.zeros(2, 4, dtype=torch.int64))


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_the_comparison_with_the_authors_module_uses_the_factorys_loss(monkeypatch, dtype):
    """A loss that differs from the author's is found; one part of it is weighted."""
    trace = {"split": "trace", "split_points": ("blocks.0", "blocks.2", "head")}
    settings = settings_of("traced_vit", "interleaved_1f1b", dtype=dtype, **trace, **CUT)
    assert compare(lone_trainer(settings), settings, CPU, num_steps=2).difference < 1e-2
    if dtype == "float64":
        trainer = lone_trainer(settings)
        monkeypatch.setattr(FactoryTask, "num_counted", lambda _task, targets: targets.numel() + 1)
        with pytest.raises(InexactError, match="the loss in step 0"):
            compare(trainer, settings, CPU, num_steps=1)


def test_a_comparison_for_which_there_is_no_room_is_not_begun():
    with pytest.raises(NoRoomError, match=r"it needs about 0\.0 GiB of memory, and 0\.0 are free"):
        try_author(config("1f1b", 1, 1), CPU, free_bytes=1000)
    try_author(config("1f1b", 1, 1), CPU, free_bytes=2**30)
