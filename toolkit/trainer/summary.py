"""Descriptions of a run's data and model."""

from __future__ import annotations

from toolkit.data.prepare import PreparedData
from toolkit.data.streaming import StreamedRows
from toolkit.distributed.deepspeed_private import count_parameters
from toolkit.engine.run import Run
from toolkit.modeling.fp8 import fp8_layers
from toolkit.trainer.progress import describe_devices
from toolkit.units import format_bytes, format_count, format_seconds


def describe_data(data: PreparedData) -> str:
    """Return one line on the packed documents, and further lines on what of them is never read."""
    if isinstance(data.train, StreamedRows):
        return _describe_stream(data, data.train)
    report = data.train.report
    learned = (
        f"{report.target_tokens:,} of them learned" if data.train.per_token else f"{report.target_tokens:,} labels"
    )
    parts = [
        f"data: {report.documents:,} documents, {report.sequences:,} sequences, {report.tokens:,} tokens, {learned}"
    ]
    if report.truncated and data.train.packing != "wrapped":
        parts.append(f"{report.truncated:,} documents cut")
    left_out = report.dropped_documents + report.dropped_long
    if left_out or report.dropped_sequences:
        parts.append(f"{left_out:,} documents and {report.dropped_sequences:,} sequences dropped")
    if report.padding_fraction:
        parts.append(f"{report.padding_fraction:.0%} padding")
    return _with_validation(data, parts)


def _describe_stream(data: PreparedData, rows: StreamedRows) -> str:
    names = ", ".join(source.facts.name for source in rows.sources)
    said = f"data: streamed from {names}, {data.format}, shuffled among {rows.shuffle_buffer:,} documents of each rank"
    return _with_validation(data, [said])


def _with_validation(data: PreparedData, parts: list[str]) -> str:
    """Return the parts of a line with the validation sets, and the warnings below it."""
    sets = [
        f"{len(held):,} sequences to validate on{f' as {name}' if name else ''}"
        for name, held in data.validation.items()
    ]
    return "\n".join(("; ".join([*parts, *sets]), *(f"warning: {warning}" for warning in data.warnings)))


def describe_model(run: Run, *, seconds: float) -> str:
    """Return one line on the model that was built and how long it took."""
    total, trainable = count_parameters(run.model)
    plan, grid = run.plan, run.world.grid
    trained = "" if trainable == total else f", {format_count(trainable)} of them trained"
    held = f"{format_count(total)} parameters"
    if axes := grid.describe():
        whole = plan.model.num_parameters
        held = (
            f"{held} on rank 0"
            if whole is None
            else f"{format_count(whole)} parameters, {format_count(total)} on rank 0"
        )
    in_fp8 = sum(1 for _ in fp8_layers(run.model))
    precision = plan.settings.precision + (f" in {in_fp8} linear layers" if in_fp8 else "")
    return (
        f"model: {plan.model.name}, {held}{trained}; {plan.strategy_name}, {f'{axes}, ' if axes else ''}"
        f"{precision}, {describe_devices(plan)}; "
        f"built in {format_seconds(seconds)}, {format_bytes(run.memory.peak_bytes)}"
    )
