"""Adapters train alone, in the model's dtype, from the seed; what peft cannot adapt or would ignore is an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import tiny_model, tokens
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

from toolkit.config.job import Lora
from toolkit.errors import PlanError
from toolkit.modeling.lora import apply_lora


def adapters(model: Any) -> dict[str, torch.Tensor]:
    return {name: weight for name, weight in model.named_parameters() if weight.requires_grad}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_adapters_train_and_in_the_model_s_dtype(dtype: torch.dtype) -> None:
    model = apply_lora(tiny_model("llama").to(dtype), Lora(r=4), seed=0)
    assert all("lora_" in name for name in adapters(model))
    assert all("lora_" in name or not weight.requires_grad for name, weight in model.named_parameters())
    assert {weight.dtype for weight in model.parameters()} == {dtype}


def test_all_linear_leaves_the_head_out_and_nothing_else() -> None:
    found = adapters(apply_lora(tiny_model("llama"), Lora(r=4), seed=0))
    linear = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert {name.split(".lora_")[0].rpartition(".")[2] for name in found} == {*linear}
    assert len(found) == 2 * 2 * len(linear)


@pytest.mark.parametrize(
    "lora", [Lora(r=4), Lora(r=4, use_rslora=True), Lora(target_modules=".*q_proj"), Lora(target_modules=("up_proj",))]
)
def test_the_outputs_do_not_change_before_the_first_step(lora: Lora) -> None:
    plain, adapted = tiny_model("llama"), apply_lora(tiny_model("llama"), lora, seed=0).eval()
    with torch.no_grad():
        assert torch.equal(plain(tokens()).logits, adapted(tokens()).logits)


def test_the_seed_alone_decides_the_draw() -> None:
    draws = []
    for seed, noise in ((5, 0), (5, 99), (6, 0)):
        model = tiny_model("llama")
        torch.manual_seed(noise)
        before = torch.get_rng_state()
        draws.append(adapters(apply_lora(model, Lora(r=4), seed=seed)))
        assert torch.equal(torch.get_rng_state(), before), "the process's random state stays"
    first, again, other = draws
    assert all(torch.equal(value, again[name]) for name, value in first.items())
    drawn = [name for name in first if "lora_A" in name]
    assert all(not torch.equal(first[name], other[name]) for name in drawn)
    assert all(not first[name].any() for name in first if name not in drawn)


def test_alpha_and_rank_scale_the_update() -> None:
    plain = apply_lora(tiny_model("llama"), Lora(r=4, lora_alpha=8), seed=0)
    stabilised = apply_lora(tiny_model("llama"), Lora(r=4, lora_alpha=8, use_rslora=True), seed=0)
    layer = "base_model.model.model.layers.0.self_attn.q_proj"
    assert plain.get_submodule(layer).scaling["default"] == 2
    assert stabilised.get_submodule(layer).scaling["default"] == 4


def test_modules_to_save_train_in_full() -> None:
    found = adapters(
        apply_lora(tiny_model("llama"), Lora(target_modules=("q_proj",), modules_to_save=("lm_head",)), seed=0)
    )
    (head,) = [name for name in found if "lora_" not in name]
    assert head.endswith("lm_head.modules_to_save.default.weight")


def test_stacked_experts_are_adapted_without_dropout() -> None:
    found = adapters(apply_lora(tiny_model("mixtral"), Lora(r=4), seed=0))
    assert any("experts" in name for name in found)


@pytest.mark.parametrize(
    ("architecture", "lora", "code", "named"),
    [
        ("llama", {"target_modules": ("nothing",)}, "LORA_TARGETS", "q_proj, up_proj"),
        ("llama", {"target_modules": "*q_proj("}, "LORA_TARGETS", "q_proj, up_proj"),
        ("llama", {"target_modules": ("input_layernorm",)}, "LORA_TARGETS", "q_proj, up_proj"),
        ("llama", {"modules_to_save": ("score",)}, "LORA_SAVE", "lm_head"),
        ("llama", {"rank_pattern": {"nothing": 4}}, "LORA_PATTERN", "q_proj, up_proj"),
        ("llama", {"alpha_pattern": {"up_proj": 4}, "target_modules": ("q_proj",)}, "LORA_PATTERN", "of q_proj, or"),
        ("mixtral", {"lora_dropout": 0.1}, "LORA_DROPOUT_EXPERTS", "k_proj, o_proj, q_proj, v_proj"),
    ],
)  # fmt: skip
def test_what_cannot_be_adapted_is_one_line_with_a_way_out(
    architecture: str, lora: dict[str, Any], code: str, named: str
) -> None:
    with pytest.raises(PlanError) as caught:
        apply_lora(tiny_model(architecture), Lora(**lora), seed=0)
    assert caught.value.codes == (code,)
    assert named in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_dropout_beside_the_experts_is_allowed() -> None:
    model = apply_lora(tiny_model("mixtral"), Lora(lora_dropout=0.1, target_modules=("q_proj", "v_proj")), seed=0)
    assert len(adapters(model)) == 2 * 2 * 2


def test_all_linear_adapts_layers_of_the_models_own_class_that_are_linear() -> None:
    """Falcon has a class of its own for all of its linear layers."""
    names = {
        name
        for name, module in apply_lora(tiny_model("falcon"), Lora(), seed=0).named_modules()
        if hasattr(module, "lora_A")
    }
    assert {name.rpartition(".")[2] for name in names} == {"query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"}


def test_all_linear_leaves_layers_of_the_models_own_class_that_are_not() -> None:
    """A router of Llama 4 or Phi-MoE is a linear layer that returns a tuple, which an adapter cannot add to."""
    from toolkit.twins.comparison import build_twin, make_batch, plain_torch

    config = CONFIG_MAPPING["llama4_text"]()
    with plain_torch():
        adapted = apply_lora(build_twin(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config), Lora(r=2), seed=0)
        adapted(**make_batch()).loss.backward()
    names = {name for name, module in adapted.named_modules() if hasattr(module, "lora_A")}
    assert not any(name.endswith("router") for name in names)
    assert any(name.endswith("q_proj") for name in names)
