"""Sound configurations of the shapes that the libraries' own examples have, and seeded mutations of them."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from published_files import ACCEPTED, REFUSED

# Values with which a mutation replaces another, whatever its type.
_ODD: tuple[Any, ...] = (
    0,
    -1,
    1,
    2,
    3,
    7,
    2.5,
    8.0,
    0.0,
    "8",
    "5e8",
    "x",
    "auto",
    True,
    False,
    None,
    [],
    {},
    "true",
    "no",
)

_TRIPLE = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}
_ADAMW = {"type": "AdamW", "params": {"lr": 3e-5, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}}
_WARMUP = {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 3e-5, "warmup_num_steps": 500}}
_FP16 = {"enabled": True, "loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1}

# DeepSpeed files without "auto", as the tutorials of DeepSpeed and the guides of transformers and Accelerate have them.
ENGINES: dict[str, dict[str, Any]] = {
    "stage 0": {**_TRIPLE, "bf16": {"enabled": True}, "zero_optimization": {"stage": 0}},
    "stage 1": {**_TRIPLE, "bf16": {"enabled": True}, "optimizer": _ADAMW, "zero_optimization": {"stage": 1}},
    "stage 2": {
        **_TRIPLE,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": _ADAMW,
        "scheduler": _WARMUP,
        "zero_optimization": {
            "stage": 2,
            "allgather_partitions": True,
            "allgather_bucket_size": 200000000,
            "overlap_comm": True,
            "reduce_scatter": True,
            "reduce_bucket_size": 200000000,
            "contiguous_gradients": True,
        },
    },
    "stage 3": {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "steps_per_print": 2000,
        "wall_clock_breakdown": False,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "sub_group_size": 1000000000,
            "reduce_bucket_size": 1000000,
            "stage3_prefetch_bucket_size": 900000,
            "stage3_param_persistence_threshold": 10000,
            "stage3_max_live_parameters": 1000000000,
            "stage3_max_reuse_distance": 1000000000,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
    },
    "fp16": {"train_batch_size": 4, "fp16": _FP16, "zero_optimization": {"stage": 2, "reduce_bucket_size": 1000000}},
}
# With "auto", as tools publish them; Trainer reads them.
AUTOS: dict[str, dict[str, Any]] = {**ACCEPTED, **REFUSED}

_CLUSTER = {
    "compute_environment": "LOCAL_MACHINE",
    "debug": False,
    "downcast_bf16": "no",
    "machine_rank": 0,
    "main_training_function": "main",
    "mixed_precision": "bf16",
    "num_machines": 1,
    "num_processes": 8,
    "rdzv_backend": "static",
    "same_network": True,
    "tpu_env": [],
    "tpu_use_cluster": False,
    "tpu_use_sudo": False,
    "use_cpu": False,
}
# Configurations of Accelerate, as TRL and alignment-handbook publish them and `accelerate config` writes them.
CLUSTERS: dict[str, dict[str, Any]] = {
    **{
        f"zero{stage}": {
            **_CLUSTER,
            "distributed_type": "DEEPSPEED",
            "deepspeed_config": {
                "deepspeed_multinode_launcher": "standard",
                "gradient_accumulation_steps": 1,
                "zero_stage": stage,
                "offload_optimizer_device": "none",
                "offload_param_device": "none",
                "zero3_init_flag": stage == 3,
                **({"zero3_save_16bit_model": True} if stage == 3 else {}),
            },
        }
        for stage in (1, 2, 3)
    },
    "multi_gpu": {**_CLUSTER, "distributed_type": "MULTI_GPU", "gpu_ids": "all"},
    "single": {**_CLUSTER, "distributed_type": "NO", "num_processes": 1},
    "file": {
        **{key: value for key, value in _CLUSTER.items() if key != "mixed_precision"},
        "distributed_type": "DEEPSPEED",
        "deepspeed_config": {"deepspeed_config_file": "ds.json", "zero3_init_flag": False},
    },
}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "fine-tuning": {
        "output_dir": "out",
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "num_train_epochs": 1,
        "learning_rate": 0.00002,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 10,
        "weight_decay": 0.01,
        "bf16": True,
        "logging_steps": 10,
        "save_strategy": "epoch",
        "seed": 42,
        "report_to": "none",
        "use_cpu": True,
    },
    "evaluated": {
        "output_dir": "out",
        "max_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 4,
        "load_best_model_at_end": True,
        "metric_for_best_model": "loss",
        "fp16": False,
        "logging_strategy": "steps",
        "logging_steps": 1,
        "report_to": "none",
        "use_cpu": True,
        "dataloader_num_workers": 0,
        "optim": "adamw_torch",
        "max_grad_norm": 1.0,
        "adam_beta2": 0.95,
    },
}
TRL: dict[str, dict[str, Any]] = {
    "sft": {
        "model_name_or_path": "m",
        "dataset_name": "d",
        "bf16": True,
        "max_length": 2048,
        "packing": True,
        "learning_rate": "2.0e-04",
        "gradient_checkpointing": True,
        "output_dir": "out",
        "logging_steps": 5,
        "per_device_train_batch_size": 4,
        "use_peft": True,
        "lora_r": 16,
        "use_cpu": True,
        "report_to": "none",
        "lr_scheduler_type": "cosine",
        "eval_strategy": "no",
        "attn_implementation": "sdpa",
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A configuration for both verdicts.

    Args:
        group: Which libraries judge it.
        name: Name, with its mutations.
        config: Main configuration: of DeepSpeed, of Accelerate, or arguments; the lines of a hostfile by themselves.
        arguments: Arguments of Trainer beside it.
    """

    group: str
    name: str
    config: dict[str, Any]
    arguments: dict[str, Any] = field(default_factory=dict)


