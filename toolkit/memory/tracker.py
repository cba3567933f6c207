"""Watches every storage that a fake forward and backward pass allocates and releases."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from toolkit.memory.account import BLOCK_BYTES
from toolkit.memory.events import Recorder


class StorageTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes allocations and releases in a recorder, each under the cause that holds at its birth.

    Storages that exist before, such as parameters, are not counted.

    Source:
        torch/distributed/_tools/mem_tracker.py watches storages through weak references in the same way.
    """

    def __init__(self, recorder: Recorder, cause: Callable[[], str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder
        self._cause = cause
        self._live: dict[int, tuple[weakref.ref[Any], str, int]] = {}

    def ignore(self, tensors: Sequence[torch.Tensor]) -> None:
        """Leaves the storages of `tensors` out."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = storage._cdata
            self._live[key] = (weakref.ref(storage, self._releaser(key)), "", 0)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._watch(leaf)
        return result

    def hand_over(self, tensor: torch.Tensor) -> int:
        """Stops counting a tensor's storage, which an engine takes over; gives its bytes."""
        storage = tensor.untyped_storage()
        entry = self._live.get(storage._cdata)
        if entry is None or not entry[2]:
            return tensor.nbytes
        reference, cause, size = entry
        self._live[storage._cdata] = (reference, cause, 0)
        self._recorder.change(cause, -size)
        return size

    def _watch(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live:
            return
        size = -(-storage.nbytes() // BLOCK_BYTES) * BLOCK_BYTES
        cause = self._cause()
        self._live[key] = (weakref.ref(storage, self._releaser(key)), cause, size)
        if size:
            self._recorder.change(cause, size)

    def _releaser(self, key: int) -> Callable[[Any], None]:
        return lambda _: self._release(key)

    def _release(self, key: int) -> None:
        entry = self._live.pop(key, None)
        if entry is not None and entry[2]:
            self._recorder.change(entry[1], -entry[2])
