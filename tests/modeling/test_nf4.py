"""Linear layers in NF4: which ones, and what a weight becomes."""

from __future__ import annotations

import sys

import pytest
import torch
from bitsandbytes.nn import Linear4bit
from tiny_models import logits, tiny_model, tokens

from toolkit.config.job import Lora
from toolkit.errors import PlanError
from toolkit.modeling.lora import apply_lora
from toolkit.modeling.nf4 import hold_in_nf4, packed_linears, rounded_to_nf4


def test_a_model_that_is_loaded_is_packed_as_it_is_and_only_once() -> None:
    rounded, packed = tiny_model("llama"), tiny_model("llama")
    with torch.no_grad():
        for linear in packed_linears(rounded).values():
            linear.weight.copy_(rounded_to_nf4(linear.weight))
    hold_in_nf4(packed, dtype=torch.float32)
    layers = [module for module in packed.modules() if isinstance(module, Linear4bit)]
    assert len(layers) == len(packed_linears(rounded)) == 14
    assert not isinstance(packed.lm_head, Linear4bit)
    assert torch.allclose(logits(packed), logits(rounded), atol=1e-6)
    assert not torch.allclose(logits(packed), logits(tiny_model("llama")), atol=1e-3)
    hold_in_nf4(packed, dtype=torch.float32)
    assert [module for module in packed.modules() if isinstance(module, Linear4bit)] == layers


def test_adapters_have_the_precision_of_the_model_and_evaluation_changes_nothing() -> None:
    model = tiny_model("llama").to(torch.bfloat16)
    hold_in_nf4(model, dtype=torch.bfloat16)
    adapted = apply_lora(model, Lora(r=4), seed=0)
    assert {weight.dtype for weight in adapted.parameters() if weight.requires_grad} == {torch.bfloat16}
    trained = adapted.train()(input_ids=tokens()).logits
    with torch.no_grad():
        evaluated = adapted.eval()(input_ids=tokens()).logits
    assert torch.equal(trained, evaluated)
    assert torch.equal(trained, adapted.train()(input_ids=tokens()).logits)


@pytest.mark.parametrize("storage", [torch.float32, torch.bfloat16], ids=str)
def test_the_data_type_that_stores_packed_weights_changes_nothing(storage: torch.dtype) -> None:
    plain, stored = tiny_model("llama"), tiny_model("llama")
    hold_in_nf4(plain, dtype=torch.float32)
    hold_in_nf4(stored, dtype=torch.float32, storage=storage)
    assert {layer.weight.dtype for layer in stored.modules() if isinstance(layer, Linear4bit)} == {storage}
    assert torch.equal(logits(plain), logits(stored))


def test_a_model_without_linear_layers_is_refused() -> None:
    with pytest.raises(PlanError) as caught:
        hold_in_nf4(tiny_model("gpt2"), dtype=torch.float32)
    assert caught.value.codes == ("QLORA_LAYERS",)


def test_without_bitsandbytes_it_is_said_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(PlanError) as caught:
        hold_in_nf4(tiny_model("llama"), dtype=torch.float32)
    assert caught.value.codes == ("QLORA_PACKAGE",)
    assert "accelerator-toolkit[qlora]" in str(caught.value)
