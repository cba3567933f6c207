"""Store of tokenised documents as flat arrays on disk, memory-mapped by every rank."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import datasets
import numpy as np

from toolkit.data.chats import chat_template
from toolkit.data.formats import MixedTokeniser, Tokeniser

_LAYOUT_VERSION = 3  # increased when the files below or their content change
_READ_ROWS = 1000  # documents taken from Arrow at once


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenStore:
    """All documents, concatenated.

    Args:
        tokens: Token ids, int32, shape (tokens,).
        targets: 1 for tokens in the loss, else 0; uint8, shape (tokens,).
        offsets: Document d is `tokens[offsets[d]:offsets[d + 1]]`; int64, shape (documents + 1,).
        max_token: Largest token id; -1 if there are no tokens.
        num_empty: Number of documents that are left out because they have no token.
        images: The images of each document in order (`images`: path or bytes; `image_sizes`: width and height), and its number among the
            records (`record`); None for text alone.
    """

    tokens: np.ndarray
    targets: np.ndarray
    offsets: np.ndarray
    max_token: int
    num_empty: int
    images: Any = None

    @property
    def num_documents(self) -> int:
        """Number of documents with at least one token."""
        return len(self.offsets) - 1


class BatchTokeniser(Protocol):
    """Turns a batch of records into token ids and further columns."""

    @property
    def tokenizer(self) -> Any: ...

    @property
    def identity(self) -> tuple[str, ...]: ...

    @property
    def columns(self) -> Mapping[str, Any]: ...

    def __call__(self, batch: Mapping[str, list[Any]], indices: list[int]) -> Mapping[str, Any]: ...


# A column of the tokenised documents beside their tokens, with its type in its file.
Columns = Mapping[str, np.dtype[Any]]
_TARGETS: Columns = {"targets": np.dtype(np.uint8)}


def tokenise(
    documents: Any, tokeniser: Tokeniser | MixedTokeniser, *, cache_dir: Path, num_proc: int | None
) -> TokenStore:
    """Tokenise a `Dataset`, or open what an earlier call with the same inputs left in `cache_dir`."""
    folder, meta = stored(documents, tokeniser, _TARGETS, cache_dir=cache_dir, num_proc=num_proc)
    return TokenStore(
        tokens=opened(folder / "tokens.bin", np.dtype(np.int32)),
        targets=opened(folder / "targets.bin", _TARGETS["targets"]),
        offsets=np.load(folder / "offsets.npy"),
        max_token=meta["max_token"],
        num_empty=meta["num_empty"],
        images=datasets.load_from_disk(str(folder / "images")) if (folder / "images").is_dir() else None,
    )


def stored(
    documents: Any,
    tokeniser: BatchTokeniser,
    columns: Columns,
    *,
    cache_dir: Path,
    num_proc: int | None,
) -> tuple[Path, dict[str, Any]]:
    """Tokenise a `Dataset` into files, or find those of an earlier call with the same inputs; return their folder and meta.json.

    The folder is written under a temporary name and renamed when complete, so ranks that race or die leave no partial one. It has
    tokens.bin, offsets.npy and a file of each column, all of them without documents that have no token.
    """
    folder = cache_dir / f"tokens-{_key(documents, tokeniser)}"
    if not (folder / "meta.json").is_file():
        cache_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache_dir, prefix="tokenising-") as scratch:
            _write(documents, tokeniser, columns, Path(scratch), num_proc=num_proc)
            try:
                (Path(scratch) / "store").rename(folder)
            except OSError:  # another rank was first
                if not (folder / "meta.json").is_file():
                    raise
    return folder, json.loads((folder / "meta.json").read_text(encoding="utf-8"))


def opened(path: Path, dtype: np.dtype[Any]) -> np.ndarray:
    """Map a file of numbers into memory."""
    # An empty file cannot be mapped.
    return np.memmap(path, dtype=dtype, mode="r") if path.stat().st_size else np.empty(0, dtype)


def _key(documents: Any, tokeniser: BatchTokeniser) -> str:
    tokenizer = tokeniser.tokenizer
    backend = getattr(tokenizer, "backend_tokenizer", None)
    vocabulary = backend.to_str() if backend is not None else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    parts = [
        str(_LAYOUT_VERSION),
        documents._fingerprint,
        *tokeniser.identity,
        type(tokenizer).__name__,
        _without_state(vocabulary),
        json.dumps({name: str(token) for name, token in tokenizer.special_tokens_map.items()}, sort_keys=True),
        str(chat_template(tokenizer)),
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _without_state(vocabulary: str) -> str:
    """Return a fast tokenizer's JSON without the state that a call with padding or truncation leaves in it."""
    content = json.loads(vocabulary)
    return json.dumps({name: value for name, value in content.items() if name not in ("padding", "truncation")})


def _write(documents: Any, tokeniser: BatchTokeniser, columns: Columns, scratch: Path, *, num_proc: int | None) -> None:
    mapped = documents.map(
        tokeniser,
        batched=True,
        with_indices=True,
        num_proc=num_proc,
        remove_columns=documents.column_names,
        features=datasets.Features(tokeniser.columns),
        cache_file_name=str(scratch / "mapped.arrow"),
        new_fingerprint=scratch.name,  # the hash of the tokenizer changes after its first call
        desc="Tokenising",
    )
    store = scratch / "store"
    store.mkdir()
    lengths: list[np.ndarray] = []
    max_token = -1
    with ExitStack() as files:
        tokens = files.enter_context((store / "tokens.bin").open("wb"))
        others = {name: files.enter_context((store / f"{name}.bin").open("wb")) for name in columns}
        for batch in mapped.with_format("arrow").iter(_READ_ROWS):
            ids = batch["input_ids"].combine_chunks()
            flat = np.asarray(ids.flatten()).astype(np.int32)
            lengths.append(np.asarray(ids.value_lengths()).astype(np.int64))
            max_token = max(max_token, int(flat.max(initial=-1)))
            tokens.write(flat.tobytes())
            for name, file in others.items():
                values = np.asarray(batch[name].combine_chunks().flatten())
                file.write(values.astype(columns[name]).tobytes())
    every = np.concatenate([np.empty(0, np.int64), *lengths])
    filled = every[every > 0]
    if "images" in tokeniser.columns:
        kept = mapped.select_columns(["images", "image_sizes"]).add_column("record", np.arange(len(every)))
        kept.select(np.flatnonzero(every > 0)).save_to_disk(str(store / "images"))
    np.save(store / "offsets.npy", np.concatenate([np.zeros(1, np.int64), np.cumsum(filled)]))
    meta = {"max_token": max_token, "num_empty": int(len(every) - len(filled))}
    (store / "meta.json").write_text(json.dumps(meta), encoding="utf-8")
