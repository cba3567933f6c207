"""Ranks find their place, agree on errors, and refuse a launch that is not the plan's."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_distributed

from toolkit.distributed.process_groups import join_group
from toolkit.distributed.world import World, destroy_world, init_world
from toolkit.errors import DataError, PlanError, RunError, ToolkitError
from toolkit.topology.grid import Grid

RANKS = 4


def outcome(call: Any) -> tuple[str, Any]:
    try:
        call()
    except ToolkitError as error:
        return type(error).__name__, [(problem.code, problem.message) for problem in error.problems]
    except Exception as error:
        return type(error).__name__, str(error)
    return "fine", None


def place(world: World) -> dict[str, Any]:
    value = torch.tensor([float(2**world.rank)])
    dist.all_reduce(value, group=world.dp_group)
    return {
        "coordinate": (world.coordinate.pp, world.coordinate.dp, world.coordinate.tp),
        "ranks in dp_group": tuple(rank for rank in range(RANKS) if int(value) >> rank & 1),
        "dp rank": dist.get_rank(world.dp_group),
        "main": world.is_main,
        "size": world.size,
        "local": world.local_rank,
        "device": str(world.device),
        "owns": world.owns_groups,
    }


def agreements(world: World) -> dict[str, Any]:
    rank = world.rank
    data = DataError.of(code="DATA_X", message=f"of rank {rank}", fix="mend")
    errors: dict[str, Any] = {
        "nobody": None,
        "rank 2, ours": data if rank == 2 else None,
        "rank 2, foreign": ValueError("the reason") if rank == 2 else None,
        "ranks 1 and 3": data if rank in (1, 3) else None,
        "all": data,
        "rank 0, unpicklable": UnpicklableError("here") if rank == 0 else None,
    }
    return {name: outcome(lambda error=error: world.agree(error)) for name, error in errors.items()}


class UnpicklableError(Exception):
    def __reduce__(self) -> Any:
        raise TypeError("cannot travel")


def scenes(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for grid in (Grid(pp=1, dp=4, tp=1), Grid(pp=1, dp=2, tp=2), Grid(pp=2, dp=2, tp=1)):
        world = init_world(grid, backend="gloo")
        found[f"{grid.pp}x{grid.dp}x{grid.tp}"] = place(world)
    stages = join_group(world.grid, rank, "pp")
    found["made once"] = stages is join_group(world.grid, rank, "model"), stages is world.dp_group
    found["agree"] = agreements(world)
    found["two of four"] = outcome(lambda: init_world(Grid(pp=1, dp=2, tp=1), backend="gloo"))
    found["no gpu"] = outcome(lambda: init_world(Grid(pp=1, dp=4, tp=1), backend="nccl"))
    destroy_world(world)
    found["alive"] = dist.is_initialized()
    world.barrier()
    return found


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run_distributed(scenes, RANKS)


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("name", "coordinates", "groups"),
    [
        ("1x4x1", [(0, 0, 0), (0, 1, 0), (0, 2, 0), (0, 3, 0)], [(0, 1, 2, 3)] * 4),
        ("1x2x2", [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1)], [(0, 2), (1, 3), (0, 2), (1, 3)]),
        ("2x2x1", [(0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0)], [(0, 1), (0, 1), (2, 3), (2, 3)]),
    ],
)  # fmt: skip
def test_ranks_take_their_place_in_the_grid(
    found: list[dict[str, Any]], name: str, coordinates: list[tuple[int, ...]], groups: list[tuple[int, ...]]
) -> None:
    for rank, result in enumerate(found):
        facts = result[name]
        assert facts["coordinate"] == coordinates[rank]
        assert facts["ranks in dp_group"] == groups[rank]
        assert facts["dp rank"] == groups[rank].index(rank) == facts["coordinate"][1]
        assert (facts["main"], facts["size"], facts["local"]) == (rank == 0, RANKS, rank)
        assert (facts["device"], facts["owns"]) == ("cpu", False)


@pytest.mark.gloo
def test_groups_of_the_same_ranks_are_one(found: list[dict[str, Any]]) -> None:
    for result in found:
        assert result["made once"] == (True, False)


@pytest.mark.gloo
def test_an_error_of_some_ranks_is_raised_on_all(found: list[dict[str, Any]]) -> None:
    ours = ("DataError", [("DATA_X", "of rank 2")])
    for rank, agreed in enumerate(result["agree"] for result in found):
        assert agreed["nobody"] == ("fine", None)
        assert agreed["rank 2, ours"] == ours
        # Who has an error keeps its own: it holds the trace. The others take that of the lowest rank.
        assert agreed["ranks 1 and 3"] == ("DataError", [("DATA_X", f"of rank {3 if rank == 3 else 1}")])
        assert agreed["all"] == ("DataError", [("DATA_X", f"of rank {rank}")])


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("name", "failing", "own"),
    [("rank 2, foreign", 2, ("ValueError", "the reason")), ("rank 0, unpicklable", 0, ("UnpicklableError", "here"))],
)
def test_an_error_that_is_not_ours_names_its_rank(
    found: list[dict[str, Any]], name: str, failing: int, own: tuple[str, str]
) -> None:
    for rank, result in enumerate(found):
        kind, detail = result["agree"][name]
        if rank == failing:
            assert (kind, detail) == own
            continue
        ((code, message),) = detail
        assert (kind, code) == ("RunError", "RANK_FAILED")
        assert f"rank {failing} failed with {own[0]}" in message


@pytest.mark.gloo
def test_a_launch_of_another_size_is_refused_on_every_rank(found: list[dict[str, Any]]) -> None:
    for result in found:
        kind, ((code, message),) = result["two of four"]
        assert (kind, code) == ("PlanError", "WORLD_SIZE")
        assert "started 4 processes, the plan has 2 ranks" in message


@pytest.mark.gloo
def test_a_plan_for_gpus_is_refused_where_there_are_none(found: list[dict[str, Any]]) -> None:
    for rank, result in enumerate(found):
        kind, ((code, message),) = result["no gpu"]
        assert (kind, code) == ("PlanError", "WORLD_NO_GPU")
        assert f"local rank {rank} has no GPU" in message


def test_deepspeeds_accelerator_is_the_plans_whatever_a_variable_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed would refuse to start without Intel's torch."""
    monkeypatch.setenv("DS_ACCELERATOR", "xpu")
    world = init_world(Grid(), backend="gloo", environment={})
    assert os.environ["DS_ACCELERATOR"] == "cpu"
    destroy_world(world)
    assert os.environ["DS_ACCELERATOR"] == "xpu"


@pytest.mark.gloo
def test_disconnecting_leaves_groups_that_others_joined(found: list[dict[str, Any]]) -> None:
    assert all(result["alive"] for result in found)


@pytest.mark.parametrize(
    ("environment", "error", "code"),
    [
        ({}, PlanError, "WORLD_SIZE"),
        ({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, PlanError, "WORLD_SIZE"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, RunError, "LAUNCH_ENV"),
        ({"RANK": "2", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, RunError, "LAUNCH_ENV"),
    ],
)  # fmt: skip
def test_an_environment_that_does_not_fit_is_refused_before_anything_is_joined(
    environment: dict[str, str], error: type[ToolkitError], code: str
) -> None:
    began = time.monotonic()
    with pytest.raises(error) as caught:
        init_world(Grid(pp=1, dp=2, tp=1), backend="gloo", environment=environment)
    assert caught.value.codes == (code,)
    assert time.monotonic() - began < 60
    assert not dist.is_initialized()
