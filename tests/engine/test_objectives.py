"""Label smoothing, z-loss and layers that keep results follow plain torch, whatever shares the model; noise on embeddings is that of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from courses import LORA, SGD, Case, Course, assert_follows_plain_torch, full_weights, parameters, train_cases
from ranks import leave_group, run_distributed
from tiny_plans import step_batches, tiny_plan
from transformers.integrations.neftune import activate_neftune

import toolkit as tk
from toolkit.modeling.build import build_model
from toolkit.modeling.loss import StepLoss

BOTH = SGD | {"label_smoothing_factor": 0.2, "z_loss": 0.05}
EXPERTS = {"num_local_experts": 4}
CHECKPOINTS = {"gradient_checkpointing": {"keep": ["linear", "attention"]}}
BOTH_KEPT = SGD | CHECKPOINTS
EVERY = SGD | {"gradient_checkpointing": {"every_n_layers": 2, "keep": ["linear"]}}
GATHERED = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
KEPT = {
    "kept zero 3": Case(train=BOTH_KEPT, stage=3, deepspeed=GATHERED),
    "kept zero 2": Case(train=BOTH_KEPT, stage=2),
    "kept every second zero 3": Case(train=EVERY, stage=3, deepspeed=GATHERED),
    "kept offload": Case(train=BOTH_KEPT, stage=3, deepspeed=GATHERED, offload="full-cpu"),
    "kept ddp": Case(train=BOTH_KEPT, strategy="ddp"),
    "kept fsdp2": Case(train=BOTH_KEPT, strategy="fsdp2"),
    "kept sequence": Case(train=BOTH_KEPT, stage=1, tensor=2, data=1, sequence_parallel=True),
    "kept attention tensor": Case(
        train=SGD | {"gradient_checkpointing": {"keep": ["attention"]}},
        stage=1,
        tensor=2,
        data=1,
        sequence_parallel=False,
    ),
    "kept pipeline": Case(train=BOTH_KEPT, stage=1, pipeline=2, data=1),
    "kept zb-h1": Case(train=BOTH_KEPT, stage=1, pipeline=2, data=1, schedule="zb-h1"),
    "kept lora": Case(train=LORA | CHECKPOINTS, stage=3, deepspeed=GATHERED),
    "kept qlora": Case(train=LORA | CHECKPOINTS | {"method": "qlora"}, stage=2),
    "every second compiled": Case(
        train=SGD | {"torch_compile": True, "gradient_checkpointing": {"every_n_layers": 2}}, stage=2
    ),
}
CASES = KEPT | {
    "zero 2": Case(train=BOTH, stage=2),
    "zero 3": Case(train=BOTH, stage=3, packing="separated"),
    "ddp": Case(train=BOTH, strategy="ddp"),
    "fsdp2": Case(train=BOTH, strategy="fsdp2"),
    "tensor": Case(train=BOTH, stage=1, tensor=2, data=1),
    "pipeline": Case(train=BOTH, stage=1, pipeline=2, data=1),
    "routers zero 3": Case(train=SGD | {"router_aux_loss_coef": 0.5}, architecture="mixtral", config=EXPERTS, stage=3),
    "routers ddp": Case(
        train=SGD | {"router_aux_loss_coef": 0.5}, architecture="mixtral", config=EXPERTS, strategy="ddp"
    ),
    "smoothed alone": Case(train=SGD | {"label_smoothing_factor": 0.2}, stage=2),
}
DEFAULT = ("zero 2", "tensor", "kept zero 3")


@pytest.fixture(scope="module")
def courses() -> dict[str, list[Course | str]]:
    return train_cases(CASES, default=DEFAULT)


@pytest.fixture(scope="module")
def others() -> dict[str, list[Course | str]]:
    return train_cases(CASES, default=DEFAULT, others=True)


@pytest.mark.gloo
@pytest.mark.parametrize("name", parameters(CASES, default=DEFAULT))
def test_follows_plain_torch(name: str, request: pytest.FixtureRequest) -> None:
    found = request.getfixturevalue("courses" if name in DEFAULT else "others")
    assert_follows_plain_torch(CASES[name], found[name])


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


def squared(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    targets = labels[:, 1:]
    nll = -logits[:, :-1].log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    return (nll.square() * (targets != -100)).sum()


def _own_loss(rank: int) -> Any:
    leave_group()
    train = {"optimizer": "sgd", "learning_rate": 0.5, "max_grad_norm": 0.0, "compute_loss": f"{__name__}:squared"}
    found = []
    for parallel in ({"zero_stage": 1}, {"strategy": "fsdp2", "zero_stage": None}, {"zero_stage": 1, "pipeline": 2}):
        with tk.initialize(tiny_plan(train=train, parallel=parallel)) as run:
            batches = step_batches(0)[run.world.coordinate.dp]
            loss, evaluated = float(run.step(batches)), run.evaluate(batches)
            found.append((loss, evaluated, full_weights(run.model, run.world)))
    return found


@pytest.mark.gloo
def test_a_loss_of_the_users_follows_plain_torch() -> None:
    def expected(ranks: list[Any]) -> tuple[float, dict[str, Any]]:
        model = build_model(tiny_plan(), device=torch.device("cpu"))
        batches = [batch for rank in ranks for batch in rank]
        count = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
        loss = sum(squared(model(input_ids=batch["input_ids"]).logits, batch["labels"]) for batch in batches) / count
        loss.backward()
        return loss.item(), {name: (weight - 0.5 * weight.grad).detach() for name, weight in model.named_parameters()}

    shared, alone = expected(step_batches(0)), expected(step_batches(0)[:1])
    for rank in run_distributed(_own_loss, 2):
        for (found, evaluated, weights), (loss, after) in zip(rank, (shared, shared, alone), strict=True):
            assert found == pytest.approx(loss, rel=1e-5)
            assert evaluated != pytest.approx(found, rel=1e-2), "an evaluation is of the cross entropy"
            assert weights
            for name, weight in weights.items():
                assert weight == pytest.approx(after[name].numpy(), abs=2e-6), name


def twice(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return squared(logits, labels) + squared(logits.sin(), labels)


def test_a_loss_of_the_users_is_priced() -> None:
    size = {"per_device_train_batch_size": 8, "sequence_length": 1024}
    config = {"vocab_size": 8192, "max_position_embeddings": 1024}
    plain, once, both = (
        tk.estimate(tiny_plan(train=size | told, config=config, gpu="h100-sxm-80gb", ranks=1)).peak_allocated_bytes
        for told in ({}, {"compute_loss": f"{__name__}:squared"}, {"compute_loss": f"{__name__}:twice"})
    )
    logits = 8 * 1024 * 8192 * 4
    assert once == pytest.approx(plain, rel=0.01), "both keep the logarithms of the softmax alone"
    assert both - once == pytest.approx(2 * logits, rel=0.02), "the sine, and its softmax"
