"""The report that `toolkit estimate` prints of one estimate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from toolkit.cli.output import new_table, print_fields, print_table
from toolkit.units import format_bytes

if TYPE_CHECKING:
    from toolkit.memory.report.report import MemoryReport
    from toolkit.memory.scenario import Scenario
    from toolkit.memory.search.advice import Saving
    from toolkit.planning.checkpoint_size import DiskUse
    from toolkit.planning.plan import Plan

# Causes below this share of the peak are summed up in one line.
LEAST_SHARE = 0.005


def print_report(case: Scenario, plan: Plan, report: MemoryReport, savings: Sequence[Saving]) -> None:
    """Print an estimate: the verdict first, then its causes."""
    settings, cluster = plan.settings, plan.job.cluster
    names = {"ddp": "DDP", "fsdp2": "FSDP2"}
    strategy = names.get(plan.job.parallel.strategy, f"ZeRO-{settings.zero_stage}")
    strategy += f", {axes}" if (axes := plan.grid.describe()) else ""
    offload = f"offload {plan.profile.name}" if case.file is None else f"under {case.file.name}"
    print(
        f"{plan.model.name} on {cluster.num_ranks} × {plan.gpu.name}: {strategy}, {offload}, "
        f"{settings.precision}, micro batch {settings.batch.micro} × {settings.sequence_length} tokens"
    )
    print("; ".join(_shape(plan)))
    notes = () if case.file is None else case.file.notes(plan, case.job)
    for note in notes:  # replaced job values come before the numbers that depend on them
        print(note)
    device = "process" if plan.on_cpu else "card"
    print(verdict(report, device=device))
    if plan.grid.pp > 1:
        _print_stages(plan, report)
    _print_phases(report, device=device)
    _print_causes(report)
    print(f"\n{'Tensors of a process' if plan.on_cpu else 'A card must have'}")
    print_fields(_card(report, on_cpu=plan.on_cpu))
    print(f"\nHost memory of a node, {report.host.ranks_per_node} {_plural('rank', report.host.ranks_per_node)}")
    print_fields(_host(report))
    print(f"\nDisk: {_disk(report.disk)}")
    print(_traced(report))
    if report.worst_routing_peak_bytes is not None:
        print(f"At worst, all tokens choosing the same experts: {_worst_routing(report)}")
    _print_savings(savings, device=device)
    assumed = [line for line in report.assumptions if line not in notes]
    if assumed:
        print("\nAssumed")
        for line in assumed:
            print(f"  {line}")


def _shape(plan: Plan) -> Iterator[str]:
    """Yield the other settings of a job that determine memory, chosen or defaulted."""
    train, settings = plan.job.train, plan.settings
    yield {"full": "all weights train", "lora": "LoRA", "qlora": "QLoRA"}[train.method]
    share = settings.gradient_checkpointing
    yield "gradient checkpointing " + ("on" if share == 1 else "off" if share == 0 else f"of {share:.0%} of the layers")
    yield f"accumulation {settings.batch.accumulation}"
    if train.loss != "full":
        yield f"{train.loss} loss"


def verdict(report: MemoryReport, *, device: str) -> str:
    """Return one line: whether card and host hold the job, and what is left or lacking.

    Args:
        report: The estimate.
        device: Device of a rank: `card`, or `process` on CPU, which has no memory of its own.
    """
    if report.gpu_capacity_bytes is None and report.host.capacity_bytes is None:
        taken = f"It takes {format_bytes(report.required_bytes)} a {device} and {format_bytes(report.host.bytes_per_node)} a host"
        if device == "process":
            taken = (
                f"The tensors of a process take {format_bytes(report.required_bytes)}; with its libraries, "
                f"{'it takes' if report.host.ranks_per_node == 1 else f'{report.host.ranks_per_node} of them take'} "
                f"{format_bytes(report.host.bytes_per_node)} of a host"
            )
        return f"{taken}, whose capacity is not known"
    parts = [_compare(device, report.required_bytes, report.gpu_capacity_bytes)]
    if device == "process":
        parts = [f"tensors of a process {format_bytes(report.required_bytes)}"]
    parts.append(_compare("host", report.host.bytes_per_node, report.host.capacity_bytes))
    said = "It does not fit" if not report.fits else "It fits tightly" if report.tight else "It fits"
    return f"{said}: {'; '.join(parts)}"


def _compare(name: str, needed: int, capacity: int | None) -> str:
    if capacity is None:
        return f"{name} {format_bytes(needed)}, capacity unknown"
    room = capacity - needed
    rest = f"{format_bytes(room)} left" if room >= 0 else f"{format_bytes(-room)} too much"
    return f"{name} {format_bytes(needed)} of {format_bytes(capacity)}, {rest}"


def _traced(report: MemoryReport) -> str:
    if report.num_traced_layers >= report.num_layers:
        return f"Traced every layer, {report.num_layers} in all"
    return f"Traced {report.num_traced_layers} of {report.num_layers} layers; the others repeat these"


def _disk(disk: DiskUse) -> str:
    several = f", {disk.num_checkpoints} of them at once" if disk.num_checkpoints > 1 else ""
    return (
        f"{format_bytes(disk.checkpoint_bytes)} a checkpoint{several}, {format_bytes(disk.export_bytes)} the export: "
        f"up to {format_bytes(disk.total_bytes)} in all"
    )


def _worst_routing(report: MemoryReport) -> str:
    worst, peak = report.worst_routing_peak_bytes or 0, report.peak_allocated_bytes
    same = worst <= peak
    return f"peak {format_bytes(max(worst, peak))}{', the same' if same else f', {format_bytes(worst - peak)} more'}"


def _print_stages(plan: Plan, report: MemoryReport) -> None:
    """Print the fullest rank of each pipeline rank."""
    settings, grid = plan.settings, plan.grid
    print(f"\nStages, {settings.pipeline_schedule}, {settings.batch.accumulation} micro-batches a step")
    table = new_table(
        ("pipeline rank", "layers", "ranks", "peak", "in", "required"),
        right=("pipeline rank", "layers", "peak", "required"),
    )
    for pp_rank in range(grid.pp):
        members = [rank for rank in report.ranks if rank.coordinate.pp == pp_rank]
        fullest = max(members, key=lambda rank: rank.required_bytes)
        layers = " + ".join(map(str, settings.partition[pp_rank :: grid.pp]))
        table.add_row(
            str(pp_rank),
            layers,
            f"{members[0].rank}" if len(members) == 1 else f"{members[0].rank} to {members[-1].rank}",
            format_bytes(fullest.peak_allocated_bytes),
            fullest.limiting_phase,
            format_bytes(fullest.required_bytes) + (" ◄ fullest" if report.fullest in members else ""),
        )
    print_table(table)


def _print_phases(report: MemoryReport, *, device: str) -> None:
    rank = report.fullest
    where = f"the fullest rank, {rank.rank}" if len(report.ranks) > 1 else f"the {device}"
    print(f"\nPeak by phase on {where}")
    lines = []
    for name, phase in rank.phases.items():
        mark = "  ◄ the peak" if name == report.limiting_phase else ""
        lines.append((name, f"{format_bytes(phase.allocated_bytes):>10}{mark}"))
    print_fields(lines)


def _print_causes(report: MemoryReport) -> None:
    phase = report.fullest.phases[report.limiting_phase]
    print(f"\nCauses of the peak, in {report.limiting_phase}")
    whole = phase.allocated_bytes or 1
    ordered = sorted(phase.causes.items(), key=lambda item: -item[1])
    shown = [(cause, size) for cause, size in ordered if size >= LEAST_SHARE * whole]
    rest = sum(size for _, size in ordered) - sum(size for _, size in shown)
    if rest:
        shown.append(("all else", rest))
    print_fields((cause, f"{format_bytes(size):>10}  {size / whole:4.0%}") for cause, size in shown)


def _card(report: MemoryReport, *, on_cpu: bool) -> list[tuple[str, str]]:
    allocator = "expandable segments" if report.allocator == "expandable" else "torch's default"
    if on_cpu:
        allocator = "assumed"
    lines = [
        ("peak allocated", format_bytes(report.peak_allocated_bytes)),
        (f"allocator slack, {allocator}", format_bytes(report.allocator_slack_bytes)),
        *([] if on_cpu else [("CUDA context and NCCL", format_bytes(report.context_and_nccl_bytes))]),
        ("required", format_bytes(report.required_bytes)),
    ]
    if report.gpu_capacity_bytes is not None:
        room = report.gpu_capacity_bytes - report.required_bytes
        lines.append(("capacity", format_bytes(report.gpu_capacity_bytes)))
        lines.append(("room left" if room >= 0 else "too much", format_bytes(abs(room))))
    return [(name, f"{value:>10}") for name, value in lines]


def _host(report: MemoryReport) -> list[tuple[str, str]]:
    host = report.host
    ordered = sorted(host.bytes_on_node.items(), key=lambda item: -item[1])
    lines = [(cause, format_bytes(size)) for cause, size in ordered]
    lines.append(("required", format_bytes(host.bytes_per_node)))
    if host.capacity_bytes is not None:
        lines.append(("capacity", format_bytes(host.capacity_bytes)))
    return [(name, f"{value:>10}") for name, value in lines]


def _print_savings(savings: Sequence[Saving], *, device: str) -> None:
    if not savings:
        print(f"\nNone of the changes that were tried saves memory of a {device}")
        return
    print("\nWhat would save most")
    table = new_table(("change", "required", "saved", "host a node", ""), right=("required", "saved", "host a node"))
    for saving in savings:
        added = saving.host_bytes_added
        fits = "does not fit" if not saving.fits else "fits, tight" if saving.tight else "fits"
        table.add_row(
            saving.text.replace(", ", "\n"),
            format_bytes(saving.required_bytes),
            format_bytes(saving.saved_bytes),
            "" if not added else f"{'+' if added > 0 else '-'}{format_bytes(abs(added))}",
            fits + (f"; {saving.change.note}" if saving.change.note else ""),
        )
    print_table(table)


def _plural(word: str, count: int) -> str:
    return word if count == 1 else f"{word}s"
