"""A run goes on from a checkpoint of any other layout: its state bit for bit, its next losses those of the run that saved it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from layouts import Layout, differences, resume_each, save_and_resume, save_each
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
    "experts": ("mixtral", {}, {"num_local_experts": 4}),
    "less": ("llama", {}, {}),
}
INTERLEAVED = {"zero_stage": 2, "virtual_stages": 2}
LAYOUTS: dict[str, Layout] = {
    "tied/zero-0": Layout(dp=2, parallel={"zero_stage": 0}),
    "tied/zero-1-stages": Layout(pp=2, parallel={"zero_stage": 1}),
    "tied/zero-3-tensor": Layout(tp=2, parallel={"zero_stage": 3}),
    "tied/fsdp2": Layout(dp=2, parallel={"strategy": "fsdp2"}),
    "tied/ddp": Layout(dp=2, parallel={"strategy": "ddp"}),
    "tied/zero-1-stages-tensor": Layout(pp=2, tp=2, parallel={"zero_stage": 1}),
    "tied/zero-2-virtual": Layout(pp=2, parallel=INTERLEAVED),
    "tied/zero-2-virtual-replicas": Layout(pp=2, dp=2, parallel=INTERLEAVED),
    "tied/zero-3-offload": Layout(dp=4, parallel={"zero_stage": 3, "offload": "optimizer-cpu"}),
    "bf16/zero-0": Layout(dp=2, parallel={"zero_stage": 0}),
    "bf16/zero-2-offload": Layout(dp=2, parallel={"zero_stage": 2, "offload": "optimizer-cpu"}),
    "bf16/zero-3": Layout(dp=4, parallel={"zero_stage": 3}),
    "bf16/fsdp2": Layout(dp=4, parallel={"strategy": "fsdp2"}),
    "lora/zero-1-tensor": Layout(tp=2, parallel={"zero_stage": 1}),
    "lora/zero-3": Layout(dp=2, parallel={"zero_stage": 3}),
    "lora/fsdp2": Layout(dp=2, parallel={"strategy": "fsdp2"}),
    "lora/zero-1-stages": Layout(pp=2, parallel={"zero_stage": 1}),
    "experts/zero-1-sliced": Layout(tp=2, parallel={"zero_stage": 1}),
    "experts/zero-2-whole": Layout(tp=2, parallel={"zero_stage": 2, "experts": "whole"}),
    "experts/zero-3-whole": Layout(tp=4, parallel={"zero_stage": 3, "experts": "whole"}),
    "experts/zero-2": Layout(dp=2, parallel={"zero_stage": 2}),
}
# Each stage of two ranks goes on with one, as when a queue has fewer cards; not in the product of all pairs. One stage by default.
LESS = {f"less/zero-{stage}": Layout(dp=2, parallel={"zero_stage": stage}) for stage in (1, 2, 3)}
ONE = {f"less/zero-{stage}-one": Layout(parallel={"zero_stage": stage}) for stage in (1, 2, 3)}
# By default each of a chain takes over what the one before has just taken over, in one launch: stages, tensor ranks, virtual stages,
# ZeRO's stages and wrappers, strategies, offload, adapters and precisions change together.
CHAINS = (
    ("tied/zero-3-tensor", "tied/zero-2-virtual", "tied/fsdp2", "tied/zero-0"),
    ("bf16/zero-2-offload", "bf16/zero-0"),
    ("lora/zero-1-tensor", "lora/fsdp2"),
    ("experts/zero-1-sliced", "experts/zero-2-whole", "experts/zero-2"),
)
PAIRS = tuple(
    pair for pair in itertools.permutations(LAYOUTS, 2) if pair[0].partition("/")[0] == pair[1].partition("/")[0]
)


@cache
def plan_of(name: str) -> Plan:
    return (LAYOUTS | LESS | ONE)[name].plan(*TRAINED[name.partition("/")[0]])


def _pair_name(saved: str, name: str) -> str:
    return f"{saved}-to-{name.replace('/', '-')}"


def _links() -> Iterator[tuple[str, str, str]]:
    """Yield the first layout of each chain, what is resumed, and the layout that resumes it."""
    for first, *others in CHAINS:
        saved = first
        for name in others:
            yield first, saved, name
            saved = _pair_name(saved, name)


def _by_ranks(names: set[str]) -> Iterator[tuple[int, list[str]]]:
    for ranks in (2, 4):
        if chosen := [name for name in LAYOUTS if name in names and LAYOUTS[name].ranks == ranks]:
            yield ranks, chosen


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("reshape")


@pytest.fixture(scope="module")
def results(root: Path) -> dict[str, Any]:
    plans = {name: plan_of(name) for name in (*(chain[0] for chain in CHAINS), "less/zero-2")}
    resumed = [(saved, _pair_name(saved, name), plan_of(name)) for _, saved, name in _links()]
    return run_distributed(save_and_resume, 2, str(root), plans, resumed)[0]


def _by_one_rank(root: Path, *names: str) -> dict[str, Any]:
    resumed = [(name, _pair_name(name, f"{name}-one"), plan_of(f"{name}-one")) for name in names]
    found: dict[str, Any] = run_distributed(resume_each, 1, str(root), resumed)[0]
    return found


@pytest.fixture(scope="module")
def less(root: Path) -> dict[str, Any]:
    names = ("less/zero-1", "less/zero-3")
    saved = run_distributed(save_each, 2, str(root), {name: plan_of(name) for name in names})[0]
    return saved | _by_one_rank(root, *names)


@pytest.fixture(scope="module")
def product(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Each layout saved once, and resumed by each other one: two launches for each number of ranks."""
    root, results = tmp_path_factory.mktemp("product"), {}
    for ranks, names in _by_ranks({*LAYOUTS}):
        results |= run_distributed(save_each, ranks, str(root), {name: plan_of(name) for name in names})[0]
    for ranks, names in _by_ranks({*LAYOUTS}):
        resumed = [(saved, _pair_name(saved, name), plan_of(name)) for saved, name in PAIRS if name in names]
        results |= run_distributed(resume_each, ranks, str(root), resumed, timeout_seconds=1800)[0]
    return root, results


