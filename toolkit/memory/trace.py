"""Runs the model that will be trained, on fake tensors, and notes what its forward and backward passes do to memory.

No weights are read, nothing is computed and no GPU is needed. Only as many decoder layers run as have different
structure or neighbours; the others repeat what these do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.initialization import no_init_weights
from transformers.modeling_layers import GradientCheckpointingLayer

from toolkit.memory.events import Event, Mark, Placed, Recorder, place
from toolkit.memory.kernels import TRACED_FLASH, Device, cuda_kernels
from toolkit.memory.layers import Stack, find_stacks, prune
from toolkit.memory.tracker import StorageTracker
from toolkit.modeling.adapters import apply_lora
from toolkit.modeling.build import DTYPES, construct, import_architecture, model_config
from toolkit.modeling.checkpointing import apply_gradient_checkpointing
from toolkit.modeling.loss import auxiliary_loss, summed_cross_entropy
from toolkit.plan.plan import Plan
from toolkit.spec.job import Lora

Owner = tuple[int, int] | None  # stack and position among the traced layers


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter of the whole model; tied weights are one.

    Args:
        name: Path in the model.
        numel: Elements.
        itemsize: Bytes an element.
        trainable: Whether it has a gradient.
        module: Path of the module that holds it.
    """

    name: str
    numel: int
    itemsize: int
    trainable: bool
    module: str

    @property
    def size(self) -> int:
        """Bytes."""
        return self.numel * self.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The memory events of one micro-batch, for the whole model.

    Args:
        parameters: In the order of `named_parameters`.
        buffers_bytes: Buffers of the model.
        forward: From the batch on the device to the loss, logits dropped.
        backward: From the loss to the last gradient.
        num_traced_layers: Layers that ran.
        num_layers: Layers that they stand for.
    """

    parameters: tuple[Parameter, ...]
    buffers_bytes: int
    forward: tuple[Placed, ...]
    backward: tuple[Placed, ...]
    num_traced_layers: int
    num_layers: int


@dataclass(slots=True)
class _Segment:
    owner: Owner
    events: list[Event] = field(default_factory=list)


def trace(plan: Plan, *, device: Device, marks_modules: bool | None = None) -> Trace:
    """Traces one micro-batch of a plan.

    Args:
        plan: What runs.
        device: Card, which decides on kernels.
        marks_modules: Whether to mark the hooks of ZeRO-3; by default if the plan's stage is 3.

    Raises:
        PlanError: TRACE_FAILED, with the module in which the model cannot run on fake tensors.
    """
    marked = plan.settings.zero_stage == 3 if marks_modules is None else marks_modules
    config = model_config(plan)
    import_architecture(config, trust_remote_code=plan.job.model.trust_remote_code)
    if config._attn_implementation == "flash_attention_2":
        config._attn_implementation = TRACED_FLASH
    dtype = DTYPES[plan.settings.precision]
    with no_init_weights(), torch.device("meta"):
        full = construct(config, dtype=dtype, trust_remote_code=plan.job.model.trust_remote_code)
    full.config.use_cache = False
    apply_gradient_checkpointing(
        full, fraction=plan.settings.gradient_checkpointing, offload_inputs=plan.profile.activations
    )
    stacks = find_stacks(full)
    prune(full, stacks)
    with FakeTensorMode(allow_non_fake_inputs=True), cuda_kernels(device):
        model = _on_fake_device(full, plan)
        tracing = _Tracing(model, stacks, marked=marked)
        tracing.run(plan)
    return tracing.expand()


def _on_fake_device(model: Any, plan: Plan) -> Any:
    """Gives the pruned model storage on the fake device, then adapters, in the order of `modeling.build`."""
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    checkpointed = [layer for layer in layers if layer.gradient_checkpointing]
    for layer in checkpointed:
        layer.gradient_checkpointing = False
    model.tie_weights()
    adapted = model
    if plan.job.train.method == "lora":
        with torch.device("meta"):
            adapted = apply_lora(model, plan.job.train.lora or Lora(), seed=0)
    _materialize(adapted, DTYPES[plan.settings.precision])
    for layer in checkpointed:
        layer.gradient_checkpointing = True
    adapted.train()
    return adapted


def _materialize(model: nn.Module, dtype: torch.dtype) -> None:
    """Replaces meta parameters and buffers by fake ones; what is shared stays shared."""
    made: dict[int, Any] = {}
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in made:
                kind = dtype if ".lora_" in name_of[id(parameter)] else parameter.dtype  # peft casts on real devices
                empty = torch.empty_like(parameter, device="cpu", dtype=kind, requires_grad=False)
                made[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            module._parameters[name] = made[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = made.setdefault(id(buffer), torch.empty_like(buffer, device="cpu"))


class _Tracing:
    """One run of a pruned model, cut into segments: what precedes the layers, each layer, what follows."""

    def __init__(self, model: Any, stacks: Sequence[Stack], *, marked: bool) -> None:
        self._model = model
        self._stacks = [self._absolute(stack) for stack in stacks]
        self._marked = marked
        self._recorder = Recorder()
        self._causes: list[str] = []
        self._backward = False
        self._owner: Owner = None
        self._segments: tuple[list[_Segment], list[_Segment]] = ([], [])
        self._names = {module: name for name, module in model.named_modules()}
        self._handles: list[Any] = []
        self._tracker = StorageTracker(self._recorder, self._cause)

    def _absolute(self, stack: Stack) -> Stack:
        """Gives a stack's path inside adapters, which wrap the model."""
        for name, module in self._model.named_modules():
            if isinstance(module, nn.ModuleList) and (name == stack.prefix or name.endswith(f".{stack.prefix}")):
                return Stack(prefix=name, kept=stack.kept, stands_for=stack.stands_for)
        raise AssertionError(stack.prefix)

    def run(self, plan: Plan) -> None:
        """Runs forward and backward."""
        model, batch = self._model, plan.settings.batch
        tracker = self._tracker
        tracker.ignore([*model.parameters(), *model.buffers()])
        self._hook()
        config = model.config
        shape = (batch.micro, plan.settings.sequence_length)
        with tracker:
            tokens_BS = torch.zeros(shape, dtype=torch.int64)
            labels_BS = torch.zeros(shape, dtype=torch.int64)
            outputs = model(input_ids=tokens_BS)
            self._causes.append("logits and loss")
            loss = summed_cross_entropy(outputs.logits, labels_BS)
            router = auxiliary_loss(outputs, config)
            if router is not None:
                loss = loss + router
            del outputs, router
            self._causes.pop()
            self._switch(None)
            self._recorder.flush()
            self._close()
            self._backward = True
            loss.backward()  # type: ignore[no-untyped-call]
            del loss
            self._close()
        for handle in self._handles:
            handle.remove()

    def expand(self) -> Trace:
        """Repeats the traced segments for the layers that they stand for."""
        forward, backward = self._segments
        return Trace(
            parameters=tuple(self._parameters()),
            buffers_bytes=sum(buffer.nbytes for buffer in self._model.buffers()),
            forward=tuple(self._stretch(forward, reverse=False)),
            backward=tuple(self._stretch(backward, reverse=True)),
            num_traced_layers=sum(len(stack.kept) for stack in self._stacks),
            num_layers=sum(stack.num_layers for stack in self._stacks),
        )

    def _stretch(self, segments: Sequence[_Segment], *, reverse: bool) -> Iterator[Placed]:
        index = 0
        while index < len(segments):
            owner = segments[index].owner
            if owner is None:
                yield from place(segments[index].events, layer=None, prefix="")
                index += 1
                continue
            stack = self._stacks[owner[0]]
            mine: dict[int, list[Event]] = {}
            while index < len(segments) and (segments[index].owner or (-1, 0))[0] == owner[0]:
                mine.setdefault(segments[index].owner[1], []).extend(segments[index].events)  # type: ignore[index]
                index += 1
            layers = range(stack.num_layers)
            for layer in reversed(layers) if reverse else layers:
                yield from place(mine.get(stack.stands_for[layer], []), layer=layer, prefix=stack.prefix)

    def _parameters(self) -> Iterator[Parameter]:
        """Gives the whole model's parameters: a layer's are those of the layer that stands for it."""
        named = list(self._model.named_parameters())
        grouped: dict[tuple[int, int], list[tuple[str, Any]]] = {}
        order: list[tuple[int, int] | tuple[str, Any]] = []
        done: set[int] = set()
        for name, parameter in named:
            where = self._locate(name)
            if where is None:
                order.append((name, parameter))
                continue
            stack, position, rest = where
            grouped.setdefault((stack, position), []).append((rest, parameter))
            if stack not in done:
                done.add(stack)
                order.append((stack, -1))
        for entry in order:
            if isinstance(entry[0], str):
                yield _parameter(entry[0], entry[1])
                continue
            stack = entry[0]
            described = self._stacks[stack]
            for layer in range(described.num_layers):
                for rest, parameter in grouped[(stack, described.stands_for[layer])]:
                    yield _parameter(f"{described.prefix}.{layer}.{rest}", parameter)

    def _locate(self, name: str) -> tuple[int, int, str] | None:
        for index, stack in enumerate(self._stacks):
            if name.startswith(f"{stack.prefix}."):
                number, _, rest = name[len(stack.prefix) + 1 :].partition(".")
                return (index, int(number), rest) if number else None
        return None

    def _cause(self) -> str:
        if self._causes:
            return self._causes[-1]
        return "backward temporaries" if self._backward else "inputs and model"

    def _switch(self, owner: Owner) -> None:
        """Ends the current segment and starts another."""
        self._close()
        self._owner = owner

    def _close(self) -> None:
        events = self._recorder.take()
        if events:
            self._segments[self._backward].append(_Segment(self._owner, events))

    def _mark(self, kind: Any, name: str, *, size: int = 0) -> None:
        where = self._locate(name) or self._locate(f"{name}.")
        if where is None:
            self._recorder.mark(Mark(kind, name, None, size, self._backward))
            return
        stack, position, rest = where
        if self._owner is not None and self._owner[0] == stack:
            self._recorder.mark(Mark(kind, rest, position - self._owner[1], size, self._backward))
            return
        # Outside of the layers: the first and last layers stand for themselves.
        original = self._stacks[stack].kept[position]
        self._recorder.mark(Mark(kind, f"{self._stacks[stack].prefix}.{original}.{rest}", None, size, self._backward))

    def _hook(self) -> None:
        for index, stack in enumerate(self._stacks):
            layers: Any = self._model.get_submodule(stack.prefix)
            for position, layer in enumerate(layers):
                self._hook_layer(layer, (index, position), last=position == len(layers) - 1)
        for name, module in self._model.named_modules():
            self._hook_cause(name, module)
            if self._marked and next(module.parameters(recurse=False), None) is not None:
                self._hook_fetch(module)
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad:
                self._handles.append(parameter.register_post_accumulate_grad_hook(self._gradient(name)))

    def _gradient(self, name: str) -> Callable[[torch.Tensor], None]:
        def take(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            size = self._tracker.hand_over(parameter.grad)
            parameter.grad = None
            self._mark("gradient", name, size=size)

        return take

    def _hook_layer(self, layer: nn.Module, owner: tuple[int, int], *, last: bool) -> None:
        def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
            if self._backward:
                return
            self._switch(owner)
            if owner[1] == 0:
                tensor = _first_tensor((args, kwargs))
                if tensor is not None and tensor.requires_grad:
                    tensor.register_hook(lambda _: self._switch(None))  # type: ignore[no-untyped-call]

        def leave(_: nn.Module, args: Any, output: Any) -> None:
            if self._backward:
                return
            tensor = _first_tensor(output)
            if tensor is not None and tensor.requires_grad:
                tensor.register_hook(lambda _: self._switch(owner))  # type: ignore[no-untyped-call]
            if last:
                self._switch(None)

        self._handles.append(layer.register_forward_pre_hook(enter, with_kwargs=True))
        self._handles.append(layer.register_forward_hook(leave))

    def _hook_cause(self, name: str, module: nn.Module) -> None:
        cause = _role(name, module, self._locate(f"{name}."))
        if cause is None:
            return
        self._handles.append(module.register_forward_pre_hook(lambda *_: self._causes.append(cause), prepend=True))
        self._handles.append(module.register_forward_hook(lambda *_: _pop(self._causes), always_call=True))

    def _hook_fetch(self, module: nn.Module) -> None:
        """Marks what DeepSpeed's ZeRO-3 hooks see, through autograd functions at the same places.

        Source:
            deepspeed runtime/zero/parameter_offload.py _register_deepspeed_module.
        """
        name = self._names[module]
        pending = [0]

        def before(_: nn.Module, args: Any) -> Any:
            self._mark("fetch", name)
            pending[0] = 0
            return _through(args, lambda tensor: _after_backward(tensor, pending, lambda: self._mark("release", name)))

        def after(_: nn.Module, args: Any, output: Any) -> Any:
            self._mark("release", name)
            return _through(output, lambda tensor: _before_backward(tensor, lambda: self._mark("fetch", name)))

        self._handles.append(module.register_forward_pre_hook(before))
        self._handles.append(module.register_forward_hook(after))


class _BeforeBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, notify: Callable[[], None]) -> torch.Tensor:
        ctx.notify = notify
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.notify()
        return gradients[0], None


