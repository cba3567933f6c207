"""Communication hooks of DDP compute what their papers say, in a plain loop over the ranks' gradients, and resume exactly."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from courses import (
    ADAM,
    NEAR,
    SGD,
    Case,
    arguments_of,
    assert_follows_plain_torch,
    largest_difference,
    parameters,
    train_all,
)
from ranks import leave_group, run_distributed
from tiny_plans import step_batches
from torch.nn import functional

import toolkit as tk
from tests.engine.test_torch_engine import losses
from toolkit.checkpoint.compatibility import layout_problems
from toolkit.modeling.build import build_model
from toolkit.planning.plan import Plan

# Several buckets of 1 MiB.
WIDE = {"hidden_size": 128, "intermediate_size": 512}
STEPS, START, RANK, RATIO = 5, 2, 3, 0.1
POWER = {"comm_hook": "power_sgd", "power_sgd_rank": RANK, "power_sgd_start_step": START, "bucket_cap_mb": 1}
TOP = {"comm_hook": "top_k", "top_k_ratio": RATIO, "bucket_cap_mb": 1}
LEARNING = SGD | {"learning_rate": 0.1}


def hooked(
    options: dict[str, Any], *, data: int = 2, nodes: int = 1, train: dict[str, Any] = LEARNING, **more: Any
) -> Case:
    return Case(train=train, strategy="ddp", options=options, data=data, nodes=nodes, **more)


EXACT = {
    "view": hooked({"gradient_as_bucket_view": True}),
    "fp16": hooked({"comm_hook": "fp16"}, tolerance=1e-3, weight_tolerance=1e-3),
    "bf16": hooked({"comm_hook": "bf16"}, **NEAR),
    "hierarchical": hooked({"comm_hook": "hierarchical", "bucket_cap_mb": 1}, data=4, nodes=2),
}
COMPRESSED = {
    "power_sgd": hooked(POWER, config=WIDE, steps=STEPS),
    "top_k": hooked(TOP, config=WIDE, steps=STEPS, data=4, nodes=2),
    "top_k of single ranks": hooked(TOP, steps=STEPS, nodes=2),
}
CASES = EXACT | COMPRESSED
SAVED = {
    "power_sgd": hooked(POWER, config=WIDE, train=ADAM),
    "power_sgd that begins later": hooked(POWER | {"power_sgd_start_step": 3}, config=WIDE, train=ADAM),
    "top_k": hooked(TOP, config=WIDE, train=ADAM, data=4, nodes=2),
}


DEFAULT = ("view", "bf16", "hierarchical", "power_sgd")


def run_all(rank: int, courses: Any, plans: dict[str, Plan], folder: Path) -> tuple[Any, Any]:
    leave_group()
    return train_all(rank, courses), {name: resumed(plan, folder / name) for name, plan in plans.items()}


def resumed(plan: Plan, folder: Path) -> dict[str, list[float]]:
    """The losses of two steps after those in which something was not sent, straight on and resumed."""
    before = START + 1
    with tk.initialize(plan) as run:
        losses(run, start=0, count=before)
        tk.save(run, folder)
        straight = losses(run, start=before, count=2)
    with tk.initialize(plan) as run:
        tk.load(run, folder)
        return {"straight": straight, "resumed": losses(run, start=before, count=2)}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Any]]:
    """A function of a case's name: what each rank found."""

    @cache
    def launched(size: int, is_default: bool) -> list[Any]:
        chosen = {name: case for name, case in (CASES | SAVED).items() if (name in DEFAULT) == is_default}
        courses = arguments_of(
            {name: CASES[name] for name, case in chosen.items() if case.data == size and name in CASES}
        )
        plans = {name: SAVED[name].plan() for name, case in chosen.items() if case.data == size and name in SAVED}
        return run_distributed(run_all, size, courses, plans, tmp_path_factory.mktemp("saved"))

    return lambda name: launched((CASES | SAVED)[name].data, name in DEFAULT)


@pytest.mark.gloo
@pytest.mark.parametrize("name", parameters(EXACT, default=DEFAULT))
def test_exact_hooks_follow_plain_torch(name: str, found: Callable[[str], list[Any]]) -> None:
    case = EXACT[name]
    assert_follows_plain_torch(case, [courses[name] for courses, _ in found(name)])


@pytest.mark.gloo
@pytest.mark.parametrize("name", parameters(SAVED, default=DEFAULT))
def test_what_was_not_sent_is_resumed_to_the_bit(name: str, found: Callable[[str], list[Any]]) -> None:
    for _, saved in found(name):
        assert saved[name]["resumed"] == saved[name]["straight"]


# ---- plain loops ------------------------------------------------------------------------------------------------------

Gradients = dict[str, torch.Tensor]


def plain_course(case: Case, reduce: Callable[[list[Gradients]], Gradients]) -> tuple[list[float], list[float], Any]:
    """SGD on what `reduce` makes of the gradients of all ranks."""
    model = build_model(case.plan(), device=torch.device("cpu"))
    weights = dict(model.named_parameters())
    losses, norms = [], []
    for step in range(case.steps):
        by_rank = step_batches(step, ranks=case.data)
        count = sum(int((batch["labels"][:, 1:] != -100).sum()) for batches in by_rank for batch in batches)
        gradients, total = [], 0.0
        for batches in by_rank:
            model.zero_grad()
            for batch in batches:
                logits = model(input_ids=batch["input_ids"]).logits[:, :-1].flatten(0, 1)
                loss = functional.cross_entropy(logits, batch["labels"][:, 1:].flatten(), reduction="sum") / count
                (loss * case.data).backward()
                total += float(loss.detach())
            gradients.append({name: weight.grad.clone() for name, weight in weights.items()})
        reduced = reduce(gradients)
        norm = float(torch.linalg.vector_norm(torch.stack([gradient.norm() for gradient in reduced.values()])))
        factor = min(1.0, case.train["max_grad_norm"] / (norm + 1e-6))
        with torch.no_grad():
            for name, weight in weights.items():
                weight -= case.train["learning_rate"] * factor * reduced[name]
        losses.append(total)
        norms.append(norm)
    return losses, norms, {name: weight.detach().numpy() for name, weight in weights.items()}


