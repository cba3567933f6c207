"""Models that read images train as transformers' own do in one process, row by row: also where a rank's rows have no image."""

from __future__ import annotations

import tempfile
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from courses import full_weights, largest_difference
from ranks import leave_group, run_distributed
from tiny_images import FAMILIES, image_job
from torch.nn import functional

import toolkit as tk
from toolkit.data.images import read_image
from toolkit.data.loader import EpochOrder
from toolkit.data.prepare import prepare_plan
from toolkit.data.processor import Processor
from toolkit.modeling.build import build_model
from toolkit.planning.plan import Plan

# A step of SGD at a rate of 1 takes each gradient from its weight; ten of AdamW follow the same course.
GRADIENT = {"optimizer": "sgd", "learning_rate": 1.0, "max_grad_norm": 0.0, "max_steps": 1}
COURSE = {"optimizer": "adamw_torch", "learning_rate": 2e-3, "max_grad_norm": 1.0, "max_steps": 10}
ADAPTERS = {"method": "lora", "lora": {"r": 4, "lora_alpha": 16}}
CHECKPOINTED = {"gradient_checkpointing": True}
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    **{
        f"{family} {kind} zero {stage}": (family, stage, options)
        for family in FAMILIES
        for stage in range(4)
        for kind, options in (("gradient", GRADIENT), ("course", COURSE))
    },
    **{
        f"{family} {kind} zero {stage}": (family, stage, COURSE | options)
        for family in FAMILIES
        for stage in (2, 3)
        for kind, options in (
            ("lora", ADAPTERS | CHECKPOINTED),
            ("lora on all", ADAPTERS | {"freeze_vision": False}),
            ("frozen tower", {"freeze_vision": True}),
            ("checkpointed", CHECKPOINTED),
            ("chunked loss", {"loss": "chunked"}),
        )
    },
}
DEFAULT = ("qwen2_5_vl gradient zero 3",)
A_LAUNCH = 8


def train_cases(rank: int, jobs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    results: dict[str, Any] = {}
    leave_group()
    for name, job in jobs.items():
        try:
            plan = tk.resolve(tk.Job.model_validate(job))
            with tk.initialize(plan) as run:
                losses = [float(run.step(batch)) for batch in run.loader(run.prepare(tk.load_tokenizer(plan)).train)]
                results[name] = losses, full_weights(run.model, run.world)
        except Exception:  # reported by the test of this case; the ranks fail alike
            results[name] = traceback.format_exc()
    return results


def reference(plan: Plan, processor: Processor) -> tuple[list[float], dict[str, Any]]:
    """The losses and weights of one process, each row by a call of the processor and of the model of its own."""
    rows = prepare_plan(plan, processor).train
    model = build_model(plan, device=torch.device("cpu"))
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    train = plan.job.train
    kind = torch.optim.SGD if train.optimizer == "sgd" else torch.optim.AdamW
    optimizer = kind(trained.values(), lr=train.learning_rate, weight_decay=0.0)
    size, losses = plan.settings.batch.train, []
    order = EpochOrder(len(rows), seed=train.seed)
    for step in range(plan.settings.max_steps or 0):
        summed, count = torch.zeros(()), 0
        for number in order.slice(step * size, (step + 1) * size):
            row = rows[number]
            labels = torch.from_numpy(np.asarray(row["labels"]))
            logits = model(**_inputs(row, processor)).logits[0]
            summed = summed + functional.cross_entropy(logits[:-1], labels[1:], reduction="sum")
            count += int((labels[1:] != -100).sum())
        optimizer.zero_grad()
        (summed / count).backward()
        for weight in trained.values():  # the engine's gradient of what no row used is zero, not absent
            weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
        if train.max_grad_norm:
            torch.nn.utils.clip_grad_norm_(trained.values(), train.max_grad_norm)
        optimizer.step()
        losses.append(float(summed.detach()) / count)
    return losses, {name: weight.detach().numpy().copy() for name, weight in trained.items()}


def _inputs(row: dict[str, Any], processor: Processor) -> dict[str, torch.Tensor]:
    """What transformers makes of a row: its own call with the conversation's text and images."""
    images = [read_image(source) for source in row["images"]["images"]]
    text = processor.decode(row["input_ids"])
    for image in images:  # the text before each image became its tokens
        text = text.replace(processor.expansion(image.size), processor.placeholder, 1)
    given = {"images": [images]} if images else {}
    made = processor.processor(text=[text], add_special_tokens=False, return_tensors="pt", **given)
    assert made["input_ids"][0].tolist() == row["input_ids"].tolist()
    return {name: value for name, value in made.items() if images or not name.endswith("token_type_ids")}


def outcomes(names: list[str]) -> dict[str, str | None]:
    """Trains cases on two ranks and in one process; gives what differs of each, None for those that agree."""
    found: dict[str, str | None] = {}
    with tempfile.TemporaryDirectory() as folder:
        jobs = {}
        for name in names:
            family, stage, train = CASES[name]
            root = Path(folder) / name.replace(" ", "-")
            root.mkdir()
            jobs[name] = image_job(root, family, train=train, parallel={"zero_stage": stage})
        ranks = run_distributed(train_cases, 2, jobs, timeout_seconds=1200)
        for name in names:
            found[name] = _difference(jobs[name], [rank[name] for rank in ranks])
    return found


def _difference(job: dict[str, Any], ranks: list[Any]) -> str | None:
    if isinstance(ranks[0], str):
        return ranks[0]
    plan = tk.resolve(tk.Job.model_validate(job | {"parallel": {"zero_stage": 0}}))
    losses, weights = reference(plan, tk.load_tokenizer(plan))
    (ours, held), (others, _) = ranks
    assert ours == others, "all ranks report one loss"
    one = plan.job.train.optimizer == "sgd"
    scale = max(1.0, max(float(np.abs(weight).max()) for weight in weights.values()) if one else 1.0)
    of_losses = max(abs(mine - theirs) for mine, theirs in zip(ours, losses, strict=True))
    of_weights = largest_difference(held, weights)
    bound = 1e-5 if one else 1e-4
    if of_losses > bound or of_weights > bound * scale:
        return f"losses differ by {of_losses:.2g}, weights by {of_weights:.2g} of {scale:.3g}"
    return None


@pytest.mark.gloo
def test_models_that_read_images_train_as_transformers_own_do() -> None:
    assert {name: fault for name, fault in outcomes(list(DEFAULT)).items() if fault} == {}


@pytest.mark.gloo
@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
def test_every_stage_and_way_to_train_follows_transformers(family: str) -> None:
    names = [name for name, case in CASES.items() if case[0] == family and name not in DEFAULT]
    faults: dict[str, str] = {}
    for start in range(0, len(names), A_LAUNCH):
        found = outcomes(names[start : start + A_LAUNCH])
        faults |= {name: fault for name, fault in found.items() if fault}
    assert faults == {}
