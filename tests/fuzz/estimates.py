"""What every estimate must keep, whatever was asked."""

from __future__ import annotations

from fuzzing import assert_finite

from toolkit.memory.report import MemoryReport


def assert_report_adds_up(report: MemoryReport) -> None:
    """Figures are whole, finite and at least 0; causes sum to their phase, parts to what is required."""
    figures = report.to_dict()
    assert_finite({key: value for key, value in figures.items() if key not in ("assumptions", "savings")})
    for rank in report.ranks:
        for name, phase in rank.phases.items():
            assert sum(phase.causes.values()) == phase.allocated_bytes, (rank.rank, name)
            assert all(amount >= 0 for amount in phase.causes.values()), (rank.rank, name, phase.causes)
        around = rank.allocator_slack_bytes + rank.context_and_nccl_bytes
        assert rank.required_bytes == max(phase.allocated_bytes for phase in rank.phases.values()) + around
    assert report.required_bytes == max(rank.required_bytes for rank in report.ranks)
    capacity = report.gpu_capacity_bytes
    assert capacity is None or report.fits_gpu == (report.required_bytes <= capacity)
    assert figures["fits"] == (report.fits_gpu and report.host.fits)
