"""What DeepSpeed's optimizers have saved for each weight: its fp32 copy and their states of it, by the names of the model.

The flat tensors of a rank's files are mapped, and each weight's part of them is a view: nothing is read before it is used.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from toolkit.exporter.zero_reader import StoredTensor, ZeroCheckpoint, as_damage

MASTER, STEP = "master", "step"


@dataclass(slots=True)
class PartOfState:
    """One kind of number of each trained weight, in fp32 say its first moment; whole tensors of the weights' shapes.

    Args:
        checkpoint: Files of the model-parallel rank.
        pieces: Consecutive pieces of each weight's numbers, the last one perhaps padded.
    """

    checkpoint: ZeroCheckpoint
    pieces: Mapping[str, list[Tensor]]
    tensors: dict[str, StoredTensor] = field(init=False)

    def __post_init__(self) -> None:
        self.tensors = {
            name: StoredTensor(shape=self.checkpoint.tensors[name].shape, dtype=pieces[0].dtype, owner=name)
            for name, pieces in self.pieces.items()
        }

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return one whole tensor.

        Raises:
            CheckpointError: EXPORT_DAMAGED, if its pieces do not make it whole.
        """
        return self.checkpoint.join(name, self.pieces[name], dtype)

    def read_part(self, name: str, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Return elements [start, stop) of a tensor, row by row, and read no others; raises as `read`."""
        return self.checkpoint.join_part(name, self.pieces[name], start, stop, dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroStates:
    """All that an optimizer has saved for the weights of one model-parallel rank.

    Args:
        parts: Numbers of the weights' shapes, by kind: `master`, and each state of the optimizer.
        steps: Steps that the optimizer has done on each weight.
    """

    parts: Mapping[str, PartOfState]
    steps: Mapping[str, int]


def zero_states(checkpoint: ZeroCheckpoint, groups: Sequence[Sequence[str]]) -> ZeroStates:
    """Return what the optimizer's files of a model-parallel rank have.

    Args:
        checkpoint: The rank's files.
        groups: Names of the trained weights by parameter group, in the optimizer's order, which stage 0 does not save.

    Raises:
        CheckpointError: EXPORT_DAMAGED.
    """
    found: dict[str, dict[str, list[Tensor]]] = {MASTER: {}}
    steps: dict[str, int] = {}
    with as_damage(checkpoint.folder):
        for name, master, state in _pieces(checkpoint, groups):
            found[MASTER].setdefault(name, []).append(master)
            if STEP in state:
                steps[name] = int(state[STEP])
            for key, value in state.items():
                if isinstance(value, Tensor) and value.dim():
                    found.setdefault(key, {}).setdefault(name, []).append(value)
        return ZeroStates(parts={key: PartOfState(checkpoint, pieces) for key, pieces in found.items()}, steps=steps)


_Piece = tuple[str, Tensor, Mapping[str, Any]]  # of a weight: its name, its fp32 copy, the optimizer's states


def _pieces(checkpoint: ZeroCheckpoint, groups: Sequence[Sequence[str]]) -> Iterator[_Piece]:
    """Yield the pieces of each weight in their order."""
    if checkpoint.is_partitioned:
        yield from _of_stage_3(checkpoint)
    elif states := checkpoint.optimizer_states():
        for state in states:
            yield from _of_stage_1_and_2(state)
    else:
        yield from _of_stage_0(checkpoint, [name for group in groups for name in group])


def _of_stage_1_and_2(saved: Mapping[str, Any]) -> Iterator[_Piece]:
    """Yield what one rank has: a slice of each parameter group, in which the addresses of weights are saved.

    Source:
        deepspeed runtime/zero/stage_1_and_2.py and runtime/bf16_optimizer.py: state_dict.
    """
    states = saved["base_optimizer_state"]["state"]
    groups = zip(saved["param_slice_mappings"], saved["single_partition_of_fp32_groups"], strict=True)
    for number, (addresses, flat) in enumerate(groups):
        for name, address in addresses.items():
            yield _cut(name, flat, states.get(number, {}), address.start, address.start + address.numel)


def _of_stage_3(checkpoint: ZeroCheckpoint) -> Iterator[_Piece]:
    """Yield the parts of each weight by rank: those of all weights follow each other through a rank's sub-groups.

    Source:
        deepspeed runtime/zero/stage3.py _rigid_state_dict; utils/zero_to_fp32.py _zero3_merge_trainable_params.
    """
    ranks = [
        (saved["fp32_flat_groups"], saved["optimizer_state_dict"]["state"]) for saved in checkpoint.optimizer_states()
    ]
    start = 0
    for name, shape in checkpoint.trained_shapes():
        length = -(-math.prod(shape) // len(ranks))
        for flats, states in ranks:
            end = 0
            for number, flat in enumerate(flats):
                begin, end = end, end + flat.numel()
                low, high = max(start, begin), min(start + length, end)
                if low < high:
                    yield _cut(name, flat, states.get(number, {}), low - begin, high - begin)
        start += length


def _of_stage_0(checkpoint: ZeroCheckpoint, names: Sequence[str]) -> Iterator[_Piece]:
    """Yield whole weights: in fp32 the model's own, in 16 bit copies, each alone or flat by parameter group.

    Source:
        deepspeed runtime/fp16/fused_optimizer.py and unfused_optimizer.py: state_dict; torch optim/optimizer.py state_dict.
    """
    saved = checkpoint.engine_state["optimizer"]
    inner = saved.get("optimizer_state_dict", saved)
    states = inner["state"]
    if "fp32_groups_flat" in saved:
        left = iter(names)
        for number, flat in enumerate(saved["fp32_groups_flat"]):
            at = 0
            while at < flat.numel():
                name = next(left)
                stop = at + math.prod(checkpoint.tensors[name].shape)
                yield _cut(name, flat, states.get(number, {}), at, stop)
                at = stop
        return
    copies = [copy for group in saved.get("fp32_groups", ()) for copy in group]
    masters = copies or [checkpoint.module_tensor(name) for name in names]
    for number, (name, master) in enumerate(zip(names, masters, strict=True)):
        flat_states = {
            key: _flat(value) if isinstance(value, Tensor) and value.dim() else value
            for key, value in states.get(number, {}).items()
        }
        yield _cut(name, _flat(master), flat_states, 0, master.numel())


def _flat(mapped: Tensor) -> Tensor:
    """Return a mapped tensor's elements row by row; where that is a copy, with gaps: whoever reads contiguous ones gives their pages back."""
    if mapped.is_contiguous():
        return mapped.view(-1)
    kept = mapped.new_empty(mapped.numel(), 2)[:, 0]
    return kept.copy_(mapped.reshape(-1))


def _cut(name: str, flat: Tensor, state: Mapping[str, Any], start: int, stop: int) -> _Piece:
    """Return a piece of a weight; a scalar is that of the whole flat tensor, such as its count of steps."""
    cut = {
        key: value[start:stop] if isinstance(value, Tensor) and value.dim() else value for key, value in state.items()
    }
    return name, flat[start:stop], cut
