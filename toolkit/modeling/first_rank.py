"""Actions of one rank for all: the others get its result or its exception, so that none is left waiting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from toolkit.distributed.collectives import all_reduce
from toolkit.errors import ToolkitError


def is_source(group: dist.ProcessGroup | None) -> bool:
    """Return whether this process is the group's first rank."""
    return not dist.is_initialized() or dist.get_rank(group) == 0


def agree(
    action: Callable[[], Any] | None,
    group: dist.ProcessGroup | None,
    *,
    tp_group: dist.ProcessGroup | None = None,
    device: torch.device | None = None,
    keep: bool = False,
) -> Any:
    """Run `action` on the group's first rank; every rank gets its result, or raises its exception.

    Args:
        action: Function to run; `None` on the other ranks.
        group: Ranks that share the result; all if None.
        tp_group: Ranks whose groups run their own actions at the same time: an exception of one is raised on all.
        device: Device of the tensors in the collectives of `tp_group`.
        keep: Whether the result stays on the first rank, while the others get an empty mapping.
    """
    result: Any = {}
    failure: BaseException | None = None
    if action is not None:
        try:
            result = action()
        except Exception as error:  # raised below, on every rank: if one raised alone, the others would wait forever
            failure = error
    if dist.is_initialized() and dist.get_world_size(group) > 1:
        message = [(_portable(failure), None if keep else result)]
        dist.broadcast_object_list(message, group=group, group_src=0)
        if action is None:
            failure, received = message[0]
            result = {} if keep else received
    if tp_group is not None:
        failure = _of_any(failure, tp_group, device)
    if failure is not None:
        raise failure
    return result


def _of_any(
    failure: BaseException | None, group: dist.ProcessGroup, device: torch.device | None
) -> BaseException | None:
    """Return this rank's exception, else that of another rank; exceptions are sent only if there is one."""
    failed = all_reduce(torch.tensor([failure is not None], dtype=torch.int32, device=device), group=group, op="max")
    if not failed.item():
        return None
    failures: list[Any] = [None] * group.size()
    dist.all_gather_object(failures, _portable(failure), group=group)
    return failure or next(other for other in failures if other is not None)


def _portable(failure: BaseException | None) -> BaseException | None:
    return failure if failure is None or isinstance(failure, ToolkitError) else RuntimeError(repr(failure))
