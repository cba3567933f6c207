"""What would take a rank's part of a model for the whole is refused; DDP and FSDP over data-parallel ranks are right."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_distributed
from sharded_models import VOCABULARY, batch, dense_model, shard
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from toolkit.config.job import Lora
from toolkit.distributed.fake import fake_world
from toolkit.distributed.process_groups import join_group, split_group
from toolkit.errors import PlanError
from toolkit.modeling.lora import apply_lora
from toolkit.pipeline_parallel import StageSpec, split_model
from toolkit.tensor_parallel.guard import PartOfModel
from toolkit.topology.grid import Grid

GRID = Grid(dp=2, tp=2)
STEPS = 3


class Wrapper(nn.Module):
    """A model of a user's own around one of transformers."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.value = inner, nn.Linear(4, 1)


def by_accelerate(model: Any) -> Any:
    from accelerate import Accelerator

    return Accelerator(cpu=True).prepare(model)


def by_deepspeed(model: Any) -> Any:
    import deepspeed

    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    return deepspeed.initialize(model=model, config=config, dist_init_required=False)


def by_layers(model: Any) -> Any:
    for layer in model.model.layers:
        fully_shard(layer, mesh=init_device_mesh("cpu", (4,)))
    return torch.optim.SGD(model.parameters())


TAKES_ALL_RANKS: dict[str, Callable[[Any], Any]] = {
    "DDP": DistributedDataParallel,
    "DDP over the tensor group": lambda model: DistributedDataParallel(model, process_group=model.tensor_group),
    "DDP of a wrapper": lambda model: DistributedDataParallel(Wrapper(model)),
    "DDP of adapters": lambda model: DistributedDataParallel(apply_lora(model, Lora(), seed=0)),
    "accelerate": by_accelerate,
    "FSDP": FullyShardedDataParallel,
    "fully_shard": lambda model: fully_shard(model, mesh=init_device_mesh("cpu", (4,))),
    "fully_shard by layers": by_layers,
    "deepspeed without mpu": by_deepspeed,
}
TAKES_THE_WHOLE: dict[str, Callable[[Any], Any]] = {
    "save_pretrained": lambda model: model.save_pretrained("nowhere"),
    "push_to_hub": lambda model: model.push_to_hub("nobody/nothing"),
    "generate": lambda model: model.generate(torch.ones(1, 2, dtype=torch.long)),
    "save_pretrained of adapters": lambda model: apply_lora(model, Lora(), seed=0).save_pretrained("nowhere"),
    "generate of adapters": lambda model: apply_lora(model, Lora(), seed=0).generate(
        torch.ones(1, 2, dtype=torch.long)
    ),
}


def refusal(model: Any, use: Callable[[Any], Any]) -> tuple[tuple[str, ...], str, bool]:
    """Codes and text of the error, and whether every weight is what it was."""
    before = [(parameter, parameter.detach().clone()) for parameter in model.parameters()]
    with pytest.raises(PlanError) as caught:
        use(model)
    untouched = all(now.shape == then.shape and now.equal(then) for now, then in before)
    return caught.value.codes, str(caught.value), untouched


def draw(step: int, dp_rank: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(10 * step + dp_rank))


def losses(model: Any, batches: list[list[torch.Tensor]], *, place: int) -> list[float]:
    """Losses of the batch at one place, of steps on the mean over all batches of a step."""
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
    for each in batches:
        optimizer.zero_grad()
        made = [model(input_ids=ids, labels=ids).loss for ids in each]
        torch.stack(made).mean().backward()
        optimizer.step()
        found.append(float(made[place].detach()))
    return found


def over_data_parallel_ranks(rank: int) -> dict[str, tuple[list[float], list[float]]]:
    """Losses of this rank's batches, of the sharded model and of the dense one, which sees all of them."""
    tp_group, dp_group = (join_group(GRID, rank, axis) for axis in ("tp", "dp"))
    mesh = init_device_mesh("cpu", (GRID.dp, GRID.tp), mesh_dim_names=("dp", "tp"))
    own = GRID.coordinate(rank).dp
    found = {}
    for name, key_heads, pieces, wrap in (
        ("llama", 4, False, lambda model: DistributedDataParallel(model, process_group=dp_group)),
        ("qwen3", 1, True, lambda model: fully_shard(model, mesh=mesh["dp"])),
    ):
        dense = dense_model(name, key_heads)
        ours = wrap(shard(copy.deepcopy(dense), tp_group, sequence_parallel=pieces))
        found[name] = (
            losses(ours, [[draw(step, own)] for step in range(STEPS)], place=0),
            losses(dense, [[draw(step, part) for part in range(GRID.dp)] for step in range(STEPS)], place=own),
        )
    return found


