"""What a traced pass computes: each operation with its sizes and the bytes that its kernel moves, for the time of a step.

A trace notes every operation that torch dispatches. Code that stands for a kernel of another package, or a compiled graph
whose kernels do nothing, notes its own with `note` and keeps what it calls from being noted with `unnoted`.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

# product: matrix product; attention: a fused attention kernel; eager: any other kernel of torch; fused: a Triton kernel, of
# Liger's or a compiled graph's; collective: of tensor parallelism; view: no kernel, but the host's time.
OperationKind = Literal["product", "attention", "eager", "fused", "collective", "view"]
Phase = Literal["forward", "backward", "recomputation"]
Place = Literal["layers", "loss", "model"]
# How a kernel of torch walks through memory, on which its speed depends: flat: equal shapes, one after the other; broadcast:
# a smaller input; strided: sliced or transposed inputs; join: such inputs one after the other; upcast: to a wider type; the others
# by what they do.
Access = Literal["flat", "broadcast", "strided", "join", "upcast", "softmax", "reduction", "gather", "scatter"]


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Operation:
    """One kind of operation of one micro-batch, and how often it runs.

    Args:
        kind: Kind of its kernel.
        phase: Pass to which it belongs.
        place: Part of the model that runs it.
        name: Name in torch, or that of the kernel.
        dims: Of a product: batch, rows, columns, inner size. Of attention: batch, heads, queries, keys, width, width of
            values, and 1 if it is causal. Empty otherwise.
        itemsize: Bytes of an input's element.
        bytes_read: Bytes of its inputs.
        bytes_written: Bytes of its results.
        access: How it walks through memory.
        elements: Elements of its largest input or result; 0 for products and attention.
        count: Number of times that it runs.
    """

    kind: OperationKind
    phase: Phase
    place: Place
    name: str
    dims: tuple[int, ...] = ()
    itemsize: int = 2
    bytes_read: int = 0
    bytes_written: int = 0
    access: Access = "flat"
    elements: int = 0
    count: int = 1

    @property
    def flops(self) -> float:
        """Floating-point operations of one run: of products and attention, half of the scores where these are causal.

        The backward pass of attention makes five products where the forward pass makes two (arXiv 2205.14135, B.2).
        """
        if self.kind == "product":
            return 2.0 * math.prod(self.dims)
        if self.kind != "attention":
            return 0.0
        batch, heads, queries, keys, width, value_width, causal = self.dims
        once = 2.0 * batch * heads * queries * keys * (width + value_width) * (0.5 if causal else 1.0)
        return once * (2.5 if self.phase == "backward" else 1.0)

    @property
    def moved(self) -> int:
        """Bytes of one run, read and written."""
        return self.bytes_read + self.bytes_written


Owner = tuple[int, int] | None


@dataclass(slots=True)
class OperationRecorder:
    """The operations of a run, by the layer that ran them.

    Args:
        owner: Function that returns the running layer.
        place: Function that returns the part of the model that runs outside of the layers.
    """

    owner: Callable[[], Owner]
    place: Callable[[], Place] = lambda: "model"
    backward: bool = False
    recomputing: int = 0
    paused: int = 0
    counts: Counter[tuple[Owner, Operation]] = field(default_factory=Counter)

    def operation(
        self,
        kind: OperationKind,
        name: str,
        *,
        dims: Sequence[int] = (),
        itemsize: int = 2,
        bytes_read: int = 0,
        bytes_written: int = 0,
        access: Access = "flat",
        elements: int = 0,
        count: int = 1,
    ) -> None:
        """Note an operation that runs now, `count` times; arguments are those of `Operation`."""
        owner = self.owner()
        made = Operation(
            kind=kind,
            phase=("recomputation" if self.recomputing else "backward") if self.backward else "forward",
            place=self.place() if owner is None else "layers",
            name=name,
            dims=tuple(dims),
            itemsize=itemsize,
            bytes_read=bytes_read,
            bytes_written=bytes_written,
            access=access,
            elements=elements,
        )
        self.counts[owner, made] += count

    def dispatched(self, function: Any, args: Sequence[Any], kwargs: Any, result: Any) -> None:
        """Note an operation of torch, from its arguments and its result."""
        if self.paused:
            return
        rule = _RULES.get(function)
        if rule is None:
            rule = _RULES[function] = _rule_of(function)
        rule(self, args, kwargs, result)

    @contextlib.contextmanager
    def recomputation(self) -> Iterator[None]:
        """Take what runs inside a `with` block in the backward pass for a repetition of the forward pass."""
        self.recomputing += 1
        try:
            yield
        finally:
            self.recomputing -= 1

    def expanded(self, count: Callable[[Owner], int]) -> tuple[Operation, ...]:
        """Return the operations of the whole model.

        Args:
            count: Function that returns how many layers a traced one stands for; 1 outside the layers.
        """
        total: Counter[Operation] = Counter()
        for (owner, operation), times in self.counts.items():
            total[operation] += times * count(owner)
        return tuple(replace(operation, count=times) for operation, times in sorted(total.items()) if times)


def join_operations(parts: Sequence[tuple[Operation, ...]]) -> tuple[Operation, ...]:
    """Return the operations of several parts, each as `expanded` gives them, as one list, equal ones together."""
    if len(parts) == 1:
        return parts[0]
    total: Counter[Operation] = Counter()
    for part in parts:
        for operation in part:
            total[replace(operation, count=1)] += operation.count
    return tuple(replace(operation, count=times) for operation, times in sorted(total.items()))


_CURRENT: ContextVar[OperationRecorder | None] = ContextVar("operations", default=None)


@contextlib.contextmanager
def recording(recorder: OperationRecorder) -> Iterator[None]:
    """Make a recorder the one that `note` and `unnoted` reach, inside a `with` block."""
    token = _CURRENT.set(recorder)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def current() -> OperationRecorder | None:
    """Return the recorder of the running trace; None outside of one."""
    return _CURRENT.get()


def note(
    kind: OperationKind,
    name: str,
    *,
    dims: Sequence[int] = (),
    reads: Iterable[torch.Tensor | None] = (),
    writes: Iterable[torch.Tensor | None] = (),
    itemsize: int | None = None,
    count: int = 1,
) -> None:
    """Note an operation of the running trace; nothing outside of one.

    Args:
        kind: Kind of its kernel.
        name: Name of the kernel.
        dims: As of `Operation`.
        reads: Tensors that it reads; None for those that are absent.
        writes: Tensors that it writes.
        itemsize: Bytes of an input's element; by default that of the first tensor that is read.
        count: Number of times that it runs.
    """
    recorder = _CURRENT.get()
    if recorder is None or recorder.paused:
        return
    inputs = [tensor for tensor in reads if tensor is not None]
    recorder.operation(
        kind,
        name,
        dims=dims,
        itemsize=itemsize or (inputs[0].element_size() if inputs else 2),
        bytes_read=sum(map(_nbytes, inputs)),
        bytes_written=sum(_nbytes(tensor) for tensor in writes if tensor is not None),
        count=count,
    )


@contextlib.contextmanager
def unnoted() -> Iterator[None]:
    """Do not note what runs inside a `with` block, which stands for a kernel that `note` names."""
    recorder = _CURRENT.get()
    if recorder is None:
        yield
        return
    recorder.paused += 1
    try:
        yield
    finally:
        recorder.paused -= 1


# ------------------------------------------------------------------------------------------ operations that torch dispatches
_Rule = Callable[[OperationRecorder, Sequence[Any], Any, Any], None]

# Allocate, or are answered by the host.
_NOTHING = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "lift_fresh", "item"})
_NOTHING_NAMESPACES = frozenset({"prim", "prims", "profiler", "debugprims", "toolkit_trace"})
# Write over their first argument without reading it.
_FILLS = frozenset({"fill_", "zero_", "normal_", "uniform_", "bernoulli_", "copy_", "random_", "exponential_"})
# Read as much of their first argument as they return.
_PICKS = frozenset({"embedding", "index", "index_select", "gather", "take", "masked_select", "nll_loss_forward"})
# Sort their indices and add row after row (aten/src/ATen/native/cuda/Indexing.cu index_put_with_sort_kernel).
_SORTS_ROWS = frozenset({"index_put", "index_put_", "_index_put_impl_"})
_REDUCTIONS = frozenset(
    {"sum", "mean", "amax", "max", "min", "norm", "linalg_vector_norm", "logsumexp", "var", "var_mean", "std", "argmax"}
    | {"all", "any", "cumsum", "prod", "native_layer_norm", "native_layer_norm_backward", "topk", "sort", "bincount"}
)
_SOFTMAX = frozenset(
    {"_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data", "_safe_softmax"}
)
_COPIES = frozenset({"_to_copy", "clone", "copy_", "contiguous"})
_JOINS = frozenset({"cat", "stack", "constant_pad_nd", "repeat", "roll"})
# Fill their result with zeros and copy their input into a part of it (aten/src/ATen/native/TensorShape.cpp slice_backward).
_SLICE_GRADIENTS = frozenset({"slice_backward", "select_backward"})
# Fill their result with zeros, and write an element of each row.
_ROW_GRADIENTS = frozenset({"nll_loss_backward"})
# Change only a part of their first argument: as much as their last tensor has.
_SCATTERS = frozenset({"index_put_", "scatter_", "scatter_add_", "index_add_", "index_copy_", "masked_scatter_"})
_PRODUCTS = frozenset({"mm", "bmm", "addmm", "baddbmm", "_scaled_mm", "_grouped_mm", "mv", "addmv", "dot", "_int_mm"})
_CONVOLUTIONS = frozenset({"convolution", "convolution_backward"})


def _nbytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor that lie in memory: one that is expanded is read once."""
    if all(tensor.stride()):
        return tensor.numel() * tensor.element_size()
    size = tensor.element_size()
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        size *= length if stride else 1
    return size


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    import torch  # a trace has it; what reads a stored one has not

    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


