"""The head and its loss in blocks of the vocabulary."""

from __future__ import annotations

import pytest
import torch
from tiny_models import tiny_config
from transformers import AutoModelForCausalLM

from toolkit.modeling import linear_cross_entropy as fused
from toolkit.modeling.chunked_loss import find_logit_map
from toolkit.modeling.linear_cross_entropy import LogitMap, linear_cross_entropy


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cuts even these vocabularies, of 64 words, and unevenly."""
    monkeypatch.setattr(fused, "LEAST_ROWS", 9)
    monkeypatch.setattr(fused, "BLOCK_ELEMENTS", 700)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_in_16_bit_are_rounded_as_those_of_the_logits(dtype):
    """Held against fp64: the errors of both are alike, though the head's gradient is a sum over many tokens."""
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn((512, 32), generator=draw).to(dtype)
    weight = torch.randn((200, 32), generator=draw).to(dtype)
    targets = torch.randint(0, 200, (512,), generator=draw)

    def gradients(evaluate, kind):
        leaves = [tensor.detach().clone().to(kind).requires_grad_() for tensor in (hidden, weight)]
        (evaluate(*leaves) / 100).backward()
        return [leaf.grad.double() for leaf in leaves]

    def dense(hidden, weight):
        return torch.nn.functional.cross_entropy((hidden @ weight.T).to(torch.float64), targets, reduction="sum")

    exact = gradients(dense, torch.float64)
    through_logits = gradients(dense, dtype)
    blocks = gradients(lambda h, w: linear_cross_entropy(h, w, None, targets, LogitMap()), dtype)
    for ours, theirs, true in zip(blocks, through_logits, exact, strict=True):
        assert (ours - true).norm() < 1.5 * (theirs - true).norm()


@pytest.mark.parametrize(
    "trained", [(True, True, True), (True, False, False), (False, True, False), (False, False, True)]
)
@pytest.mark.parametrize("num_tokens", [1, 33])
def test_only_what_is_trained_has_a_gradient(trained, num_tokens):
    """33 words in blocks of 21 or 700, with every second token masked."""
    draw = torch.Generator().manual_seed(0)
    leaves = [torch.randn(shape, generator=draw, dtype=torch.float32) for shape in ((num_tokens, 8), (33, 8), (33,))]
    targets = torch.randint(0, 33, (num_tokens,), generator=draw)
    targets[1::2] = -100
    mapped = LogitMap(scale=-0.5, cap=3.0)

    def gradients(dtype, evaluate):
        made = [leaf.to(dtype, copy=True).requires_grad_(wanted) for leaf, wanted in zip(leaves, trained, strict=True)]
        evaluate(*made).backward()
        return [leaf.grad for leaf in made]

    def dense(hidden, weight, bias):
        scores = 3.0 * torch.tanh(-0.5 * (hidden @ weight.T + bias) / 3.0)
        return torch.nn.functional.cross_entropy(scores, targets, reduction="sum")

    found = gradients(torch.float32, lambda h, w, b: linear_cross_entropy(h, w, b, targets, mapped))
    for ours, true, wanted in zip(found, gradients(torch.float64, dense), trained, strict=True):
        assert (ours is not None) == wanted
        if wanted:
            torch.testing.assert_close(ours.double(), true, rtol=1e-4, atol=1e-5)


def test_a_second_derivative_is_refused():
    hidden = torch.randn(4, 8, requires_grad=True)
    loss = linear_cross_entropy(hidden, torch.randn(64, 8), None, torch.arange(4), LogitMap())
    (gradient,) = torch.autograd.grad(loss, hidden, create_graph=True)
    with pytest.raises(RuntimeError):
        gradient.sum().backward()


def test_what_a_model_does_to_its_logits_is_found_without_its_weights():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config("gemma2", final_logit_softcapping=30.0))
    assert find_logit_map(model, "lm_head", "chunked") == LogitMap(cap=30.0)
