"""Float8 products: equal to rounding written out by hand, near bf16, in the layers that are meant and in no others."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from tiny_models import tiny_model, tokens
from tiny_plans import tiny_plan
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from toolkit.config.job import Fp8, Lora
from toolkit.errors import PlanError
from toolkit.modeling import build
from toolkit.modeling import fp8 as module_under_test
from toolkit.modeling.build import build_model, compile_layers
from toolkit.modeling.fp8 import apply_fp8, check_device, fp8_layers, without_fp8
from toolkit.modeling.lora import apply_lora

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_key_value_heads": 4}


# ---- the reference: rounding written out, products in fp32 -----------------------------------------------------------


def rounded(matrix: torch.Tensor, kind: torch.dtype, *, dim: int | None, power_of_2: bool) -> torch.Tensor:
    """The matrix as float8 under a scale would hold it; `dim` is the side that shares a scale, None the whole."""
    values = matrix.double()
    largest = values.abs().amax() if dim is None else values.abs().amax(dim, keepdim=True)
    scale = (torch.finfo(kind).max / largest.clamp(min=1e-12)).float()
    scale = torch.exp2(torch.floor(torch.log2(scale))) if power_of_2 else scale
    limit = torch.finfo(kind).max
    return (matrix.float() * scale).clamp(-limit, limit).to(kind).float() / scale


class Reference(torch.autograd.Function):
    """Y = X W^T with each factor of each of the three products rounded."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, recipe: str) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.recipe, plain = recipe, recipe == "tensorwise"
        dim = None if plain else -1
        first = rounded(x.flatten(0, -2), E4M3, dim=dim, power_of_2=not plain)
        second = rounded(weight, E4M3, dim=dim, power_of_2=not plain)
        return (first @ second.T).to(x.dtype).unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (x, weight), recipe = ctx.saved_tensors, ctx.recipe
        plain = recipe == "tensorwise"
        kind, rows = (E5M2, x.flatten(0, -2)) if plain else (E4M3, x.flatten(0, -2))
        grad = grads[0].flatten(0, -2)
        of_weight = None if recipe != "rowwise" else 0
        left = rounded(grad, kind, dim=None if plain else -1, power_of_2=not plain)
        grad_x = (left @ rounded(weight, E4M3, dim=of_weight, power_of_2=not plain)).to(x.dtype).view_as(x)
        if recipe == "rowwise_with_gw_hp":
            return grad_x, grad.T @ rows, None
        dim = None if plain else 0
        left = rounded(grad, kind, dim=dim, power_of_2=not plain)
        grad_weight = (left.T @ rounded(rows, E4M3, dim=dim, power_of_2=not plain)).to(x.dtype)
        return grad_x, grad_weight, None


def apply_reference(model: nn.Module, recipe: str) -> None:
    """Gives each linear layer inside the decoder layers the reference's forward pass."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and ".layers." in name:
            module.forward = lambda x, own=module: (  # type: ignore[method-assign]
                Reference.apply(x, own.weight, recipe)
                if own.bias is None
                else Reference.apply(x, own.weight, recipe) + own.bias
            )


def results(model: nn.Module, *, length: int = 15) -> dict[str, torch.Tensor]:
    """Logits and gradients of two sequences; 30 tokens are no multiple of 16."""
    model.zero_grad()
    ids = tokens(length)
    outputs = model(input_ids=ids, labels=ids)
    outputs.loss.backward()
    # One vector added to all keys moves all scores of a query alike: its gradient is zero but for rounding.
    weights = {name: weight for name, weight in model.named_parameters() if not name.endswith("k_proj.bias")}
    gradients = {name: weight.grad.clone() for name, weight in weights.items() if weight.grad is not None}
    return {"logits": outputs.logits.detach(), **gradients}


def distance(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest relative difference of the tensors, in the Frobenius norm."""
    assert found.keys() == expected.keys()
    pairs = [(found[name].double(), value.double()) for name, value in expected.items()]
    return max(float((one - other).norm() / other.norm()) for one, other in pairs)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])  # Qwen2 has biases
def test_a_model_computes_as_its_rounded_self(architecture: str, recipe: str) -> None:
    exact, in_bf16, by_hand, ours = (tiny_model(architecture, **SIZES) for _ in range(4))
    for model in (in_bf16, by_hand, ours):
        model.to(torch.bfloat16)
    apply_reference(by_hand, recipe)
    assert apply_fp8(ours, Fp8(recipe=recipe), emulate=True) == 14
    expected, found = results(by_hand), results(ours)
    assert distance(found, expected) < 4e-3, "one unit of bf16 here and there"
    rounding = distance(expected, results(exact))
    assert distance(found, results(exact)) < 1.1 * rounding
    assert 3 * distance(results(in_bf16), results(exact)) < rounding < 0.2, (
        "float8 is coarser than bf16, and no coarser"
    )


