"""Stages with what else a job may ask for: checkpointing, adapters, losses without logits, compilation, evaluation."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from staged_models import Chain, batch, cut_copies, dense_model, gradients
from transformers.models.opt import modeling_opt

from toolkit.config.job import Lora
from toolkit.errors import PlanError
from toolkit.introspect import decoder_layers
from toolkit.modeling.build import compile_layers
from toolkit.modeling.checkpointing import apply_gradient_checkpointing
from toolkit.modeling.chunked_loss import apply_loss
from toolkit.modeling.lora import apply_lora
from toolkit.modeling.loss import token_loss
from toolkit.pipeline_parallel import forward_stage, stage_info

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


def assert_gradients(chain: Chain, dense: Any) -> None:
    found, wanted = chain.gradients(), gradients(dense)
    assert found.keys() == wanted.keys()
    for key, gradient in wanted.items():
        torch.testing.assert_close(found[key], gradient, **TOLERANCE, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("name", ["llama", "gpt2", "bloom", "gemma2", "falcon", "mixtral"])
def test_layers_that_run_again_get_what_was_received(name: str, offload: bool) -> None:
    dense = dense_model(name, tied=True).train()
    for module in dense.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    chain = Chain(cut_copies(dense, 2, virtual=2))
    counts = [apply_gradient_checkpointing(model, fraction=1, offload_inputs=offload) for model in chain.models]
    assert counts == [2, 2]
    given = batch("padded")
    calls: list[int] = []
    for model in chain.models:
        for layer in decoder_layers(model):
            first = next(
                module for module in layer.modules() if not list(module.children()) and list(module.parameters())
            )
            first.register_forward_hook(lambda *_: calls.append(1))
    wanted = dense(**given, use_cache=False)
    wanted.loss.backward()
    output, sent = chain.forward(given)
    once = len(calls)
    chain.backward(output.loss, sent)
    assert len(calls) == 2 * once > 0
    torch.testing.assert_close(output.loss, wanted.loss, **TOLERANCE)
    assert_gradients(chain, dense)


def test_micro_batches_in_flight_do_not_meet() -> None:
    dense = dense_model("qwen2", tied=True).train()
    chain = Chain(cut_copies(dense, 2, virtual=2))
    for model in chain.models:
        apply_gradient_checkpointing(model, fraction=1, offload_inputs=False)
    batches = [batch("padded", length=12), batch("packed", length=9), batch("plain", length=10)]
    for given in batches:
        dense(**given, use_cache=False).loss.backward()
    passed = [chain.forward(given) for given in batches]
    for output, sent in (passed[1], passed[0], passed[2]):
        chain.backward(output.loss, sent)
    assert_gradients(chain, dense)


# all-linear; names; one whose target is on some stages alone; a module trained in full at either end.
LORAS = {
    "all-linear": Lora(r=2, target_modules="all-linear"),
    "names": Lora(r=2, target_modules=("q_proj", "v_proj")),
    "ends": Lora(r=2, target_modules=("q_proj", "lm_head", "embed_tokens")),
    "saved": Lora(r=2, target_modules=("up_proj",), modules_to_save=("lm_head", "norm", "embed_tokens")),
}


@pytest.mark.parametrize("layout", [(2, 1), (4, 1), (2, 2)])
@pytest.mark.parametrize("chosen", LORAS)
def test_adapters_are_those_of_the_dense_model(chosen: str, layout: tuple[int, int]) -> None:
    dense = dense_model("llama")
    ranks, virtual = layout
    chain = Chain([apply_lora(model, LORAS[chosen], seed=5) for model in cut_copies(dense, ranks, virtual=virtual)])
    adapted = apply_lora(dense, LORAS[chosen], seed=5)
    ours: dict[str, torch.Tensor] = {}
    for model in chain.models:
        own = dict(model.named_parameters())
        assert not own.keys() & ours.keys()
        ours |= own
        assert model.active_peft_config.exclude_modules is None
    assert chain.models[0].active_peft_config.target_modules == (
        "all-linear" if chosen == "all-linear" else adapted.active_peft_config.target_modules
    )
    theirs = dict(adapted.named_parameters())
    assert ours.keys() == theirs.keys()
    with torch.no_grad():
        for name, weight in theirs.items():
            assert ours[name].requires_grad == weight.requires_grad
            assert torch.equal(ours[name], weight), name
            if "lora_B" in name or "lora_embedding_A" in name:  # zero so far, where no gradient would pass
                weight.copy_(torch.randn_like(weight) * 0.1)
                ours[name].copy_(weight)
    for model in (adapted, *chain.models):
        model.train()
        apply_gradient_checkpointing(model, fraction=1, offload_inputs=False)
    given = batch("padded")
    wanted = adapted(**given, use_cache=False)
    wanted.loss.backward()
    output, sent = chain.forward(given)
    chain.backward(output.loss, sent)
    torch.testing.assert_close(output.loss, wanted.loss, **TOLERANCE)
    assert_gradients(chain, adapted)


def test_adapters_of_a_stage_without_a_target_are_refused() -> None:
    first, _ = cut_copies(dense_model("llama"), 2)
    with pytest.raises(PlanError) as caught:
        apply_lora(first, Lora(r=2, target_modules=("lm_head",)), seed=0)
    assert caught.value.codes == ("LORA_TARGETS",)


@pytest.mark.parametrize("name", ["llama", "gemma2", "granite", "gpt2"])
@pytest.mark.parametrize("tied", [False, True])
def test_the_last_stage_gives_its_loss_without_logits(name: str, tied: bool) -> None:
    dense = dense_model(name, tied=tied)
    chain = Chain(cut_copies(dense, 2, virtual=2))
    apply_loss(chain.models[-1], "chunked")
    given = batch("padded")
    wanted = token_loss(dense(**{k: v for k, v in given.items() if k != "labels"}, use_cache=False), given["labels"])
    wanted.backward()
    output, sent = chain.forward(given)
    assert getattr(output, "logits", None) is None
    chain.backward(output.loss, sent)
    torch.testing.assert_close(output.loss, wanted, **TOLERANCE)
    assert_gradients(chain, dense)


def test_compiled_layers_of_a_stage() -> None:
    dense = dense_model("llama")
    chain = Chain(cut_copies(dense, 2))
    given = batch("padded")
    wanted = dense(**given, use_cache=False)
    wanted.loss.backward()
    try:
        for model in chain.models:
            assert compile_layers(model) == 2
            for layer in decoder_layers(model):
                layer.compile(backend="aot_eager")
        output, sent = chain.forward(given)
        chain.backward(output.loss, sent)
    finally:
        torch.compiler.reset()
    torch.testing.assert_close(output.loss, wanted.loss, **TOLERANCE)
    assert_gradients(chain, dense)


def test_a_copy_runs_its_own_weights() -> None:
    dense = dense_model("llama", tied=True)
    chain = Chain(cut_copies(dense, 2, virtual=2))
    copied = Chain(copy.deepcopy(chain.models))
    with torch.no_grad():
        for model in chain.models:
            for weight in model.parameters():
                weight.zero_()
    assert stage_info(copied.models[0]) == stage_info(chain.models[0])
    with torch.no_grad():
        wanted, (found, _) = dense(**batch(), use_cache=False), copied.forward(batch())
    torch.testing.assert_close(found.logits, wanted.logits, **TOLERANCE)
    assert not found.logits.requires_grad


@pytest.mark.parametrize("name", ["gpt2", "phi", "opt", "bloom"])
def test_what_a_stage_does_not_hold_drops_nothing(name: str) -> None:
    """An inner stage draws no random number outside its layers."""
    if name == "opt" and "self.layerdrop > 0" not in inspect.getsource(modeling_opt):
        pytest.skip("this transformers draws a number for each layer that it might drop")
    dense = dense_model(name)
    model = cut_copies(dense, 4)[1].train()
    for layer in decoder_layers(model):
        layer.eval()
    hidden = torch.randn(2, 12, 16)
    state = torch.get_rng_state()
    forward_stage(model, batch(), received=hidden)
    assert torch.equal(torch.get_rng_state(), state)
