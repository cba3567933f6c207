"""A byte-level BPE tokenizer trained on the standard library's own help texts, and documents out of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

Writer = Callable[..., Path]


@pytest.fixture(scope="session")
def base_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=["<eos>", "<pad>", "<bos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text for _, text in sorted(topics.items())][:20], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")


@pytest.fixture
def tokenizer(base_tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """One of its own for each test, which may set a chat template."""
    backend = Tokenizer.from_str(base_tokenizer.backend_tokenizer.to_str())
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>")


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """Sixty texts of 20 to 600 characters."""
    whole = "\n".join(text for _, text in sorted(topics.items()))
    sizes = [20 + 97 * number % 580 for number in range(60)]
    return [whole[sum(sizes[:number]) :][: sizes[number]] for number in range(60)]


@pytest.fixture
def write(tmp_path: Path) -> Writer:
    """Writes records to a .jsonl file in tmp_path."""

    def write_jsonl(records: Sequence[dict[str, Any]], name: str = "train.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        return path

    return write_jsonl
