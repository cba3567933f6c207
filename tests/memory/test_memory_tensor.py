"""Models that tensor ranks share: the trace is one rank's, and the ledger what each rank keeps."""

from __future__ import annotations

import pytest
import torch
from deepspeed.utils import set_z3_leaf_module
from ranks import run_distributed
from traced_models import BATCH, LENGTH, config_of, peaks, traced
from transformers import AutoModelForCausalLM

from toolkit.catalog.gpus import find_gpu
from toolkit.config.job import Job
from toolkit.distributed.fake import fake_group
from toolkit.introspect import decoder_layers
from toolkit.memory.scenario import Scenario
from toolkit.memory.search.advice import candidates, find_savings
from toolkit.memory.search.choose_gpu import Count, batch_on, counts
from toolkit.memory.search.compare import read_strategies
from toolkit.memory.search.estimator import Estimator
from toolkit.memory.search.tracing import shared_key
from toolkit.memory.trace.events import held
from toolkit.modeling.build import BuildOptions, shard_model
from toolkit.planning.checkpoint_size import disk_use

TOKENS, LAYERS, INNER, HEADS, KEY_HEADS, HEAD = BATCH * LENGTH, 6, 48, 4, 2, 8
BF16, FP32 = 2, 4
LORA_ZERO3 = {"marks_modules": True, "keeps_inputs": True}


FULL = [
    ("llama", "ZeRO-3 with checkpointing", 2, {}),
    ("llama", "LoRA with checkpointing", 2, LORA_ZERO3),
    ("llama", "ZeRO-3 with checkpointing", 2, {"sequence_parallel": True}),
    ("gemma3_text", "LoRA with checkpointing", 2, LORA_ZERO3),  # frozen norms of query and key heads
    ("opt", "ZeRO-3", 4, {}),
    ("mixtral", "ZeRO-3", 2, {}),
    ("olmoe", "fp32", 2, {}),
]


@pytest.mark.parametrize(
    ("name", "way", "tensor", "options"),
    [
        ("llama", "plain", 4, {}),  # two ranks hold each key head
        ("llama", "LoRA with checkpointing", 2, {**LORA_ZERO3, "sequence_parallel": True}),  # norms frozen under hooks
        pytest.param("qwen3_moe", "plain", 2, {"sequence_parallel": True}, marks=pytest.mark.full),
        ("gpt2", "ZeRO-3", 2, {}),  # draws dropout for shards
        *(pytest.param(*values, marks=pytest.mark.full) for values in FULL),
    ],
)
def test_few_layers_give_what_all_give(name, way, tensor, options):
    few, whole = (traced(name, way, tensor=tensor, all_layers=every, **options) for every in (False, True))
    assert few.num_traced_layers < whole.num_traced_layers
    differing = [field for field in few.__slots__ if getattr(few, field) != getattr(whole, field)]
    assert differing == ["num_traced_layers"]
    assert held((*few.forward, *few.backward, *few.after)) == {}, "what a micro-batch allocates is gone after it"


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("llama", 2),
        ("llama", 4),
        ("mixtral", 2),
        *(pytest.param(*each, marks=pytest.mark.full) for each in (("gpt2", 4), ("opt", 2))),
    ],
)
def test_the_shards_of_all_ranks_are_the_model(name, tensor):
    with torch.device("meta"):
        dense = AutoModelForCausalLM.from_config(config_of(name), attn_implementation="eager")
    trace = traced(name, tensor=tensor)
    assert {p.name: p.dense_numel for p in trace.parameters} == {n: p.numel() for n, p in dense.named_parameters()}
    copies = {p.name: tensor * p.numel / p.dense_numel for p in trace.parameters}
    for parameter, times in copies.items():
        if "norm" in parameter or ".ln_" in parameter or "position" in parameter or ".wpe." in parameter:
            assert times == tensor, parameter
        elif ("k_proj" in parameter or "v_proj" in parameter) and name == "llama":
            assert times == tensor / KEY_HEADS if tensor > KEY_HEADS else 1, parameter
    assert copies[next(iter(copies))] == 1, "the vocabulary of 64 rows needs no padding"
    assert trace.num_replicas == (2 if (name, tensor) == ("llama", 4) else 1)


