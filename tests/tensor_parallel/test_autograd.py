"""Each differentiable collective against what it means: forward, gradient, and gradient of the gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_distributed

from toolkit.distributed.collectives import all_reduce
from toolkit.tensor_parallel.autograd import (
    copy_to_region,
    gather_from_region,
    gather_from_sequence,
    reduce_from_region,
    reduce_scatter_to_sequence,
    scatter_to_region,
)

RANKS = 2
DIMS = (0, 1, -1)
# What a rank computes between a pair of duals: it differs by rank, so a gradient that is not reduced is wrong.
Pair = Callable[[torch.Tensor, int, dist.ProcessGroup], torch.Tensor]


def inside(x: torch.Tensor, rank: int) -> torch.Tensor:
    return (x * (rank + 2)).tanh()


def copy_reduce(x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    return reduce_from_region(inside(copy_to_region(x, tp_group=group), group.rank()), tp_group=group)


def scatter_gather(x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    piece = inside(scatter_to_region(x, dim=dim, tp_group=group), group.rank())
    return gather_from_region(piece, dim=dim, tp_group=group)


def sequence(x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    piece = scatter_to_region(x, dim=dim, tp_group=group)
    whole = inside(gather_from_sequence(piece, dim=dim, tp_group=group), group.rank())
    return gather_from_region(reduce_scatter_to_sequence(whole, dim=dim, tp_group=group), dim=dim, tp_group=group)


def summed(x: torch.Tensor, dim: int) -> torch.Tensor:
    return inside(x, 0) + inside(x, 1)


def joined(x: torch.Tensor, dim: int) -> torch.Tensor:
    return torch.cat([inside(piece, rank) for rank, piece in enumerate(x.chunk(RANKS, dim))], dim)


CASES: dict[str, tuple[Pair, Callable[[torch.Tensor, int], torch.Tensor]]] = {
    "copy and reduce": (copy_reduce, summed),
    "scatter and gather": (scatter_gather, joined),
    "sequence": (sequence, summed),
}


def derivatives(function: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
    """Output, gradient, and gradient of the gradient's square, for an input that all ranks hold."""
    torch.manual_seed(0)
    x = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(4, 6, dtype=torch.float64)
    y = function(x)
    [grad] = torch.autograd.grad((y * weights).sum(), x, create_graph=True)
    [second] = torch.autograd.grad((grad**2).sum(), x)
    return [y.detach(), grad.detach(), second]


def scenes(rank: int) -> dict[Any, float]:
    group = dist.group.WORLD
    errors = {}
    for name, (sharded, dense) in CASES.items():
        for dim in DIMS:
            ours = derivatives(lambda x, f=sharded, d=dim: f(x, d, group))
            wanted = derivatives(lambda x, f=dense, d=dim: f(x, d))
            errors[name, dim] = max(float((a - b).abs().max()) for a, b in zip(ours, wanted, strict=True))
    x = torch.full((2,), float(rank + 1), requires_grad=True)
    y = reduce_from_region(x, tp_group=group)
    y.sum().backward()
    errors["input untouched"] = float((x - (rank + 1)).abs().max()) + float(
        (all_reduce(x.detach(), group=group) - y).abs().max()
    )
    return errors


@pytest.fixture(scope="module")
def errors() -> list[dict[Any, float]]:
    return run_distributed(scenes, RANKS)


@pytest.mark.gloo
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("name", CASES)
def test_a_pair_of_duals_is_the_dense_function_to_its_second_derivative(
    errors: list[dict[Any, float]], name: str, dim: int
) -> None:
    assert max(found[name, dim] for found in errors) < 1e-12


@pytest.mark.gloo
def test_a_reduction_leaves_its_input(errors: list[dict[Any, float]]) -> None:
    assert [found["input untouched"] for found in errors] == [0, 0]
