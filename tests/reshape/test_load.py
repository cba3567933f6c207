"""`toolkit train` on other ranks than before: the same steps, from packed rows and from a stream."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from train_jobs import curve, run_toolkit, write_inputs, write_job

TRAIN = {"max_steps": 6, "save_steps": 3}
OTHER: dict[str, dict[str, Any]] = {
    "packed": {"cluster": {"gpus_per_node": 1}, "parallel": {"zero_stage": 0}},
    "streamed": {"cluster": {"gpus_per_node": 4}, "parallel": {"zero_stage": 3, "tensor": 2}},
    "context": {"cluster": {"gpus_per_node": 4}, "parallel": {"context": 2, "zero_stage": 3}},
    "streamed-context": {"cluster": {"gpus_per_node": 4}, "parallel": {"context": 2, "zero_stage": 1}},
    # Two ranks that read what one has begun to read, by another strategy.
    "streamed-apart": {"cluster": {"gpus_per_node": 4}, "parallel": {"strategy": "fsdp2", "zero_stage": None}},
}


@pytest.mark.full
@pytest.mark.gloo
@pytest.mark.parametrize("name", OTHER)
def test_a_run_goes_on_where_other_ranks_stopped(tmp_path: Path, name: str) -> None:
    root = write_inputs(tmp_path, architecture="llama", num_documents=60)
    data = {"streaming": True} if name.startswith("streamed") else {}
    whole = write_job(root, "whole", data=data, train=TRAIN)
    run = run_toolkit(root, "train", whole, "--as-is", "--no-export")
    assert run.returncode == 0, run.stderr
    shutil.copytree(root / "whole" / "checkpoint-3", root / "parts" / "checkpoint-3")
    parts = write_job(root, "parts", data=data, train=TRAIN, **OTHER[name])
    run = run_toolkit(root, "train", parts, "--as-is", "--no-export", "--resume", "auto")
    assert run.returncode == 0, run.stderr
    assert "its state is read weight by weight" in run.stderr
    assert f"resumed from {root / 'parts' / 'checkpoint-3'} at step 3" in run.stderr
    wanted, found = curve(root / "whole"), curve(root / "parts")
    assert set(found) == {4, 5, 6}
    for step, (loss, norm, rate) in found.items():
        assert loss == pytest.approx(wanted[step][0], rel=1e-6)
        assert norm == pytest.approx(wanted[step][1], rel=1e-5)
        assert rate == wanted[step][2]
