"""Traces of a model on fake tensors, which record what its forward and backward passes do to memory.

No weights are read, nothing is computed and no GPU is needed. Only decoder layers with
different structure or neighbours run; the others repeat what these do.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, final

from transformers import PreTrainedConfig

from toolkit.errors import PlanError, SpecError, ToolkitError
from toolkit.forks import call_spread
from toolkit.memory.kernels.routing import collects_router_logits
from toolkit.memory.trace.events import MemoryTrace, Parameter, StageLayout, Traces
from toolkit.memory.trace.failure import unknown_architecture
from toolkit.memory.trace.fake_run import TraceRun, card_of, run_fake, trace_once, whole_model
from toolkit.memory.trace.spec import TraceSpec
from toolkit.memory.trace.stage_layers import Pruned, choose
from toolkit.modeling.architecture import import_architecture, model_config
from toolkit.modeling.checkpointing import recomputing
from toolkit.modeling.proofs import prove_splits
from toolkit.pipeline_parallel import StageSpec
from toolkit.planning.plan import Plan

__all__ = ["MemoryTrace", "Parameter", "StageTracer", "trace", "trace_model", "trace_ranks"]


def trace(plan: Plan, *, all_layers: bool = False, **changes: Any) -> MemoryTrace:
    """Trace one micro-batch of a plan without a pipeline.

    Args:
        plan: Plan of the run.
        all_layers: Traces every layer instead of those that differ: slow, and the same.
        changes: Values of `TraceSpec` in place of the plan's, such as `routing` or `evaluation`.

    Raises:
        SpecError: MODEL_CLASS when transformers does not know the architecture; MODEL_CONFIG_INVALID.
        PlanError: TRACE_FAILED, with the module in which the model cannot run on fake tensors; and what `build_model`
            raises.
    """
    if plan.grid.pp > 1:
        raise ValueError("no rank of a pipeline has the whole model: `trace_ranks` traces its stages")
    return trace_model(_config(plan), TraceSpec.of(plan, **changes), all_layers=all_layers)


def trace_ranks(plan: Plan, *, tracer: StageTracer | None = None, processes: int = 1, **changes: Any) -> Traces:
    """Trace the model of a plan, or each rank of its pipeline.

    Args:
        plan: Plan of the run.
        tracer: Tracer of the same model, batch and checkpointing, with any split into stages.
        processes: Most processes that trace stages at a time: this one and forks of it.
        changes: As of `trace`, and so are the errors.
    """
    if plan.grid.pp == 1:
        return (trace(plan, **changes),)
    own = tracer or stage_tracer(plan, **changes)
    return own.trace_all([plan.stage(pp_rank) for pp_rank in range(plan.grid.pp)], processes=processes)


def stage_tracer(plan: Plan, **changes: Any) -> StageTracer:
    """Return a tracer of the stages of a plan's model, for any split; arguments and errors are those of `trace`."""
    return StageTracer(_config(plan), TraceSpec.of(plan, **changes))


def _config(plan: Plan) -> PreTrainedConfig:
    trusted = plan.job.model.trust_remote_code
    try:
        config = model_config(plan)
        import_architecture(config, trust_remote_code=trusted, task=plan.settings.task)
    except (ValueError, SpecError) as error:
        if isinstance(error, SpecError) and error.codes == ("MODEL_CONFIG_INVALID",):
            raise
        raise unknown_architecture(error, plan.model.name, trust_remote_code=trusted) from error
    prove_splits(
        config,
        tensor=plan.grid.tp,
        pipeline=plan.grid.pp,
        context=plan.grid.cp,
        experts=plan.settings.experts,
        trust_remote_code=trusted,
    )
    return config


def trace_model(
    config: PreTrainedConfig, spec: TraceSpec, *, part: StageSpec | None = None, all_layers: bool = False
) -> MemoryTrace:
    """Trace one micro-batch of any model that transformers builds from a configuration for the task of a specification.

    >>> from transformers import LlamaConfig
    >>> from toolkit.memory.kernels.device import Device
    >>> tiny = LlamaConfig(hidden_size=16, intermediate_size=32, num_attention_heads=2, num_hidden_layers=12, vocab_size=64)
    >>> made = trace_model(tiny, TraceSpec(micro_batch=8, sequence_length=16, device=Device(capability=9.0)))
    >>> made.num_layers, made.num_traced_layers
    (12, 3)

    Args:
        config: Configuration of the model; it is not modified.
        spec: What to trace.
        part: The layers of a pipeline's rank; None for the whole model.
        all_layers: Traces every layer instead of those that differ: slow, and the same.

    Raises:
        PlanError: TRACE_FAILED; and what `build_model`, `apply_tensor_parallel` and `split_model` raise.
    """
    differs = bool(spec.freeze) or (spec.lora is not None and bool(spec.lora.rank_pattern))  # layers, by their names
    if not all_layers and not differs and not collects_router_logits(config):
        traced = None
        with suppress(
            PlanError
        ):  # some models count on all their layers; if it fails for another reason, it fails again
            traced = trace_once(spec, config, part=part, all_layers=False)
        if traced is not None:
            return traced
    whole = trace_once(spec, config, part=part, all_layers=True)
    assert whole is not None, "every layer stands for itself"
    return whole


