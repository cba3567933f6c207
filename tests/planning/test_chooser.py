"""Defaults go with what the job says: none is refused where another would do."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plan_jobs import CPU, PARALLEL, TRAIN, V100, job_of, jobs, plan_of, problems_of, resolved

from toolkit.errors import PlanError, Problem
from toolkit.planning.chooser import other_defaults

LLAMA = {"model": "llama-3.2-1b"}
COMPILED = {"torch_compile": True}

# The job, then each default that it leads to, with a part of the reason.
FOLLOWED: list[tuple[dict[str, Any], dict[str, tuple[Any, str]]]] = [
    ({"model": "llama-3.1-8b", "ranks": 1, "train": COMPILED}, {"parallel.zero_stage": (2, "3 would be refused: torch_compile=true")}),
    ({"deepspeed": {"zero_optimization": {"stage3_max_live_parameters": 5}}}, {"parallel.zero_stage": (3, "2 would be refused")}),
    ({"model": "llama-3.1-8b", "deepspeed": {"zero_optimization": {"round_robin_gradients": True}}}, {"parallel.zero_stage": (2, "3 would be")}),
    ({**LLAMA, "parallel": {"pipeline": 2}, "deepspeed": {"zero_optimization": {"allgather_bucket_size": 6}}}, {"parallel.zero_stage": (1, "a pipeline")}),
    ({"deepspeed": {"bf16": {"immediate_grad_update": True}}}, {"parallel.zero_stage": (1, "2 would be"), "train.gradient_accumulation_dtype": ("fp32", '"bf16" would be')}),
    ({"gpu": CPU, "parallel": {"offload": "activations-cpu"}}, {"train.gradient_checkpointing": (True, "false would be refused")}),
    ({**LLAMA, "parallel": {"pipeline": 2, "pipeline_schedule": "interleaved"}}, {"parallel.virtual_stages": (2, "1 would be refused")}),
    ({**LLAMA, "parallel": {"pipeline": 2, "partition": [4, 4, 4, 4]}}, {"parallel.virtual_stages": (2, "1 would be"), "parallel.pipeline_schedule": ("interleaved", "virtual")}),
    ({"model": "gpt2", "ranks": 3, "parallel": {"tensor": 3, "sequence_parallel": True}}, {"train.sequence_length": (1023, "1024 would be refused: tensor=3")}),
    ({"model": "llama-3.1-8b", "ranks": 8, "host_memory_gib": 60, "parallel": {"offload": "optimizer-cpu-partial"}}, {"parallel.offload_ratio": (0.4, "0.5 would be refused")}),
    ({"train": {"fp8": {"recipe": "rowwise"}}}, {"train.precision": ("fp8", "train.fp8 sets")}),
    ({"gpu": CPU, "train": {"fp8": {"recipe": "rowwise"}}}, {"train.precision": ("fp8", "train.fp8 sets")}),
    ({"train": {"gradient_accumulation_dtype": "fp16"}}, {"train.precision": ("fp16", "accumulates gradients")}),
    ({"gpu": CPU, "train": {"gradient_accumulation_dtype": "bf16"}}, {"train.precision": ("bf16", "accumulates gradients")}),
    ({"model": "llama-3.2-3b", "ranks": 1, "train": {"precision": "fp32", "gradient_checkpointing": False}}, {"parallel.zero_stage": (0, "nothing to shard")}),
    ({"model": "llama-3.2-3b", "ranks": 1, "train": {"precision": "fp32"}, "deepspeed": {"zero_optimization": {"round_robin_gradients": True}}}, {"parallel.zero_stage": (2, "0 would be refused")}),
    ({"deepspeed": {"fp16": {"loss_scale": 0}}}, {"train.precision": ("fp16", "deepspeed section")}),
]  # fmt: skip


@pytest.mark.parametrize(("sections", "defaults"), FOLLOWED, ids=[next(iter(row[1])) for row in FOLLOWED])
def test_a_default_goes_with_what_the_job_says(sections: dict[str, Any], defaults: dict[str, tuple[Any, str]]) -> None:
    plan = plan_of(**sections)
    for key, (value, reason) in defaults.items():
        (choice,) = [choice for choice in plan.choices if choice.key == key]
        assert (choice.value, choice.source) == (value, "default")
        assert reason in choice.reason


@pytest.mark.parametrize(
    ("code", "key", "sections"),
    [
        # All state on each card, or twice the memory for each number, is no default for the sake of one key.
        ("DEEPSPEED_PRESCALE", "deepspeed.prescale_gradients", {"deepspeed": {"prescale_gradients": True}}),
        ("LOSS_PRECISION", "train.loss", {"gpu": V100, "train": {"loss": "liger"}}),
        ("TP_ZERO_STAGE", "parallel.zero_stage", {"model": "llama-3.1-8b", "parallel": {"tensor": 2, "zero_stage": 0}}),
        # No precision goes with these: what is refused is what the job says.
        ("FP8_UNUSED", "train.fp8", {"gpu": "a100-sxm-80gb", "train": {"fp8": {}}}),
        ("FP8_UNUSED", "train.fp8", {**LLAMA, "train": {"fp8": {}}, "parallel": {"pipeline": 2}}),
        ("COMPILE_ZERO3", "train.torch_compile", {"train": COMPILED, "parallel": {"offload": "full-cpu"}}),
    ],
)
def test_what_no_default_goes_with_is_refused_by_what_the_job_says(
    code: str, key: str, sections: dict[str, Any]
) -> None:
    found = problems_of(**sections)
    assert {(problem.code, problem.key) for problem in found} == {(code, key)}


def test_defaults_that_no_problem_speaks_of_stay() -> None:
    problem = Problem(code="X", key="train.loss", message="a=1 with zero_stage=3", fix="Set train.precision to bf16")
    others = {"parallel.zero_stage": (2, 1), "train.attention": ("eager",), "train.precision": ("bf16",), "train.a": ()}
    tried = list(other_defaults(others, [problem]))
    assert tried == [
        {"parallel.zero_stage": 2}, {"parallel.zero_stage": 1}, {"train.precision": "bf16"},
        {"parallel.zero_stage": 2, "train.precision": "bf16"}, {"parallel.zero_stage": 1, "train.precision": "bf16"},
    ]  # fmt: skip
    assert list(other_defaults(others, [])) == []


@pytest.mark.parametrize(
    ("sections", "told"),
    [
        (
            {"model": "llama-3.1-8b", "train": COMPILED, "parallel": {"offload": "full-cpu"}},
            "zero_stage=3 is the toolkit's choice, not the job's: the offload profile full-cpu needs its",
        ),
        ({"train": {"momentum": 0.5}}, "optimizer=adamw is the toolkit's choice, not the job's: the fixed default"),
        ({"model": "gpt2", "train": {"sequence_length": 5000}}, ""),
        ({"train": COMPILED, "parallel": {"zero_stage": 3}}, ""),
    ],
)
def test_an_error_about_a_value_that_the_job_does_not_write_says_who_chose_it(
    sections: dict[str, Any], told: str
) -> None:
    (problem,) = problems_of(**sections)
    assert told in problem.message
    assert bool(told) == ("the toolkit's choice" in problem.message)


# Values that an open key may be given; stage 0 is taken on one rank alone, and another precision (of which 16-bit sums
# speak) never unasked.
VALUES: dict[str, tuple[Any, ...]] = {
    "train.sequence_length": (64, 510, 512),
    "train.gradient_accumulation_dtype": ("fp32",),
    "train.gradient_checkpointing": (True, False),
    "train.attention": ("eager", "sdpa"),
    "train.kernels": ("eager",),
    "train.per_device_eval_batch_size": (1,),
    "train.warmup_ratio": (0.1,),
    "parallel.zero_stage": (1, 2, 3),
    "parallel.offload_ratio": (0.1, 0.9),
    "parallel.virtual_stages": (1, 2, 4),
    "parallel.pipeline_schedule": ("1f1b", "interleaved", "zb-h1"),
}
STAGES = {
    "pipeline_schedule": st.sampled_from(["1f1b", "interleaved", "zb-h1"]),
    "virtual_stages": st.sampled_from([1, 2]),
    "partition": st.sampled_from([[8, 8], [4, 4, 4, 4]]),
    "sequence_parallel": st.booleans(),
}
SECTIONS = st.sampled_from([
    {}, {"zero_optimization": {"stage3_prefetch_bucket_size": 5}}, {"zero_optimization": {"round_robin_gradients": True}},
    {"zero_optimization": {"overlap_comm": True}}, {"bf16": {"immediate_grad_update": True}}, {"fp16": {"loss_scale": 0}},
])  # fmt: skip


def problems_in(job: Any) -> tuple[Problem, ...]:
    try:
        resolved(job)
    except PlanError as error:
        return error.problems
    return ()


@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
@given(job=jobs(deepspeed=SECTIONS), stages=st.fixed_dictionaries({}, optional=STAGES), few=st.integers(0, 3))
def test_no_value_of_an_open_key_would_be_refused_for_less(job: Any, stages: dict[str, Any], few: int) -> None:
    """Whatever a job says, to write out one of the keys that it leaves open takes no problem away."""
    written = job.model_dump(mode="json", exclude_unset=True)
    written["train"] = dict(list(written["train"].items())[:few])
    if written["parallel"].get("pipeline", 1) > 1 or written["parallel"].get("tensor", 1) > 1:
        written["parallel"] |= stages
    found = problems_in(job_of(**sections_of(written)))
    if not found:
        return
    for key, values in VALUES.items():
        section, _, name = key.partition(".")
        if name in written[section]:
            continue
        for value in values:
            changed = {**written, section: {**written[section], name: value}}
            left = problems_in(job_of(**sections_of(changed)))
            assert len(left) >= len(found), (key, value, found)


@st.composite
def few_keys(draw: st.DrawFn) -> dict[str, Any]:
    """A job with one to three keys written, on one card or a few."""
    fields = {("train", name): values for name, values in TRAIN.items()}
    fields |= {("parallel", name): values for name, values in (PARALLEL | STAGES).items()}
    written: dict[str, Any] = {}
    for section, name in draw(st.lists(st.sampled_from(sorted(fields)), min_size=1, max_size=3, unique=True)):
        written.setdefault(section, {})[name] = draw(fields[section, name])
    model = draw(st.sampled_from(["llama-3.1-8b", "gemma-2-2b", "gpt2", "qwen3-30b-a3b"]))
    gpu = draw(st.sampled_from(["h100-sxm-80gb", "rtx-4090-24gb", V100, CPU]))
    return {"model": model, "gpu": gpu, "ranks": draw(st.sampled_from([1, 1, 2, 4])), **written}


PAIRED = ("train.attention", "parallel.zero_stage", "train.gradient_accumulation_dtype", "train.gradient_checkpointing")


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(written=few_keys())
def test_a_job_of_few_keys_resolves_if_any_values_of_the_others_go_with_them(written: dict[str, Any]) -> None:
    found = problems_of(**written)
    if not found:
        return
    free = [key for key in VALUES if key.partition(".")[2] not in written.get(key.partition(".")[0], {})]
    pairs = [pair for pair in itertools.combinations(free, 2) if set(pair) <= set(PAIRED)]
    for keys in [*((key,) for key in free), *pairs]:
        for values in itertools.product(*(VALUES[key] for key in keys)):
            changed = {name: dict(part) for name, part in written.items() if isinstance(part, dict)}
            for key, value in zip(keys, values, strict=True):
                section, _, name = key.partition(".")
                changed.setdefault(section, {})[name] = value
            assert problems_of(**{**written, **changed}), (keys, values, found)


def sections_of(written: dict[str, Any]) -> dict[str, Any]:
    cluster = written["cluster"]
    named = {"gpu": cluster["gpu"], "ranks": cluster["gpus_per_node"], "nodes": cluster["nodes"]}
    rest = {name: written.get(name) for name in ("train", "data", "parallel", "deepspeed")}
    return {"model": written["model"]["name"], **named, "nvme_path": cluster.get("nvme_path"), **rest}
