"""Random state for dropout on shards: random numbers differ between ranks inside a region and agree outside.

The state inside follows from the state outside and the rank alone, so torch's own generator is all that needs to be saved
and restored: a recomputed layer, or a resumed run, draws the same masks.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

# Offset by which a CUDA generator advances for each region, a multiple of 4 (Philox generates four numbers at a time).
_OFFSET_STEP = 4


class TensorParallelRNG:
    """Random state of one region: call `enter` before random numbers for shards, `leave` before those for replicated tensors.

    Both are idempotent.

    Args:
        tp_group: Ranks that share the layer; their generators agree outside, as after the same seed.
    """

    def __init__(self, tp_group: dist.ProcessGroup) -> None:
        self._rank = tp_group.rank()
        self._outside: _Outside | None = None

    def enter(self, device: torch.device) -> None:
        """Set the default generator of `device` to the state of this rank."""
        if self._outside is None:
            self._outside = _Outside(_generator(device), self._rank)

    def forget(self) -> None:
        """Assume to be outside the region from now on, whatever the state of the generator."""
        self._outside = None

    def leave(self) -> None:
        """Set the generator back to the common state, advanced by one step."""
        if self._outside is not None:
            self._outside.restore()
            self._outside = None


def shard_dropout(parent: nn.Module, *, columns: list[nn.Module], row: nn.Module, tp_group: dist.ProcessGroup) -> None:
    """Make a layer draw different random numbers on each rank, from the output of its columns to the input of its row.

    Args:
        parent: Layer that contains them, such as an attention.
        columns: Its column-parallel layers.
        row: Its row-parallel layer.
        tp_group: Ranks that share the layer.
    """
    region = TensorParallelRNG(tp_group)

    def enter(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        if parent.training:
            region.enter(output.device)

    def leave(module: nn.Module, args: Any) -> None:
        region.leave()

    for column in columns:
        column.register_forward_hook(enter)
    row.register_forward_pre_hook(leave)


class _Outside:
    """Saved common state of a generator while the state of the rank is set."""

    def __init__(self, generator: torch.Generator, rank: int) -> None:
        self._generator = generator
        if generator.device.type == "cuda":  # its state is two numbers, read and set without a device synchronisation
            self._seed, self._offset = generator.initial_seed(), generator.get_offset()
            generator.manual_seed(_mix(self._seed, self._offset, rank))
        else:
            drawn = int(torch.randint(2**62, (), generator=generator))
            self._state = generator.get_state()
            generator.manual_seed(_mix(drawn, 0, rank))

    def restore(self) -> None:
        if self._generator.device.type == "cuda":
            self._generator.manual_seed(self._seed)
            self._generator.set_offset(self._offset + _OFFSET_STEP)
        else:
            self._generator.set_state(self._state)


def _generator(device: torch.device) -> torch.Generator:
    if device.type != "cuda":
        return torch.default_generator
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]


def _mix(*numbers: int) -> int:
    """Return a 64-bit hash of numbers as a seed; neighbouring numbers give unrelated seeds."""
    return int.from_bytes(hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest(), "big")
