"""How tests are dealt out to processes, and traces that they share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Deals out whole files, whose tests share fixtures.

    Not by `--dist loadfile`, which pytest-xdist 3.8 forgets under pytest 9.2 (its issue 1386).
    """
    from xdist.scheduler import LoadFileScheduling

    config.option.loadscopereorder = False  # in the order of their names: files of few tests may take long
    return LoadFileScheduling(config, log)


@pytest.fixture(scope="module", autouse=True)
def no_launcher() -> Iterator[None]:
    """Begins and ends each file without a launcher's variables: a world joined in this process leaves its rank there."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    for name in names:
        os.environ.pop(name, None)
    yield
    for name in names:
        os.environ.pop(name, None)


@pytest.fixture(scope="session", autouse=True)
def no_cache() -> Iterator[None]:
    """Keeps estimates of tests out of the user's cache, and what is there out of the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOOLKIT_NO_CACHE", "1")
        yield


@pytest.fixture(scope="session")
def traces() -> dict[str, Any]:
    """Traces of models, by all that they depend on."""
    return {}


@pytest.fixture
def kept_traces(traces: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets estimators share their traces: each command has one of its own, and most tests ask about one model."""
    from toolkit.memory.search import estimator
    from toolkit.memory.trace import run

    make = run.trace_ranks

    def kept(plan: Any, *, tracer: Any = None, **options: Any) -> Any:
        stages = (plan.settings.partition, plan.settings.pipeline_schedule, plan.settings.batch.accumulation)
        key = f"{estimator.trace_key(plan)} {stages if plan.grid.pp > 1 else ''} {sorted(options.items())}"
        if key not in traces:
            traces[key] = make(plan, tracer=tracer, **options)
        return traces[key]

    monkeypatch.setattr(run, "trace_ranks", kept)
