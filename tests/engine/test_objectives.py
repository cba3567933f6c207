"""Label smoothing and z-loss follow plain torch, whatever shares the model; noise on embeddings is that of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from courses import SGD, Case, arguments_of, assert_follows_plain_torch, parameters, train_all
from ranks import run_distributed
from tiny_plans import step_batches, tiny_plan
from transformers.integrations.neftune import activate_neftune

from toolkit.modeling.build import build_model
from toolkit.modeling.loss import StepLoss

BOTH = SGD | {"label_smoothing_factor": 0.2, "z_loss": 0.05}
CASES = {
    "zero 2": Case(train=BOTH, stage=2),
    "zero 3": Case(train=BOTH, stage=3, packing="separated"),
    "ddp": Case(train=BOTH, strategy="ddp"),
    "fsdp2": Case(train=BOTH, strategy="fsdp2"),
    "tensor": Case(train=BOTH, stage=1, tensor=2, data=1),
    "pipeline": Case(train=BOTH, stage=1, pipeline=2, data=1),
    "smoothed alone": Case(train=SGD | {"label_smoothing_factor": 0.2}, stage=2),
}
DEFAULT = ("zero 2", "tensor")


@pytest.fixture(scope="module")
def courses() -> list[dict[str, Any]]:
    return run_distributed(train_all, 2, arguments_of({name: CASES[name] for name in DEFAULT}))


@pytest.fixture(scope="module")
def others() -> list[dict[str, Any]]:
    return run_distributed(
        train_all, 2, arguments_of({name: case for name, case in CASES.items() if name not in DEFAULT})
    )


@pytest.mark.gloo
@pytest.mark.parametrize("name", parameters(CASES, default=DEFAULT))
def test_follows_plain_torch(name: str, request: pytest.FixtureRequest) -> None:
    found = request.getfixturevalue("courses" if name in DEFAULT else "others")
    assert_follows_plain_torch(CASES[name], [rank[name] for rank in found])


def test_noise_on_embeddings_is_that_of_transformers_and_not_in_evaluation() -> None:
    def model(**train: Any) -> Any:
        return build_model(tiny_plan(train={"precision": "fp32", **train}), device=torch.device("cpu"))

    ours, theirs, plain = model(neftune_noise_alpha=5), model(), model()
    activate_neftune(theirs, 5)
    ids = step_batches(0)[0][0]["input_ids"]
    seen = []
    for one in (ours, theirs, plain):
        torch.manual_seed(7)
        seen.append(one(input_ids=ids).logits)
    assert torch.equal(seen[0], seen[1])
    assert not torch.allclose(seen[0], seen[2], atol=1e-4)
    assert torch.equal(ours.eval()(input_ids=ids).logits, plain.eval()(input_ids=ids).logits)


def test_evaluations_are_of_the_plain_cross_entropy() -> None:
    plan = tiny_plan(train=BOTH)
    losses = StepLoss.of(plan.job.train, config=None, tp_group=None, vocab_size=8)
    logits, labels = torch.randn(1, 4, 8), torch.tensor([[1, 2, -100, 3]])
    outputs = type("Outputs", (), {"logits": logits})()
    plain = torch.nn.functional.cross_entropy(logits[0, :3], labels[0, 1:], reduction="sum")
    assert torch.allclose(losses.summed(outputs, labels), plain)
    assert losses.of_step(outputs, labels, 1.0, share=1.0)[1] > plain
