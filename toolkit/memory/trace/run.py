"""Traces of a model on fake tensors, which record what its forward and backward passes do to memory.

No weights are read, nothing is computed and no GPU is needed. Only decoder layers with
different structure or neighbours run; the others repeat what these do.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Hashable, Iterator
from dataclasses import replace
from typing import Any, TypedDict, Unpack, final

from transformers import PreTrainedConfig

from toolkit.config.job import Fp8, Lora
from toolkit.errors import SpecError
from toolkit.launch.software import Software
from toolkit.memory.kernels.dispatch import Device, cuda_kernels
from toolkit.memory.kernels.routing import Routing, collects_router_logits
from toolkit.memory.trace.events import MemoryTrace, Parameter
from toolkit.memory.trace.failure import unknown_architecture
from toolkit.memory.trace.fake_model import build_empty
from toolkit.memory.trace.representatives import kinds_of, layer_types
from toolkit.memory.trace.request import TraceRun, TraceSpec, quiet, tensor_group
from toolkit.memory.trace.stage_layers import choose
from toolkit.modeling.build import DTYPES, import_architecture, model_config
from toolkit.modeling.checkpointing import evenly_spaced
from toolkit.pipeline_parallel import StagePart
from toolkit.pipeline_parallel.decoder_layout import find_layers
from toolkit.planning.plan import Plan

__all__ = ["MemoryTrace", "Parameter", "trace", "trace_model"]


class TraceOptions(TypedDict, total=False):
    """Options of a trace in addition to the plan and its card.

    Args:
        marks_modules: Whether to mark the hooks of ZeRO-3, which changes no figure of lower stages; by default if the plan's
            stage is 3.
        keeps_inputs: Whether linear modules keep their input even where they are frozen, as under ZeRO-3.
        routing: How tokens spread over experts.
        evaluation: Whether to trace a micro-batch of validation data, without gradients.
        software: Software of the training machine; by default that of the plan.
    """

    marks_modules: bool
    keeps_inputs: bool
    routing: Routing
    evaluation: bool
    software: Software


def trace(plan: Plan, *, device: Device, all_layers: bool = False, **options: Unpack[TraceOptions]) -> MemoryTrace:
    """Trace one micro-batch of a plan without a pipeline.

    Args:
        plan: Plan of the run.
        device: Card, which decides on kernels.
        all_layers: Traces every layer instead of those that differ: slow, and the same.
        options: As in `TraceOptions`.

    Raises:
        SpecError: MODEL_CLASS when transformers does not know the architecture; MODEL_CONFIG_INVALID.
        PlanError: TRACE_FAILED, with the module in which the model cannot run on fake tensors; and what `build_model`
            raises.
    """
    if plan.grid.pp > 1:
        raise ValueError("no rank of a pipeline holds the whole model: `stage_tracer` traces its stages")
    return trace_model(_config(plan), device=device, all_layers=all_layers, **_requested_of(plan, options))


def stage_tracer(plan: Plan, *, device: Device, **options: Unpack[TraceOptions]) -> StageTracer:
    """Return a tracer of the stages of a plan's model, for any split; arguments and errors are those of `trace`."""
    return StageTracer(_config(plan), device=device, **_requested_of(plan, options))


def _config(plan: Plan) -> PreTrainedConfig:
    trusted = plan.job.model.trust_remote_code
    try:
        config = model_config(plan)
        import_architecture(config, trust_remote_code=trusted)
    except (ValueError, SpecError) as error:
        if isinstance(error, SpecError) and error.codes == ("MODEL_CONFIG_INVALID",):
            raise
        raise unknown_architecture(error, plan.model.name, trust_remote_code=trusted) from error
    return config


def _requested_of(plan: Plan, options: TraceOptions) -> dict[str, Any]:
    """Return the arguments of `trace_model` for a plan, except the model's configuration and the card."""
    train, settings, data = plan.job.train, plan.settings, plan.job.data
    return {
        "micro_batch": settings.per_device_eval_batch_size if options.get("evaluation") else settings.batch.micro,
        "sequence_length": settings.sequence_length,
        "dtype": DTYPES[settings.dtype],
        "fp8": (train.fp8 or Fp8()) if settings.precision == "fp8" else None,
        "fp8_emulated": plan.on_cpu,
        "attention": settings.attention,
        "packing": data.packing if data is not None else "wrapped",
        "checkpointing": settings.gradient_checkpointing,
        "offload_inputs": plan.profile.activations,
        "loss": train.loss,
        "kernels": settings.kernels,
        "lora": None if train.method == "full" else train.lora or Lora(),
        "quantized": train.method == "qlora",
        "trust_remote_code": plan.job.model.trust_remote_code,
        "tensor": plan.grid.tp,
        "sequence_parallel": settings.sequence_parallel,
        "splits_backward": settings.splits_backward,
        "software": Software.of(plan),
        "marks_modules": settings.zero_stage == 3,
        **options,
    }


