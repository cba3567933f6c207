"""DeepSpeed's features that the memory estimate does not support."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from toolkit.arguments import shown
from toolkit.deepspeed_spec.findings import Finding
from toolkit.deepspeed_spec.nested import lookup

# DeepSpeed accepts the first three in upper or lower case, and torch's by its exact name (engine.py
# _configure_basic_optimizer).
PRICED_OPTIMIZERS = ("Adam", "AdamW", "Lion", "SGD")


def _is_unpriced_optimizer(name: Any) -> bool:
    return name != "SGD" and str(name).lower() not in ("adam", "adamw", "lion")


# By path: whether a value turns the feature on.
_UNPRICED: Mapping[str, Callable[[Any], bool]] = {
    "torch_autocast.enabled": bool,
    "tensor_parallel.autotp_size": lambda size: size > 1,
    "sequence_parallel_size": lambda size: size != 1,
    "hybrid_engine.enabled": bool,
    "expert_parallel.enabled": bool,
    "weight_quantization": bool,
    "compile.deepcompile": bool,
    "datastates_ckpt": lambda section: section is not False,
    "zero_optimization.zenflow": lambda section: True,
    "zero_optimization.offload_optimizer.super_offload": bool,
    "zero_optimization.stage3_use_all_reduce_for_fetch_params": bool,
    "zero_optimization.zero_quantized_nontrainable_weights": bool,
    "zero_optimization.stage3_model_persistence_threshold": lambda threshold: True,
    "bf16.bf16_optimizer_states": bool,
    "data_types.param_dtype": bool,
    "data_types.grad_accum_dtype": lambda dtype: dtype == "int8",
    "optimizer.type": _is_unpriced_optimizer,
}

_INSTEAD: Mapping[str, str] = {
    "optimizer.type": f"Set it to one of {', '.join(PRICED_OPTIMIZERS)}",
    "tensor_parallel.autotp_size": "Set it to 1",
    "sequence_parallel_size": "Set it to 1",
    "data_types.grad_accum_dtype": "Set it to fp32, bf16 or fp16",
}


def unpriced(config: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield the features that a configuration turns on and the memory estimate does not support.

    Args:
        config: Configuration that `read_config` returned.
    """
    for path, is_on in _UNPRICED.items():
        value = lookup(config, path)
        if value is not None and is_on(value):
            instead = _INSTEAD.get(path, "Turn it off")
            yield Finding(
                code="ESTIMATE_UNSUPPORTED",
                path=path,
                message=f"={shown(value)} changes memory in a way that the estimate does not know",
                fix=f"{instead}, to estimate the rest",
                outcome="refused",
                source="",
            )
