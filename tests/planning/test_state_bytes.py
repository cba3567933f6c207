"""Bytes of model state on the card, on the host, on NVMe and in a checkpoint, from counts of parameters."""

from __future__ import annotations

import pytest
from plan_jobs import gpu_of, job_of, model_of, plan_of

from toolkit.planning.resolve import resolve_with
from toolkit.planning.state_bytes import card_bytes, offloaded_bytes, step_bytes, swapped_bytes, written_bytes
from toolkit.planning.unchecked_plan import trainable_parameters

ONE_B = 1_235_814_400  # parameters of llama-3.2-1b


@pytest.mark.parametrize(
    ("stage", "parallel", "train", "a_parameter"),
    [
        (2, {}, {}, 2 + (2 + 12) / 8),
        (1, {}, {}, 2 + 2 + 12 / 8),
        (1, {}, {"gradient_accumulation_dtype": "fp32"}, 2 + 4 + 12 / 8),
        (2, {}, {"optimizer": "lion"}, 2 + (2 + 8) / 8),
        (2, {"offload": "optimizer-cpu"}, {}, 2 + 2 / 8),
        (1, {"pipeline": 2, "tensor": 2}, {}, (2 + 2) / 4 + 12 / 8),
    ],
)
def test_state_on_a_card(stage, parallel, train, a_parameter):
    job = job_of(model="llama-3.2-1b", ranks=8, parallel=parallel, train=train)
    model = model_of("llama-3.2-1b")
    assert card_bytes(job, model, "bf16", stage=stage) == pytest.approx(a_parameter * ONE_B)


@pytest.mark.parametrize(
    ("precision", "parallel", "train", "a_parameter"),
    [
        ("bf16", {}, {}, 2 + 12 + 2 + 4),
        ("fp32", {}, {}, 4 + 12 + 4 + 4),
        ("bf16", {}, {"gradient_accumulation_dtype": "fp32"}, 2 + 12 + 4),
        ("fp16", {}, {"optimizer": "lion"}, 2 + 8 + 2 + 4),
        ("bf16", {"offload": "optimizer-cpu"}, {}, 2 + 2),
    ],
)
def test_the_step_of_a_single_rank(precision, parallel, train, a_parameter):
    job = job_of(model="llama-3.2-1b", ranks=1, parallel=parallel, train=train)
    assert step_bytes(job, model_of("llama-3.2-1b"), precision) == pytest.approx(a_parameter * ONE_B)


@pytest.mark.parametrize(
    ("offload", "accumulation", "a_parameter"),
    [("optimizer-cpu", 1, 16), ("optimizer-cpu", 2, 20), ("full-cpu", 1, 20), ("none", 2, None)],
)
def test_state_on_the_host(offload, accumulation, a_parameter):
    train = {"gradient_accumulation_steps": accumulation}
    plan = plan_of(model="llama-3.2-1b", host_memory_gib=2000, train=train, parallel={"offload": offload})
    assert offloaded_bytes(plan) == (None if a_parameter is None else a_parameter * ONE_B)


def test_frozen_parameters_go_to_the_host_in_the_training_precision():
    plan = plan_of(model="llama-3.2-1b", train={"method": "lora"}, parallel={"offload": "full-cpu"})
    trained = trainable_parameters(plan.job, plan.model)
    assert offloaded_bytes(plan) == 20 * trained + 2 * (ONE_B - trained)


def test_state_in_swap_files():
    swaps = {"nvme_path": "/mnt/nvme", "ranks": 8, "model": "llama-3.2-1b"}
    assert swapped_bytes(plan_of(**swaps, parallel={"offload": "optimizer-nvme"})) == 16 * ONE_B
    assert swapped_bytes(plan_of(**swaps, parallel={"offload": "full-nvme"})) == 18 * ONE_B
    assert swapped_bytes(plan_of(**swaps, train={"method": "lora"}, parallel={"offload": "full-nvme"})) == 2 * ONE_B


@pytest.mark.parametrize(
    ("parallel", "train", "a_parameter"),
    [
        ({"zero_stage": 2}, {}, 2 + 12),
        ({"zero_stage": 3}, {}, 12),
        ({"zero_stage": 0}, {"precision": "fp32"}, 4 + 8),
        ({"zero_stage": 2}, {"precision": "fp32"}, 4 + 12),
        ({"strategy": "ddp"}, {}, 2 + 4),
        ({"strategy": "fsdp2"}, {}, 12),
    ],
)
def test_state_in_a_checkpoint(parallel, train, a_parameter):
    job = job_of(model="llama-3.2-1b", parallel=parallel, train=train)
    plan = resolve_with(job, model=model_of("llama-3.2-1b"), gpu=gpu_of(job.cluster.gpu), to_run=False)
    assert written_bytes(plan, total=1000, trainable=1000) == 1000 * a_parameter