def _rule_of(function: Any) -> _Rule:
    """Return how an operation is noted."""
    name = function._schema.name.rpartition("::")[2]
    if function.namespace in _NOTHING_NAMESPACES or name in _NOTHING:
        return _no_note
    if function.namespace in ("_c10d_functional", "c10d"):
        return _no_note if name == "wait_tensor" else _collective(name)
    if name in _PRODUCTS:
        return _product(name)
    if name in _CONVOLUTIONS:
        return _convolution(name)
    if name in _SLICE_GRADIENTS or name in _ROW_GRADIENTS:
        return _filled(name, copies=name in _SLICE_GRADIENTS)
    if name == "_safe_softmax":
        return _safe_softmax
    return _kernel(name, mutable=function._schema.is_mutable)


def _safe_softmax(recorder: OperationRecorder, args: Sequence[Any], kwargs: Any, result: Any) -> None:
    """Note a softmax, the search for rows that are masked as a whole, and their zeros (attention.cpp _safe_softmax)."""
    scores = args[0]
    count, size = result.numel(), result.element_size()
    read, written = _nbytes(scores), count * size

    def note_kernel(name: str, read: int, written: int, access: Access) -> None:
        recorder.operation(
            "eager", name, itemsize=size, bytes_read=read, bytes_written=written, access=access, elements=count
        )

    note_kernel("_softmax", read, written, "softmax")
    note_kernel("eq", read, count, "flat")
    note_kernel("all", count, 0, "reduction")
    note_kernel("where", written, written, "broadcast")


