import json

import pytest
from plan_jobs import CPU, TOY, V100, gpu_of, job_of, model_of, plan_of

from toolkit.errors import PlanError, SpecError
from toolkit.planning.decide import MAX_REDUCE_BUCKET
from toolkit.planning.resolve import resolve, resolve_with
from toolkit.planning.settings import steps_between


def choice(plan, key):
    """The last entry of a key: what holds."""
    return [entry for entry in plan.choices if entry.key == key][-1]


# (key, sections, value, a part of the reason)
DEFAULTS = [
    ("train.precision", {}, "bf16", "no loss scaling"),
    ("train.precision", {"gpu": V100}, "fp16", "has no bf16"),
    ("train.precision", {"gpu": CPU}, "fp32", "emulated"),
    ("train.sequence_length", {}, 512, "positions allow"),
    ("train.sequence_length", {"model": "llama-3.2-1b"}, 2048, "2048"),
    ("train.per_device_train_batch_size", {"train": {"sequence_length": 256}}, 16, "about 4096 tokens"),
    ("train.gradient_accumulation_steps", {"train": {"train_batch_size": 32, "per_device_train_batch_size": 4}}, 4, "32 = 4 micro × 4"),
    ("train.train_batch_size", {"train": {"per_device_train_batch_size": 4}}, 8, "8 = 4 micro × 1"),
    ("train.per_device_eval_batch_size", {"train": {"per_device_train_batch_size": 3}}, 3, "training micro batch"),
    ("train.gradient_accumulation_dtype", {}, "bf16", "training precision"),
    ("train.gradient_accumulation_dtype", {"train": {"precision": "fp8"}}, "bf16", "in bf16"),
    ("train.fp8.recipe", {"train": {"precision": "fp8"}}, "tensorwise", "the fastest"),
    ("parallel.zero_stage", {}, 2, "since they fit"),
    ("parallel.zero_stage", {"model": "llama-3.1-8b"}, 3, "must be sharded"),
    ("parallel.zero_stage", {"model": "llama-3.1-8b", "ranks": 3}, 3, "must be sharded"),
    ("parallel.zero_stage", {"model": "llama-3.1-8b", "ranks": 3, "train": {"optimizer": "lion"}}, 2, "since they fit"),
    ("parallel.zero_stage", {"parallel": {"offload": "full-cpu"}}, 3, "full-cpu"),
    ("parallel.zero_stage", {"gpu": CPU}, 2, "memory is shared"),
    ("parallel.zero_stage", {"model": "llama-3.1-8b", "ranks": 1}, 3, "steps one sub-group at a time"),
    ("parallel.zero_stage", {"model": "llama-3.2-3b", "ranks": 1}, 2, "all parameters at once fits: 59.84 GiB at the step of stage 2"),
    ("parallel.zero_stage", {"model": "llama-3.2-3b", "gpu": "a100-sxm-40gb", "ranks": 1}, 3, "steps one sub-group at a time"),
    ("parallel.zero_stage", {"model": "llama-3.1-8b", "ranks": 1, "train": {"precision": "fp32"}}, 0, "hold each weight twice"),
    ("parallel.zero_stage", {"model": "llama-3.1-8b", "ranks": 1, "train": {"precision": "fp32"}, "parallel": {"offload": "optimizer-cpu"}}, 2, "at once fits"),
    ("parallel.zero_stage", {"model": "llama-3.1-8b", "ranks": 1, "train": {"gradient_accumulation_dtype": "fp32"}}, 2, "without a copy"),
    ("parallel.zero_stage", {"gpu": CPU, "ranks": 1}, 2, "a single rank has nothing to shard"),
    ("parallel.zero_stage", {"model": "qwen3-0.6b", "gpu": "t4-16gb", "ranks": 1}, 2, "one optimizer sub-group"),
    ("parallel.zero_stage", {"model": "llama-3.1-70b", "ranks": 1, "train": {"method": "lora"}}, 2, "a single rank"),
    ("parallel.zero_stage", {"ranks": 1, "parallel": {"offload": "full-cpu"}}, 3, "full-cpu"),
    ("parallel.zero_stage", {"ranks": 1, "nodes": 2, "model": "llama-3.1-8b"}, 3, "must be sharded"),
    ("parallel.zero_stage", {"model": "llama-3.1-8b", "gpu": "a100-sxm-40gb", "ranks": 8, "parallel": {"tensor": 2}}, 2, "since they fit"),
    ("parallel.zero_stage", {"model": "llama-3.1-8b", "gpu": "a100-sxm-40gb", "ranks": 8, "parallel": {"pipeline": 2}}, 2, "they do not fit unsharded"),
    ("parallel.zero_stage", {"model": "llama-3.1-8b", "ranks": 8, "parallel": {"pipeline": 2}}, 1, "since they fit unsharded"),
    ("parallel.zero_stage", {"model": "llama-3.1-8b", "ranks": 4, "parallel": {"pipeline": 2}}, 1, "since they fit unsharded"),
    ("parallel.zero_stage", {"model": "llama-3.1-8b", "gpu": "a100-sxm-40gb", "ranks": 16, "train": {"gradient_accumulation_dtype": "fp32"}, "parallel": {"pipeline": 4}}, 1, "since they fit unsharded"),
    ("parallel.zero_stage", {"model": "llama-3.1-8b", "gpu": "a100-sxm-40gb", "ranks": 2, "parallel": {"pipeline": 2}}, 3, "stepped one sub-group at a time"),
    ("parallel.zero_stage", {"model": "llama-3.1-8b", "gpu": "a100-sxm-40gb", "ranks": 8, "parallel": {"pipeline": 2, "pipeline_schedule": "zb-h1"}}, 1, "defers the gradients of weights"),
    ("train.attention", {}, "sdpa", "fused"),
    ("train.attention", {"model": "gemma-2-2b"}, "eager", "would be refused: attention=sdpa with"),
    ("train.num_train_epochs", {}, 1.0, "one pass"),
    ("train.save_steps", {}, 500, "500"),
    ("train.save_total_limit", {}, 2, "last two"),
    ("model.init", {}, "pretrained", "fine-tuning"),
    ("train.gradient_checkpointing", {}, True, "recomputes"),
    ("train.gradient_checkpointing", {"gpu": CPU}, False, "ample"),
    ("train.learning_rate", {}, 1e-5, "full fine-tuning"),
    ("train.learning_rate", {"train": {"method": "lora"}}, 1e-4, "LoRA"),
    ("train.warmup_ratio", {}, 0.03, "Adam's first moments"),
    ("train.eval_steps", {"data": {"train": "a/b", "eval": "a/b"}, "train": {"save_steps": 7}}, 7, "as often as checkpoints"),
    ("parallel.offload_ratio", {"parallel": {"offload": "optimizer-cpu-partial"}}, 0.5, "half"),
    ("deepspeed.zero_optimization.reduce_bucket_size", {}, 1_000_576, "trainable parameters"),
    ("deepspeed.zero_optimization.reduce_bucket_size", {"model": "llama-3.1-8b"}, MAX_REDUCE_BUCKET, "bandwidth"),
    ("deepspeed.zero_optimization.sub_group_size", {"parallel": {"offload": "optimizer-cpu-partial"}}, 25_014, "whole sub-groups"),
    ("train.optimizer", {}, "adamw", "fixed default"),
    ("train.kernels", {}, "eager", "no extra package"),
]  # fmt: skip


