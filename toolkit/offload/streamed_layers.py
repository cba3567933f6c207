"""Decoder layers whose weights are in host memory, of which the card holds three at a time.

A slot of the card's memory holds the weights of one layer; there are three, as large as the largest layer, for as long as the run lasts. A
layer is copied into the slot that has waited longest while the layer before it computes, in the order of the forward pass and then in that
of the backward pass, where layers that recompute read their weights again. The copies are queued on a stream of their own: it waits for the
kernels that read what the slot held before, and the kernels of the layer for its copy; the host waits for neither.

While a pass goes on, a weight whose layer is in no slot is a single NaN, expanded to its shape: whatever reads it shows. Its device and
shape stay those of the card, since torch forgets a weight's gradient accumulator when its device changes, by which DeepSpeed counts the
gradients of a backward pass (torch csrc/autograd/variable.cpp VariableHooks::set_data). Between passes weights are those of the host.

What autograd keeps of a weight, such as its transpose, would keep the slot's memory, and later read another layer's weights there. So a
layer that does not recompute keeps the place in its slot instead, and finds it again in whichever slot the backward pass has it.
"""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from toolkit.introspect import decoder_layers
from toolkit.offload.copy_stream import CopyStream
from toolkit.offload.host_memory import page_locked, unlock
from toolkit.planning.offload import STREAMED_LAYERS

# Bytes at which each run of weights begins in a slot, as tensors do in CUDA's caching allocator (c10/cuda/CUDACachingAllocator.cpp).
ALIGNMENT = 512


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Layer:
    """The streamed weights of a layer.

    Args:
        module: The layer.
        weights: Its weights in host memory.
        host: Their values there.
        absent: What they are while the layer is in no slot.
        places: First byte of each in a slot.
        copies: Runs of neighbours in host memory, as bytes, and where each goes in a slot.
        size: Bytes in a slot.
    """

    module: nn.Module
    weights: tuple[nn.Parameter, ...]
    host: tuple[Tensor, ...]
    absent: tuple[Tensor, ...]
    places: tuple[int, ...]
    copies: tuple[tuple[Tensor, int], ...]
    size: int


@dataclass(slots=True, kw_only=True, eq=False)
class _Slot:
    """A part of the card's memory for the weights of one layer.

    Args:
        memory: Its bytes.
        layer: Number of the layer that it holds.
        turn: When that was needed last.
        arrived: Event of its copy.
        read: Event of the last kernels that read it.
    """

    memory: Tensor
    layer: int | None = None
    turn: int = 0
    arrived: Any
    read: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    """What autograd keeps in place of a tensor in a slot: its layer and where it is there, in elements."""

    layer: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class _Pass:
    """A forward pass with gradients, alive while its graph is."""


