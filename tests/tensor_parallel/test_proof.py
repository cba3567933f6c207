"""A derived table is what real ranks compute too, and a table that is wrong is found out where it is wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_distributed
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from toolkit.errors import PlanError
from toolkit.tensor_parallel.apply import apply_tensor_parallel, dense_shards, parameter_shards
from toolkit.tensor_parallel.embedding import gather_scores
from toolkit.tensor_parallel.linear import ShardedLinear
from toolkit.tensor_parallel.plan import matching
from toolkit.tensor_parallel.proof import LEAST_SHARDED, TensorProof, prove_tensor, sequence_proof, tensor_proof
from toolkit.tensor_parallel.tables import tp_plan_for
from toolkit.twins.comparison import SMALL, build_twin, copy_of, make_batch, plain_torch, run

# One architecture of each kind: latent attention, sinks and transposed experts, linear attention beside full, norms of each
# head, experts without weights, biases, norms inside the feed-forward layer, parameters of its activation.
KINDS = ("deepseek_v3", "gpt_oss", "qwen3_next", "cohere", "longcat_flash", "llama4_text", "bitnet", "apertus", "glm4")
VALUES: dict[str, dict[str, Any]] = {"cohere": {"use_qk_norm": True}}


def config_of(model_type: str) -> tuple[type[PreTrainedModel], PreTrainedConfig]:
    config = CONFIG_MAPPING[model_type](**VALUES.get(model_type, {}))
    return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config


def errors_on_ranks(rank: int, names: tuple[str, ...]) -> dict[str, float]:
    """Largest difference of loss, scores and gradients of each twin over real ranks."""
    group = dist.group.WORLD
    assert group is not None
    found = {}
    for name in names:
        kind, config = config_of(name)
        with plain_torch():
            twin, batch = build_twin(kind, config), make_batch()
            wanted = run(copy_of(twin), batch)
            styles = tp_plan_for(twin, num_ranks=group.size())
            foreseen = dense_shards(twin, styles, num_ranks=group.size())
            model = apply_tensor_parallel(copy_of(twin), styles, tp_group=group)
            assert parameter_shards(model) == foreseen, name
            ours = run(model, batch)
            scores = ours.logits
            assert scores is not None
            assert wanted.logits is not None
            if isinstance(model.get_output_embeddings(), ShardedLinear):
                scores = gather_scores(scores, vocab_size=wanted.logits.shape[-1], tp_group=group)
            worst = max(abs(ours.loss - wanted.loss), (scores - wanted.logits).abs().max().item())
            shards = parameter_shards(model)
            for key, gradient in wanted.gradients.items():
                scale = max(SMALL, gradient.abs().max().item())
                if key in shards:
                    gradient = shards[key].take(gradient, rank=rank, num_ranks=group.size())
                worst = max(worst, (ours.gradients[key] - gradient).abs().max().item() / scale)
            found[name] = worst if shards else float("inf")
    return found


@pytest.fixture(scope="module")
def on_ranks() -> list[dict[str, float]]:
    return run_distributed(errors_on_ranks, 2, KINDS)


@pytest.mark.gloo
@pytest.mark.parametrize("name", KINDS)
def test_real_ranks_compute_what_was_proven(on_ranks: list[dict[str, float]], name: str) -> None:
    assert max(found[name] for found in on_ranks) <= 2e-5


@pytest.mark.parametrize("name", KINDS)
def test_most_of_each_kind_is_shared(name: str) -> None:
    kind, config = config_of(name)
    proof = tensor_proof(kind, config, num_ranks=4)
    assert (proof.problem, proof.whole) == ("", ())
    assert proof.sharded > (0.85 if name == "qwen3_next" else 0.95)


class CentredMLP(nn.Module):
    """A feed-forward layer that subtracts the mean of its inner features, which no rank knows."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.up_proj(x).relu()
        return self.down_proj(inner - inner.mean(-1, keepdim=True))


