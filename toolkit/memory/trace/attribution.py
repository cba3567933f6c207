"""Attribution of each allocation to the module that is executing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

# Causes outside of any named module.
MODEL = "inputs and model"
LOSS = "logits and loss"
BACKWARD = "backward temporaries"

EMBEDDINGS = "embeddings"
RECEIVED = "received from other stages"
SENT = "being sent to other stages"
LAYERS = "layers: "  # prefix of each cause inside a layer

COMPILED = "layers: compiled"
_LAYER = "layers: residual stream and norms"
_ATTENTION = "layers: attention"
_MLP = "layers: MLP"
_MLP_WORDS = ("mlp", "feed_forward", "ffn", "fc", "moe", "expert", "intermediate", "output", "densereludense")
_HEADS = ("lm_head", "embed_out", "score", "classifier", "cls", "qa_outputs")


def of_passes(causes: Mapping[str, int]) -> int:
    """Return the bytes of causes that belong to a forward or backward pass; the rest are the engine's."""
    names = (MODEL, LOSS, BACKWARD, EMBEDDINGS, RECEIVED, SENT)
    return sum(size for cause, size in causes.items() if cause in names or cause.startswith(LAYERS))


class AttributionStack:
    """The causes of the running modules, innermost last."""

    def __init__(self) -> None:
        self.backward = False
        self.in_loss = False  # the backward pass has not reached the head's input yet
        self._running: list[str] = []

    @property
    def now(self) -> str:
        """Cause of tensors that are allocated now."""
        if self._running:
            return self._running[-1]
        if not self.backward:
            return MODEL
        return LOSS if self.in_loss else BACKWARD

    def push(self, cause: str) -> None:
        """Enter a module."""
        self._running.append(cause)

    def pop(self) -> None:
        """Leave a module."""
        self._running.pop()

    def hook(self, module: nn.Module, cause: str) -> list[Any]:
        """Attribute what a module's forward pass allocates to a cause, and return the handles of the hooks."""
        return [
            module.register_forward_pre_hook(lambda *_: self.push(cause), prepend=True),
            module.register_forward_hook(lambda *_: self.pop(), always_call=True),
        ]


def cause_of(name: str, module: nn.Module, *, within: str | None) -> str | None:
    """Return the cause under which a module's tensors are reported; None keeps the enclosing one.

    Args:
        name: Path of the module in the model.
        module: Module to attribute to.
        within: Path inside its layer, "" for the layer itself; None outside the layers.
    """
    if within is None:
        from torch import nn  # here alone: the causes are read without torch

        from toolkit.tensor_parallel.embedding import VocabParallelEmbedding

        if isinstance(module, nn.Embedding | VocabParallelEmbedding):
            return EMBEDDINGS
        return LOSS if name.rpartition(".")[2].lower() in _HEADS else None
    if not within:
        from toolkit.memory.kernels.compiled import is_compiled

        return COMPILED if is_compiled(module) else _LAYER
    first = within.lower()
    if "." in first or "norm" in first or first.startswith("ln_"):
        return None
    if "attn" in first or "attention" in first:
        return _ATTENTION
    return _MLP if any(word in first for word in _MLP_WORDS) else None
