"""The foreseen time of a step: how it follows from the plan, and what it says of itself."""

import json
import math

import pytest
from tiny_plans import tiny_plan

import toolkit as tk
from toolkit.catalog.gpus import find_gpu, load_catalogue
from toolkit.catalog.speed import CardSpeed, measured_speed, speed_of
from toolkit.config.job import Job
from toolkit.cost import step_time
from toolkit.cost.learned import save_speeds, speed_path
from toolkit.memory.trace.run import trace_ranks

CARD = "h200-sxm-141gb"
SHAPE = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 6,
    "vocab_size": 32000,
    "num_attention_heads": 8,
    "max_position_embeddings": 4096,
}


def plan(*, gpu=CARD, **options):
    train = {
        "precision": "bf16",
        "sequence_length": 2048,
        "per_device_train_batch_size": 16,
        "gradient_accumulation_steps": 1,
        "gradient_checkpointing": False,
        **options.pop("train", {}),
    }
    return tiny_plan(ranks=options.pop("ranks", 1), gpu=gpu, train=train, config=SHAPE, **options)


def time_of(**options):
    made = plan(**options)
    return step_time(made, trace_ranks(made, marks_modules=made.settings.zero_stage == 3))


def test_the_parts_add_up_and_the_range_holds_the_time():
    time = time_of()
    assert sum(time.parts.values()) == pytest.approx(time.seconds)
    assert time.low < time.seconds < time.high
    assert time.tokens_per_step == 16 * 2048
    assert time.tokens_per_second == pytest.approx(time.tokens_per_step / time.seconds)
    assert 0 < time.model_flops_utilization < 0.8
    assert time.measured
    assert json.loads(json.dumps(time.to_dict())) == time.to_dict()


def test_frozen_layers_leave_out_their_part_of_the_backward_pass():
    plain, frozen = time_of(), time_of(train={"freeze": ["embed", r"layers\.[0-3]\."]})
    assert frozen.seconds < plain.seconds
    work = frozen.model_flops_utilization * frozen.seconds / (plain.model_flops_utilization * plain.seconds)
    assert 0.5 < work < 0.75, "layers 4 and 5, and the head, are trained"


def test_recomputation_costs_time():
    plain, again = time_of(), time_of(train={"gradient_checkpointing": True})
    assert again.seconds > plain.seconds
    assert again.parts["recomputation"] > 0
    assert "recomputation" not in plain.parts


def test_fsdp2_takes_longer_with_shards_in_ram_and_steps_more_with_replicas():
    def of(**fsdp2):
        return time_of(ranks=4, parallel={"strategy": "fsdp2", "zero_stage": None, "fsdp2": fsdp2})

    plain, on_host, replicas = of(), of(cpu_offload=True), of(dp_replicate_size=2)
    assert on_host.seconds > plain.seconds
    assert on_host.parts["offload"] > 0
    assert on_host.parts["optimizer on the host"] > plain.parts["optimizer"]
    assert on_host.high / on_host.seconds > plain.high / plain.seconds
    assert replicas.parts["optimizer"] == pytest.approx(2 * plain.parts["optimizer"])


@pytest.mark.parametrize(
    ("word", "train", "ddp"),
    [
        ("orthogonal", {"optimizer": "muon"}, {}),
        ("comm_hook=power_sgd", {"max_steps": 2000}, {"comm_hook": "power_sgd"}),
    ],
)
def test_what_is_left_out_of_the_time_is_said(word, train, ddp):
    time = time_of(ranks=2, train=train, parallel={"strategy": "ddp", "zero_stage": None, "ddp": ddp})
    assert any(word in line for line in time.assumptions)


def test_accumulation_shares_the_optimizer_among_micro_batches():
    one, four = time_of(), time_of(train={"gradient_accumulation_steps": 4})
    assert one.seconds * 2.8 < four.seconds < one.seconds * 4
    assert four.parts["optimizer"] == pytest.approx(one.parts["optimizer"])


def test_more_cards_give_more_tokens_and_pay_for_collectives():
    one, four = time_of(), time_of(ranks=4)
    assert one.tokens_per_second * 2 < four.tokens_per_second < one.tokens_per_second * 4.2
    assert four.parts["collectives"] > 0


