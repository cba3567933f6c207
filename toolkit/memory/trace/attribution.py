"""Attributes each allocation to the module that is executing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from toolkit.tensor_parallel.embedding import VocabParallelEmbedding

# Causes outside of any named module.
MODEL = "inputs and model"
LOSS = "logits and loss"
BACKWARD = "backward temporaries"

EMBEDDINGS = "embeddings"
RECEIVED = "received from other stages"
SENT = "being sent to other stages"
LAYERS = "layers: "  # what each cause inside a layer begins with

_LAYER = "layers: residual stream and norms"
_ATTENTION = "layers: attention"
_MLP = "layers: MLP"
_MLP_WORDS = ("mlp", "feed_forward", "ffn", "fc", "moe", "expert", "intermediate", "output", "densereludense")
_HEADS = ("lm_head", "embed_out", "score", "classifier", "cls", "qa_outputs")


def of_passes(causes: Mapping[str, int]) -> int:
    """Return how much of some causes a forward or backward pass holds, bytes; the rest is the engine's."""
    names = (MODEL, LOSS, BACKWARD, EMBEDDINGS, RECEIVED, SENT)
    return sum(size for cause, size in causes.items() if cause in names or cause.startswith(LAYERS))


class AttributionStack:
    """The causes of the modules that run, innermost last."""

    def __init__(self) -> None:
        self.backward = False
        self.in_loss = False  # the backward pass has not come to the head's input yet
        self._running: list[str] = []

    @property
    def now(self) -> str:
        """What a tensor that is born now belongs to."""
        if self._running:
            return self._running[-1]
        if not self.backward:
            return MODEL
        return LOSS if self.in_loss else BACKWARD

    def push(self, cause: str) -> None:
        """Enters a module."""
        self._running.append(cause)

    def pop(self) -> None:
        """Leaves it."""
        self._running.pop()

    def hook(self, module: nn.Module, cause: str) -> list[Any]:
        """Reports what a module's forward pass allocates under a cause; gives the hooks' handles."""
        return [
            module.register_forward_pre_hook(lambda *_: self.push(cause), prepend=True),
            module.register_forward_hook(lambda *_: self.pop(), always_call=True),
        ]


def cause_of(name: str, module: nn.Module, *, within: str | None) -> str | None:
    """Names the cause under which a module's tensors are reported; None leaves the enclosing one.

    Args:
        name: Path in the model.
        module: The module.
        within: Path inside its layer, "" for the layer itself; None outside the layers.
    """
    if within is None:
        if isinstance(module, nn.Embedding | VocabParallelEmbedding):
            return EMBEDDINGS
        return LOSS if name.rpartition(".")[2].lower() in _HEADS else None
    if not within:
        return _LAYER
    first = within.lower()
    if "." in first or "norm" in first or first.startswith("ln_"):
        return None
    if "attn" in first or "attention" in first:
        return _ATTENTION
    return _MLP if any(word in first for word in _MLP_WORDS) else None
