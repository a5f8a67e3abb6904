"""Microbatches that come in slices of their sequences train as whole ones do on one device."""

from __future__ import annotations

import gc
import itertools

import pytest
from models import configuration_folder
from pipeline import SEQ_LEN, TOLERANCE, assert_exact, config, over_gloo, train, with_trainer
from test_evaluation import evaluate, merged, unsplit_losses
from test_exact import CLIPPED, GLOO, MEMORY, THOROUGH, TIED, TWICE, assert_case, case
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from engine.configuration import program_of
from engine.model.causal_lm import CausalLMStage
from engine.model.prefix import Prefix
from engine.model.spec import ModelSpec
from engine.model.split import open_model, try_model
from engine.model.stage_module import ModelError
from engine.model.tiny import random_settings
from engine.plan.action import Action, Op
from engine.plan.collectives import Zero2, Zero3
from engine.plan.program import EVALUATE, Program, loop_placement, to_csv
from engine.plan.rules import peak_activations
from engine.plan.slices import even_lengths
from engine.run.device import CPU

EVEN, UNEVEN, LONGER = (4, 4, 4, 4), (7, 5, 3, 1), (1, 3, 5, 7)
RECOMPUTED = {"recompute": (True, True), "rehearses": True}
LONG_ROPE = {  # other frequencies for sequences of more than 9 tokens
    "rope_type": "longrope",
    "original_max_position_embeddings": 9,
    "factor": 4.0,
    "rope_theta": 1e4,
    "partial_rotary_factor": 1.0,
    "short_factor": [1.0] * 8,
    "long_factor": [3.0, 2.0, 4.0, 5.0] * 2,
}
OF_TRAININGS = [
    case("seq1f1b", 1, 2, slices=EVEN),
    case("seq1f1b", 2, 1, slices=EVEN),
    case("seq1f1b", 2, 3, slices=UNEVEN, **TWICE),
    case("seq1f1b", 4, 2, slices=(16,)),
    case("seq1f1b", 4, 3, slices=(1,) * SEQ_LEN),
    case("seq1f1b", 2, 2, ways=GLOO, slices=EVEN, rehearses=True),
    case("seq1f1b", 4, 3, ways=GLOO, slices=UNEVEN),
    case("seq1f1b", 2, 2, slices=UNEVEN, recompute=(True, False), rehearses=True),
    case("seq1f1b", 2, 2, slices=UNEVEN, replicas=2, sharding=Zero2(), **TIED),
    case("seq1f1b", 2, 2, slices=EVEN, replicas=2, sharding=Zero3(), thorough=True, **TIED),
    case("seq1f1b", 2, 2, slices=LONGER, replicas=2, sharding=Zero3(), **RECOMPUTED),
    case("seq1f1b", 2, 2, slices=LONGER, autocast="bfloat16", dtype="float32", tol=6e-2),
    case("seq1f1b", 4, 3, slices=UNEVEN, **TIED, **CLIPPED),
    case("seq1f1b", 4, 2, slices=EVEN, partition=(2, 0, 0, 2)),
]


@pytest.mark.parametrize(("shape", "ways", "tol", "changes"), OF_TRAININGS)
def test_slices_train_as_on_one_device(ranks, shape, ways, tol, changes):
    assert_case(ranks, shape, ways, tol, changes)


@pytest.mark.parametrize(
    ("architecture", "settings", "tol"),
    [
        ("gpt2", {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}, TOLERANCE),
        ("mistral", {"sliding_window": 5}, TOLERANCE),
        ("olmo2", {}, TOLERANCE),
        (
            "phi3",
            {"rope_parameters": LONG_ROPE, "original_max_position_embeddings": 9},
            TOLERANCE,
        ),
        pytest.param("opt", {"dropout": 0.0}, TOLERANCE, marks=THOROUGH),
        pytest.param("qwen2", {}, TOLERANCE, marks=THOROUGH),
        pytest.param("falcon", {}, TOLERANCE, marks=THOROUGH),
    ],
)
def test_architectures_that_keep_a_cache_come_in_slices(
    ranks, tmp_path, architecture, settings, tol
):
    folder = configuration_folder(tmp_path, architecture, **settings)
    assert_case(ranks, ("seq1f1b", 2, 2), MEMORY, tol, {"preset": folder, "slices": UNEVEN})


