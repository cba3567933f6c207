"""Stages are proven to be the whole model before a run, and what they are not is named."""

from __future__ import annotations

from typing import Any

import pytest
import staged_models
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, LlamaConfig, LlamaForCausalLM

from toolkit.pipeline_parallel.proof import prove_pipeline
from toolkit.planning.rules.pipeline import STAGED_MODEL_TYPES


def proof_of(model_type: str, **values: Any) -> str:
    config = CONFIG_MAPPING[model_type](**values)
    return prove_pipeline(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config).problem


# Tied heads with tied biases, layers that return several values, several streams of hidden states, weights read by the model,
# images beside the text, caches in modules.
@pytest.mark.parametrize(
    "model_type",
    ["llama", "camembert", "xlm-roberta", "bamba", "deepseek_v4", "llama4_text", "got_ocr2", "recurrent_gemma"],
)
def test_stages_are_the_whole_model(model_type: str) -> None:
    assert proof_of(model_type) == ""


def test_layers_that_read_the_embeddings_are_refused() -> None:
    assert "reads the embeddings or another layer's output in addition to its input" in proof_of("zamba")


class Remembers(LlamaForCausalLM):
    """Whose layers leave each other a value behind the back of the forward pass, without a gradient."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.register_forward_pre_hook(self._read, with_kwargs=True)
        self._left: Any = None

    def _read(self, layer: Any, args: Any, kwargs: Any) -> Any:
        hidden = args[0]
        if self._left is not None and self._left.shape == hidden.shape:
            hidden = hidden + 0.1 * self._left
        self._left = hidden.detach()
        return (hidden, *args[1:]), kwargs

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._left = None
        return super().forward(*args, **kwargs)


def test_what_passes_between_stages_unseen_shows_in_the_comparison() -> None:
    proof = prove_pipeline(Remembers, LlamaConfig())
    assert proof.problem.startswith("loss and scores of its stages differ by")
    assert proof.difference > 1e-3


def test_architectures_without_a_proof_are_those_of_the_tests() -> None:
    assert {name.partition("-")[0] for name in staged_models.MODELS} == STAGED_MODEL_TYPES
