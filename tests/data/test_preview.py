"""The preview of prepared data: its figures, and rows as text whose marks are the labels'."""

from __future__ import annotations

from typing import Any

from toolkit.config.job import Data
from toolkit.data.prepare import prepare
from toolkit.data.preview import preview


def test_rows_are_the_text_and_the_marks_are_the_labels(tmp_path: Any, tokenizer: Any, write: Any) -> None:
    pairs = [("To be", " or nöt to be"), ("x" * 90, " y"), ("Who", "")]
    path = write([{"prompt": prompt, "completion": completion} for prompt, completion in pairs])
    data = Data(train=str(path), packing="none", loss_on="completion")
    prepared = prepare(data, tokenizer=tokenizer, sequence_length=32, seed=0, cache_dir=tmp_path / "cache")
    found = preview(prepared, tokenizer, rows=9)
    assert found["rows"][0]["text"] == [("To be", False), (" or nöt to be<eos>", True)]
    assert len(found["rows"]) == 1
    lengths = [len(tokenizer(a + b)["input_ids"]) + 1 for a, b in pairs[:2]]
    figures = found["train"]
    assert figures["document_tokens"] == {
        "median": min(lengths),
        "p95": max(lengths),
        "max": max(lengths),
        "total": sum(lengths),
    }
    assert (figures["truncated"], figures["dropped_documents"], figures["dropped_sequences"]) == (1, 1, 1)
    assert found["rows"][0]["learned"] == figures["target_tokens"]


def test_padding_is_counted_and_not_decoded(tmp_path: Any, tokenizer: Any, write: Any) -> None:
    path = write([{"text": "To be"}, {"text": "or not"}])
    data = Data(train=str(path), packing="separated")
    prepared = prepare(data, tokenizer=tokenizer, sequence_length=64, seed=0, cache_dir=tmp_path / "cache")
    (row,) = preview(prepared, tokenizer, rows=1)["rows"]
    assert "".join(text for text, _ in row["text"]) == "To be<eos>or not<eos>"
    assert row["tokens"] + row["padding"] == 64
    assert sum(not learned for _, learned in row["text"]) == 2  # the first token of each document has no prediction
