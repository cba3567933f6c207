"""What an image becomes in each family of models that read images: its tokens, and the tensors that the model gets, by arithmetic.

The arithmetic is that of the families' processors in transformers (models/*/image_processing_pil_*.py); their settings are read from
`preprocessor_config.json` where a model's folder has it, else they are those of the published models.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from toolkit.io import read_json_object

# Width and height in pixels.
Size = tuple[int, int]
# Keyword arguments of models.
_PIXELS, _MASK = "pixel_values", "pixel_attention_mask"


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageTensor:
    """A tensor of a micro-batch's images.

    Args:
        name: Keyword argument of the model.
        shape: Its shape for one image.
        dim: Dim along which those of several images are joined.
        kind: Type of its numbers.
        values: The numbers, where the model computes with them on the host; else None.
    """

    name: str
    shape: tuple[int, ...]
    dim: int = 0
    kind: Literal["fp32", "int64"] = "fp32"
    values: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageInputs:
    """What one image of a size becomes.

    Args:
        num_tokens: Tokens whose embeddings are those of the image.
        tensors: Inputs of the model for it.
        mark: Keyword argument with 1 for tokens of images, else 0; None for models that need none.
    """

    num_tokens: int
    tensors: tuple[ImageTensor, ...]
    mark: str | None = None


def image_inputs(
    config: Mapping[str, Any], size: Size, *, settings: Mapping[str, Any] | None = None
) -> ImageInputs | None:
    """Return what an image of a size becomes; None for a family that is not known here.

    >>> config = {"model_type": "qwen2_5_vl", "vision_config": {}}
    >>> image_inputs(config, (1024, 768)).num_tokens
    999

    Args:
        config: Content of config.json.
        size: Width and height of the image in pixels.
        settings: Content of preprocessor_config.json, or of `image_processor` of processor_config.json.
    """
    found = _FAMILIES.get(str(config.get("model_type")))
    return None if found is None else found(config, config.get("vision_config") or {}, size, settings or {})


def processor_settings(folder: Path | None) -> dict[str, Any]:
    """Return the settings of a folder's image processor; empty without any."""
    for name in ("preprocessor_config.json", "processor_config.json"):
        if folder is not None and (folder / name).is_file():
            try:
                found = read_json_object(folder / name)
            except (OSError, ValueError):
                return {}
            inner = found.get("image_processor", {} if name == "processor_config.json" else found)
            if isinstance(inner, dict) and inner:
                return inner
    return {}


def known_families() -> tuple[str, ...]:
    """Return the model types whose images are known."""
    return tuple(sorted(_FAMILIES))


def _qwen(patch: int, least: int, most: int) -> Callable[..., ImageInputs]:
    def inputs(
        config: Mapping[str, Any], tower: Mapping[str, Any], size: Size, settings: Mapping[str, Any]
    ) -> ImageInputs:
        own, edges = tower.get("patch_size", patch), settings.get("size") or {}
        merge, frames = tower.get("spatial_merge_size", 2), tower.get("temporal_patch_size", 2)
        width, height = _between(
            size,
            own * merge,
            least=settings.get("min_pixels") or edges.get("shortest_edge") or least,
            most=settings.get("max_pixels") or edges.get("longest_edge") or most,
        )
        grid = (1, height // own, width // own)
        patches = math.prod(grid)
        channels = tower.get("in_channels", tower.get("in_chans", 3))
        return ImageInputs(
            num_tokens=patches // merge**2,
            tensors=(
                ImageTensor(name=_PIXELS, shape=(patches, channels * frames * own * own)),
                ImageTensor(name="image_grid_thw", shape=(1, 3), kind="int64", values=grid),
            ),
            mark="mm_token_type_ids",
        )

    return inputs


def _between(size: Size, factor: int, *, least: int, most: int) -> Size:
    """Return a size in multiples of a factor whose pixels lie between two bounds (qwen2_vl smart_resize)."""
    width, height = size
    rounded = (round(width / factor) * factor, round(height / factor) * factor)
    if math.prod(rounded) > most:
        shrink = math.sqrt(width * height / most)
        return tuple(max(factor, math.floor(side / shrink / factor) * factor) for side in size)  # type: ignore[return-value]
    if math.prod(rounded) < least:
        grow = math.sqrt(least / (width * height))
        return tuple(math.ceil(side * grow / factor) * factor for side in size)  # type: ignore[return-value]
    return rounded


def _gemma3(
    config: Mapping[str, Any], tower: Mapping[str, Any], size: Size, settings: Mapping[str, Any]
) -> ImageInputs:
    side = tower.get("image_size", 224)
    return ImageInputs(
        num_tokens=config.get("mm_tokens_per_image", 256),
        tensors=(ImageTensor(name=_PIXELS, shape=(1, 3, side, side)),),
        mark="token_type_ids",
    )


def _llava(config: Mapping[str, Any], tower: Mapping[str, Any], size: Size, settings: Mapping[str, Any]) -> ImageInputs:
    side = tower.get("image_size", 336)
    whole = config.get("vision_feature_select_strategy", "default") == "full"
    return ImageInputs(
        num_tokens=(side // tower.get("patch_size", 14)) ** 2 + whole,
        tensors=(ImageTensor(name=_PIXELS, shape=(1, 3, side, side)),),
    )


def _idefics3(
    config: Mapping[str, Any], tower: Mapping[str, Any], size: Size, settings: Mapping[str, Any]
) -> ImageInputs:
    side = tower.get("image_size", 224)
    tile = (settings.get("max_image_size") or {}).get("longest_edge", side)
    longest = (settings.get("size") or {}).get("longest_edge", 4 * tile)
    columns, rows = _tiles(size, tile=tile, longest=longest)
    split = settings.get("do_image_splitting", True) and max(columns, rows) > 1
    parts = columns * rows + 1 if split else 1
    each = (side // tower.get("patch_size", 32)) ** 2 // config.get("scale_factor", 2) ** 2
    return ImageInputs(
        num_tokens=parts * each,
        tensors=(
            ImageTensor(name=_PIXELS, shape=(1, parts, 3, tile, tile), dim=1),
            ImageTensor(name=_MASK, shape=(1, parts, tile, tile), dim=1, kind="int64"),
        ),
    )


def _tiles(size: Size, *, tile: int, longest: int) -> Size:
    """Return how many tiles an image is cut into along width and height (idefics3 resize, resize_for_vision_encoder)."""
    width, height = size
    if width >= height:
        wide, high = longest, int(longest / (width / height))
        high += high % 2
    else:
        wide, high = int(longest * (width / height)), longest
        wide += wide % 2
    wide, high = max(wide, 1), max(high, 1)
    ratio = wide / high
    if wide >= high:
        wide = math.ceil(wide / tile) * tile
        high = math.ceil(int(wide / ratio) / tile) * tile
    else:
        high = math.ceil(high / tile) * tile
        wide = math.ceil(int(high * ratio) / tile) * tile
    return wide // tile, high // tile


# Bounds of pixels: preprocessor_config.json of Qwen/Qwen2.5-VL-3B-Instruct and of Qwen/Qwen3-VL-4B-Instruct.
_FAMILIES: Mapping[str, Callable[..., ImageInputs]] = {
    "qwen2_vl": _qwen(14, 56 * 56, 12_845_056),
    "qwen2_5_vl": _qwen(14, 56 * 56, 12_845_056),
    "qwen3_vl": _qwen(16, 65_536, 16_777_216),
    "gemma3": _gemma3,
    "llava": _llava,
    "idefics3": _idefics3,
    "smolvlm": _idefics3,
}
