"""Stages of one's own under each schedule: losses and gradients are those of the whole model in one process."""

from __future__ import annotations

import copy
import os
from typing import Any
from unittest.mock import patch

import pytest
import torch
from ranks import run_distributed
from torch import nn

from toolkit.distributed import groups
from toolkit.errors import PlanError, ToolkitError
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
    found["in place"] = in_place(world)
    errors = {
        "tuple": error_of(world, [nn.LSTM(4, 4) if rank == 0 else nn.Linear(4, 4)]),
        "values": error_of(world, [Reads() if rank == 0 else nn.Linear(4, 4)]),
        "counted": error_of(world, [Counts()]),
        "number": error_of(world, [nn.Linear(4, 4)] * (1 + rank)),
    }
    return found | {"errors": errors, "mesh": meshes(world), "joined": joined(rank)}


def begins_in_place() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 20))


def in_place(world: groups.World) -> dict[str, Any]:
    """Runs a stage whose first module changes what it receives; returns this rank's gradients."""
    whole = begins_in_place()
    stage = whole[:1] if world.coordinate.pp == 0 else whole[1:]
    runner = PipelineRunner([stage], world, loss=nn.functional.mse_loss, micro_batches=MICRO_BATCHES)
    runner.step(*batches())
    return {name: weight.grad.numpy() for name, weight in whole.named_parameters() if weight.grad is not None}


class Reads(nn.Linear):
    """Reads a value, which a fake tensor does not have."""

    def __init__(self) -> None:
        super().__init__(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if x.sum().item() else x


class Counts(nn.Linear):
    """Fails if it has seen a micro-batch before."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add_(1)
        if type(x) is torch.Tensor and self.seen.item() > 1:
            raise PlanError.of(code="COUNTED", message="the run on fake tensors was counted")
        return super().forward(x)


def error_of(world: groups.World, stages: list[nn.Module], rows: tuple[int, ...] = (2,)) -> tuple[str, ...]:
    given = [torch.zeros(count, 4) for count in rows]
    try:
        runner = PipelineRunner(stages, world, loss=nn.functional.mse_loss, micro_batches=len(given))
        runner.step(given, given)
    except ToolkitError as error:
        return error.codes
    return ()


def joined(rank: int) -> tuple[str, ...]:
    """Returns the error where the launcher's variables describe another world than the one that was joined."""
    with pytest.MonkeyPatch.context() as changed:
        for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1")):
            changed.setenv(name, value)
        try:
            groups.init()
        except PlanError as error:
            return error.codes
    return ()


def meshes(world: groups.World) -> tuple[Any, ...]:
    mesh = groups.to_device_mesh(world)
    again = groups.from_device_mesh(mesh)
    try:
        groups.from_device_mesh(torch.distributed.init_device_mesh("cpu", (2,), mesh_dim_names=("model",)))
    except ToolkitError as error:
        code = error.codes
    try:
        groups.from_device_mesh(torch.distributed.init_device_mesh("cpu", (2,)))
    except ToolkitError as error:
        code += error.codes
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


def test_a_stage_may_begin_with_an_operation_in_place(ranks: list[dict[Any, Any]]) -> None:
    whole = begins_in_place()
    sum(nn.functional.mse_loss(whole(x), y) / MICRO_BATCHES for x, y in zip(*batches(), strict=True)).backward()
    found = ranks[0]["in place"] | ranks[1]["in place"]
    assert found.keys() == dict(whole.named_parameters()).keys()
    for name, weight in whole.named_parameters():
        torch.testing.assert_close(torch.from_numpy(found[name]), weight.grad, rtol=1e-5, atol=1e-7)


def test_a_stage_returns_one_tensor_or_every_rank_says_so(ranks: list[dict[Any, Any]]) -> None:
    for case in ("tuple", "values"):
        assert [rank["errors"][case] for rank in ranks] == [("PIPELINE_ACTIVATION",)] * 2


def test_a_run_on_fake_tensors_leaves_the_buffers(ranks: list[dict[Any, Any]]) -> None:
    assert [rank["errors"]["counted"] for rank in ranks] == [()] * 2


def test_ranks_with_other_numbers_of_stages_all_say_so(ranks: list[dict[Any, Any]]) -> None:
    assert [rank["errors"]["number"] for rank in ranks] == [("PIPELINE_RANKS_DIFFER",)] * 2


def test_a_world_that_the_launcher_does_not_describe_is_refused(ranks: list[dict[Any, Any]]) -> None:
    assert [rank["joined"] for rank in ranks] == [("WORLD_SIZE",)] * 2


@patch.dict(os.environ)  # `init` leaves the rank there, which other libraries would take for a launcher's
def code_of(loss: Any, *steps: tuple[int, ...]) -> str:
    """Returns the code of the error of steps in one process, of so many rows in each micro-batch."""
    world = groups.init()
    try:
        with pytest.raises(PlanError, match="PIPELINE_UNUSED"):
            PipelineRunner([nn.Linear(4, 4)] * 2, world, loss=loss, micro_batches=2)
        runner = PipelineRunner([nn.Linear(4, 4)], world, loss=loss, micro_batches=2)
        for rows in steps:
            given = [torch.zeros(count, 4) for count in rows]
            runner.step(given, given)
    except ToolkitError as error:
        return error.codes[0]
    finally:
        groups.destroy(world)
    return ""


@pytest.mark.parametrize(
    ("loss", "steps", "code"),
    [
        (nn.functional.mse_loss, [(2, 2), (2, 2)], ""),
        (nn.functional.mse_loss, [(2, 3)], "STEP_INPUT_SHAPE"),
        (nn.functional.mse_loss, [(2, 2), (1, 1)], "STEP_INPUT_SHAPE"),
        (lambda output, target: None, [(2, 2)], "PIPELINE_LOSS"),
        (lambda output, target: output - target, [(2, 2)], "PIPELINE_LOSS"),
    ],
)
def test_inputs_of_one_shape_and_a_scalar_loss(
    loss: Any, steps: list[tuple[int, ...]], code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert code_of(loss, *steps) == code


def test_a_mesh_goes_out_and_in(ranks: list[dict[Any, Any]]) -> None:
    for index, rank in enumerate(ranks):
        ids, grid, coordinate, code, total = rank["mesh"]
        assert ids == [[[0]], [[1]]]
        assert (grid, coordinate.pp) == (groups.Grid(pp=2), index)
        assert code == ("MESH_LAYOUT", "MESH_LAYOUT")
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
