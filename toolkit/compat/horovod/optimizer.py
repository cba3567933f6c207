"""`DistributedOptimizer`: the gradients of a torch optimizer are reduced over the ranks before its step.

A gradient is sent as soon as backward has it, under the name of its parameter. The coordinator fixes one order for all ranks, so
backward passes may run through the layers in different orders. A parameter that got no gradient on some rank contributes zeros
there, so branches that differ by rank do not block.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from toolkit.compat.horovod import runtime
from toolkit.compat.horovod.compression import Compression
from toolkit.compat.horovod.engine import Handle
from toolkit.compat.horovod.errors import HorovodOrderError, NotBuiltError, not_built, refuse_value
from toolkit.compat.horovod.messages import ReduceOp
from toolkit.compat.horovod.reductions import Adasum, Average, Sum, grouped_allreduce_async_, sparse_allreduce_async
from toolkit.compat.horovod.runtime import ProcessSet, global_process_set
from toolkit.compat.horovod.submission import synchronize

NamedParameters = Iterable[tuple[str, torch.Tensor]]

# Parameters of up to so many bytes are sent with others: each operation takes a tenth of a millisecond of Python. Larger ones
# take longer to send than to negotiate, and are on their way while backward goes on.
_SMALL_BYTES = 2**20
_GROUP_BYTES = 4 * 2**20
_GROUP_SIZE = 64


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: torch.optim.Optimizer,
    named_parameters: NamedParameters | None = None,
    compression: type[Any] = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return an optimizer of the same class, over the same parameters and state, whose step reduces the gradients first.

    Args:
        optimizer: Optimizer to wrap; use what is returned in its place.
        named_parameters: `model.named_parameters()`. Without it the parameters are numbered.
        compression: `Compression.none` or `Compression.fp16`.
        backward_passes_per_step: Backward passes whose gradients are summed on each rank before they are sent.
        op: Average or Sum.
        gradient_predivide_factor: Part of the average's division that is done before the sum.
        num_groups: Older name of `groups`.
        groups: Number of groups of parameters that are sent as one, or the groups themselves. When left out, small parameters
            are sent together.
        sparse_as_dense: Whether sparse gradients are made dense instead of gathered.
        process_set: Ranks that reduce; on others the optimizer is an ordinary one.

    Raises:
        NotBuiltError: HOROVOD_NOT_BUILT, for Adasum and LBFGS.
        HorovodValueError: HOROVOD_ARGUMENT.
    """
    _check_arguments(optimizer, op, backward_passes_per_step, gradient_predivide_factor)
    kind = type(optimizer)
    wrapped: Any = object.__new__(type(kind.__name__, (_Reducing, kind), {"__module__": kind.__module__}))
    # Groups and state are shared; a `step` that a scheduler has put on the instance would be the wrapped optimizer's.
    wrapped.__dict__.update({key: value for key, value in vars(optimizer).items() if key != "step"})
    factor = float(gradient_predivide_factor)
    wrapped._reducer = _Reducer(
        names=_names(optimizer, named_parameters),
        compression=compression,
        passes=backward_passes_per_step,
        op=op,
        factors=(1 / factor, factor),
        sparse_as_dense=sparse_as_dense,
        process_set=process_set,
        groups=_groups(optimizer, groups if groups is not None else num_groups or None),
    )
    wrapped._reducer.watch(optimizer.param_groups)
    return wrapped


