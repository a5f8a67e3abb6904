import json
import subprocess
import sys

import numpy as np
import pytest
from ranks import Alone
from texts import END, TEXTS

from engine.model.tokens import ByteTokens, DataError, identity_of, load_tokenizer, open_tokens

KINDS = ["json", "parquet", "csv", "text", "hf"]


def _stream(tokens):
    return tokens.read(0, len(tokens)).tolist()


def _documents(tokens):
    return [
        tokens.read(int(start), int(stop)).tolist()
        for start, stop in zip(*tokens.documents(), strict=True)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_documents_are_the_tokenizers_own_output_closed_by_its_end_token(kind, sources, tokenizer):
    end = tokenizer.convert_tokens_to_ids(END)
    expected = [[*tokenizer(text)["input_ids"], end] if text else [] for text in TEXTS]
    tokens = open_tokens(sources[kind], tokenizer)
    assert _documents(tokens) == expected
    assert _stream(tokens) == [token for document in expected for token in document]


@pytest.mark.parametrize("kind", ["json", "hf"])
def test_without_a_tokenizer_rows_are_their_utf8_bytes(kind, sources):
    assert _documents(open_tokens(sources[kind], None)) == [list(t.encode()) for t in TEXTS]


class _WithBytes:
    """A tokenizer whose vocabulary has bytes for words, as some on the hub have."""

    def __init__(self, words):
        self._words = words

    def get_vocab(self):
        return self._words

    def __call__(self, _):
        return {"input_ids": [0, 1]}


def test_a_tokenizer_of_bytes_has_an_identity_that_its_order_does_not_change():
    words = {b"\xff": 0, "a": 1, b"a": 2}
    same = dict(reversed(words.items()))
    assert identity_of(_WithBytes(words)) == identity_of(_WithBytes(same))
    assert identity_of(_WithBytes(words)) != identity_of(_WithBytes({**words, b"b": 3}))


def test_any_window_is_the_slice_of_the_stream(sources, tokenizer):
    tokens = open_tokens(sources["json"], tokenizer)
    stream = np.array(_stream(tokens))
    for start in range(len(stream)):
        for stop in range(start + 1, len(stream) + 1):
            assert np.array_equal(tokens.read(start, stop), stream[start:stop])


def test_windows_cross_the_chunks_of_the_arrow_file(datasets_cache, tmp_path):
    texts = [str(number) for number in range(3000)]  # `map` writes a chunk per 1000 rows
    path = tmp_path / "long.json"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tokens = open_tokens(f"files:{path}", None)
    stream = "".join(texts).encode()
    assert bytes(_stream(tokens)) == stream
    assert bytes(tokens.read(1000, 9000).tolist()) == stream[1000:9000]


def test_another_split_of_a_data_set_can_be_named(sources):
    assert bytes(_stream(open_tokens(f"{sources['hf']}?split=test", None))) == b"only this"
    both = _stream(open_tokens(f"{sources['hf']}?split=test+train", None))
    assert bytes(both) == b"only this" + "".join(TEXTS).encode()


def test_a_configuration_of_a_data_set_can_be_named(datasets_cache, tmp_path):
    configs = "".join(f"- config_name: {c}\n  data_files: {c}.jsonl\n" for c in ("big", "small"))
    (tmp_path / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    for config in ("big", "small"):
        (tmp_path / f"{config}.jsonl").write_text(json.dumps({"text": config}) + "\n")
    source = f"hf:{tmp_path}?config=small&split=train"
    assert bytes(_stream(open_tokens(source, None))) == b"small"


def test_another_column_can_be_named_and_empty_rows_are_empty_documents(datasets_cache, tmp_path):
    path = tmp_path / "rows.json"
    path.write_text('{"body": "x"}\n{"body": null}\n{"body": "y"}\n')
    assert _documents(open_tokens(f"files:{path}", None, "body")) == [[120], [], [121]]


def test_special_tokens_of_the_tokenizers_own_are_kept_and_the_end_is_not_doubled(
    sources, tokenizer
):
    from tokenizers.processors import TemplateProcessing

    end = tokenizer.eos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{END} $A {END}", special_tokens=[(END, end)]
    )
    documents = _documents(open_tokens(sources["json"], tokenizer))
    assert documents == [tokenizer(text)["input_ids"] if text else [] for text in TEXTS]
    assert documents[0][0] == documents[0][-1] == end


def test_the_tokenizers_truncation_does_not_shorten_documents(sources, tokenizer):
    full = _stream(open_tokens(sources["json"], tokenizer))
    tokenizer.backend_tokenizer.enable_truncation(3)
    tokenizer.model_max_length = 3
    assert _stream(open_tokens(sources["json"], tokenizer)) == full


def tokens_in_cache(source, tokenizer_folder, cache):
    import datasets

    datasets.config.HF_DATASETS_CACHE = cache
    return _stream(open_tokens(source, load_tokenizer(tokenizer_folder, None)))


def test_processes_that_start_together_all_get_the_tokens(sources, tokenizer_folder, tmp_path):
    arguments = (sources["json"], tokenizer_folder, str(tmp_path))
    processes = [Alone(tokens_in_cache, *arguments) for _ in range(2)]
    tokens = open_tokens(sources["json"], load_tokenizer(tokenizer_folder, None))
    assert [process.result() for process in processes] == [_stream(tokens)] * 2
    assert len(list(tmp_path.rglob("cache-*.arrow"))) == 1


@pytest.mark.parametrize(
    ("text", "paragraphs"),
    [
        (b"one\ntwo\n\nthree", [b"one\ntwo\n", b"three"]),
        (b"\n \n  one\n\t\n\n\n two\n", [b"  one\n", b" two\n"]),
        (b"one\r\n\r\ntwo\r\n", [b"one\r\n", b"two\r\n"]),
        (b"one\n\n   ", [b"one\n"]),
        (b"one", [b"one"]),
        (b"\n\n", []),
        (b"", []),
    ],
)
def test_documents_of_bytes_are_paragraphs(text, paragraphs):
    tokens = ByteTokens(np.frombuffer(text, dtype=np.uint8))
    assert [bytes(document) for document in _documents(tokens) if document] == paragraphs


ONE_FORMAT = r"the files end in .*; expected one format: .json, .jsonl"
BAD_SOURCES = [
    ("nonsense", 'unknown data source "nonsense"; expected "stdlib", "synthetic"'),
    ("text:no/such/file", 'data source "text:no/such/file": no such file'),
    ("hf:./no/such", 'data source "hf:./no/such": .*no/such.*; expected a data set'),
    ("hf:x?splt=train", 'unknown option "splt=train"; expected hf:NAME.config=CONFIG'),
    ("hf:x?split=", 'unknown option "split="'),
]


@pytest.mark.parametrize(("source", "message"), BAD_SOURCES)
def test_a_source_that_cannot_be_had_says_why(datasets_cache, source, message):
    with pytest.raises(DataError, match=message):
        open_tokens(source, None)


@pytest.mark.parametrize(
    ("kind", "texts", "problem"),
    [
        ("files", {"broken.json": "{nonsense"}, ".*JSON"),
        ("files", {"empty.json": ""}, "the file is empty"),
        ("text", {"empty.json": ""}, "the file is empty"),
        ("files", {"a.json": "x", "b.parquet": "x"}, ONE_FORMAT),
        ("files", {"a": "x"}, ONE_FORMAT),
    ],
)
def test_files_that_hold_no_rows_are_named_with_what_is_wrong(
    datasets_cache, tokenizer, tmp_path, kind, texts, problem
):
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    place = tmp_path if problem == ONE_FORMAT else tmp_path / name
    with pytest.raises(DataError, match=f'data source "{kind}:{place}": {problem}'):
        open_tokens(f"{kind}:{place}", tokenizer)


def test_what_a_source_does_not_have_is_answered_with_what_there_is(sources):
    with pytest.raises(DataError, match=r'Unknown split "best".*train.*test'):
        open_tokens(f"{sources['hf']}?split=best", None)
    for column, message in (
        ("body", 'no column "body"; set text_column to one of: id, text'),
        ("id", r'column "id" holds .*int64.*, expected text'),
    ):
        with pytest.raises(DataError, match=message):
            open_tokens(sources["json"], None, column)


def test_without_the_datasets_package_the_extra_is_named(monkeypatch, sources):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"pip install 'ppbench-torch\[hf\]'"):
        open_tokens(sources["json"], None)


