"""The smallest model of each architecture that the toolkit names, for tests on the CPU."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.initialization import no_init_weights

_COMMON: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_EXPERTS: dict[str, Any] = {"moe_intermediate_size": 8, "num_experts_per_tok": 2}
_OVERRIDES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-tied": {"tie_word_embeddings": True},
    "qwen2": {},
    "qwen3": {"head_dim": 8, "tie_word_embeddings": True},
    "gemma2": {"head_dim": 4, "sliding_window": 8},
    "gemma3_text": {"head_dim": 4, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32, "n_inner": 24},
    "openai-gpt": {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32, "n_ctx": 32},
    "gpt_neox": {"rotary_pct": 0.5},
    "opt": {"ffn_dim": 24, "word_embed_proj_dim": 16},
    "falcon": {"new_decoder_architecture": False, "alibi": False},
    "phi3": {},
    "olmo": {},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "mixtral": {"num_local_experts": 12, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, "head_dim": 8, "decoder_sparse_step": 1, "mlp_only_layers": [0], **_EXPERTS},
    "deepseek_v2": {
        "num_key_value_heads": 4,
        "first_k_dense_replace": 1,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "kv_lora_rank": 8,
        "q_lora_rank": 8,
        "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 4,
        "v_head_dim": 4,
        "n_group": 1,
        "topk_group": 1,
        **_EXPERTS,
    },
    "mistral": {},
}
_UNTIED = frozenset({"llama", "qwen2", "gpt_neox", "phi3", "olmo", "olmoe", "mixtral", "qwen3_moe", "deepseek_v2"})

ARCHITECTURES = tuple(_OVERRIDES)


def tiny_config(architecture: str, **overrides: Any) -> PreTrainedConfig:
    """A config of two layers; `overrides` win."""
    values = _COMMON | _OVERRIDES[architecture] | overrides
    if architecture in _UNTIED:
        values.setdefault("tie_word_embeddings", False)
    if architecture in ("gpt2", "openai-gpt"):
        values = {key: value for key, value in values.items() if key not in ("hidden_size", "intermediate_size")}
    return AutoConfig.for_model(architecture.removesuffix("-tied"), **values)


def tiny_model(architecture: str, *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A model in fp32 and evaluation mode whose every weight, bias and norm differs from its initial value."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(architecture, **overrides))
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.05)
    return model.eval()


def empty_model(config: PreTrainedConfig, *, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A model as the toolkit builds it before weights come: constructed on meta, storage full of NaN, not of zeros."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.fill_(float("nan") if tensor.is_floating_point() else 1)
    return model.eval()


def partitioned_model(config: PreTrainedConfig, *, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A model as the toolkit builds it under ZeRO-3, over all ranks; no weight is drawn."""
    import deepspeed

    # The architecture must be imported before zero.Init patches nn.Module: on leaving it would undo the decorators of
    # classes that were defined inside (transformers' use_experts_implementation).
    MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    # Its `dtype` argument is not passed: on the CPU it would give bfloat16 whatever it says (zero.Init._set_dtype).
    settings = {
        "zero_optimization": {"stage": 3},
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": dtype is torch.bfloat16},
    }
    with deepspeed.zero.Init(config_dict_or_path=settings), no_init_weights():
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def whole_model(partitioned: PreTrainedModel) -> PreTrainedModel:
    """The same model gathered on this rank, its buffers included."""
    import deepspeed

    whole = empty_model(partitioned.config, dtype=partitioned.dtype)
    whole.tie_weights()  # `to_empty` has untied them
    with deepspeed.zero.GatheredParameters(list(partitioned.parameters())), torch.no_grad():
        for name, weight in whole.named_parameters(remove_duplicate=False):
            weight.copy_(partitioned.get_parameter(name))
    for name, buffer in whole.named_buffers():
        buffer.copy_(partitioned.get_buffer(name))
    return whole


def tokens(length: int = 16) -> torch.Tensor:
    """Token ids, shape (2, length)."""
    return torch.randint(3, 64, (2, length), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    """What the model says to `tokens()`."""
    return model(tokens()).logits
