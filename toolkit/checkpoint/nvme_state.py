"""Optimizer state in swap files: an index of them for the export, and the rest of the state, which DeepSpeed forgets.

A checkpoint of an NVMe profile has, below its tag, `offloaded_tensors/rankRR/`: one file of raw fp32 values for the
master weights of each sub-group (`FIRST_LAST.tensor.swp`, named by parameter ids) and one for each moment. Sub-groups
below DeepSpeed's smallest transfer (1 MiB) stay in memory and so in `*_optim_states.pt`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from torch import Tensor

from toolkit.checkpoint.manifest import damaged
from toolkit.checkpoint.pickles import read_pickle
from toolkit.distributed import deepspeed_private
from toolkit.errors import CheckpointError
from toolkit.io import MAX_TEXT_BYTES, plain_file, read_plain, write_json

SWAPPED = "offloaded_tensors"
INDEX = "sub_groups.json"


class SubGroup(BaseModel):
    """Master weights that a rank updates at a time.

    Args:
        file: Swap file in a rank's folder; None if they are in its `*_optim_states.pt`.
        numel: Elements of a rank's share, the same on every rank; the file is longer, up to a whole disk block.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    file: Annotated[str, Field(pattern=r"^\w+\.tensor\.swp$")] | None
    numel: Annotated[int, Field(ge=0, le=2**48)]


_INDEX = TypeAdapter(list[SubGroup])


def finish_swapped(engine: Any, tag_folder: Path, *, rank: int) -> None:
    """Complete what the engine saved: rank 0 writes the number of master weights in each file, which its padding hides.

    Each rank deletes swap files of other engines, which shared the folder and were copied too.

    Source:
        deepspeed runtime/swap_tensor/optimizer_utils.py SwapTensorContext, OptimizerSwapper._io_aligned_numel.
    """
    groups = [
        {"file": group.file if group.swapped else None, "numel": group.numel}
        for group in deepspeed_private.master_weights(engine.optimizer)
    ]
    ours = {group["file"] for group in groups}
    for path in (tag_folder / SWAPPED / f"rank{rank:02d}").glob("*.swp"):
        if path.name.rpartition("-")[2] not in ours:
            path.unlink()
    if rank == 0:
        write_json(tag_folder / SWAPPED / INDEX, groups, sync=True)


def read_sub_groups(tag_folder: Path) -> list[SubGroup] | None:
    """Read the index that `finish_swapped` wrote; None if there is none.

    Raises:
        OSError, ValueError: The index cannot be read, or was changed.
    """
    if not (tag_folder / SWAPPED / INDEX).exists():
        return None
    content = read_plain(tag_folder, f"{SWAPPED}/{INDEX}", max_bytes=MAX_TEXT_BYTES)
    try:
        return _INDEX.validate_json(content, strict=True)
    except ValidationError as error:
        raise ValueError(f"{INDEX}: {error.errors(include_url=False)[0]['msg']}") from None


def master_weights(tag_folder: Path, rank: int, flats: list[Tensor], groups: list[SubGroup]) -> Iterator[Tensor]:
    """Yield a rank's master weights, sub-group by sub-group; those of swap files are mapped, not read.

    Args:
        flats: Flat tensors of the rank's `*_optim_states.pt`; empty for each sub-group that was swapped.

    Raises:
        ValueError: The number of sub-groups differs.
        OSError: A swap file is missing.
    """
    for flat, group in zip(flats, groups, strict=True):
        if group.file is None:
            yield flat
        else:
            path = plain_file(tag_folder, f"{SWAPPED}/rank{rank:02d}/{group.file}")
            if path.stat().st_size < 4 * group.numel:
                raise OSError(f"{path} is cut short")
            yield torch.from_file(str(path), shared=False, size=group.numel, dtype=torch.float32)


def restore_unswapped(engine: Any, folder: Path, tag: str) -> None:
    """Restore the state that `load_checkpoint` does not; call it before that, on an engine that has not stepped.

    With an NVMe optimizer DeepSpeed copies the swap files back and opens no `*_optim_states.pt`. Without this it would lose: master
    weights and moments of sub-groups that are not swapped, the optimizer's step count, the loss scale, and the moments
    of all others, since a file is read only for a state that the optimizer already has.

    Source:
        deepspeed 0.19.8 runtime/engine.py load_checkpoint, runtime/zero/stage3.py _rigid_load_state_dict;
        runtime/swap_tensor/optimizer_utils.py OptimizerSwapper._update_param_state_info.
    """
    optimizer = engine.optimizer
    name = deepspeed_private.zero_file(engine, folder, tag).relative_to(folder).as_posix()
    try:
        deepspeed_private.rename_swap_files(optimizer, [group.file for group in read_sub_groups(folder / tag) or []])
        saved = read_pickle(folder, name)["optimizer_state_dict"]
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(damaged(folder, name, f"cannot be restored: {error}")) from None
    deepspeed_private.load_optimizer_state(optimizer, saved)
    for group, flat in zip(deepspeed_private.master_weights(optimizer), saved["fp32_flat_groups"], strict=True):
        if not group.swapped:
            group.flat.data.copy_(flat.data)
            continue
        state = optimizer.optimizer.state.get(group.flat, {})
        for moment, value in state.items():
            if isinstance(value, Tensor) and value.numel() == 0:
                # Its size alone makes DeepSpeed read the file; it takes no memory.
                state[moment] = torch.zeros(1, dtype=group.flat.dtype).expand(group.numel)
