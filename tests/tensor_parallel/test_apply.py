"""A sharded model in training: checkpointing, accumulation, frozen weights, dropout, steps; and what it sends when."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_distributed
from sharded_models import batch, dense_model, shard
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from toolkit.distributed.fake import fake_world
from toolkit.distributed.process_groups import join_group, split_group
from toolkit.errors import PlanError
from toolkit.pipeline_parallel import StageSpec, split_model
from toolkit.tensor_parallel.apply import apply_tensor_parallel, parameter_shards
from toolkit.tensor_parallel.grad_sync import summed_parameters
from toolkit.tensor_parallel.linear import RowParallelLinear
from toolkit.tensor_parallel.plan import (
    Attention,
    ColumnParallel,
    Heads,
    Replicated,
    RowParallel,
    Style,
    TPPlan,
    Vocabulary,
)
from toolkit.tensor_parallel.tables import tp_plan_for
from toolkit.topology.grid import Grid

RANKS = 2
TOLERANCE = 1e-5
LENGTH = 8  # of a sequence, in pieces on 2 and 4 ranks
GPT2_DROPOUT = {"resid_pdrop": 0.2, "embd_pdrop": 0.2, "attn_pdrop": 0.0}


def backward(model: PreTrainedModel) -> float:
    loss = model(**batch(LENGTH)).loss
    loss.backward()
    return float(loss.detach())


def gather_all(model: nn.Module, group: dist.ProcessGroup, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    shards = parameter_shards(model)
    return {
        name: shards[name].gather(value, tp_group=group) if name in shards else value for name, value in values.items()
    }


def grads_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def difference(ours: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    assert ours.keys() == wanted.keys()
    return max(float((ours[name] - wanted[name]).abs().max() / max(1e-2, wanted[name].abs().max())) for name in wanted)


def both(
    name: str,
    group: dist.ProcessGroup,
    run: Callable[[PreTrainedModel], Any],
    *,
    sequence_parallel: bool = False,
    change: Callable[[PreTrainedModel], Any] = lambda ours: None,
    table: Callable[[PreTrainedModel], TPPlan] = tp_plan_for,
    **overrides: Any,
) -> tuple[float, Any, Any]:
    """Runs the dense model and this rank's part alike. Gives the largest difference of gradients, and what each run gave."""
    model = dense_model(name, 1 if name == "qwen3" else 4, tied=name == "qwen3", **overrides)
    dense, styles = copy.deepcopy(model), table(model)
    ours = apply_tensor_parallel(model, styles, tp_group=group, sequence_parallel=sequence_parallel)
    change(ours)
    results = []
    for part in (dense, ours):
        torch.manual_seed(3)
        results.append(run(part))
    return difference(gather_all(ours, group, grads_of(ours)), grads_of(dense)), *results


def accumulate(model: PreTrainedModel) -> float:
    return backward(model) + backward(model)


def frozen(model: PreTrainedModel) -> float:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name or "q_proj" in name)
    return backward(model)


def checkpointed(reentrant: bool) -> Callable[[PreTrainedModel], float]:
    def run(model: PreTrainedModel) -> float:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.train()
        return backward(model)

    return run


def trained(model: PreTrainedModel) -> list[float]:
    """Losses of ten steps of SGD with momentum."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        losses.append(backward(model))
        optimizer.step()
    return losses


def in_training_mode(model: PreTrainedModel) -> float:
    model.train()
    return backward(model)


def dropout_scene(group: dist.ProcessGroup) -> dict[str, Any]:
    """Attention dropout, whose masks differ by rank: the ranks' losses agree, and running a layer again changes nothing."""
    found: dict[str, Any] = {}
    for run in (in_training_mode, checkpointed(True), checkpointed(False)):
        model = shard(dense_model("gpt2", resid_pdrop=0.2, embd_pdrop=0.2, attn_pdrop=0.5), group)
        torch.manual_seed(3)
        found[getattr(run, "__qualname__", "") + str(len(found))] = (
            run(model),
            grads_of(model),
            torch.rand(3).tolist(),
        )
    (loss, grads, after), *others = found.values()
    return {
        "loss": loss,
        "after": after,
        "again": max(abs(loss - other) + difference(other_grads, grads) for other, other_grads, _ in others),
        "norm": grads["transformer.ln_f.weight"].tolist(),
    }


# Architectures that draw between regions by modules and by functions, before and after their sums.
PIECE_DROPOUT: dict[str, dict[str, float]] = {
    "gpt2": {"resid_pdrop": 0.5, "embd_pdrop": 0.2, "attn_pdrop": 0.2},
    "opt": {"dropout": 0.5, "attention_dropout": 0.2},
    "gpt_neox": {"hidden_dropout": 0.5},
}


