"""Feed-forward layers that run a tile of the tokens at a time, and compute a tile again in the backward pass.

What a feed-forward layer makes of a token depends on that token alone, so that its inner activations, several times as wide as the
model, need to be there for one tile only. Tiling is proven on a small twin of a model before it is used.

B: sequences, S: tokens of a sequence, t: tokens of a tile, D: width.

Source:
    arXiv 2506.13996, section 3.1.1.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from toolkit.artifacts.records import Records
from toolkit.errors import PlanError, first_line
from toolkit.introspect import decoder_layers
from toolkit.twins.comparison import (
    TOLERANCE,
    NoTwinError,
    build_twin,
    copy_of,
    difference,
    gradient_difference,
    make_batch,
    plain_torch,
    run,
)
from toolkit.twins.kept import kept_proof

# Names of the feed-forward layer in decoder layers of transformers.
_NAMES = ("mlp", "feed_forward")
_PROOF_TILES = 5  # do not divide the tokens of a twin's rows


def apply_tiled_mlp(model: nn.Module, num_tiles: int) -> None:
    """Make the feed-forward layers of a model run tiles of its rows; modified in place.

    Args:
        model: Hugging Face model, with or without adapters.
        num_tiles: Number of tiles, of any row: under ZeRO-3 each call of a layer gathers weights, so that all ranks must call it equally often.

    Raises:
        PlanError: TILED_MLP_ARCHITECTURE if it has no such layers, or a small twin of it shows that tiles are not the whole.
    """
    inner: Any = model.get_base_model() if hasattr(model, "peft_config") else model  # type: ignore[operator]
    found = _feed_forward_layers(model)
    if not found:
        raise _refused(inner, f"its decoder layers have no module named {' or '.join(_NAMES)}")
    problem = _tiles_proof(type(inner), inner.config)
    if problem:
        raise _refused(inner, problem)
    for layer in found:
        _tile(layer, num_tiles)


def _feed_forward_layers(model: nn.Module) -> list[nn.Module]:
    return [
        module
        for layer in decoder_layers(model)
        for name in _NAMES
        if isinstance(module := getattr(layer, name, None), nn.Module)
    ]


def _tile(layer: nn.Module, num_tiles: int) -> None:
    whole = layer.forward

    def forward(self: nn.Module, hidden_BSD: torch.Tensor) -> torch.Tensor:
        tiles_BtD = hidden_BSD.tensor_split(num_tiles, dim=1)  # of a short row some have no tokens
        if not torch.is_grad_enabled():
            return torch.cat([whole(tile) for tile in tiles_BtD], dim=1)
        return torch.cat([checkpoint(whole, tile, use_reentrant=False) for tile in tiles_BtD], dim=1)

    layer.forward = MethodType(forward, layer)


def _tiles_proof(model_class: type[PreTrainedModel], config: Any) -> str:
    """Return why tiles of a model are not the whole; "" if they are."""
    return kept_proof("tiles", model_class, config, records=Records(str), make=lambda: prove_tiles(model_class, config))


def prove_tiles(model_class: type[PreTrainedModel], config: Any) -> str:
    """Run a twin of a model whole and by tiles; return how they differ, or "" if they do not.

    Args:
        model_class: Class of the model.
        config: Its configuration.
    """
    with plain_torch():
        try:
            twin, batch = build_twin(model_class, config), make_batch()
            wanted = run(copy_of(twin), batch)
            tiled = copy_of(twin)
            for layer in _feed_forward_layers(tiled):
                _tile(layer, _PROOF_TILES)
            found = run(tiled, batch)
        except NoTwinError as error:
            return f"on a small twin, {error}"
        except Exception as error:  # code of any model
            return f"a small twin does not run: {type(error).__name__}: {first_line(error)}"
    if found.logits is None or wanted.logits is None or difference(found.logits, wanted.logits) > TOLERANCE:
        return "the scores of a small twin differ"
    for name, gradient in wanted.gradients.items():
        if not gradient_difference(found.gradients.get(name), gradient) <= TOLERANCE:
            return f"the gradient of {name} of a small twin differs"
    return ""


def _refused(model: Any, why: str) -> PlanError:
    return PlanError.of(
        code="TILED_MLP_ARCHITECTURE",
        key="train.mlp_tiles",
        message=f"feed-forward layers of {type(model).__name__} cannot run by tiles of tokens: {why}",
        fix="Remove train.mlp_tiles",
    )
