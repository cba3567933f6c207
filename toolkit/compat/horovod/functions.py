"""Parameters, optimizer states and Python objects from one rank to the others."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from toolkit.compat.horovod import runtime
from toolkit.compat.horovod.errors import NotBuiltError, not_built, refuse_value
from toolkit.compat.horovod.exchanges import allgather_async, broadcast_, broadcast_async_
from toolkit.compat.horovod.messages import TensorSpec
from toolkit.compat.horovod.runtime import ProcessSet, global_process_set
from toolkit.compat.horovod.submission import synchronize

# Elements of a tensor on the host that travels with the structure of an optimizer's state, such as a step count.
_SMALL = 16


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[Any], root_rank: int, process_set: ProcessSet = global_process_set
) -> None:
    """Overwrite parameters, or all tensors of a state_dict, with those of global rank `root_rank`.

    Args:
        params: A `state_dict()`, `named_parameters()` or `parameters()`; entries that are None are left out.
    """
    named = _named(params)
    if others := [name for name, value in named if not isinstance(value, torch.Tensor)]:
        refuse_value("params", f"{', '.join(map(str, others))} is not a tensor", "Send it by broadcast_object")
    handles = [
        broadcast_async_(tensor, root_rank, None if name is None else f"parameter.{name}", process_set)
        for name, tensor in named
    ]
    for handle in handles:
        synchronize(handle)


def _named(params: Mapping[str, Any] | Iterable[Any]) -> list[tuple[str | None, Any]]:
    if isinstance(params, Mapping):
        pairs: Iterable[Any] = sorted(params.items())
    elif isinstance(params, Iterable) and not isinstance(params, torch.Tensor | str):
        pairs = (item if isinstance(item, tuple) else (None, item) for item in params)
    else:
        refuse_value(
            "params", f"params is a {type(params).__name__}", "Give model.state_dict() or model.named_parameters()"
        )
    return [(name, value) for name, value in pairs if value is not None]


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: torch.nn.Module | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Overwrite an optimizer's state and options with those of global rank `root_rank`, also where a rank has no state yet.

    Args:
        model: Accepted as Horovod has it; the parameters of the optimizer are enough.

    Raises:
        NotBuiltError: HOROVOD_NOT_BUILT, for LBFGS.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise NotBuiltError(
            not_built("broadcast_optimizer_state of LBFGS", "Send optimizer.state_dict() by broadcast_object")
        )
    is_root = runtime.rank() == root_rank
    own = optimizer.state_dict()
    tensors: list[torch.Tensor] = []
    structure = broadcast_object(_taken(own, tensors) if is_root else None, root_rank, "optimizer", process_set)
    if is_root:
        _send(tensors, root_rank, process_set)
        return
    filled = _filled(structure, tensors)
    _send(tensors, root_rank, process_set)
    optimizer.load_state_dict(filled)


def _send(tensors: list[torch.Tensor], root_rank: int, process_set: ProcessSet) -> None:
    broadcast_parameters([(f"optimizer.{index}", one) for index, one in enumerate(tensors)], root_rank, process_set)


def _taken(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Return a copy of nested dicts and sequences in which a description stands for each large tensor, which is listed."""
    if isinstance(value, torch.Tensor):
        if value.device.type == "cpu" and value.numel() <= _SMALL:
            return value
        tensors.append(value)
        return TensorSpec.of(value)
    return _mapped(value, lambda item: _taken(item, tensors))


def _filled(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Return a copy in which a new tensor stands for each description, and list the tensors."""
    if isinstance(value, TensorSpec):
        tensors.append(torch.empty(value.shape, dtype=value.dtype, device=value.device))
        return tensors[-1]
    return _mapped(value, lambda item: _filled(item, tensors))


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    if type(value) is dict:
        return {key: change(item) for key, item in value.items()}
    return type(value)(map(change, value)) if type(value) in (list, tuple) else value


def broadcast_object(
    obj: Any = None, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the object of global rank `root_rank`, which must pickle."""
    name = name or runtime.engine().next_name("broadcast_object")
    is_root = runtime.rank() == root_rank
    data = _bytes(obj) if is_root else torch.empty(0, dtype=torch.uint8)
    length = broadcast_(torch.tensor([data.numel()]), root_rank, f"{name}.length", process_set)
    if not is_root:
        data = torch.empty(int(length), dtype=torch.uint8)
    broadcast_(data, root_rank, f"{name}.data", process_set)
    return obj if is_root else _object(data)


def broadcast_object_fn(
    root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Callable[[Any], Any]:
    """Return `broadcast_object` as a function of the object alone."""
    return lambda obj: broadcast_object(obj, root_rank, name, process_set)


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Return the objects of all ranks, which must pickle, in the order of the ranks."""
    name = name or runtime.engine().next_name("allgather_object")
    data = _bytes(obj)
    lengths = allgather_async(torch.tensor([data.numel()]), f"{name}.length", process_set)
    joined = synchronize(allgather_async(data, f"{name}.data", process_set))
    return [_object(piece) for piece in joined.split(synchronize(lengths).tolist())]


def _bytes(obj: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8)


def _object(data: torch.Tensor) -> Any:
    return pickle.loads(data.numpy().tobytes())
