"""Tables of styles: written here, taken from transformers' own tensor-parallel plan, or derived from the model and proven on a twin.

Tests hold the tables of this module to the dense model over two and four ranks, so that they need no proof of their own before a run.
Plans of transformers replicate what they cannot shard (Phi-3's fused layers) and leave out the vocabulary; for the
architectures of `DERIVED` they contain everything else that is needed. The others here are overrides: of layers whose names say
nothing (GPT-2, GPT-NeoX, OPT, Falcon), of fused weights (Phi-3), and of norms over all heads (OLMo 2, OLMoE), which plans of
transformers compute whole on each rank. Every other architecture has what `toolkit.tensor_parallel.derive` finds in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from toolkit.config.job import ExpertSharding
from toolkit.errors import PlanError
from toolkit.tensor_parallel.derive import heads_of
from toolkit.tensor_parallel.linear import is_linear
from toolkit.tensor_parallel.plan import (
    Attention,
    ColumnParallel,
    Experts,
    FeatureNorm,
    Heads,
    Replicated,
    RowParallel,
    Style,
    TPPlan,
    Vocabulary,
    has_whole_experts,
    matching,
    pattern_of,
    with_whole_experts,
)
from toolkit.tensor_parallel.proof import NO_EXPERTS, sequence_proof, tensor_proof
from toolkit.twins.comparison import module_kinds

QUERY = ColumnParallel(parts=("query",))
KEY_VALUE = ColumnParallel(parts=("key_value",))
FUSED_QKV = ColumnParallel(parts=("query", "key_value", "key_value"))
INTERLEAVED_QKV = ColumnParallel(parts=("query", "key_value", "key_value"), interleaved=True)
WIDTH = ColumnParallel(parts=("width",))
FUSED_GATE_UP = ColumnParallel(parts=("width", "width"))
ATTENTION_ROW = RowParallel(part="query")
WIDTH_ROW = RowParallel(part="width")

# Architectures whose plan in transformers is followed, each tested against its dense model.
DERIVED = (
    "gemma", "gemma2", "gemma3_text", "granite", "llama", "mistral", "mixtral", "olmo", "phi", "qwen2", "qwen3", "qwen3_moe",
    "smollm3", "starcoder2",
)  # fmt: skip

_GPT2: Mapping[str, Style] = {
    "transformer.h.*.attn": Attention(query=("num_heads", "split_size")),
    "transformer.h.*.attn.c_attn": FUSED_QKV,
    "transformer.h.*.attn.c_proj": ATTENTION_ROW,
    "transformer.h.*.mlp.c_fc": WIDTH,
    "transformer.h.*.mlp.c_proj": WIDTH_ROW,
}
_GPT_NEOX: Mapping[str, Style] = {
    "gpt_neox.layers.*.attention.query_key_value": INTERLEAVED_QKV,
    "gpt_neox.layers.*.attention.dense": ATTENTION_ROW,
    "gpt_neox.layers.*.mlp.dense_h_to_4h": WIDTH,
    "gpt_neox.layers.*.mlp.dense_4h_to_h": WIDTH_ROW,
}
_OPT: Mapping[str, Style] = {
    "model.decoder.layers.*.self_attn": Attention(query=("num_heads",)),
    "model.decoder.layers.*.self_attn.q_proj": QUERY,
    "model.decoder.layers.*.self_attn.k_proj": KEY_VALUE,
    "model.decoder.layers.*.self_attn.v_proj": KEY_VALUE,
    "model.decoder.layers.*.self_attn.out_proj": ATTENTION_ROW,
    "model.decoder.layers.*.fc1": WIDTH,
    "model.decoder.layers.*.fc2": WIDTH_ROW,
    "model.decoder.layers.*.self_attn_layer_norm": Replicated(reads_shards=False),
    "model.decoder.layers.*.final_layer_norm": Replicated(reads_shards=False),
}
_PHI3: Mapping[str, Style] = {
    "model.layers.*.self_attn": Attention(
        key_value=("num_key_value_heads",), ratio=("num_key_value_groups",), reads_config=True
    ),
    "model.layers.*.self_attn.qkv_proj": FUSED_QKV,
    "model.layers.*.self_attn.o_proj": ATTENTION_ROW,
    "model.layers.*.mlp.gate_up_proj": FUSED_GATE_UP,
    "model.layers.*.mlp.down_proj": WIDTH_ROW,
}


# Norms over all heads, for which the plan of transformers computes the whole attention on each rank.
def _normed_attention(*, rounds_before_weight: bool) -> Mapping[str, Style]:
    return {
        "model.layers.*.self_attn": Attention(ratio=("num_key_value_groups",)),
        "model.layers.*.self_attn.q_proj": QUERY,
        "model.layers.*.self_attn.k_proj": KEY_VALUE,
        "model.layers.*.self_attn.v_proj": KEY_VALUE,
        "model.layers.*.self_attn.o_proj": ATTENTION_ROW,
        "model.layers.*.self_attn.q_norm": FeatureNorm(part="query", rounds_before_weight=rounds_before_weight),
        "model.layers.*.self_attn.k_norm": FeatureNorm(part="key_value", rounds_before_weight=rounds_before_weight),
    }


_OLMO2: Mapping[str, Style] = {
    **_normed_attention(rounds_before_weight=False),
    "model.layers.*.mlp.gate_proj": WIDTH,
    "model.layers.*.mlp.up_proj": WIDTH,
    "model.layers.*.mlp.down_proj": WIDTH_ROW,
}
_OLMOE: Mapping[str, Style] = {
    **_normed_attention(rounds_before_weight=True),
    "model.layers.*.mlp.experts": Experts(),
}


def _falcon(*, interleaved: bool) -> Mapping[str, Style]:
    return {
        "transformer.h.*.self_attention": Attention(query=("num_heads",), key_value=("num_kv_heads",)),
        "transformer.h.*.self_attention.query_key_value": INTERLEAVED_QKV if interleaved else FUSED_QKV,
        "transformer.h.*.self_attention.dense": ATTENTION_ROW,
        "transformer.h.*.mlp.dense_h_to_4h": WIDTH,
        "transformer.h.*.mlp.dense_4h_to_h": WIDTH_ROW,
    }  # fmt: skip


# Names of layers in transformers' plans, by their role.
_COLUMNS: Mapping[str, ColumnParallel] = {
    "q_proj": QUERY, "k_proj": KEY_VALUE, "v_proj": KEY_VALUE, "gate_proj": WIDTH, "up_proj": WIDTH, "fc1": WIDTH, "c_fc": WIDTH,
}  # fmt: skip
_ROWS: Mapping[str, RowParallel] = {
    "o_proj": ATTENTION_ROW, "dense": ATTENTION_ROW, "down_proj": WIDTH_ROW, "fc2": WIDTH_ROW, "c_proj": WIDTH_ROW,
}  # fmt: skip


def tp_plan_for(
    model: PreTrainedModel,
    *,
    num_ranks: int = 2,
    sequence_parallel: bool = False,
    experts: ExpertSharding = "sliced",
) -> TPPlan:
    """Return the table of styles of a model of transformers.

    An architecture without a table of its own gets one that is derived from its modules and proven on a small twin, which takes
    about a second and is kept for later runs.

    Args:
        model: Dense model on any device, meta included.
        num_ranks: Tensor ranks that will share it, by which the proof shares heads.
        sequence_parallel: Whether they will also share the sequence, which is proven as well.
        experts: Whether they share each of a mixture's experts, or have some of them whole.

    Raises:
        PlanError: TP_HEADS if ranks would replicate a part of derived, fused weights; TP_EXPERTS if only the experts cannot be whole; TP_ARCHITECTURE if no table of it stands its proof, with the module where twin and shards part ways; the
            message shows what to write for it. TP_SEQUENCE_ARCHITECTURE if only the sequence cannot be shared.
    """
    layers = _layers(model)
    if layers is not None:
        if experts == "whole":
            layers = with_whole_experts(layers)
            if not has_whole_experts(layers):
                raise _no_experts(model, NO_EXPERTS)
        return TPPlan(heads=_heads(model.config), table={**dict.fromkeys(_vocabulary(model), Vocabulary()), **layers})
    kind: Any = type(model)
    proof = tensor_proof(kind, model.config, num_ranks=num_ranks, experts=experts)
    if proof.problem:
        if experts == "whole" and not tensor_proof(kind, model.config, num_ranks=num_ranks).problem:
            raise _no_experts(model, proof.problem)
        raise _unknown(model, proof.problem)
    if unlike := sorted({*module_kinds(model)} - {*proof.kinds}):
        raise _unknown(model, f"its twin has no {unlike[0].replace(':', ', a ')}")
    if sequence_parallel and (why := sequence_proof(kind, model.config, proof.table, num_ranks=num_ranks)):
        raise PlanError.of(
            code="TP_SEQUENCE_ARCHITECTURE",
            key="parallel.sequence_parallel",
            message=f"sequence parallelism of {kind.__name__} is not possible: {why}",
            fix="Set parallel.sequence_parallel to false; in your own script, leave sequence_parallel out",
        )
    styles = TPPlan(
        heads=heads_of(model.config),
        table={name: style for name, style in proof.table.items() if matching(model, name)},
    )
    if is_fused(styles) and styles.heads.key_value % num_ranks:
        raise PlanError.of(
            code="TP_HEADS",
            key="parallel.tensor",
            message=f"tensor={num_ranks} does not divide num_key_value_heads={styles.heads.key_value}: {kind.__name__} keeps queries, "
            "keys and values in one matrix, part of which ranks would replicate, and DeepSpeed's gradient norm counts a parameter as "
            "wholly sharded or wholly replicated",
            fix="Set parallel.tensor to a divisor of num_key_value_heads, or to 1",
        )
    return styles


def _no_experts(model: PreTrainedModel, why: str) -> PlanError:
    return PlanError.of(
        code="TP_EXPERTS",
        key="parallel.experts",
        message=f"experts=whole: experts of {type(model).__name__} (model_type={model.config.model_type}) that are whole on their ranks "
        f"could not be proven on a small twin: {why}"
        if why != NO_EXPERTS
        else f"experts=whole with {type(model).__name__} "
        f"(model_type={model.config.model_type}): {why}, which ranks could share out",
        fix="Set parallel.experts to sliced",
    )


def is_fused(styles: TPPlan) -> bool:
    """Return whether queries, keys and values are one matrix."""
    columns = [style for style in styles.table.values() if isinstance(style, ColumnParallel)]
    return any({"query", "key_value"} <= {*style.parts} for style in columns)


def has_table(config: Any) -> bool:
    """Return whether the styles of a configuration's model are written here or in transformers, and held by tests."""
    match config.model_type:
        case "gpt2":
            return not config.add_cross_attention
        case "falcon":  # ALiBi biases are computed for all heads, outside the layers
            return not config.alibi
    return config.model_type in (*DERIVED, "gpt_neox", "olmo2", "olmo3", "olmoe", "opt", "phi3")


