"""Feed-forward layers by tiles of tokens compute what they compute at once, and are refused where they do not."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tiny_models import tiny_model
from torch import nn
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, LlamaConfig, LlamaForCausalLM

from toolkit.config.job import Lora
from toolkit.errors import PlanError
from toolkit.modeling.build import BuildOptions, add_adapters, finish_model
from toolkit.modeling.tiled_mlp import apply_tiled_mlp, prove_tiles


def gradients(model: Any, ids_BS: torch.Tensor) -> tuple[float, dict[str, torch.Tensor]]:
    loss = model(input_ids=ids_BS, labels=ids_BS).loss
    loss.backward()
    return loss.item(), {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize("checkpointing", [0.0, 1.0])
@pytest.mark.parametrize("lora", [None, Lora(r=2)])
def test_tiles_are_the_whole(lora: Lora | None, checkpointing: float) -> None:
    dense = tiny_model("llama")
    ids_BS = torch.randint(0, 60, (2, 11))
    results = []
    for tile in (1, 4):
        options = BuildOptions(dtype=torch.float32, lora=lora, checkpointing=checkpointing, mlp_tiles=tile)
        model = finish_model(add_adapters(copy.deepcopy(dense), options), options)
        results.append(gradients(model, ids_BS))
    (loss, wanted), (tiled_loss, found) = results
    assert tiled_loss == pytest.approx(loss, abs=1e-6)
    assert found.keys() == wanted.keys() != set()
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-6, rtol=1e-5)


def test_each_tile_is_a_call_whatever_the_length() -> None:
    model, seen = tiny_model("llama"), []
    apply_tiled_mlp(model, 3)
    model.model.layers[0].mlp.up_proj.register_forward_hook(lambda module, args, output: seen.append(output.shape[1]))
    with torch.no_grad():
        for length in (10, 2):
            model(input_ids=torch.zeros((1, length), dtype=torch.int64))
    assert seen == [4, 3, 3, 1, 1, 0], "under ZeRO-3 all ranks must call it equally often"


class MeanMLP(nn.Module):
    """A feed-forward layer that subtracts the mean over the tokens, which no tile knows."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.up_proj = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up_proj(x - x.mean(1, keepdim=True))


class Mean(LlamaForCausalLM):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = MeanMLP(config)


def test_layers_that_mix_tokens_are_refused() -> None:
    assert "the scores of a small twin differ" in prove_tiles(Mean, LlamaConfig())
    with pytest.raises(PlanError) as caught:
        apply_tiled_mlp(tiny_model("opt"), 4)
    assert caught.value.codes == ("TILED_MLP_ARCHITECTURE",)


@pytest.mark.full
@pytest.mark.parametrize("name", ["qwen3", "gemma2", "gemma3_text", "phi3", "gpt_neox", "falcon", "olmo2", "glm4"])
def test_other_architectures_are_proven(name: str) -> None:
    config = CONFIG_MAPPING[name]()
    assert prove_tiles(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config) == ""
