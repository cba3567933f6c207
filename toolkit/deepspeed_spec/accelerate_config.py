"""An Accelerate configuration in place of a DeepSpeed file, converted as Accelerate converts it.

Source: accelerate utils/dataclasses.py DeepSpeedPlugin, utils/launch.py prepare_deepspeed_cmd_env.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from toolkit.arguments import shown
from toolkit.config.yaml_text import read_named
from toolkit.deepspeed_spec.json_text import KIND, parse_object
from toolkit.deepspeed_spec.nested import subsection
from toolkit.errors import SpecError

# Keys of Accelerate's section that become DeepSpeed's.
_ZERO = (
    "zero_stage",
    "offload_optimizer_device",
    "offload_optimizer_nvme_path",
    "offload_param_device",
    "offload_param_nvme_path",
    "zero3_save_16bit_model",
)
_BATCH = ("gradient_accumulation_steps", "gradient_clipping")
# How Accelerate starts processes and builds the model: no part of DeepSpeed's configuration.
_LAUNCH = (
    "deepspeed_config_file",
    "deepspeed_multinode_launcher",
    "deepspeed_hostfile",
    "deepspeed_exclusion_filter",
    "deepspeed_inclusion_filter",
    "deepspeed_moe_layer_cls_names",
    "zero3_init_flag",
)
_SPLITS = ("tp_size", "cp_size", "sp_size")


def made_config(document: Mapping[str, Any], *, name: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the DeepSpeed configuration that Accelerate makes of its own, with "auto" for what a script sets, and notes.

    Args:
        document: Content of the file.
        name: Name of the file, for messages.

    Raises:
        SpecError: ACCELERATE_FILE for a file that is not for DeepSpeed; ESTIMATE_UNSUPPORTED for one that splits the model
            or sequences; the errors of a DeepSpeed file where it names one.
    """
    section, kind = document.get("deepspeed_config"), document.get("distributed_type")
    if kind != "DEEPSPEED" or not isinstance(section, Mapping):
        other = "Set parallel.strategy of the job to ddp or fsdp2, and leave --deepspeed-config out"
        raise SpecError.of(
            code="ACCELERATE_FILE",
            key=name,
            message=f"{name} is a configuration of Accelerate without DeepSpeed: "
            f"distributed_type={kind}, deepspeed_config={shown(section)}",
            fix="Write its section deepspeed_config" if kind == "DEEPSPEED" else other,
        )
    _check_splits(document, name=name)
    file = section.get("deepspeed_config_file")
    config = (
        _of_section(section) if file is None else parse_object(read_named(Path(str(file)), kind=KIND), name=str(file))
    )
    return _with_precision(config, document), tuple(_notes(section, name=name))


def _check_splits(document: Mapping[str, Any], *, name: str) -> None:
    parallelism = subsection(document, "parallelism_config")
    for axis in _SPLITS:
        key = f"parallelism_config_{axis}"
        if parallelism.get(key) not in (None, 1):
            raise SpecError.of(
                code="ESTIMATE_UNSUPPORTED",
                key=f"parallelism_config.{key}",
                message=f"{name}: {key}={parallelism[key]} changes memory in a way that the estimate does not know",
                fix="Set it to 1, to estimate the rest",
            )


def _of_section(section: Mapping[str, Any]) -> dict[str, Any]:
    zero: dict[str, Any] = {
        "stage": section.get("zero_stage", 2),
        "stage3_gather_16bit_weights_on_model_save": section.get("zero3_save_16bit_model", False),
    }
    for part in ("optimizer", "param"):
        device, folder = section.get(f"offload_{part}_device", "none"), section.get(f"offload_{part}_nvme_path")
        zero[f"offload_{part}"] = {"device": device} | ({"nvme_path": folder} if device == "nvme" else {})
    batch = {key: section.get(key, "auto") for key in _BATCH}
    return {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", **batch, "zero_optimization": zero}


def _with_precision(config: Mapping[str, Any], document: Mapping[str, Any]) -> dict[str, Any]:
    """Add the precision as DeepSpeedPlugin.set_mixed_precision does."""
    wanted = str(document.get("mixed_precision"))
    sections = {dtype: {"enabled": dtype == {"fp8": "bf16"}.get(wanted, wanted)} for dtype in ("bf16", "fp16")}
    return {**({} if document.get("mixed_precision") is None else sections), **config}


def _notes(section: Mapping[str, Any], *, name: str) -> Iterator[str]:
    yield f"{name} is a configuration of Accelerate: what DeepSpeed is given of it is estimated; cards and nodes are the job's"
    if section.get("zero3_init_flag") is False and section.get("zero_stage") == 3:
        yield f"{name}: zero3_init_flag=false, which --without-zero-init estimates"
    for key in section:
        if key not in (*_ZERO, *_BATCH, *_LAUNCH):
            yield f"{name}: Accelerate does not read deepspeed_config.{key}"
