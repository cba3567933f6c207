"""Rows of texts with labels, as transformers' examples make them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from toolkit.config.job import Data
from toolkit.data.collate import Collator
from toolkit.data.labelled import LabelledDataset
from toolkit.data.loader import EvalLoader
from toolkit.data.prepare import PreparedData, prepare
from toolkit.data.preview import preview
from toolkit.dataset_inspection.labels import Labels, data_of_task
from toolkit.errors import DataError

ONE = Labels(names=("no", "yes"), problem_type="single_label_classification", are_named=True)
SEVERAL = Labels(names=("a", "b", "c"), problem_type="multi_label_classification", are_named=True)
TAGS = Labels(names=("O", "B"), are_named=True)
PIECES = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "the", "hu", "##gging", "face", "is", "in", "new", "york", "##s", ","]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer that marks texts as BERT's does."""
    made = Tokenizer(models.WordPiece({piece: at for at, piece in enumerate(PIECES)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    names = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]"}
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=made, model_input_names=inputs, **names)


@pytest.fixture(scope="module")
def by_bytes() -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens have the blank before a word, as GPT-2's and Llama's do."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: at for at, piece in enumerate(["<end>", *alphabet, "Ġn", "ew"])}
    made = Tokenizer(models.BPE(vocabulary, [("Ġ", "n"), ("e", "w")]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", pad_token="<end>")


def prepared(folder: Path, tokenizer: Any, labels: Labels, records: list[dict[str, Any]], **data: Any) -> PreparedData:
    (folder / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    task = "sequence-classification" if labels.of_sequences else "token-classification"
    section = data_of_task(Data(train=str(folder / "a.jsonl"), **data), task)  # type: ignore[arg-type]
    options = {"sequence_length": 8, "seed": 0, "cache_dir": folder / "cache", "labels": labels}
    return prepare(section, tokenizer=tokenizer, **options)


def rows_of(made: PreparedData) -> LabelledDataset:
    assert isinstance(made.train, LabelledDataset)
    return made.train


def test_a_text_has_its_label_and_a_pair_its_segments(tmp_path: Path, tokenizer: Any) -> None:
    records = [
        {"text": "the face", "text_pair": "is in", "label": 1},
        {"text": "new york", "label": 0},
        {"text": "the the the the", "text_pair": "is is is is is", "label": 1},
    ]
    rows = rows_of(prepared(tmp_path, tokenizer, ONE, records))
    for at, record in enumerate(records):
        pair = (record["text"], record["text_pair"]) if "text_pair" in record else (record["text"],)
        wanted = tokenizer(*pair, truncation=True, max_length=8)
        assert rows[at]["input_ids"].tolist() == wanted["input_ids"]
        assert rows[at]["token_type_ids"].tolist() == wanted["token_type_ids"]
    assert rows[2]["input_ids"][-1] == tokenizer.sep_token_id  # cut, and still marked
    assert [int(rows[at]["labels"]) for at in range(3)] == [1, 0, 1]
    assert (rows.report.sequences, rows.report.truncated, rows.report.target_tokens) == (3, 1, 3)
    batch = Collator.of(rows)([rows[0], rows[1]])
    assert batch["labels"].tolist() == [1, 0]
    assert batch["labels"].dtype == torch.int64
    assert batch["attention_mask"].tolist()[1] == [1, 1, 1, 1, 0, 0, 0, 0]
    assert batch["token_type_ids"].tolist()[0] == [0, 0, 0, 0, 1, 1, 1, 0]
    assert batch["input_ids"].shape == (2, 8)


def test_the_first_token_of_a_word_has_its_tag(tmp_path: Path, tokenizer: Any) -> None:
    records = [{"tokens": ["the", "hugging", "faces", ",", "new"], "ner_tags": [0, 1, 1, 0, 1]}]
    rows = rows_of(prepared(tmp_path, tokenizer, TAGS, records))
    encoded = tokenizer(records[0]["tokens"], is_split_into_words=True, truncation=True, max_length=8)
    wanted, last = [], None
    for word in encoded.word_ids():
        wanted.append(-100 if word is None or word == last else records[0]["ner_tags"][word])
        last = word
    assert rows[0]["input_ids"].tolist() == encoded["input_ids"]
    assert rows[0]["labels"].tolist() == wanted
    assert rows.report.target_tokens == sum(tag != -100 for tag in wanted)
    batch = Collator.of(rows)([rows[0]])
    assert batch["labels"].shape == batch["input_ids"].shape


def test_tags_of_tokens_that_begin_with_a_blank(tmp_path: Path, by_bytes: Any) -> None:
    rows = rows_of(prepared(tmp_path, by_bytes, TAGS, [{"tokens": ["a", "new", "b"], "tags": ["O", "B", "O"]}]))
    assert by_bytes.convert_ids_to_tokens(rows[0]["input_ids"].tolist()) == ["a", "Ġn", "ew", "Ġ", "b"]
    assert rows[0]["labels"].tolist() == [0, 1, -100, -100, 0]  # a blank alone is of no word


def test_several_labels_are_numbers_of_the_classes(tmp_path: Path, tokenizer: Any) -> None:
    records = [{"text": "the", "labels": ["c", "a"]}, {"text": "face", "labels": []}]
    rows = rows_of(prepared(tmp_path, tokenizer, SEVERAL, records))
    assert rows[0]["labels"].tolist() == [1, 0, 1]
    batch = Collator.of(rows)([rows[0], rows[1]])
    assert (batch["labels"].dtype, batch["labels"].tolist()) == (torch.float32, [[1, 0, 1], [0, 0, 0]])
    assert "token_type_ids" not in batch


def test_a_row_that_fills_an_evaluation_has_no_label_that_counts(tmp_path: Path, tokenizer: Any) -> None:
    for labels, records in ((ONE, [{"text": "the", "label": 1}]), (SEVERAL, [{"text": "the", "labels": ["a"]}])):
        rows = rows_of(prepared(tmp_path, tokenizer, labels, records))
        (batch,) = EvalLoader(rows, collate=Collator.of(rows), micro_batch_size=2, dp_rank=0, dp_size=1)
        left = batch["labels"][1].numpy()
        assert np.isnan(left).all() if labels is SEVERAL else left == -100


@pytest.mark.parametrize(("long_rows", "kept"), [("truncate", 2), ("drop", 1)])
def test_long_texts_are_cut_or_dropped(tmp_path: Path, tokenizer: Any, long_rows: str, kept: int) -> None:
    records = [{"text": "the " * 20, "label": 1}, {"text": "face", "label": 0}]
    rows = rows_of(prepared(tmp_path, tokenizer, ONE, records, long_rows=long_rows))
    assert len(rows) == kept
    assert max(len(rows[at]["input_ids"]) for at in range(kept)) <= 8
    assert int(rows[kept - 1]["labels"]) == 0
    assert rows.document_tokens.tolist() == [22, 3]


def test_long_texts_can_be_refused(tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(DataError, match="line 1 has 22 tokens") as caught:
        prepared(tmp_path, tokenizer, ONE, [{"text": "the " * 20, "label": 1}], long_rows="refuse")
    assert caught.value.codes == ("DATA_LONG_ROWS",)


def test_a_label_behind_the_head_of_a_file_is_told_with_its_line(tmp_path: Path, tokenizer: Any) -> None:
    records = [{"text": "the", "label": 1}] * 1000 + [{"text": "the", "label": 2}]
    with pytest.raises(
        DataError, match=r"line 1001: label=2 is outside 0 to 1.*at least 3 classes in model\.labels"
    ) as caught:
        prepared(tmp_path, tokenizer, ONE, records)
    assert caught.value.codes == ("DATA_LABELS",)
    assert not [*(tmp_path / "cache").glob("tokens-*")]


def test_tags_of_which_none_counts_are_refused(tmp_path: Path, tokenizer: Any) -> None:
    record = {"tokens": ["the", "film"], "tags": [-100, -100]}
    with pytest.raises(DataError, match="no tag counts in the loss") as caught:
        prepared(tmp_path, tokenizer, Labels(names=("O", "B")), [record])
    assert caught.value.codes == ("DATA_NO_TARGETS",)


def test_the_labels_are_part_of_what_is_cached(tmp_path: Path, tokenizer: Any) -> None:
    records = [{"text": "the", "label": "yes"}]
    other = Labels(names=("yes", "no"), problem_type="single_label_classification", are_named=True)
    found = [int(rows_of(prepared(tmp_path, tokenizer, labels, records))[0]["labels"]) for labels in (ONE, other)]
    assert found == [1, 0]


def test_a_preview_shows_labels_behind_texts(tmp_path: Path, tokenizer: Any) -> None:
    shown = preview(prepared(tmp_path, tokenizer, ONE, [{"text": "new york", "label": 1}]), tokenizer, rows=1)
    assert shown["rows"][0]["text"][-1] == (" → yes", True)
    tagged = prepared(tmp_path, tokenizer, TAGS, [{"tokens": ["new", "york"], "tags": ["B", "O"]}])
    text = preview(tagged, tokenizer, rows=1)["rows"][0]["text"]
    assert [part for part, learned in text if learned] == [" [B] ", " [O] "]
