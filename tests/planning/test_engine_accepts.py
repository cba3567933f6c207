"""The configurations that the rules accept start through `deepspeed.initialize` and train as plain torch does."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from plan_jobs import CPU, job_of, plan_of
from ranks import run_distributed

from toolkit.errors import PlanError
from toolkit.planning.deepspeed_config import merge

RANKS, MICRO, ACCUMULATION, STEPS = 2, 2, 2, 2

FP32, BF16 = {"precision": "fp32"}, {"precision": "bf16"}
MIXED = {"precision": "bf16", "gradient_accumulation_dtype": "fp32"}
SGD = {"optimizer": "sgd", "momentum": 0.9}
TORCH = {"optimizer": "adamw_torch"}
NO_SCATTER = {"reduce_scatter": False}

# name: (train, parallel, deepspeed, which parameters train, DeepSpeed's optimizer)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], str, str]] = {
    "fp32 zero 0": (FP32, {"zero_stage": 0}, {}, "all", "AdamW"),
    "fp32 zero 2": (FP32, {"zero_stage": 2}, {}, "all", "DeepSpeedZeroOptimizer"),
    "fp32 zero 3": (FP32, {"zero_stage": 3}, {}, "all", "DeepSpeedZeroOptimizer_Stage3"),
    "fp32 zero 3 groups": ({**FP32, "weight_decay": 0.1}, {"zero_stage": 3}, {}, "groups", "DeepSpeedZeroOptimizer_Stage3"),
    "fp32 zero 3 sgd": ({**FP32, **SGD}, {"zero_stage": 3}, {}, "all", "DeepSpeedZeroOptimizer_Stage3"),
    "fp32 zero 2 cpu sgd": ({**FP32, **SGD}, {"zero_stage": 2, "offload": "optimizer-cpu"}, {}, "all", "DeepSpeedZeroOptimizer"),
    "fp32 zero 2 sizes": (FP32, {"zero_stage": 2}, {"zero_optimization": {"reduce_bucket_size": 77, "round_robin_gradients": True}}, "all", "DeepSpeedZeroOptimizer"),
    "fp32 zero 3 hpz": (FP32, {"zero_stage": 3}, {"zero_optimization": {"zero_hpz_partition_size": 2}}, "all", "DeepSpeedZeroOptimizer_Stage3"),
    "fp32 zero 2 predivide": ({**FP32, **SGD}, {"zero_stage": 2}, {"gradient_predivide_factor": 2.0, "zero_optimization": NO_SCATTER}, "all", "DeepSpeedZeroOptimizer"),
    "fp32 zero 3 predivide": ({**FP32, **SGD}, {"zero_stage": 3}, {"gradient_predivide_factor": 4.0, "zero_optimization": NO_SCATTER}, "all", "DeepSpeedZeroOptimizer_Stage3"),
    "bf16 zero 0": (BF16, {"zero_stage": 0}, {}, "all", "FP16_UnfusedOptimizer"),
    "bf16 zero 1": (BF16, {"zero_stage": 1}, {}, "all", "DeepSpeedZeroOptimizer"),
    "bf16 zero 2": (BF16, {"zero_stage": 2}, {}, "all", "DeepSpeedZeroOptimizer"),
    "bf16 zero 3": (BF16, {"zero_stage": 3}, {}, "all", "DeepSpeedZeroOptimizer_Stage3"),
    "bf16 zero 1 fp32 sums": (MIXED, {"zero_stage": 1}, {}, "all", "BF16_Optimizer"),
    "bf16 zero 1 fp32 sums some": (MIXED, {"zero_stage": 1}, {}, "some", "BF16_Optimizer"),
    "bf16 zero 1 fp32 sums at once": (MIXED, {"zero_stage": 1}, {"bf16": {"immediate_grad_update": True}}, "all", "BF16_Optimizer"),
    "bf16 zero 1 fp32 sums cpu": ({**MIXED, **TORCH}, {"zero_stage": 1, "offload": "optimizer-cpu"}, {}, "all", "DeepSpeedZeroOptimizer"),
    "bf16 zero 2 fp32 sums": (MIXED, {"zero_stage": 2}, {}, "all", "DeepSpeedZeroOptimizer"),
    "bf16 zero 3 some": (BF16, {"zero_stage": 3}, {}, "some", "DeepSpeedZeroOptimizer_Stage3"),
    "bf16 zero 3 full cpu": ({**BF16, **TORCH}, {"zero_stage": 3, "offload": "full-cpu"}, {}, "all", "DeepSpeedZeroOptimizer_Stage3"),
}  # fmt: skip

# By default each of DeepSpeed's optimizers, each key of its file and each kind of parameters.
REST = {
    *("fp32 zero 2", "fp32 zero 3", "fp32 zero 3 sgd", "fp32 zero 2 predivide", "bf16 zero 2", "bf16 zero 3"),
    *("bf16 zero 1 fp32 sums", "bf16 zero 1 fp32 sums some", "bf16 zero 2 fp32 sums"),
}

# One that the rules refuse, to measure why.
TWICE = "fp32 zero 3 divided twice"


def sections_of(case: tuple[Any, ...]) -> dict[str, Any]:
    train, parallel, deepspeed, *_ = case
    batch = {"per_device_train_batch_size": MICRO, "gradient_accumulation_steps": ACCUMULATION, "learning_rate": 1e-2}
    return {"gpu": CPU, "ranks": RANKS, "train": {**batch, **train}, "parallel": parallel, "deepspeed": deepspeed}


def build_model() -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    small = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    return LlamaForCausalLM(
        LlamaConfig(**small, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32)
    )


def tokens_of(rank: int) -> Any:
    """Micro batches of one rank, the same at each step. Shape (accumulation, micro, 16)."""
    import torch

    return torch.randint(0, 64, (ACCUMULATION, MICRO, 16), generator=torch.Generator().manual_seed(rank))


def parameter_groups(model: Any, which: str, weight_decay: float) -> list[Any]:
    for name, parameter in model.named_parameters():
        parameter.requires_grad = which != "some" or "q_proj" in name
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if which != "groups":
        return trained
    matrices, vectors = [p for p in trained if p.ndim > 1], [p for p in trained if p.ndim < 2]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]


def train_with_torch(config: dict[str, Any], which: str, *, empty_first_step: bool = False) -> list[float]:
    """Losses of rank 0's last micro batch, of fp32 torch on every rank's data, without DeepSpeed."""
    import torch

    model = build_model()
    params = {key: value for key, value in config["optimizer"]["params"].items() if key != "torch_adam"}
    kind = torch.optim.SGD if config["optimizer"]["type"] == "SGD" else torch.optim.AdamW
    optimizer = kind(parameter_groups(model, which, params["weight_decay"]), **params)
    if empty_first_step:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
    losses = []
    for _ in range(STEPS):
        for rank in reversed(range(RANKS)):
            for tokens in tokens_of(rank):
                loss = model(input_ids=tokens, labels=tokens).loss
                (loss / (RANKS * ACCUMULATION)).backward()
        losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), config["gradient_clipping"])
        optimizer.step()
        optimizer.zero_grad()
    return losses


def train_with_deepspeed(rank: int, config: dict[str, Any], which: str) -> dict[str, Any]:
    import deepspeed
    import torch

    model = build_model().to(torch.bfloat16 if config["bf16"]["enabled"] else torch.float32)
    groups = parameter_groups(model, which, config["optimizer"]["params"]["weight_decay"])
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=groups, config=copy.deepcopy(config), dist_init_required=False
    )
    losses = []
    for _ in range(STEPS):
        for tokens in tokens_of(rank):
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
            engine.step()
        losses.append(loss.item())
    norm = engine.get_global_grad_norm()
    return {
        "losses": losses,
        "norm": None if norm is None else float(norm),
        "optimizer": type(engine.optimizer).__name__,
        "basic": type(engine.basic_optimizer).__name__,
    }


def train_all(rank: int, configs: dict[str, tuple[dict[str, Any], str]]) -> dict[str, Any]:
    import logging
    import traceback

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    results: dict[str, Any] = {}
    for name, (config, which) in configs.items():
        try:
            results[name] = train_with_deepspeed(rank, config, which)
        except Exception:  # reported by the test of this case; the ranks fail alike
            results[name] = traceback.format_exc()
    return results


@pytest.fixture(scope="module")
def configs() -> dict[str, tuple[dict[str, Any], str]]:
    accepted = {name: (plan_of(**sections_of(case)).deepspeed_config(), case[3]) for name, case in CASES.items()}
    base, which = accepted["fp32 zero 3 sgd"]
    refused = merge(base, {"gradient_predivide_factor": float(RANKS), "zero_optimization": NO_SCATTER})
    return {**accepted, TWICE: (refused, which)}


@pytest.fixture(scope="module")
def trained(configs) -> dict[str, Any]:
    return run_distributed(train_all, RANKS, {name: configs[name] for name in configs.keys() - REST})[0]


@pytest.fixture(scope="module")
def rest(configs) -> dict[str, Any]:
    return run_distributed(train_all, RANKS, {name: configs[name] for name in REST})[0]


def result_of(trained: dict[str, Any], name: str) -> dict[str, Any]:
    result = trained[name]
    if isinstance(result, str):
        pytest.fail(result)
    return result


@pytest.mark.gloo
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.full if name in REST else ()) for name in CASES])
def test_an_accepted_configuration_trains_as_torch_does(request, configs, name):
    trained = request.getfixturevalue("rest" if name in REST else "trained")
    result, (config, which) = result_of(trained, name), configs[name]
    assert result["optimizer"] == CASES[name][4]
    assert result["basic"] == ("SGD" if config["optimizer"]["type"] == "SGD" else "AdamW")
    bf16 = config["bf16"]["enabled"]
    # FP16_UnfusedOptimizer steps once on zero gradients to allocate Adam's state (fp16/unfused_optimizer.py
    # initialize_optimizer_states), so its bias correction is one step ahead: the first updates are smaller.
    expected = train_with_torch(config, which, empty_first_step=result["optimizer"] == "FP16_UnfusedOptimizer")
    assert result["losses"] == pytest.approx(expected, abs=4e-3 if bf16 else 2e-4)
    assert expected[0] > expected[-1]


@pytest.mark.gloo
def test_stage_0_in_16_bit_takes_smaller_first_steps(trained, configs):
    config, which = configs["bf16 zero 0"]
    plain = train_with_torch(config, which)
    assert result_of(trained, "bf16 zero 0")["losses"][1] > plain[1] + 0.01
    assert result_of(trained, "bf16 zero 1")["losses"][1] == pytest.approx(plain[1], abs=4e-3)


@pytest.mark.gloo
def test_stage_3_divides_twice_by_a_factor_equal_to_its_ranks(trained):
    case = (
        {**FP32, **SGD},
        {"zero_stage": 3},
        {"gradient_predivide_factor": float(RANKS), "zero_optimization": NO_SCATTER},
    )
    with pytest.raises(PlanError) as caught:
        plan_of(**sections_of(case))
    assert caught.value.codes == ("DEEPSPEED_PREDIVIDE",)
    assert job_of(**sections_of(case)).cluster.num_ranks == RANKS
    right, wrong = result_of(trained, "fp32 zero 3 predivide"), result_of(trained, TWICE)
    assert wrong["norm"] == pytest.approx(right["norm"] / RANKS, rel=0.02)
