"""The loss without logits is the loss with them: value and every gradient, in each architecture and with adapters."""

from __future__ import annotations

import copy
import math
import sys

import pytest
import torch
from tiny_models import ARCHITECTURES, tiny_config, tiny_model, tokens
from transformers import AutoConfig, AutoModelForCausalLM

from toolkit.config.job import Lora
from toolkit.errors import PlanError
from toolkit.modeling import linear_cross_entropy as fused
from toolkit.modeling.chunked_loss import apply_loss
from toolkit.modeling.lora import apply_lora
from toolkit.modeling.loss import auxiliary_loss, summed_cross_entropy, token_loss

NUM_TARGETS = 7
SCALED = {
    "cohere": {"logit_scale": 0.25},
    "granite": {"logits_scaling": 3.0, "embedding_multiplier": 2.0},
    "falcon_h1": {"lm_head_multiplier": 0.3},
}


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cuts even these vocabularies, of 64 words, and unevenly."""
    monkeypatch.setattr(fused, "LEAST_ROWS", 9)
    monkeypatch.setattr(fused, "BLOCK_ELEMENTS", 700)


def labels() -> torch.Tensor:
    made = tokens().clone()
    made[0, :5] = -100
    made[1, 9] = -100
    return made


def course(model: torch.nn.Module, *, fused_loss: bool) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Gives the loss and the gradients of a mean over `NUM_TARGETS` tokens, a router's loss included."""
    given = {"labels": labels()} if fused_loss else {}
    outputs = model(input_ids=tokens(), **given)
    assert (outputs.logits is None) == fused_loss
    loss = token_loss(outputs, labels()) / NUM_TARGETS
    router = auxiliary_loss(outputs, model.config)
    model.zero_grad()
    (loss if router is None else loss + router).backward()
    gradients = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    return loss.detach(), gradients


def compare(model: torch.nn.Module) -> None:
    dense, expected = course(model, fused_loss=False)
    apply_loss(model, "chunked")
    loss, gradients = course(model, fused_loss=True)
    assert float(loss) == pytest.approx(float(dense), rel=1e-6)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=2e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
    assert model(input_ids=tokens()).logits.shape[-1] == 64, "without labels it gives logits as before"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_loss_and_gradients_are_those_of_the_logits(architecture):
    compare(tiny_model(architecture))


def test_a_cap_that_bites():
    compare(tiny_model("gemma2", final_logit_softcapping=0.5))


@pytest.mark.parametrize("architecture", SCALED)
def test_a_factor_behind_the_head(architecture):
    config = {**tiny_config("llama").to_dict(), **SCALED[architecture]}
    config.pop("model_type")
    if architecture == "falcon_h1":
        config |= {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8}
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}
    torch.manual_seed(0)
    compare(AutoModelForCausalLM.from_config(AutoConfig.for_model(architecture, **config)).eval())


def test_a_router_keeps_its_loss():
    model = tiny_model("mixtral", output_router_logits=True, router_aux_loss_coef=0.5, num_local_experts=4)
    compare(model)
    assert model(input_ids=tokens(), labels=labels()).aux_loss > 0


@pytest.mark.parametrize(
    "lora",
    [
        Lora(r=4),
        Lora(r=4, target_modules=("q_proj",), modules_to_save=("lm_head",)),
        Lora(r=4, target_modules=("q_proj", "lm_head")),
    ],
    ids=["beside the head", "head trained", "on the head"],
)
def test_adapters(lora):
    adapted = apply_lora(tiny_model("llama"), lora, seed=0)
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.3)  # fp32 sums of numbers near 1
    compare(adapted)


def test_a_copy_runs_its_own_layers_and_head():
    model = tiny_model("llama")
    apply_loss(model, "chunked")
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied.lm_head.weight.zero_()
        found, own = (made(input_ids=tokens(), labels=labels()).loss for made in (copied, model))
    num_targets = int((labels()[:, 1:] != -100).sum())
    assert float(found) == pytest.approx(num_targets * math.log(64))
    assert float(own) != pytest.approx(float(found), rel=1e-3)


def test_nothing_to_learn_is_a_loss_of_zero():
    model = tiny_model("llama")
    apply_loss(model, "chunked")
    loss = model(input_ids=tokens(), labels=torch.full_like(tokens(), -100)).loss
    loss.backward()
    assert float(loss) == 0
    assert not any(weight.grad.any() for weight in model.parameters())


def test_a_head_inside_another_module_is_refused_by_name():
    config = AutoConfig.for_model("bert", is_decoder=True, hidden_size=16, num_attention_heads=2, num_hidden_layers=1)
    with pytest.raises(PlanError, match="BertLMHeadModel: its head is not a module") as caught:
        apply_loss(AutoModelForCausalLM.from_config(config), "chunked")
    assert caught.value.codes == ("LOSS_ARCHITECTURE",)


def test_what_else_a_model_does_to_its_logits_is_refused(monkeypatch):
    model = tiny_model("llama")
    own = type(model).forward

    def forward(self, *args, **kwargs):
        outputs = own(self, *args, **kwargs)
        outputs.logits = outputs.logits + 1
        return outputs

    monkeypatch.setattr(type(model), "forward", forward)
    with pytest.raises(PlanError, match="more to its head's output") as caught:
        apply_loss(model, "chunked")
    assert caught.value.codes == ("LOSS_ARCHITECTURE",)
    assert isinstance(model.lm_head, torch.nn.Linear), "the model is left as it was"


def test_liger_without_its_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "liger_kernel", None)  # installed or not, it cannot be imported now
    with pytest.raises(PlanError, match="liger-kernel") as caught:
        apply_loss(tiny_model("llama"), "liger")
    assert caught.value.codes == ("LOSS_LIGER_PACKAGE",)
    assert "[liger]" in caught.value.problems[0].fix


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("architecture", "config"),
    [
        ("llama", {}),
        ("llama-tied", {}),
        ("gemma2", {"final_logit_softcapping": 2.0}),
        ("mixtral", {"output_router_logits": True, "num_local_experts": 4}),
    ],
)
@pytest.mark.parametrize("loss", ["liger", "chunked"])
def test_on_a_gpu_both_give_the_dense_loss(architecture, config, loss):
    if loss == "liger":
        pytest.importorskip("liger_kernel")
    model = tiny_model(architecture, **config).cuda()
    ids, wanted = tokens().cuda(), labels().cuda()
    dense = summed_cross_entropy(model(input_ids=ids).logits, wanted) / NUM_TARGETS
    dense.backward()
    expected = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad()
    apply_loss(model, loss)
    found = model(input_ids=ids, labels=wanted).loss / NUM_TARGETS
    found.backward()
    assert float(found) == pytest.approx(float(dense), rel=1e-4)
    for name, gradient in expected.items():
        torch.testing.assert_close(model.get_parameter(name).grad, gradient, rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_liger_refuses_lora_on_the_head():
    pytest.importorskip("liger_kernel")
    adapted = apply_lora(tiny_model("llama"), Lora(target_modules=("q_proj", "lm_head")), seed=0)
    with pytest.raises(PlanError) as caught:
        apply_loss(adapted, "liger")
    assert caught.value.codes == ("LOSS_LIGER_HEAD",)