def halved(program: Program) -> Program:
    """The same order with each backward in two halves, the second one put off by an action."""
    rows = []
    for row in program.actions:
        halves = [[a] if a.op is Op.F else [a._replace(op=Op.I)] for a in row]
        put_off = [[a._replace(op=Op.W)] if a.op is Op.B else [] for a in row]
        rows.append(
            tuple(
                one
                for now, late in itertools.zip_longest([*halves, []], [[], *put_off])
                for one in (*now, *late)
            )
        )
    return Program("halved", program.placement, program.num_microbatches, rows)


def test_a_program_of_slices_in_a_file_trains_in_halves_of_backwards(ranks, tmp_path):
    file = tmp_path / "program.csv"
    file.write_text(to_csv(halved(program_of(config("seq1f1b", 2, 2, slices=UNEVEN)))))
    assert_case(ranks, (f"csv:{file}", 2, 2), changes={"slices": UNEVEN})


@pytest.mark.parametrize(
    ("shape", "ways", "changes"),
    [
        (("seq1f1b", 2, 2), (), {"slices": UNEVEN}),
        (("1f1b", 4, 1), (over_gloo,), {"slices": even_lengths(SEQ_LEN, 5), "rehearses": True}),
        (("zbv", 2, 3), (), {"slices": EVEN}),
        (("chimera", 2, 2), (), {"slices": EVEN, "replicas": 2, **TIED}),
        (("dualpipe", 2, 4), (), {"slices": LONGER}),
    ],
)
def test_twenty_batches_in_slices_have_the_loss_of_the_unsplit_model(ranks, shape, ways, changes):
    settings = config(*shape, mode=EVALUATE, **changes)
    found = ranks.run(settings.num_processes, *ways, with_trainer, settings, evaluate)
    initial = merged([state for _, state in found[: settings.world_size]])
    for own in (losses for losses, _ in found if losses[0] is not None):
        assert own == pytest.approx(unsplit_losses(settings, initial), rel=TOLERANCE)


def test_stages_in_a_loop_take_all_forwards_of_slices_before_all_backwards(ranks, tmp_path):
    num_slices, file = 2 * len(UNEVEN), tmp_path / "program.csv"
    rows = [
        (
            *(Action(stage, Op.F, number) for stage in own for number in range(num_slices)),
            *(
                Action(stage, Op.B, number)
                for stage in reversed(own)
                for number in reversed(range(num_slices))
            ),
        )
        for own in ((0, 2), (1, 3))
    ]
    file.write_text(to_csv(Program("loop", loop_placement(2, 2), num_slices, rows)))
    assert_case(
        ranks, (f"csv:{file}", 2, 2), changes={"slices": UNEVEN, "stages_per_rank": 2, **TIED}
    )


def train_and_count(trainer):
    """How many prefixes are left when some steps are over."""
    train(trainer)
    gc.collect()
    return sum(isinstance(one, Prefix) for one in gc.get_objects())


def test_keys_and_values_are_gone_when_a_step_is_over(ranks):
    settings = config("seq1f1b", 2, 3, slices=UNEVEN, **RECOMPUTED)
    assert ranks.run(2, with_trainer, settings, train_and_count) == [0, 0]


def test_ranks_hold_the_slices_that_the_program_says(ranks):
    settings = config("seq1f1b", 4, 4, slices=EVEN)
    outcomes = assert_exact(ranks, settings, *MEMORY)
    assert [one.peak_held for one in outcomes] == [7, 6, 5, 4]
    assert peak_activations(program_of(settings)) == [7, 6, 5, 4]