def cases(seed: int = 18) -> Iterator[Case]:
    """Yield the published shapes as they are, then mutations of them."""
    draw = random.Random(seed)
    for group, bases, count in (
        ("deepspeed", ENGINES, 90),
        ("trainer", AUTOS, 60),
        ("accelerate", CLUSTERS, 100),
        ("arguments", ARGUMENTS, 80),
        ("command", ARGUMENTS, 50),
        ("trl", TRL, 40),
    ):
        for name, config in bases.items():
            yield Case(group=group, name=name, config=copy.deepcopy(config), arguments=_matching(group))
        for _ in range(count):
            name = draw.choice(sorted(bases))
            config, what = _mutated(bases[name], draw)
            yield Case(group=group, name=f"{name}: {what}", config=config, arguments=_matching(group))
    for name, config, said in _together(draw):
        yield Case(group="together", name=name, config=config, arguments=said)
    for name, config, said in _launched(draw):
        yield Case(group="launched", name=name, config=config, arguments=said)


def hostfiles(seed: int = 18) -> Iterator[str]:
    """Yield hostfiles, most of them wrong in a line."""
    draw = random.Random(seed)
    rows = (
        "n{} slots=8",
        "n{} slots=8 # all",
        "n{}",
        "n{} slots = 8",
        "n{} slots=x",
        "# n{}",
        "",
        "n0 slots=8",
        " n{} slots=4",
    )
    for _ in range(20):
        yield "\n".join(draw.choice(rows).format(number) for number in range(draw.randint(0, 4))) + "\n"


def _matching(group: str) -> dict[str, Any]:
    return {"bf16": True} if group == "trainer" else {}


def _together(draw: random.Random) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Yield a file of which some values are "auto" and some are not, and arguments that are the same or others."""
    for number in range(25):
        config = copy.deepcopy(AUTOS["zero2"])
        config["gradient_clipping"] = draw.choice(("auto", 1.0, 1))
        config["train_micro_batch_size_per_gpu"] = draw.choice(("auto", "auto", 2))
        config["train_batch_size"] = draw.choice(("auto", "auto", 8))
        config["bf16"]["enabled"] = draw.choice(("auto", True))
        said = {"bf16": draw.random() < 0.7, "per_device_train_batch_size": draw.choice((2, 2, 8))}
        said |= {"max_grad_norm": draw.choice((0.5, 1.0, 1.0)), "fp16": not said["bf16"]}
        yield f"arguments {number}", config, said


def _launched(draw: random.Random) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    for number in range(25):
        config = copy.deepcopy(CLUSTERS[f"zero{draw.choice((1, 2, 3))}"])
        config["num_processes"] = 1
        config["mixed_precision"] = draw.choice(("no", "bf16", "fp16"))
        config["deepspeed_config"]["gradient_accumulation_steps"] = draw.choice((1, 4, "auto"))
        said = {"gradient_accumulation_steps": draw.choice((1, 4)), "bf16": draw.random() < 0.6}
        yield f"launched {number}", config, said | ({"fp16": True} if not said["bf16"] and draw.random() < 0.5 else {})


def _mutated(base: Mapping[str, Any], draw: random.Random) -> tuple[dict[str, Any], str]:
    config, said = copy.deepcopy(dict(base)), []
    for _ in range(draw.choice((1, 1, 1, 2))):
        section, key = draw.choice(list(_keys(config)))
        way = draw.choice(("odd", "odd", "odd", "odd", "misspelt", "removed", "outside"))
        if way == "odd":
            section[key] = copy.deepcopy(draw.choice(_ODD))
            said.append(f"{key}={section[key]!r}")
            continue
        value = section.pop(key)
        said.append(f"{key} {way}")
        if way == "misspelt":
            at = draw.randrange(1, len(key))
            section[key[:at] + key[at + 1 :]] = value
        elif way == "outside":
            config[key] = value
    return config, ", ".join(said)


def _keys(section: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    for key, value in section.items():
        yield section, key
        if isinstance(value, dict):
            yield from _keys(value)
