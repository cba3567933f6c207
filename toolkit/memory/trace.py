"""Runs the model that will be trained, on fake tensors, and notes what its forward and backward passes do to memory.

No weights are read, nothing is computed and no GPU is needed. Only as many decoder layers run as have different
structure or neighbours; the others repeat what these do.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from transformers import PreTrainedConfig

from toolkit.errors import SpecError, ToolkitError
from toolkit.groups.fake import fake_group
from toolkit.memory.events import Parameter, Trace, held
from toolkit.memory.expand import expand, expand_buffers, expand_host_copies, expand_parameters, expand_paths
from toolkit.memory.failure import trace_failed, unknown_architecture
from toolkit.memory.fake_model import build_empty, in_adapters, on_fake_device, shard
from toolkit.memory.inputs import PADDED, Task, loss_of, make_batch
from toolkit.memory.kernels import Device, cuda_kernels
from toolkit.memory.layers import Stack, find_stacks, prune
from toolkit.memory.linear_attention import describe, without_packages
from toolkit.memory.routing import (
    LoopedExperts,
    Routing,
    assumptions,
    collects_router_logits,
    has_experts,
    runs_grouped,
)
from toolkit.memory.segments import Segmenter
from toolkit.memory.values import Answer, in_place, no_chance, pass_checks
from toolkit.memory.zero_hooks import find_leaves
from toolkit.memory.zero_linear import inputs_kept
from toolkit.modeling.build import DTYPES, import_architecture, model_config
from toolkit.modeling.checkpointing import apply_gradient_checkpointing
from toolkit.modeling.fp8 import apply_fp8
from toolkit.modeling.fused_kernels import find_fusable
from toolkit.modeling.fused_loss import apply_loss
from toolkit.plan.plan import Plan
from toolkit.spec.job import Fp8, Kernels, Lora, Loss, Packing

__all__ = ["Parameter", "Trace", "trace", "trace_model"]


def trace(
    plan: Plan,
    *,
    device: Device,
    marks_modules: bool | None = None,
    keeps_inputs: bool = False,
    routing: Routing = "balanced",
    evaluation: bool = False,
    all_layers: bool = False,
) -> Trace:
    """Traces one micro-batch of a plan.

    Args:
        plan: What runs.
        device: Card, which decides on kernels.
        marks_modules: Whether to mark the hooks of ZeRO-3; by default if the plan's stage is 3.
        keeps_inputs: Whether linear modules keep their input even where they are frozen, as under ZeRO-3.
        routing: How tokens spread over experts.
        evaluation: Traces a micro-batch of validation data: no gradients.
        all_layers: Traces every layer instead of those that differ: slow, and the same.

    Raises:
        SpecError: MODEL_CLASS when transformers does not know the architecture; MODEL_CONFIG_INVALID.
        PlanError: TRACE_FAILED, with the module in which the model cannot run on fake tensors; and what `build_model`
            raises.
    """
    train, settings, data = plan.job.train, plan.settings, plan.job.data
    trusted = plan.job.model.trust_remote_code
    try:
        config = model_config(plan)
        import_architecture(config, trust_remote_code=trusted)
    except (ValueError, SpecError) as error:
        if isinstance(error, SpecError) and error.codes == ("MODEL_CONFIG_INVALID",):
            raise
        raise unknown_architecture(error, plan.model.name, trust_remote_code=trusted) from error
    return trace_model(
        config,
        micro_batch=settings.per_device_eval_batch_size if evaluation else settings.batch.micro,
        sequence_length=settings.sequence_length,
        dtype=DTYPES[settings.dtype],
        fp8=(train.fp8 or Fp8()) if settings.precision == "fp8" else None,
        fp8_emulated=plan.on_cpu,
        attention=settings.attention,
        device=device,
        packing=data.packing if data is not None else "wrapped",
        checkpointing=settings.gradient_checkpointing,
        offload_inputs=plan.profile.activations,
        loss=train.loss,
        kernels=settings.kernels,
        lora=None if train.method == "full" else train.lora or Lora(),
        quantized=train.method == "qlora",
        marks_modules=settings.zero_stage == 3 if marks_modules is None else marks_modules,
        keeps_inputs=keeps_inputs,
        routing=routing,
        evaluation=evaluation,
        trust_remote_code=trusted,
        tensor=plan.grid.tp,
        all_layers=all_layers,
    )


def trace_model(
    config: PreTrainedConfig,
    *,
    task: Task = "causal-lm",
    micro_batch: int,
    sequence_length: int,
    dtype: torch.dtype = torch.bfloat16,
    fp8: Fp8 | None = None,
    fp8_emulated: bool = False,
    attention: str = "sdpa",
    device: Device,
    packing: Packing = "wrapped",
    checkpointing: float = 0.0,
    offload_inputs: bool = False,
    loss: Loss = "full",
    kernels: Kernels = "eager",
    lora: Lora | None = None,
    quantized: bool = False,
    marks_modules: bool = False,
    keeps_inputs: bool = False,
    routing: Routing = "balanced",
    evaluation: bool = False,
    trust_remote_code: bool = False,
    tensor: int = 1,
    all_layers: bool = False,
) -> Trace:
    """Traces one micro-batch of any model that transformers builds from a configuration.

    >>> from transformers import ViTConfig
    >>> tiny = ViTConfig(hidden_size=16, intermediate_size=32, num_attention_heads=2, image_size=32)
    >>> made = trace_model(tiny, task="image-classification", micro_batch=8, sequence_length=1,
    ...                    device=Device(capability=9.0))
    >>> made.num_layers, made.num_traced_layers
    (12, 3)

    Args:
        config: Of the model; it is left as it is.
        task: Which `AutoModelFor…` builds it, and what a batch holds.
        micro_batch: Sequences, or images.
        sequence_length: Tokens of a sequence.
        dtype: Of the parameters.
        fp8: How the decoder layers' linear modules multiply in float8; None where they do not.
        fp8_emulated: Whether they do so without float8 kernels, as on a CPU.
        attention: `eager`, `sdpa` or `flash_attention_2`.
        device: Card, which decides on kernels.
        packing: As in `data.packing`: with `none` rows are padded and have a mask.
        checkpointing: Share of the layers that recompute, 0 to 1.
        offload_inputs: Whether the inputs of those wait in host memory.
        loss: How a causal language model computes its loss.
        kernels: Which compute norms and gated activations; all are traced as `eager`.
        lora: Adapters; None trains everything.
        quantized: Whether the linear layers under the adapters hold NF4 (QLoRA).
        marks_modules: Whether to mark the hooks of ZeRO-3.
        keeps_inputs: Whether linear modules keep their input even where they are frozen, as under ZeRO-3.
        routing: How tokens spread over experts that run one after the other; others do not depend on it.
        evaluation: Runs forward alone, without gradients and in evaluation mode.
        trust_remote_code: Whether the model's own code may run.
        tensor: Ranks that share each layer, of which one is traced: all have shards of the same sizes.
        all_layers: Traces every layer instead of those that differ: slow, and the same.

    Raises:
        PlanError: TRACE_FAILED; and what `build_model` and `apply_tensor_parallel` raise.
    """
    config = copy.deepcopy(config)
    config._attn_implementation = attention
    packed = packing == "separated"
    with _quiet(), cuda_kernels(device, packed=packed), _tensor_group(tensor) as tp_group:
        request = _Request(
            task=task,
            micro_batch=micro_batch,
            sequence_length=sequence_length,
            dtype=dtype,
            fp8=fp8,
            fp8_emulated=fp8_emulated,
            packing=packing,
            flatten=attention == "flash_attention_2",
            checkpointing=checkpointing,
            offload_inputs=offload_inputs,
            loss=loss,
            kernels=kernels,
            lora=lora,
            quantized=quantized,
            marks_modules=marks_modules,
            keeps_inputs=keeps_inputs,
            routing=routing,
            evaluation=evaluation,
            trust_remote_code=trust_remote_code,
            tp_group=tp_group,
        )
        if not all_layers and not collects_router_logits(config):
            made = request.trace(copy.deepcopy(config), all_layers=False)
            if made is not None:
                return made
        whole = request.trace(config, all_layers=True)
    assert whole is not None
    return whole


@contextlib.contextmanager
def _tensor_group(size: int) -> Iterator[dist.ProcessGroup | None]:
    """Gives a group of tensor ranks, beside any real groups of this process; None for one rank."""
    if size == 1:
        yield None
        return
    with fake_group(size) as group:
        yield group


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps fake tensors from logging the stack of an operation that they cannot run: the error says it."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """What to trace; `trace_model` explains each."""

    task: Task
    micro_batch: int
    sequence_length: int
    dtype: torch.dtype
    fp8: Fp8 | None
    fp8_emulated: bool
    packing: Packing
    flatten: bool
    checkpointing: float
    offload_inputs: bool
    loss: Loss
    kernels: Kernels
    lora: Lora | None
    quantized: bool
    marks_modules: bool
    keeps_inputs: bool
    routing: Routing
    evaluation: bool
    trust_remote_code: bool
    tp_group: dist.ProcessGroup | None

    def trace(self, config: PreTrainedConfig, *, all_layers: bool) -> Trace | None:
        """Traces all layers, or few; gives None where few cannot stand for all."""
        model: Any = None
        tracing: Segmenter | None = None
        try:
            full = build_empty(config, self.task, dtype=self.dtype, trust_remote_code=self.trust_remote_code)
            text = full.config.get_text_config(decoder=True)
            full.config.use_cache = text.use_cache = False
            apply_gradient_checkpointing(full, fraction=self.checkpointing, offload_inputs=self.offload_inputs)
            # Vision-language models take image features from a layer in the midst of the vision model.
            seeing = self.task == "image-text-to-text"
            stacks = find_stacks(full, all_layers=all_layers, only=text.model_type if seeing else None)
            prune(full, stacks)
            full.tie_weights()
            num_replicas = 1 if self.tp_group is None else shard(full, tp_group=self.tp_group)
            with FakeTensorMode(allow_non_fake_inputs=True):
                model = on_fake_device(full, self.dtype, self.lora, quantized=self.quantized)
                with unset_fake_temporarily():  # they look at numbers, or make modules without storage
                    if self.fp8 is not None:
                        apply_fp8(model, self.fp8, emulate=self.fp8_emulated)
                    left = find_fusable(model).left if self.kernels == "liger" else ()
                    apply_loss(model, self.loss)
                    if self._needs_input_gradient:
                        model.enable_input_require_grads()
                model.train(not self.evaluation)
                stacks = [in_adapters(model, stack) for stack in stacks]
                looped = None
                if has_experts(full.config) and not runs_grouped(full):
                    looped = LoopedExperts(full.config, self.routing)
                answers: list[Answer] = [
                    no_chance,
                    in_place,
                    *([pass_checks] if seeing else []),
                    *([looped] if looped else []),
                ]
                tracing = Segmenter(model, stacks, marked=self.marks_modules, answers=answers)
                running = tracing
                linears = inputs_kept() if self.keeps_inputs else contextlib.nullcontext()
                with without_packages(model) as replaced, linears:
                    tracing.run(lambda: self._step(model, running), backward=not self.evaluation)
                padded = self.packing == "none" and self.task != "image-classification"
                assumed = (
                    *assumptions(model, looped),
                    *describe(replaced),
                    *((PADDED,) if padded else ()),
                    *([f"kernels={self.kernels} leaves as they are: {', '.join(left)}"] if left else []),
                )
                made = _whole(model, stacks, tracing, assumed)
                asked = looped is not None and looped.asked
                return made and replace(
                    made,
                    has_experts=asked or runs_grouped(model),
                    depends_on_routing=asked,
                    num_replicas=num_replicas,
                )
        except ToolkitError:
            raise
        except Exception as error:
            raise trace_failed(error, model, backward=tracing is not None and tracing.in_backward) from error

    @property
    def _needs_input_gradient(self) -> bool:
        """Whether the first layer's input has a gradient though its embedding is frozen; both then outlive the pass.

        Under checkpointing transformers' gradient_checkpointing_enable does so, in scripts of Trainer or Accelerate;
        `toolkit train` needs it under ZeRO-3 with tensor ranks alone (modeling.build build_model).
        """
        if self.lora is None:
            return False
        return bool(self.checkpointing) if self.tp_group is None else self.keeps_inputs

    def _step(self, model: Any, tracing: Segmenter) -> torch.Tensor:
        """Runs the model on one micro-batch and gives the loss."""
        inputs, labels = make_batch(
            self.task,
            model.config,
            micro_batch=self.micro_batch,
            sequence_length=self.sequence_length,
            packing=self.packing,
            flatten=self.flatten,
            dtype=self.dtype,
        )
        wants_labels = self.task != "causal-lm" or self.loss != "full"
        outputs = model(**inputs, labels=labels) if wants_labels else model(**inputs)
        with tracing.loss():
            loss = loss_of(self.task, outputs, labels, model.config, tp_group=self.tp_group)
            del outputs
        return loss


def _tied(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Gives the modules that share a parameter with one that comes before them, and the parameter's name there."""
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        known = first.setdefault(id(parameter), name)
        if known != name:
            yield name.rpartition(".")[0], known


def _whole(model: Any, stacks: Sequence[Stack], tracing: Segmenter, assumed: tuple[str, ...]) -> Trace | None:
    """Repeats the traced layers for those that they stand for; None if they did not run in order or it does not add up.

    It does not add up where layers hand memory to others than their neighbours.
    """
    if not tracing.in_order and any(len(stack.kept) < stack.num_layers for stack in stacks):
        return None
    made = Trace(
        parameters=expand_parameters(model, stacks),
        buffers_bytes=expand_buffers(model, stacks),
        forward=expand(tracing.forward, stacks, backward=False),
        backward=expand(tracing.backward, stacks, backward=True),
        after=expand(tracing.after, stacks, backward=True),
        num_traced_layers=sum(len(stack.kept) for stack in stacks),
        num_layers=sum(stack.num_layers for stack in stacks),
        tied=tuple(_tied(model)),
        host_copies=expand_host_copies(tracing.host_copies, stacks),
        assumptions=assumed,
        leaves=expand_paths(find_leaves(model), stacks),
    )
    left = sum(held((*made.forward, *made.backward, *made.after)).values())
    return made if left == tracing.tracker.live_bytes else None
