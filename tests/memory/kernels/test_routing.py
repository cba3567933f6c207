"""Mixtures of experts: what their memory takes of the routing, and what a trace says of it."""

from functools import partial

import pytest
from traced_models import H100, config_of, peaks, trace_of, traced
from transformers import AutoConfig

import toolkit as tk
from toolkit.memory.estimate import estimate
from toolkit.memory.trace.run import trace
from toolkit.modeling.architecture import model_config

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
    return partial(trace_of, config, micro_batch=2, sequence_length=256, device=H100)


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


def jetmoe(**options):
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "kv_channels": 8}
    config = AutoConfig.for_model("jetmoe", vocab_size=64, hidden_size=32, num_hidden_layers=6, **experts)
    return trace_of(config, **{"micro_batch": 1, "sequence_length": 66, "device": H100} | options)


def test_experts_that_cut_their_rows_by_a_list():
    few, whole = jetmoe(), jetmoe(all_layers=True)
    assert (few.forward, few.backward) == (whole.forward, whole.backward)
    assert few.num_traced_layers < few.num_layers == 6
    assert few.depends_on_routing
    assert "same number of tokens" in few.assumptions[0]
    assert "same ones" in jetmoe(routing="worst").assumptions[0]


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
    balanced = trace(plan, marks_modules=True)
    assert balanced.has_experts
    assert not balanced.depends_on_routing

    def one_by_one(plan):
        config = model_config(plan)
        config._experts_implementation = "eager"
        return config

    monkeypatch.setattr("toolkit.memory.trace.run.model_config", one_by_one)
    looped = estimate(plan)
    worst = trace(plan, marks_modules=True, routing="worst")
    assert worst.depends_on_routing
    assert looped.worst_routing_peak_bytes == estimate(plan, traced=worst).peak_allocated_bytes
    assert looped.to_dict()["worst_routing_peak_bytes"] == looped.worst_routing_peak_bytes


def test_a_dense_model_has_no_worst_routing():
    job = {"model": {"name": "smollm2-135m", "init": "random"}, "cluster": {"gpu": "h100-sxm-80gb"}}
    assert estimate(tk.resolve(tk.Job.model_validate(job))).worst_routing_peak_bytes is None