def trained(rank: int) -> dict[str, tuple[Any, Any]]:
    tp_group = join_group(GRID, rank, "tp")
    dense = dense_model("llama")
    alone = DistributedDataParallel(shard(copy.deepcopy(dense), split_group(tp_group, 2)))
    found: dict[str, tuple[Any, Any]] = {"alone": tuple(float(m(**batch()).loss.detach()) for m in (alone, dense))}
    return found | over_data_parallel_ranks(rank)


def refusals(_: int) -> dict[str, tuple[tuple[str, ...], str, bool]]:
    """What one rank of four is told: nothing is sent before a refusal, so that the others need not exist."""
    dist.destroy_process_group()
    os.environ.update(RANK="2", LOCAL_RANK="2", WORLD_SIZE=str(GRID.world_size))
    with fake_world(GRID, rank=2):
        tp_group, dense = join_group(GRID, 2, "tp"), dense_model("llama")
        found = {
            name: refusal(shard(copy.deepcopy(dense), tp_group), use)
            for name, use in (TAKES_ALL_RANKS | TAKES_THE_WHOLE).items()
        }
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # which the process leaves at its end
    return found


@pytest.fixture(scope="module")
def refused() -> dict[str, tuple[tuple[str, ...], str, bool]]:
    return run_distributed(refusals, 1)[0]


@pytest.mark.gloo
def test_a_wrapper_over_the_tensor_group_is_refused_before_it_touches_a_weight(refused: dict[str, Any]) -> None:
    for name in TAKES_ALL_RANKS:
        codes, text, untouched = refused[name]
        assert codes == ("TP_REPLICATED",), name
        assert untouched or name.startswith("fully_shard"), name  # which tells nobody before it has cut them
        assert "tk.initialize" in text, name
    assert "treats ranks 2, 3 as copies of one model" in refused["accelerate"][1]


@pytest.mark.gloo
def test_a_part_is_neither_saved_as_the_model_nor_asked_for_text(refused: dict[str, Any]) -> None:
    for name in TAKES_THE_WHOLE:
        codes, text, _ = refused[name]
        assert "this rank has its shard of each layer, one of 2 tensor-parallel ranks" in text, name
        assert codes == ("PART_GENERATE" if "generate" in name else "PART_SAVE",), name
        assert "tk.export" in text, name


@pytest.mark.gloo
def test_ddp_and_fsdp_over_data_parallel_ranks_or_one_rank_train_as_the_dense_model() -> None:
    for result in run_distributed(trained, GRID.world_size):
        assert len(result) == 3
        for name, (ours, dense) in result.items():
            assert ours == pytest.approx(dense, abs=1e-5), name


def test_a_stage_of_a_pipeline_is_not_taken_for_the_model_either() -> None:
    for num_held, held in ((1, True), (2, False)):
        stage = dense_model("llama")
        split_model(stage, StageSpec(chunks=(range(num_held),), num_layers=2))
        assert isinstance(stage, PartOfModel) is held
    split_model(stage := dense_model("llama"), StageSpec(chunks=(range(1),), num_layers=2))
    for use in (TAKES_THE_WHOLE["save_pretrained"], TAKES_THE_WHOLE["generate"]):
        codes, text, _ = refusal(stage, use)
        assert codes[0] in ("PART_SAVE", "PART_GENERATE")
        assert "this rank has the layers of its stage of a pipeline" in text
        assert "tk.export" in text


def test_a_sharded_model_keeps_the_name_of_its_class() -> None:
    with fake_world(Grid(tp=2)):
        dense = dense_model("llama")
        kind = type(dense)
        model = shard(dense, join_group(Grid(tp=2), 0, "tp"))
        again = shard(dense_model("llama"), join_group(Grid(tp=2), 0, "tp"))
    assert type(model) is type(again) is not kind
    assert isinstance(model, kind)
    assert isinstance(model, PartOfModel)
    assert (type(model).__name__, type(model).__module__) == (kind.__name__, kind.__module__)
    assert model.can_generate()
    assert type(dense_model("llama")) is kind
