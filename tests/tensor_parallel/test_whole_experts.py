"""Experts that are whole on their ranks: loss, scores and every gradient are the dense model's, also of a rank without tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_distributed
from sharded_models import batch, dense_model
from torch import nn
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, LlamaConfig, MixtralConfig, PreTrainedModel
from transformers.models.mixtral.modeling_mixtral import MixtralExperts, MixtralForCausalLM

from toolkit.errors import PlanError
from toolkit.modeling.checkpointing import apply_gradient_checkpointing
from toolkit.tensor_parallel.apply import apply_tensor_parallel, dense_shards, parameter_shards
from toolkit.tensor_parallel.decoder import find_decoder
from toolkit.tensor_parallel.embedding import gather_scores
from toolkit.tensor_parallel.plan import matching
from toolkit.tensor_parallel.proof import prove_tensor, tensor_proof
from toolkit.tensor_parallel.tables import tp_plan_for
from toolkit.twins.comparison import SMALL, build_twin, make_batch

TOLERANCE = 1e-5
# Written tables, with a router loss (Mixtral) and layers without experts (Qwen3-MoE), whole sequences and pieces of them.
WRITTEN = ("mixtral", "qwen3_moe", "olmoe")
# Derived ones: shared experts and their gate, latent attention, biases and clamped gates, scaled residuals.
VALUES: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 2, "n_routed_experts": 8, "n_group": 1, "topk_group": 1}
}
DERIVED = ("qwen2_moe", "deepseek_v2", "deepseek_v3", "gpt_oss", "granitemoe")


def twin_of(name: str) -> PreTrainedModel:
    config = CONFIG_MAPPING[name](**VALUES.get(name, {}))
    return build_twin(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config)


def errors_of(
    model: PreTrainedModel,
    inputs: dict[str, torch.Tensor],
    group: dist.ProcessGroup,
    *,
    pieces: bool = False,
    recomputes: bool = False,
) -> float:
    """Largest difference of loss, scores and gradients, those of gradients as shares of their largest element."""
    wanted = model(**inputs)
    wanted.loss.backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    model.zero_grad()
    styles = tp_plan_for(model, num_ranks=group.size(), experts="whole")
    foreseen = dense_shards(model, styles, num_ranks=group.size())
    apply_tensor_parallel(model, styles, tp_group=group, sequence_parallel=pieces)
    shards = parameter_shards(model)
    assert shards == foreseen
    assert any(shard.dim == 0 and "experts" in name for name, shard in shards.items())
    if recomputes:
        model.train()
        apply_gradient_checkpointing(model, fraction=1.0, offload_inputs=False)
    found = model(**inputs)
    found.loss.backward()
    scores = gather_scores(found.logits, vocab_size=wanted.logits.shape[-1], tp_group=group)
    worst = max(abs(found.loss.item() - wanted.loss.item()), (scores - wanted.logits).abs().max().item())
    ours = dict(model.named_parameters())
    for name, gradient in gradients.items():
        scale = max(SMALL, gradient.abs().max().item())
        if name in shards:
            gradient = shards[name].take(gradient, rank=group.rank(), num_ranks=group.size())
        own = ours[name].grad
        assert own is not None, name
        worst = max(worst, (own - gradient).abs().max().item() / scale)
    return worst


def choosing_the_first(count: int, implementation: str) -> PreTrainedModel:
    """A model all of whose tokens choose the first one or two experts, which are those of the first rank."""
    model = dense_model("mixtral", output_router_logits=False, num_experts_per_tok=count)
    model.set_experts_implementation(implementation)
    for layer in model.model.layers:
        router = layer.mlp.gate

        def first(module: nn.Module, args: Any, output: Any) -> Any:
            logits, weights, ids = output
            return logits, weights, torch.arange(count).expand_as(ids)

        router.register_forward_hook(first)
    return model


IN_PIECES = (*WRITTEN, "qwen2_moe", "gpt_oss", "granitemoe")
# What a whole expert must go through; the first of each kind by default.
SCENES = (
    *WRITTEN,
    *(f"{name} in pieces" for name in IN_PIECES),
    *DERIVED,
    "olmoe recomputed",
    "no tokens, eager",
    "no tokens, grouped_mm",
    *(f"{name} dispatched" for name in (*WRITTEN, "qwen2_moe")),
    *(f"no tokens, {way}, dispatched" for way in ("eager", "grouped_mm")),
)
BY_DEFAULT = (
    "mixtral",
    "olmoe in pieces",
    "olmoe dispatched",
    "no tokens, eager, dispatched",
    "no tokens, grouped_mm, dispatched",
    "deepseek_v3",
    "gpt_oss",
    "olmoe recomputed",
    "no tokens, eager",
    "no tokens, grouped_mm",
)


def bf16_error(group: dist.ProcessGroup) -> float:
    """Largest difference of bf16 scores from those in fp32, as a share of what bf16 of the dense model differs by; each is bf16."""
    exact, dense, ours = (
        dense_model("mixtral", hidden_size=16).to(dtype) for dtype in (torch.float32, *[torch.bfloat16] * 2)
    )
    styles = tp_plan_for(exact, num_ranks=group.size(), experts="whole")
    model = apply_tensor_parallel(ours, styles, tp_group=group)
    seen: set[torch.dtype] = set()
    for layer in model.model.layers:
        layer.register_forward_hook(lambda module, args, output: seen.add(output.dtype))
    inputs = batch()
    wanted = exact(**inputs).logits
    found = gather_scores(model(**inputs).logits, vocab_size=wanted.shape[-1], tp_group=group)
    assert seen == {torch.bfloat16}
    return ((found - wanted).abs().mean() / (dense(**inputs).logits - wanted).abs().mean()).item()


def scenes(rank: int, chosen: tuple[str, ...]) -> dict[str, float]:
    group = dist.group.WORLD
    assert group is not None
    found = {"bf16": bf16_error(group)}
    for scene in chosen:
        name, _, kind = scene.partition(" ")
        if name == "no":
            way, _, dispatched = kind.removeprefix("tokens, ").partition(", ")
            model = choosing_the_first(1 if dispatched else 2, way)
            found[scene] = errors_of(model, batch(8 if dispatched else 9), group, pieces=bool(dispatched))
        elif name in DERIVED:
            found[scene] = errors_of(twin_of(name), make_batch(), group, pieces=kind == "in pieces")
        else:
            # Tokens go to the ranks of their experts if they choose fewer of these than there are ranks.
            choices = {"num_experts_per_tok": 1} if kind == "dispatched" else {}
            pieces, recomputes = kind in ("in pieces", "dispatched"), kind == "recomputed"
            inputs = batch(8 if pieces else 9)
            model = dense_model(name, 2, **choices)
            found[scene] = errors_of(model, inputs, group, pieces=pieces, recomputes=recomputes)
    return found


@pytest.fixture(scope="module")
def on_ranks() -> list[dict[str, float]]:
    return run_distributed(scenes, 2, BY_DEFAULT, timeout_seconds=200)


@pytest.mark.gloo
@pytest.mark.parametrize("name", BY_DEFAULT)
def test_two_ranks_compute_the_dense_model(on_ranks: list[dict[str, float]], name: str) -> None:
    assert max(found[name] for found in on_ranks) <= TOLERANCE


@pytest.mark.gloo
def test_16_bit_stays_16_bit_and_is_as_close_as_that_of_the_dense_model(on_ranks: list[dict[str, float]]) -> None:
    assert max(found["bf16"] for found in on_ranks) <= 1.5


@pytest.mark.gloo
@pytest.mark.full
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_compute_every_dense_model(num_ranks: int) -> None:
    for found in run_distributed(scenes, num_ranks, SCENES, timeout_seconds=200):
        assert {name: found[name] for name in SCENES if not found[name] <= TOLERANCE} == {}


class SummingExperts(MixtralExperts):
    """Experts whose output has the mean of all tokens in it, of which a rank sees those of its experts alone."""

    def forward(self, hidden_states: torch.Tensor, *routing: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states, *routing) + hidden_states.mean(0)


class Mixing(MixtralForCausalLM):
    def __init__(self, config: MixtralConfig) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp.experts.__class__ = SummingExperts


def test_experts_that_read_other_tokens_fail_their_proof_where_they_are() -> None:
    proof = prove_tensor(Mixing, MixtralConfig(), num_ranks=2, experts="whole")
    assert proof.table == {}
    assert "model.layers.*.mlp.experts: its output differs by" in proof.problem


@pytest.mark.parametrize(
    ("name", "why"),
    [
        pytest.param(
            "longcat_flash",
            "model.layers.*.mlp.experts has experts without weights, which no rank owns",
            marks=pytest.mark.full,
        ),
        ("llama4_text", "its experts are not called with hidden states, chosen experts and a weight for each of these"),
        ("glm4", "it has no stacked experts"),
    ],
)
def test_what_has_no_experts_that_a_rank_can_own_is_refused(name: str, why: str) -> None:
    config = CONFIG_MAPPING[name]()
    kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    assert tensor_proof(kind, config, num_ranks=2).problem == ""
    with torch.device("meta"):
        model = kind._from_config(config)
    with pytest.raises(PlanError, match="experts=whole") as caught:
        tp_plan_for(model, experts="whole")
    assert caught.value.codes == ("TP_EXPERTS",)
    assert why in str(caught.value)


def test_a_dense_model_with_a_written_table_is_refused() -> None:
    with torch.device("meta"):
        model = MODEL_FOR_CAUSAL_LM_MAPPING[LlamaConfig]._from_config(LlamaConfig(num_hidden_layers=1))
    with pytest.raises(PlanError, match=r"LlamaForCausalLM \(model_type=llama\): it has no stacked experts") as caught:
        tp_plan_for(model, experts="whole")
    assert caught.value.codes == ("TP_EXPERTS",)


def test_ranks_must_divide_the_experts() -> None:
    model = dense_model("mixtral", num_local_experts=6, num_attention_heads=4)
    styles = tp_plan_for(model, num_ranks=4, experts="whole")
    with pytest.raises(
        PlanError, match=r"tensor=4 does not divide the 6 experts .* Set tensor to one of 1, 2, 3, 6"
    ) as caught:
        dense_shards(model, styles, num_ranks=4)
    assert caught.value.codes == ("TP_EXPERTS",)


def test_mixtures_route_the_tokens_of_their_own_shard_unless_a_loss_needs_all() -> None:
    def routing(name: str, **overrides: Any) -> frozenset[str]:
        model = dense_model(name, **overrides)
        table = tp_plan_for(model, experts="whole").table
        decoder = find_decoder(model, {name: style for key, style in table.items() for name in matching(model, key)})
        assert not decoder.routing & decoder.whole
        return decoder.routing

    assert routing("olmoe") == {"model.layers.0.mlp", "model.layers.1.mlp"}
    assert routing("qwen3_moe") == {"model.layers.1.mlp"}
    assert routing("mixtral", output_router_logits=True) == frozenset()
