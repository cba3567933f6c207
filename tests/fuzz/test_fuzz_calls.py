"""Any public call with any arguments works, or raises one ToolkitError: no other exception, no hang, nothing written."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fuzzing import FULL_COUNT, Case, assert_report_adds_up, attempt, is_chosen, run_cases, tree
from job_grammar import LEAVES, typical
from mutations import mutate, odd_value
from saved_run import Saved, saved_run, step_batches, unchanged_environment
from train_jobs import write_inputs
from transformers import AutoTokenizer

import toolkit as tk
from toolkit.config.job import Cluster, Data, Job, Lora, Model, Parallel, Train
from toolkit.config.loader import load_job
from toolkit.engine.run import Run
from toolkit.planning.plan import Plan

SECTIONS = (Job, Model, Cluster, Train, Data, Lora, Parallel)


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """What calls are made of."""

    root: Path
    saved: Saved
    plan: Plan
    run: Run
    tokenizer: Any


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    root = tmp_path_factory.mktemp("fuzz-calls")
    write_inputs(root, num_documents=10)
    with pytest.MonkeyPatch.context() as patch, unchanged_environment():
        patch.chdir(root)
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        with saved_run(root, 2) as (saved, run):
            run.plan.save(root / "plan.json")
            tokenizer = AutoTokenizer.from_pretrained(root / "model")
            yield World(root=root, saved=saved, plan=run.plan, run=run, tokenizer=tokenizer)


def _odd_object(rng: random.Random, world: World) -> Any:
    """Anything that Python can put in the place of an argument."""
    made: tuple[Callable[[], Any], ...] = (
        lambda: odd_value(rng),
        lambda: odd_value(rng),
        lambda: odd_value(rng),
        lambda: Path(str(odd_value(rng)).replace("\x00", "")),
        lambda: rng.choice((object(), object, int, len, Ellipsis, b"bytes", range(3), iter([]), {1, 2}, 1j, NotImplemented)),
        lambda: rng.choice((np.int64(3), np.float32(0.5), np.array([1, 2]), np.array(2), torch.tensor(1), torch.zeros(2, 2))),
        lambda: rng.choice((world.plan, world.plan.job, world.plan.job.train, world.plan.settings, world.run, world.tokenizer)),
        lambda: rng.choice((world.plan.to_dict(), world.plan.job.model_dump(mode="json"), world.plan.deepspeed_config())),
        lambda: rng.choice((world.saved.job, str(world.saved.job), world.root / "plan.json", world.saved.sound, world.root)),
        lambda: rng.choice(("model", "data.jsonl", "run2", "trainer", "toolkit", "Trainer", "bf16", "native", "node0,node1", "5GB")),
    )  # fmt: skip
    return rng.choice(made)()


# name: (call, sound arguments)
Calls = dict[str, tuple[Callable[..., Any], dict[str, Any]]]


def _calls(world: World) -> Calls:
    """Every public function that is no training, with arguments that are sound."""
    plan, job, sound = world.plan, world.plan.job, world.saved.sound
    data = Data(train=str(world.root / "data.jsonl"))
    out = world.root / "out"
    prepared = {"tokenizer": world.tokenizer, "sequence_length": 16, "seed": 0, "cache_dir": world.root / "cache"}
    sizes = {"train_batch_size": 1, "vocab_size": 320, "base": world.root, "num_proc": None}
    exported = {
        "dtype": "fp32",
        "max_shard_size_bytes": 10**6,
        "merge_adapter": False,
        "overwrite": False,
        "check_logits": False,
    }
    return {
        "resolve": (tk.resolve, {"job": job}),
        "estimate": (tk.estimate, {"job": plan, "deepspeed_config": None, "zero_init": True, "allocator": None, "calibration": None}),
        "emit": (tk.emit, {"plan": plan, "out": out, "hosts": None}),
        "prepare": (tk.prepare, {"data": data, **prepared, **sizes}),
        "export": (tk.export, {"checkpoint": sound, "output_dir": out, **exported}),
        "load": (tk.load, {"run": world.run, "path": sound}),
        "save": (tk.save, {"run": world.run, "path": out, "tokenizer": world.tokenizer, "probe": False, "sources": None}),
        "from_yaml": (Job.from_yaml, {"path": world.saved.job, "overrides": ("train.max_steps=3",)}),
        "load_job": (load_job, {"path": world.saved.job, "overrides": ()}),
        "Plan.load": (Plan.load, {"path": world.root / "plan.json"}),
        "Plan.save": (plan.save, {"path": world.root / "out.json"}),
        "Plan.from_dict": (Plan.from_dict, {"value": plan.to_dict()}),
        "deepspeed_config": (plan.deepspeed_config, {"consumer": "trainer"}),
        "accelerate_config": (plan.accelerate_config, {"deepspeed_config_file": "ds.json", "main_process_ip": None}),
        "with_": (job.with_, {"train": {"max_steps": 3}}),
        "step": (world.run.step, {"micro_batches": step_batches(1)}),
        "evaluate": (world.run.evaluate, {"batches": step_batches(1)}),
        "set_num_steps": (world.run.set_num_steps, {"count": 8}),
        "loader": (world.run.loader, {"dataset": tk.prepare(data, **(prepared | {"sequence_length": 32})).train}),
    }  # fmt: skip


# Calls that would train, or build a model, where all arguments were sound: each gets one that is not.
def _refused_calls(world: World) -> Calls:
    return {
        "initialize": (tk.initialize, {"plan": world.plan, "weights": None, "world": None}),
        "train": (tk.train, {"plan": world.plan, "resume": None, "stop_after": None, "reporter": None}),
    }


def _section_arguments(rng: random.Random, section: Any, world: World) -> dict[str, Any]:
    """Keyword arguments of a section: some typical, one odd, perhaps a name that it does not have."""
    fields = section.model_fields
    made = {name: typical(rng, field.annotation, name) for name, field in fields.items() if field.is_required()}
    for name in rng.sample(sorted(fields), min(len(fields), rng.randrange(3))):
        made[name] = typical(rng, fields[name].annotation, name)
    if rng.random() < 0.7:
        made[rng.choice(sorted(fields))] = _odd_object(rng, world)
    if rng.random() < 0.15:
        made[rng.choice(LEAVES)] = _odd_object(rng, world)
    return {name: value for name, value in made.items() if name.isidentifier()}


def _check(value: Any) -> None:
    """What a call that worked gave is in order."""
    if isinstance(value, Plan):
        assert Plan.from_dict(json.loads(json.dumps(value.to_dict(), allow_nan=False))) == value
    if isinstance(value, Job):
        plan, _ = attempt(lambda: tk.resolve(value))
        _check(plan)
    if type(value).__name__ == "MemoryReport":
        assert_report_adds_up(value)
    if type(value).__name__ == "PreparedData":
        assert len(value.train) > 0
        assert math.isfinite(value.train.report.padding_fraction)


def _changed_plan(rng: random.Random, world: World) -> Any:
    """A plan or a job into which something was put past its checks."""
    value = _odd_object(rng, world)
    name = rng.choice([field.name for field in dataclasses.fields(world.plan)])
    setting = rng.choice([field.name for field in dataclasses.fields(world.plan.settings)])
    made: tuple[Callable[[], Any], ...] = (
        lambda: world.plan.job.model_copy(update={rng.choice((*Job.model_fields, "paralell")): value}),
        lambda: dataclasses.replace(world.plan, **{name: value}),
        lambda: dataclasses.replace(world.plan, settings=dataclasses.replace(world.plan.settings, **{setting: value})),
        lambda: dataclasses.replace(world.plan, job=world.plan.job.model_copy(update={"train": world.plan.job.train.model_copy(update={rng.choice(LEAVES): value})})),
    )  # fmt: skip
    return attempt(rng.choice(made))[0]


def _call_case(case: Case, world: World, calls: Calls, refused: Calls) -> None:
    rng = case.rng
    before = tree(world.root)
    way = rng.random()
    if way < 0.3:
        section = rng.choice(SECTIONS)
        arguments = _section_arguments(rng, section, world)
        name, call = section.__name__, section
    else:
        must_fail = way > 0.94
        name = rng.choice(sorted(refused if must_fail else calls))
        call, sound = (refused if must_fail else calls)[name]
        arguments = dict(sound)
        for _ in range(rng.choice((1, 1, 2))):
            changed = rng.choice(sorted(arguments)) if not must_fail else "plan"
            arguments[changed] = _odd_object(rng, world) if rng.random() < 0.85 else _changed_plan(rng, world)
        if must_fail and isinstance(arguments["plan"], Plan):
            case.outcome = "left out"
            return
        if name == "Plan.from_dict" and rng.random() < 0.7:
            arguments = {"value": mutate(rng, sound["value"])}
    case.note(f"{name}({', '.join(f'{key}={value!r:.300}' for key, value in arguments.items())})")
    value, error = attempt(lambda: call(**arguments))
    case.outcome = f"{name} {'refused' if error else 'works'}"
    if error is not None:
        assert len(str(error)) < 5000
        assert {path for path in tree(world.root) if not path.startswith("cache")} == {
            path for path in before if not path.startswith("cache")
        }
        return
    _check(value)
    _clean(world.root, before)


def _clean(root: Path, before: dict[str, Any]) -> None:
    for path in sorted(tree(root).keys() - before.keys(), reverse=True):
        if not path.startswith("cache"):
            (root / path).rmdir() if (root / path).is_dir() else (root / path).unlink()


def _run_calls(world: World, count: int) -> dict[str, int]:
    calls, refused = _calls(world), _refused_calls(world)
    for name, (call, arguments) in calls.items():  # or the cases would show nothing
        before = tree(world.root)
        call(**arguments)
        assert name
        _clean(world.root, before)
    return run_cases("calls", count, lambda case: _call_case(case, world, calls, refused))


def test_public_calls(world: World) -> None:
    outcomes = _run_calls(world, 80)
    if not is_chosen():
        works = {name.split()[0] for name in outcomes if name.endswith("works")}
        refuses = {name.split()[0] for name in outcomes if name.endswith("refused")}
        assert len(works) > 6 < len(refuses)


@pytest.mark.full
def test_public_calls_in_full(world: World) -> None:
    _run_calls(world, FULL_COUNT)