def _check_arguments(optimizer: torch.optim.Optimizer, op: ReduceOp, passes: int, predivide: float) -> None:
    if op == Adasum:
        raise NotBuiltError(not_built("op=hvd.Adasum", "Use hvd.Average, with the learning rate of an average"))
    if isinstance(optimizer, torch.optim.LBFGS):
        fix = "Use another optimizer: LBFGS evaluates as often as its own rank's loss asks for"
        raise NotBuiltError(not_built("DistributedOptimizer of LBFGS", fix))
    if isinstance(optimizer, _Reducing):
        refuse_value("optimizer", "optimizer is a DistributedOptimizer already", "Wrap the torch optimizer once")
    if op not in (Average, Sum):
        refuse_value("op", f"op={op!r} does not combine gradients", "Use hvd.Average or hvd.Sum")
    if passes < 1:
        refuse_value("backward_passes_per_step", f"backward_passes_per_step={passes} is below 1", "Set it to 1 or more")
    if predivide != 1.0 and op != Average:
        refuse_value(
            "gradient_predivide_factor",
            f"gradient_predivide_factor={predivide} with op=Sum: it splits the division of an average",
            "Set it to 1, or use op=hvd.Average",
        )


def _names(optimizer: torch.optim.Optimizer, named: NamedParameters | None) -> dict[torch.Tensor, str]:
    if named is None:
        return {}
    pairs = list(named)
    if any(not isinstance(pair, tuple) or len(pair) != 2 for pair in pairs):
        refuse_value("named_parameters", "named_parameters is not a list of pairs", "Give model.named_parameters()")
    names: dict[torch.Tensor, str] = {}
    for name, parameter in pairs:
        names.setdefault(parameter, name)
    seen = [name for name, _ in pairs]
    if twice := sorted({name for name in seen if seen.count(name) > 1}) if len(set(seen)) < len(seen) else []:
        refuse_value(
            "named_parameters",
            f"named_parameters has {', '.join(twice)} twice",
            "Give each parameter a name of its own",
        )
    lacking = [
        f"parameter {index} of group {number}"
        for number, group in enumerate(optimizer.param_groups)
        for index, parameter in enumerate(group["params"])
        if parameter not in names
    ]
    if lacking:
        refuse_value(
            "named_parameters",
            f"named_parameters has no name for {', '.join(lacking[:5])}{' and others' if len(lacking) > 5 else ''}",
            "Give model.named_parameters() of all models whose parameters the optimizer has",
        )
    return names


