import os
import warnings

import pytest
from plan_jobs import CPU, H100, V100, plan_of
from transformers import TrainingArguments
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

from toolkit.errors import PlanError
from toolkit.planning.rules import integrations


def refused(code, key, **sections):
    plan = plan_of(**sections)
    with pytest.raises(PlanError) as caught:
        plan.training_arguments()
    (problem,) = caught.value.problems
    assert (problem.code, problem.key) == (code, key)
    return problem


def matched(plan):
    """What Trainer finds different between its arguments and the JSON; it raises when there is anything."""
    given = plan.training_arguments()
    config = HfTrainerDeepSpeedConfig(given.pop("deepspeed"))
    # Built without `deepspeed`, whose processing would look for the card; the comparison below is the one it makes.
    arguments = TrainingArguments(**{**given, "bf16": False, "fp16": False, "use_cpu": True})
    arguments.bf16, arguments.fp16 = given["bf16"], given["fp16"]
    config.trainer_config_process(_Ranks(arguments, plan.job.cluster.num_ranks))
    return config, arguments


class _Ranks:
    """TrainingArguments as each of `size` ranks sees them; on this one machine world_size would be 1."""

    def __init__(self, arguments, size):
        self.__dict__.update(_arguments=arguments, world_size=size)

    def __getattr__(self, name):
        return getattr(self._arguments, name)


EXAMPLES = [
    {},
    {"gpu": V100, "train": {"precision": "fp16"}},
    {"gpu": CPU},
    {"train": {"optimizer": "sgd", "momentum": 0.9, "max_grad_norm": 0.0, "max_steps": 7, "warmup_steps": 3}},
    {"train": {"optimizer": "lion", "adam_beta1": 0.95}, "nodes": 2},
    {"train": {"adam_beta1": 0.8, "adam_epsilon": 1e-6, "weight_decay": 0.1, "learning_rate": 3e-4, "num_train_epochs": 2}},
    {"train": {"lr_scheduler_type": "cosine_with_min_lr", "min_learning_rate_ratio": 0.1, "gradient_checkpointing": False}},
    {"train": {"learning_rate_scaling": "sqrt", "learning_rate_reference_batch_size": 3, "report_to": ["tensorboard"], "push_to_hub": "me/mine"}},
    {"data": {"train": "a/b", "eval": "a/b"}, "train": {"eval_steps": 5, "per_device_eval_batch_size": 3}},
    {"parallel": {"zero_stage": 3, "offload": "full-cpu"}, "train": {"train_batch_size": 24}},
    {"parallel": {"zero_stage": 1}, "train": {"gradient_accumulation_dtype": "fp32"}},
    {"parallel": {"zero_stage": 0}, "train": {"torch_compile": False, "seed": 3, "save_total_limit": 9}},
]  # fmt: skip


@pytest.mark.parametrize("sections", EXAMPLES, ids=range(len(EXAMPLES)))
def test_trainer_finds_no_mismatch_with_the_json(sections, tmp_path):
    sections = {**sections, "train": {**sections.get("train", {}), "output_dir": str(tmp_path)}}
    plan = plan_of(**sections)
    config, arguments = matched(plan)
    assert config.mismatches == []
    settings, train = plan.settings, plan.job.train
    assert arguments.max_grad_norm == config.config["gradient_clipping"]
    assert arguments.learning_rate == config.config["optimizer"]["params"]["lr"]
    assert arguments.seed == train.seed
    assert arguments.save_steps == settings.save_steps
    assert arguments.save_total_limit == settings.save_total_limit
    assert arguments.max_steps == (settings.max_steps or -1)
    assert settings.num_train_epochs in (None, arguments.num_train_epochs)
    assert arguments.eval_strategy == ("no" if settings.eval_steps is None else "steps")
    assert arguments.report_to == list(train.report_to)
    pushed = (train.push_to_hub is not None, train.push_to_hub, train.push_to_hub and train.hub_private_repo)
    assert (arguments.push_to_hub, arguments.hub_model_id, arguments.hub_private_repo) == pushed
    assert arguments.gradient_checkpointing is (settings.gradient_checkpointing > 0)


@pytest.mark.parametrize(
    "sections", [{"gpu": CPU}, {"gpu": CPU, "train": {"precision": "bf16"}, "parallel": {"zero_stage": 3}}]
)
def test_the_arguments_construct_with_the_json_inside(sections, tmp_path):
    plan = plan_of(ranks=1, **{**sections, "train": {**sections.get("train", {}), "output_dir": str(tmp_path)}})
    before = dict(os.environ)
    try:
        arguments = TrainingArguments(**plan.training_arguments())
        assert arguments.hf_deepspeed_config.mismatches == []
        assert arguments.deepspeed_plugin.zero_stage == plan.settings.zero_stage
        assert arguments.bf16 is (plan.settings.precision == "bf16")
    finally:
        os.environ.clear()
        os.environ.update(before)
        from accelerate.state import AcceleratorState, PartialState

        AcceleratorState._reset_state(reset_partial_state=True)
        PartialState._reset_state()


