"""Where the images of records are: paths, addresses or bytes, and what is wrong with them before any is read."""

from __future__ import annotations

import base64
import binascii
import io
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypedDict
from urllib.parse import unquote, urlsplit

from toolkit.dataset_inspection.image_messages import column_images, image_key, split_images
from toolkit.errors import DataError, Problem


class ImageSource(TypedDict):
    """Where an image is: in a file, or the bytes of one."""

    path: str | None
    bytes: bytes | None


def image_source(value: Any, *, folder: Path) -> ImageSource:
    """Return where an image is that a record names.

    Args:
        value: Path, `file:` or `data:` address, bytes, a `datasets` image (`{"bytes", "path"}`), or a Pillow image.
        folder: Folder that relative paths start from.

    Raises:
        ValueError: It is none of these, or an address on the network.
    """
    if isinstance(value, Mapping):
        content = value.get("bytes")
        if content is None and value.get("path") is None:
            raise ValueError(
                f"an image has neither bytes nor path: its keys are {', '.join(map(str, value)) or 'none'}"
            )
        return image_source(value["path"] if content is None else content, folder=folder)
    if isinstance(value, bytes):
        return {"path": None, "bytes": value}
    if hasattr(value, "save") and hasattr(value, "convert"):  # a Pillow image, as `datasets` decodes columns
        written = io.BytesIO()
        value.save(written, format="PNG")
        return {"path": None, "bytes": written.getvalue()}
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"an image is {type(value).__name__} {value!r:.60}, neither a path nor bytes")
    if value.startswith("data:"):
        head, _, body = value.partition(",")
        try:
            return {"path": None, "bytes": base64.b64decode(body, validate=True) if head.endswith(";base64") else b""}
        except binascii.Error as error:
            raise ValueError(f"an image is a data: address whose base64 is damaged: {error}") from None
    address = urlsplit(value)
    if address.scheme in ("http", "https", "ftp", "s3", "gs", "hf"):
        raise ValueError(
            f"image {value} is on the network, from which training reads nothing: download it, and name the file"
        )
    named = unquote(address.path) if address.scheme == "file" else value
    return {"path": str(folder / named), "bytes": None}


def image_name(source: ImageSource) -> str:
    """Return what a message calls an image."""
    return "an image in the data" if source["path"] is None else f"image {source['path']}"


def image_error(reason: str, *, where: str, key: str) -> DataError:
    """Return the error DATA_IMAGE of a record."""
    return DataError(_problem(reason, where=where, key=key))


def absent_images(
    records: Iterator[tuple[int, dict[str, Any]]], *, folder: Path, key: str, name: str
) -> Iterator[Problem]:
    """Yield the first image of conversations that no file has, with the number of the others; no file is opened.

    Args:
        records: Valid conversations with their line numbers, whose images match their places or are refused for that.
        folder: Folder that relative paths start from.
        key: Key path that the problem names.
        name: Name of the source.
    """
    first: tuple[str, str] | None = None
    looked = others = 0
    for line, record in records:
        given = column_images(record)
        try:
            images = split_images(record["messages"], given)[1]
        except ValueError:
            continue
        looked += 1
        for image in images:
            try:
                fault = _absence(image_source(image, folder=folder))
            except ValueError as error:
                fault = str(error)
            if fault is None:
                continue
            if first is None:
                first = f"{name}, record at line {line}, {image_key(record, image)}", fault
            else:
                others += 1
    if first is not None:
        where, fault = first
        more = f" (and {others} more images of the first {looked} records)" if others else ""
        yield _problem(f"{fault}{more}", where=where, key=key)


def _absence(source: ImageSource) -> str | None:
    """Return why nothing can be read from where an image is; None if something can."""
    path = source["path"]
    if path is None:
        return None if source["bytes"] else "an image in the data has no bytes"
    try:
        found = Path(path).stat()
    except (FileNotFoundError, NotADirectoryError):
        return f"{image_name(source)} does not exist"
    except (OSError, ValueError) as error:
        return f"{image_name(source)} cannot be read: {getattr(error, 'strerror', None) or error}"
    if stat.S_ISDIR(found.st_mode):
        return f"{image_name(source)} is a folder"
    return None if found.st_size or not stat.S_ISREG(found.st_mode) else f"{image_name(source)} is empty (0 bytes)"


def _problem(reason: str, *, where: str, key: str) -> Problem:
    return Problem(
        code="DATA_IMAGE",
        key=key,
        message=f"{where}: {reason}",
        fix="Correct the image or its path, which starts from the folder of the data file, or remove the record",
    )