def _layers(model: PreTrainedModel) -> Mapping[str, Style] | None:
    """Return the styles of all modules but the vocabulary; None if they are not known."""
    config = model.config
    if not has_table(config):
        return None
    match config.model_type:
        case "gpt2":
            return _GPT2
        case "gpt_neox":
            return _GPT_NEOX
        case "olmo2" | "olmo3":
            return _OLMO2
        case "olmoe":
            return _OLMOE
        case "opt":
            return _OPT
        case "phi3":
            return _PHI3
        case "falcon":
            return _falcon(interleaved=config.new_decoder_architecture or not config.multi_query)
    return _derived(model)


def _derived(model: PreTrainedModel) -> Mapping[str, Style] | None:
    """Translate `base_model_tp_plan`, without entries that match no module; None if it has an unknown style."""
    plan: Mapping[str, str] = model.config.base_model_tp_plan or {}
    table: dict[str, Style] = {}
    experts = [name for name, style in plan.items() if style == "moe_tp_experts"]
    for name, style in plan.items():
        parent, _, leaf = name.rpartition(".")
        if parent in experts or style == "embedding_rowwise":
            continue
        translated = _translated(leaf, style)
        if translated is None:
            return None
        table[f"{model.base_model_prefix}.{name}"] = translated
        if leaf == "q_proj":
            table[f"{model.base_model_prefix}.{parent}"] = Attention(ratio=("num_key_value_groups",))
    return {name: style for name, style in table.items() if matching(model, name)}


