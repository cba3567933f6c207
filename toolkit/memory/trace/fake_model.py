"""The model of a trace: built without storage, pruned, sharded, then given storage on the fake device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedConfig
from transformers.initialization import no_init_weights
from transformers.modeling_layers import GradientCheckpointingLayer

from toolkit.config.job import Lora
from toolkit.memory.kernels.quantized import quantize_linears
from toolkit.memory.trace.representatives import LayerStack
from toolkit.modeling.build import construct, decoder_layers
from toolkit.modeling.lora import apply_lora
from toolkit.tensor_parallel.apply import apply_tensor_parallel
from toolkit.tensor_parallel.grad_sync import carry_hooks
from toolkit.tensor_parallel.tables import tp_plan_for


def build_empty(config: PreTrainedConfig, *, dtype: torch.dtype, trust_remote_code: bool) -> Any:
    """Build the whole model without storage."""
    with no_init_weights(), torch.device("meta"):
        return construct(config, dtype=dtype, trust_remote_code=trust_remote_code)


def shard(model: Any, *, tp_group: dist.ProcessGroup, sequence_parallel: bool = False) -> int:
    """Shard the pruned model for one tensor rank, without storage, as `modeling.build` does, and return `num_replicas`."""
    styles = tp_plan_for(model)
    apply_tensor_parallel(model, styles, tp_group=tp_group, sequence_parallel=sequence_parallel)
    for layer in decoder_layers(model):
        layer._z3_leaf = True  # type: ignore[assignment]  # as gather_as_one does; importing DeepSpeed takes seconds
    return max(1, tp_group.size() // styles.heads.key_value)


def on_fake_device(model: Any, dtype: torch.dtype, lora: Lora | None, *, quantized: bool) -> Any:
    """Give the pruned model storage on the fake device and then adapters, in the order of `modeling.build`, and return it."""
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    checkpointed = [layer for layer in layers if layer.gradient_checkpointing]
    for layer in checkpointed:
        layer.gradient_checkpointing = False
    adapted = model
    if quantized:
        quantize_linears(model)
    if lora is not None:
        with torch.device("meta"):
            adapted = apply_lora(model, lora, seed=0)
    _materialize(adapted, dtype)
    for layer in checkpointed:
        layer.gradient_checkpointing = True
    adapted.train()
    return adapted


def _materialize(model: nn.Module, dtype: torch.dtype) -> None:
    """Replace meta parameters and buffers by fake ones; shared ones stay shared."""
    made: dict[int, Any] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in made:
                # peft and DeepSpeed cast what was made in another type (engine.py _configure_distributed_model).
                kind = dtype if parameter.is_floating_point() else parameter.dtype
                empty = torch.empty_like(parameter, device="cpu", dtype=kind, requires_grad=False)
                made[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                carry_hooks(parameter, made[id(parameter)])
            module._parameters[name] = made[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = made.setdefault(id(buffer), torch.empty_like(buffer, device="cpu"))


def in_adapters(model: nn.Module, stack: LayerStack) -> LayerStack:
    """Return a stack with its path inside adapters, which wrap the model."""
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and (name == stack.prefix or name.endswith(f".{stack.prefix}")):
            return replace(stack, prefix=name)
    raise AssertionError(stack.prefix)
