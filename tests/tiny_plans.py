"""Plans for tiny models on CPU processes, and batches whose labels are spread very unevenly."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from tiny_models import tiny_config

from toolkit.config.job import Job
from toolkit.planning.plan import Plan
from toolkit.planning.resolve import resolve

RANKS, MICRO, ACCUMULATION, LENGTH = 2, 2, 2, 16
# The share of the tokens that counts, by rank and micro-batch: a mean of means would be far from the global mean.
SHARES = ((1.0, 0.0), (0.1, 0.6))


def tiny_plan(
    architecture: str = "llama",
    *,
    ranks: int = RANKS,
    nodes: int = 1,
    train: dict[str, Any] | None = None,
    parallel: dict[str, Any] | None = None,
    deepspeed: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
    data: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    gpu: str = "cpu",
) -> Plan:
    """Resolves a job on a tiny model with random weights: two layers, fp32, ten steps at a constant rate."""
    values: dict[str, Any] = {
        "precision": "fp32",
        "sequence_length": LENGTH,
        "per_device_train_batch_size": MICRO,
        "gradient_accumulation_steps": ACCUMULATION,
        "max_steps": 10,
        "lr_scheduler_type": "constant",
        **(train or {}),
    }
    with tempfile.TemporaryDirectory() as folder:
        made = tiny_config(architecture, **(config or {}))
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(made.to_dict()), encoding="utf-8")
        job = {
            "model": {"name": str(path), "init": "random", **(model or {})},
            "cluster": {"gpu": gpu, "gpus_per_node": ranks // nodes, "nodes": nodes},
            "train": {name: value for name, value in values.items() if value is not None},
            "parallel": {"zero_stage": 2, **(parallel or {})},
            "deepspeed": deepspeed or {},
            "data": data,
        }
        return resolve(Job.model_validate(job))


def step_batches(
    step: int, *, ranks: int = RANKS, kind: str = "wrapped", accumulation: int = ACCUMULATION, multiple: int = 1
) -> list[list[dict[str, torch.Tensor]]]:
    """The micro-batches of one optimizer step, by rank; `kind` is a packing, `multiple` one of the tokens of padded rows."""
    draw = torch.Generator().manual_seed(step)
    return [
        [
            _micro_batch(draw, share=SHARES[rank % len(SHARES)][index % len(SHARES[0])], kind=kind, multiple=multiple)
            for index in range(accumulation)
        ]
        for rank in range(ranks)
    ]


def _micro_batch(draw: torch.Generator, *, share: float, kind: str, multiple: int) -> dict[str, torch.Tensor]:
    length = LENGTH if kind != "none" else int(torch.randint(9, LENGTH + 1, (1,), generator=draw))
    length = -(-length // multiple) * multiple
    ids_BS = torch.randint(3, 12, (MICRO, length), generator=draw)  # few of the 64 tokens: there is something to learn
    counts_BS = torch.rand((MICRO, length), generator=draw) < share
    batch = {"input_ids": ids_BS, "labels": torch.where(counts_BS, ids_BS, -100)}
    if kind == "separated":
        cut = int(torch.randint(2, length - 2, (1,), generator=draw))
        batch["position_ids"] = torch.cat([torch.arange(cut), torch.arange(length - cut)]).repeat(MICRO, 1)
        batch["labels"][:, cut] = -100
    if kind == "none":
        padding = int(torch.randint(1, 7, (1,), generator=draw))
        batch["attention_mask"] = torch.ones_like(ids_BS)
        for name, filler in (("input_ids", 0), ("labels", -100), ("attention_mask", 0)):
            batch[name][-1, length - padding :] = filler
    return batch
