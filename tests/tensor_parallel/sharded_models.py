"""Tiny models whose heads, vocabulary and ties are chosen by a test, dense and sharded."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from toolkit.config.job import ExpertSharding
from toolkit.tensor_parallel.apply import apply_tensor_parallel
from toolkit.tensor_parallel.tables import tp_plan_for

HEADS, HEAD_SIZE, VOCABULARY = 4, 4, 61
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 12,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 32,
    "pad_token_id": 7,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_HEAD = {"head_dim": HEAD_SIZE, "hidden_size": 12}
_PLAIN = {"hidden_size": HEADS * HEAD_SIZE}  # architectures whose heads fill the width
# By architecture: overrides, and how it names its number of key heads (None where it has as many as query heads).
MODELS: dict[str, tuple[dict[str, Any], str | None]] = {
    "falcon": ({**_PLAIN, "new_decoder_architecture": True, "bias": True, "parallel_attn": True}, "num_kv_heads"),
    "falcon-multi-query": ({**_PLAIN, "multi_query": True, "parallel_attn": True}, None),
    "falcon-multi-head": ({**_PLAIN, "multi_query": False, "parallel_attn": False}, None),
    "gemma": (_HEAD, "num_key_value_heads"),
    "gemma2": ({**_HEAD, "sliding_window": 4}, "num_key_value_heads"),
    "gemma3_text": ({**_HEAD, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}, "num_key_value_heads"),
    "gpt2": ({"n_inner": 24, **_PLAIN}, None),
    "gpt_neox": ({**_PLAIN, "rotary_pct": 0.5}, None),
    "granite": ({**_PLAIN, "logits_scaling": 2.0}, "num_key_value_heads"),
    "llama": ({**_HEAD, "attention_bias": True, "mlp_bias": True}, "num_key_value_heads"),
    "mistral": ({**_HEAD, "sliding_window": 4}, "num_key_value_heads"),
    "mixtral": ({**_HEAD, "num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}, "num_key_value_heads"),
    "olmo": ({**_PLAIN, "clip_qkv": 0.5}, "num_key_value_heads"),
    "olmo2": ({**_PLAIN}, "num_key_value_heads"),
    "olmo3": ({**_PLAIN, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}, "num_key_value_heads"),
    "olmoe": ({**_PLAIN, **_EXPERTS, "clip_qkv": 0.5}, "num_key_value_heads"),
    "opt": ({**_PLAIN, "ffn_dim": 24, "word_embed_proj_dim": 8, "dropout": 0.0}, None),
    "phi": ({**_PLAIN}, "num_key_value_heads"),
    "phi3": (_PLAIN, "num_key_value_heads"),
    "qwen2": (_PLAIN, "num_key_value_heads"),
    "qwen3": (_HEAD, "num_key_value_heads"),
    "qwen3_moe": ({**_HEAD, **_EXPERTS, "decoder_sparse_step": 1, "mlp_only_layers": [0]}, "num_key_value_heads"),
    "smollm3": ({**_PLAIN, "no_rope_layers": [1, 0]}, "num_key_value_heads"),
    "starcoder2": ({**_PLAIN, "use_bias": True}, "num_key_value_heads"),
}  # fmt: skip


# Architecture, key heads, and whether embedding and head are tied.
Variant = tuple[str, int, bool]


def variants() -> list[Variant]:
    """Every architecture with every number of key heads that it can have, tied and untied."""
    return [
        (name, key_heads, tied)
        for name, (_, grouped) in MODELS.items()
        for key_heads in ((1, 2, HEADS) if grouped else (HEADS,))
        for tied in (False, True)
    ]


def pairs(num_ranks: int) -> list[Variant]:
    """Half of the variants: over 2 and 4 ranks together, every two of key heads, ties and ranks meet."""
    if num_ranks not in (2, 4):
        raise ValueError(f"{num_ranks} ranks are not in the pairs")
    return [
        (name, key_heads, tied)
        for name, key_heads, tied in variants()
        if MODELS[name][1] is None or tied == ((key_heads == 2) == (num_ranks == 4))
    ]


# Those whose layers are cut in ways of their own: biases, transposed and fused weights, a narrow embedding, two kinds of experts.
DIFFER = ("llama", "gpt2", "falcon", "phi3", "opt", "olmoe", "qwen3_moe")
# Of these over four ranks by default: key heads that ranks share, fused weights, and experts.
DIFFER_OVER_FOUR = ("llama", "phi3", "qwen3_moe")


def first_of_each(chosen: list[Variant]) -> list[Variant]:
    """One variant of each architecture, that with the fewest key heads."""
    return list({name: (name, key_heads, tied) for name, key_heads, tied in reversed(chosen)}.values())


def by_default(num_ranks: int) -> list[Variant]:
    """Llama with each number of key heads, one variant of every other architecture over two ranks, of `DIFFER_OVER_FOUR` over four."""
    chosen = first_of_each(pairs(num_ranks))
    others = [variant for variant in chosen if num_ranks == 2 or variant[0] in DIFFER_OVER_FOUR]
    return [variant for variant in pairs(num_ranks) if variant[0] == "llama" or variant in others]


def dense_model(name: str, key_heads: int = HEADS, *, tied: bool = False, **overrides: Any) -> PreTrainedModel:
    """A model in fp32 and evaluation mode, none of whose weights is what a class initialises it to."""
    own, grouped = MODELS[name]
    values = {**_COMMON, **own, "tie_word_embeddings": tied}
    if grouped:
        values[grouped] = key_heads
    config = AutoConfig.for_model(name.partition("-")[0], **values | overrides)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager" if "gemma2" in name else "sdpa")
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.1)
    return model.eval()


def batch(length: int = 9) -> dict[str, torch.Tensor]:
    """Token ids and labels, some of which do not count. Shape (2, length)."""
    ids = torch.randint(VOCABULARY, (2, length), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, :4] = -100
    return {"input_ids": ids, "labels": labels}


def shard(
    model: PreTrainedModel,
    group: dist.ProcessGroup,
    *,
    sequence_parallel: bool = False,
    experts: ExpertSharding = "sliced",
) -> PreTrainedModel:
    """Makes the model this rank's part of it."""
    styles = tp_plan_for(model, experts=experts)
    return apply_tensor_parallel(model, styles, tp_group=group, sequence_parallel=sequence_parallel)
