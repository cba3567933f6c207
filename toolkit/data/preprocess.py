"""A function of the user's that changes records before they are read, or leaves them out (`data.preprocess`)."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np

from toolkit.config.user_code import code_files, imported
from toolkit.data.origins import place_of
from toolkit.dataset_inspection.inspect import SourceFacts
from toolkit.dataset_inspection.user_function import PREPROCESS, applied, refused
from toolkit.errors import DataError, first_line

_VERSION = 1  # increased when the files below change


def preprocessed(
    documents: Any, name: str, source: SourceFacts, *, key: str, cache_dir: Path
) -> tuple[Any, np.ndarray]:
    """Apply a function of the user's to each record of a source, or open what an earlier call left in `cache_dir`.

    The result depends on the records, on the name of the function and on the text of its module, and of modules of its folder that it imports.

    Args:
        documents: A `Dataset`.
        name: The function as `module:function`.
        source: Source of the records.
        key: Key path of the source.
        cache_dir: Folder of the result.
    Returns:
        The records that it returned, and the number of the record that each was made of; int64.
    Raises:
        SpecError: USER_CODE. DataError: DATA_PREPROCESS; DATA_TOO_SMALL, if it leaves no record.
    """
    function = imported(PREPROCESS, name)
    text = b"\0".join(file.read_bytes() for file in code_files(name))
    parts = (str(_VERSION), documents._fingerprint, name, hashlib.sha256(text).hexdigest())
    folder = cache_dir / f"preprocessed-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:24]}"
    if not folder.is_dir():
        cache_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache_dir, prefix="preprocessing-") as scratch:
            _write(documents, function, name, source, Path(scratch) / "made")
            try:
                (Path(scratch) / "made").rename(folder)
            except OSError:  # another rank was first
                if not folder.is_dir():
                    raise
    rows = np.load(folder / "rows.npy")
    if not len(rows):
        message, fix = (
            f"{PREPROCESS}={name} leaves none of the records of {source.name}",
            "Return the records to train on",
        )
        raise DataError.of(code="DATA_TOO_SMALL", key=key, message=message, fix=fix)
    try:
        made = datasets.load_dataset(
            "json", data_files=[str(folder / "records.jsonl")], split="train", cache_dir=str(cache_dir)
        )
    except Exception as error:  # as of a file of the user's: the libraries raise dozens of types
        raise refused(
            name, f"its records of {source.name} are no table: {first_line(error.__cause__ or error)}"
        ) from error
    return made, rows


def _write(documents: Any, function: Callable[..., Any], name: str, source: SourceFacts, folder: Path) -> None:
    folder.mkdir()
    kept: list[int] = []
    with (folder / "records.jsonl").open("w", encoding="utf-8") as file:
        for index, record in enumerate(documents):
            made = applied(function, name, record, partial(place_of, source, index))
            if made is None:
                continue
            file.write(json.dumps(made, ensure_ascii=False) + "\n")
            kept.append(index)
    np.save(folder / "rows.npy", np.asarray(kept, np.int64))
