"""Groups of a grid and within a group, collectives over them with real processes, and the same on a fake world."""

from __future__ import annotations

import warnings
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import run_distributed
from torch.utils._pytree import tree_map_only

from toolkit.distributed.collectives import (
    _newest,
    all_gather,
    all_reduce,
    equal_pieces,
    gather_into,
    reduce_scatter,
    reduce_scatter_into,
    start_all_reduce,
)
from toolkit.distributed.fake import fake_world
from toolkit.distributed.process_groups import join_each, join_group, split_group
from toolkit.topology.grid import Grid

RANKS = 4
GRID = Grid(dp=2, tp=2)


def of_rank(rank: int) -> torch.Tensor:
    """A tensor that differs in every element and rank. Shape (4, 6)."""
    return torch.arange(24.0).reshape(4, 6) + 100 * rank


def scenes(rank: int) -> dict[str, Any]:
    tp_group, dp_group = join_group(GRID, rank, "tp"), join_group(GRID, rank, "dp")
    whole = join_group(GRID, rank, "world")
    half = split_group(whole, 2)
    strided = of_rank(rank).t()
    before = of_rank(rank)
    in_place = before.clone()
    pending = start_all_reduce(in_place, group=whole, op="max")
    facts = {
        "groups": [dist.get_process_group_ranks(group) for group in (tp_group, dp_group, whole, half)],
        "whole split in one": split_group(whole, 1) is whole,
        "uneven split": refusal(lambda: split_group(whole, 3)),
        "all_reduce over tp": all_reduce(before, group=tp_group),
        "untouched": torch.equal(before, of_rank(rank)),
        "all_reduce over dp, strided": all_reduce(strided, group=dp_group),
        "in place": (pending.wait(), in_place),
        "all_gather": {dim: all_gather(before, dim=dim, group=whole) for dim in (0, 1, -1)},
        "all_gather, strided": all_gather(strided, dim=0, group=half),
        "reduce_scatter": {dim: reduce_scatter(of_rank(rank), dim=dim, group=tp_group) for dim in (0, 1, -1)},
        "uneven pieces": refusal(lambda: reduce_scatter(of_rank(rank)[:, :5], dim=1, group=tp_group)),
    }
    gathered, share = torch.empty(16, 6), torch.empty(1, 6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gather_into(gathered, before, group=whole)
        reduce_scatter_into(share, before, group=whole)
    facts["into"] = (gathered, share)
    facts["minutes"] = minutes_of_new_groups(rank)
    # As arrays: the memory of a tensor that a rank sends would be gone once the rank has ended.
    return tree_map_only(torch.Tensor, torch.Tensor.numpy, facts)


def minutes_of_new_groups(rank: int) -> list[float]:
    """The timeouts of new groups of each kind where the group of all ranks has 7 minutes."""
    dist.distributed_c10d._set_pg_timeout(timedelta(minutes=7))
    alone = join_group(Grid(dp=RANKS), rank, "tp")  # a kind of which there are none yet
    made = [alone, split_group(join_group(GRID, rank, "world"), 2)]
    made += [group for group in join_each([(0, 1), (2, 3)], rank=rank) if group is not None]
    backends = [group._get_backend(torch.device("cpu")) for group in made]
    return [backend.options._timeout.total_seconds() / 60 for backend in backends]


def refusal(call: Any) -> str:
    with pytest.raises(ValueError) as caught:
        call()
    return str(caught.value)


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return tree_map_only(np.ndarray, torch.from_numpy, run_distributed(scenes, RANKS))


@pytest.mark.gloo
def test_groups_hold_the_ranks_of_the_grid(found: list[dict[str, Any]]) -> None:
    for rank, result in enumerate(found):
        neighbours = [rank // 2 * 2, rank // 2 * 2 + 1]
        assert result["groups"] == [neighbours, [rank % 2, rank % 2 + 2], [0, 1, 2, 3], neighbours]
        assert result["whole split in one"]
        assert result["uneven split"] == "num_parts=3 does not divide a group of 4 ranks"


@pytest.mark.gloo
def test_groups_wait_as_long_as_that_of_all_ranks(found: list[dict[str, Any]]) -> None:
    assert [result["minutes"] for result in found] == [[7.0] * 3] * RANKS


@pytest.mark.gloo
def test_reductions(found: list[dict[str, Any]]) -> None:
    for rank, result in enumerate(found):
        first = rank // 2 * 2
        assert torch.equal(result["all_reduce over tp"], of_rank(first) + of_rank(first + 1))
        assert result["untouched"]
        assert torch.equal(result["all_reduce over dp, strided"], (of_rank(rank % 2) + of_rank(rank % 2 + 2)).t())
        given, in_place = result["in place"]
        assert torch.equal(given, of_rank(RANKS - 1))
        assert torch.equal(in_place, of_rank(RANKS - 1))


@pytest.mark.gloo
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_gathers_and_scatters_along_any_dim(found: list[dict[str, Any]], dim: int) -> None:
    for rank, result in enumerate(found):
        first = rank // 2 * 2
        assert torch.equal(result["all_gather"][dim], torch.cat([of_rank(other) for other in range(RANKS)], dim))
        assert torch.equal(result["all_gather, strided"], torch.cat([of_rank(first).t(), of_rank(first + 1).t()]))
        summed = of_rank(first) + of_rank(first + 1)
        assert torch.equal(result["reduce_scatter"][dim], summed.chunk(2, dim)[rank % 2])


@pytest.mark.gloo
def test_in_place_gathers_and_scatters_warn_of_nothing(found: list[dict[str, Any]]) -> None:
    everyone = [of_rank(rank) for rank in range(RANKS)]
    for rank, result in enumerate(found):
        gathered, share = result["into"]
        assert torch.equal(gathered, torch.cat(everyone))
        assert torch.equal(share[0], sum(everyone)[rank])


@pytest.mark.gloo
def test_uneven_pieces_are_refused(found: list[dict[str, Any]]) -> None:
    assert {result["uneven pieces"] for result in found} == {"2 ranks do not divide dim 1 of shape (4, 5)"}
    assert [piece.shape for piece in equal_pieces(of_rank(0), 3, dim=1)] == [(4, 2)] * 3


def test_a_fake_world_ends_with_its_block_and_knows_its_ranks() -> None:
    with pytest.raises(ZeroDivisionError), fake_world(Grid(tp=2)):
        raise ZeroDivisionError
    assert not dist.is_initialized()
    with pytest.raises(ValueError, match="rank 2 is not in"), fake_world(Grid(tp=2), rank=2):
        pass


def test_torchs_newest_names_are_used_and_the_oldest_where_there_are_no_others() -> None:
    assert _newest("all_gather_object", "all_gather") is dist.all_gather_object
    assert _newest("all_gather_of_a_later_torch", "all_gather") is dist.all_gather
    newest = hasattr(dist, "all_gather_single")
    assert [gather_into.__name__, reduce_scatter_into.__name__] == (
        ["all_gather_single", "reduce_scatter_single"]
        if newest
        else ["all_gather_into_tensor", "reduce_scatter_tensor"]
    )