class Centred(LlamaForCausalLM):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = CentredMLP(config)


def test_a_module_whose_shards_are_not_it_stays_whole() -> None:
    proof = prove_tensor(Centred, LlamaConfig(), num_ranks=2)
    assert proof.problem == ""
    [(name, reason)] = proof.whole
    assert name == "model.layers.*.mlp"
    assert "its output differs by" in reason
    assert not any(".mlp." in pattern for pattern in proof.table)
    assert "model.layers.*.self_attn.q_proj" in proof.table


class _Doubled(torch.autograd.Function):
    """Returns its input, whose gradient is its square's: right forward, and wrong in shards backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        [x] = ctx.saved_tensors
        return grads[0] * x.abs().mean()


class WrongBackward(LlamaForCausalLM):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp.act_fn = _Act()


class _Act(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Doubled.apply(x)


def test_gradients_are_compared_too() -> None:
    proof = prove_tensor(WrongBackward, LlamaConfig(), num_ranks=2)
    [(name, reason)] = proof.whole
    assert name == "model.layers.*.mlp"
    assert "the gradient of model.layers." in reason


class Whole(LlamaForCausalLM):
    """Whose layers are of a kind that is not known."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = CentredMLP(config)
            layer.self_attn.forward = lambda hidden_states, **_: (hidden_states, None)


def test_a_model_of_which_nothing_can_be_shared_is_refused_with_the_place() -> None:
    proof = prove_tensor(Whole, LlamaConfig(), num_ranks=2)
    assert proof.table == {}
    assert "only 0% of its parameters outside the vocabulary can be shared by ranks" in proof.problem
    assert "model.layers.*.mlp: its output differs by" in proof.problem
    with torch.device("meta"):
        model = Whole(LlamaConfig(num_hidden_layers=2))
    model.config.model_type = "own"
    with pytest.raises(
        PlanError, match=r"could not be proven on a small twin: only 0% .*model\.layers\.\*\.mlp"
    ) as caught:
        tp_plan_for(model)
    assert caught.value.codes == ("TP_ARCHITECTURE",)


def test_a_model_with_modules_that_its_twin_lacks_is_refused() -> None:
    kind, config = config_of("glm4")
    with torch.device("meta"):
        model = kind._from_config(config)
    tp_plan_for(model)
    model.model.layers[3].mlp.gate_up_proj = nn.Sequential(nn.Identity())
    with pytest.raises(PlanError, match=r"its twin has no model\.layers\.\*\.mlp\.gate_up_proj\.\*, a Identity"):
        tp_plan_for(model)


def test_a_table_is_of_the_model_that_it_is_for() -> None:
    kind, config = config_of("gpt_oss")
    with torch.device("meta"):
        model = kind._from_config(config)
    styles = tp_plan_for(model, num_ranks=4)
    assert (styles.heads.query, styles.heads.key_value) == (64, 8)
    assert all(matching(model, name) for name in styles.table)


def test_sequence_parallelism_has_a_proof_of_its_own() -> None:
    kind, config = config_of("glm4")
    proof: TensorProof = tensor_proof(kind, config, num_ranks=2)
    assert sequence_proof(kind, config, proof.table, num_ranks=2) == ""
    kind, config = config_of("deepseek_v3")
    proof = tensor_proof(kind, config, num_ranks=2)
    assert sequence_proof(kind, config, proof.table, num_ranks=2) != ""
    assert proof.sharded > LEAST_SHARDED


def test_derived_fused_weights_are_not_shared_by_more_ranks_than_key_heads() -> None:
    kind, config = config_of("gpt_bigcode")
    with torch.device("meta"):
        model = kind._from_config(config)
    with pytest.raises(
        PlanError, match=r"tensor=2 does not divide num_key_value_heads=1: GPTBigCodeForCausalLM keeps"
    ) as caught:
        tp_plan_for(model)
    assert caught.value.codes == ("TP_HEADS",)
