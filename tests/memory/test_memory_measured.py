"""The estimate against cards: peak, each phase, and the host, of every measured run."""

import statistics

import pytest
from card_runs import own_step, quick  # noqa: F401  # a fixture
from measured import measured_runs, plan_of

from toolkit.memory.estimate import estimate

RUNS = {run["id"]: run for run in measured_runs()}
# Each architecture, ZeRO stage, dtype, offload, optimizer and number of cards once, adapters, recomputation and accumulation.
QUICK = ("m01", "s01", "s10", "s11", "s13", "s17", "s18", "s24", "s28")
EACH = quick(RUNS, QUICK)


class Reports(dict):
    """Estimates by the run's name, each made when it is first asked for."""

    def __init__(self, folder):
        super().__init__()
        self._folder = folder

    def __missing__(self, name):
        self[name] = estimate(plan_of(RUNS[name], self._folder))
        return self[name]


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    return Reports(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("name", EACH)
def test_the_peak_is_that_of_the_card(reports, name):
    predicted, measured = reports[name].peak_allocated_bytes, RUNS[name]["peak_allocated_bytes"]
    assert predicted == pytest.approx(measured, rel=0.005)


@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize("phase", ["init", "forward", "backward", "step"])
def test_each_phase_is_that_of_the_card(reports, name, phase):
    # The cards' figures are of rank 0.
    predicted, measured = reports[name].ranks[0].phases[phase].allocated_bytes, RUNS[name]["peak_bytes"][phase]
    assert predicted == pytest.approx(measured, rel=0.01)


@pytest.mark.parametrize("name", EACH)
def test_host_memory_is_that_of_the_rank(reports, name):
    predicted = sum(reports[name].host.bytes_per_rank.values())
    assert predicted == pytest.approx(RUNS[name]["host_peak_rss_bytes_per_rank"], rel=0.16)


@pytest.mark.parametrize("name", EACH)
def test_the_card_needs_no_more_than_it_used(reports, name):
    """`device_used` holds what the allocator cached, so it bounds what was needed from above."""
    report = reports[name]
    assert report.peak_allocated_bytes < report.required_bytes <= RUNS[name]["device_used_bytes"]


@pytest.mark.parametrize("names", [QUICK, pytest.param(tuple(RUNS), marks=pytest.mark.full)], ids=["quick", "all"])
def test_half_of_the_peaks_are_within_a_thousandth(reports, names):
    errors = [abs(reports[name].peak_allocated_bytes / RUNS[name]["peak_allocated_bytes"] - 1) for name in names]
    assert statistics.median(errors) < 0.001


@pytest.mark.parametrize("name", EACH)
def test_causes_sum_to_the_peak_of_their_phase(reports, name):
    for rank in reports[name].ranks:
        for phase in rank.phases.values():
            assert sum(phase.causes.values()) == phase.allocated_bytes
            assert min(phase.causes.values(), default=1) > 0
