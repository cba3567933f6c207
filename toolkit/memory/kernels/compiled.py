"""Decoder layers under torch.compile, in a trace on fake tensors: what inductor's own code for them allocates and keeps.

For each kind of layer, Dynamo captures the forward pass, AOTAutograd and inductor's partitioner split the joint graph, and
inductor lowers both halves for the card (`inductor`). The trace then runs their wrapper code (`inductor_code`), in the
runtime that a card runs too, so that what is saved for the backward pass is what is saved there.

A layer that Dynamo does not capture as one graph, or that takes too long, runs as eager, which needs no less.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

from toolkit.artifacts.record_cache import RecordCache
from toolkit.artifacts.records import Records
from toolkit.errors import first_line
from toolkit.launch.user_cache import user_cache_folder
from toolkit.memory.kernels.device import OUT_OF_TIME, Device
from toolkit.memory.kernels.dispatch import choose_kernel, torch_functions
from toolkit.memory.kernels.inductor import (
    OutOfTime,
    as_in_a_new_process,
    compile_graph,
    lower_graph,
    missing_names,
    time_limit,
)
from toolkit.memory.kernels.inductor_code import load_code
from toolkit.memory.kernels.operations import unnoted
from toolkit.units import MIB
from toolkit.version import installed_version

# For each kind of layer and of its inputs: a dense layer takes 4 to 16 s on one core, one that unrolls a loop minutes.
SECONDS_PER_GRAPH = 120.0
# Code of a graph has about 50 KiB.
MAX_CODE_BYTES = 50 * MIB
_CODE: Records[str] = Records(str)

# A leaf of a layer's result: ("output", place among the graph's), ("input", place among the leaves), ("value", itself).
Source = tuple[str, Any]


class CompileError(Exception):
    """A layer stays eager; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """A layer's compiled graph, and how it is called.

    Args:
        run: Compiled graph, from its inputs to its outputs.
        inputs: Where the graph's inputs come from: names of the layer's tensors, places among the leaves of the arguments.
        result: What the leaves of the result are.
        structure: Structure of the result.
    """

    run: Callable[..., Any]
    inputs: tuple[str | int, ...]
    result: tuple[Source, ...]
    structure: TreeSpec

    def __call__(self, own: Mapping[str, torch.Tensor], leaves: Sequence[Any]) -> Any:
        """Run the graph of a layer with its tensors by name and the leaves of its arguments."""
        outputs = self.run(*[own[place] if isinstance(place, str) else leaves[place] for place in self.inputs])
        found = {"output": outputs, "input": leaves}
        return tree_unflatten(
            [place if kind == "value" else found[kind][place] for kind, place in self.result], self.structure
        )


