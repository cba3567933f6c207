"""The report that `toolkit estimate` prints of one estimate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from toolkit.cli.output import new_table, print_fields, print_table
from toolkit.units import format_bytes

if TYPE_CHECKING:
    from toolkit.cost import StepTime
    from toolkit.memory.report.report import MemoryReport
    from toolkit.memory.scenario import Scenario
    from toolkit.memory.search.advice import Saving
    from toolkit.planning.checkpoint_size import DiskUse
    from toolkit.planning.plan import Plan


def print_report(case: Scenario, plan: Plan, report: MemoryReport, time: StepTime | None) -> None:
    """Print an estimate: the verdict first, then its causes; what could be saved and what is assumed follow."""
    from toolkit.memory.report.page import card_fields, cause_fields, host_fields, verdict

    settings, cluster = plan.settings, plan.job.cluster
    strategy = plan.strategy_name + (f", {axes}" if (axes := plan.grid.describe()) else "")
    offload = f"offload {plan.profile.name}" if case.file is None else f"under {case.file.name}"
    print(
        f"{plan.model.name} on {cluster.num_ranks} × {plan.gpu.name}: {strategy}, {offload}, "
        f"{settings.precision}, micro batch {settings.batch.micro} × {settings.sequence_length} tokens"
    )
    print("; ".join(_shape(plan)))
    notes = () if case.file is None else case.file.notes(plan, case.job)
    for note in notes:  # replaced job values come before the numbers that depend on them
        print(note)
    device = device_word(plan)
    print(verdict(report, device=device))
    if time is not None:
        print(f"Foreseen: {time}")
    if plan.grid.pp > 1:
        _print_stages(plan, report)
    _print_phases(report, device=device)
    print(f"\nCauses of the peak, in {report.limiting_phase}")
    print_fields(cause_fields(report))
    print(f"\n{'Tensors of a process' if plan.on_cpu else 'A card must have'}")
    print_fields(card_fields(report, on_cpu=plan.on_cpu))
    print(f"\nHost memory of a node, {report.host.ranks_per_node} {_plural('rank', report.host.ranks_per_node)}")
    print_fields(host_fields(report))
    print(f"\nDisk: {_disk(report.disk)}")
    print(_traced(report))
    if report.worst_routing_peak_bytes is not None:
        print(f"Worst case, all tokens choose the same experts: {_worst_routing(report)}")


def print_assumptions(case: Scenario, plan: Plan, report: MemoryReport, time: StepTime | None) -> None:
    """Print what an estimate assumes, without what was printed before it."""
    notes = () if case.file is None else case.file.notes(plan, case.job)
    assumed = [line for line in report.assumptions if line not in notes]
    assumed += () if time is None else time.assumptions
    if assumed:
        print("\nAssumed")
        for line in assumed:
            print(f"  {line}")


def _shape(plan: Plan) -> Iterator[str]:
    """Yield the other settings of a job that determine memory, chosen or defaulted."""
    train, settings = plan.job.train, plan.settings
    yield {"full": "all weights train", "lora": "LoRA", "qlora": "QLoRA"}[train.method]
    share, recomputation = settings.gradient_checkpointing, train.recomputation
    every = f"of every {recomputation.every_n_layers} layers one" if recomputation.every_n_layers > 1 else ""
    some = every or f"of {share:.0%} of the layers"
    kept = f", which keep {' and '.join(recomputation.keep)}" if recomputation.keep else ""
    yield "gradient checkpointing " + ("on" if share == 1 else "off" if share == 0 else some) + kept
    yield f"accumulation {settings.batch.accumulation}"
    if train.loss != "full":
        yield f"{train.loss} loss"


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
    from toolkit.memory.report.page import phase_fields

    rank = report.fullest
    where = f"the fullest rank, {rank.rank}" if len(report.ranks) > 1 else f"the {device}"
    print(f"\nPeak by phase on {where}")
    print_fields(phase_fields(report))


def device_word(plan: Plan) -> str:
    """Return what has the memory of a rank: a card, or a process."""
    return "process" if plan.on_cpu else "card"


def print_savings(savings: Sequence[Saving], *, device: str) -> None:
    """Print the changes that save most."""
    if not savings:
        print(f"\nNo change that was tried saves memory of a {device}")
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
