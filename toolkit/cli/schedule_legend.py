"""Names, letters and colours of a schedule, the same in its chart and in its picture."""

from __future__ import annotations

from toolkit.pipeline_schedule import Backward, BackwardInput, BackwardWeight, Compute, Forward, Timeline

# Letter, meaning, and colours on a terminal and in a picture: Okabe and Ito's, distinguishable to colour-blind readers.
LOOKS: dict[type[Compute], tuple[str, str, str, str]] = {
    Forward: ("F", "forward", "black on #56B4E9", "#56B4E9"),
    Backward: ("B", "backward", "black on #009E73", "#009E73"),
    BackwardInput: ("I", "backward, input", "black on #E69F00", "#E69F00"),
    BackwardWeight: ("W", "backward, weights", "black on #F0E442", "#F0E442"),
}


def title_of(timeline: Timeline) -> str:
    """Return a line with name, sizes and bubble."""
    schedule = timeline.schedule
    chunks = f" of {schedule.virtual_stages} stages" if schedule.virtual_stages > 1 else ""
    plural = "" if schedule.micro_batches == 1 else "es"
    return (
        f"{schedule.name}: {schedule.pp} pipeline ranks{chunks}, {schedule.micro_batches} micro-batch{plural}, "
        f"bubble {timeline.bubble_fraction:.1%}"
    )


def label(instruction: Compute, *, with_chunk: bool) -> str:
    """Return a short label of an instruction: kind, micro-batch, and after a dot the chunk if there are several."""
    chunk = f".{instruction.chunk}" if with_chunk else ""
    return f"{LOOKS[type(instruction)][0]}{instruction.micro_batch}{chunk}"


def row_name(rank: int) -> str:
    """Return the name of a chart's row: a pipeline rank, which is not a global rank."""
    return f"pipeline rank {rank}"
