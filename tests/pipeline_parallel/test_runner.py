"""Stages of one's own under each schedule: losses and gradients are those of the whole model in one process."""

from __future__ import annotations

import copy
import doctest
from typing import Any

import pytest
import torch
from ranks import run_distributed
from torch import nn

import toolkit.pipeline_parallel.runner
from toolkit.distributed import groups
from toolkit.errors import PlanError, RunError, ToolkitError
from toolkit.pipeline_parallel import PipelineRunner, split_sequential

# Schedule, and stages of each rank.
WAYS = (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-h1", 2))
MICRO_BATCHES = 4


class Wider(nn.Module):
    """Changes the width, so that no two stages receive the same shape."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width + 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


def sequence() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Wider(4 + 2 * index) for index in range(8)))


def batches() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return (
        [torch.randn(3, 4, generator=draw) for _ in range(MICRO_BATCHES)],
        [torch.randn(3, 20, generator=draw) for _ in range(MICRO_BATCHES)],
    )


def steps_of(rank: int) -> dict[Any, Any]:
    """Runs two steps each way; returns the losses and gradients of this rank's stages, by name in the whole model."""
    world = groups.init(pp=2)
    found: dict[Any, Any] = {}
    for name, chunks in WAYS:
        whole = sequence()
        names = {id(weight): key for key, weight in whole.named_parameters()}
        own = split_sequential(whole, 2 * chunks)[world.coordinate.pp :: 2]
        runner = PipelineRunner(own, world, loss=nn.functional.mse_loss, micro_batches=MICRO_BATCHES, schedule=name)
        inputs, targets = batches()
        losses = []
        for _ in range(2):
            losses.append(float(runner.step(inputs if rank == 0 else (), targets if rank == 1 else ())))
        weights = [weight for stage in own for weight in stage.parameters()]
        found[name, chunks] = losses, {names[id(weight)]: weight.grad.numpy() for weight in weights}
    return found | {"error": error_of(world, rank), "mesh": meshes(world)}


def error_of(world: groups.World, rank: int) -> tuple[str, ...]:
    """Returns the error of a stage that returns no tensor, which every rank raises."""
    stage = nn.LSTM(4, 4) if rank == 0 else nn.Linear(4, 4)
    runner = PipelineRunner([stage], world, loss=nn.functional.mse_loss, micro_batches=1)
    try:
        runner.step([torch.zeros(2, 4)], [torch.zeros(2, 4)])
    except RunError as error:
        return error.codes
    return ()


def meshes(world: groups.World) -> tuple[Any, ...]:
    mesh = groups.to_device_mesh(world)
    again = groups.from_device_mesh(mesh)
    try:
        groups.from_device_mesh(torch.distributed.init_device_mesh("cpu", (2,), mesh_dim_names=("model",)))
    except ToolkitError as error:
        code = error.codes
    total = torch.ones(1)
    torch.distributed.all_reduce(total, group=mesh.get_group("pp"))
    return mesh.mesh.tolist(), again.grid, again.coordinate, code, float(total)


@pytest.fixture(scope="module")
def ranks() -> list[dict[Any, Any]]:
    return run_distributed(steps_of, 2)


@pytest.mark.parametrize("way", WAYS)
def test_losses_and_gradients_are_those_of_the_whole_model(ranks: list[dict[Any, Any]], way: tuple[str, int]) -> None:
    whole = copy.deepcopy(sequence())
    losses = []
    for _ in range(2):  # gradients accumulate, as the optimizer is the caller's
        rows = [nn.functional.mse_loss(whole(x), y) / MICRO_BATCHES for x, y in zip(*batches(), strict=True)]
        torch.stack(rows).sum().backward()
        losses.append(float(torch.stack(rows).sum()))
    grads: dict[str, Any] = {}
    for rank in ranks:
        assert rank[way][0] == pytest.approx(losses, rel=1e-6)
        grads |= rank[way][1]
    assert grads.keys() == dict(whole.named_parameters()).keys()
    for name, weight in whole.named_parameters():
        torch.testing.assert_close(torch.from_numpy(grads[name]), weight.grad, rtol=1e-5, atol=1e-7)


def test_a_stage_returns_one_tensor_or_every_rank_says_so(ranks: list[dict[Any, Any]]) -> None:
    assert [rank["error"] for rank in ranks] == [("PIPELINE_ACTIVATION",)] * 2


def test_a_mesh_goes_out_and_in(ranks: list[dict[Any, Any]]) -> None:
    for index, rank in enumerate(ranks):
        ids, grid, coordinate, code, total = rank["mesh"]
        assert ids == [[[0]], [[1]]]
        assert (grid, coordinate.pp) == (groups.Grid(pp=2), index)
        assert code == ("MESH_LAYOUT",)
        assert total == 2


def test_a_fake_world_has_every_group() -> None:
    with groups.fake(pp=2, dp=2, tp=2, rank=5) as world:
        assert (world.coordinate.pp, world.coordinate.dp, world.coordinate.tp) == (1, 0, 1)
        assert {kind: world.group(kind).size() for kind in ("pp", "dp", "tp", "model")} == {
            "pp": 2,
            "dp": 2,
            "tp": 2,
            "model": 4,
        }
        assert groups.to_device_mesh(world).mesh_dim_names == ("pp", "dp", "tp")


def test_a_sequence_is_cut_by_its_parameters() -> None:
    assert doctest.testmod(toolkit.pipeline_parallel.runner).failed == 0
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 8))
    assert [len(stage) for stage in split_sequential(model, 3)] == [1, 2, 1]
    assert [len(stage) for stage in split_sequential(model, 2, counts=(3, 1))] == [3, 1]
    with pytest.raises(ValueError, match="does not give 4 modules to 2 stages"):
        split_sequential(model, 2, counts=(3, 2))
    with pytest.raises(PlanError) as refused:
        split_sequential(model, 5)
    assert refused.value.codes == ("PARTITION_STAGES",)
    model[3].weight = model[0].weight
    with pytest.raises(ValueError, match="is a parameter of stage 0 too"):
        split_sequential(model, 2)
