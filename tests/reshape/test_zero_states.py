"""The optimizer's states of stage 0, in the files of wrappers that only a card has."""

from __future__ import annotations

from pathlib import Path

import torch

from toolkit.exporter.zero_reader import ZeroCheckpoint
from toolkit.reshape.zero_states import MASTER, zero_states

SHAPES = {"a.weight": (2, 3), "b.weight": (4,), "c.bias": (5,)}


def _saved(folder: Path, optimizer: dict[str, object]) -> ZeroCheckpoint:
    module = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in SHAPES.items()}
    state = {"module": module, "optimizer": optimizer, "dp_world_size": 1, "param_shapes": None}
    torch.save(state, folder / "mp_rank_00_model_states.pt")
    return ZeroCheckpoint(folder)


def test_flat_groups_are_cut_into_the_weights_of_each_group_in_order(tmp_path: Path) -> None:
    flats = [torch.arange(10.0), torch.arange(5.0) + 100]
    moments = {number: {"step": number + 3, "exp_avg": flat + 1000} for number, flat in enumerate(flats)}
    files = _saved(tmp_path, {"fp32_groups_flat": flats, "optimizer_state_dict": {"state": moments}})
    found = zero_states(files, [["a.weight", "b.weight"], ["c.bias"]])
    read = {kind: {name: part.read(name, torch.float32) for name in SHAPES} for kind, part in found.parts.items()}
    assert set(read) == {MASTER, "exp_avg"}
    assert torch.equal(read[MASTER]["a.weight"], torch.arange(6.0).view(2, 3))
    assert torch.equal(read[MASTER]["b.weight"], torch.arange(4.0) + 6)
    assert torch.equal(read["exp_avg"]["c.bias"], torch.arange(5.0) + 1100)
    assert found.steps == {"a.weight": 3, "b.weight": 3, "c.bias": 4}
    assert torch.equal(found.parts["exp_avg"].read_part("a.weight", 2, 5, torch.float32), torch.arange(3.0) + 1002)


def test_states_that_lie_in_another_order_are_read_again_and_again(tmp_path: Path) -> None:
    """A copy of them is no part of a file, whose pages are given back once they are read."""
    large = torch.arange(2.0 * 40_000).view(2, 40_000)
    state = {0: {"step": torch.tensor(2.0), "exp_avg": large.t().contiguous().t()}}
    module = {"a.weight": torch.zeros(2, 40_000, dtype=torch.bfloat16)}
    saved = {"fp32_groups": [[large.clone()]], "optimizer_state_dict": {"state": state}}
    torch.save(
        {"module": module, "optimizer": saved, "dp_world_size": 1, "param_shapes": None},
        tmp_path / "mp_rank_00_model_states.pt",
    )
    found = zero_states(ZeroCheckpoint(tmp_path), [["a.weight"]])
    for _ in range(2):
        assert torch.equal(found.parts["exp_avg"].read("a.weight", torch.float32), large)
        assert torch.equal(found.parts[MASTER].read("a.weight", torch.float32), large)
