"""A sharded model in training: checkpointing, accumulation, frozen weights, dropout, steps; and what it sends when."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import run_distributed
from sharded_models import batch, dense_model, shard
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from toolkit.groups.fake import fake_world
from toolkit.groups.process_groups import join_group, split_group
from toolkit.tensor_parallel.apply import parameter_shards
from toolkit.topology.grid import Grid

RANKS = 2
TOLERANCE = 1e-5
GPT2_DROPOUT = {"resid_pdrop": 0.2, "embd_pdrop": 0.2, "attn_pdrop": 0.0}


def backward(model: PreTrainedModel) -> float:
    loss = model(**batch()).loss
    loss.backward()
    return float(loss.detach())


def gather_all(
    model: PreTrainedModel, group: dist.ProcessGroup, values: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    shards = parameter_shards(model)
    return {
        name: shards[name].gather(value, tp_group=group) if name in shards else value for name, value in values.items()
    }


def grads_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def difference(ours: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    assert ours.keys() == wanted.keys()
    return max(float((ours[name] - wanted[name]).abs().max() / max(1e-2, wanted[name].abs().max())) for name in wanted)


def both(
    name: str, group: dist.ProcessGroup, run: Callable[[PreTrainedModel], Any], **overrides: Any
) -> tuple[float, Any, Any]:
    """Runs the dense model and this rank's part alike. Gives the largest difference of gradients, and what each run gave."""
    model = dense_model(name, 1 if name == "qwen3" else 4, tied=name == "qwen3", **overrides)
    dense, ours = copy.deepcopy(model), shard(model, group)
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
    }
    model = dense_model("qwen3", 1, tied=True)
    dense, ours = copy.deepcopy(model), shard(model, group)
    losses = [trained(part) for part in (dense, ours)]
    weights = gather_all(ours, group, {name: parameter.detach() for name, parameter in ours.named_parameters()})
    wanted = {name: parameter.detach() for name, parameter in dense.named_parameters()}
    runs["training"] = (difference(weights, wanted), *losses)
    return {"runs": runs, "dropout": dropout_scene(group), "bf16": bf16_scene(group)}


def bf16_scene(group: dist.ProcessGroup) -> tuple[float, float, set[torch.dtype]]:
    """Loss of both in bf16, and the dtypes of the gradients."""
    model = dense_model("llama", 2).to(torch.bfloat16)
    dense, ours = copy.deepcopy(model), shard(model, group)
    return backward(dense), backward(ours), {grad.dtype for grad in grads_of(ours).values()}


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run_distributed(scenes, RANKS)


@pytest.mark.gloo
def test_a_sharded_model_trains_as_the_dense_one(found: list[dict[str, Any]]) -> None:
    for result in found:
        for name, (error, wanted, ours) in result["runs"].items():
            assert ours == pytest.approx(wanted, abs=TOLERANCE), name
            assert error <= (10 * TOLERANCE if name == "training" else TOLERANCE), name
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
def test_in_bf16_the_loss_is_the_dense_one_up_to_rounding(found: list[dict[str, Any]]) -> None:
    for dense, ours, dtypes in (result["bf16"] for result in found):
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


def traced(name: str, key_heads: int, tp: int) -> tuple[Operations, Operations]:
    """What one rank does forward and backward, on tensors without values and a group without other ranks."""
    with fake_world(Grid(tp=tp)), FakeTensorMode(allow_non_fake_inputs=True):
        model = shard(dense_model(name, key_heads), join_group(Grid(tp=tp), 0, "tp"))
        with Operations() as forward:
            loss = model(**batch()).loss
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


def test_a_layer_compiles_as_one_graph() -> None:
    """In a group without other ranks, whose reductions leave a tensor as it is: compiled or not, the numbers are equal."""
    import torch._dynamo

    with fake_world(Grid(tp=2)), torch._dynamo.config.patch(disable=False):
        model = shard(dense_model("qwen3", 1, num_hidden_layers=1), join_group(Grid(tp=2), 0, "tp"))
        eager = backward(model)
        wanted = {parameter: grad.clone() for parameter, grad in grads_of(model).items()}
        model.zero_grad()
        for layer in model.model.layers:
            layer.compile(backend="aot_eager", fullgraph=True)
        assert backward(model) == pytest.approx(eager, abs=TOLERANCE)
        assert difference(grads_of(model), wanted) <= TOLERANCE
