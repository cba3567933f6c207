"""Liger's kernels: which modules they are given, that these stay themselves, and, on a card, that they compute the same."""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
import torch
from kernel_stand_ins import package, sharded_losses
from ranks import run_distributed
from tiny_models import tiny_config, tiny_model, tokens
from torch import nn
from torch.nn import functional
from traced_models import trace_of

from toolkit.config.job import Lora
from toolkit.errors import PlanError
from toolkit.memory.kernels.device import Device
from toolkit.modeling.fused_kernels import Fusable, apply_kernels, find_fusable
from toolkit.modeling.lora import apply_lora
from toolkit.planning.rules.kernels import PLAIN_MODEL_TYPES

LLAMA, OLMO, GEMMA = (0.0, "llama"), (0.0, "gemma"), (1.0, "gemma")


# ---- what is found ---------------------------------------------------------------------------------------------------


# Architecture, overrides: formula of its norms, their number in two layers, gated layers, and what stays.
FOUND: dict[str, tuple[dict[str, Any], Any, int, Any, tuple[str, ...]]] = {
    "llama": ({}, LLAMA, 5, ("silu", False), ()),
    "mistral": ({}, LLAMA, 5, ("silu", False), ()),
    "qwen2": ({}, LLAMA, 5, ("silu", False), ()),
    "qwen3": ({}, LLAMA, 9, ("silu", False), ()),
    "smollm3": ({}, LLAMA, 5, ("silu", False), ()),
    "granite": ({}, LLAMA, 5, ("silu", False), ()),
    "phi3": ({}, LLAMA, 5, ("silu", True), ()),
    "gemma": ({"head_dim": 4}, GEMMA, 5, ("gelu_tanh", False), ()),
    "gemma2": ({}, GEMMA, 9, ("gelu_tanh", False), ()),
    "gemma3_text": ({}, GEMMA, 13, ("gelu_tanh", False), ()),
    "olmo": ({}, None, 0, ("silu", False), ("OlmoLayerNorm",)),
    "olmo2": ({}, OLMO, 9, ("silu", False), ()),
    "olmoe": ({}, LLAMA, 9, None, ("OlmoeExperts",)),
    "mixtral": ({}, LLAMA, 5, None, ("MixtralExperts",)),
    "llama with another gate": ({"hidden_act": "gelu"}, LLAMA, 5, None, ("LlamaMLP",)),
    "llama with an approximate gate": ({"hidden_act": "gelu_new"}, LLAMA, 5, None, ("LlamaMLP",)),
    "seed_oss": ({"residual_dropout": 0.0, "head_dim": 4}, LLAMA, 5, ("silu", False), ()),
    "seed_oss that drops": ({"residual_dropout": 0.1, "head_dim": 4}, LLAMA, 5, None, ("SeedOssMLP",)),
    "helium": ({"head_dim": 4}, OLMO, 5, ("silu", False), ()),
}
EXTRA = ("smollm3", "granite", "gemma", "olmo2", "seed_oss", "helium")


def model_of(case: str, **overrides: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    name, own = case.split(" ")[0], FOUND[case][0] | overrides if case in FOUND else overrides
    if name not in EXTRA:
        return tiny_model(name, **own)
    values: dict[str, Any] = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    config = AutoConfig.for_model(
        name, **values, num_attention_heads=4, num_key_value_heads=2, pad_token_id=0, eos_token_id=2, **own
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("case", FOUND)
def test_each_module_is_known_by_what_it_computes(case: str) -> None:
    _, formula, num_norms, gate, left = FOUND[case]
    with torch.device("meta"):
        model = model_of(case)
    found = find_fusable(model)
    assert {(norm.offset, norm.casting) for norm in found.norms.values()} == ({formula} if formula else set())
    assert len(found.norms) == num_norms
    assert {(gated.activation, gated.joined) for gated in found.gated.values()} == ({gate} if gate else set())
    assert len(found.gated) == (2 if gate else 0)
    assert found.left == left


def test_the_epsilon_is_the_modules_own() -> None:
    found = find_fusable(tiny_model("llama", rms_norm_eps=3e-4))
    assert {norm.epsilon for norm in found.norms.values()} == {3e-4}


class Norm(nn.Module):
    """Llama's norm but for one thing."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.eps, self.kind = 1e-6, kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        mean = wide.abs().mean(-1, keepdim=True) if self.kind == "other mean" else wide.pow(2).mean(-1, keepdim=True)
        if self.kind == "other epsilon":
            mean = mean + 1e-6
        if self.kind == "16 bit":
            return self.weight * (x * torch.rsqrt(mean + self.eps).to(x.dtype))
        if self.kind == "fails":
            raise ValueError
        return (self.weight if self.kind != "offset" else 1 + self.weight) * (wide * torch.rsqrt(mean + self.eps)).to(
            x.dtype
        )


class Clamped(nn.Module):
    """A gated layer with a limit, as some mixtures of experts have it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (nn.Linear(8, 8) for _ in range(3))
        self.act_fn = nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x).clamp(max=100.0))


