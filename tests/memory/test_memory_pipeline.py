"""Ranks of a pipeline: what each holds, as the engine's own loop shows, and which cut makes all of them fit."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from staged_run import direct, in_whole_blocks, peaks_of, predicted, staged_job, staged_plan
from traced_models import traced

from toolkit.errors import PlanError
from toolkit.memory.engines.settings import engine_settings
from toolkit.memory.engines.step_program import StepProgram
from toolkit.memory.estimate import estimate
from toolkit.memory.scenario import Scenario
from toolkit.memory.search.compare import compare, read_strategies
from toolkit.memory.search.estimator import Estimator
from toolkit.memory.trace.events import held
from toolkit.memory.trace.run import trace_ranks
from toolkit.pipeline_parallel import StageSpec
from toolkit.pipeline_schedule import Backward, Forward
from toolkit.planning.resolve import resolve

FOUR: dict[str, Any] = {"pipeline": 4, "config": {"num_hidden_layers": 8}}
EIGHT_LAYERS: dict[str, Any] = {"num_hidden_layers": 8}
TIED: dict[str, Any] = {"tie_word_embeddings": True}
# Windows and full attention in turn, both on each of three stages.
WINDOWS: dict[str, Any] = {"num_hidden_layers": 6, "layer_types": ["sliding_attention", "full_attention"] * 3}
INTERLEAVED: dict[str, Any] = {"pipeline": 2, "pipeline_schedule": "interleaved", "virtual_stages": 2}
SPLIT: dict[str, Any] = {"pipeline_schedule": "zb-h1"}
LORA: dict[str, Any] = {"method": "lora", "lora": {"r": 4}}
SUMS: dict[str, Any] = {"gradient_accumulation_dtype": "fp32"}

# Name of the model, values of the job, and the rank that is run.
COURSES: dict[str, tuple[str, dict[str, Any], int]] = {
    "the first of four": ("llama", FOUR, 0),
    "the last of four": ("llama", FOUR, 3),
    "gpipe, the last": ("llama", {"pipeline": 2, "pipeline_schedule": "gpipe"}, 1),
    "interleaved, the first": ("llama", INTERLEAVED | {"config": EIGHT_LAYERS}, 0),
    "interleaved, the last": ("llama", INTERLEAVED | {"config": EIGHT_LAYERS}, 1),
    "tied": ("llama", {"pipeline": 2, "config": TIED}, 1),
    "adapters": ("llama", {"pipeline": 2, "train": LORA}, 0),
    "sums in fp32": ("llama", {"pipeline": 2, "train": SUMS}, 0),
    "recomputing": ("llama", {"pipeline": 2, "train": {"gradient_checkpointing": True}}, 0),
    "windows and full attention": ("gemma3_text", {"pipeline": 3, "config": WINDOWS}, 1),
    "chunked loss, the first": ("llama", {"pipeline": 2, "train": {"loss": "chunked"}}, 0),
    "chunked loss, the last": ("llama", {"pipeline": 2, "train": {"loss": "chunked"}}, 1),
    "split, the first": ("llama", SPLIT | FOUR, 0),
    "split, in the midst": ("llama", SPLIT | FOUR, 2),
    "split, the last": ("llama", SPLIT | FOUR | {"train": SUMS}, 3),
    "split, virtual stages": ("llama", INTERLEAVED | SPLIT | {"config": EIGHT_LAYERS}, 0),
    "split, virtual stages, the last": ("llama", INTERLEAVED | SPLIT | {"config": EIGHT_LAYERS}, 1),
    "split, recomputing": ("llama", SPLIT | FOUR | {"train": {"gradient_checkpointing": True}}, 2),
    "split, norms behind": ("olmo2", SPLIT | {"pipeline": 2}, 1),
}


# Each kind of schedule and of what a stage holds once, interleaved ones in test_memory_pipeline_cards.py; the rest of the table is `full`.
QUICK = ("tied", "split, the last")


@pytest.mark.parametrize(
    "name", [each if each in QUICK else pytest.param(each, marks=pytest.mark.full) for each in COURSES]
)
def test_a_rank_holds_what_the_engines_own_loop_shows(tmp_path, monkeypatch, name):
    model, values, pp_rank = COURSES[name]
    # As many micro-batches as fill the pipeline, and two more.
    train = {"gradient_accumulation_steps": values["pipeline"] + 2, **values.get("train", {})}
    plan = staged_plan(tmp_path, model, **values | {"train": train})
    assert predicted(plan, pp_rank) == direct(plan, pp_rank, monkeypatch)


@pytest.mark.parametrize(
    ("name", "way", "chunks"),
    [
        pytest.param("llama", "ZeRO-3", (range(1, 5),), marks=pytest.mark.full),
        pytest.param("gemma3_text", "plain", (range(7),), marks=pytest.mark.full),
        pytest.param("gemma3_text", "plain", (range(2, 3), range(4, 14)), marks=pytest.mark.full),
        pytest.param("llama", "half of the layers checkpointed", (range(6),), marks=pytest.mark.full),
        ("llama", "every second layer", (range(1, 4),)),
    ],
)
def test_few_layers_of_a_stage_give_what_all_give(name, way, chunks):
    part = StageSpec(chunks=chunks, num_layers=14 if name == "gemma3_text" else 6)
    few, whole = (traced(name, way, part=part, all_layers=every) for every in (False, True))
    assert [field for field in few.__slots__ if getattr(few, field) != getattr(whole, field)] in (
        ["num_traced_layers"],
        [],
    )
    for chunk in few.chunks:
        handed = chunk.sent_bytes + chunk.reported_bytes
        left = held((*chunk.forward, *chunk.backward, *chunk.after))
        assert left == {}, "what is handed over is counted apart"
        assert handed > 0 or part.first


def test_the_first_rank_of_four_holds_four_micro_batches_under_1f1b_and_all_under_gpipe(tmp_path):
    plan = staged_plan(tmp_path, **FOUR)
    trace = trace_ranks(plan, marks_modules=False)[0]
    one = sum(held(trace.chunks[0].forward).values())

    def forward_passes(count: int) -> int:
        order = tuple(Forward(chunk=0, micro_batch=index) for index in range(count))
        back = tuple(Backward(chunk=0, micro_batch=index) for index in range(count))
        return peaks_of(
            trace, engine_settings(plan), StepProgram(actions=(*order, *back), num_micro_batches=8, reduces_once=True)
        )["forward"]

    # Besides it has the gradient that it awaits, and its weights' gradients of the micro-batches before.
    awaited = trace.chunks[0].gradient_bytes
    gradients = sum(in_whole_blocks(parameter.size) for parameter in trace.parameters)
    assert predicted(plan, 0)["forward"] == forward_passes(4) + awaited + gradients
    assert forward_passes(4) - forward_passes(1) == 3 * one
    gpipe = staged_plan(tmp_path, **FOUR, pipeline_schedule="gpipe")
    assert predicted(gpipe, 0)["forward"] == forward_passes(8) + awaited
    last = trace_ranks(gpipe, marks_modules=False)[3]
    logits = held(last.chunks[0].forward)["logits and loss"]
    growth = predicted(gpipe, 3)["forward"] - predicted(plan, 3)["forward"]
    assert growth >= 7 * logits, "the last stage keeps the logits of all micro-batches until the first backward pass"


@pytest.mark.parametrize(
    ("stage", "config"),
    [
        pytest.param(
            stage, config, id=f"{stage}-{name}", marks=[pytest.mark.full] if (stage == 2) == bool(config) else []
        )
        for stage in (1, 2, 3)
        for name, config in (("untied", {}), ("tied", TIED))
    ],
)
def test_the_stages_add_up_to_the_model(tmp_path, stage, config):
    """Parameters, gradients and optimizer states; a tied weight is there twice, and exported once."""
    whole_job = staged_job(tmp_path, config=config, zero_stage=stage, gpus=2)
    cut_plan = staged_plan(tmp_path, config=config, zero_stage=stage, pipeline=2, gpus=4)
    (whole,), stages = (trace_ranks(plan, marks_modules=stage == 3) for plan in (resolve(whole_job), cut_plan))
    copied = [p for trace in stages for p in trace.parameters if p.name in trace.copies]
    assert bool(copied) == bool(config)
    names = Counter(p.name for trace in stages for p in trace.parameters if p.name not in trace.copies)
    assert names == Counter(p.name for p in whole.parameters)
    total = sum(p.numel for p in whole.parameters) + sum(p.numel for p in copied)
    report, dense = estimate(cut_plan, traced=stages), estimate(resolve(whole_job), traced=whole)
    found: Counter[str] = Counter()
    for rank in report.ranks:
        found += Counter(rank.phases["save"].causes)
    # Flat buffers are aligned, and partitions of single parameters rounded up: a few elements each.
    few = 16 * 512 * len(report.ranks)
    assert found["master parameters"] == pytest.approx(4 * total, abs=few)
    assert found["optimizer state"] == pytest.approx(8 * total, abs=few)
    parameters = "parameter partitions" if stage == 3 else "parameters"
    assert found[parameters] == pytest.approx((1 if stage == 3 else 2) * 2 * total, abs=few)
    accounted = [trace.chunks[0] for trace in stages]
    marks = [m for chunk in accounted for m in chunk.backward if getattr(m.event, "kind", "") == "gradient"]
    assert sum(mark.event.size for mark in marks) == sum(
        in_whole_blocks(p.size) for trace in stages for p in trace.parameters
    )
    assert report.disk.export_bytes == dense.disk.export_bytes


def test_stages_in_the_middle_that_are_alike_are_traced_once(tmp_path):
    plan = staged_plan(tmp_path, **FOUR, partition=[2, 2, 2, 2])
    traces = trace_ranks(plan, marks_modules=False)
    assert traces[1] is traces[2]
    report = estimate(plan)
    assert [rank.coordinate.pp for rank in report.ranks] == [0, 1, 2, 3]
    assert [trace.num_traced_layers for trace in traces] == [2, 2, 2, 2]
    assert report.num_layers == 8


def test_every_rank_has_every_phase_and_the_fullest_decides(tmp_path):
    data = {"train": "train.jsonl", "validation_fraction": 0.1}
    train = {"eval_steps": 5, "per_device_eval_batch_size": 2}
    plan = staged_plan(tmp_path, pipeline=2, gpus=4, zero_stage=3, train=train, data=data)
    report = estimate(plan)
    assert [(rank.coordinate.pp, rank.coordinate.dp) for rank in report.ranks] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for rank in report.ranks:
        assert list(rank.phases) == ["init", "forward", "backward", "step", "evaluation", "save"]
        assert all(sum(phase.causes.values()) == phase.allocated_bytes for phase in rank.phases.values())
    assert report.required_bytes == max(rank.required_bytes for rank in report.ranks)
    found = report.to_dict()
    assert found["ranks"][report.fullest.rank]["required_bytes"] == found["required_bytes"]
    assert sum(report.host.bytes_on_node.values()) == report.host.bytes_per_node
    assert "logits and loss" not in report.ranks[0].phases["forward"].causes
    assert "embeddings" not in report.ranks[2].phases["backward"].causes


def test_zero3_keeps_layers_gathered_only_where_passes_alternate(tmp_path):
    """Where forward passes follow each other, DeepSpeed learns an order without backward passes, and lets go at once."""
    eager = {"zero_optimization": {"stage3_prefetch_bucket_size": 0, "stage3_param_persistence_threshold": 0}}
    plan = staged_plan(tmp_path, **FOUR, zero_stage=3, gpus=8, deepspeed=eager)
    traces = trace_ranks(plan, marks_modules=True)
    gathered = [rank.phases["forward"].causes.get("parameters gathered", 0) for rank in estimate(plan).ranks[::2]]
    sizes = [sorted(in_whole_blocks(p.size) for p in trace.parameters) for trace in traces]
    assert gathered[3] >= sum(sizes[3]) - sizes[3][-1], "the last rank's backward pass follows at once"
    for own, held_at_once in zip(sizes[:3], gathered[:3], strict=True):
        assert held_at_once <= 2 * own[-1]


@pytest.mark.parametrize(
    ("values", "options", "code"),
    [
        ({}, {"deepspeed_config": {"zero_optimization": {"stage": 1}}}, "ESTIMATE_FILE"),
    ],
)
def test_what_cannot_be_estimated_is_refused(tmp_path, values, options, code):
    plan = staged_plan(tmp_path, pipeline=2)
    with pytest.raises(PlanError) as refused:
        estimate(replace(plan, settings=replace(plan.settings, **values)), **options)
    assert refused.value.codes == (code,)


def test_strategies_of_a_pipeline_are_compared(tmp_path):
    case = Scenario.of(staged_job(tmp_path, gpus=4, config=EIGHT_LAYERS, partition=[3, 5], pipeline=2))
    rows = list(compare(Estimator(), case, read_strategies("pp2,pp4,zero2-tp2-pp2,zero3,ddp")))
    assert [row.outcome.problems for row in rows] == [()] * 5
    sizes = [(row.outcome.plan.grid.pp, row.outcome.plan.grid.tp) for row in rows if row.outcome.plan is not None]
    assert sizes == [(2, 1), (4, 1), (2, 2), (2, 1), (1, 1)]
    partitions = [row.outcome.plan.settings.partition for row in rows if row.outcome.plan is not None]
    assert partitions[0] == partitions[3] == (3, 5), "the job's own list, where it has as many stages"
    assert len(partitions[1]) == 4


@pytest.mark.parametrize("stage", [2, 3])
def test_a_share_of_the_gradients_takes_the_place_of_all(tmp_path, stage):
    """Sums in fp32 take 4 bytes a parameter, partitions of them as much over the replicas."""
    train = {"gradient_accumulation_dtype": "fp32"}
    kept = {
        zero_stage: held_between_passes(
            staged_plan(tmp_path, gpus=4, pipeline=2, zero_stage=zero_stage, train=train, config={"vocab_size": 4096})
        )
        for zero_stage in (1, stage)
    }
    plan = staged_plan(tmp_path, gpus=4, pipeline=2, train=train, config={"vocab_size": 4096})
    for pp_rank, trace in enumerate(trace_ranks(plan, marks_modules=False)):
        numel = sum(parameter.numel for parameter in trace.parameters)
        assert kept[1][pp_rank] == pytest.approx(4 * numel, rel=0.02)
        assert kept[stage][pp_rank] == pytest.approx(4 * numel / 2, rel=0.02)


def held_between_passes(plan):
    """Bytes of gradients and their sums that each pipeline rank holds when the forward passes of a step are at their peak."""
    causes = ("gradients", "gradient sums in fp32", "accumulated gradients", "gradient partition")
    found = []
    for pp_rank in range(plan.grid.pp):
        rank = plan.grid.rank(type(plan.grid.coordinate(0))(pp=pp_rank, dp=0, tp=0))
        causes_held = estimate(plan).ranks[rank].phases["forward"].causes
        found.append(sum(causes_held.get(cause, 0) for cause in causes))
    return found
