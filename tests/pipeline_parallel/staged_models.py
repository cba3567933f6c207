"""Tiny dense models, the stages cut from them, and a chain of stages that runs in one process."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from toolkit.pipeline_parallel import StageSpec, forward_stage, hidden_dtype, hidden_shape, split_model, stage_info

LAYERS, VOCABULARY = 4, 61
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "pad_token_id": 7,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED = {"num_key_value_heads": 2}
_SLIDING = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_NO_YARN = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
# None of them is left to a default that the other tests know: parts before the layers and behind them are all there.
MODELS: dict[str, dict[str, Any]] = {
    "bloom": {},
    "falcon": {"alibi": False, "new_decoder_architecture": True, "num_kv_heads": 2, "bias": True},
    "falcon-alibi": {"alibi": True, "new_decoder_architecture": False, "multi_query": False, "parallel_attn": False},
    "gemma2": {**_GROUPED, "head_dim": 4, "sliding_window": 4},
    "gemma3_text": {**_GROUPED, **_SLIDING, "head_dim": 4},
    "gpt2": {"n_inner": 24},
    "gpt_neox": {"rotary_pct": 0.5},
    "gpt_neox_japanese": {
        "intermediate_multiple_size": 2,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    },
    "gpt_oss": {**_GROUPED, **_SLIDING, **_EXPERTS, **_NO_YARN, "head_dim": 4},
    "granite": {**_GROUPED, "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0},
    "llama": _GROUPED,
    "mixtral": {**_GROUPED, **_EXPERTS},
    "olmo2": _GROUPED,
    "opt": {"ffn_dim": 24, "word_embed_proj_dim": 8, "dropout": 0.0, "do_layer_norm_before": True},
    "phi": _GROUPED,
    "phi3": _GROUPED,
    "qwen2": _GROUPED,
    "qwen3": {**_GROUPED, "head_dim": 8},
    "smollm3": {**_GROUPED, "no_rope_layers": [1, 0, 1, 0]},
    "starcoder2": {**_GROUPED, "use_bias": True, "embedding_dropout": 0.0, "residual_dropout": 0.0},
}


def dense_model(name: str, *, tied: bool = False, **overrides: Any) -> PreTrainedModel:
    """A model in fp32 and evaluation mode, none of whose weights is what a class initialises it to."""
    values = {**_COMMON, **MODELS[name], "tie_word_embeddings": tied, **overrides}
    config = AutoConfig.for_model(name.partition("-")[0], **values)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.1)
    return model.eval()


def parts(num_ranks: int, *, virtual: int = 1, num_layers: int = LAYERS) -> list[StageSpec]:
    """Layers dealt out in equal runs."""
    stages = num_ranks * virtual
    runs = [range(num_layers * stage // stages, num_layers * (stage + 1) // stages) for stage in range(stages)]
    return [StageSpec(chunks=tuple(runs[rank::num_ranks]), num_layers=num_layers) for rank in range(num_ranks)]


def cut_copies(dense: PreTrainedModel, num_ranks: int, *, virtual: int = 1) -> list[PreTrainedModel]:
    """What each rank holds of a model."""
    copies = [copy.deepcopy(dense) for _ in range(num_ranks)]
    for model, part in zip(
        copies, parts(num_ranks, virtual=virtual, num_layers=dense.config.num_hidden_layers), strict=True
    ):
        split_model(model, part)
    return copies


class Chain:
    """The stages of all ranks, run one after the other as if they sent to each other."""

    def __init__(self, models: list[Any]) -> None:
        self.models = models

    def stages(self) -> Iterator[tuple[Any, int]]:
        """Rank's model and chunk, in the order in which a micro-batch meets them."""
        info = stage_info(self.models[0])
        assert info is not None
        return ((model, chunk) for chunk in range(len(info.part.chunks)) for model in self.models)

    def forward(self, batch: dict[str, Tensor]) -> tuple[Any, list[tuple[Tensor, Tensor]]]:
        """Gives the last stage's output, and what each other stage sent with what the next received of it."""
        sent: list[tuple[Tensor, Tensor]] = []
        received: Tensor | None = None
        for model, chunk in self.stages():
            output = forward_stage(model, batch, chunk=chunk, received=received)
            if isinstance(output, Tensor):
                received = torch.empty(hidden_shape(model, batch), dtype=hidden_dtype(model)).copy_(output.detach())
                sent.append((output, received))
        return output, sent

    def backward(self, loss: Tensor, sent: list[tuple[Tensor, Tensor]]) -> None:
        """Sends the gradients back from the loss."""
        loss.backward()
        for output, received in reversed(sent):
            assert received.grad is not None
            output.backward(received.grad)

    def gradients(self) -> dict[str, Tensor]:
        """Gradients of the whole model by name; of a tie the sum, under the embedding's name."""
        found: dict[str, Tensor] = {}
        for model in self.models:
            info = stage_info(model)
            assert info is not None
            for name, weight in model.named_parameters():
                if weight.grad is not None:
                    key = info.tied_copy.get(name, name)
                    found[key] = found[key] + weight.grad if key in found else weight.grad
        return found


def batch(kind: str = "plain", *, length: int = 12) -> dict[str, Tensor]:
    """Two sequences with labels: `plain`, `padded` on the left and on the right, or `packed` from documents."""
    ids = torch.randint(8, VOCABULARY, (2, length), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, :4] = -100
    given = {"input_ids": ids, "labels": labels}
    if kind == "padded":
        mask = torch.ones_like(ids)
        mask[0, :3], mask[1, -4:] = 0, 0
        labels[mask == 0] = -100
        return {**given, "attention_mask": mask}
    if kind == "packed":
        starts = [(5, length - 5), (3, length - 3)]
        positions = [torch.cat([torch.arange(size) for size in sizes]) for sizes in starts]
        return {**given, "position_ids": torch.stack(positions)}
    return given


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
