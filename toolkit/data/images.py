"""Images of training data: the pixels of what `toolkit.dataset_inspection.image_sources` finds."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Any

from toolkit.dataset_inspection.image_sources import ImageSource, image_name
from toolkit.errors import first_line

# Pixels above which Pillow takes a file for a decompression bomb (PIL/Image.py MAX_IMAGE_PIXELS, twice).
MAX_PIXELS = 178_956_970


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
