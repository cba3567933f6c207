"""Job files that are sound or nearly so, drawn from the schema itself: what it gains is drawn, too."""

from __future__ import annotations

import copy
import random
from itertools import chain
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import yaml
from fuzzing import ROOT
from mutations import Tree, change_value, encoded, mutate, mutate_text, odd_value
from pydantic import BaseModel

from toolkit.catalog.gpus import load_catalogue
from toolkit.config.job import Job
from toolkit.config.other_names import OTHER_NAMES, REFUSED_NAMES
from toolkit.config.schema import known_keys
from toolkit.deepspeed_spec.job_section import job_keys
from toolkit.deepspeed_spec.nested import paths, without
from toolkit.deepspeed_spec.schema import DeepSpeedConfig

KEYS = known_keys()
IN_A_JOB = frozenset(job_keys())
LEAVES = tuple(sorted({key.rpartition(".")[2] for key in KEYS} | {*REFUSED_NAMES, *chain(*OTHER_NAMES.values())}))
GPUS = tuple(load_catalogue())
MODELS = (
    "quickstart-llama",
    "gpt2",
    "llama-3.2-1b",
    "mixtral-8x7b",
    "gemma-2-2b",
    "qwen2.5-0.5b",
    "falcon-7b",
    "opt-1.3b",
)
COUNTS = (1, 1, 2, 2, 3, 4, 6, 8, 16, 32, 512, 2048, 4096)
FRACTIONS = (0.0, 1e-5, 1e-5, 0.03, 0.1, 0.25, 0.5, 0.9, 0.999, 1.0)
YAML_PIECES = (
    "!!python/object/apply:os.system ['true']", "!!int ", "!!float ", "!!binary ", "!!set ", "!!timestamp 2024-01-01", "!!omap ",
    "!x ", "&a ", "*a", "<<: *a", "<<: {a: b}", "? ", "| ", "> ", "|+\n  x", "{a: b}", "[a, b]", ": ", "- ", "# ", "'", '"\\U99999999"',
    '"\\x00"', "0x_", "1__0", "0b", ".inf", ".nan", "010", "1:30", "2024-01-01", "2024-13-45", "1e5", "1_000", "~", "yes", "NO", "=", "@", "`", "%",
)  # fmt: skip


def bases(root: Path) -> list[Tree]:
    """Sound jobs: every composed one of the repository, and small ones on local files."""
    found = [yaml.safe_load(path.read_text("utf-8")) for path in sorted((ROOT / "configs" / "jobs").glob("*.yaml"))]
    for job in found:
        if isinstance(job.get("data"), dict) and str(job["data"].get("train", "")).startswith("examples/"):
            job["data"]["train"] = str(ROOT / job["data"]["train"])
    local = {"name": str(root / "model"), "init": "random"}
    data = {"train": str(root / "data.jsonl")}
    train = {"sequence_length": 32, "per_device_train_batch_size": 2, "max_steps": 8, "output_dir": str(root / "run")}
    cpu = {"gpu": "cpu", "gpus_per_node": 2}
    found += [
        {"model": local, "cluster": cpu, "train": train, "data": data},
        {"model": local, "cluster": {"gpu": "h100-sxm-80gb", "gpus_per_node": 8, "nodes": 2}, "train": {**train, "precision": "fp8"}},
        {"model": local, "cluster": cpu, "train": {**train, "method": "lora", "lora": {"r": 4, "target_modules": ["c_attn"]}}},
        {"model": "quickstart-llama", "cluster": {"gpu": "a100-sxm-40gb", "gpus_per_node": 8}, "parallel": {"tensor": 2, "pipeline": 2}},
        {"model": "quickstart-llama", "cluster": {"gpu": "h100-sxm-80gb", "gpus_per_node": 2}, "deepspeed": {"zero_optimization": {"overlap_comm": True}}},
        {"model": "gpt2", "cluster": {"gpu": "a100-sxm-40gb", "gpus_per_node": 4, "nvme_path": str(root)}, "parallel": {"zero_stage": 3, "offload": "full-nvme"}},
        {"model": local, "cluster": cpu, "train": train, "data": {**data, "validation_fraction": 0.2, "packing": "separated"}},
    ]  # fmt: skip
    return found