def piece_dropout_scene(name: str, group: dist.ProcessGroup) -> dict[str, Any]:
    """Dropout on pieces of the sequence: masks of one layer's output that differ by rank, and all that must agree."""
    found = []
    for run in (in_training_mode, checkpointed(True), checkpointed(False), checkpointed_with_hooks):
        model = shard(dense_model(name, **PIECE_DROPOUT[name]), group, sequence_parallel=True)
        masks: list[torch.Tensor] = []
        for module in model.modules():
            if isinstance(module, RowParallelLinear):
                module.register_forward_hook(partial(note_mask, masks))
        torch.manual_seed(3)
        loss = run(model)
        grads = {key.replace(".layer.", "."): grad for key, grad in grads_of(model).items()}
        shards = {key.replace(".layer.", ".") for key in parameter_shards(model)}
        whole = {key: grad for key, grad in grads.items() if key not in shards}
        found.append((loss, grads, torch.rand(3).tolist(), [(mask != 0).flatten().tolist() for mask in masks]))
    (loss, grads, after, masks), *others = found
    return {
        "loss": loss,
        "after": after,
        "again": max(abs(loss - other) + difference(other_grads, grads) for other, other_grads, _, _ in others),
        "whole": {key: grad.tolist() for key, grad in whole.items()},
        "masks": masks,
    }


def checkpointed_with_hooks(model: PreTrainedModel) -> float:
    """Two passes, the second of which counts, with a layer's hooks run again too, as before transformers 5.24."""
    for stack in model.modules():
        if isinstance(stack, nn.ModuleList):
            for name, layer in list(stack.named_children()):
                setattr(stack, name, Rerun(layer))
    before = torch.get_rng_state()
    in_training_mode(model)
    model.zero_grad()
    torch.set_rng_state(before)
    return in_training_mode(model)


