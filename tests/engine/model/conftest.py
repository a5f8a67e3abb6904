"""A tokenizer and data sets made on the spot, with the libraries that will read them."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from texts import END, TEXTS
from transformers import PreTrainedTokenizerBase

from engine.model.tokens import load_tokenizer


@pytest.fixture(scope="session")
def datasets_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    import datasets

    folder = tmp_path_factory.mktemp("datasets_cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A byte-level BPE of 300 tokens, trained on TEXTS, with an end-of-text token."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    model = Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    model.train_from_iterator(TEXTS, trainer)
    folder = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=model, eos_token=END).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def tokenizer(tokenizer_folder: str) -> PreTrainedTokenizerBase:
    loaded = load_tokenizer(tokenizer_folder, None)
    assert loaded is not None
    return loaded


@pytest.fixture(scope="session")
def sources(datasets_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The same TEXTS as a source of each kind; the folder has a split `test` of one text."""
    import datasets

    folder = tmp_path_factory.mktemp("data")
    rows = "".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(TEXTS))
    (folder / "a.json").write_text(rows)
    datasets.Dataset.from_dict({"text": TEXTS}).to_parquet(str(folder / "a.parquet"))
    datasets.Dataset.from_dict({"id": range(len(TEXTS)), "text": TEXTS}).to_csv(
        str(folder / "a.csv")
    )
    (folder / "a.txt").write_text("\n".join(TEXTS))
    (folder / "hub").mkdir()
    (folder / "hub" / "train.jsonl").write_text(rows)
    (folder / "hub" / "test.jsonl").write_text('{"id": 0, "text": "only this"}\n')
    return {
        "json": f"files:{folder}/a.json",
        "parquet": f"files:{folder}/a.parquet",
        "csv": f"files:{folder}/a.csv",
        "text": f"text:{folder}/a.txt",
        "hf": f"hf:{folder}/hub",
    }
