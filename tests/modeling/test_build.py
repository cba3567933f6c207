"""One model whatever the ZeRO stage: the same weights, the plan's dtype; and what cannot be built says so."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_distributed
from tiny_models import tiny_config, whole_model
from tiny_plans import RANKS, step_batches, tiny_plan
from torch._dynamo.utils import counters
from torch._inductor.exc import InductorError
from torch.utils import _device
from torch.utils._python_dispatch import TorchDispatchMode

from toolkit.config.job import Job
from toolkit.distributed.world import init_world
from toolkit.errors import PlanError, SpecError, ToolkitError
from toolkit.memory.kernels.device import Device
from toolkit.memory.trace.run import trace
from toolkit.modeling.architecture import construct, import_architecture, model_config
from toolkit.modeling.build import build_model
from toolkit.planning.plan import Plan
from toolkit.planning.resolve import resolve
from toolkit.topology.grid import Grid

CPU = torch.device("cpu")
# Mixtral comes first: its modeling file must not have been imported before.
ARCHITECTURES = ("mixtral", "llama", "llama-tied", "qwen2", "gpt2", "gemma2")


def plan_of(architecture: str, stage: int, precision: str) -> Plan:
    return tiny_plan(architecture, train={"precision": precision, "seed": 3}, parallel={"zero_stage": stage})


def facts(rank: int, plans: dict[tuple[str, str], tuple[Plan, Plan]]) -> dict[tuple[str, str], Any]:
    found = {}
    world = init_world(Grid(pp=1, dp=RANKS, tp=1), backend="gloo")
    assert not any(name.endswith("modeling_mixtral") for name in sys.modules)
    for (architecture, precision), (dense_plan, sharded_plan) in plans.items():
        sharded = build_model(sharded_plan, device=CPU, world=world)
        partitioned = all(hasattr(weight, "ds_id") for weight in sharded.parameters())
        dtypes = {weight.ds_tensor.dtype for weight in sharded.parameters()}
        whole, dense = whole_model(sharded), build_model(dense_plan, device=CPU)
        pairs = zip(whole.named_parameters(), dense.named_parameters(), strict=True)
        batch = {"input_ids": step_batches(0)[0][0]["input_ids"]}
        with torch.no_grad():
            same_logits = torch.equal(whole.eval()(**batch).logits, dense.eval()(**batch).logits)
        found[architecture, precision] = {
            "partitioned": partitioned,
            "dtypes": dtypes,
            "parts": {weight.ds_tensor.numel() < weight.ds_numel for weight in sharded.parameters()},
            "unequal": [
                name for (name, ours), (other, theirs) in pairs if name != other or not torch.equal(ours, theirs)
            ],
            "buffers": {(name, value.dtype) for name, value in sharded.named_buffers()}
            ^ {(name, value.dtype) for name, value in dense.named_buffers()},
            "dense dtypes": {weight.dtype for weight in dense.parameters()},
            "same logits": same_logits,
            "training": sharded.training,
            "cache": sharded.config.use_cache,
            "attention": sharded.config._attn_implementation,
        }
    return found


@pytest.fixture(scope="module")
def built() -> dict[tuple[str, str], Any]:
    cases = [(name, "fp32") for name in ARCHITECTURES] + [("llama", "bf16"), ("mixtral", "bf16")]
    plans = {case: (plan_of(case[0], 0, case[1]), plan_of(case[0], 3, case[1])) for case in cases}
    ours, theirs = run_distributed(facts, RANKS, plans)
    assert ours == theirs
    return ours


@pytest.mark.gloo
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_stage_3_holds_the_bits_of_stage_0(built: dict[tuple[str, str], Any], architecture: str) -> None:
    found = built[architecture, "fp32"]
    assert found["partitioned"]
    assert found["parts"] == {True}, "each rank holds a part of every weight"
    assert found["unequal"] == []
    assert found["buffers"] == set()
    assert found["same logits"]
    assert found["training"]
    assert not found["cache"]


@pytest.mark.gloo
@pytest.mark.parametrize(("architecture", "precision"), [("llama", "fp32"), ("llama", "bf16"), ("mixtral", "bf16")])
def test_weights_have_the_dtype_of_the_plan(
    built: dict[tuple[str, str], Any], architecture: str, precision: str
) -> None:
    found = built[architecture, precision]
    expected = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    assert found["dtypes"] == found["dense dtypes"] == {expected}
    assert found["unequal"] == []
    assert found["attention"] == "sdpa"


class Made(TorchDispatchMode):
    """Counts the tensors of a shape that get storage."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.shape, self.count = shape, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if "empty" in func.__name__ and tuple(made.shape) == self.shape and not made.is_meta:
            self.count += 1
        return made


