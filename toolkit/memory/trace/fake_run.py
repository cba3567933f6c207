"""One run of a model on fake tensors, with all or few of its layers, and the resulting trace of the model or a stage."""

from __future__ import annotations

import contextlib
import copy
import logging
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from transformers import PreTrainedConfig

from toolkit.config.job import Train
from toolkit.context_parallel.slices import SequenceSlice
from toolkit.distributed.fake import fake_group
from toolkit.errors import ToolkitError
from toolkit.introspect import tied_groups
from toolkit.memory.kernels.device import Device
from toolkit.memory.kernels.dispatch import cuda_kernels
from toolkit.memory.kernels.linear_attention import replaced_kernels
from toolkit.memory.kernels.operations import join_operations
from toolkit.memory.kernels.quantized import quantize_linears
from toolkit.memory.kernels.routing import LoopedExperts, RowsOfRank, assumptions, has_experts, runs_grouped
from toolkit.memory.kernels.zero3 import find_leaves, linear_modules
from toolkit.memory.trace.compiled_layers import CompiledStacks
from toolkit.memory.trace.events import ChunkTrace, MemoryTrace, ResolvedEvent, held, in_blocks
from toolkit.memory.trace.extrapolate import (
    expand,
    expand_buffers,
    expand_host_copies,
    expand_operations,
    expand_parameters,
    expand_paths,
)
from toolkit.memory.trace.failure import trace_failed
from toolkit.memory.trace.fake_ops import (
    FakeOpRule,
    disable_layer_dropout,
    inplace_collectives,
    known_values,
    marked_ones,
    norm_statistics,
    same_types,
)
from toolkit.memory.trace.fake_results import fake_like
from toolkit.memory.trace.representatives import LayerStack, find_stacks, in_adapters, prune_layers
from toolkit.memory.trace.segments import LayerSegmenter, StageBoundary
from toolkit.memory.trace.spec import BOTH_LENGTHS, PADDED, TraceSpec
from toolkit.memory.trace.stage_layers import WholeModel, prune_to_part
from toolkit.modeling.build import add_adapters, construct_empty, finish_model, shard_model
from toolkit.modeling.checkpointing import layers_to_checkpoint
from toolkit.modeling.fused_kernels import find_fusable
from toolkit.modeling.loss import StepLoss
from toolkit.modeling.materialize import allocate
from toolkit.pipeline_parallel import StageSpec, forward_stage, hidden_dtype, hidden_shape, stage_info
from toolkit.pipeline_parallel.decoder_layout import find_layers
from toolkit.pipeline_parallel.zero_bubble_backward import split_backward
from toolkit.tensor_parallel import tp_plan_for


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeModel:
    """A model on fake tensors, with the layers that are traced.

    Args:
        model: A `PreTrainedModel`, or a `peft.PeftModel` around one.
        stacks: Its traced layers and those that they represent.
        part: The rank's part of the pruned model; None for a whole model.
        num_replicas: Tensor ranks that hold each head of keys and values.
        unfused: Modules that `kernels` leaves as they are.
    """

    model: Any
    stacks: list[LayerStack]
    part: StageSpec | None
    num_replicas: int
    unfused: tuple[str, ...]


def trace_once(
    spec: TraceSpec, config: PreTrainedConfig, *, part: StageSpec | None = None, all_layers: bool
) -> MemoryTrace | None:
    """Trace all layers, or few; return None where few cannot represent all."""
    ran = run_fake(spec, config, part=part, all_layers=all_layers)
    return ran.expanded(ran.stacks)


