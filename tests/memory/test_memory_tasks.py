"""Models with other heads than a language model's, mixtures of experts, and models that cannot be traced."""

import json
from dataclasses import replace
from functools import partial, wraps

import pytest
import torch
from traced_models import H100, config_of, peaks, traced
from transformers import AutoConfig
from transformers.models.llama import modeling_llama

import toolkit as tk
from toolkit.errors import PlanError, SpecError
from toolkit.memory.estimate import estimate
from toolkit.memory.trace.events import held
from toolkit.memory.trace.ranks import trace_plan
from toolkit.memory.trace.run import trace, trace_model
from toolkit.modeling.build import model_config

ENCODER = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 5}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 5, "num_decoder_layers": 4, "num_heads": 4, "vocab_size": 64}
BART = {
    f"{side}_{key}": value
    for side in ("encoder", "decoder")
    for key, value in {"layers": 4, "attention_heads": 4, "ffn_dim": 64}.items()
} | {"d_model": 32, "vocab_size": 64}
IMAGES = {"image_size": 32, "patch_size": 8}
GEMMA3 = {
    "text_config": {
        "model_type": "gemma3_text",
        "head_dim": 8,
        "sliding_window": 8,
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 5,
    },
    "vision_config": {"model_type": "siglip_vision_model", **ENCODER, **IMAGES},
    "mm_tokens_per_image": 4,
    "image_token_index": 60,
    "boi_token_index": 61,
    "eoi_token_index": 62,
}
IDEFICS3 = {
    "text_config": {**GEMMA3["text_config"], "model_type": "llama"},
    "vision_config": {**ENCODER, **IMAGES},
    "scale_factor": 2,
    "image_token_id": 60,
}
TASKS = {
    "t5": ("seq2seq-lm", "t5", T5),
    "bart": ("seq2seq-lm", "bart", BART),
    "vit": ("image-classification", "vit", {**ENCODER, **IMAGES}),
    "bert": ("masked-lm", "bert", {**ENCODER, "vocab_size": 64}),
    "bert-classifier": ("sequence-classification", "bert", {**ENCODER, "vocab_size": 64}),
    "llama-classifier": ("sequence-classification", "llama", {**ENCODER, "vocab_size": 64, "pad_token_id": 0}),
    "gemma3-sees": ("image-text-to-text", "gemma3", GEMMA3),
    "idefics3-sees": ("image-text-to-text", "idefics3", IDEFICS3),
}


def trace_task(name, **options):
    task, model_type, values = TASKS[name]
    config = AutoConfig.for_model(model_type, **values)
    return trace_model(
        config, **{"task": task, "micro_batch": 2, "sequence_length": 64, "device": H100, "packing": "none"} | options
    )


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full) if name == "bart" else name for name in TASKS]
)
def test_few_layers_give_what_all_give(name):
    options = {"checkpointing": 1.0} if name in ("bart", "bert") else {}
    few, whole = trace_task(name, **options), trace_task(name, all_layers=True, **options)
    assert (few.parameters, few.buffers_bytes) == (whole.parameters, whole.buffers_bytes)
    assert few.forward == whole.forward
    assert few.backward == whole.backward
    assert few.after == whole.after
    assert few.num_traced_layers < whole.num_traced_layers == whole.num_layers
    assert held((*few.forward, *few.backward, *few.after)) == {}


def test_an_encoder_and_a_decoder_are_two_lists_of_layers():
    made = trace_task("t5")
    assert made.num_layers == T5["num_layers"] + T5["num_decoder_layers"]
    names = {parameter.name for parameter in made.parameters}
    assert "encoder.block.4.layer.1.layer_norm.weight" in names
    assert "decoder.block.3.layer.2.layer_norm.weight" in names


def test_images_take_memory_in_proportion_to_their_number():
    few, many = (peaks(trace_task("vit", micro_batch=count))["forward"] for count in (32, 64))
    assert many == pytest.approx(2 * few, rel=0.02)


EXPERTS = ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss"]


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_say_that_routing_does_not_matter(name):
    (sentence,) = traced(name).assumptions
    assert "does not depend on the routing" in " ".join(sentence.split()).replace("memory does not", "does not")


def test_dense_models_assume_nothing_of_routing():
    assert traced("llama").assumptions == ()