class StreamedLayers:
    """Brings the weights of decoder layers to the card as the passes need them.

    Frozen weights are moved to page-locked memory; trained ones are in flat tensors of an optimizer, whose owner locks them.

    Args:
        model: The model.
        weights: Weights to stream, of `streamable`, in host memory.
        device: Device that computes.
        copies: Stream of the copies; made here by default.

    Attributes:
        ready: Called with the number of a layer, from 1 on, before its weights are copied.
        trains: Whether some of the weights are trained, and so change with each step.
    """

    def __init__(
        self,
        model: nn.Module,
        weights: Iterable[nn.Parameter],
        *,
        device: torch.device,
        copies: CopyStream | None = None,
    ) -> None:
        self._device, self._copies = device, copies or CopyStream(device)
        self.ready: Callable[[int], None] = lambda number: None
        self._weights = set(weights)
        self.trains = any(weight.requires_grad for weight in self._weights)
        self._locked: list[Tensor] = []
        self._layers: dict[int, _Layer] = {}
        for number, (module, own) in enumerate(_own_weights(model), start=1):
            streamed = [weight for weight in own if weight in self._weights]
            if streamed:
                self._lock([weight for weight in streamed if not weight.requires_grad])
                self._layers[number] = _layer(module, streamed, device)
        size = max((layer.size for layer in self._layers.values()), default=0)
        self._slots = [self._slot(size) for _ in range(min(STREAMED_LAYERS, len(self._layers)))]
        self._place: dict[int, _Slot] = {}
        self._views: dict[tuple[int, int], list[Tensor]] = {}
        self._current: _Slot | None = None
        self._turns = itertools.count(1)
        self._copies.copies_wait_for_kernels()  # the slots' memory may have been that of tensors which these read
        self._pass: weakref.ref[_Pass] | None = None
        self._token: _Pass | None = None
        self._at_rest = True
        self._removers = [remove for number in self._layers for remove in self._attach(number)]

    def __contains__(self, weight: object) -> bool:
        return weight in self._weights

    @property
    def slot_bytes(self) -> int:
        """Bytes of all slots on the card."""
        return sum(slot.memory.numel() for slot in self._slots)

    # ---------------------------------------------------------------------------------------------------------- layout
    def _lock(self, frozen: Sequence[nn.Parameter]) -> None:
        """Move the frozen weights of a layer into one piece of page-locked memory."""
        places, size = _places([weight.data for weight in frozen])
        if not size:
            return
        memory = page_locked(size, torch.uint8, self._device)
        self._locked.append(memory)
        for weight, place in zip(frozen, places, strict=True):
            weight.data = _view(memory, place, weight.data).copy_(weight.data)

    def _slot(self, size: int) -> _Slot:
        memory = torch.empty(size, dtype=torch.uint8, device=self._device)
        return _Slot(memory=memory, arrived=self._copies.event(), read=self._copies.event())

    # ---------------------------------------------------------------------------------------------------------- passes
    def enter(self) -> None:
        """Prepare for a pass: until `rest`, weights are on the card or nowhere."""
        self._token = _Pass() if torch.is_grad_enabled() else None
        if self._token is not None:
            self._pass = weakref.ref(self._token)
        if self._at_rest:
            self._at_rest = False
            for layer in self._layers.values():
                _assign(layer.weights, layer.absent)

    @property
    def in_pass(self) -> bool:
        """Whether a graph is alive whose backward pass may come."""
        self._token = None
        return self._pass is not None and self._pass() is not None

    def end_passes(self) -> None:
        """Note that no backward pass comes any more: an optimizer step follows."""
        self._pass = self._token = None

    def rest(self) -> None:
        """Let all weights be those of the host again, which may change there."""
        if not self._at_rest:
            self._at_rest = True
            self.forget()
            for layer in self._layers.values():
                _assign(layer.weights, layer.host)

    def forget(self) -> None:
        """Take what the slots hold for outdated: the host's weights change."""
        self._leave()
        for slot in self._slots:
            self._vacate(slot)

    def join(self) -> None:
        """Make the current stream wait for the copies on their way, which read the host's weights."""
        self._copies.kernels_wait_for_copies()

    def close(self) -> None:
        """Take the hooks off and leave the weights on the host."""
        for remove in self._removers:
            remove()
        self._copies.synchronize()
        self.rest()
        for memory in self._locked:
            unlock(memory, self._device)

    # ----------------------------------------------------------------------------------------------------------- slots
    def _need(self, number: int) -> _Slot:
        """Return the slot of a layer whose kernels are queued next, on the current stream."""
        if self._at_rest:  # a layer that is called by itself
            self.enter()
        slot = self._place.get(number)
        if slot is not None and slot is self._current:
            return slot
        self._leave()
        if slot is None:
            slot = self._fetch(number)
        self._current, slot.turn = slot, next(self._turns)
        self._copies.kernels_wait_for(slot.arrived)
        if _in_backward():
            self._prefetch(number - 1)
        return slot

    def _leave(self) -> None:
        if self._current is not None:
            self._copies.kernels_reach(self._current.read)
        self._current = None

    def _prefetch(self, number: int) -> None:
        if number in self._layers and number not in self._place:
            self._fetch(number)

    def _fetch(self, number: int) -> _Slot:
        """Queue the copy of a layer into the slot that was needed longest ago, but not the current one."""
        layer = self._layers[number]
        self.ready(number)
        slot = min((one for one in self._slots if one is not self._current), key=_age)
        self._vacate(slot)

        def copy() -> None:
            for host, place in layer.copies:
                slot.memory.narrow(0, place, host.numel()).copy_(host, non_blocking=True)

        self._copies.copy(copy, after=slot.read, reach=slot.arrived)
        slot.layer, slot.turn, self._place[number] = number, next(self._turns), slot
        _assign(layer.weights, self._views_of(slot, number))
        return slot

    def _vacate(self, slot: _Slot) -> None:
        if slot.layer is not None:
            layer = self._layers[slot.layer]
            _assign(layer.weights, layer.absent)
            del self._place[slot.layer]
            slot.layer, slot.turn = None, 0

    def _views_of(self, slot: _Slot, number: int) -> list[Tensor]:
        key = self._slots.index(slot), number
        if key not in self._views:
            layer = self._layers[number]
            pairs = zip(layer.places, layer.host, strict=True)
            self._views[key] = [_view(slot.memory, place, host) for place, host in pairs]
        return self._views[key]

    # ----------------------------------------------------------------------------------------------------------- hooks
    def _attach(self, number: int) -> Iterator[Callable[[], None]]:
        """Have a layer come before its forward pass, before it recomputes, and when the backward pass reads its weights.

        Source:
            transformers modeling_layers.py GradientCheckpointingLayer: a layer that recomputes runs again what it gave to
            `_gradient_checkpointing_func`, without its own `forward` or around it, by the release.
        """
        module: Any = self._layers[number].module
        forward = module.forward

        def run(*args: Any, **kwargs: Any) -> Any:
            slot = self._need(number)
            recomputes = module.training and getattr(module, "gradient_checkpointing", False)
            if torch.is_grad_enabled() and not recomputes:
                with torch.autograd.graph.saved_tensors_hooks(self._keep_of(slot, number), self._find):
                    output = forward(*args, **kwargs)
            else:
                output = forward(*args, **kwargs)
            self._after(number, output)
            return output

        yield _replaced(module, "forward", run)
        recompute = getattr(module, "_gradient_checkpointing_func", None)
        if recompute is not None:

            def again(function: Callable[..., Any], *args: Any) -> Any:
                def bring_and_run(*inputs: Any) -> Any:
                    self._need(number)
                    return function(*inputs)

                return recompute(bring_and_run, *args)

            yield _replaced(module, "_gradient_checkpointing_func", again)

    def _after(self, number: int, output: Any) -> None:
        """Queue the copy of the layer after one whose kernels are queued; after the last one that of the first, unless it turns round.

        The layer comes back when the backward pass reaches its output, whatever its operations keep, and a graph keeps its pass alive.
        """
        if _in_backward():
            return
        first = output[0] if isinstance(output, tuple | list) else output
        if isinstance(first, Tensor) and first.requires_grad:

            def bring(gradient: Tensor, token: _Pass | None = self._token) -> None:
                self._need(number)

            first.register_hook(bring)  # type: ignore[no-untyped-call]
        if number < max(self._layers):
            self._prefetch(number + 1)
        elif not torch.is_grad_enabled():
            self._prefetch(min(self._layers))

    def _keep_of(self, slot: _Slot, number: int) -> Callable[[Tensor], Tensor | _Kept]:
        start = slot.memory.untyped_storage().data_ptr()

        def keep(tensor: Tensor) -> Tensor | _Kept:
            if tensor.is_sparse or tensor.untyped_storage().data_ptr() != start:
                return tensor
            size, stride, offset = tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
            return _Kept(layer=number, dtype=tensor.dtype, size=size, stride=stride, offset=int(offset))

        return keep

    def _find(self, kept: Tensor | _Kept) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        memory = self._need(kept.layer).memory.view(kept.dtype)
        return memory.as_strided(kept.size, kept.stride, kept.offset)


