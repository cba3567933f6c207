"""A copy of an engine's state in host memory, made at once and written later, while training goes on."""

from __future__ import annotations

import io
import mmap
import pickle
import threading
from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor, nn

from toolkit.checkpoint.archive_writer import content_of

_ALIGNMENT = 64
_PREPARED_AT_ONCE = 64 * 2**20


@final
class HostCopy:
    """Host memory for one copy of a rank's state, kept from one checkpoint to the next.

    Memory that is touched for the first time is an order of magnitude slower, and so is a copy from a card to memory that is
    not page-locked: a thread prepares both, from the start of the run.

    Args:
        device: Device of the state.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._blocks: list[mmap.mmap] = []
        self._used: list[int] = []
        self._preparing: threading.Thread | None = None
        self._copied: dict[tuple[int, int, str], torch.UntypedStorage] = {}

    def prepare(self, num_bytes: int) -> None:
        """Begin to prepare memory for a state of about so many bytes."""
        if not num_bytes:
            return
        self._preparing = threading.Thread(target=self._grow, args=(num_bytes,), name="host copy", daemon=True)
        self._preparing.start()

    def begin(self) -> None:
        """Use the memory anew: what was copied before is written."""
        if self._preparing is not None:
            self._preparing.join()
            self._preparing = None
        self._used = [0] * len(self._blocks)
        self._copied = {}

    def take(self, value: Any) -> Callable[[], Any]:
        """Copy a value that `torch.save` takes; return a function that makes it anew from the copy.

        Tensors of one storage share one in the copy, unless they are contiguous parts of it: of these each is copied alone.
        """
        self._copied = {}  # what was copied for another file may be freed, and its address be another tensor's
        tensors: list[Any] = []

        class Pickler(pickle.Pickler):
            def persistent_id(self, found: Any) -> int | None:
                if type(found) not in (Tensor, nn.Parameter):
                    return None
                tensors.append(found)
                return len(tensors) - 1

        described = io.BytesIO()
        Pickler(described, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
        copies = [self._copy(tensor) for tensor in tensors]

        class Unpickler(pickle.Unpickler):
            def persistent_load(self, index: Any) -> Any:
                return copies[index]

        # Its own pickle, which never left this process.
        return lambda: Unpickler(io.BytesIO(described.getvalue())).load()

    def finish(self) -> None:
        """Wait for the copies from the card."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._copied = {}

    def _copy(self, tensor: Tensor) -> Tensor:
        content, offset = content_of(tensor)
        key = (content.data_ptr(), content.numel(), str(content.device))
        held = self._copied.get(key) if content.numel() else None
        if held is None:
            held = self._copied[key] = self._copy_bytes(content)
        copied = torch.empty(0, dtype=tensor.dtype)
        copied.set_(held, offset, tensor.shape, tensor.stride())
        return nn.Parameter(copied, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copied

    def _copy_bytes(self, content: Tensor) -> torch.UntypedStorage:
        if not content.numel():
            return torch.empty(0, dtype=torch.uint8).untyped_storage()
        copied = self._room(content.numel())
        copied.copy_(content, non_blocking=True)
        return copied.untyped_storage()

    def _room(self, size: int) -> Tensor:
        for index, block in enumerate(self._blocks):
            at = self._used[index]
            if at + size <= len(block):
                self._used[index] = -(-(at + size) // _ALIGNMENT) * _ALIGNMENT
                return torch.frombuffer(block, dtype=torch.uint8, count=size, offset=at)
        self._grow(size)
        return self._room(size)

    def _grow(self, size: int) -> None:
        """Add a block: of large pages, touched, and page-locked for a card."""
        block = mmap.mmap(-1, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            block.madvise(mmap.MADV_HUGEPAGE)
        whole = torch.frombuffer(block, dtype=torch.uint8)
        for at in range(0, len(block), _PREPARED_AT_ONCE):
            whole[at : at + _PREPARED_AT_ONCE].zero_()
        if self._device.type == "cuda":
            # CUDA reports a refusal again at the next call of its thread, so it has one of its own.
            locking = threading.Thread(target=self._lock, args=(whole,), name="host copy")
            locking.start()
            locking.join()
        self._blocks.append(block)
        self._used.append(0)

    def _lock(self, whole: Tensor) -> None:
        """Page-lock a block; a refusal, as by `ulimit -l`, leaves memory to which copies are slower."""
        with torch.cuda.device(self._device):  # a new thread would take the first card, and memory there
            torch.cuda.cudart().cudaHostRegister(whole.data_ptr(), whole.numel(), 0)  # type: ignore[no-untyped-call]