def test_a_tied_head_is_allocated_once() -> None:
    plan = tiny_plan("llama-tied", ranks=1, parallel={"strategy": "ddp", "zero_stage": None})
    with Made(plan.model.config["vocab_size"], plan.model.config["hidden_size"]) as made:
        model: Any = build_model(plan, device=CPU)
    assert made.count == 1
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_another_seed_gives_other_weights() -> None:
    first, again, other = (
        build_model(tiny_plan(ranks=1, train={"seed": seed}, parallel={"zero_stage": 0}), device=CPU)
        for seed in (3, 3, 4)
    )
    key = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(first.get_parameter(key), again.get_parameter(key))
    assert not torch.equal(first.get_parameter(key), other.get_parameter(key))


def test_the_plan_s_attention_is_the_model_s() -> None:
    plan = tiny_plan(ranks=1, train={"attention": "eager"}, parallel={"zero_stage": 0})
    assert model_config(plan)._attn_implementation == "eager"
    model = build_model(plan, device=CPU)
    assert model.model.layers[0].self_attn.config._attn_implementation == "eager"


def test_a_configuration_without_a_causal_model_is_refused() -> None:
    from transformers import ViTConfig

    with pytest.raises(SpecError) as caught:
        import_architecture(ViTConfig())
    assert caught.value.codes == ("MODEL_CLASS",)
    assert "vit" in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("hidden_size", 17, "17"),
        ("tie_word_embeddings", None, "tie_word_embeddings"),
        ("dtype", "int9", "int9"),
        ("dtype", [], "IndexError"),
    ],
)
def test_a_config_json_that_transformers_refuses_is_named(tmp_path: Path, key: str, value: Any, named: str) -> None:
    config = tiny_config("llama").to_dict() | {key: value}
    (tmp_path / "config.json").write_text(json.dumps(config))
    job = Job(model={"name": str(tmp_path), "init": "random"}, cluster={"gpu": "cpu"}, train={"sequence_length": 8})
    plan = resolve(job)
    for use in (model_config, partial(trace, device=Device(capability=9.0))):
        with pytest.raises(SpecError, match=named) as caught:
            use(plan)
        assert caught.value.codes == ("MODEL_CONFIG_INVALID",)
        assert len(str(caught.value).splitlines()) == 1


def test_a_key_that_a_class_of_transformers_cannot_have_is_named(tmp_path: Path) -> None:
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 32,
        "vocab_size": 300,
    }
    config = {"model_type": "xlnet", "max_position_embeddings": 64, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    job = Job(model={"name": str(tmp_path), "init": "random"}, cluster={"gpu": "cpu"}, train={"sequence_length": 8})
    with pytest.raises(SpecError, match="no sequence length limit") as caught:
        model_config(resolve(job))
    assert caught.value.codes == ("MODEL_CONFIG_INVALID",)


def test_a_missing_attention_package_is_named() -> None:
    pytest.importorskip("transformers")
    if torch.cuda.is_available():
        pytest.skip("the package may be there")
    plan = tiny_plan(ranks=1, train={"precision": "bf16"}, parallel={"zero_stage": 0})
    config = model_config(plan)
    config._attn_implementation = "flash_attention_2"
    with pytest.raises(PlanError) as caught:
        construct(config, dtype=torch.bfloat16)
    assert caught.value.codes == ("ATTENTION_PACKAGE",)
    assert len(str(caught.value).splitlines()) == 1


def test_what_transformers_cannot_build_is_one_line() -> None:
    config = tiny_config("opt")
    config._attn_implementation = "no_such_kernel"
    with pytest.raises(ToolkitError) as caught:
        construct(config, dtype=torch.float32)
    assert caught.value.codes == ("MODEL_BUILD",)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.full  # the C++ compiler takes half a minute
def test_compiled_layers_that_recompute_give_the_same_losses() -> None:
    def course(**train: Any) -> list[float]:
        model = build_model(tiny_plan(ranks=1, train=train, parallel={"zero_stage": 0}), device=CPU)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        batch = step_batches(0)[0][0]["input_ids"]
        losses = []
        for _ in range(3):
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    expected = course()
    graphs = counters["stats"]["unique_graphs"]
    try:
        found = course(torch_compile=True, gradient_checkpointing=True)
    except InductorError as error:
        if "compiler" not in str(error).lower():
            raise
        pytest.skip("no C++ compiler")
    assert found == pytest.approx(expected, abs=1e-5)
    assert expected[0] > expected[-1]
    assert counters["stats"]["unique_graphs"] - graphs == 1, "the layers share one compilation"


def _follows_devices(rank: int, plan: Plan) -> bool:
    _device._device_constructors.cache_clear()  # as in a process that has made no tensor under a device
    build_model(plan, device=CPU, world=init_world(Grid(pp=1, dp=1, tp=1), backend="gloo"))
    with torch.device("meta"):
        return torch.empty(1).is_meta


@pytest.mark.gloo
def test_a_device_is_a_context_after_stage_3_as_before() -> None:
    assert run_distributed(_follows_devices, 1, tiny_plan(ranks=1, parallel={"zero_stage": 3})) == [True]