def rope_of(kind: str, width: int = 128) -> dict[str, object]:
    """Rotary positions of a usual configuration that change with the length of a sequence."""
    factors = {"short_factor": [1.0] * (width // 2), "long_factor": [2.0, 3.0] * (width // 4)}
    factors = factors if kind == "longrope" else {}
    return {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, **factors}


@pytest.mark.parametrize(
    ("architecture", "rope"),
    [
        ("phi3", rope_of("longrope", 96)),
        ("llama", rope_of("longrope")),
        ("llama", rope_of("dynamic")),
        (
            "gemma3_text",
            {"sliding_attention": {"rope_theta": 1e4}, "full_attention": rope_of("dynamic")},
        ),
    ],
)
def test_trying_finds_frequencies_that_follow_the_length_of_a_slice(
    tmp_path, monkeypatch, architecture, rope
):
    CONFIG_MAPPING[architecture](rope_parameters=rope).save_pretrained(tmp_path)
    spec = ModelSpec(str(tmp_path))
    model = open_model(spec, (1, SEQ_LEN), CPU)
    try_model(model, spec, is_sliced=True)
    monkeypatch.setattr(CausalLMStage, "_lengthen", lambda _stage, _module, *given: given)
    monkeypatch.setattr(CausalLMStage, "_shorten", lambda _stage, _module, _args, output: output)
    monkeypatch.setattr("engine.model.probe._KEPT", {})
    with pytest.raises(ModelError, match="cannot come in slices"):
        try_model(model, spec, is_sliced=True)


@pytest.mark.parametrize(
    ("preset", "settings", "reason"),
    [
        ("mamba", {}, "layer 0 keeps no keys and values"),
        ("gpt2", {"resid_pdrop": 0.1}, "has resid_pdrop = 0.1, which would draw other numbers"),
        (
            "gpt2",
            {"embd_pdrop": 0.2, "attn_pdrop": 0.1, "summary_first_dropout": 0.1},
            "has embd_pdrop = 0.2, attn_pdrop = 0.1, which would draw .*; set each to 0",
        ),
        ("opt", {"layerdrop": 0.05}, "has layerdrop = 0.05, which would draw other numbers"),
        ("mixtral", {"router_jitter_noise": 0.01}, "has router_jitter_noise = 0.01, which"),
        ("openai-gpt", {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}, "keeps no keys"),
        ("models:sequential", {}, "only a causal LM of transformers"),
    ],
)
def test_a_model_that_cannot_come_in_slices_is_refused(tmp_path, preset, settings, reason):
    name = preset if ":" in preset else configuration_folder(tmp_path, preset, **settings)
    spec = ModelSpec(name)
    model = open_model(spec, (1, SEQ_LEN), CPU)
    with pytest.raises(ModelError, match=reason) as caught:
        try_model(model, spec, is_sliced=True)
    assert caught.value.key == "slices.number"
    if "would draw" in reason:  # an evaluation draws nothing
        try_model(model, spec, is_sliced=True, trains=False)


@pytest.mark.parametrize(
    ("architecture", "setting"),
    [
        ("gpt2", "summary_first_dropout"),
        ("gpt_neo", "classifier_dropout"),
        ("falcon", "attention_dropout"),
    ],
)
def test_a_setting_that_draws_nothing_in_a_causal_lm_lets_slices_be(
    tmp_path, architecture, setting
):
    folder = configuration_folder(tmp_path, architecture, **{setting: 0.1})
    spec = ModelSpec(folder)
    model = open_model(spec, (1, SEQ_LEN), CPU)
    assert random_settings(model.config) == {setting: 0.1}
    try_model(model, spec, is_sliced=True)


def test_settings_of_slices_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="at least 1 in each, and seq_len 16 in all"):
        config("seq1f1b", 2, 2, slices=(8, 4))
    with pytest.raises(ValueError, match='seq_len is "variable", expected a number of tokens'):
        config("seq1f1b", 2, 2, slices=(8, 8), seq_len="variable")
    for share in (2.0, -0.1, float("nan")):
        with pytest.raises(ValueError, match=f"attention is {share:g}; expected a share from 0"):
            config("seq1f1b", 2, 2, slices=(8, 8), attention=share)
    with pytest.raises(ValueError, match="cannot be compiled"):
        config("seq1f1b", 2, 2, slices=(8, 8), compile=True)
