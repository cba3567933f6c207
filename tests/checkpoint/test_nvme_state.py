"""The index of swap files, and the files that it names, as whoever made a checkpoint may have written them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from toolkit.checkpoint.nvme_state import INDEX, SWAPPED, SubGroup, master_weights, read_sub_groups

GROUP = {"file": "0_3.tensor.swp", "numel": 3}


def _write(folder: Path, groups: Any) -> Path:
    (folder / SWAPPED / "rank00").mkdir(parents=True, exist_ok=True)
    (folder / SWAPPED / INDEX).write_text(groups if isinstance(groups, str) else json.dumps(groups))
    return folder


def test_it_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert read_sub_groups(tmp_path) is None
    groups = read_sub_groups(_write(tmp_path, [GROUP, {"file": None, "numel": 2}]))
    assert groups == [SubGroup(**GROUP), SubGroup(file=None, numel=2)]
    (tmp_path / SWAPPED / "rank00" / "0_3.tensor.swp").write_bytes(torch.arange(4.0).numpy().tobytes())
    held = [torch.empty(0), torch.ones(2)]
    assert [part.tolist() for part in master_weights(tmp_path, 0, held, groups)] == [[0.0, 1.0, 2.0], [1.0, 1.0]]


@pytest.mark.parametrize(
    "wrong",
    [
        *("[", "{}", "[3]", "[" * 10_000),
        [GROUP | {"file": "../../../elsewhere.tensor.swp"}],
        [GROUP | {"file": "/dev/zero"}],
        [GROUP | {"numel": -1}],
        [GROUP | {"numel": 1e300}],
        [GROUP | {"more": 1}],
        [{"file": None}],
    ],
)
def test_what_is_no_index_is_a_value_error(tmp_path: Path, wrong: Any) -> None:
    with pytest.raises(ValueError, match=INDEX):
        read_sub_groups(_write(tmp_path, wrong))


def test_a_swap_file_lies_in_the_checkpoint(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(bytes(12))
    folder = _write(tmp_path / "tag", [GROUP])
    (folder / SWAPPED / "rank00" / "0_3.tensor.swp").symlink_to(outside)
    with pytest.raises(OSError, match="points outside the folder"):
        list(master_weights(folder, 0, [torch.empty(0)], [SubGroup(**GROUP)]))
