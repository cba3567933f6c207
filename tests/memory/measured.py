"""Runs that were measured on H100 SXM 80 GB cards, and the plans that they ran.

Each line of `tests/data/h100.jsonl` is a randomly initialised Hugging Face model trained for four steps with the plain
DeepSpeed 0.19.8 engine, torch 2.11 and transformers 5.17, on cards of one host joined by NVLink.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import toolkit as tk
from toolkit.planning.plan import Plan

MODEL_TYPES = {"LlamaConfig": "llama", "Qwen2Config": "qwen2", "Qwen3Config": "qwen3", "GPT2Config": "gpt2"}


@cache
def measured_runs() -> tuple[dict[str, Any], ...]:
    """Return the measured runs, without those of DeepSpeed's own AutoTP."""
    lines = (Path(__file__).parents[1] / "data" / "h100.jsonl").read_text(encoding="utf-8").splitlines()
    return tuple(run for run in map(json.loads, lines) if not run["case"].get("autotp"))


def plan_of(run: dict[str, Any], folder: Path) -> Plan:
    """Return the plan of a measured run; its config.json is written into `folder`."""
    model = dict(run["model"])
    name, config_class = model.pop("name"), model.pop("config_class")
    path = folder / name
    path.mkdir(exist_ok=True)
    architecture = config_class.replace("Config", "LMHeadModel" if config_class == "GPT2Config" else "ForCausalLM")
    config = {**model, "model_type": MODEL_TYPES[config_class], "architectures": [architecture]}
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    case = run["case"]
    stage = case["zero"]
    # What the runs left to DeepSpeed's own defaults.
    zero = {"reduce_bucket_size": 500_000_000, "overlap_comm": stage == 3} if stage else {}
    train = {
        "sequence_length": case["seq"],
        "per_device_train_batch_size": case["mbs"],
        "gradient_accumulation_steps": case.get("gas", 1),
        "precision": case.get("dtype", "bf16"),
        "attention": case.get("attn", "sdpa"),
        "gradient_checkpointing": case.get("grad_ckpt", False),
        "optimizer": "adamw_torch" if case.get("torch_adam") else "adamw",
        "max_steps": 4,
    }
    if "lora" in case:
        train |= {"method": "lora", "lora": {"r": case["lora"]}}
    offload = "full-cpu" if case.get("offload_param") else "optimizer-cpu" if case.get("offload_optimizer") else "none"
    by_deepspeed = {} if offload == "none" else {"offload_engine": "deepspeed"}
    job = tk.Job.model_validate(
        {
            "model": {"name": str(path), "init": "random"},
            "cluster": {"gpu": "h100-sxm-80gb", "gpus_per_node": run["world"]},
            "train": train,
            "parallel": {"zero_stage": stage, "offload": offload} | by_deepspeed,
            "deepspeed": {"zero_optimization": zero} if zero else {},
        }
    )
    return tk.resolve(job)
