"""What an estimate rests on of the software that trains: versions and packages that change which code runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from toolkit.launch.software import CONTRACTS_CHUNKS, MULTIPLIES_CHUNKS, Software
from toolkit.memory.trace.events import Traces
from toolkit.planning.plan import Plan
from toolkit.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftwareReport:
    """What a verdict depends on.

    Args:
        notes: What other software would need, one sentence each.
        condition: What must hold for the job to fit; empty if nothing.
        guess: Why it cannot be said that the job fits; empty if it can.
    """

    notes: tuple[str, ...] = ()
    condition: str = ""
    guess: str = ""


def of_software(
    plan: Plan, traces: Traces, *, room_bytes: int | None, peak_with: Callable[[Software], int]
) -> SoftwareReport:
    """Return what the estimate of a plan depends on.

    The code of transformers is measured on cards; the kernels in its place are priced from their source, and take no more.

    Args:
        plan: Plan of the run.
        traces: Its traces.
        room_bytes: Largest peak that the card can hold; None if it is not known.
        peak_with: Returns the peak with other software, which takes a trace.
    """
    software, notes, condition, guess = Software.of(plan), [], "", ""
    unpriced = sorted({name for each in traces for name in each.unpriced_kernels})
    if unpriced:
        why = f"{' and '.join(unpriced)} cannot be priced, and the figures are those of transformers' own code instead"
        return SoftwareReport(guess=why)
    assumed = sorted({name for each in traces for name in each.assumed_kernels})
    if assumed:
        names = " and ".join(assumed)
        slow = peak_with(replace(software, kernel_packages=tuple(sorted({*software.kernel_packages} - {*assumed}))))
        notes.append(f"without {names} transformers' own code would run, and the peak would be {format_bytes(slow)}")
        if room_bytes is not None and slow > room_bytes:
            guess = f"it rests on the kernels of {names}, priced from their source and not measured; without them it does not fit"
    if any(each.contracts for each in traces) and plan.job.cluster.transformers is None:
        before = peak_with(replace(software, transformers=MULTIPLIES_CHUNKS))
        notes.append(
            f"with transformers before {CONTRACTS_CHUNKS}, whose own code expands each chunk of a Mamba-2 layer, the peak "
            f"would be {format_bytes(before)}; cluster.transformers says which version the cluster has"
        )
        if room_bytes is not None and before > room_bytes:
            condition = (
                f"with transformers {software.transformers}, as here; before {CONTRACTS_CHUNKS} it would not fit"
            )
    return SoftwareReport(notes=tuple(notes), condition=condition, guess=guess)
