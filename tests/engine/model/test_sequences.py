from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import pad_sequence

from engine.model.sequences import (
    IGNORED,
    DocumentSequences,
    Order,
    PackedSequences,
    SyntheticSequences,
    collate,
)
from engine.model.tokens import ByteTokens, DataError


def _bytes(text):
    return ByteTokens(np.frombuffer(text, dtype=np.uint8))


@given(num_tokens=st.integers(2, 200), seq_len=st.integers(1, 20))
def test_every_token_but_the_first_is_a_target_once_up_to_an_unfilled_window(num_tokens, seq_len):
    seq_len = min(seq_len, num_tokens - 1)
    windows = PackedSequences(_bytes(bytes(range(num_tokens))), seq_len, "source")
    targets = [t for row in range(windows.num_sequences) for t in windows[row][1:].tolist()]
    assert targets == list(range(1, 1 + len(targets)))
    assert num_tokens - 1 - len(targets) < seq_len


def test_a_stream_shorter_than_a_window_is_refused_with_both_numbers():
    with pytest.raises(DataError, match='"source" has 4 tokens; a sequence needs 5'):
        PackedSequences(_bytes(b"1234"), 4, "source")


def test_documents_are_cut_and_those_without_a_successor_skipped():
    documents = DocumentSequences(_bytes(b"abcdefgh\n\nx\n\ny"), 4, "source")
    assert [bytes(documents[row].tolist()) for row in range(documents.num_sequences)] == [
        b"abcde",
        b"x\n",
    ]


def test_a_stream_without_a_document_of_two_tokens_is_refused():
    with pytest.raises(DataError, match='"source" has no document of at least 2 tokens'):
        DocumentSequences(_bytes(b"\n\nx"), 4, "source")


def test_synthetic_inputs_have_every_length_in_range_and_no_other():
    rows = SyntheticSequences(100, 0, 2, 9)
    assert {len(rows[row]) - 1 for row in range(500)} == set(range(2, 10))


@given(num_sequences=st.integers(1, 50), seed=st.integers(0, 5), epoch=st.integers(0, 5))
def test_each_epoch_visits_every_row_once(num_sequences, seed, epoch):
    order = Order(num_sequences, seed, shuffle=True)
    numbers = range(epoch * num_sequences, (epoch + 1) * num_sequences)
    assert Counter(map(order.row, numbers)) == Counter(range(num_sequences))


def test_without_shuffling_rows_come_in_the_order_of_the_file():
    order = Order(3, 0, shuffle=False)
    assert [order.row(number) for number in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_microbatches_are_padded_to_their_own_longest_as_torch_pads():
    sequences = [np.arange(1, length + 1) for length in (3, 5, 2, 2)]
    batch = collate(sequences, 2)
    inputs, targets = batch.split()
    assert batch.input_shapes == batch.target_shapes == ((2, 4), (2, 1))
    assert batch.num_tokens == 2 + 4 + 1 + 1
    for index, start in enumerate((0, 2)):
        rows = [torch.from_numpy(sequence) for sequence in sequences[start : start + 2]]
        expected = pad_sequence([row[:-1] for row in rows], batch_first=True)
        assert torch.equal(inputs[index], expected)
        expected = pad_sequence([row[1:] for row in rows], batch_first=True, padding_value=IGNORED)
        assert torch.equal(targets[index], expected)


def test_a_batch_is_two_blocks_however_many_microbatches():
    inputs, targets = collate([np.arange(5)] * 6, 2).split()
    assert len(inputs) == len(targets) == 3
    assert len({tensor.untyped_storage().data_ptr() for tensor in (*inputs, *targets)}) == 2
