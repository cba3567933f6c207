"""The memory report of a job or a plan: trace the model, replay the engine on each kind of rank, and add the overheads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from toolkit.arguments import checks_arguments
from toolkit.config.job import Dtype, Job
from toolkit.errors import PlanError
from toolkit.launch.software import Software
from toolkit.memory.deepspeed_file import DeepSpeedFile
from toolkit.memory.engines.replay import NORM_ITEMSIZE
from toolkit.memory.engines.settings import EngineSettings, engine_settings, keeps_frozen_inputs
from toolkit.memory.report.calibration import Calibration
from toolkit.memory.report.host import CPU_PROCESS_GIB, PROCESS_BYTES
from toolkit.memory.report.host_loading import Loading, loading
from toolkit.memory.report.host_ranks import host_report
from toolkit.memory.report.overhead import TIGHT_EXPANDABLE, Allocator
from toolkit.memory.report.ranks import phases_of_ranks, rank_report
from toolkit.memory.report.report import MemoryReport, PhaseReport
from toolkit.memory.report.software import of_software
from toolkit.memory.scenario import Scenario, check_zero_init
from toolkit.memory.trace.events import MemoryTrace, Traces
from toolkit.planning.checkpoint_size import DiskUse, disk_use, exports_whole
from toolkit.planning.plan import Plan
from toolkit.planning.read import read_job_or_plan
from toolkit.topology.communicators import MAX_SENDS_IN_FLIGHT
from toolkit.units import format_bytes

_SCRIPTS_ON_HOST = (
    "host memory is that of an Accelerate script, whose processes each load the whole model first; `toolkit train` streams the "
    "weights to the device and needs less"
)

ASSUMPTIONS: Mapping[str, tuple[str, ...]] = {
    "ddp": (
        "under DDP weights, gradients and AdamW's moments have the training precision, as transformers loads them: "
        "there is no fp32 master copy",
        _SCRIPTS_ON_HOST,
    ),
    "fsdp2": (
        "FSDP2's trainable parameters are fp32 shards, gathered in the training precision",
        _SCRIPTS_ON_HOST,
    ),
}

NF4 = (
    "QLoRA keeps the linear layers in NF4 with double quantization, except the output projection; everything else, "
    "adapters included, has the training precision"
)

PAGED = (
    "paged states are counted on the card, where they are while it has room: the driver moves them to RAM when other tensors need it, "
    "and torch's allocator does not count them"
)

ADAPTER_INPUTS = (
    "adapters under checkpointing are estimated as run by Trainer and scripts, where the first layer's input needs a "
    "gradient; `toolkit train` frees both before the step"
)

ADAPTER_IMAGES = (
    "adapters of a model that reads images are estimated as run by `toolkit train`: under checkpointing, Trainer has a frozen vision "
    "tower keep its layers' inputs as well"
)


@checks_arguments
def estimate(
    job: Job | Plan | str | Path,
    *,
    deepspeed_config: Mapping[str, Any] | str | Path | None = None,
    traced: MemoryTrace | Traces | None = None,
    worst: Traces | None = None,
    evaluated: Traces | None = None,
    calibration: Calibration | None = None,
    zero_init: bool = True,
    load_dtype: Dtype | None = None,
    allocator: Allocator | None = None,
) -> MemoryReport:
    """Estimate the memory of a job on each card and on the host, and its disk space, as `toolkit estimate` does.

    Args:
        job: A job, a plan, or the path of a job file or of a plan.json. A job may use features that can be estimated and not trained.
        deepspeed_config: The user's own DeepSpeed configuration or its file, in place of the plan's; "auto" is filled in as
            by Trainer, and the job is resolved for it.
        traced: Existing traces of the same model, batch and checkpointing, one for each rank of a pipeline.
        worst: Traces with the routing that needs most memory; read only where `traced` depends on the routing.
        evaluated: Traces of the evaluation; read only if the plan has one.
        calibration: Figures measured on this machine.
        zero_init: Whether a stage-3 model is built under `zero.Init`; otherwise each rank loads it by
            `from_pretrained`.
        load_dtype: Data type of that loading; by default that of the files.
        allocator: Setting of torch's allocator; by default the plan's, which our launches use, or `native` under a user's own
            configuration.

    Raises:
        SpecError: As of `resolve`; each key of the configuration that DeepSpeed would refuse, ignore or drop;
            ZERO_INIT_STAGE, LOAD_DTYPE.
        PlanError: As of `resolve`; DEEPSPEED_CONTRADICTS, DEEPSPEED_CONFLICT; ESTIMATE_FILE for a pipeline with a configuration;
            TRACE_FAILED.
    """
    given = read_job_or_plan(Path(job)) if isinstance(job, str | Path) else job.checked()
    file = None if deepspeed_config is None else DeepSpeedFile.read(deepspeed_config)
    if isinstance(given, Job):
        case = Scenario.of(given, file=file)
    else:
        case = Scenario.of(given.job, model=given.model, gpu=given.gpu, file=file)
    plan = given if isinstance(given, Plan) and file is None else case.plan()
    check_zero_init(plan, zero_init=zero_init, load_dtype=load_dtype)

    def trace(plan: Plan, **options: Any) -> Traces:
        known = None if "software" in options else traced
        if options.get("routing") == "worst":
            known = worst
        elif options.get("evaluation"):
            known = evaluated
        if known is not None:
            return (known,) if isinstance(known, MemoryTrace) else known
        from toolkit.memory.trace.run import trace_ranks  # torch and transformers, which given traces do not need

        return trace_ranks(plan, **options)

    case = replace(case, zero_init=zero_init, load_dtype=load_dtype)
    return report_of(plan, case, trace=trace, calibration=calibration, allocator=allocator)


def report_of(
    plan: Plan,
    case: Scenario,
    *,
    trace: Callable[..., Traces],
    calibration: Calibration | None = None,
    allocator: Allocator | None = None,
) -> MemoryReport:
    """Return the report of a plan, given the case that resolved to it and the function that traces it.

    Raises:
        PlanError: ESTIMATE_FILE, TRACE_FAILED.
    """
    _check_pipeline(plan, with_file=case.file is not None)
    config = None if case.file is None else case.file.resolved(plan)
    # The toolkit does not launch a script with its own configuration, so torch's default applies.
    allocator = allocator or (plan.allocator if case.file is None else "native")
    settings = engine_settings(plan, config, zero_init=case.zero_init)
    traces = partial(
        trace, plan, marks_modules=settings.zero_stage == 3, keeps_inputs=keeps_frozen_inputs(plan, settings)
    )
    events = traces()
    phases = phases_of_ranks(plan, events, settings)
    if plan.settings.eval_steps is not None:
        evaluations = phases_of_ranks(plan, traces(evaluation=True), settings, evaluation=True)
        for place, found in phases.items():
            saved = found.pop("save")
            found |= {"evaluation": evaluations[place]["forward"], "save": saved}
    peak = max(phase.allocated_bytes for found in phases.values() for phase in found.values())
    worst_peak = peak if any(each.has_experts for each in events) else None
    if any(each.depends_on_routing for each in events):
        unbalanced = phases_of_ranks(plan, traces(routing="worst"), settings)
        worst_peak = max(phase.allocated_bytes for found in unbalanced.values() for phase in found.values())
    shared: dict[tuple[int, ...], dict[str, PhaseReport]] = {}  # ranks of one kind have the same phases
    ranks = tuple(
        rank_report(
            plan,
            rank,
            shared.setdefault(tuple(map(id, phases[place.pp, place.dp].values())), phases[place.pp, place.dp]),
            settings,
            num_replicas=events[place.pp].num_replicas,
            tied=bool(events[-1].copies),
            calibration=calibration,
            allocator=allocator,
        )
        for rank in range(plan.grid.world_size)
        for place in [plan.grid.coordinate(rank)]
    )
    loaded = None if settings.zero_init else loading(plan, dtype=case.load_dtype)
    fullest = max(ranks, key=lambda rank: rank.required_bytes)

    def peak_with(software: Software) -> int:
        found = phases_of_ranks(plan, traces(software=software), settings)
        return max(phase.allocated_bytes for phases in found.values() for phase in phases.values())

    room = None if plan.gpu.memory_bytes is None else plan.gpu.memory_bytes - (fullest.required_bytes - peak)
    software = of_software(plan, events, room_bytes=room, peak_with=peak_with)
    return MemoryReport(
        ranks=ranks,
        allocator=allocator,
        allocator_slack_bytes=fullest.allocator_slack_bytes,
        context_and_nccl_bytes=fullest.context_and_nccl_bytes,
        num_communicators=fullest.num_communicators,
        gpu_capacity_bytes=plan.gpu.memory_bytes,
        host=host_report(plan, events, settings, ranks=ranks, loaded=loaded, saves=case.file is None),
        disk=_disk(plan, events),
        num_traced_layers=sum(each.num_traced_layers for each in {id(each): each for each in events}.values()),
        num_layers=sum(each.num_layers for each in events),
        worst_routing_peak_bytes=worst_peak,
        condition=software.condition,
        guess=software.guess,
        assumptions=(
            *dict.fromkeys(line for each in events for line in each.assumptions),
            *software.notes,
            *ASSUMPTIONS.get(plan.job.parallel.strategy, ()),
            *([] if loaded is None else [_loading_assumption(plan, loaded)]),
            *_assumptions(plan, settings, allocator),
            *_own_step(plan, events, phases, settings, peak=peak),
            *(() if case.file is None else case.file.notes(plan, case.job)),
        ),
    )


def _check_pipeline(plan: Plan, *, with_file: bool) -> None:
    """Refuse a DeepSpeed file for a pipeline.

    Raises:
        PlanError: ESTIMATE_FILE.
    """
    if with_file and plan.grid.pp > 1:
        raise PlanError.of(
            code="ESTIMATE_FILE",
            key="--deepspeed-config",
            message=f"a DeepSpeed configuration of your own (--deepspeed-config) with pipeline={plan.grid.pp}: the "
            "pipeline loop accumulates gradients itself and needs the plan's configuration",
            fix="Leave --deepspeed-config out, put its keys into the job's `deepspeed` section, or set parallel.pipeline to 1",
        )


def _disk(plan: Plan, traces: Traces) -> DiskUse:
    """Return the disk use: each rank writes all that it holds, replicas and padding included; the export has each value once."""
    parameters = [parameter for events in traces for parameter in events.parameters]
    trained = [parameter for parameter in parameters if parameter.trainable]
    full = exports_whole(plan.job.train)
    total, trainable = (-(-sum(p.numel for p in each) // plan.grid.pp) for each in (parameters, trained))
    use = disk_use(plan, total=total, trainable=trainable)
    itemsize = use.export_bytes // (plan.grid.tp * plan.grid.pp * (total if full else trainable))
    copies = {name for events in traces for name in events.copies}
    exported = (p.dense_numel for p in (parameters if full else trained) if p.name not in copies)
    return replace(use, export_bytes=itemsize * sum(exported))


def _loading_assumption(plan: Plan, loaded: Loading) -> str:
    """Return the assumption about a user's own script, and what it would allocate if it loaded in fp32."""
    said = (
        f"each rank builds the model by from_pretrained in {loaded.dtype} and allocates {format_bytes(loaded.peak)} "
        "itself meanwhile; weights in the files' dtype are memory-mapped, once for all ranks"
    )
    if loaded.dtype == "fp32":
        return said
    return f"{said} (loaded in fp32, --load-dtype fp32, it would allocate {format_bytes(loading(plan, dtype='fp32').peak)})"


