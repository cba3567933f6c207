"""What a run keeps on disk: checkpoints at once, and the export."""

from __future__ import annotations

import pytest
from plan_jobs import plan_of

from toolkit.planning.checkpoint_size import disk_use, foreseen_disk_use

ONE_B = 1_235_814_400  # parameters of llama-3.2-1b


@pytest.mark.parametrize(
    ("train", "at_once"),
    [
        ({}, 3),  # the two that stay, and one that is written
        ({"save_total_limit": 5}, 6),
        ({"max_steps": 100, "save_steps": 10}, 3),
        ({"max_steps": 100, "save_steps": 500}, 1),
        ({"max_steps": 100, "save_steps": 0.6, "save_total_limit": 5}, 2),
        ({"num_train_epochs": 3, "save_steps": 0.4, "save_total_limit": 5}, 3),
        ({"max_steps": 100, "save_steps": 60, "save_total_limit": 5}, 2),
    ],
)
def test_checkpoints_that_lie_there_at_once(train, at_once):
    use = foreseen_disk_use(plan_of(model="llama-3.2-1b", train=train))
    assert use.num_checkpoints == at_once
    assert use.total_bytes == at_once * use.checkpoint_bytes + use.export_bytes
    assert use.to_dict()["total_bytes"] == use.total_bytes


def test_all_weights_are_exported_in_the_training_precision():
    plan = plan_of(model="llama-3.2-1b", parallel={"zero_stage": 2})
    use = foreseen_disk_use(plan)
    assert use.export_bytes == 2 * ONE_B
    assert use.checkpoint_bytes == disk_use(plan, total=ONE_B, trainable=ONE_B).checkpoint_bytes == 14 * ONE_B
    assert foreseen_disk_use(plan_of(model="llama-3.2-1b", train={"precision": "fp32"})).export_bytes == 4 * ONE_B


def test_adapters_are_exported_alone():
    plan = plan_of(model="llama-3.2-1b", train={"method": "lora"})
    use = foreseen_disk_use(plan)
    assert use.export_bytes < 0.02 * 2 * ONE_B
    assert use == disk_use(plan, total=ONE_B + use.export_bytes // 2, trainable=use.export_bytes // 2)


def test_each_tensor_rank_writes_its_part():
    one, two = (plan_of(model="llama-3.2-1b", parallel={"zero_stage": 2, "tensor": size}) for size in (1, 2))
    assert foreseen_disk_use(two) == foreseen_disk_use(one)
    # Counted on one rank, as a run does: what both ranks hold is in both ranks' files.
    held = ONE_B // 2 + 1000
    assert disk_use(two, total=held, trainable=held).checkpoint_bytes == 14 * (ONE_B + 2000)