def run_fake(spec: TraceSpec, config: PreTrainedConfig, *, part: StageSpec | None = None, all_layers: bool) -> TraceRun:
    """Run the layers that are traced.

    Args:
        spec: What to trace.
        config: Configuration of the model; it is not modified.
        part: Layers of a pipeline rank; None for the whole model.
        all_layers: Whether to run every layer instead of those that differ.
    """
    made: FakeModel | None = None
    tracing: LayerSegmenter | None = None
    with card_of(spec) as tp_group, _context_of(spec) as context_group:
        try:
            empty, pruned = _construct_pruned(spec, config, part, all_layers=all_layers)
            empty.tie_weights()
            num_replicas = (
                1
                if tp_group is None
                else max(
                    1, spec.tensor // tp_plan_for(empty, num_ranks=spec.tensor, experts=spec.experts).heads.key_value
                )
            )
            shard_model(empty, spec, tp_group=tp_group, part=pruned.part)
            if spec.quantized:
                quantize_linears(empty)
            with torch.device("meta"):
                model = add_adapters(empty, spec)
            with FakeTensorMode(allow_non_fake_inputs=True) as mode:
                made = _finish(spec, model, pruned, num_replicas=num_replicas, context_group=context_group, mode=mode)
                looped = own = None
                num_owners = spec.tensor if spec.experts == "whole" else 1
                if has_experts(empty.config) and not runs_grouped(empty):
                    looped = LoopedExperts(empty.config, spec.routing, num_ranks=num_owners)
                if num_owners > 1:
                    own = RowsOfRank(empty.config, spec.routing, num_ranks=num_owners)
                rules: list[FakeOpRule] = [disable_layer_dropout, inplace_collectives, norm_statistics]
                rules += [rule for rule in (own, looped) if rule is not None]
                if spec.images is not None:
                    rules.append(known_values)
                rules.append(marked_ones)
                losses = _losses(spec, made, tp_group)
                compiled = CompiledStacks.of(spec, made.model, made.stacks) if spec.torch_compile else None
                runs = []
                splits = spec.splits_backward and not spec.evaluation
                gradients = split_backward(made.model) if splits else None
                with (
                    replaced_kernels(made.model, spec.software) as recurrence,
                    linear_modules(zero3=spec.keeps_inputs),
                ):
                    for chunk in range(1 if made.part is None else len(made.part.chunks)):
                        tracing = LayerSegmenter(
                            made.model, made.stacks, marked=spec.marks_modules, device=spec.device, answers=rules
                        )
                        ends = None if made.part is None else _boundary(spec, made.model, made.part, chunk)
                        running, around = tracing, ends  # each step binds its own
                        step = partial(_step, spec, made.model, running, losses)
                        if made.part is not None and around is not None:
                            step = partial(_stage_step, spec, made.model, running, losses, around, made.part, chunk)
                        whole = made.part is None or made.part.is_first(chunk)
                        tracing.run(
                            step, backward=not spec.evaluation, ends=ends, gradients=None if whole else gradients
                        )
                        runs.append((tracing, ends))
                asked = own is not None or (looped is not None and looped.asked)
                info = stage_info(made.model)
                noted = {
                    "assumptions": (
                        *assumptions(made.model, looped, own),
                        *recurrence.describe(),
                        *(() if compiled is None else compiled.describe()),
                        *((PADDED,) if spec.packing == "none" else ()),
                        *((BOTH_LENGTHS,) if spec.task == "seq2seq-lm" else ()),
                        *(
                            [f"kernels={spec.kernels} does not replace: {', '.join(made.unfused)}"]
                            if made.unfused
                            else []
                        ),
                    ),
                    "has_experts": asked or runs_grouped(made.model),
                    "depends_on_routing": asked,
                    "contracts": recurrence.contracted,
                    "assumed_kernels": tuple(sorted(recurrence.present)),
                    "unpriced_kernels": tuple(sorted(recurrence.unpriced)),
                    "num_replicas": made.num_replicas,
                    "copies": () if info is None else tuple(info.tied_copy),
                    "shared": None if info is None else info.tied_key,
                }
                return TraceRun(model=made.model, stacks=made.stacks, runs=runs, noted=noted)
        except ToolkitError:
            raise
        except Exception as error:
            backward = tracing is not None and tracing.in_backward
            raise trace_failed(error, None if made is None else made.model, backward=backward) from error