@pytest.mark.parametrize("tokens_in_all", [32, 30, 1])
@pytest.mark.parametrize(
    ("recipe", "emulate"),
    [
        *((recipe, True) for recipe in RECIPES),
        ("tensorwise", False),
    ],  # torch 2.11's kernel for CPUs has no scales a row
)
def test_each_product_is_that_of_rounded_factors(recipe: str, emulate: bool, tokens_in_all: int) -> None:
    model = tiny_model("llama", **SIZES).to(torch.bfloat16)
    apply_fp8(model, Fp8(recipe=recipe), emulate=emulate)
    layer = model.model.layers[0].mlp.up_proj
    draw = torch.Generator().manual_seed(tokens_in_all)
    x = torch.randn(tokens_in_all, 32, generator=draw).to(torch.bfloat16).requires_grad_()
    grad = torch.randn(tokens_in_all, 48, generator=draw).to(torch.bfloat16)
    expected, found = (
        [output.detach(), *torch.autograd.grad(output, (x, layer.weight), grad)]
        for output in (Reference.apply(x, layer.weight, recipe), layer(x))
    )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2**-7, atol=1e-5)  # a unit of bf16


@pytest.mark.parametrize("recipe", RECIPES)
def test_factors_lie_as_the_kernels_of_cards_want_them(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own checks of shapes, strides and scales for CUDA, which its shape functions make without a card."""
    monkeypatch.setattr(torch._meta_registrations, "device_hint", lambda tensor: "cuda")
    model = tiny_model("llama", **SIZES).to(torch.bfloat16)
    apply_fp8(model, Fp8(recipe=recipe), emulate=False)
    layer = model.model.layers[0].mlp.up_proj
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        layer.weight = nn.Parameter(fake.from_tensor(layer.weight.data))
        for rows in (64, 30, 1):
            x = torch.empty(rows, 32, dtype=torch.bfloat16, requires_grad=True)
            output = layer(x)
            gradients = torch.autograd.grad(output, (x, layer.weight), torch.empty_like(output))
            assert [tuple(value.shape) for value in (output, *gradients)] == [(rows, 48), (rows, 32), (48, 32)]


def test_recipes_differ() -> None:
    found = {}
    for recipe in RECIPES:
        model = tiny_model("llama", **SIZES).to(torch.bfloat16)
        apply_fp8(model, Fp8(recipe=recipe), emulate=True)
        found[recipe] = results(model)
    exact = results(tiny_model("llama", **SIZES))
    assert torch.equal(found["rowwise"]["logits"], found["rowwise_with_gw_hp"]["logits"])
    assert not torch.equal(found["tensorwise"]["logits"], found["rowwise"]["logits"])
    key = "model.layers.1.mlp.down_proj.weight"
    error = {recipe: float((value[key] - exact[key]).norm()) for recipe, value in found.items()}
    assert error["rowwise_with_gw_hp"] < error["rowwise"] < error["tensorwise"]


# ---- which layers ----------------------------------------------------------------------------------------------------


def test_parameters_stay_the_same_objects_under_the_same_names() -> None:
    model = tiny_model("qwen2", **SIZES).to(torch.bfloat16)
    before = dict(model.named_parameters())
    keys = list(model.state_dict())
    apply_fp8(model, Fp8(), emulate=True)
    after = dict(model.named_parameters())
    assert before.keys() == after.keys()
    assert all(after[name] is weight for name, weight in before.items())
    assert list(model.state_dict()) == keys
    assert {weight.dtype for weight in after.values()} == {torch.bfloat16}


def test_only_linear_layers_of_decoder_layers_whose_sizes_fit() -> None:
    model = tiny_model("llama", **SIZES | {"intermediate_size": 40}).to(torch.bfloat16)
    mlp = model.model.layers[0].mlp
    mlp.router, mlp.gate = nn.Linear(32, 32), nn.Linear(32, 32)
    apply_fp8(model, Fp8(), emulate=True)
    inside = {id(layer) for layer in fp8_layers(model)}
    chosen = {name for name, module in model.named_modules() if id(module) in inside}
    projections = {f"model.layers.{index}.self_attn.{part}_proj" for index in range(2) for part in "qkvo"}
    assert chosen == projections


def test_experts_and_their_router_stay_in_bf16() -> None:
    model = tiny_model("mixtral", **SIZES).to(torch.bfloat16)
    assert apply_fp8(model, Fp8(), emulate=True) == 8
    assert all("self_attn" in name for name, module in model.named_modules() if hasattr(module, "in_fp8"))


def test_a_model_without_such_layers_is_refused() -> None:
    with pytest.raises(PlanError, match="GPT2LMHeadModel has no linear layer") as caught:
        apply_fp8(tiny_model("gpt2"), Fp8(), emulate=True)  # its layers are transformers' Conv1D
    assert caught.value.codes == ("FP8_LAYERS",)


def test_frozen_weights_get_no_gradient_and_keep_no_input() -> None:
    model = tiny_model("llama", **SIZES).to(torch.bfloat16)
    adapted = apply_lora(model, Lora(r=16), seed=0)
    assert apply_fp8(adapted, Fp8(), emulate=True) == 14, "the adapters' own matrices stay in bf16"
    names = {name for name, module in adapted.named_modules() if hasattr(module, "in_fp8")}
    assert all(name.endswith(".base_layer") for name in names)
    gradients = results(adapted).keys() - {"logits"}
    assert gradients
    assert all("lora_" in name for name in gradients)
    layer = next(fp8_layers(adapted))
    hidden = torch.randn(3, 32, dtype=torch.bfloat16, requires_grad=True)
    output = layer(hidden)
    assert output.grad_fn.saved_tensors[0] is None
    layer.weight.requires_grad_(True)
    output = layer(hidden)
    assert output.grad_fn.saved_tensors[0] is hidden


def test_the_parameter_itself_is_saved() -> None:
    """A view of it would hold the storage of ZeRO-3's gathered weight until the backward pass."""
    tiny = tiny_model("llama", **SIZES).to(torch.bfloat16)
    apply_fp8(tiny, Fp8(), emulate=True)
    layer = next(fp8_layers(tiny))
    output = layer(torch.randn(3, 32, dtype=torch.bfloat16, requires_grad=True))
    whole = layer.weight.data
    layer.weight.data = torch.empty(0, dtype=torch.bfloat16)  # as DeepSpeed releases it
    assert output.grad_fn.saved_tensors[1].numel() == 0
    layer.weight.data = whole
    output.sum().backward()
    assert layer.weight.grad.shape == whole.shape


def test_without_fp8_a_model_is_its_bf16_self() -> None:
    model, plain = (tiny_model("llama", **SIZES).to(torch.bfloat16) for _ in range(2))
    apply_fp8(model, Fp8(), emulate=True)
    expected, in_fp8 = results(plain), results(model)
    with without_fp8(model):
        found = results(model)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert torch.equal(results(model)["logits"], in_fp8["logits"])
    assert not torch.equal(in_fp8["logits"], expected["logits"])


# ---- package and card ------------------------------------------------------------------------------------------------


def test_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(PlanError, match="needs the package torchao") as caught:
        apply_fp8(tiny_model("llama"), Fp8(), emulate=True)
    assert caught.value.codes == ("FP8_PACKAGE",)
    assert "[fp8]" in caught.value.problems[0].fix


def test_a_build_fails_before_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = tiny_plan(train={"precision": "fp8"}, parallel={"zero_stage": 0}, config=SIZES)
    assert len(list(fp8_layers(build_model(plan, device=torch.device("cpu"))))) == 14
    monkeypatch.setattr(build, "construct", lambda *arguments, **options: pytest.fail("the model was built"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    with pytest.raises(PlanError) as caught:
        build_model(plan, device=torch.device("cuda", 0))
    assert caught.value.codes == ("FP8_CAPABILITY",)
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(PlanError) as caught:
        build_model(plan, device=torch.device("cpu"))
    assert caught.value.codes == ("FP8_PACKAGE",)


def test_a_card_without_float8_units_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    with pytest.raises(PlanError, match=r"A100 of compute capability 8\.0") as caught:
        check_device(torch.device("cuda", 0))
    assert caught.value.codes == ("FP8_CAPABILITY",)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    check_device(torch.device("cuda", 0))
    check_device(torch.device("cpu"))
    assert module_under_test.MIN_CAPABILITY == (8, 9)


@pytest.mark.full  # the C++ compiler takes a minute
def test_compiled_layers_stay_within_the_rounding_of_float8() -> None:
    exact, model = tiny_model("llama", **SIZES), tiny_model("llama", **SIZES).to(torch.bfloat16)
    apply_fp8(model, Fp8(), emulate=True)
    expected, eager = results(exact, length=16), results(model, length=16)
    compile_layers(model)
    compiled = results(model, length=16)
    # Fused code keeps in fp32 what eager code rounds to bf16 in between, so other values sit at the edge of a rounding.
    assert distance(compiled, expected) < 1.2 * distance(eager, expected)


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < module_under_test.MIN_CAPABILITY,
    reason="needs a card with float8 units",
)
@pytest.mark.parametrize("recipe", RECIPES)
def test_on_a_card_each_product_is_that_of_rounded_factors(recipe: str) -> None:
    model = tiny_model("llama", hidden_size=256, intermediate_size=512).to("cuda", torch.bfloat16)
    apply_fp8(model, Fp8(recipe=recipe), emulate=False)
    layer = model.model.layers[0].mlp.up_proj
    for rows in (64, 30, 1):  # two of them are no multiple of 16
        x = torch.randn(rows, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        grad = torch.randn(rows, 512, device="cuda", dtype=torch.bfloat16)
        expected, found = (
            [output.detach(), *torch.autograd.grad(output, (x, layer.weight), grad)]
            for output in (Reference.apply(x, layer.weight, recipe), layer(x))
        )
        for one, other in zip(found, expected, strict=True):
            # The units add up in less than fp32 (cublasLt CUBLASLT_MATMUL_DESC_FAST_ACCUM).
            assert (one - other).norm() < 5e-3 * other.norm(), (recipe, rows)