@pytest.mark.parametrize(
    ("gpu", "precision"), [(H100, "bf16"), (H100, "fp16"), (H100, "fp32"), (V100, "fp16"), (CPU, "bf16")]
)
def test_one_precision_on_both_sides(gpu, precision):
    # transformers issue 39849: fp16 in the JSON and bf16 in the arguments
    arguments = plan_of(gpu=gpu, train={"precision": precision}).training_arguments()
    for name in ("bf16", "fp16"):
        assert arguments[name] is (precision == name)
        assert arguments["deepspeed"][name]["enabled"] is (precision == name)


def test_a_mismatch_would_be_noticed():
    plan = plan_of()
    config = HfTrainerDeepSpeedConfig({**plan.training_arguments()["deepspeed"], "gradient_clipping": 0.3})
    config.fill_match("gradient_clipping", 1.0, "max_grad_norm")
    assert config.mismatches


@pytest.mark.parametrize(
    ("train", "warmup"),
    [({"warmup_steps": 7}, 7), ({"warmup_ratio": 0.1}, 0.1), ({}, 0.03), ({"lr_scheduler_type": "constant"}, 0)],
)
def test_warmup_in_steps_or_as_a_share(train, warmup):
    assert plan_of(train=train).training_arguments()["warmup_steps"] == warmup


