"""Operations as requests to the coordinator, and the waits for them: `synchronize`, `poll`, `join` and `barrier`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from toolkit.compat.horovod import runtime
from toolkit.compat.horovod.engine import Handle
from toolkit.compat.horovod.errors import refuse_type, refuse_value
from toolkit.compat.horovod.messages import Kind, Request, TensorSpec
from toolkit.compat.horovod.runtime import ProcessSet, global_process_set

Tensors = Sequence[torch.Tensor]
Grads = tuple[torch.Tensor | None, ...]
_HANDLE = "the handle of an asynchronous operation"
_HANDLE_FIX = "Give what hvd.allreduce_async, or another function whose name ends in _async, has returned"


def poll(handle: Handle) -> bool:
    """Return whether `synchronize` would return at once.

    Raises:
        HorovodTypeError: HOROVOD_ARGUMENT, for what is no handle.
    """
    if not isinstance(handle, Handle):
        refuse_type("handle", handle, _HANDLE, _HANDLE_FIX)
    return handle.poll()


def synchronize(handle: Handle | Callable[[], Any]) -> Any:
    """Wait for an asynchronous operation and return its result.

    Raises:
        HorovodInternalError: HOROVOD_MISMATCH, HOROVOD_JOINED, HOROVOD_RANK_LEFT, HOROVOD_STALLED, HOROVOD_COLLECTIVE,
            HOROVOD_NEGOTIATION.
        HorovodTypeError: HOROVOD_ARGUMENT, for what is no handle.
    """
    if isinstance(handle, Handle):
        return handle.wait()
    if not callable(handle):
        refuse_type("handle", handle, _HANDLE, _HANDLE_FIX)
    return handle()


def submit(
    kind: Kind,
    inputs: Tensors,
    outputs: Tensors = (),
    *,
    name: str | None,
    process_set: ProcessSet,
    single: bool,
    **options: Any,
) -> Handle:
    engine = runtime.engine()
    if not process_set.included():
        refuse_value(
            "process_set",
            f"{kind} is called on rank {runtime.rank()}, which is not in {process_set}",
            "Call it only where process_set.included() is true",
        )
    for tensor in tensors_of(inputs):
        if tensor.is_sparse:
            refuse_value("tensor", f"{kind} of a sparse tensor", "Use sparse_allreduce_async, or tensor.to_dense()")
    request = Request(
        kind=kind,
        name=name or engine.next_name(kind),
        set_id=process_set.process_set_id or 0,
        specs=tuple(map(TensorSpec.of, inputs)),
        **options,
    )
    return engine.submit(request, [one.detach() for one in inputs], [one.detach() for one in outputs], single=single)


def tensors_of(values: Sequence[Any]) -> list[torch.Tensor]:
    """Return tensors as a list.

    Raises:
        HorovodTypeError: HOROVOD_ARGUMENT, if one is no tensor.
    """
    found = list(values)
    for value in found:
        if not isinstance(value, torch.Tensor):
            fix = "Give torch.tensor(...) of numbers; hvd.allgather_object and hvd.broadcast_object send other objects"
            refuse_type("tensor", value, "torch.Tensor", fix)
    return found


def new_like(tensors: Tensors) -> list[torch.Tensor]:
    """Return tensors for results, without values."""
    return [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in tensors_of(tensors)]


def refuse_scalars(kind: str, tensors: Tensors) -> None:
    """Refuse tensors that have no first dimension."""
    if any(tensor.dim() == 0 for tensor in tensors_of(tensors)):
        refuse_value("tensor", f"{kind} of a tensor without dimensions", "Give it one by tensor.reshape(1)")


def join(device: int = -1) -> int:
    """Say that this rank has no more batches, wait until no rank has, and return the one that had the last.

    Until then it contributes zeros to the other ranks' sums and averages; an average still divides by all ranks.

    Args:
        device: Accepted as Horovod has it: the zeros are on the device of the other ranks' tensors.
    """
    engine = runtime.engine()
    last: int = engine.submit(Request(kind="join", name="join")).wait()
    return last


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all ranks of the set have called this."""
    synchronize(submit("barrier", [], name=None, process_set=process_set, single=False))