def test_activations_inside_the_layers_shrink_with_the_ranks_and_those_outside_do_not():
    """Llama, by hand: what a layer keeps from forward to backward, a rank."""
    whole = held(traced("llama").forward)
    for tensor in (1, 2):
        kept = held(traced("llama", tensor=tensor).forward)
        # gate, up, silu(gate) and their product
        assert kept["layers: MLP"] == LAYERS * 4 * TOKENS * INNER * BF16 // tensor
        # rotated queries and keys, values, the output, and its log-sum-exp
        heads = 2 * HEADS + 2 * KEY_HEADS
        assert kept["layers: attention"] == LAYERS * TOKENS * (heads * HEAD * BF16 + HEADS * FP32) // tensor
        assert kept["layers: residual stream and norms"] == whole["layers: residual stream and norms"]


def test_with_sequence_parallelism_what_lies_between_the_layers_shrinks_too():
    whole, pieces = (held(traced("llama", tensor=2, sequence_parallel=each).forward) for each in (False, True))
    stream = "layers: residual stream and norms"
    kept = {cause: pieces[cause] for cause in ("layers: MLP", "layers: attention")}
    assert kept == {cause: whole[cause] for cause in kept}
    assert pieces[stream] == pytest.approx(whole[stream] / 2, rel=0.05)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_sharded_layers_are_leaves_of_zero3_as_deepspeed_marks_them(name):
    def flagged(model):
        return [path for path, module in model.named_modules() if getattr(module, "_z3_leaf", False)]

    with torch.device("meta"):
        ours, theirs = (AutoModelForCausalLM.from_config(config_of(name, attn_pdrop=0.0)) for _ in range(2))
    with fake_group(2) as group:
        shard_model(ours, BuildOptions(), tp_group=group, part=None)
    for layer in decoder_layers(theirs):
        set_z3_leaf_module(layer, True)
    assert flagged(ours) == flagged(theirs) != []


def trace_beside_real_groups(rank: int) -> tuple[dict[str, int], float]:
    found = peaks(traced("llama", tensor=4))
    total = torch.ones(1)
    torch.distributed.all_reduce(total)
    return found, total.item()


@pytest.mark.gloo
def test_a_rank_of_a_real_run_traces_a_group_of_another_size():
    assert run_distributed(trace_beside_real_groups, 2) == [(peaks(traced("llama", tensor=4)), 2.0)] * 2


def case_of(*, gpus: int, tensor: int, model: str = "llama-3.2-1b", stage: int = 1, **train) -> Scenario:
    values = {"sequence_length": 512, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, **train}
    cluster = {"gpu": "h100-sxm-80gb", "gpus_per_node": gpus}
    parallel = {"zero_stage": stage, "tensor": tensor}
    return Scenario.of(Job.model_validate({"model": model, "cluster": cluster, "train": values, "parallel": parallel}))


@pytest.fixture(scope="module")
def estimator() -> Estimator:
    return Estimator()


def test_an_estimate_is_of_each_tensor_rank(estimator):
    case = case_of(gpus=4, tensor=2)
    report, dense = estimator.estimate(case), estimator.estimate(case_of(gpus=2, tensor=1))
    assert [(rank.coordinate.dp, rank.coordinate.tp) for rank in report.ranks] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    first, second = report.ranks[0], report.ranks[1]
    assert first.phases == second.phases, "tensor ranks hold shards of the same sizes"
    whole, part = (each.phases["init"].causes["parameters"] for each in (dense.ranks[0], first))
    assert part == pytest.approx(whole / 2, rel=1e-3)  # norms are whole on each rank
    assert first.peak_allocated_bytes < 0.6 * dense.ranks[0].peak_allocated_bytes
    assert report.num_communicators == 3  # the world's, the data ranks', the tensor ranks'
    assert report.disk.export_bytes == dense.disk.export_bytes
    assert dense.checkpoint_bytes < report.checkpoint_bytes < 1.001 * dense.checkpoint_bytes


