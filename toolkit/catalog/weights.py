"""The weights in a model folder, found from file names and safetensors headers alone."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from toolkit.config.job import Task
from toolkit.io import parse_json, read_json_object

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
BIN_FILES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
# The format's own ceiling on a header: safetensors, src/tensor.rs, MAX_HEADER_SIZE.
_MAX_HEADER_BYTES = 100_000_000
# Names of what only the base of a model has: the embedding of its tokens, and its layers by number.
_TOKENS, _LAYER = re.compile(r"(word|tok|tokens?)_embed|embed_tokens"), re.compile(r"\.\d+\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """The weight files of one folder.

    Args:
        format: `safetensors`; `bin` if only a pickled `pytorch_model.bin` exists; None without either.
        files: Complete safetensors files.
        missing: Files that the index names and the folder lacks.
        damaged: Files that are truncated, or are something else (a Git LFS pointer, an error page).
    """

    format: Literal["safetensors", "bin"] | None
    files: tuple[Path, ...] = ()
    missing: tuple[str, ...] = ()
    damaged: tuple[str, ...] = ()

    @property
    def loadable(self) -> bool:
        """True if every safetensors file is present and complete."""
        return self.format == "safetensors" and not self.missing and not self.damaged


def find_weights(folder: Path) -> Weights:
    """Look for weights in the order in which transformers does, and check that each file is complete.

    Args:
        folder: Model folder.
    Source:
        transformers 5, modeling_utils.py: _get_resolved_checkpoint_files.
    """
    names = _names(folder)
    if names == []:
        return Weights(format="bin" if any((folder / name).is_file() for name in BIN_FILES) else None)
    if names is None:
        return Weights(format="safetensors", damaged=(INDEX,))
    present = [name for name in names if (folder / name).is_file()]
    whole = [name for name in present if read_header(folder / name) is not None]
    return Weights(
        format="safetensors",
        files=tuple(folder / name for name in whole),
        missing=tuple(name for name in names if name not in present),
        damaged=tuple(name for name in present if name not in whole),
    )


def unread_weights(folder: Path) -> tuple[str, ...]:
    """Return the files that are named as shards of the model and are not read, since the index or `model.safetensors` stands for all."""
    names = _names(folder)
    return (
        tuple(sorted(path.name for path in folder.glob("model*.safetensors") if path.name not in names))
        if names
        else ()
    )


def _names(folder: Path) -> list[str] | None:
    """Return the names of the safetensors files that are read, none if there are none; None if their index is damaged."""
    if (folder / SINGLE).is_file():
        return [SINGLE]
    return _shards(folder / INDEX) if (folder / INDEX).is_file() else []


def _shards(index: Path) -> list[str] | None:
    try:
        names = set(read_json_object(index)["weight_map"].values())
        # Only names of files next to the index: with a path in them, files anywhere would be read.
        return sorted(names) if names and all(Path(name).name == name and "\0" not in name for name in names) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def read_header(path: Path) -> dict[str, Any] | None:
    """Return the header of a safetensors file, tensor name to dtype, shape and offsets; None if the file is incomplete.

    Args:
        path: Safetensors file; only its header is read.
    Source:
        https://huggingface.co/docs/safetensors: 8 bytes of little-endian length, a JSON header, the data.
    """
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > _MAX_HEADER_BYTES:
                return None
            header = parse_json(file.read(length))
        header.pop("__metadata__", None)
        end = max(map(_end, header.values()), default=0)
        return header if path.stat().st_size == 8 + length + end else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, struct.error):
        return None


def _end(tensor: dict[str, Any]) -> int:
    """Return the end offset of a tensor's bytes; raise ValueError if the entry lacks a field that readers use."""
    begin, end = tensor["data_offsets"]
    sizes = [begin, end, *tensor["shape"]]
    if not isinstance(tensor["dtype"], str) or any(type(size) is not int or size < 0 for size in sizes):
        raise ValueError("an entry of the header is malformed")
    return int(end)


def count_stored_parameters(weights: Weights, config: Mapping[str, Any], *, tied: bool) -> int | None:
    """Count parameters from safetensors headers, for architectures without a declared family.

    Args:
        weights: Weights of the model's folder.
        config: Content of config.json.
        tied: Whether the head is the embedding; a stored copy of it then counts once.
    Returns:
        Number of elements of all floating-point tensors; None if files are missing, or quantised with packed elements.
    """
    tensors = _stored(weights, config)
    if tensors is None:
        return None
    head = tensors.get("lm_head.weight")
    if tied and head is not None and sum(shape == head for shape in tensors.values()) > 1:
        del tensors["lm_head.weight"]
    return sum(math.prod(shape) for shape in tensors.values())


def count_with_new_head(
    weights: Weights, config: Mapping[str, Any], *, task: Task, hidden_size: int, num_labels: int
) -> int | None:
    """Count what a classifier has that takes the base of a model of another task, as `count_stored_parameters` counts a model of its own.

    The base is counted exactly, the head as encoders have it: a linear layer to the classes, and of sequences one of the hidden size before it.

    Source:
        transformers modeling_bert.py BertForSequenceClassification, BertForTokenClassification, whose pooler is such a layer;
        modeling_roberta.py RobertaClassificationHead.
    """
    tensors = _stored(weights, config)
    if tensors is None:
        return None
    wrappers = {name.partition(".")[0] for name in tensors if _TOKENS.search(name)}
    wrappers &= {name.partition(".")[0] for name in tensors if _LAYER.search(name)}
    base = sum(
        math.prod(shape)
        for name, shape in tensors.items()
        # A base that is saved alone has no wrapper, and no head.
        if "pooler" not in name.split(".")[:2] and (not wrappers or name.partition(".")[0] in wrappers)
    )
    decodes = any("CausalLM" in str(name) for name in config.get("architectures") or ())
    before = hidden_size + 1 if task == "sequence-classification" and not decodes else 0
    return base + before * hidden_size + num_labels * (hidden_size + 1)


def _stored(weights: Weights, config: Mapping[str, Any]) -> dict[str, tuple[int, ...]] | None:
    """Return the shapes of all floating-point tensors; None if files are missing, or quantised with packed elements."""
    return None if not weights.loadable or config.get("quantization_config") else dict(_floating(weights))


def _floating(weights: Weights) -> Iterator[tuple[str, tuple[int, ...]]]:
    for path in weights.files:
        for name, tensor in (read_header(path) or {}).items():
            # Old checkpoints store the rotary frequencies, a buffer.
            if str(tensor["dtype"]).startswith(("F", "BF")) and not name.endswith("inv_freq"):
                yield name, tuple(tensor["shape"])