def trace_module(
    module: nn.Module,
    step: Callable[[nn.Module], torch.Tensor],
    *,
    dtype: torch.dtype,
    device: Device,
    marks_modules: bool,
) -> MemoryTrace:
    """Trace every module of a model that is not from Hugging Face.

    Args:
        module: Model on any device, also meta; it is not modified.
        step: Makes a batch, runs the model on it, and returns the loss.
        dtype: Data type of its floating-point weights.
        device: Card, which decides on kernels.
        marks_modules: Whether to mark the hooks of ZeRO-3.

    Raises:
        PlanError: TRACE_FAILED.
    """
    model: Any = None
    tracing: LayerSegmenter | None = None
    with _quiet(), _as_in_a_new_process(), cuda_kernels(device), FakeTensorMode(allow_non_fake_inputs=True):
        try:
            with unset_fake_temporarily():
                model = _copy_empty(module)
            allocate(model, device=torch.device("cpu"), dtype=dtype)
            model.train()
            with linear_modules(zero3=False):
                tracing = LayerSegmenter(
                    model,
                    [],
                    marked=marks_modules,
                    device=device,
                    answers=[disable_layer_dropout, inplace_collectives, same_types, norm_statistics],
                )
                tracing.run(partial(step, model))
            made = TraceRun(model=model, stacks=[], runs=[(tracing, None)], noted=_NOTED).expanded([])
            assert made is not None, "all modules were traced"
            return made
        except ToolkitError:
            raise
        except Exception as error:
            backward = tracing is not None and tracing.in_backward
            raise trace_failed(error, model, backward=backward, of_user=True) from error


def _copy_empty(module: nn.Module) -> nn.Module:
    """Return a copy of a module, which may be on fake tensors, whose parameters and buffers are on the meta device."""
    copies: dict[int, Any] = {id(buffer): _on_meta(buffer) for buffer in module.buffers()}
    for weight in module.parameters():
        copies[id(weight)] = nn.Parameter(_on_meta(weight), requires_grad=weight.requires_grad)
    return copy.deepcopy(module, copies)


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    # empty_like of a fake tensor would be a fake one of its own mode.
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


# Fields of `MemoryTrace` of a model without experts, tensor ranks and stages.
_NOTED: Mapping[str, Any] = {
    "assumptions": (),
    "has_experts": False,
    "depends_on_routing": False,
    "contracts": False,
    "num_replicas": 1,
    "copies": (),
    "shared": None,
}


@contextlib.contextmanager
def card_of(spec: TraceSpec) -> Iterator[dist.ProcessGroup | None]:
    """Run inside a `with` block what the card would run, and yield a fake group of tensor ranks; None for one rank."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(_quiet())
        stack.enter_context(_as_in_a_new_process())
        stack.enter_context(cuda_kernels(spec.device, packed=spec.packing == "separated"))
        yield stack.enter_context(fake_group(spec.tensor)) if spec.tensor > 1 else None


@contextlib.contextmanager
def _context_of(spec: TraceSpec) -> Iterator[dist.ProcessGroup | None]:
    """Yield a fake group of the ranks that share rows inside a `with` block; None for one rank."""
    if spec.context == 1:
        yield None
        return
    with fake_group(spec.context) as group:
        yield group


def configured(spec: TraceSpec, config: PreTrainedConfig) -> PreTrainedConfig:
    """Return a copy of a configuration with the attention that is traced."""
    own = copy.deepcopy(config)
    own._attn_implementation = spec.attention
    if spec.task == "sequence-classification" and own.pad_token_id is None:
        own.pad_token_id = 0  # a run has that of its data
    return own


@contextlib.contextmanager
def _as_in_a_new_process() -> Iterator[None]:
    """Trace inside a `with` block with torch's own settings, whatever this process has set for models of its own."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter(
            "ignore"
        )  # a process may have made them errors, of which the trace would fail, or a layer stay eager
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autograd.set_detect_anomaly(False))
        stack.enter_context(torch.autocast("cpu", enabled=False))
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        yield


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep fake tensors from logging the stack of an operation that they cannot run, which the error has too."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pruned:
    """The layers that are left of a model, those of them that recompute, and the rank's part of what is left."""

    stacks: list[LayerStack]
    checkpointed: list[nn.Module]
    part: StageSpec | None


# Models of few layers, as they were constructed: variants of a job differ in what is done to them.
_CONSTRUCTED: dict[Hashable, tuple[Any, _Pruned]] = {}
_MOST_CONSTRUCTED = 4
# Whole models, of which stages of a pipeline are copied.
_WHOLE: dict[Hashable, WholeModel] = {}
_MOST_WHOLE = 2


def whole_model(spec: TraceSpec, config: PreTrainedConfig) -> WholeModel:
    """Return the whole model on the meta device, constructed once for all its stages; the card of `spec` must be there."""
    own = configured(spec, config)
    key = _model_key(spec, own)
    if key not in _WHOLE:
        made = WholeModel.of(construct_empty(own, spec))
        while len(_WHOLE) >= _MOST_WHOLE:
            del _WHOLE[next(iter(_WHOLE))]
        _WHOLE[key] = made
    return _WHOLE[key]