class PlainPowerSgd:
    """arXiv 1905.13727, algorithm 1 and 2, one matrix at a time."""

    def __init__(self) -> None:
        self.step = 0
        self.errors: dict[str, list[torch.Tensor]] = {}
        self.q: dict[str, torch.Tensor] = {}

    def __call__(self, gradients: list[Gradients]) -> Gradients:
        reduced = {}
        for name in gradients[0]:
            each = [gradient[name] for gradient in gradients]
            compressed = each[0].ndim == 2 and 2 * RANK * sum(each[0].shape) < each[0].numel()
            reduced[name] = self.product(name, each) if compressed and self.step >= START else sum(each) / len(each)
        self.step += 1
        return reduced

    def product(self, name: str, each: list[torch.Tensor]) -> torch.Tensor:
        matrices = [part + error for part, error in zip(each, self.errors.get(name, [0.0] * len(each)), strict=True)]
        draw = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        q = self.q.get(name, torch.randn(each[0].shape[1], RANK, generator=draw))
        p = torch.linalg.qr(sum(matrices) @ torch.linalg.qr(q).Q).Q
        self.q[name] = sum(matrices).T @ p / len(each)
        sent = p @ self.q[name].T
        self.errors[name] = [matrix - sent for matrix in matrices]
        return sent


class PlainTopK:
    """arXiv 1809.07599, algorithm 1, over the nodes; each rank of a node has a share of every weight."""

    def __init__(self, nodes: int) -> None:
        self.nodes = nodes
        self.kept: list[dict[str, torch.Tensor]] = [{} for _ in range(nodes)]
        self.largest = 0.0

    def __call__(self, gradients: list[Gradients]) -> Gradients:
        size = len(gradients) // self.nodes
        sent: list[Gradients] = []
        for node, kept in enumerate(self.kept):
            of_node = gradients[node * size : (node + 1) * size]
            means = {name: sum(each[name] for each in of_node) / size for name in of_node[0]}
            self.largest = max(self.largest, length(means.values()))
            sent.append({name: self.send(name, mean, kept, size) for name, mean in means.items()})
            # All that is not sent is kept, and bounded.
            rest = math.sqrt(1 - RATIO)
            assert length(kept.values()) <= self.largest * rest / (1 - rest)
        return {name: sum(each[name] for each in sent) / self.nodes for name in sent[0]}

    def send(self, name: str, mean: torch.Tensor, kept: dict[str, torch.Tensor], size: int) -> torch.Tensor:
        whole = (mean + kept.get(name, 0.0)).flatten()
        sent = torch.zeros_like(whole)
        for places in torch.arange(len(whole)).split(math.ceil(len(whole) / size)):
            chosen = places[whole[places].abs().topk(math.ceil(RATIO * len(places))).indices]
            sent[chosen] = whole[chosen]
        kept[name] = (whole - sent).view_as(mean)
        return sent.view_as(mean)


def length(tensors: Any) -> float:
    return float(torch.linalg.vector_norm(torch.stack([tensor.norm() for tensor in tensors])))


@pytest.mark.gloo
@pytest.mark.parametrize("name", parameters(COMPRESSED, default=DEFAULT))
def test_what_is_compressed_follows_the_algorithm(name: str, found: Callable[[str], list[Any]]) -> None:
    case = COMPRESSED[name]
    losses, norms, weights = plain_course(case, PlainPowerSgd() if name == "power_sgd" else PlainTopK(case.nodes))
    exact = plain_course(case, lambda all_of: {n: sum(g[n] for g in all_of) / len(all_of) for n in all_of[0]})
    for courses, _ in found(name):
        course = courses[name]
        assert not isinstance(course, str), course
        assert course.losses == pytest.approx(losses, abs=1e-4)
        assert course.norms == pytest.approx(norms, abs=1e-4)
        assert largest_difference(course.last, weights) < 1e-4
        assert largest_difference(course.last, exact[2]) > 1e-3, "it compresses"


# ---- what a checkpoint fits -------------------------------------------------------------------------------------------


def test_a_checkpoint_with_what_was_not_sent_fits_its_hook_alone() -> None:
    def refused(now: dict[str, Any], then: dict[str, Any], *, nodes: tuple[int, int] = (2, 2)) -> list[str]:
        plans = [hooked(of, data=4, nodes=number).plan() for of, number in zip((now, then), nodes, strict=True)]
        return [problem.key for problem in layout_problems(*plans, Path("saved"))]

    assert refused(TOP, TOP | {"top_k_ratio": 0.2}) == []
    assert refused(TOP, TOP, nodes=(2, 4)) == ["cluster.nodes"]
    assert refused({}, TOP) == refused(POWER, TOP) == refused(POWER, {}) == ["parallel.ddp.comm_hook"]
    assert refused(POWER, POWER | {"power_sgd_rank": 1}) == ["parallel.ddp.power_sgd_rank"]
    assert refused({"comm_hook": "fp16"}, {"comm_hook": "hierarchical"}) == []
    assert refused({"comm_hook": "fp16"}, {}, nodes=(2, 4)) == []