def test_an_optimizer_on_the_host_takes_longer():
    card, beside = time_of(), time_of(parallel={"offload": "optimizer-cpu"})
    host = time_of(parallel={"offload": "optimizer-cpu", "offload_engine": "deepspeed"})
    assert host.seconds > 1.3 * card.seconds
    assert host.parts["optimizer on the host"] > host.parts.get("optimizer", 0)
    assert card.seconds < beside.seconds < host.seconds


def test_layers_that_are_streamed_cost_what_the_passes_do_not_hide():
    made = plan(parallel={"offload": "full-cpu", "offload_engine": "overlapped"})
    traces, speed = trace_ranks(made), measured_speed(CARD)
    fast = step_time(made, traces, speed=speed)
    assert "layers on their way" not in fast.parts
    slow = step_time(made, traces, speed=speed.model_copy(update={"pcie_bytes_per_second": 1e9}))
    layers = sum(one.size for one in traces[0].parameters if ".layers." in f".{one.name}")
    moved = layers * 1.5 / 1e9  # six layers forward, and backward those that are not there any more
    passes = sum(fast.parts.values()) - fast.parts["optimizer on the host"]
    assert slow.parts["layers on their way"] == pytest.approx(moved - passes, rel=0.05)


def test_a_tiny_batch_is_bound_by_the_host_and_says_so():
    time = time_of(train={"sequence_length": 128, "per_device_train_batch_size": 1})
    assert time.host_bound
    assert "bound by the host" in str(time)
    assert time.high / time.seconds > 1.2


def test_a_pipeline_waits_for_its_other_stages():
    few = time_of(ranks=2, parallel={"pipeline": 2, "zero_stage": 1}, train={"gradient_accumulation_steps": 2})
    many = time_of(ranks=2, parallel={"pipeline": 2, "zero_stage": 1}, train={"gradient_accumulation_steps": 16})
    waits = [time.parts["waiting for other stages"] / time.seconds for time in (few, many)]
    assert waits[0] > 1.5 * waits[1] > 0


@pytest.mark.full
def test_ranks_that_share_rows_pay_for_their_exchanges():
    """Four all-to-alls of a layer in each pass: queries, keys, values and the output."""
    train = {"sequence_length": 4096, "per_device_train_batch_size": 1, "gradient_checkpointing": False}
    shared = time_of(ranks=2, parallel={"context": 2, "zero_stage": 2}, train=train)
    alone = time_of(ranks=2, parallel={"zero_stage": 2}, train=train)
    assert shared.tokens_per_step == alone.tokens_per_step / 2
    made = plan(ranks=2, parallel={"context": 2, "zero_stage": 2}, train=train)
    [trace] = trace_ranks(made)
    for phase in ("forward", "backward"):
        sent = [one.count for one in trace.operations if one.kind == "collective" and one.phase == phase]
        assert sum(sent) == 4 * trace.num_layers
    assert shared.parts["context parallelism"] > 0
    assert shared.parts["products"] == pytest.approx(alone.parts["products"] / 2, rel=0.1)
    assert shared.parts["attention"] == pytest.approx(alone.parts["attention"] / 2, rel=0.1)


def test_tensor_ranks_pay_for_their_reductions():
    time = time_of(ranks=2, parallel={"tensor": 2, "zero_stage": 1})
    assert time.parts["tensor parallelism"] > 0


def test_a_card_without_figures_is_scaled_and_says_so():
    time = time_of(gpu="a100-sxm-80gb")
    assert not time.measured
    assert "a100-sxm-80gb was not measured" in time.assumptions[0]
    assert time.high / time.seconds > 1.25
    fast = time_of()
    assert 2 < time.seconds / fast.seconds < 4  # 312 of 989 TFLOP/s, 2.0 of 4.8 TB/s


def test_every_card_of_the_catalogue_has_figures_of_its_own_or_by_analogy():
    for gpu in load_catalogue().values():
        speed, told = speed_of(gpu)
        assert isinstance(speed, CardSpeed)
        assert (told is None) == (measured_speed(gpu.name) is not None)
        assert math.isfinite(speed.product_flops_per_second)