def _model_key(spec: TraceSpec, config: Any) -> tuple[Any, ...]:
    """Return a key of all that the construction of a model depends on."""
    text = config.get_text_config(decoder=True)
    # What runs the experts and attention is not part of a configuration's JSON.
    private = tuple(getattr(text, name, None) for name in ("_attn_implementation", "_experts_implementation"))
    return type(config), config.to_json_string(use_diff=False), private, spec.attention, spec.dtype, spec.task


def _construct_pruned(
    spec: TraceSpec, config: PreTrainedConfig, part: StageSpec | None, *, all_layers: bool
) -> tuple[Any, _Pruned]:
    """Return the model on the meta device with the layers that are traced, and what is known of them."""
    if part is not None and not all_layers and not spec.trust_remote_code:
        whole = whole_model(spec, config)
        layers: Any = whole.model.get_submodule(whole.prefix)
        own_layers: Any = nn.ModuleList(layers[index] for chunk in part.chunks for index in chunk)
        again = layers_to_checkpoint(own_layers, fraction=spec.checkpointing, every=spec.checkpoint_every)
        empty, stacks, small, few = whole.part(part, checkpointed=again)
        return empty, _Pruned(stacks=stacks, checkpointed=few, part=small)
    own = configured(spec, config)
    if part is not None or all_layers or spec.trust_remote_code:
        empty = construct_empty(own, spec)
        return empty, _prune(spec, empty, part, all_layers=all_layers)
    key = *_model_key(spec, own), spec.checkpointing, spec.checkpoint_every
    if key not in _CONSTRUCTED:
        empty = construct_empty(own, spec)
        while len(_CONSTRUCTED) >= _MOST_CONSTRUCTED:
            del _CONSTRUCTED[next(iter(_CONSTRUCTED))]
        pruned = _prune(spec, empty, part, all_layers=all_layers)
        left = set(map(id, empty.modules()))  # the others would be copied as well
        few = [layer for layer in pruned.checkpointed if id(layer) in left]
        _CONSTRUCTED[key] = empty, replace(pruned, checkpointed=few)
    return copy.deepcopy(_CONSTRUCTED[key])


def _prune(spec: TraceSpec, empty: Any, part: StageSpec | None, *, all_layers: bool) -> _Pruned:
    """Keep few layers; for a pipeline's rank, its own and those of others that its passes use."""
    own: Any = empty
    if part is not None:
        layers: Any = empty.get_submodule(find_layers(empty))
        own = nn.ModuleList(layers[index] for chunk in part.chunks for index in chunk)
    checkpointed = layers_to_checkpoint(own, fraction=spec.checkpointing, every=spec.checkpoint_every)
    if part is not None:
        stacks, small = prune_to_part(empty, part, all_layers=all_layers, checkpointed=checkpointed)
        return _Pruned(stacks=stacks, checkpointed=checkpointed, part=small)
    stacks = find_stacks(empty, all_layers=all_layers, checkpointed=checkpointed)
    prune_layers(empty, stacks)
    return _Pruned(stacks=stacks, checkpointed=checkpointed, part=None)


def _finish(
    spec: TraceSpec,
    model: Any,
    pruned: _Pruned,
    *,
    num_replicas: int,
    context_group: dist.ProcessGroup | None,
    mode: FakeTensorMode,
) -> FakeModel:
    """Give a model storage on the fake device, which `modeling.build` does before it draws the adapters, and finish it."""
    # peft and DeepSpeed cast what was made in another type (engine.py _configure_distributed_model).
    allocate(model, device=torch.device("cpu"), dtype=spec.dtype, empty_like=fake_like(mode))
    with unset_fake_temporarily():  # they read values, or make modules without storage
        unfused = find_fusable(model).left if spec.kernels == "liger" else ()
        finish_model(
            model,
            replace(spec, torch_compile=False),
            checkpointed=pruned.checkpointed,
            context_group=context_group,
        )
        if _needs_input_gradient(spec, whole=pruned.part is None):
            model.enable_input_require_grads()
    model.train(not spec.evaluation)
    return FakeModel(
        model=model,
        stacks=[in_adapters(model, stack) for stack in pruned.stacks],
        part=pruned.part,
        num_replicas=num_replicas,
        unfused=tuple(unfused),
    )


