"""What a rank of a tensor group reads and draws: its shards of the dense model, and little else."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import run_distributed
from safetensors.torch import load_file, save_file
from sharded_models import Variant, dense_model, pairs, shard, variants
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from toolkit.errors import CheckpointError
from toolkit.groups.fake import fake_world
from toolkit.groups.process_groups import join_group
from toolkit.modeling.initialization import initialize_weights
from toolkit.modeling.safetensors_folder import SafetensorsFolder
from toolkit.modeling.storage import allocate
from toolkit.modeling.weights import load_pretrained
from toolkit.tensor_parallel.apply import parameter_shards
from toolkit.topology.grid import Grid

CPU = torch.device("cpu")


def meta_model(config: PreTrainedConfig, *, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def sharded_model(config: PreTrainedConfig, tp_group: dist.ProcessGroup, **options: Any) -> PreTrainedModel:
    """A rank's part as the toolkit builds it before weights come, its storage full of NaN."""
    model = shard(meta_model(config), tp_group)
    allocate(model, device=CPU, **options)
    if "zero_config" not in options:
        with torch.no_grad():
            for tensor in [*model.parameters(), *model.buffers()]:
                tensor.fill_(float("nan") if tensor.is_floating_point() else 1)
    return model.eval()


@contextmanager
def rank_of(tp: int, rank: int) -> Iterator[tuple[dist.ProcessGroup, dist.ProcessGroup]]:
    """A rank without the others: its tensor group and its data-parallel group."""
    grid = Grid(tp=tp)
    with fake_world(grid, rank=rank):
        yield join_group(grid, rank, "tp"), join_group(grid, rank, "dp")


def assert_part(model: PreTrainedModel, whole: PreTrainedModel, *, rank: int, tp: int) -> None:
    shards = parameter_shards(model)
    ours = dict(model.named_parameters(remove_duplicate=False))
    theirs = dict(whole.named_parameters(remove_duplicate=False))
    assert ours.keys() == theirs.keys()
    for name, weight in theirs.items():
        wanted = shards[name].take(weight, rank=rank, num_ranks=tp) if name in shards else weight
        assert torch.equal(ours[name], wanted), name
    tied = {(a, b) for a in ours for b in ours if theirs[a] is theirs[b]}
    assert tied == {(a, b) for a in ours for b in ours if ours[a] is ours[b]}
    assert {name for name, _ in model.named_buffers()} == {name for name, _ in whole.named_buffers()}
    for name, buffer in whole.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer), name
        assert model.get_buffer(name).dtype == buffer.dtype, name


def assert_shards(variant: Variant, tp: int, folder: Path) -> None:
    """A rank's part is cut from the dense model, whether it is loaded or drawn."""
    name, key_heads, tied = variant
    saved = dense_model(name, key_heads, tied=tied)
    saved.save_pretrained(folder)
    drawn = meta_model(saved.config)
    allocate(drawn, device=CPU)
    initialize_weights(drawn, seed=3)
    for rank in range(tp):
        with rank_of(tp, rank) as (tp_group, dp_group):
            dense = meta_model(saved.config)
            model = sharded_model(saved.config, tp_group)
            load_pretrained(model, folder, group=dp_group, dense=dense)
            assert_part(model, saved, rank=rank, tp=tp)
            initialize_weights(model, seed=3, dense=dense)
            assert_part(model, drawn, rank=rank, tp=tp)
            assert all(weight.is_meta for weight in dense.parameters())


def name_of(variant: Variant) -> str:
    return f"{variant[0]}-{variant[1]}-{'tied' if variant[2] else 'untied'}"


@pytest.mark.parametrize("variant", pairs(2), ids=name_of)
def test_one_rank_of_two_holds_its_shards(variant: Variant, tmp_path: Path) -> None:
    assert_shards(variant, 2, tmp_path)


@pytest.mark.parametrize("variant", pairs(4), ids=name_of)
def test_one_rank_of_four_holds_its_shards(variant: Variant, tmp_path: Path) -> None:
    assert_shards(variant, 4, tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("variant", variants(), ids=name_of)
def test_every_variant_holds_its_shards(variant: Variant, tp: int, tmp_path: Path) -> None:
    assert_shards(variant, tp, tmp_path)