class _AfterBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, pending: list[int], notify: Callable[[], None]) -> torch.Tensor:
        ctx.pending, ctx.notify = pending, notify
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.pending[0] -= 1
        if ctx.pending[0] == 0:
            ctx.notify()
        return gradients[0], None, None


def _after_backward(tensor: torch.Tensor, pending: list[int], notify: Callable[[], None]) -> Any:
    if not tensor.requires_grad:
        return tensor
    pending[0] += 1
    return _AfterBackward.apply(tensor, pending, notify)  # type: ignore[no-untyped-call]


def _before_backward(tensor: torch.Tensor, notify: Callable[[], None]) -> Any:
    return _BeforeBackward.apply(tensor, notify)  # type: ignore[no-untyped-call]


def _through(value: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    """Applies a function to the tensors of a value that require gradients."""
    if isinstance(value, torch.Tensor):
        return function(value) if value.requires_grad else value
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(_through(item, function) for item in value)
    if isinstance(value, list):
        return [_through(item, function) for item in value]
    return value


def _first_tensor(value: Any) -> torch.Tensor | None:
    """Gives the first floating-point tensor of nested arguments."""
    for leaf in torch.utils._pytree.tree_leaves(value):
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            return leaf
    return None


def _role(name: str, module: nn.Module, where: tuple[int, int, str] | None) -> str | None:
    """Names the cause under which a module's tensors are reported; None leaves the enclosing one."""
    if where is not None:
        parts = where[2].rstrip(".").split(".") if where[2] else []
        if not parts or parts == [""]:
            return "layers: residual stream and norms"
        if len(parts) > 1:
            return None
        first = parts[0].lower()
        if "norm" in first or first.startswith("ln_"):
            return None
        if "attn" in first or "attention" in first:
            return "layers: attention"
        if any(word in first for word in ("mlp", "feed_forward", "ffn", "fc", "moe", "expert")):
            return "layers: MLP"
        return None
    last = name.rpartition(".")[2].lower()
    if isinstance(module, nn.Embedding):
        return "embeddings"
    if last in ("lm_head", "embed_out"):
        return "logits and loss"
    return None


def _pop(causes: list[str]) -> None:
    causes.pop()


def _parameter(name: str, parameter: torch.Tensor) -> Parameter:
    return Parameter(
        name=name,
        numel=parameter.numel(),
        itemsize=parameter.element_size(),
        trainable=parameter.requires_grad,
        module=name.rpartition(".")[0],
    )