@pytest.mark.parametrize(("key", "sections", "value", "reason"), DEFAULTS)
def test_a_default_is_decided_and_explained(key, sections, value, reason):
    plan = plan_of(**sections)
    entry = choice(plan, key)
    assert entry.value == value
    assert entry.source in ("default", "derived")
    assert reason in entry.reason
    (line,) = [line for line in plan.explain().splitlines() if line.startswith(f"{key} ")]
    assert reason in line
    assert json.dumps(value) in line


def test_what_the_job_says_is_said_to_be_from_the_job():
    plan = plan_of(
        train={"learning_rate": 3e-4},
        parallel={"zero_stage": 1},
        deepspeed={"zero_optimization": {"reduce_bucket_size": 7}},
    )
    assert choice(plan, "train.learning_rate").source == "job"
    assert choice(plan, "parallel.zero_stage").source == "job"
    assert choice(plan, "deepspeed.zero_optimization").source == "deepspeed"
    assert "takes precedence" in choice(plan, "deepspeed.zero_optimization").reason
    assert plan.settings.learning_rate == 3e-4


def test_every_key_is_explained_once():
    for sections in (
        {},
        {"train": {"method": "lora"}, "data": {"train": "a/b", "validation_fraction": 0.1}},
        {"gpu": CPU},
    ):
        keys = [entry.key for entry in plan_of(**sections).choices]
        assert len(keys) == len(set(keys))


def test_a_scaled_rate_is_explained_in_place_of_the_written_one():
    plan = plan_of(
        train={
            "learning_rate": 1e-5,
            "learning_rate_scaling": "sqrt",
            "learning_rate_reference_batch_size": 4,
            "train_batch_size": 64,
        }
    )
    assert plan.settings.learning_rate == pytest.approx(4e-5)
    assert "1e-05 × 4: sqrt scaling of batch 64 over 4" in plan.explain()
    linear = plan_of(
        train={
            "learning_rate": 1e-5,
            "learning_rate_scaling": "linear",
            "learning_rate_reference_batch_size": 4,
            "train_batch_size": 64,
        }
    )
    assert linear.settings.learning_rate == pytest.approx(16e-5)


def test_a_constant_schedule_has_no_warmup():
    plan = plan_of(train={"lr_scheduler_type": "constant"})
    assert plan.settings.warmup_ratio is None
    assert "warmup" not in plan.explain()


def test_intervals_by_the_epoch_are_shares_of_the_run():
    data = {"train": "a/b", "eval": "a/b"}
    plan = plan_of(train={"num_train_epochs": 2, "saves_per_epoch": 2, "evals_per_epoch": 4}, data=data)
    assert (plan.settings.save_steps, plan.settings.eval_steps) == (0.25, 0.125)
    assert "saves_per_epoch=2 and num_train_epochs=2" in plan.explain()
    once = plan_of(train={"saves_per_epoch": 1}, data=data).settings
    assert once.eval_steps == once.save_steps < 1
    assert steps_between(once.save_steps, 10**6) == 10**6, "at the end of the only epoch"


