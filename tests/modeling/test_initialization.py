from pathlib import Path

import pytest
import torch
from cards import card
from ranks import run_distributed
from tiny_models import ARCHITECTURES, empty_model, partitioned_model, tiny_config, whole_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from toolkit.modeling.initialization import initialize_buffers, initialize_weights, module_seed

BUFFERED = [name for name in ARCHITECTURES if name not in ("gpt2", "opt")]


def _initialized(config: PreTrainedConfig, *, seed: int = 0) -> PreTrainedModel:
    model = empty_model(config)
    initialize_weights(model, seed=seed)
    return model


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_weights_follow_the_distribution_of_from_config(architecture: str) -> None:
    widths = {"gpt2": {"n_embd": 64, "n_inner": 128}, "openai-gpt": {"n_embd": 64}}
    width = widths.get(architecture, {"hidden_size": 64, "intermediate_size": 128})
    width |= {"word_embed_proj_dim": 64, "ffn_dim": 128} if architecture == "opt" else {}
    config = tiny_config(architecture, **width)
    torch.manual_seed(7)
    expected = AutoModelForCausalLM.from_config(config)
    model = _initialized(config)
    for name, parameter in model.named_parameters():
        weight = parameter.detach()
        reference = expected.get_parameter(name).detach()
        assert weight.isfinite().all(), name
        if reference.std() == 0:
            assert torch.equal(weight, reference), name  # norms and biases
        else:
            error = reference.std() / weight.numel() ** 0.5
            assert abs(weight.mean()) < 6 * error, name
            assert weight.std() == pytest.approx(reference.std().item(), rel=6 / (2 * weight.numel()) ** 0.5), name
    padding = config.pad_token_id
    embedding = model.get_input_embeddings()
    if embedding.padding_idx is not None:
        assert not embedding.weight[padding].any()


@pytest.mark.gpu
@pytest.mark.skipif(card() is None, reason="needs a CUDA device")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_card_draws_weights_in_host_memory_as_it_draws_its_own(architecture: str) -> None:
    config = tiny_config(architecture)
    there = empty_model(config).to("cuda")
    initialize_weights(there, seed=3)
    here = empty_model(config)
    initialize_weights(here, seed=3, device=torch.device("cuda", torch.cuda.current_device()))
    for name, weight in here.named_parameters():
        assert not weight.is_cuda
        assert torch.equal(weight, there.get_parameter(name).cpu()), name


def test_what_no_rule_sets_is_as_the_constructor_makes_it() -> None:
    config = AutoConfig.for_model(
        "apertus", hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, vocab_size=64
    )
    expected = AutoModelForCausalLM.from_config(config).model.layers[1].mlp.act_fn
    found = _initialized(config).model.layers[1].mlp.act_fn
    for name in ("alpha_p", "alpha_n"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
        assert getattr(expected, name).any()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_buffers_are_those_of_from_config(architecture: str) -> None:
    config = tiny_config(architecture)
    expected = dict(AutoModelForCausalLM.from_config(config).named_buffers())
    assert bool(expected) == (architecture in BUFFERED)
    model = _initialized(config)
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, expected[name]), name


def test_scaled_rotary_frequencies_are_kept() -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config = tiny_config("llama", rope_parameters=scaling | {"original_max_position_embeddings": 16, "rope_theta": 1e4})
    expected = AutoModelForCausalLM.from_config(config).model.rotary_emb.inv_freq
    assert not torch.equal(expected, AutoModelForCausalLM.from_config(tiny_config("llama")).model.rotary_emb.inv_freq)
    assert torch.equal(_initialized(config).model.rotary_emb.inv_freq, expected)


def test_buffers_alone_leave_weights_alone() -> None:
    model = _initialized(tiny_config("gemma3_text"))
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    for buffer in model.buffers():
        buffer.fill_(float("nan"))
    initialize_buffers(model)
    assert all(buffer.isfinite().all() for buffer in model.buffers())
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())
    assert not any(hasattr(tensor, "_is_hf_initialized") for tensor in [*model.parameters(), *model.buffers()])


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("slopes", torch.arange(4) * 0.5, persistent=False)


class _Custom(PreTrainedModel):
    config_class = type(tiny_config("llama"))

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        self.inner = _Scaled()
        self.head = nn.Linear(4, 4)
        self.post_init()


def test_a_buffer_that_the_architecture_does_not_fill_is_constructed_again() -> None:
    with torch.device("meta"):
        model = _Custom(tiny_config("llama"))
    model.to_empty(device="cpu")
    initialize_weights(model, seed=0)
    assert model.inner.slopes.tolist() == [0.0, 0.5, 1.0, 1.5]


def test_the_seed_decides_and_the_random_state_stays() -> None:
    config = tiny_config("llama-tied")
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    one = _initialized(config, seed=1)
    assert torch.equal(torch.rand(4), expected)
    again, other = _initialized(config, seed=1), _initialized(config, seed=2)
    assert one.lm_head.weight is one.model.embed_tokens.weight
    projections = [model.model.layers[0].self_attn.q_proj.weight for model in (one, again, other)]
    assert torch.equal(projections[0], projections[1])
    assert not torch.equal(projections[0], projections[2])
    layers = one.model.layers
    assert not torch.equal(layers[0].self_attn.q_proj.weight, layers[1].self_attn.q_proj.weight)


def test_a_deeper_model_begins_with_the_same_layers() -> None:
    shallow, deep = (_initialized(tiny_config("qwen3_moe", num_hidden_layers=depth)) for depth in (2, 3))
    for name, weight in shallow.named_parameters():
        assert torch.equal(weight, deep.get_parameter(name)), name


def test_module_seeds_are_fixed_for_all_time() -> None:
    assert module_seed(0, "model.layers.0.mlp") == 5410975265489956538
    assert 0 <= module_seed(-5, "") < 2**63


PARTITIONED = ("llama", "llama-tied", "gemma2", "gpt2", "opt", "mixtral", "deepseek_v2")


def _initialize_on_each_rank(rank: int, folder: str) -> None:
    for architecture in PARTITIONED:
        for dtype in (torch.float32, torch.bfloat16):
            config = tiny_config(architecture)
            dense = empty_model(config, dtype=dtype)
            initialize_weights(dense, seed=5)
            partitioned = partitioned_model(config, dtype=dtype)
            initialize_weights(partitioned, seed=5)
            embedding = partitioned.get_input_embeddings().weight
            assert embedding.ds_tensor.numel() == embedding.ds_numel // 2
            assert embedding.dtype is dtype
            whole = whole_model(partitioned)
            for name, weight in whole.named_parameters():
                # DeepSeek's router is declared in fp32; zero.Init rounds it to the training dtype, as the engine does.
                assert torch.equal(weight, dense.get_parameter(name).to(dtype)), (architecture, name)
            for name, buffer in partitioned.named_buffers():
                assert torch.equal(buffer, dense.get_buffer(name)), (architecture, name)
            if config.tie_word_embeddings:
                assert partitioned.get_output_embeddings().weight is embedding
    torch.save({name: weight.detach() for name, weight in dense.named_parameters()}, Path(folder) / f"{rank}.pt")


@pytest.mark.gloo
def test_the_model_is_the_same_at_every_stage_and_rank(tmp_path: Path) -> None:
    run_distributed(_initialize_on_each_rank, 2, str(tmp_path))
    one, two = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    alone = empty_model(tiny_config(PARTITIONED[-1]), dtype=torch.bfloat16)
    initialize_weights(alone, seed=5)
    for name, weight in alone.named_parameters():
        assert torch.equal(one[name], two[name])
        assert torch.equal(one[name], weight)
