"""What a stage tells of the model that it is a part of."""

from __future__ import annotations

import pytest
from staged_models import MODELS, cut_copies, dense_model

from toolkit.introspect import tied_keys
from toolkit.modeling.initialization import tie_weights
from toolkit.pipeline_parallel import stage_info

# What lies before the layers and behind them, by endings of keys.
ENDS = {
    "bloom": (("word_embeddings.weight", "word_embeddings_layernorm"), ("ln_f", "lm_head")),
    "gpt2": (("wte", "wpe"), ("ln_f", "lm_head")),
    "gpt_neox": (("embed_in",), ("gpt_neox.final_layer_norm", "lm_head")),
    "gpt_neox_japanese": (("embed_in",), ("gpt_neox_japanese.final_layer_norm", "embed_out")),
    "opt": (("embed_tokens", "embed_positions", "project_in"), ("decoder.final_layer_norm", "project_out", "lm_head")),
    "phi": (("embed_tokens",), ("final_layernorm", "lm_head")),
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_each_weight_lies_on_one_rank_under_its_name(name: str, tied: bool) -> None:
    dense = dense_model(name, tied=tied)
    models = cut_copies(dense, 4)
    held = [{key for key, _ in model.named_parameters(remove_duplicate=False)} for model in models]
    every = [key for key, _ in dense.named_parameters(remove_duplicate=False)]
    assert sorted(key for keys in held for key in keys) == sorted(every)
    first, last = held[0], held[-1]
    info = stage_info(models[0])
    assert info is not None
    for rank, keys in enumerate(held):
        assert {
            int(key.removeprefix(f"{info.layers}.").partition(".")[0])
            for key in keys
            if key.startswith(f"{info.layers}.")
        } == {rank}
    before, behind = ENDS.get(name, (("embed",), ("norm", "lm_head", "ln_f")))
    outside = {key for key in every if not key.startswith(f"{info.layers}.")}
    assert first & outside == {key for key in outside if any(part in key for part in before)}
    assert last & outside == {key for key in outside if any(part in key for part in behind)}
    assert not (held[1] | held[2]) & outside
    assert (last & outside) | (first & outside) == outside


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt"])
def test_a_tied_head_is_a_weight_of_its_own(name: str) -> None:
    dense = dense_model(name, tied=True)
    [(head, embedding)] = tied_keys(dense).items()
    infos = []
    for model in cut_copies(dense, 4):
        info = stage_info(model)
        assert info is not None
        infos.append((info.tied_key, dict(info.tied_copy)))
        assert tied_keys(model) == {}
        before = dict(model.named_parameters())
        tie_weights(model)
        model.tie_weights()
        assert dict(model.named_parameters()) == before
    assert infos == [(embedding, {}), (None, {}), (None, {}), (head, {head: embedding})]
    [alone] = cut_copies(dense, 1, virtual=2)  # both ends on one rank
    info = stage_info(alone)
    assert info is not None
    assert (info.tied_key, dict(info.tied_copy)) == (None, {})
    assert alone.get_parameter(head) is alone.get_parameter(embedding)
