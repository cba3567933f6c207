"""Shards put together without processes: any layout, one shard at a time, and A and B of an adapter as their base."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_models import ARCHITECTURES, tiny_model

from toolkit.errors import CheckpointError
from toolkit.exporter.adapter import lora_targets
from toolkit.exporter.adapter_shards import adapted_shards
from toolkit.exporter.tensor_parallel_reader import JoinedCheckpoint, join_shards
from toolkit.exporter.zero_reader import StoredTensor
from toolkit.tensor_parallel.apply import dense_shards
from toolkit.tensor_parallel.embedding import vocabulary_layout
from toolkit.tensor_parallel.layout import Layout, Part, Shard
from toolkit.tensor_parallel.tables import tp_plan_for


@dataclass
class Held:
    """What one rank has saved, and what was read of it."""

    values: dict[str, torch.Tensor]
    was_read: list[str] = field(default_factory=list)

    @property
    def tensors(self) -> dict[str, StoredTensor]:
        return {
            name: StoredTensor(shape=tuple(value.shape), dtype=value.dtype, owner=name)
            for name, value in self.values.items()
        }

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        self.was_read.append(name)
        return self.values[name].to(dtype)


def _cut(dense: dict[str, torch.Tensor], shards: dict[str, Shard], num_ranks: int) -> list[Held]:
    def take(name: str, value: torch.Tensor, rank: int) -> torch.Tensor:
        return shards[name].take(value, rank=rank, num_ranks=num_ranks) if name in shards else value

    return [Held({name: take(name, value, rank) for name, value in dense.items()}) for rank in range(num_ranks)]


QUERY, SHARED = Part(num_units=4, unit_size=2), Part(num_units=2, unit_size=2)
LAYOUTS = {
    "plain": (Layout(parts=(QUERY,)), 8),
    "shared heads": (Layout(parts=(SHARED,)), 4),
    "fused": (Layout(parts=(QUERY, SHARED, SHARED)), 16),
    "interleaved": (Layout(parts=(SHARED, Part(num_units=1, unit_size=2)), num_blocks=2), 12),
    "padded": (vocabulary_layout(19, 4), 19),
    "padding alone": (vocabulary_layout(8, 4), 8),
}


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("name", [name for name in LAYOUTS if "padd" not in name])
def test_shards_join_to_what_they_were_cut_from(name: str, dim: int, num_ranks: int) -> None:
    layout, length = LAYOUTS[name]
    _check_joined(Shard(dim=dim, layout=layout, dense_length=length), num_ranks)


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("name", [name for name in LAYOUTS if "padd" in name])
def test_padding_is_cut_off(name: str, dim: int) -> None:
    layout, length = LAYOUTS[name]
    _check_joined(Shard(dim=dim, layout=layout, dense_length=length), 4)


def _check_joined(shard: Shard, num_ranks: int) -> None:
    shape = [3, 3, 3]
    shape[shard.dim] = shard.dense_length
    dense = torch.rand(shape)
    joined = join_shards(lambda rank: shard.take(dense, rank=rank, num_ranks=num_ranks), shard, num_ranks=num_ranks)
    assert torch.equal(joined, dense)


def test_what_several_ranks_hold_comes_from_the_first() -> None:
    shard = Shard(dim=0, layout=LAYOUTS["shared heads"][0], dense_length=4)
    asked: list[int] = []

    def read(rank: int) -> torch.Tensor:
        asked.append(rank)
        return torch.full((2, 1), float(rank))

    assert join_shards(read, shard, num_ranks=4).flatten().tolist() == [0, 0, 2, 2]
    assert asked == [0, 2]
    fused = Shard(dim=0, layout=LAYOUTS["fused"][0], dense_length=16)
    joined = join_shards(lambda rank: torch.full((6, 1), float(rank)), fused, num_ranks=4)
    assert joined.flatten().tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 0, 0, 2, 2, 0, 0, 2, 2]


def test_one_tensor_is_read_when_it_is_asked_for() -> None:
    dense = {"cut": torch.rand(8, 3), "whole": torch.rand(5)}
    shards = {"cut": Shard(dim=0, layout=LAYOUTS["plain"][0], dense_length=8)}
    ranks = _cut(dense, shards, 4)
    joined = JoinedCheckpoint(Path("here"), ranks, shards)
    assert [rank.was_read for rank in ranks] == [[]] * 4
    assert {name: stored.shape for name, stored in joined.tensors.items()} == {"cut": (8, 3), "whole": (5,)}
    assert torch.equal(joined.read("whole", torch.float32), dense["whole"])
    assert [rank.was_read for rank in ranks] == [["whole"], [], [], []]
    assert torch.equal(joined.read("cut", torch.bfloat16), dense["cut"].bfloat16())
    assert [rank.was_read[-1] for rank in ranks] == ["cut"] * 4


def test_ranks_must_hold_the_same_tensors_of_the_model() -> None:
    shard = Shard(dim=0, layout=LAYOUTS["plain"][0], dense_length=8)
    ranks = _cut({"cut": torch.rand(8, 3), "whole": torch.rand(5)}, {"cut": shard}, 2)
    for changed in ({}, {"whole": torch.rand(4)}, {"whole": torch.rand(5), "more": torch.rand(1)}):
        other = Held({"cut": ranks[1].values["cut"], **changed})
        with pytest.raises(CheckpointError) as caught:
            JoinedCheckpoint(Path("here"), [ranks[0], other], {"cut": shard})
        assert caught.value.codes == ("EXPORT_DAMAGED",)
        assert ("more" if "more" in changed else "whole") in str(caught.value)
    for wrong in (Shard(dim=2, layout=shard.layout, dense_length=8), Shard(dim=1, layout=shard.layout, dense_length=8)):
        with pytest.raises(CheckpointError) as caught:
            JoinedCheckpoint(Path("here"), ranks, {"cut": wrong})
        assert caught.value.codes == ("EXPORT_SHAPE",)


WIDE = {"intermediate_size": 32, "moe_intermediate_size": 16}  # enough for four ranks
KNOWN = [name for name in ARCHITECTURES if name != "deepseek_v2"]


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("name", KNOWN)
def test_a_rank_s_factors_give_its_shard_of_what_they_add(name: str, num_ranks: int) -> None:
    model = tiny_model(name, **({} if name == "gpt2" else WIDE))
    base = dense_shards(model, tp_plan_for(model), num_ranks=num_ranks)
    config = LoraConfig(r=3, target_modules="all-linear", init_lora_weights=False, fan_in_fan_out=name == "gpt2")
    _check_factors(get_peft_model(model, config), base, num_ranks)


def test_vocabularies_and_modules_trained_whole_are_cut_as_their_base() -> None:
    model = tiny_model("llama", vocab_size=61)
    base = dense_shards(model, tp_plan_for(model), num_ranks=4)
    config = LoraConfig(r=3, target_modules=["embed_tokens", "lm_head", "o_proj"], init_lora_weights=False)
    _check_factors(get_peft_model(model, config), base, 4)
    model = tiny_model("llama", vocab_size=61)
    adapted = get_peft_model(model, LoraConfig(r=3, target_modules=["q_proj"], modules_to_save=["lm_head", "norm"]))
    shards = adapted_shards(adapted.state_dict(), base, lora_targets(adapted))
    head = "base_model.model.lm_head"
    assert shards[f"{head}.modules_to_save.default.weight"] == shards[f"{head}.original_module.weight"]
    assert shards[f"{head}.original_module.weight"] == base["lm_head.weight"]
    assert not any(".norm." in key for key in shards)
    query = "base_model.model.model.layers.1.self_attn.q_proj"
    assert shards[f"{query}.base_layer.weight"] == base["model.layers.1.self_attn.q_proj.weight"]
    assert f"{query}.lora_A.default.weight" not in shards


def _check_factors(adapted: Any, base: dict[str, Shard], num_ranks: int) -> None:
    state, targets = adapted.state_dict(), lora_targets(adapted)
    shards = adapted_shards(state, base, targets)
    ranks = _cut(state, shards, num_ranks)
    joined = JoinedCheckpoint(Path("here"), ranks, shards)
    assert all(torch.equal(joined.read(name, value.dtype), value) for name, value in state.items())
    factors: dict[str, dict[str, str]] = {}
    for key in state:
        module, _, kind = key.partition(".lora_")
        if kind:
            factors.setdefault(module, {})[kind.removeprefix("embedding_")[0]] = key
    cut = shards.keys() & {key for names in factors.values() for key in names.values()}
    assert len(cut) == len(targets.keys() & base.keys())  # one of two
    for key, target in targets.items():
        of_weight = factors[target.module]
        whole = target.delta(state[of_weight["A"]], state[of_weight["B"]])
        for rank, held in enumerate(ranks):
            own = target.delta(held.values[of_weight["A"]], held.values[of_weight["B"]])
            expected = base[key].take(whole, rank=rank, num_ranks=num_ranks) if key in base else whole
            torch.testing.assert_close(own, expected, msg=key)