def typical(rng: random.Random, annotation: Any, name: str = "") -> Any:
    """A value of a field's own kind, as people write it."""
    if name == "gpu" and rng.random() < 0.7:
        return rng.choice(GPUS)
    if name in ("train", "eval", "chat_template", "tokenizer", "nvme_path", "output_dir"):
        return rng.choice(("data.jsonl", "model", "missing", ".", "run/deeper", "chatml"))
    if get_origin(annotation) in (Union, UnionType):
        members = [member for member in get_args(annotation) if member is not NoneType]
        return typical(rng, rng.choice(members), name)
    if hasattr(annotation, "__metadata__"):
        return typical(rng, get_args(annotation)[0], name)
    if get_origin(annotation) is Literal:
        return rng.choice(get_args(annotation))
    if get_origin(annotation) is tuple:
        return [typical(rng, get_args(annotation)[0], name) for _ in range(rng.randrange(1, 4))]
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        fields = annotation.model_fields
        chosen = rng.sample(sorted(fields), min(len(fields), rng.randrange(1, 4)))
        required = [key for key, field in fields.items() if field.is_required()]
        return {key: typical(rng, fields[key].annotation, key) for key in dict.fromkeys((*chosen, *required))}
    if annotation is bool:
        return rng.random() < 0.5
    if annotation is int:
        return rng.choice(COUNTS)
    if annotation is float:
        return rng.choice(FRACTIONS)
    if annotation is dict or get_origin(annotation) is dict:
        return deepspeed_section(rng) if name == "deepspeed" else {"a": 1}
    if name == "name":
        return rng.choice(MODELS)
    return rng.choice(("q_proj", "c_attn", "lm_head", "all-linear", "main", "train", "x"))


def deepspeed_section(rng: random.Random) -> Tree:
    """A section of the keys that a job may hold."""
    drawn = [typical(rng, DeepSpeedConfig) for _ in range(3)]  # most of DeepSpeed's keys are set elsewhere in a job
    return {key: value for each in drawn for key, value in without(each, set(paths(each)) - IN_A_JOB).items()}


def _annotation(path: str) -> Any:
    section: Any = Job
    *parents, leaf = path.split(".")
    for parent in parents:
        found = section.model_fields[parent].annotation
        section = next(
            member for member in _members(found) if isinstance(member, type) and issubclass(member, BaseModel)
        )
    return section.model_fields[leaf].annotation


def _members(annotation: Any) -> list[Any]:
    if get_origin(annotation) in (Union, UnionType):
        return [inner for member in get_args(annotation) for inner in _members(member)]
    if get_origin(annotation) in (list, tuple):
        return _members(get_args(annotation)[0])
    return _members(get_args(annotation)[0]) if hasattr(annotation, "__metadata__") else [annotation]


def put_key(document: Tree, path: str, value: Tree) -> None:
    """Sets a dotted key of a job, making its sections."""
    node = document
    *parents, leaf = path.split(".")
    for parent in parents:
        if parent == "model" and isinstance(node.get(parent), str):
            node[parent] = {"name": node[parent]}
        if parent == "sources":  # a list of sections
            if not isinstance(node.get(parent), list) or not node[parent] or not isinstance(node[parent][0], dict):
                node[parent] = [{}]
            node = node[parent][0]
            continue
        if not isinstance(node.get(parent), dict):
            node[parent] = {}
        node = node[parent]
    node[leaf] = value


def draw_document(rng: random.Random, sound: list[Tree]) -> Tree:
    """A job as a tree: a sound one with a few changes, most of them within the schema."""
    document = copy.deepcopy(rng.choice(sound))
    if rng.random() < 0.15:
        return document  # so that what a sound job leads to is tried in every run
    while True:
        way = rng.random()
        key = rng.choice(KEYS)
        if not isinstance(document, dict):
            return document
        if way < 0.68:
            put_key(document, key, typical(rng, _annotation(key), key.rpartition(".")[2]))
        elif way < 0.74:
            put_key(document, key, change_value(rng, typical(rng, _annotation(key), key.rpartition(".")[2])))
        elif way < 0.82:
            put_key(document, key, odd_value(rng))
        else:
            document = mutate(rng, document, names=LEAVES)
        if rng.random() < 0.5:
            return document


def draw_file(rng: random.Random, sound: list[Tree]) -> bytes:
    """A job file: YAML of a drawn document, at times with a slip in its text or another encoding."""
    document = draw_document(rng, sound)
    try:
        text = yaml.safe_dump(
            document, allow_unicode=rng.random() < 0.5, default_flow_style=rng.choice((None, True, False))
        )
    except (yaml.YAMLError, RecursionError, ValueError):
        text = repr(document)
    while rng.random() < 0.2:
        text = mutate_text(rng, text, snippets=YAML_PIECES)
    return encoded(rng, text, share=0.05)
