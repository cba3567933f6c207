"""DDP and FSDP2 train as one process of plain torch does, resume exactly, and export what they trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from courses import (
    ADAM,
    ADAPTERS,
    BF16,
    CLOSE,
    LORA,
    NEAR,
    ROUTED,
    SGD,
    Case,
    Course,
    assert_follows_plain_torch,
    full_weights,
    parameters,
    train_cases,
)
from ranks import leave_group, run_distributed
from safetensors.torch import load_file
from tiny_plans import RANKS, step_batches, tiny_plan

import toolkit as tk
from toolkit.engine.sharded_files import ENGINE_FILE
from toolkit.errors import CheckpointError, PlanError
from toolkit.planning.plan import Plan

STEPS, BEFORE, AFTER = 4, 2, 2
OPTIONS: dict[str, dict[str, Any]] = {
    "ddp": {
        "bucket_cap_mb": 1,
        "find_unused_parameters": True,
        "broadcast_buffers": False,
        "gradient_as_bucket_view": True,
    },
    "fsdp2": {"reshard_after_forward": False},
}
STRATEGIES = ("ddp", "fsdp2")
LORA_HEAD = LORA | {"lora": {"r": 4, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}}
CHUNKED = {"loss": "chunked"}
COMPILED = {"torch_compile": True, "gradient_checkpointing": 0.5}


def cases() -> dict[str, Case]:
    made: dict[str, Case] = {}
    for strategy in STRATEGIES:
        of = {"strategy": strategy}
        made[f"full {strategy}"] = Case(train=ADAM, steps=STEPS, **of, **CLOSE)
        made[f"lora {strategy}"] = Case(train=ADAM | ADAPTERS, steps=STEPS, **of, **CLOSE)
        made[f"experts {strategy}"] = Case(train=SGD, architecture="mixtral", config=ROUTED, **of)
        made[f"tied, chunked {strategy}"] = Case(train=SGD | CHUNKED, architecture="llama-tied", **of)
        made[f"lora and head {strategy}"] = Case(train=LORA_HEAD, **of)
        # Under DDP the weights themselves are rounded: 2**-9 of up to 1.
        bound = NEAR if strategy == "fsdp2" else NEAR | {"weight_tolerance": 8e-3}
        made[f"bf16 {strategy}"] = Case(train=SGD | BF16 | {"gradient_checkpointing": True}, **of, **bound)
        made[f"compiled {strategy}"] = Case(train=SGD | CHUNKED | COMPILED, **of)
        made[f"options {strategy}"] = Case(train=SGD, options=OPTIONS[strategy], **of)
        made[f"padded, alone {strategy}"] = Case(train=SGD, packing="none", data=1, **of)
    replicated = {"dp_replicate_size": 2, "reduce_dtype": "fp32"}
    made["hybrid fsdp2"] = Case(train=SGD | BF16, strategy="fsdp2", options=replicated, data=4, **NEAR)
    offloaded = {"strategy": "fsdp2", "options": {"cpu_offload": True}}
    made["offloaded fsdp2"] = Case(train=ADAM, steps=STEPS, **offloaded, **CLOSE)
    made["offloaded adapters fsdp2"] = Case(train=LORA, **offloaded)
    made["replicated fsdp2"] = Case(train=SGD, strategy="fsdp2", options={"dp_replicate_size": 2})
    made["static graph ddp"] = Case(train=SGD, strategy="ddp", options={"static_graph": True}, micro_batches=1)
    return made


CASES = cases()
# What the strategies share is met under one of them by default.
REST = (
    *(
        "offloaded adapters fsdp2",
        "lora ddp",
        "experts fsdp2",
        "tied, chunked ddp",
        "lora and head fsdp2",
        "padded, alone ddp",
        "hybrid fsdp2",
        "options ddp",
        "static graph ddp",
        "lora and head ddp",
        "replicated fsdp2",
    ),
    *(name for name in CASES if name.startswith("compiled")),
)
DEFAULT = tuple(name for name in CASES if name not in REST)


@pytest.fixture(scope="module")
def courses() -> dict[str, list[Course | str]]:
    return train_cases(CASES, default=DEFAULT)


@pytest.fixture(scope="module")
def others() -> dict[str, list[Course | str]]:
    return train_cases(CASES, default=DEFAULT, others=True)


@pytest.mark.gloo
@pytest.mark.parametrize("name", parameters(CASES, default=DEFAULT))
def test_follows_plain_torch(name: str, request: pytest.FixtureRequest) -> None:
    found = request.getfixturevalue("courses" if name in DEFAULT else "others")
    assert_follows_plain_torch(CASES[name], found[name])


# ---- checkpoints and exports ------------------------------------------------------------------------------------------


def saved_plan(strategy: str, method: str, **train: Any) -> Plan:
    learning = {"optimizer": "adamw_torch", "learning_rate": 1e-2, "lr_scheduler_type": "linear", "method": method}
    offloaded = {"strategy": "fsdp2", "fsdp2": {"cpu_offload": True}}
    parallel = offloaded if strategy == "offloaded" else {"strategy": strategy}
    return tiny_plan(train=learning | train, parallel={"zero_stage": None} | parallel)


def losses(run: tk.Run, *, start: int, count: int) -> list[float]:
    return [
        float(run.step(step_batches(step, ranks=run.world.grid.dp)[run.world.coordinate.dp]))
        for step in range(start, start + count)
    ]


def save_and_resume(rank: int, plans: dict[str, Plan], folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    leave_group()
    for name, plan in plans.items():
        target = folder / name
        with tk.initialize(plan) as run:
            losses(run, start=0, count=BEFORE)
            tk.save(run, target, probe=True)
            weights, rates = full_weights(run.model, run.world), [run.learning_rate]
            straight = losses(run, start=BEFORE, count=AFTER)
        with tk.initialize(plan) as run:
            tk.load(run, target)
            rates, at = [*rates, run.learning_rate], run.step_count
            resumed = losses(run, start=BEFORE, count=AFTER)
        found[name] = {"weights": weights, "straight": straight, "resumed": resumed, "rates": rates, "step": at}
    return found


SAVED = [("ddp", "full"), ("fsdp2", "full"), ("fsdp2", "lora")]
SAVED_TOO = [("ddp", "lora"), ("offloaded", "full")]


def save(folder: Path, *cases: tuple[str, str]) -> tuple[Path, dict[str, Any]]:
    plans = {f"{strategy}-{method}": saved_plan(strategy, method) for strategy, method in cases}
    return folder, run_distributed(save_and_resume, RANKS, plans, folder)[0]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    return save(tmp_path_factory.mktemp("saved"), *SAVED)


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("strategy", "method"), [*SAVED, *(pytest.param(*each, marks=pytest.mark.full) for each in SAVED_TOO)]
)
def test_resumes_exactly_and_exports_what_was_trained(
    strategy: str, method: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    case = (strategy, method)
    folder, found = save(tmp_path / "saved", case) if case in SAVED_TOO else request.getfixturevalue("saved")
    name = f"{strategy}-{method}"
    own = found[name]
    assert own["resumed"] == own["straight"]
    assert own["step"] == BEFORE
    assert own["rates"][0] == own["rates"][1] < 1e-2
    made = tk.export(folder / name, tmp_path / "out")
    values = {key: value for file in made.report.files for key, value in load_file(made.folder / file).items()}
    if method == "full":
        assert made.logits_difference is not None
        assert made.logits_difference < 1e-6
        assert values.keys() == own["weights"].keys()
        assert all(torch.equal(values[key], torch.from_numpy(value)) for key, value in own["weights"].items())
    else:
        trained = {key.replace(".default", ""): value for key, value in own["weights"].items()}
        assert values.keys() == trained.keys()
        assert all(torch.equal(values[key], torch.from_numpy(value)) for key, value in trained.items())


@pytest.mark.gloo
@pytest.mark.parametrize("what", ["record", "cut", "lacking"])
def test_damage_of_the_engines_files_is_one_error(
    what: str, saved: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    source = tmp_path / "checkpoint"
    shutil.copytree(saved[0] / "ddp-full", source)
    tag = next(source.glob("global_step*"))
    if what == "record":
        (tag / ENGINE_FILE).write_text(json.dumps({"scheduler_epoch": "three"}))
    elif what == "cut":
        [shard, *_] = tag.glob("*.safetensors")
        shard.write_bytes(shard.read_bytes()[:-100])
    else:
        next(tag.glob("*.safetensors")).unlink()
    with pytest.raises(CheckpointError) as verified:
        tk.export(source, tmp_path / "out")
    assert set(verified.value.codes) == {"CHECKPOINT_DAMAGED"}
    with pytest.raises(CheckpointError) as unverified:
        tk.export(source, tmp_path / "out", verify_first=False)
    assert set(unverified.value.codes) <= {"EXPORT_DAMAGED", "EXPORT_KEYS"}
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("train", "key"),
    [
        ({"precision": "fp16"}, "train.precision"),
        ({"precision": "bf16", "gradient_accumulation_dtype": "fp32"}, "train.gradient_accumulation_dtype"),
    ],
)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_refuses_what_the_strategy_does_not_do(strategy: str, train: dict[str, Any], key: str) -> None:
    job = {
        "model": {"name": "llama-3.2-1b", "init": "random"},
        "cluster": {"gpu": "h100-sxm-80gb", "gpus_per_node": 2},
        "train": {"max_steps": 1, "sequence_length": 128, **train},
        "parallel": {"strategy": strategy},
    }
    with pytest.raises(PlanError) as caught:
        tk.resolve(tk.Job.model_validate(job))
    assert ("STRATEGY_UNSUPPORTED", key) in {(problem.code, problem.key) for problem in caught.value.problems}
