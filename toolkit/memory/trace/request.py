"""One run of a model on fake tensors, with all or few of its layers, and the resulting trace of the model or a stage."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from transformers import PreTrainedConfig

from toolkit.config.job import Fp8, Kernels, Lora, Loss, Packing
from toolkit.distributed.fake import fake_group
from toolkit.errors import ToolkitError
from toolkit.launch.software import Software
from toolkit.memory.kernels.linear_attention import replaced_kernels
from toolkit.memory.kernels.routing import LoopedExperts, Routing, assumptions, has_experts, runs_grouped
from toolkit.memory.kernels.zero3 import find_leaves, linear_modules
from toolkit.memory.trace.events import ChunkTrace, MemoryTrace, ResolvedEvent, held, in_blocks
from toolkit.memory.trace.extrapolate import expand, expand_buffers, expand_host_copies, expand_parameters, expand_paths
from toolkit.memory.trace.failure import trace_failed
from toolkit.memory.trace.fake_model import build_empty, in_adapters, on_fake_device, shard
from toolkit.memory.trace.fake_ops import FakeOpRule, disable_layer_dropout, inplace_collectives
from toolkit.memory.trace.inputs import PADDED, Batch, loss_of, make_batch
from toolkit.memory.trace.representatives import LayerStack, find_stacks, prune_layers
from toolkit.memory.trace.segments import LayerSegmenter, StageBoundary
from toolkit.memory.trace.stage_layers import prune_to_part
from toolkit.modeling.checkpointing import apply_gradient_checkpointing
from toolkit.modeling.chunked_loss import apply_loss
from toolkit.modeling.fp8 import apply_fp8
from toolkit.modeling.fused_kernels import find_fusable
from toolkit.pipeline_parallel import StagePart, forward_stage, hidden_dtype, hidden_shape, split_model
from toolkit.pipeline_parallel.decoder_layout import find_layers
from toolkit.pipeline_parallel.zero_bubble_backward import split_backward


@contextlib.contextmanager
def tensor_group(size: int) -> Iterator[dist.ProcessGroup | None]:
    """Yield a fake group of tensor ranks, independent of real groups of this process; None for one rank."""
    if size == 1:
        yield None
        return
    with fake_group(size) as group:
        yield group


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep fake tensors from logging the stack of an operation that they cannot run, which the error has too."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSpec:
    """What to trace.

    Args:
        micro_batch: Sequences per micro-batch.
        sequence_length: Tokens per sequence.
        flatten: Whether a micro-batch of separated documents is one row.
        tp_group: Tensor-parallel group, of which one rank is traced: all have shards of the same sizes.
        dtype: Data type of the parameters.
        fp8: How the decoder layers' linear modules multiply in float8; None where they do not.
        fp8_emulated: Whether they do so without float8 kernels, as on a CPU.
        packing: Value of `data.packing`; with `none`, rows are padded and have a mask.
        checkpointing: Share of the layers that recompute, 0 to 1.
        offload_inputs: Whether the inputs of those layers are kept in host memory.
        loss: How a causal language model computes its loss.
        kernels: Kernels of norms and gated activations; all are traced as `eager`.
        lora: LoRA section; None trains all parameters.
        quantized: Whether the linear layers under the adapters hold NF4 (QLoRA).
        marks_modules: Whether to mark the hooks of ZeRO-3.
        keeps_inputs: Whether linear modules keep their input even where they are frozen, as under ZeRO-3.
        routing: How tokens spread over experts that run in a loop; others do not depend on it.
        evaluation: Whether to run the forward pass alone, without gradients and in evaluation mode.
        trust_remote_code: Whether the model's own code may run.
        sequence_parallel: Whether tensor ranks also hold shards of the sequence between the sharded layers.
        splits_backward: Whether a stage computes the gradients of weights separately from those of its input.
        software: Software of the training machine; by default what is installed here.
    """

    micro_batch: int
    sequence_length: int
    flatten: bool
    tp_group: dist.ProcessGroup | None
    dtype: torch.dtype = torch.bfloat16
    fp8: Fp8 | None = None
    fp8_emulated: bool = False
    packing: Packing = "wrapped"
    checkpointing: float = 0.0
    offload_inputs: bool = False
    loss: Loss = "full"
    kernels: Kernels = "eager"
    lora: Lora | None = None
    quantized: bool = False
    marks_modules: bool = False
    keeps_inputs: bool = False
    routing: Routing = "balanced"
    evaluation: bool = False
    trust_remote_code: bool = False
    sequence_parallel: bool = False
    splits_backward: bool = False
    software: Software = field(default_factory=Software.here)

    def trace(self, config: PreTrainedConfig, *, part: StagePart | None = None, all_layers: bool) -> MemoryTrace | None:
        """Trace all layers, or few; return None where few cannot represent all."""
        ran = self.run(config, part=part, all_layers=all_layers)
        return ran.expanded(ran.stacks)

    def run(self, config: PreTrainedConfig, *, part: StagePart | None = None, all_layers: bool) -> TraceRun:
        """Run the layers that are traced; modifies `config`."""
        model: Any = None
        tracing: LayerSegmenter | None = None
        try:
            full = build_empty(config, dtype=self.dtype, trust_remote_code=self.trust_remote_code)
            text = full.config.get_text_config(decoder=True)
            full.config.use_cache = text.use_cache = False
            stacks, small = self._prune(full, part, all_layers=all_layers)
            full.tie_weights()
            num_replicas = 1
            if self.tp_group is not None:
                num_replicas = shard(full, tp_group=self.tp_group, sequence_parallel=self.sequence_parallel)
            info = None if small is None else split_model(full, small)
            with FakeTensorMode(allow_non_fake_inputs=True):
                model = on_fake_device(full, self.dtype, self.lora, quantized=self.quantized)
                with unset_fake_temporarily():  # they read values, or make modules without storage
                    if self.fp8 is not None:
                        apply_fp8(model, self.fp8, emulate=self.fp8_emulated)
                    left = find_fusable(model).left if self.kernels == "liger" else ()
                    if small is None or small.last:  # other stages of a pipeline have no head
                        apply_loss(model, self.loss)
                    if self._needs_input_gradient(part):
                        model.enable_input_require_grads()
                model.train(not self.evaluation)
                stacks = [in_adapters(model, stack) for stack in stacks]
                looped = None
                if has_experts(full.config) and not runs_grouped(full):
                    looped = LoopedExperts(full.config, self.routing)
                answers: list[FakeOpRule] = [
                    disable_layer_dropout,
                    inplace_collectives,
                    *([looped] if looped else []),
                ]
                runs = []
                gradients = split_backward(model) if self.splits_backward and not self.evaluation else None
                with replaced_kernels(model, self.software) as recurrence, linear_modules(zero3=self.keeps_inputs):
                    for chunk in range(1 if small is None else len(small.chunks)):
                        tracing = LayerSegmenter(model, stacks, marked=self.marks_modules, answers=answers)
                        ends = None if small is None else self._ends(model, small, chunk)
                        running, around = tracing, ends  # each step binds its own
                        step = partial(self._step, model, running)
                        if small is not None and around is not None:
                            step = partial(self._stage_step, model, running, around, small, chunk)
                        whole = small is None or small.is_first(chunk)
                        tracing.run(
                            step, backward=not self.evaluation, ends=ends, gradients=None if whole else gradients
                        )
                        runs.append((tracing, ends))
                assumed = (
                    *assumptions(model, looped),
                    *recurrence.describe(),
                    *((PADDED,) if self.packing == "none" else ()),
                    *([f"kernels={self.kernels} leaves as they are: {', '.join(left)}"] if left else []),
                )
                asked = looped is not None and looped.asked
                noted = {
                    "assumptions": assumed,
                    "has_experts": asked or runs_grouped(model),
                    "depends_on_routing": asked,
                    "contracts": recurrence.contracted,
                    "num_replicas": num_replicas,
                    "copies": () if info is None else tuple(info.tied_copy),
                    "shared": None if info is None else info.tied_key,
                }
                return TraceRun(model=model, stacks=stacks, runs=runs, noted=noted)
        except ToolkitError:
            raise
        except Exception as error:
            raise trace_failed(error, model, backward=tracing is not None and tracing.in_backward) from error

    def _prune(
        self, full: Any, part: StagePart | None, *, all_layers: bool
    ) -> tuple[list[LayerStack], StagePart | None]:
        """Keep few layers, some of which recompute; for a pipeline's rank, its own and those of others that its passes use."""
        checkpoint = partial(
            apply_gradient_checkpointing, fraction=self.checkpointing, offload_inputs=self.offload_inputs
        )
        if part is not None:
            layers: Any = full.get_submodule(find_layers(full))
            checkpoint(nn.ModuleList(layers[index] for chunk in part.chunks for index in chunk))
            return prune_to_part(full, part, all_layers=all_layers)
        checkpoint(full)
        stacks = find_stacks(full, all_layers=all_layers)
        prune_layers(full, stacks)
        return stacks, None

    def _needs_input_gradient(self, part: StagePart | None) -> bool:
        """Return whether the first layer's input has a gradient despite a frozen embedding; both then outlive the pass.

        Under checkpointing, transformers' gradient_checkpointing_enable does so, with Trainer or Accelerate;
        `toolkit train`, which alone runs pipelines, needs it under ZeRO-3 with tensor ranks (modeling.build build_model).
        """
        if self.lora is None:
            return False
        if self.tp_group is not None:
            return self.keeps_inputs
        return part is None and bool(self.checkpointing)

    def _step(self, model: Any, tracing: LayerSegmenter) -> torch.Tensor:
        """Run the model on one micro-batch and return the loss."""
        inputs, labels = self._batch()
        outputs = model(**inputs) if self.loss == "full" else model(**inputs, labels=labels)
        with tracing.loss():
            loss = loss_of(outputs, labels, model.config, tp_group=self.tp_group)
            del outputs
        return loss

    def _batch(self) -> tuple[Batch, torch.Tensor]:
        return make_batch(
            micro_batch=self.micro_batch,
            sequence_length=self.sequence_length,
            packing=self.packing,
            flatten=self.flatten,
        )

    def _ends(self, model: Any, part: StagePart, chunk: int) -> StageBoundary:
        """Return a micro-batch with what other stages send for it."""
        inputs, labels = self._batch()
        batch = {**inputs, "labels": labels}
        hidden = partial(torch.empty, hidden_shape(model, batch), dtype=hidden_dtype(model))
        is_last = part.is_last(chunk)
        return StageBoundary(
            received=None if part.is_first(chunk) else hidden(),
            gradient=None if is_last or self.evaluation else hidden(),
            sends_on=not is_last,
            batch=batch,
        )

    def _stage_step(
        self, model: Any, tracing: LayerSegmenter, ends: StageBoundary, part: StagePart, chunk: int
    ) -> torch.Tensor:
        """Run a chunk, as toolkit engine/pipeline.py does, and return the loss, or what is sent to the next stage."""
        given = {name: value for name, value in ends.batch.items() if name != "labels" or self.loss != "full"}
        outputs = forward_stage(model, given, chunk=chunk, received=ends.received)
        if not part.is_last(chunk):
            if outputs.requires_grad:
                outputs.register_hook(
                    lambda gradient: gradient / 1
                )  # deepspeed engine.py _backward_prologue_per_tensor
            return outputs  # type: ignore[no-any-return]
        with tracing.loss():
            loss = loss_of(outputs, ends.batch["labels"], model.config, tp_group=self.tp_group)
            if self.evaluation:
                del outputs
                return loss
            loss = loss / 1.0
            ends.reported = loss.detach()
            del outputs
            return loss * 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRun:
    """The record of a run of few layers, to be repeated for all that they represent.

    Args:
        model: Model that ran.
        stacks: Layers of the model.
        runs: For each chunk of a pipeline's rank, or for the whole model, its segments and the data of its neighbours.
        noted: Fields of `MemoryTrace` that do not depend on the number of layers.
    """

    model: Any
    stacks: list[LayerStack]
    runs: list[tuple[LayerSegmenter, StageBoundary | None]]
    noted: Mapping[str, Any]

    def expanded(self, stacks: Sequence[LayerStack]) -> MemoryTrace | None:
        """Return the trace of all layers; None if they did not run in order or allocations and releases do not match.

        They do not match where layers pass memory to others than their neighbours.
        """
        few = any(len(stack.kept) < stack.num_layers for stack in stacks)
        passes = []
        for tracing, _ in self.runs:
            if few and not tracing.in_order:
                return None
            made = (
                expand(tracing.forward, stacks, backward=False),
                expand(tracing.backward, stacks, backward=True),
                expand(tracing.after, stacks, backward=True),
                expand(tracing.weights, stacks, backward=True),
            )
            left = sum(held(tuple(placed for events in made for placed in events)).values())
            if left != tracing.tracker.live_bytes:
                return None
            passes.append(made)
        chunks = tuple(
            _chunk(*made, ends, expand_host_copies(tracing.host_copies, stacks))
            for made, (tracing, ends) in zip(passes, self.runs, strict=True)
            if ends is not None
        )
        forward, backward, after = ((), (), ()) if chunks else passes[0][:3]
        copies = [] if chunks else self.runs[0][0].host_copies
        return MemoryTrace(
            parameters=expand_parameters(self.model, stacks),
            buffers_bytes=expand_buffers(self.model, stacks),
            forward=forward,
            backward=backward,
            after=after,
            num_traced_layers=sum(len(stack.kept) for stack in stacks),
            num_layers=sum(stack.num_layers for stack in stacks),
            tied=tuple(_tied(self.model)),
            host_copies=expand_host_copies(copies, stacks),
            leaves=expand_paths(find_leaves(self.model), stacks),
            chunks=chunks,
            **self.noted,
        )


def _chunk(
    forward: tuple[ResolvedEvent, ...],
    backward: tuple[ResolvedEvent, ...],
    after: tuple[ResolvedEvent, ...],
    weights: tuple[ResolvedEvent, ...],
    ends: StageBoundary,
    host_copies: tuple[int, ...],
) -> ChunkTrace:
    return ChunkTrace(
        forward=forward,
        backward=backward,
        after=after,
        received_bytes=_size(ends.received),
        gradient_bytes=_size(ends.gradient),
        sent_bytes=ends.sent_bytes,
        reported_bytes=ends.reported_bytes,
        batch_bytes=sum(map(_size, ends.batch.values())),
        host_copies=host_copies,
        weights=weights,
        keeps_received=ends.keeps_received,
    )


def _size(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else in_blocks(tensor.nbytes)


def _tied(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the modules that share a parameter with an earlier one, and the parameter's name there."""
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        known = first.setdefault(id(parameter), name)
        if known != name:
            yield name.rpartition(".")[0], known
