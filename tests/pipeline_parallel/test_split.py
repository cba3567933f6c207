"""What `split_model` leaves of a model, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from staged_models import LAYERS, batch, cut_copies, dense_model, parts
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    LlamaForCausalLM,
    LlamaModel,
    PreTrainedModel,
    XLMConfig,
)

from toolkit.errors import PlanError
from toolkit.pipeline_parallel import StageSpec, forward_stage, hidden_dtype, hidden_shape, split_model


def test_the_whole_is_cut_on_meta_without_a_value() -> None:
    config = dense_model("llama").config
    config.num_hidden_layers, config.hidden_size, config.vocab_size = 126, 16384, 128256  # 405 billion weights
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    info = split_model(model, StageSpec(chunks=(range(40, 44), range(80, 84)), num_layers=126))
    assert all(weight.is_meta for weight in model.parameters())
    assert [name for name, _ in model.model.layers.named_children()] == [
        str(n) for n in (*range(40, 44), *range(80, 84))
    ]
    assert info.absent == ("model.embed_tokens", "model.norm", "lm_head")
    assert len(model.model.layers) == len(list(model.model.layers)) == len(model.model.layers[:126]) == 126
    assert model.model.layers[41] is dict(model.named_modules())["model.layers.41"]
    assert model.model.layers[-1].training in (True, False)
    assert model.model.rotary_emb.inv_freq.is_meta


@pytest.mark.parametrize(
    "chunks",
    [
        (),
        (range(0),),
        (range(5),),
        (range(2, 3), range(2)),
        (range(3), range(2, 4)),
        (range(0, 4, 2),),
        (range(-1, 2),),
    ],
)
def test_parts_that_are_none(chunks: tuple[range, ...]) -> None:
    with pytest.raises(ValueError, match=r"must follow each other|not a contiguous range of the model"):
        StageSpec(chunks=chunks, num_layers=LAYERS)


def test_what_a_stage_receives() -> None:
    dense = dense_model("opt").to(torch.bfloat16)
    first, second = cut_copies(dense, 2)
    given = batch(length=11)
    assert hidden_shape(second, given) == (2, 11, 16)  # of the layers, not the 8 of the embedding
    assert hidden_dtype(second) == torch.bfloat16
    sent = forward_stage(first, given)
    assert sent.shape == hidden_shape(second, given)
    assert sent.dtype == torch.bfloat16
    with pytest.raises(ValueError, match="first stage"):
        forward_stage(second, given)
    with pytest.raises(ValueError, match="first stage"):
        forward_stage(first, given, received=sent)
    with pytest.raises(ValueError, match="leaf"):
        forward_stage(second, given, received=sent)
    with torch.no_grad():
        assert forward_stage(second, given, received=sent.detach()).logits.shape == (2, 11, 61)
    with pytest.raises(ValueError, match="not split"):
        forward_stage(dense, given)
    with pytest.raises(RuntimeError, match="forward_stage"):
        second(**given)


def test_a_stage_that_failed_runs_again() -> None:
    first, second = cut_copies(dense_model("llama"), 2)
    given, hidden = batch(), torch.randn(2, 12, 16)
    wanted = forward_stage(second, given, received=hidden).loss
    modules = dict(second.named_modules())

    def fail(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = second.model.layers[3].mlp.register_forward_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        forward_stage(second, given, received=hidden)
    handle.remove()
    assert dict(second.named_modules()) == modules
    assert forward_stage(second, given, received=hidden).loss == wanted
    first.model.layers[1].register_forward_hook(lambda module, args, output: output.double())
    with pytest.raises(PlanError) as caught:
        forward_stage(first, given)
    assert caught.value.codes == ("PIPELINE_OUTPUT_MISMATCH",)
    assert "(2, 12, 16) in torch.float64" in str(caught.value)


def refused(model: PreTrainedModel, part: StageSpec | None = None) -> PlanError:
    """The refusal of a model, which is as it was."""
    before = dict(model.named_modules()), dict(model.named_buffers()), vars(model).keys()
    modes = [module.training for module in model.modules()]
    attention = model.config._attn_implementation
    with pytest.raises(PlanError) as caught:
        split_model(model, part or parts(2)[0])
    assert before == (dict(model.named_modules()), dict(model.named_buffers()), vars(model).keys())
    assert modes == [module.training for module in model.modules()]
    assert attention == model.config._attn_implementation
    return caught.value


def test_layers_that_are_not_found() -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(XLMConfig(emb_dim=16, n_layers=4, n_heads=2))
    error = refused(model)
    assert error.codes == ("PIPELINE_LAYERS",)
    assert "XLMWithLMHeadModel" in str(error)
    assert "modules of one class, and it has 4: transformer.attentions, transformer.layer_norm1, " in str(error)
    assert "parallel.pipeline" in str(error)
    model.config.n_layers = 3
    assert "and it has none" in str(refused(model))
    two = dense_model("llama")
    two.model.others = nn.ModuleList([two.model.layers[0]])
    assert "it has 2: model.layers, model.others" in str(refused(two))


def test_configurations_that_no_stage_can_follow() -> None:
    assert "layerdrop=0.1" in str(refused(dense_model("opt", layerdrop=0.1)))
    assert "output_router_logits=true" in str(refused(dense_model("mixtral", output_router_logits=True)))


def test_another_number_of_layers_and_a_second_cut() -> None:
    model = dense_model("llama")
    with pytest.raises(ValueError, match="4 layers is split by a StageSpec of 6"):
        split_model(model, parts(2, num_layers=6)[0])
    split_model(model, parts(2)[0])
    with pytest.raises(ValueError, match="already split"):
        split_model(model, parts(2)[0])
    parted = dense_model("llama", tied=True)
    parted.lm_head.weight = nn.Parameter(parted.lm_head.weight.detach().clone())
    with pytest.raises(ValueError, match=r"lm_head.weight and model.embed_tokens.weight are tied by the configuration"):
        split_model(parted, parts(2)[0])


@pytest.mark.parametrize("chunks", [([0, 1],), ((0, 2),), (2,)])
def test_chunks_are_ranges(chunks: Any) -> None:
    with pytest.raises(TypeError, match=r"each chunk is a range of layers, such as range\(0, 2\)"):
        StageSpec(chunks=chunks, num_layers=4)


def test_weights_that_two_stages_would_share() -> None:
    between = dense_model("llama")
    between.model.layers[3].mlp = between.model.layers[0].mlp
    error = refused(between)
    assert error.codes == ("PIPELINE_SHARED",)
    assert "model.layers.0.mlp.gate_proj.weight and model.layers.3.mlp.gate_proj.weight" in str(error)
    other = dense_model("gpt2")
    other.transformer.ln_f.weight = other.transformer.h[0].ln_1.weight
    assert "transformer.h.0.ln_1.weight and transformer.ln_f.weight" in str(refused(other))
    ends = dense_model("opt")
    ends.model.decoder.project_out.weight = nn.Parameter(ends.model.decoder.project_in.weight.detach().clone())
    split_model(ends, parts(2)[0])


class Odd(LlamaModel):
    """Does between its layers what `kind` says."""

    kind = ""

    def forward(self, input_ids: Tensor, **options: Any) -> Any:
        hidden = embedded = self.embed_tokens(input_ids)
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        rotary = self.rotary_emb(hidden, position_ids=positions)
        layers = list(self.layers)
        for layer in reversed(layers) if self.kind == "reversed" else layers:
            if self.kind == "changes":
                hidden = hidden * 2
            if self.kind == "norm":
                hidden = self.norm(hidden)
            extra = {"embedded": embedded + 1} if self.kind == "embedding" else {}
            hidden = layer(hidden, position_embeddings=rotary, **extra)
            if self.kind == "value" and hidden.sum() != 0:
                break
        return self.norm(hidden)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("changes", "changes hidden states between layer 0 and layer 1 of model.layers"),
        ("reversed", "does not call the 4 layers of model.layers once each, in their order"),
        (
            "embedding",
            "layer 0 of model.layers reads the embeddings or another layer's output in addition to its input",
        ),
        ("norm", "model.norm is called between the layers of model.layers"),
        ("parameter", "model.scale is used by the model itself"),
        ("fails", "does not run without its modules: no such thing"),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_models_that_pass_on_more_than_hidden_states(kind: str, reason: str, device: str) -> None:
    config = dense_model("llama").config
    with torch.device(device):
        model = LlamaForCausalLM(config)
        model.model = Odd(config)
        model.model.kind = kind
        if kind == "parameter":
            model.model.scale = nn.Parameter(torch.ones(()))
    if kind == "fails":
        model.model.rotary_emb.forward = fails
    error = refused(model)
    assert error.codes == ("PIPELINE_ARCHITECTURE",)
    assert reason in str(error)


def fails(*args: Any, **kwargs: Any) -> Any:
    raise AttributeError("no such thing")


@pytest.mark.parametrize(
    ("name", "scaling"),
    [
        ("llama", {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}),
        (
            "phi3",
            {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0, 1.0],
                "long_factor": [2.0, 3.0],
                "original_max_position_embeddings": 8,
            },
        ),
    ],
)
def test_rotary_tables_that_grow_with_the_sequence_are_cut_on_meta(name: str, scaling: dict[str, Any]) -> None:
    """Their code reads positions, which have no values on the meta device, and writes its buffers."""
    dense = dense_model(name)
    config = type(dense.config)(**{**dense.config.to_dict(), "rope_parameters": scaling})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    before = dict(model.named_buffers())
    split_model(model, parts(2)[0])
    assert dict(model.named_buffers()) == before
    assert all(buffer.is_meta for buffer in before.values())
