"""The tables of docs/strategies.md say what plans accept, and by which error they refuse the rest."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

import toolkit as tk
from toolkit.errors import PlanError

PAGE = Path(__file__).parents[2] / "docs" / "strategies.md"
# The job of a row: tensor ranks and pipelines with the lowest stage that they take, and with that which has what moves.
ROWS: dict[str, list[dict[str, Any]]] = {
    **{f"ZeRO-{stage}": [{"zero_stage": stage}] for stage in range(4)},
    "DDP": [{"strategy": "ddp"}],
    "FSDP2": [{"strategy": "fsdp2"}],
    "tensor ranks": [{"tensor": 2, "zero_stage": 2}, {"tensor": 2, "zero_stage": 3}],
    "pipeline": [{"pipeline": 2, "zero_stage": 1}, {"pipeline": 2, "zero_stage": 3}],
}
PLAIN, ADAPTED = ("full", "lora"), ("qlora",)
METHODS = [
    list(itertools.product(methods, precisions))
    for methods in (PLAIN, ADAPTED)
    for precisions in (("fp32", "bf16"), ("fp16",), ("fp8",))
]
OFFLOADS = ["none", "activations-cpu", "optimizer-cpu", "full-cpu", "optimizer-nvme", "full-nvme"]


def table(first: str) -> dict[str, list[str]]:
    """The cells of a table by row, found by the second word of its head."""
    lines = iter(PAGE.read_text(encoding="utf-8").splitlines())
    next(line for line in lines if line.startswith(f"| strategy | {first}"))
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines)
    cells = [[cell.strip().strip("`") for cell in row.strip("|").split("|")] for row in rows]
    return {name: rest for name, *rest in cells[1:]}


def refusals(parallel: dict[str, Any], method: str, precision: str, offload: str, optimizer: str = "adamw") -> set[str]:
    job = {
        "model": "llama-3.1-8b",
        "cluster": {"gpu": "h100-sxm-80gb", "gpus_per_node": 4, "nvme_path": "/local", "host_memory_gib": 4096},
        "train": {
            "method": method,
            "precision": precision,
            "optimizer": optimizer,
            "lr_scheduler_type": "constant",
            "max_steps": 1,
            "gradient_accumulation_steps": 4,
            "sequence_length": 512,
        },
        "parallel": parallel | {"offload": offload},
    }
    try:
        tk.resolve(tk.Job.model_validate(job))
    except PlanError as error:
        return set(error.codes)
    return set()


DEFAULT = ("ZeRO-3", "FSDP2")
OPTIMIZERS = (
    "adamw",
    "adamw_torch",
    "adamw_torch_fused",
    "sgd",
    "adamw_8bit",
    "paged_adamw_8bit",
    "lion",
    "adafactor",
    "muon",
    "schedule_free_adamw",
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in DEFAULT else pytest.mark.full) for name in ROWS]
)
def test_each_cell_is_accepted_or_refused_as_it_says(name: str) -> None:
    methods, offloads = table("all weights")[name], table("nothing")[name]
    assert len(methods) == len(METHODS)
    assert len(offloads) == len(OFFLOADS)
    for (said, pairs), (moves, offload) in itertools.product(
        zip(methods, METHODS, strict=True), zip(offloads, OFFLOADS, strict=True)
    ):
        refused = {cell for cell in (said, moves) if cell not in ("yes", "cards")}
        for method, precision in pairs:
            found = [refusals(parallel, method, precision, offload) for parallel in ROWS[name]]
            if refused:
                assert all(found), (method, precision, offload)
                assert refused <= set().union(*found), (method, precision, offload)
            else:
                assert not all(found), (method, precision, offload, found)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in DEFAULT else pytest.mark.full) for name in ROWS]
)
def test_each_optimizer_is_accepted_or_refused_as_it_says(name: str) -> None:
    for said, optimizer in zip(table("AdamW")[name], OPTIMIZERS, strict=True):
        for parallel in ROWS[name]:
            found = refusals(parallel, "full", "bf16", "none", optimizer)
            assert found == (set() if said in ("yes", "cards") else {said}), (optimizer, parallel)


def test_every_strategy_has_a_row() -> None:
    assert list(table("all weights")) == list(table("nothing")) == list(table("AdamW")) == list(ROWS)
