"""Accelerate configurations given in place of a job: recognised, and refused with the equivalent job keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolkit.errors import SpecError

# accelerate commands/config/config_args.py ClusterConfig: neither a job nor a DeepSpeed file has keys of these names.
_MARKS = ("compute_environment", "distributed_type")
_STRATEGIES: Mapping[str, str] = {"DEEPSPEED": "zero", "MULTI_GPU": "ddp", "FSDP": "fsdp2"}
_OFFLOADS: Mapping[tuple[Any, Any], str] = {
    ("none", "none"): "none",
    ("cpu", "none"): "optimizer-cpu",
    ("cpu", "cpu"): "full-cpu",
    ("nvme", "none"): "optimizer-nvme",
    ("nvme", "nvme"): "full-nvme",
}
_PRECISIONS: Mapping[str, str] = {"no": "fp32", "False": "fp32", "fp16": "fp16", "bf16": "bf16", "fp8": "fp8"}


def is_accelerate_file(document: Mapping[str, Any]) -> bool:
    """Return whether a mapping is a configuration that `accelerate config` wrote."""
    return any(mark in document for mark in _MARKS)


def refuse_accelerate_file(document: Mapping[str, Any], *, name: str) -> None:
    """Refuse an Accelerate configuration where a job is expected.

    Raises:
        SpecError: ACCELERATE_FILE, with the equivalent job keys, if the document is one.
    """
    if not is_accelerate_file(document):
        return
    sections = ", ".join(f"{section}: {{{_flow(keys)}}}" for section, keys in job_sections(document).items())
    raise SpecError.of(
        code="ACCELERATE_FILE",
        key=name,
        message=f"{name} is a configuration of Accelerate, not a job",
        fix=f"Write a job that names model, cluster.gpu and data, with {sections or 'the same settings'}; the rest tells Accelerate how to start processes, and `toolkit emit` writes it for each job. `toolkit migrate {name}` makes such a job"
        + _beside(document),
    )


def job_sections(document: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the sections of a job that are equivalent to the training settings of an Accelerate configuration."""
    deepspeed = _section(document, "deepspeed_config")
    nodes, processes = document.get("num_machines"), document.get("num_processes")
    cards = None
    if isinstance(nodes, int) and isinstance(processes, int) and nodes > 0 and processes % nodes == 0:
        cards = processes // nodes
    devices = tuple(deepspeed.get(f"offload_{part}_device", "none") for part in ("optimizer", "param"))
    parallelism = _section(document, "parallelism_config")
    sections: dict[str, dict[str, Any]] = {
        "cluster": {
            "nodes": nodes,
            "gpus_per_node": cards,
            "nvme_path": _path(deepspeed.get("offload_optimizer_nvme_path")),
        },
        "train": {
            "precision": _PRECISIONS.get(str(document.get("mixed_precision"))),
            "gradient_accumulation_steps": _number(deepspeed.get("gradient_accumulation_steps")),
            "max_grad_norm": _number(deepspeed.get("gradient_clipping")),
            "torch_compile": True if document.get("dynamo_config") else None,
        },
        "parallel": {
            "strategy": _STRATEGIES.get(str(document.get("distributed_type"))),
            "zero_stage": deepspeed.get("zero_stage"),
            "tensor": parallelism.get("parallelism_config_tp_size"),
            "offload": _OFFLOADS.get(devices) if deepspeed else None,
        },
    }
    said = {name: {key: value for key, value in keys.items() if value is not None} for name, keys in sections.items()}
    return {name: keys for name, keys in said.items() if keys}


def _beside(document: Mapping[str, Any]) -> str:
    file = _section(document, "deepspeed_config").get("deepspeed_config_file")
    return f". To estimate {file} as it is: `toolkit estimate JOB --deepspeed-config {file}`" if file else ""


def _section(document: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = document.get(key)
    return value if isinstance(value, Mapping) else {}


def _path(value: Any) -> Any:
    return None if value in (None, "none") else value


def _number(value: Any) -> Any:
    return None if value == "auto" else value


def _flow(keys: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{key}: {str(value).lower() if isinstance(value, bool) else value}" for key, value in keys.items()
    )