def test_bytes_need_no_tokenizer(tokenizer_folder, tmp_path):
    assert load_tokenizer("bytes", tokenizer_folder) is None
    assert load_tokenizer("auto", None) is None
    (tmp_path / "config.json").write_text("{}")
    assert load_tokenizer("auto", str(tmp_path)) is None


def test_auto_is_the_models_own_tokenizer_and_a_name_goes_before_it(tokenizer_folder, tmp_path):
    own = load_tokenizer("auto", tokenizer_folder)
    named = load_tokenizer(tokenizer_folder, str(tmp_path))
    assert own.get_vocab() == named.get_vocab()
    assert own.eos_token == END


def test_a_tokenizer_that_cannot_be_loaded_says_why_and_what_to_do(tmp_path):
    fix = '; expected a folder with tokenizer files, a hub id that can be reached, or "bytes"'
    with pytest.raises(DataError, match=f'tokenizer "{tmp_path}": .*no tokenizer files{fix}'):
        load_tokenizer(str(tmp_path), None)
    with pytest.raises(DataError, match=f'tokenizer "./no/such": no such folder{fix}'):
        load_tokenizer("./no/such", None)
    (tmp_path / "tokenizer.json").write_text("nonsense")
    with pytest.raises(DataError, match=f'tokenizer "{tmp_path}": .*{fix}') as caught:
        load_tokenizer("auto", str(tmp_path))
    assert "\n" not in str(caught.value)


def test_importing_the_data_room_loads_neither_datasets_nor_transformers():
    script = (
        "import engine.model.data, sys;"
        "print({'datasets', 'transformers', 'tokenizers', 'pyarrow'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True
    )
    assert done.stdout == "set()\n"
