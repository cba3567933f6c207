"""The groups in which a rank communicates are those that runs create."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch.distributed as dist
from ranks import run_distributed
from tiny_plans import tiny_plan

import toolkit as tk
from toolkit.distributed import process_groups
from toolkit.planning.plan import Plan
from toolkit.topology.communicators import communicators, routes
from toolkit.topology.grid import Grid

RANKS = 4


def plan_of(**parallel: Any) -> Plan:
    return tiny_plan(
        "llama",
        ranks=RANKS,
        train={"gradient_accumulation_steps": 4},
        parallel=parallel,
        config={"num_hidden_layers": 4, "num_key_value_heads": 4},
    )


PLANS = {
    "data": plan_of(),
    "tensor": plan_of(tensor=2),
    "tensor alone": plan_of(tensor=4),
    "pipeline": plan_of(pipeline=2),
    "pipeline alone": plan_of(pipeline=4),
    "pipeline and tensor": plan_of(pipeline=2, tensor=2),
    "virtual stages": plan_of(pipeline=2, pipeline_schedule="interleaved", virtual_stages=2),
}


class Recorder:
    """`torch.distributed` that notes the ranks of new groups."""

    def __init__(self) -> None:
        self.made: list[tuple[int, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def new_group(self, ranks: list[int], **options: Any) -> Any:
        self.made.append(tuple(ranks))
        return dist.new_group(ranks, **options)


def groups_made(rank: int) -> dict[str, Counter[tuple[int, ...]]]:
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        for name, plan in PLANS.items():
            recorder = Recorder()
            patch.setattr(process_groups, "dist", recorder)
            process_groups._of_world.clear()  # groups of the plan before, in the same world
            with tk.initialize(plan):
                pass
            found[name] = Counter(ranks for ranks in recorder.made if rank in ranks and len(ranks) > 1)
    return found


@pytest.mark.gloo
def test_a_run_creates_them_and_no_others() -> None:
    for rank, found in enumerate(run_distributed(groups_made, RANKS)):
        for name, plan in PLANS.items():
            wraps = plan.settings.virtual_stages > 1
            listed = Counter(tuple(sorted(each)) for each in communicators(plan.grid, rank, wraps=wraps, tied=True))
            listed[tuple(range(RANKS))] -= 1  # the group of all, which a run joins
            assert found[name] == +listed, f"{name}, rank {rank}"


@pytest.mark.parametrize(
    ("grid", "rank", "wraps", "tied", "count"),
    [
        (Grid(), 0, False, False, 0),
        (Grid(dp=8), 3, False, False, 1),  # the world, which is the data-parallel group
        (Grid(dp=4, tp=2), 3, False, False, 3),
        (Grid(tp=8), 3, False, False, 1),
        (Grid(pp=4), 0, False, False, 1 + 2),
        (Grid(pp=4), 1, False, True, 1 + 4),
        (Grid(pp=4), 3, False, True, 1 + 2 + 1),
        (Grid(pp=4), 0, True, False, 1 + 4),
        (Grid(pp=2, dp=2, tp=2), 5, False, True, 5 + 2 + 1),
    ],
)
def test_how_many_there_are(grid: Grid, rank: int, wraps: bool, tied: bool, count: int) -> None:
    assert len(list(communicators(grid, rank, wraps=wraps, tied=tied))) == count


def test_each_neighbour_has_a_channel_of_each_kind_and_direction() -> None:
    assert routes(3, wraps=False) == [
        (0, 1, "activation"),
        (1, 2, "activation"),
        (1, 0, "gradient"),
        (2, 1, "gradient"),
    ]
    assert {*routes(3, wraps=True)} - {*routes(3, wraps=False)} == {(2, 0, "activation"), (0, 2, "gradient")}
