"""One run of a pruned model, split into segments: before the layers, each layer, and after the layers."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from toolkit.memory.kernels.device import Device
from toolkit.memory.kernels.operations import OperationRecorder, Place, recording
from toolkit.memory.kernels.zero3 import hook_modules
from toolkit.memory.trace.attribution import LOSS, AttributionStack, cause_of
from toolkit.memory.trace.events import LayerRef, Marker, MarkKind, Recorder, TracedEvent
from toolkit.memory.trace.fake_ops import FakeOpRule
from toolkit.memory.trace.representatives import LayerStack
from toolkit.memory.trace.tracker import StorageTracker
from toolkit.modeling import checkpointing
from toolkit.tensor_parallel.deferred_grads import DeferredWeightGrad, WeightGradStore


@dataclass(slots=True)
class Segment:
    """The events while one layer, or the code around the layers, ran."""

    owner: LayerRef
    events: list[TracedEvent] = field(default_factory=list)


@dataclass(slots=True)
class StageBoundary:
    """The inputs and outputs of a stage's passes at its boundary.

    Attributes:
        received: Hidden states of the previous stage; None for the first stage.
        gradient: Gradient of the hidden states that the stage outputs; None for the last stage.
        reported: Loss that the last stage reports, after the forward pass.
        sends_on: Whether the output of the forward pass is sent to another stage.
        batch: Micro-batch of the passes.
        sent_bytes: Bytes of the gradient of `received`, or without a backward pass of the hidden states.
        reported_bytes: Bytes of `reported`.
        keeps_received: Whether the second half of the backward pass needs `received`.
    """

    received: torch.Tensor | None = None
    gradient: torch.Tensor | None = None
    reported: torch.Tensor | None = None
    sends_on: bool = False
    batch: dict[str, torch.Tensor] = field(default_factory=dict)
    sent_bytes: int = 0
    reported_bytes: int = 0
    keeps_received: bool = False

    @property
    def given(self) -> list[torch.Tensor]:
        """Tensors that exist before the passes."""
        return [tensor for tensor in (self.received, self.gradient, *self.batch.values()) if tensor is not None]


class Locator:
    """A map from paths of the pruned model to layers."""

    def __init__(self, stacks: Sequence[LayerStack]) -> None:
        self._stacks = stacks

    def __call__(self, path: str) -> tuple[int, int, str] | None:
        """Return stack, position among its traced layers and path inside the layer; None outside the layers."""
        for index, stack in enumerate(self._stacks):
            if path.startswith(f"{stack.prefix}."):
                number, _, rest = path[len(stack.prefix) + 1 :].partition(".")
                position = int(number) - stack.offset
                if 0 <= position < len(stack.kept):
                    return index, position, rest
        return None


class LayerSegmenter:
    """A run of a model on fake tensors that splits its memory events into segments.

    Args:
        model: Model with storage on the fake device, in training mode.
        stacks: Layers of the model, with its paths.
        marked: Whether the hooks of ZeRO-3 are marked.
        answers: Rules for operations that read values; an operation without one fails.
        device: Card.
    """

    def __init__(
        self,
        model: Any,
        stacks: Sequence[LayerStack],
        *,
        marked: bool,
        device: Device,
        answers: Sequence[FakeOpRule] = (),
    ) -> None:
        self.forward: list[Segment] = []
        self.backward: list[Segment] = []
        self.after: list[Segment] = []
        self.weights: list[Segment] = []
        self.host_copies: list[tuple[LayerRef, int]] = []
        self._model = model
        self._stacks = stacks
        self._marked = marked
        self._locate = Locator(stacks)
        self._recorder = Recorder()
        self._causes = AttributionStack()
        self._owner: LayerRef = None
        self._inside = False  # whether a layer's forward pass is running
        self._running = self.forward
        self._ran: list[tuple[int, int]] = []
        self._handles: list[Any] = []
        self.operations = OperationRecorder(owner=lambda: self._owner, place=self._place)
        self.tracker = StorageTracker(
            self._recorder,
            cause=lambda: self._causes.now,
            owner=lambda: self._owner,
            answers=answers,
            operations=self.operations,
            device=device,
        )

    def run(
        self,
        step: Callable[[], torch.Tensor],
        *,
        backward: bool = True,
        ends: StageBoundary | None = None,
        gradients: WeightGradStore | None = None,
    ) -> None:
        """Run forward and backward.

        Args:
            step: Function that runs the model on its own batch and returns the loss, or the output of a pipeline stage.
            backward: Whether the backward pass follows; without it autograd is off.
            ends: Tensors from neighbouring pipeline stages, which are not counted; what the stage sends back or reports is
                handed over to it.
            gradients: Store of weight gradients for a second half of the backward pass; None where it is not split.
        """
        ends = ends or StageBoundary()
        self.tracker.ignore([*self._model.parameters(), *self._model.buffers(), *ends.given])
        self._hook()
        try:
            with (
                self.tracker,
                recording(self.operations),
                self._inputs_on_host(),
                self._recomputation(),
                torch.set_grad_enabled(backward),
            ):
                root = step()
                if ends.reported is not None:
                    ends.reported_bytes = self.tracker.hand_over(ends.reported)
                if not backward and ends.sends_on:
                    ends.sent_bytes = self.tracker.hand_over(root)
                self._switch(None)
                waiting: deque[DeferredWeightGrad] = deque()
                if backward:
                    self._causes.backward = self.operations.backward = True
                    self._running = self.backward
                    self._causes.in_loss = ends.gradient is None
                    with gradients.defer() if gradients is not None else contextlib.nullcontext(waiting) as waiting:
                        root.backward(ends.gradient)  # type: ignore[no-untyped-call]
                    if ends.received is not None and ends.received.grad is not None:
                        ends.sent_bytes = self.tracker.hand_over(ends.received.grad)
                    self._switch(None)
                    self._running = self.after
                del root  # and with it the graph, which a script keeps through the optimizer step
                self._close()
                ends.keeps_received = any(_share(delayed.input, ends.received) for delayed in waiting)
                self._run_weights(waiting)
        finally:
            for handle in self._handles:
                handle.remove()

    @torch.no_grad()
    def _run_weights(self, waiting: deque[DeferredWeightGrad]) -> None:
        """Compute the deferred gradients (toolkit pipeline_parallel/zero_bubble_backward.py accumulate)."""
        self._running = self.weights
        names = {parameter: name for name, parameter in self._model.named_parameters()}
        while waiting:
            delayed = waiting.popleft()
            where = self._locate(names[delayed.parameters[0]])
            self._switch(None if where is None else where[:2])
            found = list(delayed.compute())
            for parameter in delayed.parameters:
                size = self.tracker.hand_over(found.pop(0))
                self._mark("gradient", names[parameter], size=size)
            del delayed
        self._close()

    @contextlib.contextmanager
    def _inputs_on_host(self) -> Iterator[None]:
        """Exclude layer inputs that are kept in host memory from the count: on fake tensors both are CPU memory."""
        move = checkpointing._HostCopy.move_to_host

        def uncounted(held: Any) -> None:
            self.host_copies.append((self._owner, held._tensor.nbytes))
            with self.tracker.host():
                move(held)

        checkpointing._HostCopy.move_to_host = uncounted  # type: ignore[method-assign,assignment]
        try:
            yield
        finally:
            checkpointing._HostCopy.move_to_host = move  # type: ignore[method-assign]

    @contextlib.contextmanager
    def _recomputation(self) -> Iterator[None]:
        """Tell the forward passes that checkpointed layers repeat from the rest of the backward pass."""
        module: Any = checkpointing
        original = module.checkpoint

        def noted(function: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
            def run(*given: Any, **named: Any) -> Any:
                with self.operations.recomputation():
                    return function(*given, **named)

            return original(run, *inputs, **options)

        module.checkpoint = noted
        try:
            yield
        finally:
            module.checkpoint = original

    def _place(self) -> Place:
        return "loss" if self._causes.now == LOSS else "model"

    @contextlib.contextmanager
    def loss(self) -> Iterator[None]:
        """Attribute what is allocated inside a `with` block to the loss."""
        self._causes.push(LOSS)
        yield
        self._causes.pop()

    def _switch(self, owner: LayerRef) -> None:
        """End the current segment and start another."""
        self._close()
        if self._causes.backward and owner is not None:
            self._causes.in_loss = False
        self._owner = owner

    def _close(self) -> None:
        events = self._recorder.take()
        if events:
            self._running.append(Segment(self._owner, events))

    @property
    def in_backward(self) -> bool:
        """True if the backward pass has begun."""
        return self._causes.backward

    @property
    def in_order(self) -> bool:
        """True if each layer that ran at all ran once, in order, one list after the other.

        Only then can one layer represent another.
        """
        expected = [
            (index, position)
            for index in dict.fromkeys(index for index, _ in self._ran)
            for position in range(len(self._stacks[index].kept))
        ]
        return self._ran == expected

    def _hook(self) -> None:
        for index, stack in enumerate(self._stacks):
            layers: Any = self._model.get_submodule(stack.prefix)
            for position in range(len(stack.kept)):
                self._hook_layer(layers[stack.offset + position], (index, position))
        for name, module in self._model.named_modules():
            where = self._locate(name)
            if where is None:
                self._handles.append(module.register_forward_pre_hook(self._leave_layers))
            cause = cause_of(name, module, within=where[2] if where is not None else None)
            if cause is not None:
                self._handles += self._causes.hook(module, cause)
            if cause == LOSS:
                self._handles.append(module.register_forward_pre_hook(self._end_of_loss))
        if self._marked:
            self._handles += hook_modules(
                self._model, lambda name, fetch: self._mark("fetch" if fetch else "release", name)
            )
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad:
                self._handles.append(parameter.register_post_accumulate_grad_hook(self._gradient(name)))

    def _end_of_loss(self, module: nn.Module, args: Any) -> None:
        """Register the end of the loss on a head's input: once that has its gradient, the loss's backward pass is over."""
        tensor = _first_tensor(args)
        if tensor is not None and tensor.requires_grad:
            tensor.register_hook(lambda _: setattr(self._causes, "in_loss", False))  # type: ignore[no-untyped-call]

    def _leave_layers(self, module: nn.Module, args: Any) -> None:
        """End the last layer when a module outside the layers runs: only then has its call released its arguments."""
        if self._owner is not None and not self._inside and not self._causes.backward:
            self._switch(None)

    def _hook_layer(self, layer: nn.Module, owner: tuple[int, int]) -> None:
        def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
            if self._causes.backward:
                return
            self._switch(owner)
            self._inside = True
            self._ran.append(owner)
            if owner[1] == 0:
                tensor = _first_tensor((args, kwargs))
                if tensor is not None and tensor.requires_grad:
                    tensor.register_hook(lambda _: self._switch(None))  # type: ignore[no-untyped-call]

        def leave(_: nn.Module, args: Any, output: Any) -> None:
            if self._causes.backward:
                return
            self._inside = False
            tensor = _first_tensor(output)
            if tensor is not None and tensor.requires_grad:
                tensor.register_hook(lambda _: self._switch(owner))  # type: ignore[no-untyped-call]

        self._handles.append(layer.register_forward_pre_hook(enter, with_kwargs=True))
        self._handles.append(layer.register_forward_hook(leave))

    def _gradient(self, name: str) -> Callable[[torch.Tensor], None]:
        def take(parameter: torch.Tensor) -> None:
            if parameter.grad is None:  # the weight gradient is deferred, but torch calls this hook
                return
            size = self.tracker.hand_over(parameter.grad)
            parameter.grad = None
            self._mark("gradient", name, size=size)

        return take

    def _mark(self, kind: MarkKind, name: str, *, size: int = 0) -> None:
        backward = self._causes.backward
        where = self._locate(name)
        if where is None:
            self._recorder.note(Marker(kind, name, None, size, backward))
            return
        stack, position, rest = where
        if self._owner is not None and self._owner[0] == stack:
            self._recorder.note(Marker(kind, rest, position - self._owner[1], size, backward))
            return
        # Outside of the layers: the first and last layers represent themselves.
        self._recorder.note(Marker(kind, rest, None, size, backward, (stack, position)))


def _share(one: torch.Tensor, other: torch.Tensor | None) -> bool:
    return other is not None and one.untyped_storage()._cdata == other.untyped_storage()._cdata


def _first_tensor(value: Any) -> torch.Tensor | None:
    """Return the first floating-point tensor of nested arguments."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            return leaf
    return None
