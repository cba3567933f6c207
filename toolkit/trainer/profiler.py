"""Profiles of steps: torch.profiler's traces, a snapshot of the card's memory, and where the time of a step goes by category."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import torch

from toolkit.config.job import Profile
from toolkit.engine.run import Run
from toolkit.io import write_json
from toolkit.trainer.checks import PROFILE_SUMMARY

DATA, OPTIMIZER = "toolkit::data", "toolkit::optimizer"
# Events that the memory history keeps: more than a few steps of any model allocate.
MAX_EVENTS = 1_000_000
_NUM_OPERATIONS = 20
_US = 1e-6

T = TypeVar("T")

# The first pattern that an operation's name has decides; attention before the products that it may call.
_PATTERNS: tuple[tuple[str, re.Pattern[str]], ...] = (
    (
        "communication",
        re.compile(r"nccl|gloo:|c10d::|all_?reduce|all_?gather|reduce_scatter|_broadcast|record_param_comms", re.I),
    ),
    ("attention", re.compile(r"attention|flash|fmha|sdpa", re.I)),
    (
        "matrix products",
        re.compile(r"::(addmm|mm|bmm|baddbmm|_scaled_mm|_grouped_mm|mkldnn_linear|linear|matmul)\b|gemm"),
    ),
    ("optimizer", re.compile(r"_fused_adam|multi_tensor_adam|lion_update|adam_update")),
    ("data", re.compile(rf"^{DATA}$")),
    ("element-wise", re.compile(r"^aten::|^triton_|^torch_|^nvtx|Backward")),
)
CATEGORIES = (*(name for name, _ in _PATTERNS), "other")


class Profiler:
    """The profile of a run's steps, as `train.profile` says; without it, nothing is done.

    Args:
        run: The run; every rank writes its traces, rank 0 the summary.
        settings: Which steps; None profiles none.
        folder: Where the files go.
    """

    def __init__(self, run: Run, settings: Profile | None, folder: Path) -> None:
        self._run, self._settings, self._folder = run, settings, folder
        self._profiler: Any = None
        self._on_card = run.world.device.type == "cuda"

    def __enter__(self) -> Self:
        if self._settings is None:
            return self
        from torch.profiler import ProfilerActivity, profile, schedule

        self._folder.mkdir(parents=True, exist_ok=True)
        chosen = self._settings
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_card else [])]
        self._profiler = profile(
            activities=activities,
            schedule=schedule(wait=chosen.wait, warmup=chosen.warmup, active=chosen.active, repeat=chosen.repeat),
            on_trace_ready=self._write,
            profile_memory=self._on_card,
        )
        if self._on_card:
            torch.cuda.memory._record_memory_history(max_entries=MAX_EVENTS)
        self._profiler.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._profiler is None:
            return
        if self._on_card:
            if kind is not None and issubclass(kind, torch.OutOfMemoryError):
                self._snapshot("out-of-memory")
            torch.cuda.memory._record_memory_history(enabled=None)
        self._profiler.on_trace_ready = None  # a part of the steps would pass for all of them
        self._profiler.stop()
        self._profiler = None

    def fetched(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield the batches; what making each takes counts as data."""
        source = iter(batches)
        while True:
            with torch.profiler.record_function(DATA):
                try:
                    batch = next(source)
                except StopIteration:
                    return
            yield batch

    def step(self) -> None:
        """Say that a step is done."""
        if self._profiler is not None:
            self._profiler.step()

    def _write(self, profiler: Any) -> None:
        from torch.profiler import tensorboard_trace_handler

        tensorboard_trace_handler(str(self._folder), worker_name=f"rank-{self._run.world.rank}")(profiler)
        if self._on_card:
            self._snapshot("peak")
        if self._run.world.is_main:
            write_json(self._folder / PROFILE_SUMMARY, summary(profiler.events(), device=self._run.world.device.type))

    def _snapshot(self, name: str) -> None:
        """Write what was allocated when, for https://pytorch.org/memory_viz: the peak of the recorded steps is in it."""
        memory: Any = torch.cuda.memory
        memory._dump_snapshot(str(self._folder / f"memory-{name}-rank-{self._run.world.rank}.pickle"))


def summary(events: Iterable[Any], *, device: str) -> dict[str, Any]:
    """Return where the time of the recorded steps went.

    The time of an operation is its own, without those that it calls: on the processor for `cpu`, else on the card, where
    operations of several streams may overlap.

    Args:
        events: Events of a `torch.profiler.profile`.
        device: Kind of device.

    Returns:
        `device`, `steps`, `step_seconds`, `memory_snapshot`; `categories`: name, seconds of a step, share of their sum;
        `operations`, the longest first: name, category, calls, seconds of a step.
    """
    steps = 0
    wall = 0.0
    totals = dict.fromkeys(CATEGORIES, 0.0)
    operations: dict[tuple[str, str], list[float]] = {}
    for event in events:
        if event.name.startswith("ProfilerStep"):
            if event.device_type.name == "CPU":
                steps, wall = steps + 1, wall + event.time_range.elapsed_us()
            if device == "cpu":
                totals["other"] += event.self_cpu_time_total
            continue
        category = category_of(event)
        own = event.self_cpu_time_total if device == "cpu" or category == "data" else event.self_device_time_total
        if own <= 0 or event.device_type.name != "CPU":
            continue  # a kernel's time is that of the operation which launched it
        totals[category] += own
        entry = operations.setdefault((event.name, category), [0.0, 0.0])
        entry[0], entry[1] = entry[0] + event.count, entry[1] + own
    count, whole = max(steps, 1), sum(totals.values()) or 1.0
    longest = sorted(operations.items(), key=lambda item: -item[1][1])[:_NUM_OPERATIONS]
    return {
        "device": device,
        "steps": steps,
        "step_seconds": wall * _US / count,
        "memory_snapshot": device == "cuda",
        "categories": [
            {"name": name, "seconds": value * _US / count, "share": value / whole} for name, value in totals.items()
        ],
        "operations": [
            {"name": name, "category": category, "calls": calls / count, "seconds": own * _US / count}
            for (name, category), (calls, own) in longest
        ],
    }


def category_of(event: Any) -> str:
    """Return the category of an event: communication before all, then the optimizer's step around it, then its own name."""
    named = next((name for name, pattern in _PATTERNS if pattern.search(event.name)), "other")
    if named in ("communication", "data"):
        return named
    above = event
    while above is not None:
        if above.name == OPTIMIZER or above.name.startswith("Optimizer.step"):
            return "optimizer"
        if named != "attention" and "attention" in above.name:
            named = "attention"  # a product that attention calls
        above = above.cpu_parent
    return named