def _groups(
    optimizer: torch.optim.Optimizer, groups: int | Sequence[Sequence[torch.Tensor]] | None
) -> list[list[torch.Tensor]]:
    if groups is None:
        return _small_ones(optimizer)
    if not isinstance(groups, int):
        return [list(group) for group in groups]
    if groups < 0:
        refuse_value("groups", f"groups={groups} is below 0", "Give a number of groups, or lists of parameters")
    every = [parameter for group in optimizer.param_groups for parameter in group["params"] if parameter.requires_grad]
    groups = min(groups, len(every))
    return [list(every[index * len(every) // groups : (index + 1) * len(every) // groups]) for index in range(groups)]


def _small_ones(optimizer: torch.optim.Optimizer) -> list[list[torch.Tensor]]:
    """Group small parameters, from the last to the first as backward reaches them, by type and device."""
    if isinstance(optimizer, torch.optim.SparseAdam):  # takes no dense gradients, as those of a group are
        return []
    full: list[list[torch.Tensor]] = []
    filling: dict[Any, list[torch.Tensor]] = {}
    every = [parameter for group in optimizer.param_groups for parameter in group["params"] if parameter.requires_grad]
    for parameter in reversed(every):
        if parameter.nbytes > _SMALL_BYTES:
            continue
        group = filling.setdefault((parameter.dtype, parameter.device), [])
        group.append(parameter)
        if len(group) == _GROUP_SIZE or sum(one.nbytes for one in group) > _GROUP_BYTES:
            full.append(filling.pop((parameter.dtype, parameter.device)))
    return [*full, *filling.values()]


@dataclass(slots=True, kw_only=True, eq=False)
class _Bucket:
    """Parameters whose gradients are sent as one.

    Args:
        name: Name of the operation.
        left: For each parameter, backward passes until its gradient is sent.
        sent: What waits for the reduced gradients: a handle with what decompression needs, or a function for a sparse one.
    """

    name: str
    parameters: list[torch.Tensor]
    left: dict[torch.Tensor, int] = field(default_factory=dict)
    sent: tuple[Handle, list[torch.Tensor], list[Any]] | Callable[[], torch.Tensor] | None = None


class _Reducer:
    """Sends gradients as backward computes them, and waits for the reduced ones."""

    def __init__(
        self,
        *,
        names: dict[torch.Tensor, str],
        compression: type[Any],
        passes: int,
        op: ReduceOp,
        factors: tuple[float, float],
        sparse_as_dense: bool,
        process_set: ProcessSet,
        groups: list[list[torch.Tensor]],
    ) -> None:
        self.passes = passes
        self.synchronized = False
        self.skipping = False
        # Optimizers whose parameters have no names may be stepped in turn, with gradients of several on their way.
        self._prefix = "gradient" if names else runtime.engine().next_name("gradient")
        self._names = names
        self._compression = compression
        self._op = op
        self._factors = factors
        self._sparse_as_dense = sparse_as_dense
        self._process_set = process_set
        self._groups = {parameter: group for group in groups for parameter in group}
        self._buckets: dict[torch.Tensor, _Bucket] = {}
        self._sparse_dims: dict[torch.Tensor, int] = {}
        self._started = False
        self._active = process_set.included() and process_set.size() > 1

    @property
    def started(self) -> bool:
        """Whether a backward pass has run whose gradients have not been reduced."""
        return self._started

    def watch(self, param_groups: Sequence[dict[str, Any]]) -> None:
        """Hook each parameter that needs a gradient, if that has not been done."""
        if not self._active:
            return
        every = itertools.chain.from_iterable(group["params"] for group in param_groups)
        for index, parameter in enumerate(every):
            if not parameter.requires_grad or parameter in self._buckets:
                continue
            group = self._groups.get(parameter, [parameter])
            members = [one for one in group if one.requires_grad and one not in self._buckets]
            bucket = _Bucket(name=f"{self._prefix}.{self._names.get(parameter, index)}", parameters=members)
            for member in members:
                self._buckets[member] = bucket
                bucket.left[member] = self.passes
                member.register_post_accumulate_grad_hook(_hook_of(self))

    def restart(self) -> None:
        """Count backward passes anew."""
        for parameter, bucket in self._buckets.items():
            bucket.left[parameter] = self.passes
            bucket.sent = None
        self._started = self.synchronized = False

    def on_gradient(self, parameter: torch.Tensor) -> None:
        """Send a gradient that backward has just summed, once all of its bucket are there."""
        bucket = self._buckets[parameter]
        if bucket.left[parameter] <= 0:
            raise HorovodOrderError.of(
                code="HOROVOD_BACKWARD_PASSES",
                key=bucket.name,
                message=f"backward has run more often than backward_passes_per_step={self.passes} before step()",
                fix="Call step() or synchronize() after so many passes, or raise backward_passes_per_step",
            )
        self._started, self.synchronized = True, False
        bucket.left[parameter] -= 1
        if not any(bucket.left.values()):
            self._send(bucket)

    def _send(self, bucket: _Bucket) -> None:
        for parameter in bucket.parameters:
            bucket.left[parameter] = 0
            if parameter.grad is None:
                parameter.grad = self._nothing(parameter)
            elif parameter.grad.is_sparse and (self._sparse_as_dense or len(bucket.parameters) > 1):
                parameter.grad = parameter.grad.to_dense()
        first = bucket.parameters[0]
        if first.grad is not None and first.grad.is_sparse:
            self._sparse_dims[first] = first.grad.sparse_dim()
            bucket.sent = sparse_allreduce_async(first.grad.coalesce(), bucket.name, self._op, self._process_set)
            return
        packed = [self._compression.compress(one.grad) for one in bucket.parameters]
        tensors = [tensor for tensor, _ in packed]
        before, after = self._factors
        handle = grouped_allreduce_async_(
            tensors,
            name=bucket.name,
            op=self._op,
            prescale_factor=before,
            postscale_factor=after,
            process_set=self._process_set,
        )
        bucket.sent = (handle, tensors, [ctx for _, ctx in packed])

    def _nothing(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the gradient of a parameter that this rank has not used: zeros, or no rows where its gradient is sparse."""
        dims = self._sparse_dims.get(parameter)
        if dims is None:
            return torch.zeros_like(parameter)
        indices = torch.empty((dims, 0), dtype=torch.int64, device=parameter.device)
        return torch.sparse_coo_tensor(
            indices, parameter.new_empty((0, *parameter.shape[dims:])), parameter.shape, check_invariants=False
        )

    def reduce(self, param_groups: Sequence[dict[str, Any]]) -> None:
        """Send what backward has not, in one order on all ranks, and put the reduced gradients in place."""
        self.watch(param_groups)
        buckets = list(dict.fromkeys(self._buckets.values()))
        for bucket in buckets:
            if bucket.sent is None:
                self._send(bucket)
        for bucket in buckets:
            self._receive(bucket)
        self._started, self.synchronized = False, True

    def _receive(self, bucket: _Bucket) -> None:
        sent, bucket.sent = bucket.sent, None
        for parameter in bucket.parameters:
            bucket.left[parameter] = self.passes
        if callable(sent):
            bucket.parameters[0].grad = sent()
        elif sent is not None:
            handle, tensors, contexts = sent
            synchronize(handle)
            for parameter, tensor, ctx in zip(bucket.parameters, tensors, contexts, strict=True):
                result = self._compression.decompress(tensor, ctx)
                if result is not parameter.grad:
                    assert parameter.grad is not None
                    parameter.grad.copy_(result)


def _hook_of(reducer: _Reducer) -> Callable[[torch.Tensor], None]:
    """Return a hook of a parameter that does nothing once its optimizer is gone: another may have wrapped the parameter since."""
    found = weakref.ref(reducer)

    def on_gradient(parameter: torch.Tensor) -> None:
        if (alive := found()) is not None:
            alive.on_gradient(parameter)

    return on_gradient


class _Reducing(torch.optim.Optimizer):
    """What `DistributedOptimizer` adds to an optimizer's class."""

    _reducer: _Reducer

    def synchronize(self) -> None:
        """Wait until the gradients are reduced, for instance to clip them; then step inside `skip_synchronize`."""
        self._reducer.reduce(self.param_groups)

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let `step` inside use the gradients as `synchronize` or the script has left them."""
        self._reducer.skipping = True
        try:
            yield
        finally:
            self._reducer.skipping = False

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change how many backward passes come before a step; call it between steps."""
        if passes < 1:
            refuse_value("passes", f"passes={passes} is below 1", "Set it to 1 or more")
        self._reducer.passes = passes
        self._reducer.restart()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Reduce the gradients, unless inside `skip_synchronize`, and do the optimizer's step.

        Args:
            closure: Computes the loss and its gradients, which are reduced after each call.
        """
        reducer = self._reducer
        if reducer.skipping:
            reducer.synchronized = False
            return super().step(closure) if closure is not None else super().step()
        if closure is not None:

            def reduced() -> Any:
                loss = closure()
                reducer.reduce(self.param_groups)
                return loss

            result = super().step(reduced)
            reducer.synchronized = False
            return result
        if reducer.synchronized:
            warnings.warn(
                "optimizer.step() after optimizer.synchronize() reduces the gradients again: call it inside "
                "`with optimizer.skip_synchronize():`",
                stacklevel=2,
            )
        reducer.reduce(self.param_groups)
        reducer.synchronized = False
        return super().step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients.

        Raises:
            HorovodOrderError: HOROVOD_ZERO_GRAD, between a backward pass and the step that reduces its gradients.
        """
        if self._reducer.started:
            raise HorovodOrderError.of(
                code="HOROVOD_ZERO_GRAD",
                message="zero_grad() after backward() and before step() or synchronize(): gradients that are being sent would be cleared",
                fix="Call it before backward(), or after step()",
            )
        super().zero_grad(set_to_none)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, and count backward passes anew."""
        self._reducer.restart()
        super().load_state_dict(state_dict)