def _assert_taken_over(root: Path, results: dict[str, Any], first: str, saved: str, name: str) -> None:
    course, found = results[first], results[_pair_name(saved, name)]
    assert isinstance(course, list), course
    assert isinstance(found, tuple), found
    assert differences(root / saved, root / _pair_name(saved, name)) == []
    (line,) = [line for line in found[1] if line.startswith("the checkpoint has another layout")]
    assert "its state is read weight by weight" in line
    # In 16 bit another order of the sums is another rounding.
    tolerance = 2e-5 if first.startswith("bf16") else 1e-6
    for (loss, norm), (wanted, wanted_norm) in zip(found[0], course, strict=True):
        assert loss == pytest.approx(wanted, rel=tolerance)
        assert norm == pytest.approx(wanted_norm, rel=100 * tolerance)
    assert course[0] != course[1]


@pytest.mark.parametrize(("first", "saved", "name"), list(_links()))
def test_a_run_goes_on_with_another_layout(
    root: Path, results: dict[str, Any], first: str, saved: str, name: str
) -> None:
    _assert_taken_over(root, results, first, saved, name)


def test_one_rank_goes_on_where_two_stopped(root: Path, results: dict[str, Any]) -> None:
    found = results | _by_one_rank(root, "less/zero-2")
    _assert_taken_over(root, found, "less/zero-2", "less/zero-2", "less/zero-2-one")


@pytest.mark.full
@pytest.mark.parametrize("saved", ["less/zero-1", "less/zero-3"])
def test_one_rank_goes_on_where_two_stopped_in_other_stages(root: Path, less: dict[str, Any], saved: str) -> None:
    _assert_taken_over(root, less, saved, saved, f"{saved}-one")


@pytest.mark.full
@pytest.mark.parametrize(("saved", "name"), PAIRS)
def test_each_layout_takes_over_each_other(product: tuple[Path, dict[str, Any]], saved: str, name: str) -> None:
    _assert_taken_over(*product, saved, saved, name)
