"""How tests are dealt out to processes, and traces that they share."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

# Each process of the tests would compile the whole package, and pytest rewrite every assertion, which takes a third of the
# collection: kept in __pycache__, whatever a shell or an image says.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Files that take more than 9 s, the longest first.
LONGEST = (
    *("cli/test_train", "cli/test_estimate", "memory/trace/test_run", "reshape/test_fill"),
    *("examples/test_examples", "trainer/test_loop", "engine/test_pipeline_engine", "exporter/test_export"),
    *(
        "tensor_parallel/test_tables",
        "distributed/diagnose/test_check",
        "engine/test_methods",
        "engine/test_torch_engine",
    ),
    *(
        "memory/test_memory_tensor",
        "cli/test_app",
        "cli/test_quickstart",
        "trainer/test_three_ways",
        "engine/test_pipeline",
    ),
    *("memory/test_memory_cards", "memory/test_memory_pipeline", "memory/search/test_advice", "planner/test_search"),
    *("exporter/test_export_tensor_parallel", "cli/test_export", "trainer/test_fp8_run", "engine/test_engine_fp8"),
    *("engine/test_tensor_parallel_engine", "tensor_parallel/test_apply", "modeling/test_local_shard"),
    *(
        "checkpoint/test_load",
        "checkpoint/test_save_load_tensor",
        "memory/search/test_tracing",
        "distributed/test_heartbeat",
    ),
    *(
        "exporter/test_export_pipeline",
        "memory/kernels/test_compiled",
        "planner/test_answer",
        "modeling/test_lean_imports",
        "cli/test_elastic",
    ),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the files that take longest first."""
    root = Path(__file__).parent
    places = {root / f"{name}.py": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Deals out whole files, whose tests share fixtures, the longest first: so the processes end together.

    Not by `--dist loadfile`, which pytest-xdist 3.8 forgets under pytest 9.2 (its issue 1386).
    """
    from xdist.scheduler import LoadFileScheduling

    config.option.loadscopereorder = False  # in the order of `pytest_collection_modifyitems`
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


@pytest.fixture(scope="module", autouse=True)
def libraries_as_before() -> Iterator[None]:
    """Ends each file with the functions and settings of torch that it began with, and in no world that it joined.

    ZeRO-3 and traces replace some of them; an engine that a test makes by itself puts nothing back.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    functional, dist = torch.nn.functional, torch.distributed
    names = [(functional, name) for name in ("linear", "scaled_dot_product_attention", "dropout", "grouped_mm")]
    names += [(torch, name) for name in ("tensor", "empty", "zeros", "ones", "full", "arange", "eye", "randn")]
    before = [(place, name, getattr(place, name)) for place, name in names if hasattr(place, name)]
    dtype, precision, joined = torch.get_default_dtype(), torch.get_float32_matmul_precision(), dist.is_initialized()
    yield
    for place, name, value in before:
        if getattr(place, name) is not value:
            setattr(place, name, value)
    torch.set_default_dtype(dtype)
    torch.set_float32_matmul_precision(precision)
    if dist.is_initialized() and not joined:
        dist.destroy_process_group()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Lets nothing walk the growing heap while tests are imported and listed, a quarter of what that takes: little of it is garbage."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Keeps the garbage collector from walking all that was imported, again and again: a twentieth of what estimates take."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


@pytest.fixture(scope="session")
def fake_runs() -> dict[str, Any]:
    """Runs on fake tensors, by all that they depend on."""
    return {}


@pytest.fixture(scope="session")
def sharing_fake_runs(fake_runs: dict[str, Any]) -> Callable[[], AbstractContextManager[None]]:
    """A context in which fake runs are shared; fixtures of a longer life than a test's enter it themselves."""

    @contextmanager
    def sharing() -> Iterator[None]:
        from toolkit.memory.trace import fake_run, run

        make = fake_run.run_fake

        def shared(spec: Any, config: Any, *, part: Any = None, all_layers: bool) -> Any:
            key = f"{spec} {type(config)} {config.to_dict()} {vars(config)} {part} {all_layers}"
            if key not in fake_runs:
                fake_runs[key] = make(spec, config, part=part, all_layers=all_layers)
            return fake_runs[key]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fake_run, "run_fake", shared)
            patch.setattr(run, "run_fake", shared)
            yield

    return sharing


@pytest.fixture
def compiled_anew() -> None:
    """Lets layers be compiled for each trace of a test."""


@pytest.fixture(autouse=True)
def shared_fake_runs(
    request: pytest.FixtureRequest, sharing_fake_runs: Callable[[], AbstractContextManager[None]]
) -> Iterator[None]:
    """Runs a model on fake tensors once a session, whichever tests ask for it, unless a test changes what would run.

    Those of `compiled_anew` look at the folder where the code of compiled layers is kept.
    """
    if {"monkeypatch", "compiled_anew"} & set(request.fixturenames) or "toolkit.memory.trace.run" not in sys.modules:
        yield
        return
    with sharing_fake_runs():
        yield


@pytest.fixture(scope="session")
def traces() -> dict[str, Any]:
    """Traces of models, by all that they depend on."""
    return {}


@pytest.fixture
def kept_traces(traces: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets estimators share their traces: each command has one of its own, and most tests ask about one model."""
    from toolkit.memory.search.tracing import shared_key
    from toolkit.memory.trace import run

    make = run.trace_ranks

    def kept(plan: Any, *, tracer: Any = None, processes: int = 1, **options: Any) -> Any:
        stages = (plan.settings.partition, plan.settings.pipeline_schedule, plan.settings.batch.accumulation)
        key = f"{shared_key(plan)} {stages if plan.grid.pp > 1 else ''} {sorted(options.items())}"
        if key not in traces:
            traces[key] = make(plan, tracer=tracer, **options)
        return traces[key]

    monkeypatch.setattr(run, "trace_ranks", kept)


@pytest.fixture
def pythons_recursion_limit():
    """Python's own limit, which packages that compile raise for the process."""
    raised = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)
    yield
    sys.setrecursionlimit(raised)
