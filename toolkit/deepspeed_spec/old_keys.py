"""Keys that DeepSpeed has removed, replaced, or reads in an old form.

Sources: deepspeed 0.19.8 runtime/config.py, runtime/zero/config.py, runtime/precision_config.py, runtime/config_utils.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from toolkit.arguments import shown
from toolkit.deepspeed_spec.fields import is_auto
from toolkit.deepspeed_spec.findings import Finding, ineffective, refused
from toolkit.deepspeed_spec.nested import has_path

# runtime/config.py _REMOVED_TOP_LEVEL_CONFIG_KEYS and _REMOVED_ZERO_CONFIG_KEYS: refused even when disabled.
REMOVED: Mapping[str, str] = {
    "elasticity": "Remove it: a run keeps the number of ranks that it started with",
    "amp": "Remove it, and train in bf16 or fp16",
    "nebula": "Remove it",
    "compression_training": "Remove it",
    "quantize_training": "Remove it",
    "sparse_gradients": "Remove it",
    "eigenvalue": "Remove it",
    "sparse_attention": "Remove it",
    "graph_harvesting": "Remove it",
    "curriculum_learning": "Remove it: DeepSpeed's own data loader uses "
    "data_efficiency.data_sampling.curriculum_learning",
    "progressive_layer_drop": "Remove it",
    "zero_optimization.mics_shard_size": "Use zero_hpz_partition_size",
    "zero_optimization.mics_hierarchical_params_gather": "Use zero_hpz_partition_size",
    "zero_optimization.zeropp_loco_param": "Use zero_quantized_gradients alone",
}

# Sections that are fields of another one in DeepSpeed, which drops an "auto" in their place (monitor/config.py).
MONITORS = ("tensorboard", "wandb", "csv_monitor", "comet")

# Keys that DeepSpeed replaces by others (runtime/config_utils.py _process_deprecated_field), and what `true` means for each.
_DEPRECATED: Mapping[str, tuple[str, Any]] = {
    "cpu_offload": ("offload_optimizer", {"device": "cpu"}),
    "cpu_offload_param": ("offload_param", {"device": "cpu"}),
    "stage3_gather_fp16_weights_on_model_save": ("stage3_gather_16bit_weights_on_model_save", True),
}


def removed_keys(config: Mapping[str, Any]) -> list[Finding]:
    """Return the keys of a configuration that DeepSpeed has removed."""
    return [
        Finding(
            code="DEEPSPEED_REMOVED",
            path=path,
            message=" was removed from DeepSpeed",
            fix=fix,
            outcome="refused",
            source="deepspeed runtime/config.py _reject_removed_config_keys",
        )
        for path, fix in REMOVED.items()
        if has_path(config, path)
    ]


def bring_up_to_date(config: dict[str, Any]) -> Iterator[Finding]:
    """Convert old forms to current ones in place, and remove sections that DeepSpeed treats as absent."""
    for name in ("bf16", "aio"):
        if name in config and config[name] is None:
            del config[name]
    if "bfloat16" in config:
        old = config.pop("bfloat16")
        if "bf16" in config:
            yield ineffective("bfloat16", "a section bf16, which replaces it", "Remove it")
        else:
            config["bf16"] = old
    for name in MONITORS:
        if is_auto(config.get(name)):
            del config[name]
    zero = config.get("zero_optimization")
    size = config.pop("allgather_size", None)
    if isinstance(zero, bool):  # runtime/zero/config.py read_zero_config_deprecated
        config["zero_optimization"] = {"stage": int(zero)}
        if zero and size is not None:
            config["zero_optimization"]["allgather_bucket_size"] = size
    elif size is not None:
        yield ineffective(
            "allgather_size", "a section zero_optimization", "Set zero_optimization.allgather_bucket_size"
        )


def replace_deprecated(config: dict[str, Any]) -> Iterator[Finding]:
    """Replace deprecated keys by current ones, in place, as DeepSpeed does."""
    zero = config.get("zero_optimization", {})
    if zero.pop("cpu_offload_use_pin_memory", None) is not None:
        yield ineffective(
            "zero_optimization.cpu_offload_use_pin_memory",
            "this DeepSpeed, which pins what it offloads",
            "Set pin_memory in offload_optimizer or offload_param",
            source="deepspeed runtime/zero/config.py DeepSpeedZeroConfig",
        )
    for old, (new, stands_for) in _DEPRECATED.items():
        if old not in zero:
            continue
        value = zero.pop(old)
        if new in zero:
            yield refused(
                f"zero_optimization.{old}",
                f"={shown(value)} with {new}, its current name",
                "Remove it",
                source="deepspeed runtime/config_utils.py _process_deprecated_field",
            )
        elif value:
            zero[new] = stands_for
