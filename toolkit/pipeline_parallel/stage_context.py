"""Placeholders in a split model for modules that other ranks own; they pass hidden states on.

Hugging Face's own forward pass runs on every stage, and computes there what its layers need of the batch: masks, positions,
rotary tables. Hidden states enter it at the position before the stage's layers and leave it at the position after them;
elsewhere a blank is passed on, whose values are never read. Layers have no hooks, so none can interfere with a layer's
recomputation, its compilation or its gathering.

B: sequences of a micro-batch, S: tokens of a sequence, D: width.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from toolkit.tensor_parallel.sequence import Pieces


@dataclass(slots=True, kw_only=True)
class _Call:
    """State of one forward pass: which layers run, the tensor that enters and the one that left."""

    span: range
    enters_at: int | None
    leaves_at: int | None
    blank: torch.Tensor
    received: torch.Tensor | None
    training: bool
    entered: bool = False
    taken: torch.Tensor | None = None


class StageContext:
    """Routing state of the current call of a stage, which all its placeholder modules share.

    Args:
        num_layers: Number of decoder layers of the whole model.
        returns: Number of values in the tuple that its layers return, with the hidden states first; 0 if they return
            hidden states alone.
        features: Shape of the hidden states of one token.
        pieces: How tensor ranks shard the sequence between the layers; None if each has the whole sequence.
    """

    def __init__(
        self, *, num_layers: int, returns: int, features: tuple[int, ...] = (), pieces: Pieces | None = None
    ) -> None:
        self.num_layers, self.returns, self.features, self.pieces = num_layers, returns, features, pieces
        self._call: _Call | None = None

    @contextlib.contextmanager
    def through(
        self, span: range, *, blank_BSD: torch.Tensor, received: torch.Tensor | None, training: bool
    ) -> Iterator[_Call]:
        """Run the layers of `span` in forward passes inside the block, on the received hidden states."""
        if self._call is not None:
            raise RuntimeError("a stage is called inside its own forward pass")
        self._call = _Call(
            span=span,
            enters_at=None if received is None else span.start - 1,
            leaves_at=span.stop if span.stop < self.num_layers else None,
            blank=blank_BSD,
            received=received,
            training=training,
        )
        try:
            yield self._call
        finally:
            self._call = None

    def runs(self, position: int) -> bool:
        """Return whether the current call runs a layer of this rank."""
        return self._call is None or position in self._call.span

    @property
    def blank(self) -> torch.Tensor:
        """Blank that stands for hidden states outside the stage, of their shape (B, S, D)."""
        return self._under_way.blank

    def route(self, position: int, hidden: torch.Tensor) -> torch.Tensor:
        """Return the output, in this call, of a layer that is not run."""
        call = self._under_way
        region = None if self.pieces is None else self.pieces.random_region
        if position == call.enters_at:
            assert call.received is not None, "what enters has been received"
            call.entered = True
            if region is not None:
                region.forget()
                if call.training:
                    region.enter(call.received.device)
            return call.received
        if position == call.leaves_at:
            call.taken = hidden
            if region is not None:
                region.leave()
            return call.blank if call.blank.shape == hidden.shape else torch.zeros_like(hidden)
        return hidden

    def returned(self, hidden: torch.Tensor) -> Any:
        """Return what a layer returns with some hidden states; what else it returns is for nobody in training."""
        return (hidden, *[None] * (self.returns - 1)) if self.returns else hidden

    @property
    def _under_way(self) -> _Call:
        if self._call is None:
            raise RuntimeError("a model that is split for a pipeline runs one chunk at a time: call forward_stage")
        return self._call


class RemoteLayer(nn.Module):
    """Placeholder for a decoder layer that is not run in a call: returns its input, or the received hidden states.

    Args:
        layer: Layer to replace; its plain attributes are kept, since models read the layer type from them.
        position: Index of the layer.
        passage: Stage context.
    """

    def __init__(self, layer: nn.Module, position: int, passage: StageContext) -> None:
        super().__init__()
        for name in (*vars(type(layer)), *vars(layer)):
            value = None if name.startswith("_") or name == "training" else getattr(layer, name, None)
            if isinstance(value, str | int | float):
                setattr(self, name, value)
        self._position, self._passage = position, passage

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._passage.returned(self._passage.route(self._position, hidden_of(args, kwargs)))

    def extra_repr(self) -> str:
        return "on another stage"


class PlaceholderModule(nn.Module):
    """Placeholder for a module before or after the layers: returns hidden states unchanged, and a blank for other input.

    Args:
        passage: Stage context.
        module: Module to replace, of whose weight models read the device or a row.
    """

    def __init__(self, passage: StageContext, module: nn.Module | None = None) -> None:
        super().__init__()
        self._passage = passage
        weight = None if module is None else module._parameters.get("weight")
        self._shape = None if weight is None else weight.shape

    @property
    def weight(self) -> torch.Tensor:
        """A blank of the shape of the module's weight."""
        if self._shape is None:
            raise AttributeError("the module has no weight")
        blank = self._passage.blank
        return torch.zeros((), dtype=blank.dtype, device=blank.device).expand(self._shape)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
        first = next(tensors, None)
        is_hidden = first is not None and first.is_floating_point() and first.dim() >= 3
        return first if first is not None and is_hidden else self._passage.blank


class PartialModuleList(nn.ModuleList):
    """A list of decoder layers that contains some of them, under their own indices, and keeps its length.

    Args:
        layers: Decoder layers of the whole model.
        own: Indices of the layers to keep.
    """

    def __init__(self, layers: nn.ModuleList, own: frozenset[int], passage: StageContext) -> None:
        super().__init__()
        for position, layer in enumerate(layers):
            if position in own:
                self.add_module(str(position), layer)
        self._passage = passage
        self._elsewhere = [RemoteLayer(layer, position, passage) for position, layer in enumerate(layers)]

    def __len__(self) -> int:
        return len(self._elsewhere)

    def __iter__(self) -> Iterator[nn.Module]:
        return map(self._at, range(len(self)))

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self._at(position) for position in range(len(self))[index]]
        return self._at(range(len(self))[index])

    def _at(self, position: int) -> nn.Module:
        own = self._modules.get(str(position))
        return own if own is not None and self._passage.runs(position) else self._elsewhere[position]


def hidden_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
    """Return the hidden states that a decoder layer is called with, its first argument everywhere in transformers."""
    hidden: torch.Tensor = args[0] if args else kwargs["hidden_states"]
    return hidden


@contextlib.contextmanager
def replaced(model: nn.Module, modules: Mapping[str, nn.Module]) -> Iterator[None]:
    """Replace some modules for a block."""
    places = {name: _place(model, name) for name in modules}
    before = {name: parent._modules[own] for name, (parent, own) in places.items()}

    def put(chosen: Mapping[str, nn.Module | None]) -> None:
        for name, (parent, own) in places.items():
            parent._modules[own] = chosen[name]

    put(modules)
    try:
        yield
    finally:
        put(before)


def _place(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    parent, _, own = name.rpartition(".")
    return model.get_submodule(parent), own
