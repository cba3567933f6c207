"""A DeepSpeed file of one's own: read strictly, and its "auto" filled in as Trainer fills it in."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from zero3_file import BOTH_OFFLOADS, ZERO_3

from toolkit.config.job import Job
from toolkit.errors import PlanError, ToolkitError
from toolkit.memory.deepspeed_file import DeepSpeedFile
from toolkit.memory.engines.settings import EngineSettings
from toolkit.memory.scenario import Scenario

# The file that transformers' documentation shows for ZeRO-3 with offload.
DOCUMENTED = {
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2},
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
    },
    "zero_optimization": {**ZERO_3, **BOTH_OFFLOADS},
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2e3,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}


def job_of(*, model="llama-3.2-1b", gpu="h100-sxm-80gb", ranks=2, deepspeed=None, train=None, parallel=None):
    return Job.model_validate(
        {
            "model": model,
            "cluster": {"gpu": gpu, "gpus_per_node": ranks},
            "train": {"sequence_length": 256, **(train or {})},
            "parallel": parallel or {},
            "deepspeed": deepspeed or {},
        }
    )


def resolved(config, **job):
    """Return the plan and the configuration without "auto"."""
    file = DeepSpeedFile.read(config)
    plan = Scenario.of(job_of(**job), file=file).plan()
    return plan, file.resolved(plan)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("model", ["llama-3.2-1b", "gpt2"])
def test_auto_is_what_trainer_makes_of_it(stage, model):
    transformers = pytest.importorskip("transformers")
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    config = json.loads(json.dumps(DOCUMENTED))
    config["zero_optimization"]["stage"] = stage
    plan, ours = resolved(config, model=model, train={"per_device_train_batch_size": 2, "train_batch_size": 12})
    settings, train = plan.settings, plan.job.train
    arguments = SimpleNamespace(
        world_size=2,
        per_device_train_batch_size=settings.batch.micro,
        gradient_accumulation_steps=settings.batch.accumulation,
        max_grad_norm=train.max_grad_norm,
        learning_rate=settings.learning_rate,
        adam_beta1=train.adam_beta1,
        adam_beta2=train.adam_beta2,
        adam_epsilon=train.adam_epsilon,
        weight_decay=train.weight_decay,
        save_on_each_node=False,
        fp16=False,
        fp16_full_eval=False,
        bf16=True,
        bf16_full_eval=False,
        get_warmup_steps=lambda steps: 1,
    )
    theirs = HfTrainerDeepSpeedConfig(config)
    theirs.trainer_config_process(arguments)
    kind = plan.model.config["model_type"]
    width = {"llama": "hidden_size", "gpt2": "n_embd"}[kind]
    real = transformers.AutoConfig.for_model(kind, **{width: plan.model.hidden_size})
    theirs.trainer_config_finalize(arguments, SimpleNamespace(config=real), 10)
    del theirs.config["scheduler"]
    assert "auto" not in json.dumps(ours).replace("scheduler", "")
    shared = {key: value for key, value in ours.items() if key != "scheduler"}
    if stage < 3:  # Trainer leaves "auto" there, and DeepSpeed drops it (config_utils.py DeepSpeedConfigModel)
        zero = theirs.config["zero_optimization"]
        theirs.config["zero_optimization"] = {key: value for key, value in zero.items() if value != "auto"}
    theirs.config.pop("gradient_clipping")
    assert {**shared, "gradient_clipping": None} == {**theirs.config, "gradient_clipping": None}


def test_a_resolved_file_is_read_by_the_ledger():
    plan, config = resolved(DOCUMENTED)
    settings = EngineSettings.read(config, dp_size=2)
    width = plan.model.hidden_size
    assert settings.zero.reduce_bucket_size == width * width
    assert settings.zero.prefetch_bucket_size == int(0.9 * width * width)
    assert settings.zero.param_persistence_threshold == 10 * width
    assert (settings.offload_optimizer, settings.offload_param, settings.itemsize) == ("cpu", "cpu", 2)


def test_what_deepspeed_reads_the_resolved_file_as():
    config_module = pytest.importorskip("deepspeed.runtime.zero.config")
    _, config = resolved(DOCUMENTED)
    zero = config_module.DeepSpeedZeroConfig(**config["zero_optimization"])
    assert int(zero.stage) == 3
    assert zero.prefetch_bucket_size == config["zero_optimization"]["stage3_prefetch_bucket_size"]


def test_what_a_file_states_the_job_takes_over_where_it_is_open():
    plan, config = resolved(
        {"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 4, "fp16": {"enabled": True}}
    )
    assert (plan.settings.batch.micro, plan.settings.batch.accumulation) == (3, 4)
    assert plan.settings.precision == "fp16"
    assert (config["train_batch_size"], config["fp16"]["enabled"], config["bf16"]["enabled"]) == (24, True, False)


def test_a_batch_alone_is_one_forward_pass_a_step():
    plan, _ = resolved({"train_batch_size": 16})  # runtime/config.py _set_batch_related_parameters
    assert (plan.settings.batch.micro, plan.settings.batch.accumulation) == (8, 1)


@pytest.mark.parametrize(
    ("config", "precision"),
    [
        ({}, "bf16"),
        ({"bf16": {"enabled": "auto"}}, "bf16"),
        ({"bf16": {"enabled": False}}, "fp32"),
        ({"bf16": {}}, "fp32"),
        ({"bfloat16": {"enabled": True}}, "bf16"),
        ({"fp16": {"enabled": False}}, "bf16"),
        ({"fp16": {"enabled": True}}, "fp16"),
    ],
)
def test_the_precision_of_a_file(config, precision):
    plan, _ = resolved(config)
    assert plan.settings.precision == precision


def test_without_an_optimizer_it_is_that_of_the_job():
    _, config = resolved({"zero_optimization": {"stage": 1}}, train={"optimizer": "lion"})
    assert config["optimizer"]["type"] == "Lion"
    _, config = resolved(
        {"optimizer": {"type": "SGD", "params": {"lr": 1, "momentum": 0.5}}}, train={"optimizer": "lion"}
    )
    assert config["optimizer"]["params"] == {"lr": 1, "momentum": 0.5}


@pytest.mark.parametrize(
    ("config", "train", "message"),
    [
        ({"train_micro_batch_size_per_gpu": 2}, {"per_device_train_batch_size": 4}, "_per_gpu=2, but the job's per_device_train_batch_size=4"),
        ({"gradient_accumulation_steps": 2}, {"gradient_accumulation_steps": 4}, "steps=2, but the job's gradient_accumulation_steps=4"),
        ({"train_batch_size": 8}, {"train_batch_size": 16}, "batch_size=8, but the job's train_batch_size=16"),
        ({"fp16": {"enabled": True}}, {"precision": "bf16"}, "fp16.enabled=true, but the job's precision=bf16"),
        ({"bf16": {"enabled": False}}, {"precision": "bf16"}, "bf16.enabled=false, but the job's precision=bf16"),
        ({"data_types": {"grad_accum_dtype": "fp32"}}, {"gradient_accumulation_dtype": "bf16"}, "grad_accum_dtype=fp32, but the job's"),
    ],
)  # fmt: skip
def test_a_number_that_both_say_differently(config, train, message):
    with pytest.raises(PlanError, match=re.escape(message)) as caught:
        resolved(config, train=train)
    assert caught.value.codes == ("DEEPSPEED_CONTRADICTS",)


def test_a_deepspeed_section_beside_the_file():
    with pytest.raises(PlanError) as caught:
        resolved({}, deepspeed={"steps_per_print": 5})
    assert caught.value.codes == ("DEEPSPEED_CONFLICT",)


def test_changes_go_where_the_file_is_their_home():
    file = DeepSpeedFile.read({"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}})
    values = {
        "parallel.zero_stage": 3,
        "parallel.offload": "full-cpu",
        "train.per_device_train_batch_size": 2,
        "train.gradient_checkpointing": True,
        "deepspeed.zero_optimization.reduce_bucket_size": 5,
    }
    changed, left = file.changed(values, nvme_path=None)
    assert left == {
        "parallel.offload_ratio": None,
        "train.per_device_train_batch_size": 2,
        "train.gradient_checkpointing": True,
    } or left == {"train.per_device_train_batch_size": 2, "train.gradient_checkpointing": True}
    assert changed.config == {
        "zero_optimization": {
            "stage": 3,
            "reduce_bucket_size": 5,
            "offload_optimizer": {"device": "cpu"},
            "offload_param": {"device": "cpu"},
        }
    }
    assert file.config["zero_optimization"] == {"stage": 2}


def test_an_offload_to_nvme_names_the_folder_of_the_job():
    file = DeepSpeedFile.read({"zero_optimization": {"stage": 3}})
    changed, _ = file.changed({"parallel.offload": "optimizer-nvme"}, nvme_path=Path("/local"))
    assert changed.config["zero_optimization"]["offload_optimizer"] == {"device": "nvme", "nvme_path": "/local"}


def notes_of(config, **job):
    case = Scenario.of(job_of(**job), file=DeepSpeedFile.read(config))
    return " | ".join(case.file.notes(case.plan(), case.job))


def test_what_the_file_stands_in_place_of_is_said():
    said = notes_of(
        {"zero_optimization": {"stage": 1}},
        parallel={"zero_stage": 3, "offload": "full-cpu"},
        train={"gradient_accumulation_dtype": "bf16"},
    )
    for part in ("zero_stage=1", "the job's 3", "the job's full-cpu", "no optimizer", "grad_accum_dtype"):
        assert part in said


def test_what_has_no_effect_is_said_of_the_run_that_the_file_makes_with_the_job():
    fp16 = {"enabled": "auto", "loss_scale": 128, "hysteresis": 3}
    scaled = "fp16.hysteresis has no effect with loss_scale=128"
    assert scaled in notes_of({"fp16": fp16}, train={"precision": "fp16"})
    assert scaled not in notes_of({"fp16": fp16}, train={"precision": "bf16"})
    predivided = {"gradient_predivide_factor": 2, "zero_optimization": {"stage": 3, "reduce_scatter": False}}
    assert "2 times too small" in notes_of(predivided, ranks=2)
    assert "2 times too small" not in notes_of(predivided, ranks=4)


@pytest.mark.parametrize(
    ("config", "job", "code"),
    [
        ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 3}}, {"ranks": 4}, "DEEPSPEED_HPZ"),
        ({"zero_optimization": {"stage": 3, "zero_quantized_weights": True}}, {"gpu": "cpu"}, "DEEPSPEED_CARD"),
        ({"fp16": {"enabled": "auto", "min_loss_scale": 0}}, {"train": {"precision": "fp16"}}, "DEEPSPEED_VALUE"),
        (
            {"zero_optimization": {"stage": 1, "allgather_bucket_size": 5}, "bf16": {"enabled": "auto"}},
            {},
            "DEEPSPEED_VALUE",
        ),
        ({"prescale_gradients": True, "zero_optimization": {"stage": 2}}, {}, "DEEPSPEED_PRESCALE"),
    ],
)
def test_what_the_engine_refuses_in_this_run(config, job, code):
    with pytest.raises(ToolkitError) as caught:
        resolved(config, **job)
    assert caught.value.codes == (code,)
    assert caught.value.exit_code == 2