def test_key_heads_on_several_ranks_are_stored_by_each_and_cost_a_communicator(estimator):
    eight = case_of(gpus=8, tensor=8, model="qwen2.5-7b")  # 28 query heads
    with pytest.raises(Exception, match="TP_HEADS"):
        eight.plan()
    case = case_of(gpus=4, tensor=4, model="qwen2.5-1.5b")  # 12 query heads, 2 key heads
    plan = case.plan()
    report = estimator.estimate_plan(plan, case)
    assert report.num_communicators == 2  # all ranks are tensor ranks; two of them share each key head
    dense = report.disk.export_bytes // 2
    assert report.checkpoint_bytes > disk_use(plan, total=dense // 4, trainable=dense // 4).checkpoint_bytes


def test_a_trace_is_of_one_number_of_tensor_ranks():
    keys = {shared_key(case_of(gpus=4, tensor=tensor).plan()) for tensor in (1, 2, 4)}
    assert len(keys) == 3


def test_strategies_with_tensor_ranks_have_names():
    plain, sharded, ddp = read_strategies("zero1,zero1-tp2-no-checkpointing,ddp")
    assert "parallel.tensor" not in plain.values
    assert sharded.values["parallel.tensor"] == 2
    assert sharded.values["train.gradient_checkpointing"] is False
    assert ddp.values["parallel.tensor"] == 1, "DDP knows none"
    assert ddp.values["parallel.sequence_parallel"] is ddp.values["parallel.experts"] is None
    for name in ("ddp-tp2", "zero1-tp0", "tp2"):
        with pytest.raises(Exception, match="COMPARE_STRATEGY"):
            read_strategies(name)


def test_advice_offers_twice_the_tensor_ranks_and_keeps_the_global_batch():
    case = case_of(gpus=4, tensor=2)
    plan = case.plan()
    [change] = [change for change in candidates(plan) if change.kind == "tensor"]
    changed = case.changed(change.values).plan()
    assert (changed.grid.tp, changed.grid.dp) == (4, 1)
    assert changed.settings.batch.train == plan.settings.batch.train
    assert not [change for change in candidates(case_of(gpus=4, tensor=4).plan()) if change.kind == "tensor"]
    gpus = next(change for change in candidates(plan) if change.kind == "gpus")
    assert case.changed(gpus.values).plan().settings.batch.train == plan.settings.batch.train


@pytest.mark.full
def test_advice_offers_tensor_ranks_where_only_more_cards_would_do(estimator):
    train = {"gradient_checkpointing": True, "per_device_train_batch_size": 1, "sequence_length": 16_384}
    case = case_of(gpus=4, tensor=1, stage=3, **train)
    card = {"name": "small", "memory_gib": 6, "compute_capability": 8.9}
    small = case.changed({"cluster.gpu": card, "cluster.host_memory_gib": 64})
    report = estimator.estimate(small)
    savings = find_savings(estimator, small, plan=small.plan(), report=report, at_most=9)
    offered = {saving.change.kind: saving for saving in savings}
    assert not report.fits
    assert not any(saving.fits for kind, saving in offered.items() if kind not in ("gpus", "tensor"))
    assert offered["tensor"].saved_bytes > 0
    assert offered["tensor"].to_dict()["set"]["parallel.tensor"] == 2


def test_cards_are_counted_in_whole_tensor_groups_and_batches_by_data_ranks():
    gpu = find_gpu("h100-sxm-80gb")
    assert [count.total for count in counts(gpu, tensor=4)][:3] == [4, 8, 16]
    plan = case_of(gpus=4, tensor=2).plan()
    batch = batch_on(plan, Count(nodes=1, gpus_per_node=8))
    assert (batch.dp_size, batch.train) == (4, plan.settings.batch.train)
