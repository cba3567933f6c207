"""Its presence puts this folder on the import path, so that tests can `from distributed import run_distributed`."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

import pytest

# Their tests run commands that take two cores and find a port by themselves: one at a time.
COMMANDS = {"cli", "examples"}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Deals out whole files, since their tests share fixtures, and those that run commands to one worker.

    Not by `--dist loadgroup`, which pytest-xdist 3.8 forgets under pytest 9.2 (its issue 1386).
    """
    from xdist.scheduler import LoadScopeScheduling

    class FilesAndCommands(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = PurePosixPath(nodeid.split("::", 1)[0])
            return "commands" if path.parent.name in COMMANDS else str(path)

    # In the order of their names: in that of the number of their tests, the commands, which take longest, would come late.
    config.option.loadscopereorder = False
    return FilesAndCommands(config, log)


@pytest.fixture(scope="session")
def traces() -> dict[str, Any]:
    """Traces of models, by all that they depend on."""
    return {}


@pytest.fixture
def kept_traces(traces: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets estimators share their traces: each command has one of its own, and most tests ask about one model."""
    from toolkit.memory.search import estimator

    make = estimator.trace_ranks

    def kept(plan: Any, *, tracer: Any = None, **options: Any) -> Any:
        stages = (plan.settings.partition, plan.settings.pipeline_schedule, plan.settings.batch.accumulation)
        key = f"{estimator.trace_key(plan)} {stages if plan.grid.pp > 1 else ''} {sorted(options.items())}"
        if key not in traces:
            traces[key] = make(plan, tracer=tracer, **options)
        return traces[key]

    monkeypatch.setattr(estimator, "trace_ranks", kept)
