"""A chain of stages is the dense model: logits, loss and every gradient."""

from __future__ import annotations

import pytest
import torch
from staged_models import MODELS, Chain, batch, cut_copies, dense_model, gradients

TOLERANCE = 1e-5
LAYOUTS = {"2": (2, 1), "4": (4, 1), "2x2": (2, 2)}  # ranks and virtual stages
KINDS = ("plain", "padded", "packed")


def assert_same(name: str, *, tied: bool, layout: str, kind: str, checkpointing: bool = False) -> None:
    dense = dense_model(name, tied=tied)
    ranks, virtual = LAYOUTS[layout]
    chain = Chain(cut_copies(dense, ranks, virtual=virtual))
    given = batch(kind)
    if checkpointing:
        for model in (dense, *chain.models):
            model.train()
            model.gradient_checkpointing_enable({"use_reentrant": False})
    expected = dense(**given, use_cache=False)
    expected.loss.backward()
    output, sent = chain.forward(given)
    chain.backward(output.loss, sent)
    assert len(sent) == ranks * virtual - 1
    torch.testing.assert_close(output.logits, expected.logits, rtol=TOLERANCE, atol=TOLERANCE)
    torch.testing.assert_close(output.loss, expected.loss, rtol=TOLERANCE, atol=TOLERANCE)
    found, wanted = chain.gradients(), gradients(dense)
    assert found.keys() == wanted.keys()
    for key, gradient in wanted.items():
        torch.testing.assert_close(
            found[key], gradient, rtol=TOLERANCE, atol=TOLERANCE, msg=lambda text, key=key: f"{key}: {text}"
        )


# Each architecture meets each of the kinds of batch, each layout, and both ties.
CASES = [
    (name, (number + turn) % 2 == 0, list(LAYOUTS)[(number + turn) % 3], kind)
    for number, name in enumerate(MODELS)
    for turn, kind in enumerate(KINDS)
]


@pytest.mark.parametrize(("name", "tied", "layout", "kind"), CASES)
def test_a_chain_of_stages_is_the_dense_model(name: str, tied: bool, layout: str, kind: str) -> None:
    assert_same(name, tied=tied, layout=layout, kind=kind)


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_every_chain_of_stages_is_the_dense_model(name: str, tied: bool, layout: str, kind: str) -> None:
    assert_same(name, tied=tied, layout=layout, kind=kind)
