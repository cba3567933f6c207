"""Real processes prove the groups of small grids, find wrong values, and name who is missing."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RankError, free_port, run_distributed

from toolkit.distributed.collectives import exchange, receive, send
from toolkit.distributed.diagnose.blocked_ranks import Wait
from toolkit.distributed.diagnose.check import CheckReport, all_steps, check_groups, kinds_of
from toolkit.distributed.diagnose.collective_tests import OPERATIONS, GroupMember
from toolkit.errors import PlanError, ToolkitError
from toolkit.launch.identity import WorkerIdentity
from toolkit.topology.grid import Grid

RANKS = 4
GRIDS = (Grid(pp=2, tp=2), Grid(dp=2, tp=2), Grid(tp=4))


def check(grid: Grid, rank: int, **options: Any) -> CheckReport | None:
    if dist.is_initialized():
        dist.destroy_process_group()
    settings: dict[str, Any] = {"backend": "gloo", "timeout_seconds": 60.0, "on_hang": lambda error, waits: None}
    identity = WorkerIdentity(rank=rank, local_rank=rank, world_size=RANKS)
    return check_groups(grid, identity=identity, **(settings | options))


def scenes(rank: int, ports: list[int]) -> list[CheckReport | None]:
    reports = []
    for grid, port in zip((*GRIDS, GRIDS[1]), ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)  # each check is a launch of its own
        wrong = port == ports[-1]
        reports.append(check(grid, rank, operations=(lying(), *OPERATIONS[1:]) if wrong else OPERATIONS, backend=None))
    # `run_distributed` ends with a barrier.
    dist.init_process_group("gloo", init_method=f"file://{os.environ['MEET']}", rank=rank, world_size=RANKS)
    return reports


def lying() -> Any:
    """An all-reduce to whose result rank 2 adds itself once more."""

    def run(member: GroupMember) -> tuple[list[int], list[int]]:
        got, expected = OPERATIONS[0].run(member)
        return ([*got, 2] if member.rank == 2 and member.kind == "dp" else got), expected

    return replace(OPERATIONS[0], run=run)


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[CheckReport]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEET", str(tmp_path_factory.mktemp("meet") / "store"))
        found = run_distributed(scenes, RANKS, [free_port() for _ in range(len(GRIDS) + 1)])
    assert found[1:] == [[None] * (len(GRIDS) + 1)] * (RANKS - 1), "rank 0 alone has the report"
    return found[0]


@pytest.mark.gloo
@pytest.mark.parametrize("index", range(len(GRIDS)), ids=map(str, GRIDS))
def test_every_kind_of_a_sound_world_passes(reports: list[CheckReport], index: int) -> None:
    report = reports[index]
    assert report.problems == ()
    assert report.backend == "gloo", "no rank has a card"
    assert tuple(kind.kind for kind in report.kinds) == kinds_of(GRIDS[index])
    assert all(kind.passed and kind.seconds > 0 and kind.bus_gb_per_second is None for kind in report.kinds)
    assert report.operations == (
        *("join", "all-reduce", "all-gather", "reduce-scatter", "broadcast", "send-receive", "exchange", "barrier"),
    )


@pytest.mark.gloo
def test_a_wrong_value_is_told_with_its_rank_and_group(reports: list[CheckReport]) -> None:
    report = reports[-1]
    assert [kind.kind for kind in report.kinds if not kind.passed] == ["dp"]
    (problem,) = report.problems
    assert problem.code == "GROUP_RESULT"
    assert problem.message == "all-reduce over the dp group of ranks 0,2 gave rank 2 [0, 2, 2], not [0, 2]"


def test_kinds_and_steps() -> None:
    assert kinds_of(Grid(dp=4)) == ("dp", "stage", "dp-pp", "world")
    assert kinds_of(Grid()) == ("world",)
    names = [step.name for step in all_steps(Grid(tp=2))]
    assert names[:3] == ["world start", "tp join", "tp all-reduce"]
    assert names[-2:] == ["world report", "world leave"]
    assert len(set(names)) == len(names)


def test_a_grid_of_another_size_than_the_world() -> None:
    with pytest.raises(PlanError, match="the launcher started 4 processes, the grid has 2 ranks") as caught:
        check(Grid(tp=2), 0)
    assert caught.value.codes == ("WORLD_SIZE",)


def test_a_rank_without_a_card_for_a_job_on_cards() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has cards")
    with pytest.raises(PlanError, match="local rank 0 has no GPU"):
        check(Grid(tp=4), 0, backend="nccl")


def leave_out(rank: int, folder: str, what: str) -> None:
    """Rank 3 leaves out an operation, or sleeps before it starts."""

    def on_hang(error: ToolkitError, waits: tuple[Wait, ...]) -> None:
        found = {"error": str(error), "exit_code": error.exit_code, "waits": [str(wait) for wait in waits]}
        (Path(folder) / f"{rank}.json").write_text(json.dumps(found))

    if rank == 3 and what == "start":
        (Path(folder) / "3.json").write_text("null")
        time.sleep(300)
    operations = [operation for operation in OPERATIONS if rank != 3 or operation.name != what]
    check(Grid(dp=2, tp=2), rank, operations=operations, timeout_seconds=6.0, on_hang=on_hang)


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("what", "expected"),
    [
        # In gloo a gather, which all ranks wait for; the neighbour of the rank that left it out is told first.
        ("all-gather", "rank 2 waits in all-gather of tp (ranks 2, 3) for rank 3 (in tp "),
        pytest.param(
            "start", "ranks 0-2 wait in start of world (ranks 0-3) for rank 3 (not started)", marks=pytest.mark.full
        ),
    ],
)
def test_a_rank_that_stays_away_is_named_by_all(tmp_path: Path, what: str, expected: str) -> None:
    started = time.monotonic()
    with pytest.raises(RankError, match=r"exit code 1"):
        run_distributed(leave_out, RANKS, str(tmp_path), what)
    assert time.monotonic() - started < 200
    # The test's launcher kills those that still write a moment after the first has ended.
    found = [json.loads(file.read_text()) for rank in range(RANKS) if (file := tmp_path / f"{rank}.json").exists()]
    told = [rank for rank in found if rank is not None]
    assert len(told) >= 3
    assert {rank["exit_code"] for rank in told} == {1}
    (error,) = {rank["error"] for rank in told}
    assert error.startswith(f"no rank has made progress for 6 s: {expected}")
    assert error.endswith("[GROUP_HANG]")
    assert told[0]["waits"][0].startswith(expected)


def talk(rank: int) -> list[Any]:
    world = dist.group.WORLD
    assert world is not None
    strided = torch.arange(6.0).reshape(2, 3).t() + rank
    ring = exchange(strided, to=(rank + 1) % RANKS, source=(rank - 1) % RANKS, group=world)
    pair = dist.new_group([1, 3])
    got = None
    if rank == 1:
        send(strided, to=1, group=pair)
    if rank == 3:
        got = receive(torch.empty(3, 2), source=0, group=pair)
    return [ring.tolist(), None if got is None else got.tolist()]


@pytest.mark.gloo
def test_point_to_point_counts_ranks_within_the_group() -> None:
    found = run_distributed(talk, RANKS)
    for rank, (ring, _) in enumerate(found):
        assert ring == (torch.arange(6.0).reshape(2, 3).t() + (rank - 1) % RANKS).tolist()
    assert [got for _, got in found] == [None, None, None, (torch.arange(6.0).reshape(2, 3).t() + 1).tolist()]
