"""Jobs for the tests of toolkit.planning: the smallest ones, and random ones."""

from __future__ import annotations

from functools import cache
from typing import Any

from hypothesis import strategies as st

from toolkit.catalog.gpus import Gpu, find_gpu
from toolkit.catalog.models import ModelSpec, resolve_model
from toolkit.config.job import (
    Attention,
    Dtype,
    Fp8Recipe,
    Job,
    Kernels,
    Loss,
    Model,
    Offload,
    Optimizer,
    Precision,
    Schedule,
)
from toolkit.errors import Problem, ToolkitError
from toolkit.planning.plan import Plan
from toolkit.planning.resolve import resolve_with
from toolkit.planning.unchecked_plan import UncheckedPlan

H100, V100, CPU = "h100-sxm-80gb", "v100-sxm-16gb", "cpu"
TOY = "quickstart-llama"


@cache
def model_of(name: str) -> ModelSpec:
    return resolve_model(Model(name=name))


@cache
def gpu_of(name: str) -> Gpu:
    return find_gpu(name)


def job_of(
    *,
    model: str = TOY,
    gpu: str = H100,
    ranks: int = 2,
    nodes: int = 1,
    train: dict[str, Any] | None = None,
    data: dict[str, Any] | None = None,
    parallel: dict[str, Any] | None = None,
    deepspeed: dict[str, Any] | None = None,
    **cluster: Any,
) -> Job:
    """A job on two H100 of which the test names only what it is about."""
    sections: dict[str, Any] = {
        "model": model,
        "cluster": {"gpu": gpu, "gpus_per_node": ranks, "nodes": nodes, **cluster},
    }
    for name, value in (("train", train), ("data", data), ("parallel", parallel), ("deepspeed", deepspeed)):
        if value is not None:
            sections[name] = value
    return Job.model_validate(sections)


def resolved(job: Job) -> Plan:
    return resolve_with(job, model=model_of(job.model.name), gpu=gpu_of(job.cluster.gpu))


def plan_of(**sections: Any) -> Plan:
    return resolved(job_of(**sections))


def problems_of(**sections: Any) -> tuple[Problem, ...]:
    """What stands against the job; empty when nothing does."""
    try:
        plan_of(**sections)
    except ToolkitError as error:
        return error.problems
    return ()


def draft_of(plan: Plan) -> UncheckedPlan:
    return UncheckedPlan(job=plan.job, model=plan.model, gpu=plan.gpu, settings=plan.settings)


def sections(
    fields: dict[str, st.SearchStrategy[Any]], *, at_most: int, required: tuple[str, ...] = ()
) -> st.SearchStrategy[dict[str, Any]]:
    """A section with some of its keys: few, so that a fair share of the jobs is sound."""
    names = st.lists(st.sampled_from(sorted(fields)), unique=True, max_size=at_most)

    @st.composite
    def drawn(draw: st.DrawFn) -> dict[str, Any]:
        return {name: draw(fields[name]) for name in sorted({*draw(names), *required})}

    return drawn()


def literal(kind: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from(kind.__args__)


TRAIN = {
    "method": st.sampled_from(["full", "lora"]),
    "lora": st.just({"r": 4, "target_modules": ["q_proj"]}),
    "sequence_length": st.sampled_from([64, 256, 512, 1024]),
    "per_device_train_batch_size": st.integers(1, 6),
    "gradient_accumulation_steps": st.integers(1, 6),
    "train_batch_size": st.integers(1, 64),
    "per_device_eval_batch_size": st.integers(1, 4),
    "precision": literal(Precision),
    "fp8": st.builds(dict, recipe=literal(Fp8Recipe)),
    "gradient_accumulation_dtype": literal(Dtype),
    # The 8-bit one can be estimated, not trained: no configuration of the libraries is made of it.
    "optimizer": st.sampled_from(Optimizer.__args__),
    "weight_decay": st.floats(0, 1),
    "adam_beta1": st.floats(0, 1, exclude_max=True),
    "adam_beta2": st.floats(0, 1, exclude_max=True),
    "adam_epsilon": st.floats(1e-12, 1e-3),
    "momentum": st.floats(0, 1, exclude_max=True),
    "gradient_checkpointing": st.booleans() | st.floats(0, 1),
    "attention": literal(Attention),
    "loss": literal(Loss),
    "kernels": literal(Kernels),
    "learning_rate": st.floats(1e-9, 1),
    "learning_rate_scaling": st.sampled_from(["none", "linear", "sqrt"]),
    "learning_rate_reference_batch_size": st.integers(1, 512),
    "lr_scheduler_type": literal(Schedule),
    "min_learning_rate_ratio": st.floats(0, 1),
    "warmup_steps": st.integers(0, 20),
    "warmup_ratio": st.floats(0, 1),
    "max_grad_norm": st.floats(0, 10),
    "max_steps": st.integers(1, 50),
    "num_train_epochs": st.floats(0.1, 5),
    "save_steps": st.integers(1, 50) | st.floats(0.01, 0.99),
    "save_total_limit": st.integers(1, 5),
    "eval_steps": st.integers(1, 50) | st.floats(0.01, 0.99),
    "logging_steps": st.integers(1, 5),
    "report_to": st.just(["tensorboard"]),
    "torch_compile": st.booleans(),
    "seed": st.integers(0, 2**32 - 1),
}
PARALLEL = {
    "zero_stage": st.integers(0, 3),
    "tensor": st.sampled_from([1, 1, 1, 2]),
    "pipeline": st.sampled_from([1, 1, 1, 2]),
    "offload": literal(Offload),
    "offload_ratio": st.floats(0, 1, exclude_min=True, exclude_max=True),
}
DATA = {
    "eval": st.just("eval.jsonl"),
    "eval_split": st.just("test"),
    "validation_fraction": st.floats(0.01, 0.5),
    "packing": st.sampled_from(["wrapped", "separated", "none"]),
    "loss_on": st.sampled_from(["all", "completion", "assistant"]),
}


_MODELS = st.sampled_from([TOY, TOY, "llama-3.2-1b", "gemma-2-2b", "gpt2"])
_GPUS = st.sampled_from([H100, H100, "a100-sxm-80gb", V100, CPU])
_RANKS, _NODES, _NVME = st.integers(1, 8), st.sampled_from([1, 1, 2]), st.sampled_from([None, "/local"])
_TRAIN, _PARALLEL = sections(TRAIN, at_most=5), sections(PARALLEL, at_most=2)
_DATA = st.none() | sections(DATA, at_most=2)


@st.composite
def jobs(draw: st.DrawFn, deepspeed: st.SearchStrategy[dict[str, Any]] | None = None) -> Job:
    """Any job that the schema admits; about half are sound."""
    data = draw(_DATA)
    return job_of(
        model=draw(_MODELS),
        gpu=draw(_GPUS),
        ranks=draw(_RANKS),
        nodes=draw(_NODES),
        nvme_path=draw(_NVME),
        train=draw(_TRAIN),
        data=None if data is None else {"train": ["a.jsonl"], **data},
        parallel=draw(_PARALLEL),
        deepspeed={} if deepspeed is None else draw(deepspeed),
    )