def _filled(name: str, *, copies: bool) -> _Rule:
    def rule(recorder: OperationRecorder, args: Sequence[Any], kwargs: Any, result: Any) -> None:
        gradient = args[0]
        size = result.element_size()
        recorder.operation("eager", name, itemsize=size, bytes_written=_nbytes(result), elements=result.numel())
        if copies:
            read = _nbytes(gradient)
            recorder.operation(
                "eager",
                "copy_",
                itemsize=size,
                bytes_read=read,
                bytes_written=gradient.numel() * size,
                access="strided",
                elements=gradient.numel(),
            )

    return rule


def _no_note(recorder: OperationRecorder, args: Sequence[Any], kwargs: Any, result: Any) -> None:
    pass


def _kernel(name: str, *, mutable: bool) -> _Rule:
    fills, picks, scatters = name in _FILLS, name in _PICKS, name in _SCATTERS

    def rule(recorder: OperationRecorder, args: Sequence[Any], kwargs: Any, result: Any) -> None:
        inputs = [*_tensors(args), *_tensors(list(kwargs.values()) if kwargs else ())]
        outputs = list(_tensors(result))
        if not outputs and not mutable:
            return
        if not mutable and inputs and outputs:
            own = {tensor.untyped_storage()._cdata for tensor in inputs}
            if all(tensor.untyped_storage()._cdata in own for tensor in outputs):
                recorder.operation("view", "view", itemsize=0)
                return
        written = sum(map(_nbytes, outputs))
        if picks:
            read = written + sum(_nbytes(tensor) for tensor in inputs[1:])
        elif scatters:
            read = 2 * _nbytes(inputs[-1])
            written = _nbytes(inputs[-1])
        else:
            read = sum(map(_nbytes, inputs[1:] if fills else inputs))
        size = inputs[0].element_size() if inputs else outputs[0].element_size() if outputs else 2
        recorder.operation(
            "eager",
            name,
            itemsize=size,
            bytes_read=read,
            bytes_written=written,
            access=_access(name, inputs, outputs),
            elements=_elements(
                inputs[-1:] if scatters or name in _SORTS_ROWS else outputs if picks else (*inputs, *outputs)
            ),
        )

    return rule


