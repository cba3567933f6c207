"""What training says of a job before it starts."""

from __future__ import annotations

import os
import shutil

import toolkit as tk
from toolkit.planning.checkpoint_size import foreseen_disk_use
from toolkit.trainer.checks import space_warnings


def plan_of(model, folder, **train):
    cluster = tk.Cluster(gpu="h100-sxm-80gb", gpus_per_node=8, nodes=16)
    return tk.resolve(tk.Job(model=model, cluster=cluster, train=tk.Train(output_dir=folder / "run", **train)))


def test_a_disk_that_is_too_small_for_all_that_the_run_keeps(tmp_path):
    plan = plan_of("llama-3.1-405b", tmp_path, save_total_limit=1000)  # five PB
    (line,) = space_warnings(plan)
    assert "1001 × 4.4" in line
    assert "save_total_limit" in line
    assert list(space_warnings(plan_of("quickstart-llama", tmp_path))) == []


def test_what_an_earlier_part_of_the_run_left_there_is_counted_as_room(tmp_path):
    free, limit = shutil.disk_usage(tmp_path).free, 10
    one = foreseen_disk_use(plan_of("llama-3.1-8b", tmp_path)).checkpoint_bytes
    limit = free // one + 1
    plan = plan_of("llama-3.1-8b", tmp_path, save_total_limit=limit)
    assert len(list(space_warnings(plan))) == 1
    folder = tmp_path / "run" / "checkpoint-5"
    folder.mkdir(parents=True)
    with (folder / "state.bin").open("wb") as file:
        os.truncate(file.fileno(), 4 * one)  # a hole: it takes no room, and has the size
    assert list(space_warnings(plan)) == []
