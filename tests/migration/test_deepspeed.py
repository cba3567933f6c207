"""A DeepSpeed file's keys mean in a job what they mean to DeepSpeed; published files are wholly accounted for."""

from __future__ import annotations

import pytest
from published_files import ACCEPTED
from readings import outcome, read, values

from toolkit.migration.deepspeed import DEEPSPEED

ZERO = "zero_optimization"


def keys_of(table, keys, *wanted):
    return values(table, keys, *wanted, deepspeed=keys)


@pytest.mark.parametrize(
    ("keys", "target", "value"),
    [
        ({}, "parallel.zero_stage", 0),
        ({}, "train.max_grad_norm", 0),
        ({"gradient_clipping": 0.5}, "train.max_grad_norm", 0.5),
        ({ZERO: {"stage": 2}}, "parallel.zero_stage", 2),
        ({ZERO: {"stage": 2, "cpu_offload": True}}, "parallel.offload", "optimizer-cpu"),
        ({ZERO: {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.3}}}, "parallel.offload", "optimizer-cpu-partial"),
        ({ZERO: {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}}, "parallel.offload", "full-cpu"),
        ({ZERO: {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/x"}, "offload_param": {"device": "nvme", "nvme_path": "/x"}}}, "cluster.nvme_path", "/x"),
        ({"bf16": {"enabled": True}}, "train.precision", "bf16"),
        ({"fp16": {"enabled": True, "loss_scale": 0}}, "deepspeed.fp16.loss_scale", 0),
        ({}, "train.precision", "fp32"),
        ({"optimizer": {"type": "Adam", "params": {"lr": 1e-4}}}, "train.optimizer", "adamw"),
        ({"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}, "train.optimizer", "adamw_torch"),
        ({"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 90, "warmup_num_steps": 5}}}, "train.lr_scheduler_type", "linear"),
        ({"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 90}}}, "train.max_steps", 90),
        ({}, "train.lr_scheduler_type", "constant"),
        ({"data_types": {"grad_accum_dtype": "fp32"}}, "train.gradient_accumulation_dtype", "fp32"),
        ({"tensor_parallel": {"autotp_size": 2}}, "parallel.tensor", 2),
        ({ZERO: {"stage": 3, "sub_group_size": 1e8}}, "deepspeed.zero_optimization.sub_group_size", 1e8),
        ({"comms_logger": {"enabled": True}}, "deepspeed.comms_logger.enabled", True),
    ],
)  # fmt: skip
def test_a_value(keys, target, value):
    assert keys_of(DEEPSPEED, keys, target) == [value]


@pytest.mark.parametrize(
    ("key", "keys"),
    [
        ("optimizer.type", {"optimizer": {"type": "OneBitAdam"}}),
        ("optimizer.type", {"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}}),
        ("scheduler.type", {"scheduler": {"type": "OneCycle"}}),
        (f"{ZERO}.offload_param.device", {ZERO: {"stage": 3, "offload_param": {"device": "cpu"}}}),
        ("hybrid_engine.enabled", {"hybrid_engine": {"enabled": True}}),
        ("elasticity.enabled", {"elasticity": {"enabled": True}}),
        ("frobnicate", {"frobnicate": 1}),
        (f"{ZERO}.overlap_comm", {ZERO: {"stage": 2, "overlap_comm": "maybe"}}),
        ("train_micro_batch_size_per_gpu", {"train_micro_batch_size_per_gpu": 2.5}),
    ],
)
def test_what_no_job_says(key, keys):
    assert outcome(DEEPSPEED, key, keys, deepspeed=keys) == "not carried"


@pytest.mark.parametrize(
    ("key", "keys"),
    [
        ("train_batch_size", {"train_batch_size": "auto"}),
        ("elasticity.enabled", {"elasticity": {"enabled": False}}),
        (f"{ZERO}.allgather_partitions", {ZERO: {"stage": 2, "allgather_partitions": True}}),
        ("fp16.loss_scale", {"fp16": {"enabled": False, "loss_scale": 0}}),
        (
            f"{ZERO}.offload_optimizer.pin_memory",
            {ZERO: {"stage": 2, "offload_optimizer": {"device": "none", "pin_memory": True}}},
        ),
    ],
)
def test_what_a_job_does_without(key, keys):
    assert outcome(DEEPSPEED, key, keys, deepspeed=keys) == "not needed"


@pytest.mark.parametrize("name", ACCEPTED)
def test_published_files_are_wholly_carried(name):
    config = ACCEPTED[name]
    _, entries = read(DEEPSPEED, config, deepspeed=config, trainer=True)
    lost = {key: entry.reason for key, entry in entries.items() if entry.outcome == "not carried"}
    # A job has no profile for parameters without the optimizer.
    assert set(lost) <= {"zero_optimization.offload_param.device"}, lost