def test_keys_that_the_optimizer_does_not_read_are_not_explained():
    assert "adam_beta1" not in plan_of(train={"optimizer": "sgd"}).explain()
    assert "momentum" not in plan_of().explain()
    assert "train.momentum" in plan_of(train={"optimizer": "sgd"}).explain()


def test_steps_in_place_of_epochs_and_no_evaluation_without_data():
    settings = plan_of(train={"max_steps": 9}).settings
    assert (settings.max_steps, settings.num_train_epochs, settings.eval_steps) == (9, None, None)


def test_a_size_of_the_deepspeed_section_is_the_setting():
    plan = plan_of(
        parallel={"zero_stage": 3}, deepspeed={"zero_optimization": {"reduce_bucket_size": 77, "sub_group_size": 5}}
    )
    assert (plan.settings.reduce_bucket_size, plan.settings.sub_group_size) == (77, 5)
    zero = plan.deepspeed_config()["zero_optimization"]
    assert (zero["reduce_bucket_size"], zero["sub_group_size"]) == (77, 5)
    assert "deepspeed.zero_optimization.reduce_bucket_size" not in plan.explain()


def test_no_bucket_is_explained_where_there_is_none():
    assert "reduce_bucket_size" not in plan_of(parallel={"zero_stage": 0}).explain()


def test_a_batch_that_fails_does_not_hide_other_problems():
    with pytest.raises(PlanError) as caught:
        plan_of(train={"train_batch_size": 7, "momentum": 0.5})
    assert caught.value.codes == ("BATCH_EQUATION", "OPTIMIZER_KEY")


def test_resolve_finds_model_and_card():
    job = job_of()
    assert resolve(job) == resolve_with(job, model=model_of(TOY), gpu=gpu_of(job.cluster.gpu))
    with pytest.raises(SpecError):
        resolve(job_of(gpu="h1000"))
    with pytest.raises(SpecError):
        resolve(job_of(model="./nowhere"))


def test_equal_jobs_give_equal_plans():
    assert plan_of(train={"seed": 1}) == plan_of(train={"seed": 1})


def test_fp8_is_bf16_but_for_its_products():
    fp8, bf16 = (plan_of(train={"precision": precision}, parallel={"zero_stage": 1}) for precision in ("fp8", "bf16"))
    assert fp8.settings.dtype == bf16.settings.dtype == "bf16"
    assert fp8.deepspeed_config() == bf16.deepspeed_config()
    wide = {"precision": "fp8", "gradient_accumulation_dtype": "fp32"}
    assert plan_of(train=wide, parallel={"zero_stage": 1}).optimizer_wrapper == "bf16"
    assert "run in float8" in fp8.explain()
    assert "emulated" not in fp8.explain()
    assert "without torch_compile" in fp8.explain()
    assert "without torch_compile" not in plan_of(train={"precision": "fp8", "torch_compile": True}).explain()
    assert "float8" not in bf16.explain()
    assert "multiplied in fp32" in plan_of(gpu=CPU, train={"precision": "fp8"}).explain()
    written = choice(plan_of(train={"precision": "fp8", "fp8": {"recipe": "rowwise"}}), "train.fp8")
    assert (written.value, written.source) == ({"recipe": "rowwise"}, "job")


def test_a_pipeline_gets_enough_micro_batches():
    parallel = {"pipeline": 4}
    assert plan_of(model="llama-3.2-1b", ranks=4, parallel=parallel).settings.batch.accumulation == 16
    plan = plan_of(
        model="llama-3.2-1b", ranks=4, parallel=parallel, train={"train_batch_size": 64, "sequence_length": 512}
    )
    assert (plan.settings.batch.micro, plan.settings.batch.accumulation) == (4, 16)
    assert (
        plan_of(
            model="llama-3.2-1b", ranks=4, parallel=parallel, train={"train_batch_size": 3}
        ).settings.batch.accumulation
        == 3
    )


def test_an_estimate_resolves_for_a_host_that_is_too_small_and_names_it_beside_other_problems() -> None:
    small = {
        "model": "llama-3.1-8b",
        "host_memory_gib": 8,
        "parallel": {"offload": "full-cpu", "zero_stage": 3},
    }
    card, model = gpu_of(job_of(**small).cluster.gpu), model_of("llama-3.1-8b")
    plan = resolve_with(job_of(**small), model=model, gpu=card, to_run=False)
    assert plan.job.cluster.host_memory_gib == 8
    compiled = job_of(**small, train={"torch_compile": True})
    for job, to_run, codes in ((job_of(**small), True, set()), (compiled, False, {"COMPILE_ZERO3"})):
        with pytest.raises(PlanError) as caught:
            resolve_with(job, model=model, gpu=card, to_run=to_run)
        assert {*caught.value.codes} == {"OFFLOAD_HOST_MEMORY", *codes}
