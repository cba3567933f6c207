"""Gradients that are sent as soon as backward has them, each under the name of its parameter.

The coordinator fixes one order for all ranks, so backward passes may run through the layers in different orders. A parameter that
got no gradient on some rank contributes zeros there, so branches that differ by rank do not block.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from toolkit.compat.horovod import runtime
from toolkit.compat.horovod.engine import Handle
from toolkit.compat.horovod.errors import HorovodOrderError
from toolkit.compat.horovod.messages import ReduceOp
from toolkit.compat.horovod.reductions import grouped_allreduce_async_, sparse_allreduce_async
from toolkit.compat.horovod.runtime import ProcessSet
from toolkit.compat.horovod.submission import synchronize


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


class Reducer:
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


def _hook_of(reducer: Reducer) -> Callable[[torch.Tensor], None]:
    """Return a hook of a parameter that does nothing once its optimizer is gone: another may have wrapped the parameter since."""
    found = weakref.ref(reducer)

    def on_gradient(parameter: torch.Tensor) -> None:
        if (alive := found()) is not None:
            alive.on_gradient(parameter)

    return on_gradient
