import multiprocessing
from dataclasses import replace

import pytest
import torch
from texts import TEXTS

from engine.model.data import IGNORED, VARIABLE, DataError, DataSpec, TextLoader


def _sequences(batch):
    """All sequences of a step without their padding, as pairs of inputs and targets."""
    return [
        (row[target != IGNORED].tolist(), target[target != IGNORED].tolist())
        for inputs, targets in zip(batch.inputs, batch.targets, strict=True)
        for row, target in zip(inputs, targets, strict=True)
    ]


def _is_same(one, other):
    pairs = zip(one.inputs + one.targets, other.inputs + other.targets, strict=True)
    return one.num_tokens == other.num_tokens and all(torch.equal(a, b) for a, b in pairs)


def test_targets_are_the_successors_of_the_inputs():
    batch = TextLoader(DataSpec(seq_len=32, microbatch_size=2, num_microbatches=3), 256).step(0)
    assert len(batch.inputs) == len(batch.targets) == 3
    for inputs, targets in zip(batch.inputs, batch.targets, strict=True):
        assert inputs.shape == targets.shape == (2, 32)
        assert inputs.dtype == targets.dtype == torch.int64
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert batch.num_tokens == 3 * 2 * 32


def test_a_step_is_the_same_whoever_draws_it_and_steps_differ():
    spec = DataSpec()
    assert _is_same(TextLoader(spec, 256).step(4), TextLoader(spec, 256).step(4))
    assert not _is_same(TextLoader(spec, 256).step(4), TextLoader(spec, 256).step(5))
    assert not _is_same(
        TextLoader(spec, 256).step(4), TextLoader(replace(spec, seed=1), 256).step(4)
    )


@pytest.mark.parametrize("source", ["stdlib", "synthetic"])
@pytest.mark.parametrize("seq_len", [16, VARIABLE])
def test_the_global_batch_does_not_depend_on_how_it_is_split(source, seq_len):
    spec = DataSpec(source, seq_len=seq_len, max_seq_len=50)
    few = TextLoader(replace(spec, microbatch_size=4, num_microbatches=2), 256).step(1)
    many = TextLoader(replace(spec, microbatch_size=1, num_microbatches=8), 256).step(1)
    assert _sequences(few) == _sequences(many)
    assert few.num_tokens == many.num_tokens


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("seq_len", [8, VARIABLE])
def test_any_step_can_be_drawn_without_those_before_it(sources, tokenizer, num_workers, seq_len):
    spec = DataSpec(sources["json"], seq_len=seq_len, num_workers=num_workers)
    data = TextLoader(spec, 300, tokenizer)
    in_order = [data.step(step) for step in range(12)]  # more than an epoch
    for step in (7, 8, 3, 3, 11):
        assert _is_same(data.step(step), in_order[step])
    data.close()


@pytest.mark.parametrize("source", ["stdlib", "synthetic", "json", "text"])
def test_loader_processes_draw_what_this_process_draws(sources, tokenizer, source):
    spec = DataSpec(sources.get(source, source), seq_len=VARIABLE, max_seq_len=40)
    alone, helped = (TextLoader(replace(spec, num_workers=n), 300, tokenizer) for n in (0, 2))
    assert all(_is_same(alone.step(step), helped.step(step)) for step in range(6))
    helped.close()


def test_closing_ends_the_loader_processes_and_a_step_starts_them_again():
    others = set(multiprocessing.active_children())
    data = TextLoader(DataSpec(num_workers=2), 256)
    first = data.step(0)
    assert len(set(multiprocessing.active_children()) - others) == 2
    data.close()
    assert set(multiprocessing.active_children()) <= others
    assert _is_same(data.step(0), first)
    data.close()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_drawing_leaves_torchs_random_state_alone(num_workers):
    before = torch.get_rng_state()
    data = TextLoader(DataSpec(num_workers=num_workers), 256)
    data.step(0)
    data.step(5)
    data.close()
    assert torch.equal(torch.get_rng_state(), before)


def test_an_epoch_has_every_window_of_the_tokenizers_output_once(sources, tokenizer):
    end = tokenizer.eos_token_id
    stream = [t for text in TEXTS if text for t in (*tokenizer(text)["input_ids"], end)]
    expected = [
        (stream[start : start + 8], stream[start + 1 : start + 9])
        for start in range(0, len(stream) - 8, 8)
    ]
    data = TextLoader(DataSpec(sources["json"], seq_len=8, num_microbatches=1), 300, tokenizer)
    steps = [data.step(step) for step in range(2 * len(expected))]
    drawn = [sequence for batch in steps for sequence in _sequences(batch)]
    first, second = drawn[: len(expected)], drawn[len(expected) :]
    assert sorted(first) == sorted(second) == sorted(expected)
    assert first != expected
    assert first != second


def test_stdlib_stays_bytes_whatever_the_tokenizer(tokenizer):
    assert _is_same(
        TextLoader(DataSpec(), 256).step(0), TextLoader(DataSpec(), 256, tokenizer).step(0)
    )


def test_bytes_need_a_vocabulary_of_256():
    with pytest.raises(DataError, match="vocabulary of 256, got 100"):
        TextLoader(DataSpec("stdlib"), 100)


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused_with_both(sources, tokenizer):
    with pytest.raises(DataError, match="needs a vocabulary of 300, the model's has 299"):
        TextLoader(DataSpec(sources["json"]), 299, tokenizer)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"seq_len": "varied"}, 'seq_len = "varied"; expected a number or "variable"'),
        ({"seq_len": 0}, "seq_len = 0; expected at least 1"),
        ({"seq_len": VARIABLE, "max_seq_len": 0}, "max_seq_len = 0; expected at least 1"),
        ({"num_microbatches": 0}, "num_microbatches = 0; expected at least 1"),
        ({"seed": -1}, "seed = -1; expected at least 0"),
    ],
)
def test_an_impossible_setting_is_refused(setting, message):
    with pytest.raises(DataError, match=message):
        TextLoader(DataSpec(**setting), 256)
