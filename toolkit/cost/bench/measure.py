"""Measures, on one card in under three minutes, the rates of which the time of a training step is made."""

from __future__ import annotations

import contextlib
import gc
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from toolkit.cost.bench import arithmetic, collectives, host, memory, optimizers, patterns
from toolkit.cost.bench.timing import Bench, OutOfTimeError, noted
from toolkit.errors import SpecError

# Seconds for all parts.
BUDGET = 175.0

# The seconds that each part may take, in the order in which they run: what matters most comes first.
PARTS: dict[str, tuple[float, Callable[[Bench, dict[str, Any]], None]]] = {
    "products": (26, arithmetic.products),
    "attention": (25, arithmetic.attention),
    "masked_attention": (8, arithmetic.masked_attention),
    "elementwise": (14, memory.elementwise),
    "patterns": (10, patterns.patterns),
    "host": (22, host.host),
    "zero": (44, host.zero),
    "optimizers": (16, optimizers.optimizers),
    "losses": (16, memory.losses),
    "fp8_products": (10, arithmetic.fp8_products),
    "pcie": (8, optimizers.pcie),
    "host_adam": (24, optimizers.host_adam),
    "grouped_products": (8, arithmetic.grouped_products),
    "fp32_products": (4, patterns.products_of_fp32),
    "fused": (34, memory.fused),
    "nccl": (40, collectives.nccl),
}


def describe(bench: Bench) -> dict[str, Any]:
    """Return what was measured on: card, driver's clocks as far as they can be asked, host, versions."""
    about: dict[str, Any] = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": platform.processor(),
    }
    with noted(about, "cpu"), Path("/proc/cpuinfo").open(encoding="utf-8") as lines:
        about["cpu"] = next(
            (line.split(":")[1].strip() for line in lines if line.startswith("model name")), about["cpu"]
        )
    about["cpus"] = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    for package in ("deepspeed", "transformers", "liger_kernel", "triton"):
        with noted(about, package):
            about[package] = version(package.replace("_", "-"))
    if bench.cuda:
        properties = torch.cuda.get_device_properties(bench.device)
        about |= {
            "card": properties.name,
            "memory_bytes": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
            "capability": ".".join(map(str, torch.cuda.get_device_capability(bench.device))),
            "cuda": torch.version.cuda,
        }
    return about


def measure(
    bench: Bench, names: Sequence[str], *, budget: float, keep: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Run the parts one after the other; `keep` is given the result after each."""
    start = time.perf_counter()
    result: dict[str, Any] = {"about": describe(bench), "parts": {}}
    for name in names:
        seconds, function = PARTS[name]
        into: dict[str, Any] = {}
        began = time.perf_counter()
        bench.deadline = min(began + seconds, start + budget)
        try:
            function(bench, into)
        except OutOfTimeError:
            into["out_of_time"] = True
        except Exception as error:
            into["error"] = f"{type(error).__name__}: {error}"[:400]
            into["traceback"] = traceback.format_exc()[-1500:]
        into["took_seconds"] = round(time.perf_counter() - began, 2)
        print(
            f"{name}: {into['took_seconds']} s{' (out of time)' if 'out_of_time' in into else ''}",
            file=sys.stderr,
            flush=True,
        )
        result["parts"][name] = into
        keep(result)
        gc.collect()
        if bench.cuda:
            with contextlib.suppress(Exception):
                torch.cuda.empty_cache()
    result["took_seconds"] = round(time.perf_counter() - start, 1)
    return result


def measure_here() -> dict[str, Any]:
    """Measure the first card that this process sees.

    Raises:
        SpecError: SPEED_NO_CARD.
    """
    if not torch.cuda.is_available():
        raise SpecError.of(
            code="SPEED_NO_CARD",
            key="--speed",
            message="torch sees no card on this machine, whose speed could be measured",
            fix="Run it on the machine with the card, or name the file that benchmarks/card_speed.py wrote there",
        )
    torch.cuda.set_device(0)
    return measure(Bench(torch.device("cuda", 0), quick=False), list(PARTS), budget=BUDGET, keep=lambda result: None)