def _own_step(
    plan: Plan,
    events: Traces,
    found: Mapping[tuple[int, int], Mapping[str, PhaseReport]],
    settings: EngineSettings,
    *,
    peak: int,
) -> Iterator[str]:
    """Yield what DeepSpeed's own step takes beyond the peak, in runs of other programs with the files of a plan."""
    if not settings.short_step or settings.zero_stage not in (1, 2, 3):
        return
    own, why = peak, "it flattens the gradients before it casts them"
    if settings.zero_stage == 3:
        why = "it takes norms in fp64"
        largest = max(
            (parameter.numel for each in events for parameter in each.parameters if parameter.trainable), default=0
        )
        most = max(phases["step"].allocated_bytes for phases in found.values())
        if settings.offload_optimizer is None and most + NORM_ITEMSIZE * -(-largest // settings.dp_size) > peak:
            alone = replace(settings, short_step=False, frees_graph=False)
            steps = phases_of_ranks(plan, events, alone).values()
            own = max(own, *(phases["step"].allocated_bytes for phases in steps))
    elif settings.itemsize != settings.master_itemsize and settings.accumulation_itemsize == settings.itemsize:
        for phases in found.values():  # sums in fp32 are stepped as they are
            step = phases["step"]
            in_fp32 = dict(step.causes).get("gradients in fp32 at the step", 0)
            own = max(own, step.allocated_bytes + in_fp32 * settings.itemsize // settings.master_itemsize)
    if own > peak:
        yield (
            f"run by Trainer or by a script of your own, DeepSpeed's step takes up to {format_bytes(own - peak)} beyond this peak: {why}"
        )


def _assumptions(plan: Plan, settings: EngineSettings, allocator: Allocator) -> Iterator[str]:
    """Yield what the estimate of a job assumes."""
    if (why := plan.gpu.assumed.get("compute_capability")) is not None:
        yield (
            f"gpu={plan.gpu.name} is taken to have compute_capability={plan.gpu.compute_capability}, {why}; "
            "precisions, kernels and workspaces depend on it: set cluster.gpu.compute_capability"
        )
    if plan.on_cpu:
        yield (
            "the figures of a process are its tensors; Python, torch and DeepSpeed count as host memory, estimated as "
            f"for a process with a GPU, {format_bytes(PROCESS_BYTES)} per process: without CUDA's libraries they took "
            f"about {CPU_PROCESS_GIB:g} GiB"
        )
    if plan.job.train.method == "qlora":
        yield NF4
    if plan.job.train.optimizer == "paged_adamw_8bit":
        yield PAGED
    if plan.job.train.method != "full" and plan.settings.gradient_checkpointing and plan.grid.size("model") == 1:
        yield ADAPTER_INPUTS if plan.image_inputs is None else ADAPTER_IMAGES
    if plan.job.train.torch_compile and plan.on_cpu:
        yield "on CPU processes torch.compile is estimated as eager execution, which needs no less"
    if plan.grid.pp > 1 and not plan.on_cpu:
        yield "each communicator of a pipeline is assumed to take as much memory as one of many ranks"
        if plan.settings.virtual_stages > 1:
            yield (
                f"the last {MAX_SENDS_IN_FLIGHT} messages that a rank has sent are assumed to be in flight: with "
                "virtual stages it cannot wait for the earlier ones"
            )
    if settings.zero.zero_quantized_weights:
        yield "zero_quantized_weights is estimated as if gathers were not quantized"
    if allocator == "expandable":
        yield TIGHT_EXPANDABLE
    if allocator == "native" and not plan.on_cpu:
        yield "under torch's default allocator the slack is the largest that measured runs reserved in addition"