def mixtral(*, choices=2, experts=4, implementation=None):
    config = config_of("mixtral", num_experts_per_tok=choices, num_local_experts=experts)
    config._experts_implementation = implementation
    return partial(trace_model, config, micro_batch=2, sequence_length=256, device=H100)


def test_each_choice_of_a_token_adds_one_row_through_the_experts():
    one, two, three = (peaks(mixtral(choices=choices)())["forward"] for choices in (1, 2, 3))
    assert three - two == pytest.approx(two - one, rel=0.05)
    tokens, layers, hidden, width = 512, 6, 32, 48
    # At least the row itself, both halves of the gate and what goes into the second product, in 16 bits.
    assert two - one >= layers * tokens * 2 * (hidden + 2 * width + width)


def test_more_experts_add_parameters_and_next_to_no_activations():
    few, many = mixtral(experts=4)(), mixtral(experts=8)()
    assert peaks(many)["forward"] == pytest.approx(peaks(few)["forward"], rel=0.05)
    experts = [sum(p.numel for p in made.parameters if ".experts." in p.name) for made in (few, many)]
    assert experts[1] == 2 * experts[0]


def test_a_loop_over_experts_assumes_balance_and_prices_the_worst():
    made = {routing: mixtral(implementation="eager")(routing=routing) for routing in ("balanced", "worst")}
    assert "same number of tokens" in made["balanced"].assumptions[0]
    assert "same ones" in made["worst"].assumptions[0]
    # All rows of all experts are kept, whoever they belong to.
    assert peaks(made["worst"])["forward"] == pytest.approx(peaks(made["balanced"])["forward"], rel=0.05)
    grouped = peaks(mixtral()())["forward"]
    assert peaks(made["balanced"])["forward"] == pytest.approx(grouped, rel=0.15)


def failed(config, **options):
    with pytest.raises(PlanError) as caught:
        trace_model(config, **{"micro_batch": 1, "sequence_length": 8, "device": H100} | options)
    (problem,) = caught.value.problems
    return problem


def test_a_model_that_asks_for_values_is_named_with_its_module(monkeypatch):
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", lambda self, hidden: hidden[hidden.sum(-1) > 0])
    problem = failed(config_of("llama"))
    assert problem.code == "TRACE_FAILED"
    assert "model.layers.0.mlp (LlamaMLP)" in problem.message
    assert "depend on the values of tensors" in problem.fix


def jetmoe(**options):
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "kv_channels": 8}
    config = AutoConfig.for_model("jetmoe", vocab_size=64, hidden_size=32, num_hidden_layers=6, **experts)
    return trace_model(config, **{"micro_batch": 1, "sequence_length": 66, "device": H100} | options)


def test_experts_that_cut_their_rows_by_a_list():
    few, whole = jetmoe(), jetmoe(all_layers=True)
    assert (few.forward, few.backward) == (whole.forward, whole.backward)
    assert few.num_traced_layers < few.num_layers == 6
    assert few.depends_on_routing
    assert "same number of tokens" in few.assumptions[0]
    assert "same ones" in jetmoe(routing="worst").assumptions[0]


def test_sizes_that_do_not_fit_are_named_with_their_module():
    problem = failed(config_of("llama", num_key_value_heads=3))
    assert problem.code == "TRACE_FAILED"
    assert "model.layers.0.self_attn (LlamaAttention)" in problem.message
    assert "config.json" in problem.fix


def test_attention_that_the_architecture_lacks():
    assert failed(AutoConfig.for_model("t5", **T5), task="seq2seq-lm", attention="flash_attention_2").message.count(
        "Flash Attention 2"
    )
    assert failed(config_of("gpt_oss")).code == "MODEL_BUILD"


def test_images_whose_size_the_config_does_not_say():
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "patch_size": 8}
    problem = failed(AutoConfig.for_model("qwen2_vl", vision_config=vision), task="image-text-to-text")
    assert problem.code == "TRACE_FAILED"
    assert "images of model_type=qwen2_vl_vision have no size of their own" in problem.message
    assert "image_size" in problem.message


