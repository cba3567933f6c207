"""The error of a run that is out of memory: what was measured beside what was estimated, and what would need less."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from toolkit.engine.run import Run
from toolkit.errors import RunError, first_line
from toolkit.memory.search.advice import candidates
from toolkit.planning.plan import Plan
from toolkit.units import format_bytes

# Changes that the error names, the cheapest kinds first; `toolkit estimate` measures all of them.
_NUM_CHANGES = 4
# What torch's allocator of host memory says (c10/core/impl/alloc_cpu.cpp), as a plain RuntimeError.
_HOST = "can't allocate memory"


def ran_out(error: BaseException) -> bool:
    """Return whether an exception says that a card's or the host's memory does not suffice."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and _HOST in str(error)


def out_of_memory(plan: Plan, run: Run | None, error: BaseException) -> RunError:
    """Return the error to raise in place of the allocator's.

    Args:
        plan: Plan of the run.
        run: The run; None if it was not built yet.
        error: What the allocator raised.
    """
    where = "while the model was built" if run is None else f"in step {run.step_count + 1}"
    measured = {} if run is None else run.memory.peaks
    changes = [change.spell(None) for change in candidates(plan)][:_NUM_CHANGES]
    tries = f"Try {'; or '.join(changes)}" if changes else "Use more or larger cards"
    return RunError.of(
        code="OUT_OF_MEMORY",
        key="cluster.gpu",
        message=f"memory ran out {where}: {first_line(error)}. {_told('Measured until then', measured)}. {_estimated(plan, run)}",
        fix=f"{tries}. `toolkit estimate` shows what each saves, and `toolkit calibrate` learns from runs where its figures differ",
    )


def _estimated(plan: Plan, run: Run | None) -> str:
    from toolkit.memory.estimate import estimate  # the trace's imports are paid for by a run that needs them

    try:
        report = estimate(plan)
    except Exception as error:  # what cannot be traced must not hide what happened
        return f"There is no estimate of this model: {first_line(error)}"
    own = report.ranks[0 if run is None else run.world.coordinate.pp]
    phases = {name: phase.allocated_bytes for name, phase in own.phases.items()}
    whole = f"{format_bytes(own.required_bytes)} with what the allocator and the libraries take"
    return f"{_told('The estimate of this rank', phases)}; {whole}"


def _told(title: str, phases: Mapping[str, int]) -> str:
    found = ", ".join(f"{name} {format_bytes(size)}" for name, size in phases.items())
    return f"{title}: {found or 'nothing, since no phase had ended, or on CPU, where torch counts none'}"