def trace_model(
    config: PreTrainedConfig,
    *,
    device: Device,
    attention: str = "sdpa",
    tensor: int = 1,
    part: StagePart | None = None,
    all_layers: bool = False,
    **request: Any,
) -> MemoryTrace:
    """Trace one micro-batch of any causal language model that transformers builds from a configuration.

    >>> from transformers import LlamaConfig
    >>> tiny = LlamaConfig(hidden_size=16, intermediate_size=32, num_attention_heads=2, num_hidden_layers=12, vocab_size=64)
    >>> made = trace_model(tiny, micro_batch=8, sequence_length=16, device=Device(capability=9.0))
    >>> made.num_layers, made.num_traced_layers
    (12, 3)

    Args:
        config: Configuration of the model; it is not modified.
        device: Card, which decides on kernels.
        attention: `eager`, `sdpa` or `flash_attention_2`.
        tensor: Number of tensor ranks.
        part: The layers of a pipeline's rank; None for the whole model.
        all_layers: Traces every layer instead of those that differ: slow, and the same.
        request: As in `TraceSpec`.

    Raises:
        PlanError: TRACE_FAILED; and what `build_model`, `apply_tensor_parallel` and `split_model` raise.
    """
    requested = _requested(config, device=device, attention=attention, tensor=tensor, **request)
    with requested as (own, made):
        if not all_layers and not collects_router_logits(own):
            traced = made.trace(copy.deepcopy(own), part=part, all_layers=False)
            if traced is not None:
                return traced
        whole = made.trace(own, part=part, all_layers=True)
    assert whole is not None
    return whole


@contextlib.contextmanager
def _requested(
    config: PreTrainedConfig, *, device: Device, attention: str = "sdpa", tensor: int = 1, **values: Any
) -> Iterator[tuple[PreTrainedConfig, TraceSpec]]:
    """Yield a copy of a configuration and what to trace, inside a context with the card's kernels and fake tensor ranks."""
    own = copy.deepcopy(config)
    own._attn_implementation = attention
    packed = values.get("packing") == "separated"
    with quiet(), cuda_kernels(device, packed=packed), tensor_group(tensor) as tp_group:
        yield own, TraceSpec(flatten=attention == "flash_attention_2", tp_group=tp_group, **values)


@final
class StageTracer:
    """A tracer of the stages of one model, which runs only what no earlier stage has run.

    Args:
        config: Configuration of the model; it is not modified.
        options: Arguments of `trace_model`, except `part` and `all_layers`.
    """

    def __init__(self, config: PreTrainedConfig, **options: Any) -> None:
        self._config, self._options = config, options
        self._prefix, self._kinds, self._types = self._read_layers()
        self._runs: dict[Hashable, TraceRun] = {}
        self._traces: dict[Hashable, MemoryTrace] = {}

    @property
    def num_runs(self) -> int:
        """Number of stages that have run on fake tensors."""
        return len(self._runs)

    @property
    def layers_are_alike(self) -> bool:
        """True if all layers have one structure, and either all recompute or none does."""
        return len(set(self._kinds)) == 1 and self._options["checkpointing"] in (0, 1)

    def trace(self, part: StagePart) -> MemoryTrace:
        """Trace a rank's part; parts of one kind share a trace, whose names are those of the first of them.

        Raises:
            PlanError: As of `trace_model`.
        """
        key = self.kind(part)
        if key not in self._traces:
            self._traces[key] = self._make(part)
        return self._traces[key]

    def kind(self, part: StagePart) -> Hashable:
        """Return the kind of a rank's part: parts of one kind need the same memory."""
        return part.first, part.last, tuple(tuple(self._kinds[index] for index in chunk) for chunk in part.chunks)

    def _make(self, part: StagePart) -> MemoryTrace:
        kinds = list(zip(self._kinds, self._recompute(part), strict=True))
        pruned = choose(self._prefix, kinds, self._types, part)
        key = (
            part.first,
            part.last,
            pruned.part,
            tuple(tuple(kinds[index] for index in stack.kept) for stack in pruned.stacks),
        )
        if key not in self._runs:
            with self._requested() as (config, request):
                self._runs[key] = request.run(config, part=part, all_layers=False)
        ran = self._runs[key]
        # Adapters wrap the model, which changes the path of its layers.
        stacks = [replace(own, prefix=there.prefix) for own, there in zip(pruned.stacks, ran.stacks, strict=True)]
        made = ran.expanded(stacks)
        if made is not None:
            return made
        with self._requested() as (config, request):
            whole = request.trace(config, part=part, all_layers=True)
        assert whole is not None, "every layer stands for itself"
        return whole

    def _requested(self) -> contextlib.AbstractContextManager[tuple[PreTrainedConfig, TraceSpec]]:
        return _requested(self._config, **self._options)

    def _recompute(self, part: StagePart) -> list[bool]:
        """Return for each layer whether it recomputes on this rank (modeling.checkpointing)."""
        own = [index for chunk in part.chunks for index in chunk]
        share = self._options["checkpointing"]
        chosen = {own[index] for index in evenly_spaced(len(own), share)} if share else set()
        return [index in chosen for index in range(part.num_layers)]

    def _read_layers(self) -> tuple[str, list[int], list[Hashable]]:
        """Return the path of the layers, the number of each one's kind, and its entries in the configuration."""
        with self._requested() as (config, request):
            model = build_empty(config, dtype=request.dtype, trust_remote_code=request.trust_remote_code)
            prefix = find_layers(model)
            layers: Any = model.get_submodule(prefix)
            numbers: dict[Hashable, int] = {}
            kinds = [numbers.setdefault(kind, len(numbers)) for kind in kinds_of(model, layers)]
            return prefix, kinds, list(layer_types(model, len(layers)))
