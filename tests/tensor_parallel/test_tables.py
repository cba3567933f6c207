"""Every architecture, Llama with 1, 2 and all key heads, tied and untied: loss, scores and every gradient are the dense model's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_distributed
from sharded_models import (
    DIFFER,
    DIFFER_OVER_FOUR,
    VOCABULARY,
    Variant,
    batch,
    by_default,
    dense_model,
    first_of_each,
    pairs,
    shard,
    variants,
)

from toolkit.distributed.fake import fake_world
from toolkit.distributed.process_groups import join_group
from toolkit.tensor_parallel.apply import dense_shards, parameter_shards
from toolkit.tensor_parallel.embedding import gather_scores
from toolkit.tensor_parallel.tables import DERIVED, tp_plan_for
from toolkit.topology.grid import Grid

TOLERANCE = 1e-5
# Elements of a gradient below which all of it may be rounding: that of a bias of keys is, since it changes nothing.
SMALL = 1e-2


def errors_of(variant: Variant, group: dist.ProcessGroup, *, sequence_parallel: bool = False) -> dict[str, float]:
    """Largest differences from the dense model, those of gradients as shares of their largest element."""
    name, key_heads, tied = variant
    model = dense_model(name, key_heads, tied=tied)
    wanted = model(**batch(8 if sequence_parallel else 9))
    wanted.loss.backward()
    dense = {
        name: (weight.detach().clone(), weight.grad) for name, weight in model.named_parameters(remove_duplicate=False)
    }
    model.zero_grad()
    found = shard(model, group, sequence_parallel=sequence_parallel)(**batch(8 if sequence_parallel else 9))
    found.loss.backward()
    scores = gather_scores(found.logits, vocab_size=VOCABULARY, tp_group=group)
    errors = {
        "loss": abs(found.loss.item() - wanted.loss.item()),
        "scores": (scores - wanted.logits).abs().max().item(),
    }
    shards = parameter_shards(model)
    assert shards.keys() <= dense.keys()
    ours = dict(model.named_parameters(remove_duplicate=False))
    assert ours.keys() == dense.keys()
    assert (len(ours) > len(list(model.parameters()))) == tied
    for name, (weight, gradient) in dense.items():
        scale = max(SMALL, gradient.abs().max().item())
        if name in shards:  # the ranks' slices are all of it: test_tp_layout
            weight, gradient = (
                shards[name].take(x, rank=group.rank(), num_ranks=group.size()) for x in (weight, gradient)
            )
        assert torch.equal(ours[name], weight), name
        assert ours[name].grad.shape == gradient.shape, name
        errors[name] = (ours[name].grad - gradient).abs().max().item() / scale
    return errors


def scenes(rank: int, chosen: list[Variant], pieces: list[Variant]) -> dict[Any, dict[str, float]]:
    """Errors by variant, and by variant and "pieces" those with sequence parallelism."""
    group = dist.group.WORLD
    found: dict[Any, dict[str, float]] = {variant: errors_of(variant, group) for variant in chosen}
    for variant in pieces:
        found[variant, "pieces"] = errors_of(variant, group, sequence_parallel=True)
    return found


def in_pieces(num_ranks: int) -> list[Variant]:
    """One variant of each architecture that differs."""
    differ = DIFFER if num_ranks == 2 else DIFFER_OVER_FOUR
    return first_of_each([variant for variant in pairs(num_ranks) if variant[0] in differ])


def assert_exact(found: list[dict[Any, Any]], variant: Any) -> None:
    for result in found:
        assert {name: error for name, error in result[variant].items() if not error <= TOLERANCE} == {}


def name_of(variant: Variant) -> str:
    return f"{variant[0]}-{variant[1]}-{'tied' if variant[2] else 'untied'}"


@pytest.fixture(scope="module")
def over_two() -> list[dict[Variant, Any]]:
    return run_distributed(scenes, 2, by_default(2), in_pieces(2), timeout_seconds=200)


@pytest.fixture(scope="module")
def over_four() -> list[dict[Variant, Any]]:
    return run_distributed(scenes, 4, by_default(4), in_pieces(4), timeout_seconds=200)


@pytest.mark.gloo
@pytest.mark.parametrize("variant", by_default(2), ids=name_of)
def test_a_model_on_two_ranks_is_the_dense_one(over_two: list[dict[Variant, Any]], variant: Variant) -> None:
    assert_exact(over_two, variant)


@pytest.mark.gloo
@pytest.mark.parametrize("variant", by_default(4), ids=name_of)
def test_a_model_on_four_ranks_is_the_dense_one(over_four: list[dict[Variant, Any]], variant: Variant) -> None:
    assert_exact(over_four, variant)


@pytest.mark.gloo
@pytest.mark.parametrize("variant", in_pieces(2), ids=name_of)
def test_in_pieces_of_the_sequence_on_two_ranks_it_is_the_dense_one(
    over_two: list[dict[Variant, Any]], variant: Variant
) -> None:
    assert_exact(over_two, (variant, "pieces"))


@pytest.mark.gloo
@pytest.mark.parametrize("variant", in_pieces(4), ids=name_of)
def test_in_pieces_of_the_sequence_on_four_ranks_it_is_the_dense_one(
    over_four: list[dict[Variant, Any]], variant: Variant
) -> None:
    assert_exact(over_four, (variant, "pieces"))


@pytest.mark.gloo
@pytest.mark.full
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_every_variant_is_the_dense_one(num_ranks: int) -> None:
    pieces = first_of_each(pairs(num_ranks))
    found = run_distributed(scenes, num_ranks, variants(), pieces, timeout_seconds=600)
    for variant in (*variants(), *((variant, "pieces") for variant in pieces)):
        assert_exact(found, variant)


@pytest.mark.parametrize(
    ("num_ranks", "chosen"),
    [
        (2, by_default(2)),
        (4, by_default(4)),
        *(pytest.param(ranks, pairs(ranks), marks=pytest.mark.full) for ranks in (2, 4)),
    ],
    ids=["2", "4", "2-all", "4-all"],
)
def test_what_would_be_cut_is_what_is_cut(num_ranks: int, chosen: list[Variant]) -> None:
    grid = Grid(tp=num_ranks)
    with fake_world(grid, rank=1), torch.device("meta"):
        group = join_group(grid, 1, "tp")
        for name, key_heads, tied in chosen:
            model = dense_model(name, key_heads, tied=tied)
            names = dict(model.named_parameters())
            foreseen = dense_shards(model, tp_plan_for(model), num_ranks=num_ranks)
            assert dict(model.named_parameters()) == names
            assert foreseen == parameter_shards(shard(model, group)), name
            assert foreseen


def test_every_architecture_that_is_said_to_be_right_is_tried() -> None:
    assert set(DERIVED) <= {name for name, _, _ in variants()}
    assert {name for name, _, _ in by_default(2)} == {name for name, _, _ in variants()}
    for name, key_heads, tied in variants():
        if name == "llama":
            assert any((name, key_heads, tied) in by_default(num_ranks) for num_ranks in (2, 4))
    assert {name for name, _, _ in by_default(4)} == {*DIFFER_OVER_FOUR}