def test_a_failed_backward_pass_says_so(monkeypatch):
    from toolkit.memory.kernels.fake_fused import FusedAttention

    def refuse(ctx, *grads):
        raise RuntimeError("no gradient here")

    monkeypatch.setattr(FusedAttention, "backward", staticmethod(refuse))
    problem = failed(config_of("llama"))
    assert "backward" in problem.message
    assert "no gradient here" in problem.message


def test_nothing_is_logged_when_a_trace_fails(capfd):
    failed(config_of("llama", num_key_value_heads=3))
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("as_folder", [True, False])
def test_a_plan_of_an_architecture_that_transformers_does_not_know(tmp_path, as_folder):
    """Another transformers, which knows it, has made the plan."""
    path = tmp_path / "config.json"
    path.write_text(config_of("llama").to_json_string(use_diff=False), encoding="utf-8")
    job = {
        "model": {"name": str(tmp_path if as_folder else path), "init": "random"},
        "cluster": {"gpu": "h100-sxm-80gb", "gpus_per_node": 1},
        "train": {"sequence_length": 8, "max_steps": 1},
    }
    plan = tk.resolve(tk.Job.model_validate(job))
    config = {**plan.model.config, "model_type": "brand_new"}
    path.write_text(json.dumps(config), encoding="utf-8")
    model = replace(plan.model, model_type="brand_new", config_json=json.dumps(config))
    with pytest.raises(SpecError) as caught:
        trace(replace(plan, model=model), device=H100)
    (problem,) = caught.value.problems
    assert problem.code == "MODEL_CLASS"
    assert "brand_new" in problem.message
    assert "trust_remote_code" in problem.fix


def test_parameters_that_a_model_makes_in_fp32_are_cast():
    made = trace_model(config_of("deepseek_v3"), micro_batch=1, sequence_length=8, device=H100, dtype=torch.float16)
    assert {parameter.itemsize for parameter in made.parameters} == {2}


def mixtral_plan(**train):
    job = {
        "model": {"name": "mixtral-8x7b", "init": "random"},
        "cluster": {"gpu": "h100-sxm-80gb", "gpus_per_node": 8},
        "train": {"sequence_length": 1024, "per_device_train_batch_size": 1, **train},
        "parallel": {"zero_stage": 3},
    }
    return tk.resolve(tk.Job.model_validate(job))


def test_the_worst_routing_is_priced_where_the_routing_matters(monkeypatch):
    plan = mixtral_plan()
    grouped = estimate(plan)
    assert grouped.worst_routing_peak_bytes == grouped.peak_allocated_bytes, "rows do not depend on who is chosen"
    balanced = trace_plan(plan, marks_modules=True)
    assert balanced.has_experts
    assert not balanced.depends_on_routing

    def one_by_one(plan):
        config = model_config(plan)
        config._experts_implementation = "eager"
        return config

    monkeypatch.setattr("toolkit.memory.trace.run.model_config", one_by_one)
    looped = estimate(plan)
    worst = trace_plan(plan, marks_modules=True, routing="worst")
    assert worst.depends_on_routing
    assert looped.worst_routing_peak_bytes == estimate(plan, traced=worst).peak_allocated_bytes
    assert looped.to_dict()["worst_routing_peak_bytes"] == looped.worst_routing_peak_bytes


def test_a_dense_model_has_no_worst_routing():
    job = {"model": {"name": "smollm2-135m", "init": "random"}, "cluster": {"gpu": "h100-sxm-80gb"}}
    assert estimate(tk.resolve(tk.Job.model_validate(job))).worst_routing_peak_bytes is None


def test_linear_attention_says_that_it_is_traced_without_its_kernels(monkeypatch):
    from transformers.models.qwen3_next import modeling_qwen3_next as modeling

    assert not any("Linear attention" in line for line in traced("mixtral").assumptions)
    before = traced("qwen3_next")
    (sentence,) = [line for line in before.assumptions if "Linear attention" in line]
    assert "causal-conv1d and flash-linear-attention" in sentence

    package = "fla"

    @wraps(modeling.torch_chunk_gated_delta_rule)
    def installed(*args, **kwargs):
        raise AssertionError(f"{package} cannot run on fake tensors")

    monkeypatch.setattr(modeling, "torch_chunk_gated_delta_rule", installed)
    traced.cache_clear()
    assert traced("qwen3_next") == before, "also where the package is installed"
    assert modeling.torch_chunk_gated_delta_rule is installed
