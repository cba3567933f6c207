"""Runs that `benchmarks/measure.py` measured on cards, and their estimates."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from toolkit.memory.engines.settings import EngineSettings, engine_settings
from toolkit.memory.report.report import MemoryReport
from toolkit.memory.scenario import Scenario
from toolkit.memory.search.estimator import Estimator

ROOT = Path(__file__).parents[2]
CARDS = ROOT / "tests" / "data" / "cards"
sys.path.append(str(ROOT / "benchmarks"))


def host_runs() -> dict[str, dict[str, Any]]:
    """Return the runs whose processes were followed on the host, by name."""
    lines = (CARDS / "host_runs.jsonl").read_text(encoding="utf-8").splitlines()
    return {run["id"]: run for run in map(json.loads, lines)}


def quick(names: Iterable[str], chosen: Collection[str]) -> list[Any]:
    """Return names for `parametrize`; those that are not among the chosen are `full`."""
    return [pytest.param(name, marks=() if name in chosen else pytest.mark.full) for name in names]


class Reports(dict[str, MemoryReport]):
    """Estimates by the run's name, each made when it is first asked for; runs that a trace serves share it."""

    def __init__(self, case_of: Callable[[str], Scenario]) -> None:
        super().__init__()
        self._case_of, self._estimator = case_of, Estimator()

    def __missing__(self, name: str) -> MemoryReport:
        self[name] = self._estimator.estimate(self._case_of(name))
        return self[name]


@contextmanager
def deepspeeds_own_step(*, frees_graph: bool = False) -> Iterator[None]:
    """Estimate ZeRO's step as DeepSpeed alone takes it, as it was in runs that do not name the toolkit's version.

    Args:
        frees_graph: Whether the toolkit's loop ran it, not a script that keeps the loss.
    """

    def settings_of(*arguments: Any, **options: Any) -> EngineSettings:
        return replace(engine_settings(*arguments, **options), short_step=False, frees_graph=frees_graph)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("toolkit.memory.estimate.engine_settings", settings_of)
        yield


@pytest.fixture(autouse=True, scope="module")
def own_step() -> Iterator[None]:
    """`deepspeeds_own_step` around the tests of a module that imports this."""
    with deepspeeds_own_step():
        yield
