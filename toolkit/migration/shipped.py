"""Configurations that tools ship and name by a word or a file, without the file: what they say, rebuilt from their documentation."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

# DeepSpeed files of axolotl, LLaMA-Factory and ms-swift by their names: stage, and devices of optimizer and parameters.
_DEEPSPEED: Mapping[str, tuple[int, str, str]] = {
    "zero0": (0, "none", "none"),
    "ds_z0_config": (0, "none", "none"),
    "zero1": (1, "none", "none"),
    "zero1_torch_compile": (1, "none", "none"),
    "zero2": (2, "none", "none"),
    "zero2_torch_compile": (2, "none", "none"),
    "ds_z2_config": (2, "none", "none"),
    "zero2_offload": (2, "cpu", "none"),
    "ds_z2_offload_config": (2, "cpu", "none"),
    "zero3": (3, "none", "none"),
    "zero3_bf16": (3, "none", "none"),
    "ds_z3_config": (3, "none", "none"),
    "ds_z3_fp8_config": (3, "none", "none"),
    "zero3_offload": (3, "cpu", "cpu"),
    "zero3_bf16_cpuoffload_all": (3, "cpu", "cpu"),
    "ds_z3_offload_config": (3, "cpu", "cpu"),
}


def shipped_deepspeed(named: str) -> dict[str, Any] | None:
    """Return a DeepSpeed configuration that a tool ships under a name; None for an unknown one.

    >>> shipped_deepspeed("examples/deepspeed/ds_z3_config.json")["zero_optimization"]
    {'stage': 3}
    """
    name = PurePath(named).stem
    if name not in _DEEPSPEED:
        return None
    stage, optimizer, parameters = _DEEPSPEED[name]
    zero: dict[str, Any] = {"stage": stage}
    zero |= {"offload_optimizer": {"device": optimizer}} if optimizer != "none" else {}
    zero |= {"offload_param": {"device": parameters}} if parameters != "none" else {}
    precision = {dtype: {"enabled": "auto"} for dtype in ("bf16", "fp16")}
    compiled = {"compile": {"enabled": True}} if name.endswith("torch_compile") else {}
    return {"zero_optimization": zero, "gradient_clipping": "auto", **precision, **compiled}


def shipped_accelerate(named: str) -> dict[str, Any] | None:
    """Return an Accelerate configuration that TRL ships under a name (trl/accelerate_configs); None for an unknown one."""
    common = {"mixed_precision": "bf16", "num_machines": 1, "num_processes": 1 if named == "single_gpu" else 8}
    if named in ("single_gpu", "multi_gpu"):
        return {"distributed_type": "NO" if named == "single_gpu" else "MULTI_GPU", **common}
    if named in ("fsdp1", "fsdp2"):
        return {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": int(named[-1])}, **common}
    if named in ("zero1", "zero2", "zero3"):
        return {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": int(named[-1])}, **common}
    return None
