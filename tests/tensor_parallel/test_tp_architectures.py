"""Every architecture, with 1, 2 and all key heads, tied and untied: loss, scores and every gradient are the dense model's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import run_distributed
from sharded_models import VOCABULARY, batch, dense_model, gathered, sharded, variants

from toolkit.tensor_parallel.tables import DERIVED
from toolkit.tensor_parallel.vocabulary import gather_scores

TOLERANCE = 1e-5
SMALL = 1e-2


def errors_of(name: str, key_heads: int, tied: bool, group: dist.ProcessGroup) -> dict[str, float]:
    dense = dense_model(name, key_heads, tied=tied)
    ours = sharded(dense, group)
    wanted, found = dense(**batch()), ours(**batch())
    wanted.loss.backward()
    found.loss.backward()
    errors = {
        "loss": abs(found.loss.item() - wanted.loss.item()),
        "scores": (gather_scores(found.logits, vocab_size=VOCABULARY, tp_group=group) - wanted.logits)
        .abs()
        .max()
        .item(),
    }
    weights = gathered(ours, group, gradients=False)
    gradients = gathered(ours, group, gradients=True)
    for parameter_name, parameter in dense.named_parameters(remove_duplicate=False):
        assert torch.equal(weights[parameter_name], parameter.detach()), parameter_name
        gradient = gradients[parameter_name]
        assert gradient is not None, parameter_name
        assert gradient.shape == parameter.grad.shape, parameter_name
        # Of the largest element, unless that is no more than rounding, as of the bias of keys, which changes nothing.
        scale = max(SMALL, parameter.grad.abs().max().item())
        errors[parameter_name] = (gradient - parameter.grad).abs().max().item() / scale
    assert set(gradients) == {parameter_name for parameter_name, _ in dense.named_parameters(remove_duplicate=False)}
    return errors


def scenes(rank: int) -> dict[Any, dict[str, float]]:
    group = dist.group.WORLD
    found: dict[Any, dict[str, float]] = {}
    for variant in variants():
        found[variant] = errors_of(*variant, group)
    return found


@pytest.fixture(scope="module", params=[2, 4])
def found(request: pytest.FixtureRequest) -> list[dict[Any, Any]]:
    return run_distributed(scenes, request.param, timeout_seconds=200)


@pytest.mark.gloo
@pytest.mark.parametrize(
    "variant", variants(), ids=lambda variant: f"{variant[0]}-{variant[1]}-{'tied' if variant[2] else 'untied'}"
)
def test_a_sharded_model_is_the_dense_one(found: list[dict[Any, Any]], variant: tuple[str, int, bool]) -> None:
    for result in found:
        assert {name: error for name, error in result[variant].items() if not error <= TOLERANCE} == {}


def test_every_architecture_that_is_said_to_be_right_is_tried() -> None:
    assert set(DERIVED) <= {name for name, _, _ in variants()}
