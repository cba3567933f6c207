"""Who holds up whom, from what ranks report."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from toolkit.distributed.hangs.recorder import Operation
from toolkit.distributed.hangs.verdict import Report, Verdict, judge

REDUCE = Operation(name="all_reduce", number=7, sizes=((6,),), group="default_pg", ranks=(0, 1, 2, 3))
GATHER = replace(REDUCE, name="all_gather", sizes=((2, 3),))
PAIR = Operation(name="send", number=2, sizes=((4,),), group="5", ranks=(0, 1))
LONG = 600.0


def report(rank: int, **changes: Any) -> Report:
    values: dict[str, Any] = {
        "unwell": {},
        "doing": "step 9",
        "kind": "bounded",
        "still_seconds": LONG,
        "is_still": True,
        "pending": (REDUCE,),
    }
    return Report(rank=rank, host="a", pid=100 + rank, started=1.0, **(values | changes))


def judged(*reports: Report, silent: dict[int, float] | None = None, size: int = 4) -> Verdict | None:
    known = {one.rank: Report.from_dict(json.loads(json.dumps(one.to_dict()))) for one in reports}
    assert tuple(known.values()) == reports, "a report survives its way through the store"
    return judge(known, silent_seconds=silent or {}, size=size)


def test_nobody_is_blamed_while_a_rank_gets_on_or_may_take_any_time():
    waiting = [report(rank) for rank in (0, 1, 2)]
    assert judged(*waiting, report(3, still_seconds=2.0, is_still=False)) is None
    assert judged(*waiting, report(3, kind="free", doing="the save of checkpoint-5", pending=())) is None
    assert judged(*waiting[:2], report(3, kind="free", pending=()), silent={2: LONG}) is None
    assert judged(*(report(rank, kind="waiting", pending=()) for rank in range(4))) is None


def test_a_silent_rank_is_named_with_the_state_of_its_process():
    stopped = report(2, still_seconds=0.0, is_still=False)
    found = judged(
        report(0),
        report(1, unwell={2: "is stopped"}),
        stopped,
        report(3, kind="waiting", pending=()),
        silent={2: 400.0},
    )
    assert found is not None
    assert (found.ranks, found.silent, found.ends) == ((2,), (2,), (0, 1, 3))
    assert found.message == (
        "rank 2 has not responded for at least 400 s: its process 102 on a is stopped; its last report was of step 9. Ranks 0, 1 wait in "
        "all_reduce [6] (operation 7 of the world group, ranks 0-3)"
    )


def test_a_rank_that_never_reported_is_named():
    found = judged(report(0), report(1), report(2))
    assert found is not None
    assert found.silent == (3,)
    assert found.message.startswith("rank 3 has not reported once")


def test_a_rank_outside_of_collectives_is_named_with_its_place():
    found = judged(*(report(rank) for rank in (0, 1, 2)), report(3, pending=(), place="x.py:4 in load"))
    assert found is not None
    assert (found.ranks, found.silent) == ((3,), ())
    assert (
        "rank 3 has made no progress for 600 s in step 9, and is in no collective; its Python code is at x.py:4 in load"
        in found.message
    )
    assert found.message.endswith("Ranks 0-2 wait in all_reduce [6] (operation 7 of the world group, ranks 0-3)")


def test_the_few_that_call_another_collective_are_named():
    found = judged(report(0), report(1, pending=(GATHER,)), report(2), report(3))
    assert found is not None
    assert found.ranks == (1,)
    assert "rank 1 is in all_gather [2, 3] (operation 7" in found.message
    assert "while ranks 0, 2, 3 wait in all_reduce [6] (operation 7" in found.message


def test_of_two_ranks_apart_both_are_named():
    pair = replace(REDUCE, ranks=(0, 1))
    found = judged(report(0, pending=(pair,)), report(1, pending=(replace(pair, number=8),)), size=2)
    assert found is not None
    assert found.ranks == (0, 1)


def test_ranks_of_other_groups_are_not_blamed():
    """Ranks 2 and 3 wait for the group of all; 1 is at fault, and is in a message to 0."""
    found = judged(report(0), report(1, pending=(PAIR,)), report(2), report(3))
    assert found is not None
    assert found.ranks == (1,)
    assert "rank 1 is in send [4] (operation 2 of group 5, ranks 0-1) (step 9)" in found.message


def test_where_all_have_begun_no_rank_is_blamed():
    found = judged(*(report(rank) for rank in range(4)))
    assert found is not None
    assert found.ranks == (0, 1, 2, 3)
    assert "all of the group have begun it: no data moves" in found.message
