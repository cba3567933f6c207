"""A run goes on from a checkpoint of any other layout: its state bit for bit, its next losses those of the run that saved it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from layouts import Layout, differences, resume_each, save_each, taken_over
from ranks import run_distributed

from toolkit.planning.plan import Plan

pytestmark = pytest.mark.gloo

FOUR = {"num_hidden_layers": 4}
LORA = {"method": "lora", "lora": {"r": 4}}
# What is trained: architecture, options of `train`, of the model's config. Layouts of one of them take over each other's checkpoints.
TRAINED: dict[str, tuple[str, Mapping[str, Any], Mapping[str, Any]]] = {
    "tied": ("llama-tied", {}, FOUR),
    "bf16": ("llama", {"precision": "bf16"}, {}),
    "lora": ("llama", LORA, FOUR),
}
INTERLEAVED = {"zero_stage": 2, "virtual_stages": 2}
LAYOUTS: dict[str, Layout] = {
    "tied/zero-0": Layout(dp=2, parallel={"zero_stage": 0}),
    "tied/zero-1-stages": Layout(pp=2, parallel={"zero_stage": 1}),
    "tied/zero-3-tensor": Layout(tp=2, parallel={"zero_stage": 3}),
    "tied/fsdp2": Layout(dp=2, parallel={"strategy": "fsdp2"}),
    "tied/ddp": Layout(dp=2, parallel={"strategy": "ddp"}),
    "tied/zero-1-stages-tensor": Layout(pp=2, tp=2, parallel={"zero_stage": 1}),
    "tied/zero-2-virtual": Layout(pp=2, dp=2, parallel=INTERLEAVED),
    "tied/zero-3-offload": Layout(dp=4, parallel={"zero_stage": 3, "offload": "optimizer-cpu"}),
    "bf16/zero-0": Layout(dp=2, parallel={"zero_stage": 0}),
    "bf16/zero-2-offload": Layout(dp=2, parallel={"zero_stage": 2, "offload": "optimizer-cpu"}),
    "bf16/zero-3": Layout(dp=4, parallel={"zero_stage": 3}),
    "bf16/fsdp2": Layout(dp=4, parallel={"strategy": "fsdp2"}),
    "lora/zero-1-tensor": Layout(tp=2, parallel={"zero_stage": 1}),
    "lora/zero-3": Layout(dp=2, parallel={"zero_stage": 3}),
    "lora/fsdp2": Layout(dp=2, parallel={"strategy": "fsdp2"}),
    "lora/zero-1-stages": Layout(pp=2, parallel={"zero_stage": 1}),
}
# By default each layout is taken over and takes over another one: stages, tensor ranks, virtual stages, stages of ZeRO, strategies,
# offload, adapters and precisions all change together with each other.
DEFAULT: tuple[tuple[str, str], ...] = (
    ("tied/zero-0", "tied/zero-3-offload"),
    ("tied/zero-1-stages", "tied/ddp"),
    ("tied/zero-3-tensor", "tied/zero-2-virtual"),
    ("tied/fsdp2", "tied/zero-1-stages-tensor"),
    ("tied/zero-1-stages-tensor", "tied/zero-0"),
    ("tied/zero-2-virtual", "tied/fsdp2"),
    ("tied/zero-3-offload", "tied/zero-1-stages"),
    ("tied/zero-2-virtual", "tied/zero-3-tensor"),
    ("bf16/zero-2-offload", "bf16/fsdp2"),
    ("bf16/zero-3", "bf16/zero-0"),
    ("bf16/fsdp2", "bf16/zero-2-offload"),
    ("lora/zero-1-tensor", "lora/fsdp2"),
    ("lora/fsdp2", "lora/zero-1-stages"),
    ("lora/zero-1-stages", "lora/zero-3"),
    ("lora/zero-3", "lora/zero-1-tensor"),
)
ALL = tuple(
    pair for pair in itertools.permutations(LAYOUTS, 2) if pair[0].partition("/")[0] == pair[1].partition("/")[0]
)


@cache
def plan_of(name: str) -> Plan:
    return LAYOUTS[name].plan(*TRAINED[name.partition("/")[0]])


def _by_ranks(names: set[str]) -> Iterator[tuple[int, list[str]]]:
    for ranks in (2, 4):
        if chosen := [name for name in LAYOUTS if name in names and LAYOUTS[name].ranks == ranks]:
            yield ranks, chosen


def _run(root: Path, pairs: tuple[tuple[str, str], ...]) -> dict[Any, Any]:
    """Save with each first layout of the pairs, then resume each with the second: one launch for each number of ranks."""
    results: dict[Any, Any] = {}
    for ranks, names in _by_ranks({saved for saved, _ in pairs}):
        plans = {name: plan_of(name) for name in names}
        results |= run_distributed(save_each, ranks, str(root), plans)[0]
    for ranks, names in _by_ranks({name for _, name in pairs}):
        own = [(saved, name, plan_of(name)) for saved, name in pairs if name in names]
        results |= run_distributed(resume_each, ranks, str(root), own)[0]
    return results


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("reshape")


@pytest.fixture(scope="module")
def results(root: Path) -> dict[Any, Any]:
    return _run(root, DEFAULT)


@pytest.fixture(scope="module")
def product(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[Any, Any]]:
    root = tmp_path_factory.mktemp("product")
    return root, _run(root, tuple(pair for pair in ALL if pair not in DEFAULT))


def _assert_taken_over(root: Path, results: dict[Any, Any], saved: str, name: str) -> None:
    course, found = results[saved], results[saved, name]
    assert isinstance(course, list), course
    assert isinstance(found, tuple), found
    assert differences(root / saved, taken_over(root, saved, name)) == []
    (line,) = [line for line in found[1] if line.startswith("the checkpoint has another layout")]
    assert "its state is read weight by weight" in line
    # In 16 bit another order of the sums is another rounding.
    tolerance = 2e-5 if saved.startswith("bf16") else 1e-6
    for (loss, norm), (wanted, wanted_norm) in zip(found[0], course, strict=True):
        assert loss == pytest.approx(wanted, rel=tolerance)
        assert norm == pytest.approx(wanted_norm, rel=100 * tolerance)
    assert course[0] != course[1]


@pytest.mark.parametrize(("saved", "name"), DEFAULT)
def test_a_run_goes_on_with_another_layout(root: Path, results: dict[Any, Any], saved: str, name: str) -> None:
    _assert_taken_over(root, results, saved, name)


@pytest.mark.full
@pytest.mark.parametrize(("saved", "name"), [pair for pair in ALL if pair not in DEFAULT])
def test_each_layout_takes_over_each_other(product: tuple[Path, dict[Any, Any]], saved: str, name: str) -> None:
    _assert_taken_over(*product, saved, name)
