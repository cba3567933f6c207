import json

import pytest
from plan_jobs import CPU, V100, plan_of
from tiny_plans import tiny_plan

from toolkit.planning.deepspeed_config import merge

ADAM = {"lr": 1e-5, "betas": [0.9, 0.999], "weight_decay": 0.0, "eps": 1e-8}


def test_the_whole_configuration_of_a_small_job():
    assert plan_of(train={"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}).deepspeed_config() == {
        "train_batch_size": 12,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 3,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "fp16": {"enabled": False},
        "data_types": {"grad_accum_dtype": "bf16"},
        "zero_optimization": {
            "stage": 2,
            "allgather_bucket_size": 1_000_576,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "reduce_scatter": True,
            "reduce_bucket_size": 1_000_576,
        },
        "optimizer": {"type": "AdamW", "params": ADAM},
    }


@pytest.mark.parametrize(
    ("train", "type_", "params"),
    [
        ({}, "AdamW", ADAM),
        ({"optimizer": "adamw_torch"}, "AdamW", {**ADAM, "torch_adam": True}),
        ({"optimizer": "adamw_torch_fused"}, "AdamW", {**ADAM, "torch_adam": True, "fused": True}),
        ({"adam_beta1": 0.8, "adam_beta2": 0.95, "adam_epsilon": 1e-6, "weight_decay": 0.1, "learning_rate": 1e-3}, "AdamW",
         {"lr": 1e-3, "betas": [0.8, 0.95], "weight_decay": 0.1, "eps": 1e-6}),
        ({"optimizer": "lion"}, "Lion", {"lr": 1e-5, "betas": [0.9, 0.999], "weight_decay": 0.0}),
        ({"optimizer": "sgd", "momentum": 0.9}, "SGD", {"lr": 1e-5, "momentum": 0.9, "weight_decay": 0.0}),
    ],
)  # fmt: skip
def test_optimizers(train, type_, params):
    config = plan_of(train=train).deepspeed_config()
    assert config["optimizer"] == {"type": type_, "params": params}
    assert config.get("zero_allow_untested_optimizer", False) == (type_ == "SGD")


def test_adam_on_a_cpu_is_torchs_own():
    assert plan_of(gpu=CPU).deepspeed_config()["optimizer"]["params"]["torch_adam"] is True


@pytest.mark.parametrize(("gpu", "precision"), [("h100-sxm-80gb", "bf16"), (V100, "fp16"), (CPU, "fp32")])
def test_one_precision(gpu, precision):
    config = plan_of(gpu=gpu).deepspeed_config()
    assert config["bf16"] == {"enabled": precision == "bf16"}
    assert config["fp16"] == {"enabled": precision == "fp16"}
    assert config["data_types"] == {"grad_accum_dtype": precision}


def test_no_clipping_is_written_out():
    # DeepSpeed's default is 1.0 (runtime/constants.py GRADIENT_CLIPPING_DEFAULT).
    assert plan_of(train={"max_grad_norm": 0}).deepspeed_config()["gradient_clipping"] == 0.0


def test_each_stage_holds_the_keys_that_it_reads():
    def zero(stage, **train):
        return plan_of(train=train, parallel={"zero_stage": stage}).deepspeed_config()["zero_optimization"]

    assert zero(0) == {"stage": 0}
    assert zero(1, gradient_accumulation_dtype="fp32") == {"stage": 1, "allgather_bucket_size": 1_000_576}
    assert set(zero(1)) == set(zero(2))
    assert not [key for key in zero(2) if key.startswith("stage3_")]
    assert "allgather_bucket_size" not in zero(3)
    assert zero(3)["stage3_gather_16bit_weights_on_model_save"] is False
    assert zero(3)["overlap_comm"] is True


@pytest.mark.parametrize(
    ("where", "overlaps"),
    [
        ({}, True),
        ({"ranks": 1}, False),
        ({"gpu": CPU}, False),
        ({"parallel": {"zero_stage": 2, "offload": "optimizer-cpu"}}, False),
        ({"parallel": {"zero_stage": 1, "pipeline": 2}}, False),
    ],
)
def test_several_cards_reduce_beside_the_backward_pass(where, overlaps):
    assert plan_of(**where).deepspeed_config()["zero_optimization"]["overlap_comm"] is overlaps


@pytest.mark.parametrize("consumer", ["trainer", "accelerate"])
def test_scripts_that_save_under_zero3_get_whole_weights(consumer):
    # transformers issue 25817
    config = plan_of(parallel={"zero_stage": 3}).deepspeed_config(consumer)
    assert config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] is True


def test_an_odd_number_of_trainable_parameters_gives_an_even_all_gather_bucket():
    plan = plan_of(deepspeed={"zero_optimization": {"reduce_bucket_size": 77}})
    zero = plan.deepspeed_config()["zero_optimization"]
    assert (zero["reduce_bucket_size"], zero["allgather_bucket_size"]) == (77, 78)


def test_the_jobs_own_keys_win():
    config = plan_of(
        deepspeed={
            "zero_optimization": {"overlap_comm": True, "round_robin_gradients": True},
            "bf16": {"check_grad_overflow": False},
            "steps_per_print": 5,
        }
    ).deepspeed_config()
    assert config["zero_optimization"]["overlap_comm"] is True
    assert config["zero_optimization"]["round_robin_gradients"] is True
    assert config["zero_optimization"]["stage"] == 2
    assert config["bf16"] == {"enabled": True, "check_grad_overflow": False}
    assert config["steps_per_print"] == 5


def test_the_jobs_own_keys_win_inside_an_offload_section():
    config = plan_of(
        parallel={"zero_stage": 3, "offload": "full-cpu"},
        deepspeed={"zero_optimization": {"offload_param": {"pin_memory": False}}},
    ).deepspeed_config()
    assert config["zero_optimization"]["offload_param"] == {"device": "cpu", "pin_memory": False}
    assert config["zero_optimization"]["offload_optimizer"] == {"device": "cpu", "pin_memory": True}


@pytest.mark.parametrize("consumer", ["toolkit", "trainer", "accelerate"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_nobody_gets_a_scheduler_or_an_auto_and_scripts_bring_their_optimizer(stage, consumer):
    config = plan_of(parallel={"zero_stage": stage}).deepspeed_config(consumer)
    assert "scheduler" not in config
    assert "auto" not in json.dumps(config, allow_nan=False)
    assert ("optimizer" in config) == (consumer != "accelerate")
    assert config.get("zero_allow_untested_optimizer", False) == (consumer == "accelerate")


def test_merge_lays_sections_over_each_other_and_changes_neither():
    base, over = {"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"b": 4}, "e": {"f": 5}, "d": {"g": 6}}
    assert merge(base, over) == {"a": {"b": 4, "c": 2}, "d": {"g": 6}, "e": {"f": 5}}
    assert base == {"a": {"b": 1, "c": 2}, "d": 3}
    assert over == {"a": {"b": 4}, "e": {"f": 5}, "d": {"g": 6}}


def test_each_call_gives_a_fresh_configuration():
    plan = plan_of(deepspeed={"zero_optimization": {"overlap_comm": True}})
    plan.deepspeed_config()["zero_optimization"]["stage"] = 7
    assert plan.deepspeed_config()["zero_optimization"]["stage"] == 2


def test_a_dense_model_has_no_width_of_experts():
    plan = tiny_plan(config={"moe_intermediate_size": [8]}, parallel={"zero_stage": 3})
    assert plan.deepspeed_config()["zero_optimization"]["stage"] == 3