def _translated(leaf: str, style: str) -> Style | None:
    match style:
        case "colwise":
            return _COLUMNS.get(leaf)
        case "rowwise":
            return _ROWS.get(leaf)
        case "replicated_with_grad_allreduce":
            return Replicated(reads_shards=True)
        case "moe_tp_experts":
            return Experts()
    return None


def _heads(config: Any) -> Heads:
    """Return the numbers of heads in a configuration, by the key names of its architecture."""
    query = config.num_attention_heads
    match config.model_type:
        case "gpt2" | "gpt_neox" | "opt":
            key_value = query
        case "falcon":
            key_value = 1 if config.multi_query and not config.new_decoder_architecture else config.num_kv_heads
        case _:
            key_value = config.num_key_value_heads
    return Heads(query=query, key_value=key_value)


def _vocabulary(model: PreTrainedModel) -> list[str]:
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    return [name for name, module in model.named_modules() if any(module is end for end in ends)]


def _unknown(model: PreTrainedModel, why: str) -> PlanError:
    """Return the error with a table to complete: the plan of transformers if there is one, else each linear layer."""
    known = {**dict.fromkeys(_vocabulary(model), Vocabulary()), **(_derived(model) or {})}
    lines = [f'"{name}": {style},' for name, style in known.items()]
    others = {pattern_of(name): module for name, module in model.named_modules() if is_linear(module)}
    lines += [f'"{name}": …,  # {_shape(module)}' for name, module in others.items() if name not in known]
    return PlanError.of(
        code="TP_ARCHITECTURE",
        key="parallel.tensor",
        message=f"tensor parallelism of {type(model).__name__} (model_type={model.config.model_type}) could not be "
        f"proven on a small twin: {why}",
        fix="Set parallel.tensor to 1, or call apply_tensor_parallel with your own plan, whose … are ColumnParallel, "
        "RowParallel or "
        "Replicated: TPPlan(heads=Heads(query=…, key_value=…), table={\n    " + "\n    ".join(lines) + "\n})",
    )


def _shape(module: nn.Module) -> str:
    return f"{type(module).__name__}, weight of {' × '.join(map(str, module.get_parameter('weight').shape))}"
