"""Small models of each architecture whose layers differ in another way, and ways to trace them."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedConfig

from toolkit.config.job import Lora
from toolkit.memory.engines.ledger import MemoryLedger
from toolkit.memory.kernels.device import Device
from toolkit.memory.trace.events import MemoryTrace, Run
from toolkit.memory.trace.run import trace_model
from toolkit.memory.trace.spec import TraceSpec
from toolkit.pipeline_schedule import StageSpec

H100 = Device(capability=9.0)
BATCH, LENGTH = 2, 32

_COMMON: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def _every(period: int, count: int) -> list[str]:
    """Names `count` attentions, every `period`-th of them full."""
    return ["sliding_attention" if (index + 1) % period else "full_attention" for index in range(count)]


CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma2": {"head_dim": 8, "sliding_window": 8, "num_hidden_layers": 8},
    "gemma3_text": {
        "head_dim": 8,
        "sliding_window": 8,
        "num_hidden_layers": 14,
        "layer_types": _every(6, 14),
    },
    "gpt_oss": {
        "head_dim": 8,
        "sliding_window": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 8,
        "layer_types": _every(2, 8),
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "deepseek_v3": {
        "num_hidden_layers": 8,
        "num_key_value_heads": 4,
        "first_k_dense_replace": 3,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "kv_lora_rank": 8,
        "q_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "n_group": 2,
        "topk_group": 1,
        "moe_intermediate_size": 16,
        "num_experts_per_tok": 2,
    },
    "qwen3_next": {
        **_EXPERTS,
        "num_hidden_layers": 8,
        "layer_types": ["linear_attention", "full_attention"] * 4,
        "head_dim": 8,
        "shared_expert_intermediate_size": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "mixtral-router-loss": {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True},
    "qwen3_moe": {**_EXPERTS, "decoder_sparse_step": 1, "mlp_only_layers": [0]},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "gpt2": {"n_layer": 6, "n_embd": 32, "n_head": 4, "n_positions": 64},
    "gpt_neox": {},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "falcon": {"new_decoder_architecture": False, "alibi": False},
    "phi3": {},
}

# How a model is traced, by name; None as attention is sdpa where the architecture has it.
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "checkpointing": {"checkpointing": 1.0},
    "half of the layers checkpointed": {"checkpointing": 0.5},
    "every second layer": {"checkpointing": 0.5, "checkpoint_every": 2},
    "linear and attention kept": {"checkpointing": 1.0, "checkpoint_keep": ("linear", "attention")},
    "inputs on the host": {"checkpointing": 1.0, "offload_inputs": True},
    "LoRA": {"lora": Lora(r=4)},
    "LoRA with checkpointing": {"lora": Lora(r=4), "checkpointing": 1.0},
    "ZeRO-3": {"marks_modules": True},
    "ZeRO-3 with checkpointing": {"marks_modules": True, "checkpointing": 1.0},
    "eager": {"attention": "eager"},
    "flash": {"attention": "flash_attention_2"},
    "padded": {"packing": "none"},
    "padded flash": {"packing": "none", "attention": "flash_attention_2"},
    "separated": {"packing": "separated"},
    "separated flash": {"packing": "separated", "attention": "flash_attention_2"},
    "fp32": {"dtype": torch.float32},
    "chunked loss": {"loss": "chunked", "marks_modules": True},
    "Liger's loss": {"loss": "liger", "marks_modules": True},
}


def config_of(name: str, **overrides: Any) -> PreTrainedConfig:
    """Return a configuration; `overrides` win."""
    model_type = name.partition("-")[0]
    common = _COMMON
    if model_type == "gpt2":
        common = {key: _COMMON[key] for key in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")}
    return AutoConfig.for_model(model_type, **common | CONFIGS.get(name, {}) | overrides)


def trace_of(
    config: PreTrainedConfig, *, part: StageSpec | None = None, all_layers: bool = False, **values: Any
) -> MemoryTrace:
    """Trace a model with the given values of `TraceSpec`."""
    return trace_model(config, TraceSpec(**values), part=part, all_layers=all_layers)


@cache
def traced(name: str, way: str = "plain", *, all_layers: bool = False, **overrides: Any) -> MemoryTrace:
    """Traces one of the models."""
    values = {"micro_batch": BATCH, "sequence_length": LENGTH, "device": H100} | WAYS[way] | overrides
    if name in ("gemma2", "gpt_oss"):  # transformers has no sdpa for them
        values.setdefault("attention", "eager")
    return trace_of(config_of(name), all_layers=all_layers, **values)


def peaks(trace: MemoryTrace) -> dict[str, int]:
    """Return the highest level of each pass, gradients left out, bytes."""
    account = MemoryLedger()
    for phase, events in (("forward", trace.forward), ("backward", trace.backward)):
        account.enter(phase)
        for placed in events:
            if isinstance(placed.event, Run):
                account.apply(placed.event)
    return {phase: account.peaks[phase].allocated_bytes for phase in ("forward", "backward")}
