"""A tracker of every storage that a forward and backward pass on fake tensors allocates and releases."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves

from toolkit.memory.kernels.device import HOPPER, Device
from toolkit.memory.kernels.operations import OperationRecorder
from toolkit.memory.kernels.temporary import temporary_bytes
from toolkit.memory.trace.events import LayerRef, Recorder, Release, in_blocks
from toolkit.memory.trace.fake_ops import FakeOpRule
from toolkit.memory.trace.fake_results import FakeResults

_DEVICE = torch.ops.prim.device.default
_is_wrapper = functools.cache(is_traceable_wrapper_subclass_type)


@dataclass(slots=True)
class _Storage:
    watch: weakref.ref[Any]
    cause: str
    size: int
    birth: LayerRef


class StorageTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that records allocations and releases, each under its cause at allocation.

    Storages that existed before, such as parameters, are not counted.

    Args:
        recorder: Recorder of the events.
        cause: Function that returns the current cause of allocations.
        owner: Function that returns the running layer.
        answers: Rules for operations that read values, in order; fake tensors run an operation without one.
        operations: Recorder of what is computed; None to record nothing.
        device: Card, which decides what kernels allocate while they run.

    Source:
        torch/distributed/_tools/mem_tracker.py watches storages through weak references in the same way.
    """

    def __init__(
        self,
        recorder: Recorder,
        *,
        cause: Callable[[], str],
        owner: Callable[[], LayerRef],
        answers: Sequence[FakeOpRule] = (),
        operations: OperationRecorder | None = None,
        device: Device = HOPPER,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder
        self._cause = cause
        self._owner = owner
        self._answers = answers
        self._operations = operations
        self._device = device
        self._results = FakeResults()
        self._live: dict[int, _Storage] = {}
        self._on_host = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, since nothing is compiled here: torch need not guard each of thousands of calls."""
        return False

    def ignore(self, tensors: Sequence[torch.Tensor]) -> None:
        """Exclude the storages of `tensors` from the count."""
        for tensor in tensors:
            self._note(tensor.untyped_storage(), cause="", size=0)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function is _DEVICE and type(args[0]) is FakeTensor:
            return args[0].fake_device  # more than half of all calls
        if any(map(_is_wrapper, types)):
            return NotImplemented  # float8 with its scale: its operations on the two are dispatched here separately
        result = NotImplemented
        for answer in self._answers:
            if result is NotImplemented:
                result = answer(function, args, kwargs or {})
        if result is NotImplemented:
            result = self._results.run(function, args, kwargs or {})
        if isinstance(result, torch.Tensor):
            self._watch(result)
        else:
            for leaf in tree_leaves(result):
                if isinstance(leaf, torch.Tensor):
                    self._watch(leaf)
        if not self._on_host and (sizes := temporary_bytes(function, args, kwargs or {}, device=self._device)):
            self._pass_through(sum(map(in_blocks, sizes)))
        if self._operations is not None:
            self._operations.dispatched(function, args, kwargs, result)
        return result

    def _pass_through(self, size: int) -> None:
        """Record what a call allocates in addition to its result and releases before it returns."""
        cause = self._cause()
        self._recorder.change(cause, size)
        self._recorder.change(cause, -size)

    def hand_over(self, tensor: torch.Tensor) -> int:
        """Stop counting a tensor's storage, which an engine takes over, and return its bytes."""
        entry = self._live.get(tensor.untyped_storage()._cdata)
        if entry is None or not entry.size:
            return tensor.nbytes
        size = entry.size
        self._subtract(entry)
        entry.size = 0
        return size

    @contextlib.contextmanager
    def host(self) -> Iterator[None]:
        """Exclude what a `with` block allocates, which is in host memory."""
        self._on_host = True
        yield
        self._on_host = False

    @property
    def live_bytes(self) -> int:
        """Bytes counted and not yet released."""
        return sum(entry.size for entry in self._live.values())

    def _watch(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self._live:
            return
        size = 0 if self._on_host else in_blocks(storage.nbytes())
        cause = self._cause()
        self._note(storage, cause=cause, size=size)
        if size:
            self._recorder.change(cause, size)

    def _note(self, storage: Any, *, cause: str, size: int) -> None:
        key = storage._cdata
        self._live[key] = _Storage(weakref.ref(storage, lambda _: self._release(key)), cause, size, self._owner())

    def _release(self, key: int) -> None:
        entry = self._live.pop(key, None)
        if entry is not None and entry.size:
            self._subtract(entry)

    def _subtract(self, entry: _Storage) -> None:
        """Record a release; one that does not repeat in each layer that its segment represents is recorded separately."""
        now = self._owner()
        if _is_local(entry.birth, now):
            self._recorder.change(entry.cause, -entry.size)
        else:
            self._recorder.note(Release(entry.cause, entry.size, entry.birth))


def _is_local(birth: LayerRef, now: LayerRef) -> bool:
    """Return whether each layer releases what it, or its equal neighbour, has allocated."""
    if birth is None or now is None:
        return birth is now
    return birth[0] == now[0] and abs(birth[1] - now[1]) <= 1