@pytest.mark.parametrize("kind", ["other mean", "other epsilon", "16 bit", "offset", "fails"])
def test_a_norm_that_differs_in_one_thing_stays(kind: str) -> None:
    found = find_fusable(nn.Sequential(Norm(kind), Norm("llama")))
    assert (list(found.norms), found.left) == (["1"], ("Norm",))


def test_what_is_not_quite_a_gated_layer_stays() -> None:
    changed = Norm("llama")
    changed.forward = lambda x: x  # type: ignore[method-assign]
    found = find_fusable(nn.Sequential(Norm("llama"), Clamped(), nn.LayerNorm(8), nn.RMSNorm(8), changed))
    assert (list(found.norms), found.gated) == (["0"], {})
    assert found.left == ("Clamped", "LayerNorm", "Norm", "RMSNorm")


@pytest.mark.parametrize("architecture", ["gpt2", "opt", "gpt_neox", "falcon"])
def test_a_model_without_such_modules_is_refused(architecture: str) -> None:
    assert architecture in PLAIN_MODEL_TYPES
    with pytest.raises(PlanError) as caught:
        find_fusable(tiny_model(architecture))
    [problem] = caught.value.problems
    assert (problem.code, problem.key) == ("KERNELS_MODEL", "train.kernels")
    assert "LayerNorm" in problem.message


def test_an_estimate_names_what_stays() -> None:
    options: dict[str, Any] = {"micro_batch": 1, "sequence_length": 16, "device": Device(capability=9.0)}
    config = tiny_config("mixtral")
    eager, fused = trace_of(config, **options), trace_of(config, kernels="liger", **options)
    assert (*eager.assumptions, "kernels=liger does not replace: MixtralExperts") == fused.assumptions
    assert fused.parameters == eager.parameters
    with pytest.raises(PlanError) as caught:
        trace_of(tiny_config("gpt2"), kernels="liger", **options)
    assert caught.value.codes == ("KERNELS_MODEL",)


# ---- what is replaced, with torch's operations in the place of Triton's ------------------------------------------------


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Puts torch's operations in the place of the package, which needs a card; gives the names of those that run."""
    found: list[str] = []
    for name, module in package(found).items():
        monkeypatch.setitem(sys.modules, name, module)
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("case", ["llama", "qwen3", "phi3", "gemma2", "gemma3_text", "olmo2", "mixtral", "olmo"])
def test_the_formulas_give_the_models_numbers(case: str, dtype: torch.dtype, calls: list[str]) -> None:
    model = model_of(case).to(dtype)
    expected = model(tokens()).logits
    found = apply_kernels(model, "liger")
    assert torch.equal(model(tokens()).logits, expected)
    assert calls.count("norm") == len(found.norms)
    assert len(calls) == len(found.norms) + len(found.gated)


def test_only_this_model_changes_and_a_copy_runs_its_own(calls: list[str]) -> None:
    model, other = tiny_model("llama"), tiny_model("llama")
    before = list(model.state_dict())
    apply_kernels(model, "liger")
    assert list(model.state_dict()) == before
    expected = other(tokens()).logits
    assert calls == []
    twin = copy.deepcopy(model)
    with torch.no_grad():
        model.model.norm.weight.zero_()
    assert torch.equal(twin(tokens()).logits, expected)
    assert calls.count("norm") == 5
    assert not torch.equal(model(tokens()).logits, expected)


def test_adapters_compute_inside_the_gated_layer(calls: list[str]) -> None:
    adapted = apply_lora(tiny_model("llama"), Lora(r=2), seed=0)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    expected = adapted(tokens()).logits
    assert len(apply_kernels(adapted, "liger").gated) == 2
    assert torch.equal(adapted(tokens()).logits, expected)
    assert calls.count("swiglu") == 2


def test_eager_asks_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    assert apply_kernels(tiny_model("gpt2"), "eager") == Fusable(norms={}, gated={}, left=())


def test_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "liger_kernel", None)  # installed or not, it cannot be imported now
    with pytest.raises(PlanError, match="kernels=liger needs the package liger-kernel") as caught:
        apply_kernels(tiny_model("llama"), "liger")
    assert caught.value.codes == ("KERNELS_PACKAGE",)


def test_shards_have_kernels_and_still_compute_together() -> None:
    for rows in run_distributed(sharded_losses, 2):
        for (eager, fused, calls, together), norms, gate in zip(
            rows, (5, 5, 9, 9), ("swiglu",) * 2 + ("geglu",) * 2, strict=True
        ):
            assert fused == eager
            assert calls == sorted([*["norm"] * norms, *[gate] * 2])
            assert together == 2 * 2, "two layers, and in each the columns of attention and of the gated layer at once"


