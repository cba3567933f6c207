"""Dropout on shards: random numbers that differ between the ranks inside a region and agree outside.

The state inside follows from the state outside and the rank alone. So there is nothing to save or restore beside torch's
own generator: a checkpointed layer that is run again, or a resumed run, draws the same masks.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

# Numbers that a CUDA generator steps over for each region, a multiple of 4 (Philox gives four at a time).
_OFFSET_STEP = 4


class TensorParallelRNG:
    """The region of one layer: `enter` before what is drawn for shards, `leave` before what is drawn for all.

    Both may be called again in the state to which they lead, and do nothing then.

    Args:
        tp_group: Ranks that share the layer; their generators agree outside, as after one seed.
    """

    def __init__(self, tp_group: dist.ProcessGroup) -> None:
        self._rank = tp_group.rank()
        self._outside: _Outside | None = None

    def enter(self, device: torch.device) -> None:
        """Sets the default generator of `device` to this rank's own state."""
        if self._outside is None:
            self._outside = _Outside(_generator(device), self._rank)

    def forget(self) -> None:
        """Counts as outside from now on, in whatever state the generator is."""
        self._outside = None

    def leave(self) -> None:
        """Sets the generator back to the common state, one step on."""
        if self._outside is not None:
            self._outside.restore()
            self._outside = None


def shard_dropout(parent: nn.Module, *, columns: list[nn.Module], row: nn.Module, tp_group: dist.ProcessGroup) -> None:
    """Makes a layer draw apart on each rank from the output of its columns to the input of its row.

    Args:
        parent: Layer that holds them, such as an attention.
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
    """The common state of a generator while the rank's own is set."""

    def __init__(self, generator: torch.Generator, rank: int) -> None:
        self._generator = generator
        if generator.device.type == "cuda":  # its state is two numbers, read and set without waiting for the card
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
    """Return a seed of 64 bits that has nothing in common with those of neighbouring numbers."""
    return int.from_bytes(hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest(), "big")