@dataclass(slots=True, kw_only=True)
class LayerCompiler:
    """The compiled graphs of a model's layers, each made once for a kind of layer and of inputs.

    Args:
        device: Card.
        cache: Code that inductor has written for the same graphs.
        seconds: Limit for each capture.
        reasons: Why kinds of layers stay eager.
    """

    device: Device
    cache: RecordCache | None = field(default_factory=lambda: _user_cache())
    seconds: float = field(default_factory=lambda: SECONDS_PER_GRAPH)
    reasons: dict[Hashable, str] = field(default_factory=dict)
    num_lowered: int = 0
    _captures: dict[Hashable, Captured | None] = field(default_factory=dict)
    _graphs: dict[str, Callable[..., Any]] = field(default_factory=dict)

    def install(self, layers: Sequence[nn.Module], kinds: Sequence[Hashable]) -> None:
        """Have layers run compiled; equal kinds share a capture. Hooks that are registered later stay outside of it."""
        if missing := missing_names():
            why = f"torch {torch.__version__} has changed its compiler ({', '.join(missing)})"
            self.reasons |= dict.fromkeys(kinds, why)
            return
        for layer, kind in zip(layers, kinds, strict=True):
            layer.forward = CompiledForward(layer, kind, self)

    def capture(self, forward: CompiledForward, args: Any, kwargs: Any, leaves: Sequence[Any]) -> Captured | None:
        """Return the compiled graph for a layer's arguments; None if it stays eager."""
        key = (
            forward.kind,
            forward.layer.training,
            torch.is_grad_enabled(),
            str([_describe(leaf) for leaf in leaves]),
        )
        if key not in self._captures:
            self._captures[key] = None
            try:
                with as_in_a_new_process(), time_limit(self.seconds), unnoted():
                    self._captures[key] = self._capture(forward, args, kwargs)
            except OutOfTime:
                self.reasons[forward.kind] = f"it {OUT_OF_TIME} {self.seconds:g} s"
            except Exception as error:  # whatever the compiler raises; a card would run the graphs around what breaks
                self.reasons[forward.kind] = first_line(error)
            if self._captures[key] is None:
                gc.collect()  # the compiler's error has cycles, and keeps the frames of this pass and what they hold
        return self._captures[key]

    def _capture(self, forward: CompiledForward, args: Any, kwargs: Any) -> Captured:
        made: list[tuple[Callable[..., Any], list[Any], list[Any]]] = []

        def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
            examples = [_example(node) for node in graph.graph.output_node().args[0]]  # type: ignore[union-attr]

            def note(*given: Any) -> Any:
                made.append((self._compile(graph, inputs), list(given), examples))
                return tuple(examples)

            return note

        # What Dynamo has captured from it keeps alive, in cycles, which would spoil the trace.
        twins: dict[int, Any] = {}
        args, kwargs = tree_map(lambda leaf: twins.setdefault(id(leaf), _twin(leaf)), (args, kwargs))
        with _disable_current_modes(), forward.own_hooks(), torch_functions():
            run = torch.compile(_fresh(forward.eager), backend=backend, fullgraph=True, dynamic=False)
            result = run(*args, **kwargs)
        if len(made) != 1:
            raise CompileError("it runs nothing that can be compiled")
        [(compiled, given, examples)] = made
        names = {id(tensor): name for name, tensor in forward.own.items()}
        order = {
            id(leaf): place for place, leaf in enumerate(tree_leaves((args, kwargs))) if isinstance(leaf, torch.Tensor)
        }
        places: list[str | int] = []
        for each in given:
            if id(each) not in order and id(each) not in names:
                raise CompileError("it reads tensors of other modules")
            places.append(order[id(each)] if id(each) in order else names[id(each)])
        leaves, structure = tree_flatten(result)
        outputs = {id(each): place for place, each in enumerate(examples)}
        with _disable_current_modes(), _fake_mode(given):
            _rehearse(compiled, given)
        return Captured(
            run=compiled,
            inputs=tuple(places),
            result=tuple(_source(leaf, outputs, order) for leaf in leaves),
            structure=structure,
        )

    def _compile(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        key = f"{_text(graph)} {[_describe(each) for each in inputs]} {torch.is_grad_enabled()}"
        if key not in self._graphs:
            for module in graph.modules():
                if isinstance(module, torch.fx.GraphModule):
                    _attend_as_on(self.device, module)
            self._graphs[key] = compile_graph(graph, inputs, lower=self._lower)
        return self._graphs[key]

    def _lower(self, graph: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
        key = " ".join(
            [
                f"torch {torch.__version__}, toolkit {installed_version()}, {self.device}",
                _text(graph),
                str([_describe(each) for each in inputs]),
                str(
                    sorted((name, str(value)) for name, value in options.items() if isinstance(value, bool | int | str))
                ),
            ]
        )
        code = None if self.cache is None else self.cache.get(key, _CODE)
        if code is None:
            made = lower_graph(graph, inputs, device=self.device, **options)
            if not isinstance(made, str):
                return made
            self.num_lowered += 1
            if self.cache is not None:
                self.cache.put(key, made, _CODE)
            code = made
        call = load_code(code)

        def run(arguments: list[Any]) -> Any:
            return call(arguments)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run


def _user_cache() -> RecordCache | None:
    folder = user_cache_folder()
    return None if folder is None else RecordCache(folder / "inductor", max_bytes=MAX_CODE_BYTES)


class CompiledForward:
    """A layer's forward pass in a trace: captured and lowered outside of what is counted, then run inside of it.

    Args:
        layer: Layer, with its own hooks and without those of the trace.
        kind: What tells it from layers of another structure.
        compiler: Of all layers.
    """

    def __init__(self, layer: nn.Module, kind: Hashable, compiler: LayerCompiler) -> None:
        self.layer, self.kind, self._compiler = layer, kind, compiler
        self.own: dict[str, torch.Tensor] = {
            name: tensor
            for named in (layer.named_parameters, layer.named_buffers)
            for name, tensor in named(remove_duplicate=False)
        }
        self._hooks = [(each, dict(each._forward_hooks), dict(each._forward_pre_hooks)) for each in layer.modules()]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the compiled graph, or the layer's own code if it has none."""
        leaves = tree_leaves((args, kwargs))
        captured = self._compiler.capture(self, args, kwargs, leaves)
        return self.eager(*args, **kwargs) if captured is None else captured(self.own, leaves)

    @property
    def eager(self) -> Callable[..., Any]:
        """The layer's own forward pass, with checkpointing where transformers has it inside."""
        return type(self.layer).forward.__get__(self.layer)  # type: ignore[no-any-return]

    @contextlib.contextmanager
    def own_hooks(self) -> Iterator[None]:
        """Take off the trace's hooks inside a `with` block."""
        kept = [(each, each._forward_hooks, each._forward_pre_hooks) for each, _, _ in self._hooks]
        for each, after, before in self._hooks:
            each._forward_hooks, each._forward_pre_hooks = after, before
        try:
            yield
        finally:
            for each, after, before in kept:
                each._forward_hooks, each._forward_pre_hooks = after, before


def is_compiled(module: nn.Module) -> bool:
    """Return whether a module has been installed to run compiled."""
    return isinstance(vars(module).get("forward"), CompiledForward)


def _fresh(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls another and has code of its own: Dynamo compiles one code eight times at most."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    return FunctionType(call.__code__.replace(), call.__globals__, closure=call.__closure__)


def _twin(leaf: Any) -> Any:
    """Return a tensor of the same layout, or a value that is no tensor as it is."""
    if not isinstance(leaf, FakeTensor):
        return leaf
    with _disable_current_modes(), leaf.fake_mode:
        return torch.empty_strided(
            leaf.shape, leaf.stride(), dtype=leaf.dtype, device="cpu", requires_grad=leaf.requires_grad
        )


def _fake_mode(tensors: Sequence[Any]) -> Any:
    return next((each.fake_mode for each in tensors if isinstance(each, FakeTensor)), contextlib.nullcontext())


def _rehearse(run: Callable[..., Any], given: Sequence[Any]) -> None:
    """Run both halves of a graph once, so that a layer whose code does not run stays eager from its first pass on."""
    # Checkpointing around the layer counts what is saved for the backward pass, by hooks of which the last ones run.
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        made = [each for each in run(*given) if isinstance(each, torch.Tensor) and each.requires_grad]
        asked = [each for each in given if isinstance(each, torch.Tensor) and each.requires_grad]
        if made and asked:
            torch.autograd.grad(made, asked, [torch.empty_like(each) for each in made], allow_unused=True)


def _describe(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.requires_grad
    return leaf if isinstance(leaf, int | float | str | None) else type(leaf).__name__


def _text(graph: torch.fx.GraphModule) -> str:
    """Return the code of a graph and of those inside it, as of checkpointing."""
    return "\n".join(each.code for each in graph.modules() if isinstance(each, torch.fx.GraphModule))


def _example(node: Any) -> Any:
    return node.meta["example_value"] if isinstance(node, torch.fx.Node) else node


def _source(leaf: Any, outputs: Mapping[int, int], inputs: Mapping[int, int]) -> Source:
    if not isinstance(leaf, torch.Tensor):
        return "value", leaf
    for kind, places in (("output", outputs), ("input", inputs)):
        if id(leaf) in places:
            return kind, places[id(leaf)]
    raise CompileError("it returns tensors that no graph makes")


def _attend_as_on(device: Device, graph: torch.fx.GraphModule) -> None:
    """Have a graph's attention call the kernels that a card dispatches it to: none is there to ask (_fused_sdp_choice)."""
    for node in graph.graph.nodes:
        if node.op == "call_function" and getattr(node.target, "__name__", "") == "scaled_dot_product_attention":
            node.target = _attention(device)
    graph.recompile()


def _attention(device: Device) -> Callable[..., torch.Tensor]:
    aten = torch.ops.aten

    def attend(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        kernel = choose_kernel(
            query,
            key,
            value,
            attn_mask,
            device=device,
            dropout=dropout_p,
            causal=is_causal,
            enable_gqa=enable_gqa,
        )
        bias = attn_mask
        if kernel == "math":
            return aten._scaled_dot_product_attention_math(
                query, key, value, bias, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )[0]
        if bias is not None and bias.dtype == torch.bool:  # attention.cpp convert_boolean_attn_mask
            bias = torch.where(bias, 0.0, torch.scalar_tensor(-torch.inf, dtype=query.dtype, device=bias.device))
        if kernel == "flash":
            return aten._scaled_dot_product_flash_attention(
                query, key, value, dropout_p, is_causal, False, scale=scale
            )[0]
        if bias is not None:
            bias = bias.expand(*query.shape[:-1], key.shape[-2])  # attention.cpp pad_bias, preprocess_mask
        if kernel == "cudnn":
            return aten._scaled_dot_product_cudnn_attention(
                query, key, value, bias, True, dropout_p, is_causal, False, scale=scale
            )[0]
        return aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, True, dropout_p, is_causal, scale=scale
        )[0]

    return attend