def _needs_input_gradient(spec: TraceSpec, *, whole: bool) -> bool:
    """Return whether the first layer's input has a gradient despite a frozen embedding; both then outlive the pass.

    Under checkpointing, transformers' gradient_checkpointing_enable does so, with Trainer or Accelerate; `toolkit train`,
    which alone runs pipelines, needs it under ZeRO-3 with tensor ranks (modeling.build build_model). With Trainer the patches of
    a model that reads images get one as well, so that all that its frozen tower keeps would be counted: those models are
    traced as `toolkit train` runs them.
    """
    if spec.lora is None or spec.images is not None:
        return False
    if spec.tensor > 1:
        return spec.keeps_inputs
    return whole and bool(spec.checkpointing)


def _losses(spec: TraceSpec, made: FakeModel, tp_group: dist.ProcessGroup | None) -> StepLoss:
    config = made.model.config
    vocab_size = config.get_text_config(decoder=True).vocab_size
    told = Train(
        loss=spec.loss, label_smoothing_factor=spec.label_smoothing, z_loss=spec.z_loss, compute_loss=spec.compute_loss
    )
    part = SequenceSlice(rank=0, size=spec.context) if spec.context > 1 else None
    return StepLoss.of(told, config=config, tp_group=tp_group, vocab_size=vocab_size, part=part, task=spec.task)


def _loss(spec: TraceSpec, losses: StepLoss, outputs: Any, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if spec.evaluation:
        summed = losses.summed(outputs, labels)
        return summed, summed
    return losses.of_step(outputs, labels, 1.0, share=1.0)


def _step(spec: TraceSpec, model: Any, tracing: LayerSegmenter, losses: StepLoss) -> torch.Tensor:
    """Run the model on one micro-batch and return the loss."""
    inputs, labels = spec.make_batch()
    outputs = model(**losses.inputs({**inputs, "labels": labels}))
    with tracing.loss():
        loss, _ = _loss(spec, losses, outputs, labels)
        del outputs
    return loss


def _boundary(spec: TraceSpec, model: Any, part: StageSpec, chunk: int) -> StageBoundary:
    """Return a micro-batch with what other stages send for it."""
    inputs, labels = spec.make_batch()
    batch = {**inputs, "labels": labels}
    hidden = partial(torch.empty, hidden_shape(model, batch), dtype=hidden_dtype(model))
    is_last = part.is_last(chunk)
    return StageBoundary(
        received=None if part.is_first(chunk) else hidden(),
        gradient=None if is_last or spec.evaluation else hidden(),
        sends_on=not is_last,
        batch=batch,
    )


def _stage_step(
    spec: TraceSpec,
    model: Any,
    tracing: LayerSegmenter,
    losses: StepLoss,
    ends: StageBoundary,
    part: StageSpec,
    chunk: int,
) -> torch.Tensor:
    """Run a chunk, as toolkit engine/pipeline.py does, and return the loss, or what is sent to the next stage."""
    outputs = forward_stage(model, losses.inputs(ends.batch), chunk=chunk, received=ends.received)
    if not part.is_last(chunk):
        if outputs.requires_grad:
            # deepspeed engine.py _backward_prologue_per_tensor
            outputs.register_hook(lambda gradient: gradient / 1)
        return outputs  # type: ignore[no-any-return]
    with tracing.loss():
        loss, reported = _loss(spec, losses, outputs, ends.batch["labels"])
        if not spec.evaluation:
            ends.reported = reported
        del outputs
        return loss


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
        operations = [expand_operations(tracing.operations, stacks) for tracing, _ in self.runs]
        chunks = tuple(
            replace(
                _chunk(*made, ends, expand_host_copies(tracing.host_copies, stacks)),
                operations=own,
            )
            for made, own, (tracing, ends) in zip(passes, operations, self.runs, strict=True)
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
            tied=tuple((name.rpartition(".")[0], first) for first, *names in tied_groups(self.model) for name in names),
            host_copies=expand_host_copies(copies, stacks),
            leaves=expand_paths(find_leaves(self.model), stacks),
            chunks=chunks,
            operations=join_operations(operations),
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
