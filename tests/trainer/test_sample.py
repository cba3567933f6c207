"""The sample that needs no network."""

from __future__ import annotations

import json
from pathlib import Path

from transformers import AutoConfig, AutoTokenizer

from toolkit.catalog.models import resolve_model
from toolkit.config.job import Model
from toolkit.trainer.sample import VOCAB_SIZE, sample_documents, write_sample


def test_documents_are_pieces_of_english() -> None:
    documents = sample_documents()
    assert len(documents) > 200
    assert documents == sample_documents()
    assert all(document.strip() == document != "" for document in documents)
    assert 200_000 < sum(map(len, documents)) < 2_000_000


def test_what_is_written_fits_together(tmp_path: Path) -> None:
    sample = write_sample(tmp_path)
    lines = sample.data.read_text(encoding="utf-8").splitlines()
    assert len(lines) == sample.num_documents
    texts = [json.loads(line)["text"] for line in lines]
    tokenizer, config = AutoTokenizer.from_pretrained(sample.model), AutoConfig.from_pretrained(sample.model)
    assert len(tokenizer) == config.vocab_size == VOCAB_SIZE
    assert config.eos_token_id == tokenizer.eos_token_id
    assert config.pad_token_id == tokenizer.pad_token_id
    for text in texts[:5]:
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text, "byte-level: nothing is lost"
    found = resolve_model(Model(name=str(sample.model)))
    assert found.origin == "folder"
    assert not found.has_weights
    assert found.num_parameters == 1_000_576
