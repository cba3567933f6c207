"""Keys of a DeepSpeed configuration that exclude each other: DeepSpeed raises on each combination.

Source: deepspeed 0.19.8 runtime/config.py DeepSpeedConfig._do_error_check, runtime/precision_config.py,
runtime/zero/config.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from toolkit.deepspeed_spec.findings import Finding, refused
from toolkit.deepspeed_spec.schema import DeepSpeedConfig

_ERROR_CHECK = "deepspeed runtime/config.py _do_error_check"
_ZERO = "deepspeed runtime/zero/config.py DeepSpeedZeroConfig"


def contradictions(keys: DeepSpeedConfig) -> Iterator[Finding]:
    """Yield the keys of a configuration that contradict others."""
    for check in _CHECKS:
        yield from check(keys)


def _precisions(keys: DeepSpeedConfig) -> Iterator[Finding]:
    if keys.fp16.enabled and keys.bf16.enabled:
        source = "deepspeed runtime/config.py"
        yield refused("bf16.enabled", "=true and fp16.enabled=true", "Enable one of them", source=source)


def _dynamic_scale(keys: DeepSpeedConfig) -> Iterator[Finding]:
    fp16 = keys.fp16
    if not fp16.enabled or fp16.loss_scale:
        return
    for name, value in (("loss_scale_window", fp16.loss_scale_window), ("min_loss_scale", fp16.min_loss_scale)):
        if value <= 0:
            yield refused(
                f"fp16.{name}",
                f"={value} with loss_scale=0, which scales dynamically",
                "Set it above 0",
                source="deepspeed runtime/precision_config.py DeepSpeedFP16Config",
            )


def _gradient_norm(keys: DeepSpeedConfig) -> Iterator[Finding]:
    zero = keys.zero_optimization
    if not zero.compute_grad_norm and zero.stage not in (1, 2):
        yield refused(
            "zero_optimization.compute_grad_norm",
            f"=false with stage={zero.stage}: only stages 1 and 2 work without the norm",
            "Remove it",
            source=_ZERO,
        )


def _partial_offload(keys: DeepSpeedConfig) -> Iterator[Finding]:
    zero = keys.zero_optimization
    if zero.offload_optimizer is not None and zero.offload_optimizer.ratio < 1 and zero.stage != 3:
        yield refused(
            "zero_optimization.offload_optimizer.ratio",
            f"={zero.offload_optimizer.ratio:g} with stage={zero.stage}: only stage 3 supports partial offload",
            "Set stage to 3, or ratio to 1",
            source=_ZERO,
        )


def _low_precision_master(keys: DeepSpeedConfig) -> Iterator[Finding]:
    bf16, stage = keys.bf16, keys.zero_optimization.stage
    switches = {
        "fp16.fp16_master_weights_and_grads": keys.fp16.fp16_master_weights_and_grads,
        "bf16.bf16_master_weights_and_grads": bf16.bf16_master_weights_and_grads,
        "bf16.bf16_optimizer_states": bf16.bf16_optimizer_states,
    }
    for path, is_on in switches.items():
        if is_on and stage == 0:
            yield refused(path, "=true with stage=0", "Set zero_optimization.stage to 1, 2 or 3", source=_ERROR_CHECK)
    if bf16.bf16_optimizer_states and not bf16.bf16_master_weights_and_grads:
        yield refused(
            "bf16.bf16_optimizer_states",
            "=true without bf16_master_weights_and_grads",
            "Set both, or neither",
            source=_ERROR_CHECK,
        )


def _summed_gradients(keys: DeepSpeedConfig) -> Iterator[Finding]:
    if keys.gradient_allreduce_op != "sum":
        return
    beside = {
        "stage=3": keys.zero_optimization.stage == 3,
        "zenflow": keys.zero_optimization.zenflow is not None,
        "deepcompile=true": keys.compile.deepcompile,
    }
    for name, is_there in beside.items():
        if is_there:
            yield refused("gradient_allreduce_op", f"=sum with {name}", "Set it to mean", source=_ERROR_CHECK)


_CHECKS: tuple[Callable[[DeepSpeedConfig], Iterator[Finding]], ...] = (
    _precisions,
    _dynamic_scale,
    _gradient_norm,
    _partial_offload,
    _low_precision_master,
    _summed_gradients,
)
