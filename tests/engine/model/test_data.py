import pytest
import torch

from engine.model.data import Data, DataError, DataSpec


def test_targets_are_the_successors_of_the_inputs():
    batch = Data(DataSpec(seq_len=32, microbatch_size=2, num_microbatches=3), 256).step(0)
    assert batch.inputs.shape == batch.targets.shape == (3, 2, 32)
    assert batch.inputs.dtype == torch.int64
    assert torch.equal(batch.inputs[..., 1:], batch.targets[..., :-1])


def test_a_step_is_the_same_whoever_draws_it_and_steps_differ():
    spec = DataSpec()
    assert torch.equal(Data(spec, 256).step(4).inputs, Data(spec, 256).step(4).inputs)
    assert not torch.equal(Data(spec, 256).step(4).inputs, Data(spec, 256).step(5).inputs)


def test_the_global_batch_does_not_depend_on_how_it_is_split():
    few = Data(DataSpec(microbatch_size=4, num_microbatches=2), 256).step(1).inputs
    many = Data(DataSpec(microbatch_size=1, num_microbatches=8), 256).step(1).inputs
    assert torch.equal(few.flatten(0, 1), many.flatten(0, 1))


def test_stdlib_is_real_text():
    text = bytes(Data(DataSpec(seq_len=4000), 256).step(0).inputs[0, 0].tolist())
    assert b"    " in text
    assert b"\n" in text


def test_synthetic_covers_the_vocabulary():
    tokens = Data(DataSpec("synthetic", seq_len=4096), 1000).step(0).inputs
    assert tokens.min() >= 0
    assert 990 <= tokens.max() < 1000


def test_a_text_file_is_read_as_bytes(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(bytes(range(256)))
    inputs = Data(DataSpec(f"text:{path}", seq_len=8), 256).step(0).inputs
    assert torch.equal(inputs[..., 1:], inputs[..., :-1] + 1)


def test_a_sequence_may_be_as_long_as_the_text_allows(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(b"12345")
    assert Data(DataSpec(f"text:{path}", seq_len=4), 256).step(0).inputs.shape[-1] == 4


@pytest.mark.parametrize(
    ("source", "vocabulary", "message"),
    [
        ("nonsense", 256, "unknown data source"),
        ("text:no/such/file", 256, "No such file"),
        ("stdlib", 100, "vocabulary of 256, got 100"),
    ],
)
def test_data_that_cannot_be_had_says_why(source, vocabulary, message):
    with pytest.raises(DataError, match=message):
        Data(DataSpec(source), vocabulary)


def test_a_text_shorter_than_a_sequence_is_refused(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(b"1234")
    with pytest.raises(DataError, match="has 4 tokens; a sequence needs 5"):
        Data(DataSpec(f"text:{path}", seq_len=4), 256)
