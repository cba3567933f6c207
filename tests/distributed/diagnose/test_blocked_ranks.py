"""Who waits for whom, from places alone."""

from __future__ import annotations

from toolkit.distributed.diagnose.blocked_ranks import Place, Step, find_blocked, hang_error
from toolkit.topology.grid import Grid

GRID = Grid(dp=2, tp=2)
GATHER, SCATTER, BARRIER = (
    Step(kind="tp", operation="gather"),
    Step(kind="tp", operation="scatter"),
    Step(kind="world", operation="barrier"),
)
STEPS = (GATHER, SCATTER, BARRIER)


def at(*steps: Step, inside: bool = True) -> Place:
    return Place(entered=tuple(step.name for step in steps), is_inside=inside)


def test_the_step_that_a_rank_left_out_comes_first():
    places = {0: at(GATHER, SCATTER, BARRIER), 1: at(GATHER, SCATTER, BARRIER), 2: at(GATHER), 3: at(SCATTER)}
    waits = find_blocked(GRID, STEPS, places)
    assert [(wait.step, wait.waiting, dict(wait.missing)) for wait in waits] == [
        (GATHER, (2,), {3: at(SCATTER)}),
        (SCATTER, (3,), {2: at(GATHER)}),
        (BARRIER, (0, 1), {2: at(GATHER), 3: at(SCATTER)}),
    ]
    (problem,) = hang_error(waits, seconds=60).problems
    assert problem.code == "GROUP_HANG"
    assert problem.message == (
        "no rank has made progress for 60 s: rank 2 waits in gather of tp (ranks 2, 3) for rank 3 (in tp scatter); "
        "2 more groups wait too"
    )
    assert "network of rank 3" in problem.fix


def test_ranks_that_have_not_started_or_are_between_steps_are_told_apart():
    places = {0: at(BARRIER), 1: Place(), 2: Place(), 3: at(GATHER, inside=False)}
    (wait,) = find_blocked(GRID, STEPS, places)
    assert wait.for_whom() == "for ranks 1, 2 (not started), and rank 3 (past tp gather)"
    assert wait.as_dict()["missing"][2] == {"rank": 3, "place": "past tp gather"}


def test_data_that_does_not_move_stands_behind_ranks_that_are_missed():
    places = {0: at(GATHER), 1: at(GATHER), 2: at(GATHER, SCATTER), 3: at(GATHER, inside=False)}
    waits = find_blocked(GRID, STEPS, places)
    assert [(wait.step, wait.group, [rank for rank, _ in wait.missing]) for wait in waits] == [
        (SCATTER, (2, 3), [3]),
        (GATHER, (0, 1), []),
    ]
    assert (
        str(waits[1]) == "ranks 0, 1 wait in gather of tp (ranks 0, 1) though all have arrived: no data is transferred"
    )


def test_ranks_that_are_all_between_steps():
    places = dict.fromkeys(range(4), at(GATHER, inside=False))
    (problem,) = hang_error(find_blocked(GRID, STEPS, places), seconds=5).problems
    assert "every rank is between two operations" in problem.message
    assert "network of all ranks" in problem.fix