def _elements(tensors: Sequence[torch.Tensor]) -> int:
    return max((tensor.numel() for tensor in tensors), default=0)


def _access(name: str, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> Access:
    """Return how a kernel of torch walks through memory.

    Source:
        aten/src/ATen/native/cuda/CUDALoops.cuh gpu_kernel_impl_nocast: contiguous operands of one type are read in vectors,
        others element by element; Loops.cuh and Copy.cu for casts.
    """
    if name in _SOFTMAX:
        return "softmax"
    if name in _REDUCTIONS:
        return "reduction"
    if name in _PICKS:
        return "gather"
    if name in _SORTS_ROWS:
        return "scatter"
    if name in _SCATTERS:
        return "gather"
    if name in _JOINS:
        return "flat" if name == "cat" and all(tensor.is_contiguous() for tensor in inputs) else "join"
    if not inputs or not outputs:
        return "flat"
    result = outputs[0]
    broadcasts = False
    for tensor in inputs:
        if not tensor.dim():
            continue
        if tensor.numel() == result.numel() and not tensor.is_contiguous() and 0 not in tensor.stride():
            return "strided"
        broadcasts |= tensor.shape != result.shape or 0 in tensor.stride()
    if broadcasts:
        return "broadcast"
    wider = name in _COPIES and result.element_size() > inputs[-1].element_size()
    return "upcast" if wider else "flat"


def _collective(name: str) -> _Rule:
    def rule(recorder: OperationRecorder, args: Sequence[Any], kwargs: Any, result: Any) -> None:
        inputs, outputs = list(_tensors(args)), list(_tensors(result))
        size = inputs[0].element_size() if inputs else 2
        read, written = sum(map(_nbytes, inputs)), sum(map(_nbytes, outputs))
        recorder.operation("collective", name.rstrip("_"), itemsize=size, bytes_read=read, bytes_written=written)

    return rule


def _product(name: str) -> _Rule:
    first = 1 if name in ("addmm", "baddbmm", "addmv") else 0

    def rule(recorder: OperationRecorder, args: Sequence[Any], kwargs: Any, result: Any) -> None:
        left, right = args[first : first + 2]
        inputs = [tensor for tensor in _tensors(args) if tensor.dim()]
        if name == "_grouped_mm":
            dims = _grouped(left, right, result)
        else:
            columns = right.shape[-1] if right.dim() > 1 else 1
            rows = left.shape[-2] if left.dim() > 1 else 1
            dims = (left.shape[0] if left.dim() == 3 else 1, rows, columns, left.shape[-1])
        recorder.operation(
            "product",
            name,
            dims=dims,
            itemsize=left.element_size(),
            bytes_read=sum(map(_nbytes, inputs)),
            bytes_written=sum(map(_nbytes, _tensors(result))),
        )

    return rule


def _grouped(left: torch.Tensor, right: torch.Tensor, result: torch.Tensor) -> tuple[int, int, int, int]:
    """Return groups, rows of a group, columns and inner size; tokens are spread evenly."""
    if right.dim() == 3:
        groups = right.shape[0]
        return groups, -(-left.shape[-2] // groups), right.shape[2], right.shape[1]
    groups = result.shape[0]
    return groups, left.shape[0], right.shape[1], -(-left.shape[1] // groups)


def _convolution(name: str) -> _Rule:
    backward = name == "convolution_backward"

    def rule(recorder: OperationRecorder, args: Sequence[Any], kwargs: Any, result: Any) -> None:
        weight = args[2 if backward else 1]
        outer = args[0] if backward else result
        rows = outer.shape[0] * math.prod(outer.shape[2:])
        inputs, outputs = list(_tensors(args)), list(_tensors(result))
        read, written = sum(map(_nbytes, inputs)), sum(map(_nbytes, outputs))
        if weight.shape[1] == 1:  # depthwise: memory binds
            recorder.operation("eager", name, itemsize=weight.element_size(), bytes_read=read, bytes_written=written)
            return
        dims = (2 if backward else 1, rows, weight.shape[0], math.prod(weight.shape[1:]))
        recorder.operation(
            "product", name, dims=dims, itemsize=weight.element_size(), bytes_read=read, bytes_written=written
        )

    return rule


_RULES: dict[Any, _Rule] = {}