def test_zero3_saves_whole_weights():
    config = plan_of(parallel={"zero_stage": 3}).training_arguments()["deepspeed"]
    assert config["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] is True


def test_what_trainer_cannot_carry():
    refused("INTEGRATION_CHECKPOINTING", "train.gradient_checkpointing", train={"gradient_checkpointing": 0.5})
    kept = {"gradient_checkpointing": {"keep": ["linear"]}}
    refused("INTEGRATION_CHECKPOINTING", "train.gradient_checkpointing", train=kept)
    refused("INTEGRATION_ACTIVATIONS", "parallel.offload", parallel={"offload": "activations-cpu"})
    refused("INTEGRATION_OFFLOAD", "parallel.offload", parallel={"offload": "optimizer-cpu-partial", "zero_stage": 2})
    streamed = {"offload": "full-cpu", "offload_engine": "overlapped"}
    told = refused("INTEGRATION_STREAMING", "parallel.offload_engine", parallel=streamed)
    assert "Remove parallel.offload_engine and set parallel.zero_stage to 3" in told.fix
    plan_of(parallel={"offload": "full-cpu", "zero_stage": 3}).training_arguments()
    refused("INTEGRATION_LOSS", "train.loss", train={"loss": "chunked"})
    refused("INTEGRATION_KERNELS", "train.kernels", train={"kernels": "liger"})
    grouped = {"train": "org/set", "packing": "none", "group_by_length": True}
    assert plan_of(data=grouped).training_arguments()["train_sampling_strategy"] == "group_by_length"
    rope = {"name": "quickstart-llama", "rope_scaling": {"type": "linear", "factor": 2}}
    refused("INTEGRATION_MODEL", "model.rope_scaling", model=rope)
    refused("INTEGRATION_MODEL", "model.added_tokens", model={"name": "quickstart-llama", "added_tokens": ["<a>"]})
    refused("INTEGRATION_LOOP", "train.callbacks", train={"callbacks": ["hooks:Mine"]})
    refused("INTEGRATION_LOOP", "train.save_async", train={"save_async": True})
    refused("INTEGRATION_LOOP", "train.hang_timeout_minutes", train={"hang_timeout_minutes": 5})
    refused("INTEGRATION_LOOP", "cluster.numa_binding", numa_binding=True)
    refused("INTEGRATION_LOSS", "train.label_smoothing_factor", train={"label_smoothing_factor": 0.1})
    refused("INTEGRATION_LOSS", "train.compute_loss", train={"compute_loss": "a:b"})
    best = {"load_best_model_at_end": True, "save_only_model": True}
    refused(
        "INTEGRATION_LOOP", "train.save_only_model", train=best, data={"train": "a.jsonl", "validation_fraction": 0.1}
    )
    refused(
        "INTEGRATION_LOOP", "train.save_only_model", train={"save_only_model": True}, parallel={"strategy": "fsdp2"}
    )
    refused("INTEGRATION_LOSS", "train.z_loss", train={"z_loss": 1e-4})
    assert plan_of(train={"neftune_noise_alpha": 5}).training_arguments()["neftune_noise_alpha"] == 5
    held = {"train": "a.jsonl", "validation_fraction": 0.1}
    refused("INTEGRATION_LOOP", "train.early_stopping_patience", train={"early_stopping_patience": 2}, data=held)
    refused("INTEGRATION_FP8", "train.precision", train={"precision": "fp8"})
    refused("INTEGRATION_TENSOR", "parallel.tensor", model="llama-3.2-1b", parallel={"tensor": 2})
    refused("INTEGRATION_CONTEXT", "parallel.context", model="llama-3.2-1b", parallel={"context": 2})
    refused("INTEGRATION_PIPELINE", "parallel.pipeline", model="llama-3.2-1b", parallel={"pipeline": 2})
    assert "silently" in refused("INTEGRATION_LIGER", "train.loss", model="gpt2", train={"loss": "liger"}).message
    for share in (True, False, 1.0, 0.0):
        plan_of(train={"gradient_checkpointing": share}).training_arguments()


def test_of_ligers_kernels_trainer_uses_the_loss_alone():
    assert plan_of().training_arguments()["use_liger_kernel"] is False
    arguments = plan_of(train={"loss": "liger"}).training_arguments()
    assert arguments["use_liger_kernel"] is True
    assert [name for name, on in arguments["liger_kernel_config"].items() if on] == ["fused_linear_cross_entropy"]


def test_a_polynomial_schedule_that_is_all_warm_up():
    polynomial = {"lr_scheduler_type": "polynomial"}
    for share in ({"max_steps": 1}, {"max_steps": 4, "warmup_ratio": 0.9}):
        problem = refused("INTEGRATION_POLYNOMIAL", "train.max_steps", train={**polynomial, **share})
        assert f"max_steps={share['max_steps']}" in problem.message
    for share in ({"max_steps": 2}, {"max_steps": 1, "warmup_steps": 0}, {"num_train_epochs": 1.0}):
        plan_of(train={**polynomial, **share}).training_arguments()

    import torch
    from transformers import get_scheduler

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
    scheduler = get_scheduler("polynomial", optimizer, num_warmup_steps=1, num_training_steps=1)
    optimizer.step()
    with pytest.raises(ZeroDivisionError):
        scheduler.step()


def test_trainer_keeps_adam_settings_and_a_scaled_rate_under_offload():
    arguments = plan_of(
        train={
            "adam_beta1": 0.5,
            "learning_rate_scaling": "linear",
            "learning_rate_reference_batch_size": 8,
            "learning_rate": 1e-5,
            "train_batch_size": 16,
        },
        parallel={"offload": "optimizer-cpu"},
    ).training_arguments()
    assert arguments["learning_rate"] == arguments["deepspeed"]["optimizer"]["params"]["lr"] == pytest.approx(2e-5)
    assert arguments["deepspeed"]["optimizer"]["params"]["betas"][0] == 0.5


@pytest.mark.parametrize("on", [True, False])
def test_no_argument_is_deprecated(on, tmp_path):
    arguments = plan_of(train={"gradient_checkpointing": on, "output_dir": str(tmp_path)}).training_arguments()
    given = {key: value for key, value in arguments.items() if key != "deepspeed"} | {"bf16": False, "use_cpu": True}
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        assert TrainingArguments(**given).gradient_checkpointing is on


@pytest.mark.parametrize(
    ("installed", "name"),
    [
        ("5.17.0", "gradient_checkpointing"),
        ("5.22.1", "gradient_checkpointing"),
        ("5.23.0", "activation_checkpointing"),
        ("5.30.0.dev0", "activation_checkpointing"),
        (None, "gradient_checkpointing"),
    ],
)
def test_checkpointing_has_the_name_that_the_installed_version_knows(installed, name, monkeypatch):
    monkeypatch.setattr(integrations, "version_of", lambda package: installed)
    arguments = plan_of(train={"gradient_checkpointing": True}).training_arguments()
    assert arguments[name] is True
    assert arguments[f"{name}_kwargs"] == {"use_reentrant": False}
    assert len([key for key in arguments if "checkpointing" in key]) == 2
    every = plan_of(train={"gradient_checkpointing": {"every_n_layers": 3}})
    if name == "activation_checkpointing":
        assert every.training_arguments()[f"{name}_kwargs"] == {"use_reentrant": False, "every_n_layers": 3}
    else:
        with pytest.raises(PlanError, match="INTEGRATION_CHECKPOINTING"):
            every.training_arguments()