# ---- on a card -------------------------------------------------------------------------------------------------------

on_a_card = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
SIZES = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 32}
CARD_CASES = ["llama", "mistral", "qwen3", "gemma2", "gemma3_text", "olmo2", "phi3"]


def gradients_of(model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    logits = model(input_ids=ids).logits.float()
    functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    return logits.detach(), {
        name: weight.grad.float() for name, weight in model.named_parameters() if weight.grad is not None
    }


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm().clamp_min(1e-12))


def card_model(case: str) -> tuple[Any, torch.Tensor]:
    sizes = {name: value for name, value in SIZES.items() if name != "head_dim" or case not in ("phi3", "olmo2")}
    if case in EXTRA:  # built with sizes of its own
        sizes = {}
    ids = torch.randint(3, 64, (2, 32), generator=torch.Generator().manual_seed(1)).cuda()
    return model_of(case, attn_implementation="eager", **sizes).cuda(), ids


@pytest.mark.gpu
@on_a_card
@pytest.mark.parametrize("case", CARD_CASES)
def test_on_a_card_outputs_and_gradients_in_fp32(case: str) -> None:
    pytest.importorskip("liger_kernel")
    model, ids = card_model(case)
    fused = copy.deepcopy(model)
    found = apply_kernels(fused, "liger")
    assert found.norms
    assert found.gated
    assert not found.left
    (expected, wanted), (logits, gradients) = gradients_of(model, ids), gradients_of(fused, ids)
    assert distance(logits, expected) < 1e-5
    assert gradients.keys() == wanted.keys()
    for name, gradient in gradients.items():
        assert distance(gradient, wanted[name]) < 1e-4, name


@pytest.mark.gpu
@on_a_card
@pytest.mark.parametrize("case", CARD_CASES)
def test_on_a_card_in_bf16_no_further_from_exact_than_eager(case: str) -> None:
    pytest.importorskip("liger_kernel")
    exact, ids = card_model(case)
    eager = copy.deepcopy(exact).to(torch.bfloat16)
    exact.load_state_dict({name: value.float() for name, value in eager.state_dict().items()})
    fused = copy.deepcopy(eager)
    apply_kernels(fused, "liger")
    true_logits, true = gradients_of(exact, ids)
    (eager_logits, plain), (logits, gradients) = gradients_of(eager, ids), gradients_of(fused, ids)
    assert distance(logits, true_logits) < 1.2 * distance(eager_logits, true_logits) + 1e-4
    for name, gradient in gradients.items():
        assert distance(gradient, true[name]) < 1.3 * distance(plain[name], true[name]) + 2e-3, name


@pytest.mark.gpu
@on_a_card
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("case", ["llama", "gemma2", "olmo2", "qwen3"])
def test_on_a_card_each_module_gives_the_eager_numbers(case: str, dtype: torch.dtype) -> None:
    """Forward: but for the last bit of few numbers in 16 bit, where fp32 sums of another order round apart."""
    pytest.importorskip("liger_kernel")
    model = card_model(case)[0].to(dtype)
    fused = copy.deepcopy(model)
    found = apply_kernels(fused, "liger")
    tolerance = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 1e-5}[dtype]
    for name in (*found.norms, *found.gated):
        module = model.get_submodule(name)
        weight = module.weight if name in found.norms else module.gate_proj.weight
        x = torch.randn(3, 40, weight.shape[-1], device="cuda", generator=torch.Generator("cuda").manual_seed(0)).to(
            dtype
        )
        expected, given = module(x), fused.get_submodule(name)(x)
        assert given.dtype == expected.dtype
        torch.testing.assert_close(given, expected, rtol=tolerance, atol=tolerance)
        same = (given == expected).float().mean()
        assert name not in found.norms or dtype is torch.float32 or float(same) > 0.98, (name, float(same))


@pytest.mark.gpu
@on_a_card
def test_on_a_card_frozen_norms_recomputation_and_a_gradient_that_others_share() -> None:
    pytest.importorskip("liger_kernel")
    model, ids = card_model("gemma2")  # its norms end branches: their gradient is the residual's too
    adapted = apply_lora(model, Lora(r=4), seed=0)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.02)
    fused = copy.deepcopy(adapted)
    apply_kernels(fused, "liger")
    fused.train().get_base_model().gradient_checkpointing_enable({"use_reentrant": False})
    fused.enable_input_require_grads()
    (expected, wanted), (logits, gradients) = gradients_of(adapted.train(), ids), gradients_of(fused, ids)
    assert distance(logits, expected) < 1e-5
    assert gradients.keys() == wanted.keys()
    for name, gradient in gradients.items():
        assert distance(gradient, wanted[name]) < 1e-4, name