@final
class StageTracer:
    """A tracer of the stages of one model, which runs only what no earlier stage has run.

    Args:
        config: Configuration of the model; it is not modified.
        spec: What to trace.
    """

    def __init__(self, config: PreTrainedConfig, spec: TraceSpec) -> None:
        self._config, self._spec = config, spec
        with card_of(spec):
            whole = whole_model(spec, config)
        self._prefix, self._kinds, self._types = whole.prefix, whole.kinds, whole.types
        self._runs: dict[Hashable, TraceRun] = {}
        self._traces: dict[Hashable, MemoryTrace] = {}

    @property
    def num_runs(self) -> int:
        """Number of stages that have run on fake tensors."""
        return len(self._runs)

    @property
    def layout(self) -> StageLayout:
        """The kinds of the model's layers."""
        return StageLayout(kinds=tuple(self._kinds), recompute_alike=self._spec.checkpointing in (0, 1))

    def trace(self, part: StageSpec) -> MemoryTrace:
        """Trace a rank's part; parts of one kind share a trace, whose names are those of the first of them.

        Raises:
            PlanError: As of `trace_model`.
        """
        key = self.layout.kind(part)
        if key not in self._traces:
            self._traces[key] = self._make(part)
        return self._traces[key]

    def trace_all(self, parts: Sequence[StageSpec], *, processes: int = 1) -> Traces:
        """Trace the parts of all ranks, those that run different layers in forks of this process at the same time.

        Args:
            parts: The layers of each rank.
            processes: Most processes at a time.

        Raises:
            PlanError: As of `trace_model`.
        """
        runs: dict[Hashable, dict[Hashable, StageSpec]] = {}  # by run, parts of different kinds
        if processes > 1:
            for part in parts:
                if self.layout.kind(part) not in self._traces:
                    runs.setdefault(self._run_of(part)[0], {}).setdefault(self.layout.kind(part), part)
        if len(runs) > 1:
            groups = [list(found.values()) for found in runs.values()]
            for group, made in zip(
                groups, call_spread([partial(self._try, group) for group in groups], processes=processes), strict=True
            ):
                self._traces |= {self.layout.kind(part): trace for part, trace in zip(group, made, strict=False)}
        return tuple(self.trace(part) for part in parts)

    def _try(self, parts: Sequence[StageSpec]) -> list[MemoryTrace]:
        """Return the traces of parts up to the first that cannot be made, whose error comes again where it is asked for."""
        made = []
        with suppress(ToolkitError):
            for part in parts:
                made.append(self.trace(part))
        return made

    def _run_of(self, part: StageSpec) -> tuple[Hashable, Pruned]:
        """Return a key of the run that a part's trace repeats, and its layers."""
        kinds = list(zip(self._kinds, self._recompute(part), strict=True))
        pruned = choose(self._prefix, kinds, self._types, part)
        kept = tuple(tuple(kinds[index] for index in stack.kept) for stack in pruned.stacks)
        return (part.first, part.last, pruned.part, kept), pruned

    def _make(self, part: StageSpec) -> MemoryTrace:
        key, pruned = self._run_of(part)
        if key not in self._runs:
            self._runs[key] = run_fake(self._spec, self._config, part=part, all_layers=False)
        ran = self._runs[key]
        # Adapters wrap the model, which changes the path of its layers.
        stacks = [replace(own, prefix=there.prefix) for own, there in zip(pruned.stacks, ran.stacks, strict=True)]
        made = ran.expanded(stacks)
        if made is not None:
            return made
        return trace_model(self._config, self._spec, part=part, all_layers=True)

    def _recompute(self, part: StageSpec) -> list[bool]:
        """Return for each layer whether it recomputes on this rank (modeling.checkpointing)."""
        own = [index for chunk in part.chunks for index in chunk]
        chosen = {own[at] for at in recomputing(len(own), self._spec.checkpointing, self._spec.checkpoint_every)}
        return [index in chosen for index in range(part.num_layers)]
