"""A small model, tokenizer and English text from Python's documentation: enough to try all stages offline."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.arguments import checks_arguments
from toolkit.catalog.models import read_catalogue_model
from toolkit.io import write_json

VOCAB_SIZE = 2048
END = "<|end|>"
PAD = "<|pad|>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Result of `write_sample`.

    Args:
        model: Folder with `config.json` and a tokenizer, without weights.
        data: .jsonl with one document per line under `text`.
        num_documents: Number of its lines.
    """

    model: Path
    data: Path
    num_documents: int


@checks_arguments
def write_sample(folder: str | Path) -> Sample:
    """Write the documentation of Python's own topics as a data set, and a Llama of one million parameters for it.

    Source:
        The standard library's `pydoc_data.topics`; dimensions from configs/models/quickstart-llama.yaml.
    """
    documents, folder = sample_documents(), Path(folder)
    data, model = folder / "python-topics.jsonl", folder / "model"
    model.mkdir(parents=True, exist_ok=True)
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents), encoding="utf-8")
    tokenizer = train_tokenizer(documents)
    tokenizer.save_pretrained(model)
    config = read_catalogue_model("quickstart-llama").config
    config |= {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    write_json(model / "config.json", config)
    return Sample(model=model, data=data, num_documents=len(documents))


def sample_documents() -> tuple[str, ...]:
    """Return some 450 KB of English, split into groups of paragraphs of about 2,000 characters at most."""
    from pydoc_data.topics import topics

    documents: list[str] = []
    for _, text in sorted(topics.items()):
        piece = ""
        for paragraph in text.split("\n\n"):
            if piece and len(piece) + len(paragraph) > 2000:
                documents.append(piece)
                piece = ""
            piece = f"{piece}\n\n{paragraph}" if piece else paragraph
        documents.append(piece)
    return tuple(document.strip() for document in documents if document.strip())


def train_tokenizer(documents: tuple[str, ...], *, vocab_size: int = VOCAB_SIZE) -> Any:
    """Train a byte-level BPE tokenizer and return it as a `transformers` tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=PAD)