class Rerun(nn.Module):
    """Runs a layer again for its gradient, hooks and all."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self.layer, *args, use_reentrant=False, **kwargs)


def note_mask(masks: list[torch.Tensor], module: nn.Module, args: Any, output: torch.Tensor) -> None:
    """Notes the gradient of what will be dropped in part: zero where it is."""
    if output.requires_grad:
        output.register_hook(masks.append)


def nothing(model: PreTrainedModel) -> None:
    pass


def renew_parameters(model: PreTrainedModel) -> None:
    """What moving off the meta device does: parameters without the hooks of the old ones, tied ones still tied."""
    new: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = new.setdefault(parameter, nn.Parameter(parameter.detach().clone()))
    assert summed_parameters(model)


def whole_attention(model: PreTrainedModel) -> TPPlan:
    """A table that leaves attention whole on each rank."""
    styles = tp_plan_for(model)
    table = {name: style for name, style in styles.table.items() if "self_attn" not in name}
    return replace(styles, table={**table, "model.layers.*.self_attn": Replicated(reads_shards=False)})


def copy_inputs(model: PreTrainedModel) -> None:
    """Calls some columns with a copy of what their module gathered, as adapters may."""
    for layer in model.model.layers:
        for column in (layer.self_attn.k_proj, layer.mlp.gate_proj):
            column.register_forward_pre_hook(lambda module, args: (args[0] * 1,))


class Flat(nn.Module):
    """One layer whose modules lie directly under the model."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 4
        self.embed, self.norm = nn.Embedding(20, 8), nn.LayerNorm(8)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        q, k, v = (part.unflatten(-1, (self.num_heads, 2)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        x = x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(self.up(self.norm(x)).relu())


FLAT: dict[str, Style] = {
    "": Attention(query=("num_heads",)),
    "embed": Vocabulary(),
    "norm": Replicated(reads_shards=False),
    "qkv": ColumnParallel(parts=("query", "key_value", "key_value")),
    "out": RowParallel(part="query"),
    "up": ColumnParallel(parts=("width",)),
    "down": RowParallel(part="width"),
}


def flat_scene(group: dist.ProcessGroup) -> tuple[float, float, float]:
    """Difference of gradients, and the loss of the dense model and of the one sharded directly under its root."""
    torch.manual_seed(0)
    dense = Flat()
    ours = apply_tensor_parallel(
        copy.deepcopy(dense), TPPlan(heads=Heads(query=4, key_value=4), table=FLAT), tp_group=group
    )
    ids = torch.randint(20, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    results = []
    for model in (dense, ours):
        loss = model(ids).pow(2).mean()
        loss.backward()
        results.append(float(loss.detach()))
    assert len(parameter_shards(ours)) == 7
    return difference(gather_all(ours, group, grads_of(ours)), grads_of(dense)), *results


def scenes(rank: int) -> dict[str, Any]:
    group = dist.group.WORLD
    alone = split_group(group, RANKS)
    runs: dict[str, tuple[float, Any, Any]] = {
        "reentrant checkpointing": both("qwen3", group, checkpointed(True)),
        "checkpointing": both("qwen3", group, checkpointed(False)),
        "checkpointed experts": both("qwen3_moe", group, checkpointed(False)),
        "accumulation": both("qwen3", group, accumulate),
        "frozen": both("qwen3", group, frozen),
        "dropout outside shards": both("gpt2", group, in_training_mode, **GPT2_DROPOUT),
        "a group of one": both("qwen3", alone, backward),
        "new parameters": both("qwen3", group, backward, change=renew_parameters),
    }
    runs |= {
        f"{name}, in pieces": both(architecture, where, run, sequence_parallel=True, change=change)
        for name, architecture, where, run, change in (
            ("reentrant checkpointing", "qwen3", group, checkpointed(True), nothing),
            ("checkpointing", "qwen3", group, checkpointed(False), nothing),
            ("checkpointed experts", "qwen3_moe", group, checkpointed(False), nothing),
            ("checkpointing without modules", "opt", group, checkpointed(False), nothing),
            ("accumulation", "qwen3", group, accumulate, nothing),
            ("frozen", "qwen3", group, frozen, nothing),
            ("a group of one", "qwen3", alone, backward, nothing),
            ("new parameters", "qwen3", group, backward, renew_parameters),
            ("inputs made of what was gathered", "llama", group, backward, copy_inputs),
        )
    }
    runs["whole attention, in pieces"] = both("llama", group, backward, sequence_parallel=True, table=whole_attention)
    runs["directly under the root"] = flat_scene(group)
    model = dense_model("qwen3", 1, tied=True)
    dense, ours = copy.deepcopy(model), shard(model, group)
    losses = [trained(part) for part in (dense, ours)]
    weights = gather_all(ours, group, {name: parameter.detach() for name, parameter in ours.named_parameters()})
    wanted = {name: parameter.detach() for name, parameter in dense.named_parameters()}
    runs["training"] = (difference(weights, wanted), *losses)
    return {
        "runs": runs,
        "dropout": dropout_scene(group),
        "dropout in pieces": {name: piece_dropout_scene(name, group) for name in PIECE_DROPOUT},
        "bf16": [bf16_scene(group, sequence_parallel=pieces) for pieces in (False, True)],
    }


def bf16_scene(group: dist.ProcessGroup, *, sequence_parallel: bool) -> tuple[float, float, set[torch.dtype]]:
    """Loss of both in bf16, and the dtypes of the gradients."""
    model = dense_model("llama", 2).to(torch.bfloat16)
    dense, ours = copy.deepcopy(model), shard(model, group, sequence_parallel=sequence_parallel)
    return backward(dense), backward(ours), {grad.dtype for grad in grads_of(ours).values()}


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run_distributed(scenes, RANKS)


@pytest.mark.gloo
def test_a_sharded_model_trains_as_the_dense_one(found: list[dict[str, Any]]) -> None:
    for result in found:
        for name, (error, wanted, ours) in result["runs"].items():
            # Of ten optimizer steps the roundings add up, otherwise on each kind of processor.
            tolerance = 10 * TOLERANCE if name == "training" else TOLERANCE
            assert ours == pytest.approx(wanted, abs=tolerance), name
            assert error <= tolerance, name
        losses = result["runs"]["training"][1]
        assert losses[-1] < 0.7 * losses[0]


@pytest.mark.gloo
def test_dropout_on_shards_leaves_the_ranks_in_step(found: list[dict[str, Any]]) -> None:
    first, second = (result["dropout"] for result in found)
    assert first["loss"] == second["loss"]
    assert first["norm"] == second["norm"]
    assert first["after"] == second["after"]
    assert max(first["again"], second["again"]) <= TOLERANCE


@pytest.mark.gloo
@pytest.mark.parametrize("name", PIECE_DROPOUT)
def test_dropout_on_pieces_differs_by_rank_and_leaves_the_ranks_in_step(found: list[dict[str, Any]], name: str) -> None:
    first, second = (result["dropout in pieces"][name] for result in found)
    assert first["loss"] == second["loss"]
    assert first["after"] == second["after"]
    assert first["whole"] == second["whole"]
    assert max(first["again"], second["again"]) <= TOLERANCE
    assert len(first["masks"]) == 4
    masks = [tuple(mask) for result in (first, second) for mask in result["masks"]]
    assert len(set(masks)) == len(masks)
    of_first_layer = [result["masks"][2:] for result in (first, second)]  # the gradient comes to it last
    for mask, other in zip(*of_first_layer, strict=True):
        assert len(mask) == len(other) == 2 * LENGTH // RANKS * 16
        # Half are kept; of the second rank's, less the last token of each sequence, which has no target.
        assert 0.35 < sum(mask) / len(mask) < 0.65
        assert 0.25 < sum(other) / len(other) < 0.5
        assert 0.08 < sum(a and b for a, b in zip(mask, other, strict=True)) / len(mask) < 0.3


@pytest.mark.gloo
def test_in_bf16_the_loss_is_the_dense_one_up_to_rounding(found: list[dict[str, Any]]) -> None:
    for dense, ours, dtypes in (scene for result in found for scene in result["bf16"]):
        assert ours == pytest.approx(dense, rel=0.01)
        assert dtypes == {torch.bfloat16}


class Operations(TorchDispatchMode):
    """Notes collectives and matrix products in the order in which they start."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if name in (
            "mm",
            "addmm_",
            "wait_tensor",
            "all_reduce",
            "all_reduce_",
            "all_gather_into_tensor",
            "reduce_scatter_tensor",
        ):
            self.seen.append(name)
        return function(*args, **(kwargs or {}))

    def reductions(self) -> int:
        return sum(name.startswith("all_reduce") for name in self.seen)


def traced(
    name: str, key_heads: int, tp: int, *, sequence_parallel: bool = False, **overrides: Any
) -> tuple[Operations, Operations]:
    """What one rank does forward and backward, on tensors without values and a group without other ranks."""
    with fake_world(Grid(tp=tp)), FakeTensorMode(allow_non_fake_inputs=True):
        group = join_group(Grid(tp=tp), 0, "tp")
        model = shard(dense_model(name, key_heads, **overrides), group, sequence_parallel=sequence_parallel)
        with Operations() as forward:
            loss = model(**batch(LENGTH)).loss
        with Operations() as backward:
            loss.backward()
    return forward, backward


@pytest.mark.parametrize("name", ["llama", "phi3", "gpt2"])
def test_a_layer_costs_two_reductions_each_way(name: str) -> None:
    forward, backward = traced(name, 4, 2)
    layers, embedding, loss, head = 2, 1, 2, 1
    assert forward.reductions() == 2 * layers + embedding + loss
    assert backward.reductions() == 2 * layers + head
    assert {"all_gather_into_tensor", "reduce_scatter_tensor"}.isdisjoint(forward.seen + backward.seen)


def test_key_heads_on_several_ranks_cost_two_more_reductions_a_layer() -> None:
    _, backward = traced("qwen3", 1, 2)
    keys_and_values, norms = 2, 2
    assert backward.reductions() == (2 + keys_and_values + norms) * 2 + 1


def test_weight_gradients_are_computed_while_the_input_gradient_is_reduced() -> None:
    _, backward = traced("llama", 4, 2)
    seen = backward.seen
    gate_up = seen.index("addmm_")  # the first layer that is reached with two columns
    assert seen[gate_up - 1 : gate_up + 5] == ["mm", "addmm_", "all_reduce_", "mm", "mm", "wait_tensor"]
    attention = seen.index("addmm_", gate_up + 1)
    assert seen[attention - 1 : attention + 7] == [
        "mm",
        "addmm_",
        "addmm_",
        "all_reduce_",
        "mm",
        "mm",
        "mm",
        "wait_tensor",
    ]


def test_in_pieces_a_region_costs_a_gather_and_a_scatter_each_way_and_one_more_gather() -> None:
    forward, backward = traced("llama", 4, 2, sequence_parallel=True)
    regions, embedding, loss, head = 2 * 2, 1, 2, 1
    end, start, norms = 1, 1, 2 * 2 + 1
    assert forward.seen.count("all_gather_into_tensor") == regions + end
    assert forward.seen.count("reduce_scatter_tensor") == regions
    assert forward.reductions() == embedding + loss
    assert backward.seen.count("all_gather_into_tensor") == 2 * regions + start
    assert backward.seen.count("reduce_scatter_tensor") == regions
    assert backward.reductions() == head + norms


def test_in_pieces_products_run_beside_what_is_sent() -> None:
    _, backward = traced("llama", 4, 2, sequence_parallel=True)
    seen = backward.seen
    gate_up = seen.index("addmm_")
    assert seen[gate_up - 2 : gate_up + 6] == [
        "all_gather_into_tensor", "mm", "addmm_", "reduce_scatter_tensor", "wait_tensor", "mm", "mm", "wait_tensor",
    ]  # fmt: skip


def test_frozen_columns_gather_nothing_for_their_weights() -> None:
    with fake_world(Grid(tp=2)), FakeTensorMode(allow_non_fake_inputs=True):
        dense = dense_model("llama", 4)
        for name, parameter in dense.named_parameters():
            parameter.requires_grad_("norm" in name)
        model = shard(dense, join_group(Grid(tp=2), 0, "tp"), sequence_parallel=True)
        loss = model(**batch(LENGTH)).loss
        with Operations() as backward:
            loss.backward()
    assert backward.seen.count("all_gather_into_tensor") == 4  # of the rows' gradients


def kept_for_backward(name: str, *, sequence_parallel: bool) -> list[tuple[int, ...]]:
    """Shapes of what one of four ranks keeps, parameters left out."""
    shapes: list[tuple[int, ...]] = []
    with fake_world(Grid(tp=4)), FakeTensorMode(allow_non_fake_inputs=True):
        model = shard(dense_model(name), join_group(Grid(tp=4), 0, "tp"), sequence_parallel=sequence_parallel)
        parameters = {parameter.untyped_storage()._cdata for parameter in model.parameters()}

        def pack(x: torch.Tensor) -> torch.Tensor:
            if x.untyped_storage()._cdata not in parameters:
                shapes.append(tuple(x.shape))
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            model(**batch(LENGTH))
    return shapes


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt"])
def test_in_pieces_layers_keep_no_whole_hidden_states(name: str) -> None:
    width = dense_model(name).config.hidden_size
    kept = [kept_for_backward(name, sequence_parallel=pieces) for pieces in (False, True)]
    whole = [sum(shape in ((2, LENGTH, width), (2 * LENGTH, width)) for shape in shapes) for shapes in kept]
    assert whole[1] <= 2 < 6 <= whole[0]  # at the ends: the input of the head, and of OPT's projection before it
    assert sum(map(math.prod, kept[1])) < 0.8 * sum(map(math.prod, kept[0]))


def test_a_model_is_sharded_once_and_before_it_is_cut() -> None:
    with fake_world(Grid(tp=2)):
        group = join_group(Grid(tp=2), 0, "tp")
        model = shard(dense_model("llama"), group)
        with pytest.raises(ValueError, match="already sharded"):
            shard(model, group)
        stage = dense_model("llama")
        split_model(stage, StageSpec(chunks=(range(1),), num_layers=stage.config.num_hidden_layers))
        with pytest.raises(ValueError, match="shard before splitting: apply_tensor_parallel, then split_model"):
            shard(stage, group)


def test_a_sequence_that_the_ranks_cannot_share_is_refused_with_its_numbers() -> None:
    with fake_world(Grid(tp=2)):
        model = shard(dense_model("llama"), join_group(Grid(tp=2), 0, "tp"), sequence_parallel=True)
        with pytest.raises(PlanError) as caught:
            model(**batch(9))
    assert caught.value.codes == ("TP_SEQUENCE",)
    assert "tensor=2 does not divide a sequence of 9 tokens" in str(caught.value)


@pytest.mark.parametrize("sequence_parallel", [pytest.param(False, marks=pytest.mark.full), True])
def test_a_layer_compiles_as_one_graph(sequence_parallel: bool) -> None:
    """In a group without other ranks, whose reductions leave a tensor as it is: compiled or not, the numbers are equal."""
    import torch._dynamo

    with fake_world(Grid(tp=2)), torch._dynamo.config.patch(disable=False):
        group = join_group(Grid(tp=2), 0, "tp")
        model = shard(dense_model("qwen3", 1, num_hidden_layers=1), group, sequence_parallel=sequence_parallel)
        eager = backward(model)
        wanted = {parameter: grad.clone() for parameter, grad in grads_of(model).items()}
        model.zero_grad()
        for layer in model.model.layers:
            layer.compile(backend="aot_eager", fullgraph=True)
        assert backward(model) == pytest.approx(eager, abs=TOLERANCE)
        assert difference(grads_of(model), wanted) <= TOLERANCE
