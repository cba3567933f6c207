"""Every value of every emitted config says where it came from."""

from __future__ import annotations

import itertools
import json

import pytest
import yaml

from toolkit.artifacts.contents import contents
from toolkit.artifacts.provenance import TABLES, leaves
from toolkit.catalog.gpus import find_gpu
from toolkit.catalog.models import resolve_model
from toolkit.config.job import Job, Model
from toolkit.errors import ToolkitError
from toolkit.planning.offload import PROFILES
from toolkit.planning.resolve import resolve, resolve_with

CPU = {"gpu": "cpu", "gpus_per_node": 2, "nvme_path": "/nvme"}
H100 = {"gpu": "h100-sxm-80gb", "gpus_per_node": 4, "nodes": 2, "nvme_path": "/nvme", "master_port": 2900}
TRAINS = (
    {},
    {"optimizer": "sgd", "momentum": 0.9, "max_steps": 9, "warmup_steps": 2, "report_to": ("tensorboard",)},
    {"optimizer": "lion", "lr_scheduler_type": "constant", "loss": "liger", "push_to_hub": "me/mine"},
    {"optimizer": "adamw_torch_fused", "lr_scheduler_type": "cosine_with_min_lr", "min_learning_rate_ratio": 0.1},
)
DATA = (None, {"train": "org/name", "validation_fraction": 0.1})
OWN_KEYS = {
    "zero_optimization": {"reduce_bucket_size": 5_000_000},
    "steps_per_print": 7,
    "comms_logger": {"enabled": True},
}


def make_job(**sections):
    return Job(**{"model": "quickstart-llama", "cluster": H100, **{k: v for k, v in sections.items() if v is not None}})


def sound_plans():
    """Stage × offload × optimizer, with data, cluster and own keys changing along; what does not resolve is left out."""
    model = resolve_model(Model(name="quickstart-llama"))
    gpus = {cluster["gpu"]: find_gpu(cluster["gpu"]) for cluster in (CPU, H100)}
    axes = itertools.product((0, 1, 2, 3), PROFILES, TRAINS)
    for number, (stage, offload, train) in enumerate(axes):
        cluster, data, own = (CPU, H100)[number % 3 > 0], DATA[number % 2], ({}, OWN_KEYS)[number % 5 == 0]
        job = make_job(
            cluster=cluster, train=train, data=data, deepspeed=own, parallel={"zero_stage": stage, "offload": offload}
        )
        try:
            yield resolve_with(job, model=model, gpu=gpus[cluster["gpu"]])
        except ToolkitError:
            continue
    offloaded = {"strategy": "fsdp2", "fsdp2": {"cpu_offload": True}}
    for parallel in ({"strategy": "ddp", "ddp": {"static_graph": True}}, {"strategy": "fsdp2"}, offloaded):
        yield resolve_with(make_job(parallel=parallel), model=model, gpu=gpus[H100["gpu"]])
    grouped = make_job(data={"train": "org/set", "packing": "none", "group_by_length": True})
    yield resolve_with(grouped, model=model, gpu=gpus[H100["gpu"]])
    spread = make_job(train={"gradient_checkpointing": {"every_n_layers": 2}})
    yield resolve_with(spread, model=model, gpu=gpus[H100["gpu"]])
    staged = make_job(cluster=H100 | {"gpus_per_node": 4}, parallel={"pipeline": 2})
    yield resolve_with(staged, model=model, gpu=gpus[H100["gpu"]])


def parsed(texts):
    return {name: yaml.safe_load(text) if name.endswith(".yaml") else json.loads(text) for name, text in texts.items()}


def configs_of(plan, folder):
    hosts = [f"node{number}" for number in range(plan.job.cluster.nodes)] if plan.job.cluster.nodes > 1 else None
    texts = contents(plan, folder, hosts=hosts).texts
    made = parsed({name: text for name, text in texts.items() if not name.endswith((".sh", ".txt", "hostfile"))})
    record = made.pop("provenance.json")
    made.pop("plan.json")
    return made, record["keys"]


def test_every_leaf_of_every_config_has_its_origin(tmp_path):
    used: dict[str, set[str]] = {}
    count = 0
    for plan in sound_plans():
        configs, keys = configs_of(plan, tmp_path)
        count += 1
        assert set(configs) == set(keys)
        for name, config in configs.items():
            found = dict(leaves(config))
            assert set(found) == set(keys[name])
            used.setdefault(name, set()).update(found)
            for path, entry in keys[name].items():
                assert entry["value"] == found[path]
                assert entry["choices"] or entry["reason"], f"{name}: {path} comes from nowhere"
    assert count >= 30
    for table in {id(table): table for table in TABLES.values()}.values():
        seen = set().union(*(used[name] for name in TABLES if TABLES[name] is table))
        assert set(table) <= seen, "origins of keys that no plan emits"


def test_a_choice_named_by_an_origin_is_the_plans_own(tmp_path):
    plan = resolve(make_job(train={"max_grad_norm": 0.5}))
    _, keys = configs_of(plan, tmp_path)
    entry = keys["deepspeed.json"]["gradient_clipping"]
    assert entry["value"] == 0.5
    assert entry["choices"] == [
        {"key": "train.max_grad_norm", "value": 0.5, "source": "job", "reason": "written in the job"}
    ]


def test_a_derived_value_keeps_its_reason(tmp_path):
    plan = resolve(make_job(train={"train_batch_size": 32}))
    _, keys = configs_of(plan, tmp_path)
    (choice,) = keys["training_arguments.json"]["gradient_accumulation_steps"]["choices"]
    assert choice["source"] == "derived"
    assert "32 = " in choice["reason"]


def test_a_key_of_the_deepspeed_section_is_named_as_such_and_alone(tmp_path):
    plan = resolve(make_job(deepspeed=OWN_KEYS, parallel={"zero_stage": 2}))
    _, keys = configs_of(plan, tmp_path)
    for path in ("zero_optimization.reduce_bucket_size", "steps_per_print", "comms_logger.enabled"):
        (choice,) = keys["deepspeed.json"][path]["choices"]
        assert (choice["key"], choice["source"]) == (f"deepspeed.{path}", "deepspeed")
    assert keys["deepspeed.json"]["zero_optimization.reduce_scatter"]["choices"] == []


@pytest.mark.parametrize(
    ("config", "expected"), [({"a": {}}, [("a", {})]), ({"a": {"b": {"c": None}}}, [("a.b.c", None)])]
)
def test_leaves(config, expected):
    assert list(leaves(config)) == expected