def streamable(model: nn.Module, *, trained: bool) -> list[nn.Parameter]:
    """Return the weights of decoder layers that nothing else shares.

    Args:
        model: The model.
        trained: Whether trained weights are among them, or only frozen ones.
    """
    return [weight for _, own in _own_weights(model) for weight in own if trained or not weight.requires_grad]


def _own_weights(model: nn.Module) -> Iterator[tuple[nn.Module, list[nn.Parameter]]]:
    """Yield all decoder layers with the weights that each has alone; a layer inside another one has none."""
    uses = Counter(weight for module in model.modules() for weight in module._parameters.values() if weight is not None)
    seen: set[nn.Parameter] = set()
    for layer in decoder_layers(model):
        held = (weight for weight in layer.parameters() if weight.is_floating_point() and weight.numel())
        own = [weight for weight in held if uses[weight] == 1 and weight not in seen]
        seen |= set(own)
        yield layer, own


def _layer(module: nn.Module, weights: Sequence[nn.Parameter], device: torch.device) -> _Layer:
    host = [weight.data for weight in weights]
    starts: dict[Tensor, int] = {}
    copies: list[tuple[Tensor, int]] = []
    end = 0
    for run in _runs(host):
        start = -(-end // ALIGNMENT) * ALIGNMENT
        starts |= {value: start + value.data_ptr() - run[0].data_ptr() for value in run}
        end = start + run[-1].data_ptr() + _size(run[-1]) - run[0].data_ptr()
        copies.append((_bytes_of(run), start))
    nowhere = {value.dtype: torch.full((1,), float("nan"), dtype=value.dtype, device=device) for value in host}
    return _Layer(
        module=module,
        weights=tuple(weights),
        host=tuple(host),
        absent=tuple(nowhere[value.dtype].expand(value.shape) for value in host),
        places=tuple(starts[value] for value in host),
        copies=tuple(copies),
        size=-(-end // ALIGNMENT) * ALIGNMENT,
    )


def _runs(values: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the tensors that follow each other in one storage."""
    run: list[Tensor] = []
    for value in sorted(values, key=lambda value: value.data_ptr()):
        if run and (_storage(run[-1]) != _storage(value) or run[-1].data_ptr() + _size(run[-1]) != value.data_ptr()):
            yield run
            run = []
        run.append(value)
    if run:
        yield run


def _bytes_of(run: Sequence[Tensor]) -> Tensor:
    """Return the memory of tensors that follow each other, as bytes."""
    storage = run[0].untyped_storage()
    length = run[-1].data_ptr() + _size(run[-1]) - run[0].data_ptr()
    whole = torch.empty(0, dtype=torch.uint8).set_(storage)
    return whole.narrow(0, run[0].data_ptr() - storage.data_ptr(), length)


def _places(values: Sequence[Tensor]) -> tuple[list[int], int]:
    """Return the first byte of each of some tensors that are put one after the other, and the bytes of all."""
    places, end = [], 0
    for value in values:
        start = -(-end // value.element_size()) * value.element_size()
        places.append(start)
        end = start + _size(value)
    return places, end


def _view(memory: Tensor, place: int, like: Tensor) -> Tensor:
    return memory.narrow(0, place, _size(like)).view(like.dtype).view(like.shape)


def _size(value: Tensor) -> int:
    return value.numel() * value.element_size()


def _storage(value: Tensor) -> int:
    return value.untyped_storage().data_ptr()


def _assign(weights: Sequence[nn.Parameter], values: Sequence[Tensor]) -> None:
    for weight, value in zip(weights, values, strict=True):
        weight.data = value


def _age(slot: _Slot) -> int:
    return slot.turn


def _in_backward() -> bool:
    """Whether autograd runs a graph in this thread (torch utils/checkpoint.py asks the same)."""
    return bool(torch._C._current_graph_task_id() != -1)


def _replaced(module: nn.Module, name: str, value: Any) -> Callable[[], None]:
    """Set an attribute of a module itself; return what restores it."""
    missing = object()
    before = vars(module).get(name, missing)
    vars(module)[name] = value

    def restore() -> None:
        if before is missing:
            del vars(module)[name]
        else:
            vars(module)[name] = before

    return restore
