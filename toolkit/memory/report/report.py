"""The report of an estimate: by rank, phase and cause; of the card, the host and the disk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.memory.report.host import HostReport
from toolkit.memory.report.overhead import Allocator
from toolkit.planning.checkpoint_size import DiskUse
from toolkit.topology.grid import Coordinate

if TYPE_CHECKING:
    import pandas

# Share of a card: if less is left, another driver, uneven experts or a desktop session may use it up.
TIGHT_SHARE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseReport:
    """The peak of one phase, bytes; the causes sum to it."""

    allocated_bytes: int
    causes: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """The memory of one rank.

    Args:
        rank: Global rank.
        coordinate: Its coordinate in the grid.
        phases: Peaks of `init`, `forward`, `backward`, `step`, `evaluation` if the job has one, and `save`.
        allocator_slack_bytes: Bytes that the allocator cannot reuse.
        context_and_nccl_bytes: CUDA context, kernels and communicators.
        num_communicators: NCCL communicators among them.
    """

    rank: int
    coordinate: Coordinate
    phases: dict[str, PhaseReport]
    allocator_slack_bytes: int = 0
    context_and_nccl_bytes: int = 0
    num_communicators: int = 0

    @property
    def peak_allocated_bytes(self) -> int:
        """Bytes that `torch.cuda.max_memory_allocated()` will return."""
        return max(phase.allocated_bytes for phase in self.phases.values())

    @property
    def required_bytes(self) -> int:
        """Bytes that its card must have."""
        return self.peak_allocated_bytes + self.allocator_slack_bytes + self.context_and_nccl_bytes

    @property
    def limiting_phase(self) -> str:
        """The phase with the highest peak; the first of several."""
        return max(self.phases, key=lambda phase: self.phases[phase].allocated_bytes)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class CardReport:
    """An estimate of the memory of cards.

    `print(report)` and its representation are a page; in a notebook it shows a table with bars.

    Args:
        ranks: One entry per rank.
        allocator: Setting of torch's allocator.
        allocator_slack_bytes: Bytes that the allocator of the fullest rank cannot reuse.
        context_and_nccl_bytes: CUDA context, kernels and communicators of the fullest rank.
        gpu_capacity_bytes: Memory of the card; None for CPU processes.
        assumptions: Assumptions of the estimate, one sentence each.
        num_communicators: NCCL communicators of the fullest rank.
    """

    ranks: tuple[RankReport, ...]
    allocator: Allocator
    allocator_slack_bytes: int
    context_and_nccl_bytes: int
    gpu_capacity_bytes: int | None
    assumptions: tuple[str, ...]
    num_communicators: int = 0

    @property
    def fullest(self) -> RankReport:
        """The rank that needs most of its card; the first of several."""
        return max(self.ranks, key=lambda rank: rank.required_bytes)

    @property
    def peak_allocated_bytes(self) -> int:
        """Peak of the fullest rank."""
        return self.fullest.peak_allocated_bytes

    @property
    def limiting_phase(self) -> str:
        """Phase of the peak of the fullest rank."""
        return self.fullest.limiting_phase

    @property
    def required_bytes(self) -> int:
        """Bytes that a card must have."""
        return self.peak_allocated_bytes + self.allocator_slack_bytes + self.context_and_nccl_bytes

    @property
    def fits_gpu(self) -> bool:
        """True if the card has enough memory."""
        return self.gpu_capacity_bytes is None or self.required_bytes <= self.gpu_capacity_bytes

    @property
    def fits(self) -> bool:
        """True if all that was estimated has enough memory."""
        return self.fits_gpu

    @property
    def tight(self) -> bool:
        """True if it fits, with less than 5 % of the card left."""
        capacity = self.gpu_capacity_bytes
        return capacity is not None and self.fits and capacity - self.required_bytes < TIGHT_SHARE * capacity

    def plot(self, path: str | Path) -> None:
        """Draw phases and causes of the fullest rank as stacked bars, with the card's capacity.

        Raises:
            SpecError: PLOT_FORMAT when the suffix is not one of .png, .svg and .html.
        """
        from toolkit.memory.report.figures import plot_report  # matplotlib takes a second to import

        plot_report(self, Path(path))

    def to_dataframe(self) -> pandas.DataFrame:
        """Return one row for each rank, phase and cause, with the bytes that it holds at the phase's peak.

        Columns: rank, pp, dp, tp, phase, cause, bytes.
        """
        import pandas

        return pandas.DataFrame(
            [
                {"rank": rank.rank, **rank.coordinate.as_dict(), "phase": phase, "cause": cause, "bytes": size}
                for rank in self.ranks
                for phase, peak in rank.phases.items()
                for cause, size in peak.causes.items()
            ]
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the estimate as a JSON object, in the words of `toolkit estimate --json`."""
        return {
            "fits": self.fits,
            "fits_gpu": self.fits_gpu,
            "tight": self.tight,
            "peak_allocated_bytes": self.peak_allocated_bytes,
            "allocator": self.allocator,
            "allocator_slack_bytes": self.allocator_slack_bytes,
            "context_and_nccl_bytes": self.context_and_nccl_bytes,
            "required_bytes": self.required_bytes,
            "gpu_capacity_bytes": self.gpu_capacity_bytes,
            "limiting_phase": self.limiting_phase,
            "limiting_rank": self.fullest.rank,
            "assumptions": list(self.assumptions),
            "ranks": [
                {
                    "rank": rank.rank,
                    "coordinate": rank.coordinate.as_dict(),
                    "required_bytes": rank.required_bytes,
                    "phases": {
                        name: {"allocated_bytes": phase.allocated_bytes, "causes": dict(phase.causes)}
                        for name, phase in rank.phases.items()
                    },
                }
                for rank in self.ranks
            ],
        }

    def __repr__(self) -> str:
        from toolkit.memory.report.page import text_page

        return text_page(self)

    def _repr_html_(self) -> str:
        from toolkit.memory.report.page import html_page

        return html_page(self)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class MemoryReport(CardReport):
    """An estimate of a job: cards, host and disk.

    Args:
        host: Host memory of the fullest node.
        disk: Disk space of the run.
        num_traced_layers: Layers that were run on fake tensors.
        num_layers: Layers of the model that they represent.
        worst_routing_peak_bytes: Peak of the fullest rank if all tokens choose the same experts; None without experts.
        condition: What must hold for the job to fit; empty if it fits in any case, or does not.
        guess: Why it cannot be said that the job fits; empty if it can.
    """

    host: HostReport
    disk: DiskUse
    num_traced_layers: int
    num_layers: int
    worst_routing_peak_bytes: int | None = None
    condition: str = ""
    guess: str = ""

    @property
    def checkpoint_bytes(self) -> int:
        """Disk space of one checkpoint, all ranks."""
        return self.disk.checkpoint_bytes

    @property
    def fits(self) -> bool:
        """True if the card and the host have enough memory, and this is no guess."""
        return self.fits_gpu and self.host.fits and not self.guess

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object of `toolkit estimate --json`."""
        known = CardReport.to_dict(self)  # super() fails in a class with slots, which is made twice
        last = {key: known.pop(key) for key in ("assumptions", "ranks")}
        return {
            **known,
            "fits_host": self.host.fits,
            "condition": self.condition,
            "guess": self.guess,
            "host_bytes_per_node": self.host.bytes_per_node,
            "host_bytes_per_rank": dict(self.host.bytes_per_rank),
            "host_capacity_bytes": self.host.capacity_bytes,
            "checkpoint_bytes": self.checkpoint_bytes,
            "disk": self.disk.to_dict(),
            "worst_routing_peak_bytes": self.worst_routing_peak_bytes,
            "num_traced_layers": self.num_traced_layers,
            "num_layers": self.num_layers,
            **last,
        }