def test_each_measured_figure_has_its_source():
    speed = measured_speed(CARD)
    assert set(speed.sources) == {name for name in type(speed).model_fields if name != "sources"}
    assert all("benchmarks/" in source or "docs/" in source for source in speed.sources.values())
    with pytest.raises(ValueError, match="sources"):
        CardSpeed.model_validate({**speed.model_dump(), "sources": {}})


def test_a_plan_of_a_real_job_reaches_the_utilization_that_its_tokens_mean():
    job = {
        "model": {"name": "llama-3.2-3b", "init": "random"},
        "cluster": {"gpu": CARD},
        "train": {"sequence_length": 4096, "max_steps": 4, "per_device_train_batch_size": 4},
        "parallel": {"zero_stage": 2},
    }
    made = tk.resolve(Job.model_validate(job))
    time = step_time(made, trace_ranks(made))
    operations = 6 * 3_212_749_824 + 6 * 28 * 24 * 128 * 4096
    peak = find_gpu(CARD).dense_bf16_flops_per_second
    assert time.model_flops_utilization == pytest.approx(time.tokens_per_second * operations / peak, rel=1e-3)


def test_frozen_weights_count_without_the_gradients_that_they_do_not_have():
    full, adapters = time_of(), time_of(train={"method": "lora", "lora": {"r": 16}})
    shape = plan()
    active = (
        sum(each.dense_numel for each in trace_ranks(shape)[0].parameters) - 32000 * 1024
    )  # the embedding is looked up
    scores = 6 * 6 * 1024 * 2048
    rate = adapters.model_flops_utilization / adapters.tokens_per_second
    assert rate < full.model_flops_utilization / full.tokens_per_second
    peak = find_gpu(CARD).dense_bf16_flops_per_second
    made = plan(train={"method": "lora", "lora": {"r": 16}})
    trained = sum(each.dense_numel for each in trace_ranks(made)[0].parameters if each.trainable)
    assert rate * peak == pytest.approx(4 * active + 6 * trained + scores, rel=1e-3)


def test_figures_that_this_machine_has_learned_take_the_place_of_the_catalogues(tmp_path, monkeypatch):
    made, base = plan(), measured_speed(CARD)
    usual = step_time(made)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    save_speeds(
        speed_path(), {CARD: base.model_copy(update={"product_flops_per_second": base.product_flops_per_second / 2})}
    )
    slower = step_time(made)
    assert slower.parts["products"] > 1.8 * usual.parts["products"]
    assert step_time(made, speed=base).seconds == usual.seconds


def test_whole_experts_move_fewer_rows_send_as_much_and_say_what_they_assume():
    def of(experts, choices=2, **parallel):
        made = tiny_plan(
            "mixtral",
            ranks=4,
            gpu=CARD,
            parallel={"zero_stage": 1, "tensor": 4, "experts": experts, **parallel},
            train={
                "precision": "bf16",
                "sequence_length": 2048,
                "per_device_train_batch_size": 16,
                "gradient_checkpointing": False,
            },
            config={**SHAPE, "num_local_experts": 8, "num_key_value_heads": 8, "num_experts_per_tok": choices},
        )
        return step_time(made, trace_ranks(made))

    sliced, whole = of("sliced"), of("whole")
    assert whole.parts["element-wise"] < 0.85 * sliced.parts["element-wise"]
    assert whole.parts["products"] == pytest.approx(sliced.parts["products"], rel=0.2)
    assert whole.parts["tensor parallelism"] == pytest.approx(sliced.parts["tensor parallelism"])
    assert whole.high / whole.seconds > sliced.high / sliced.seconds
    assert any("equally often" in said for said in whole.assumptions)
    assert not any("equally often" in said for said in sliced.assumptions)
    # In pieces of the sequence whole experts gather and scatter where sliced ones gather and sum, and send a token only where its experts are
    # if these are fewer than the ranks.
    pieces = [
        of(way, choices, sequence_parallel=True).parts["tensor parallelism"]
        for way, choices in (("sliced", 2), ("whole", 4), ("whole", 2))
    ]
    assert pieces[1] < 0.9 * pieces[0]
    assert pieces[2] < 0.9 * pieces[1]
