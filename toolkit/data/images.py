"""Images of training data: where one is, and its pixels."""

from __future__ import annotations

import base64
import binascii
import io
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict
from urllib.parse import unquote, urlsplit

from toolkit.errors import DataError, first_line

# Pixels above which Pillow takes a file for a decompression bomb (PIL/Image.py MAX_IMAGE_PIXELS, twice).
MAX_PIXELS = 178_956_970


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


def read_image(source: ImageSource) -> Any:
    """Return an image as Pillow has it, in RGB, turned as its EXIF data says.

    Raises:
        ValueError: The file is missing, is not an image, is damaged, or has no pixel or too many.

    Source:
        transformers image_utils.py load_image, which turns and converts in the same way.
    """
    from PIL import Image, ImageOps

    named = image_name(source)
    given = io.BytesIO(source["bytes"] or b"") if source["path"] is None else Path(source["path"])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # the limit below is the one that counts
            with Image.open(given) as opened:
                width, height = opened.size
                if not 0 < width * height <= MAX_PIXELS:
                    raise ValueError(f"{named} has {width} × {height} pixels, outside 1 to {MAX_PIXELS:,}")
                return ImageOps.exif_transpose(opened).convert("RGB")
    except FileNotFoundError:
        raise ValueError(f"{named} does not exist") from None
    except Image.DecompressionBombError:
        raise ValueError(f"{named} has more than {MAX_PIXELS:,} pixels") from None
    except ValueError as error:
        raise (
            error if str(error).startswith(named) else ValueError(f"{named} cannot be read: {first_line(error)}")
        ) from None
    except Exception as error:  # of Pillow's many decoders, each with its own kinds
        reason = "it is no image, or damaged" if isinstance(error, Image.UnidentifiedImageError) else first_line(error)
        raise ValueError(f"{named} cannot be read: {reason}") from None


def image_name(source: ImageSource) -> str:
    """Return what a message calls an image."""
    return "an image in the data" if source["path"] is None else f"image {source['path']}"


def image_error(reason: str, *, where: str, key: str) -> DataError:
    """Return the error DATA_IMAGE of a record."""
    return DataError.of(
        code="DATA_IMAGE",
        key=key,
        message=f"{where}: {reason}",
        fix="Correct the image or its path, which starts from the folder of the data file, or remove the record",
    )
