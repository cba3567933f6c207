"""Any DeepSpeed file is an estimate whose figures add up, of a configuration that DeepSpeed takes, or one clear refusal."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fuzzing import (
    FULL_COUNT,
    Case,
    assert_deepspeed_takes,
    assert_report_adds_up,
    attempt,
    command,
    is_chosen,
    run_cases,
)
from job_grammar import typical
from mutations import NUMBERS, Tree, change_value, encoded, mutate, mutate_text, odd_value

from toolkit.config.job import Job
from toolkit.deepspeed_spec.schema import DeepSpeedConfig
from toolkit.deepspeed_spec.user_file import TRAINER_AUTO
from toolkit.memory.deepspeed_file import DeepSpeedFile
from toolkit.memory.scenario import Scenario as MemoryCase
from toolkit.memory.search.estimator import Estimator

NAMES = tuple(
    sorted(
        {
            *DeepSpeedConfig.model_fields,
            "stage",
            "device",
            "enabled",
            "_comment",
            "zero_optimisation",
            "cpu_offload",
            "type",
            "params",
        }
    )
)
JSON_PIECES = (
    "// x",
    "/* x */",
    ",",
    "1.",
    "01",
    "+1",
    "0x1",
    "NaN",
    "Infinity",
    "-Infinity",
    "1e999",
    "1" * 5000,
    "'",
    "\\u0000",
    "true",
    "nul",
)
AUTO_ZERO = {
    "stage": 3, "overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 1e9, "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto", "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9, "stage3_gather_16bit_weights_on_model_save": True,
}  # fmt: skip
AUTO_BATCH = dict.fromkeys(
    ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"), "auto"
)
BASES: tuple[dict[str, Any], ...] = (
    {**AUTO_BATCH, "zero_optimization": AUTO_ZERO, "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}},
    {
        **AUTO_BATCH,
        "zero_optimization": {**AUTO_ZERO, "offload_optimizer": {"device": "cpu", "pin_memory": True}, "offload_param": {"device": "cpu"}},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}},
        "bf16": {"enabled": True},
    },
    {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4, "zero_optimization": {"stage": 2, "allgather_bucket_size": 2e8}, "bf16": {"enabled": True}},
    {"train_batch_size": 16, "zero_optimization": {"stage": 1}, "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16}},
    {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "Adam", "params": {"lr": 1e-5, "betas": [0.9, 0.95], "torch_adam": True}}},
    {"zero_optimization": {"stage": 0}, "data_types": {"grad_accum_dtype": "fp32"}, "bf16": {"enabled": "auto"}},
    {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2, "zero_quantized_weights": True}, "bf16": {"enabled": True}},
)  # fmt: skip
JOBS: tuple[dict[str, Any], ...] = (
    {},
    {"train": {"per_device_train_batch_size": 1}},
    {"train": {"precision": "fp32", "per_device_train_batch_size": 1}},
    {"train": {"per_device_train_batch_size": 1, "method": "lora", "lora": {"r": 4}}},
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    root = tmp_path_factory.mktemp("fuzz-deepspeed")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        yield root


def _draw_config(rng: random.Random) -> Tree:
    """A configuration: a sound one with a few changes, most of them keys and values that DeepSpeed knows."""
    config: Tree = copy.deepcopy(rng.choice(BASES))
    while rng.random() < 0.75:
        if not isinstance(config, dict):
            break
        way, drawn = rng.random(), typical(rng, DeepSpeedConfig)
        if way < 0.45:
            for key, value in drawn.items():
                both = isinstance(config.get(key), dict) and isinstance(value, dict)
                config[key] = {**config[key], **value} if both else value
        elif way < 0.55:
            config[rng.choice(NAMES)] = change_value(rng, next(iter(drawn.values())))
        elif way < 0.62:
            path = rng.choice(sorted(TRAINER_AUTO)).split(".")
            node = config
            for part in path[:-1]:
                if not isinstance(node.get(part), dict):
                    node[part] = {}
                node = node[part]
            node[path[-1]] = rng.choice(("auto", rng.choice(NUMBERS), odd_value(rng)))
        elif way < 0.7:
            config[rng.choice(NAMES)] = odd_value(rng)
        else:
            config = mutate(rng, config, names=NAMES)
    return config


def _draw_file(rng: random.Random) -> bytes:
    try:
        text = json.dumps(_draw_config(rng), indent=rng.choice((None, 2)))
    except (ValueError, RecursionError):
        text = "{"
    while rng.random() < 0.12:
        text = mutate_text(rng, text, snippets=JSON_PIECES)
    return encoded(rng, text, share=0.04)


def _file_case(case: Case, estimator: Estimator) -> None:
    rng = case.rng
    raw = _draw_file(rng)
    path = Path("ds.json")
    path.write_bytes(raw)
    case.note(raw.decode("utf-8", errors="backslashreplace")[:1500])
    file, refused = attempt(lambda: DeepSpeedFile.read(path))
    job = {"model": "quickstart-llama", "cluster": {"gpu": "h100-sxm-80gb", "gpus_per_node": 4}, **rng.choice(JOBS)}
    case.note(job)
    if file is None:
        case.outcome = "refused"
        if rng.random() < 0.1:  # the command says the same, before it imports anything heavy
            Path("job.yaml").write_text(json.dumps(job), encoding="utf-8")
            code, _, _ = command(case, "estimate", "job.yaml", "--deepspeed-config", "ds.json", "--json")
            assert code == 2
        return
    asked = MemoryCase.of(Job.model_validate(job), file=file)
    plan, refused = attempt(asked.plan)
    if plan is None:
        assert refused is not None
        case.outcome = "does not fit the job"
        return
    resolved, refused = attempt(lambda: file.resolved(plan))
    if resolved is None:
        case.outcome = "does not fit the plan"
        return
    case.note(resolved)
    parsed = assert_deepspeed_takes(resolved, plan.grid.dp)
    assert parsed.zero_config.stage == plan.settings.zero_stage
    assert parsed.train_micro_batch_size_per_gpu == plan.settings.batch.micro
    assert parsed.gradient_accumulation_steps == plan.settings.batch.accumulation
    report, refused = attempt(lambda: estimator.estimate_plan(plan, asked))
    case.outcome = "estimated" if refused is None else "not estimated"
    if report is not None:
        assert_report_adds_up(report)


def _run_files(count: int) -> dict[str, int]:
    estimator = Estimator()
    return run_cases("DeepSpeed files", count, lambda case: _file_case(case, estimator))


def test_deepspeed_files(place: Path) -> None:
    outcomes = _run_files(40)
    if not is_chosen():
        assert min(outcomes["refused"], outcomes["estimated"]) > 2


@pytest.mark.full
def test_deepspeed_files_in_full(place: Path) -> None:
    _run_files(FULL_COUNT)
