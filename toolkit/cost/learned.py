"""Figures of a machine's card, learned from what `toolkit calibrate --speed` measured on it, and kept for later times."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from toolkit.catalog.gpus import Gpu
from toolkit.catalog.speed import CardSpeed
from toolkit.errors import SpecError
from toolkit.io import make_folder, parse_json, read_text, write_json
from toolkit.launch.user_cache import user_config_folder

# Below this a kernel's time is that of its start (benchmarks/card_speed.py: 20 µs a product).
LEAST_SECONDS = 60e-6
# Products narrower than this are bound by memory.
LEAST_SIZE = 512
# Sizes that no cache holds, bytes.
LARGE_BYTES = 64 * 2**20
# Share of a parameter's time in the step that the search for overflow takes: 13 of the 16 kernels that the host starts for it.
CHECK_SHARE = 13 / 16
# Share by which memory of a card may differ between drivers.
MEMORY_TOLERANCE = 0.03

_FILE: TypeAdapter[dict[str, CardSpeed]] = TypeAdapter(dict[str, CardSpeed])


def read_measured(path: Path) -> dict[str, Any]:
    """Read the JSON object of `benchmarks/card_speed.py`.

    Raises:
        SpecError: SPEED_UNREADABLE.
    """
    try:
        measured = parse_json(read_text(path))
        if not isinstance(measured, dict) or "card" not in measured["about"] or not isinstance(measured["parts"], dict):
            raise ValueError("it names no card")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _unreadable(path, error) from None
    return measured


def card_of(measured: Mapping[str, Any], catalogue: Iterable[Gpu]) -> str | None:
    """Return the name in the catalogue of the card that was measured: of the same kind, and with as much memory."""
    about = measured["about"]
    words, memory = about["card"].lower().replace("-", " ").split(), about.get("memory_bytes", 0)
    for gpu in catalogue:
        own = gpu.memory_bytes or 0
        if gpu.name.split("-")[0] in words and abs(own - memory) <= MEMORY_TOLERANCE * own:
            return gpu.name
    return None


def learn_speed(measured: Mapping[str, Any], base: CardSpeed) -> CardSpeed:
    """Return figures with those that were measured in place of a card's own; the others stay.

    Args:
        measured: As `read_measured` returns it.
        base: Figures of the card in the catalogue, or by analogy.
    """
    parts = measured["parts"]
    found: dict[str, Any] = {
        "product_flops_per_second": _products(_rows(parts, "products"), base.product_half_size),
        "fp8_flops_per_second": _median(
            row["tflops"] * 1e12 for row in _rows(parts, "fp8_products") if row.get("recipe") == "tensor"
        ),
        "bytes_per_second": _rate(parts, ("copy", "add", "mul")),
        "broadcast_elements_per_second": _rate(parts, ("mul_row",), elements_of=4),
        "upcast_elements_per_second": _rate(parts, ("to_float",), elements_of=6),
        "softmax_elements_per_second": _rate(parts, ("softmax",), elements_of=4),
        "strided_elements_per_second": _pattern(parts, "mul heads", "copy heads", "mul halves", "silu half"),
        "join_elements_per_second": _pattern(parts, "rotate heads"),
        "scatter_elements_per_second": _pattern(parts, "sum rows"),
        **_step_of_host(parts),
        "adam_bytes_per_second": _inside(parts, "optimizers", "deepspeed", "bytes_per_second"),
        "pcie_bytes_per_second": _inside(parts, "pcie", "to_card"),
        "pcie_both_bytes_per_second": _inside(parts, "pcie", "both_each"),
        "host_adam_bytes_per_second": _inside(parts, "host_adam", "deepspeed", "bytes_per_second"),
        "host_copy_bytes_per_second": _inside(parts, "host_adam", "copy", "bytes_per_second"),
    }
    changed = {name: value for name, value in found.items() if value is not None}
    source = f"toolkit calibrate --speed on this machine, {measured['about']['card']}"
    sources = {name: source if name in changed else said for name, said in base.sources.items()}
    sources |= dict.fromkeys(changed, source)
    return base.model_copy(update={**changed, "sources": sources})


def speed_path() -> Path:
    """Return the path of the speed of this machine's cards."""
    return user_config_folder() / "speed.json"


def learned_speed(gpu: Gpu) -> CardSpeed | None:
    """Return the figures of a card that were measured on this machine; None if there are none.

    Raises:
        SpecError: SPEED_UNREADABLE.
    """
    path = speed_path()
    try:
        written = path.stat().st_mtime_ns
    except OSError:
        return None
    return None if gpu.described else _load(path, written).get(gpu.name)


@functools.lru_cache(maxsize=2)
def _load(path: Path, written: int) -> dict[str, CardSpeed]:
    return load_speeds(path)


def load_speeds(path: Path) -> dict[str, CardSpeed]:
    """Read what `save_speeds` wrote, by card; return nothing if there is no such file.

    Raises:
        SpecError: SPEED_UNREADABLE.
    """
    if not path.exists():
        return {}
    try:
        return _FILE.validate_json(read_text(path))
    except (OSError, ValueError, ValidationError) as error:
        raise _unreadable(path, error) from None


def save_speeds(path: Path, speeds: Mapping[str, CardSpeed]) -> None:
    """Write figures atomically."""
    make_folder(path.parent)
    write_json(path, {card: speed.model_dump(mode="json") for card, speed in sorted(speeds.items())})


def _rows(parts: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    rows = parts.get(name, {}).get("rows", [])
    return [row for row in rows if isinstance(row, dict)]


def _median(values: Iterable[float]) -> float | None:
    known = list(values)
    return statistics.median(known) if known else None


def _products(rows: Iterable[Mapping[str, Any]], half: float) -> float | None:
    """Return the limit of products whose inner size is large, from those that take long enough."""
    limits = []
    for row in rows:
        sizes = {"forward": row["inputs"], "inputs": row["outputs"], "weights": row["tokens"]}
        inner = sizes[row["way"]]
        if row["seconds"] > LEAST_SECONDS and min(sizes.values()) >= LEAST_SIZE:
            limits.append(row["tflops"] * 1e12 * (inner + half) / inner)
    return _median(limits)


def _rate(parts: Mapping[str, Any], kernels: tuple[str, ...], *, elements_of: int | None = None) -> float | None:
    """Return the bytes a second of large kernels, or their elements a second where one moves `elements_of` bytes."""
    rates = (
        row["bytes_per_second"]
        for row in _rows(parts, "elementwise")
        if row["kernel"] in kernels and row["size"] >= LARGE_BYTES
    )
    rate = _median(rates)
    return rate if rate is None or elements_of is None else rate / elements_of


def _pattern(parts: Mapping[str, Any], *kernels: str) -> float | None:
    """Return the elements a second of kernels by access, on the largest size that was measured."""
    rows = [row for row in _rows(parts, "patterns") if row["kernel"] in kernels]
    largest = max((row["elements"] for row in rows), default=0)
    return _median(row["elements_per_second"] for row in rows if row["elements"] == largest)


def _step_of_host(parts: Mapping[str, Any]) -> dict[str, float]:
    """Return the host's times for a parameter in a step of ZeRO-2, from a shallow and a deep model."""
    shallow, deep = (parts.get("zero", {}).get(f"zero2 {layers}") for layers in (4, 12))
    if not isinstance(shallow, dict) or not isinstance(deep, dict) or "seconds" not in shallow or "seconds" not in deep:
        return {}
    added = deep["parameters"] - shallow["parameters"]
    each = (deep["seconds"]["step"] - shallow["seconds"]["step"]) / added
    if each <= 0:
        return {}
    return {"host_check_seconds": CHECK_SHARE * each, "host_norm_seconds": (1 - CHECK_SHARE) * each}


def _inside(parts: Mapping[str, Any], *keys: str) -> float | None:
    value: Any = parts
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return float(value) if isinstance(value, int | float) else None


def _unreadable(path: Path, error: Exception) -> SpecError:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return SpecError.of(
        code="SPEED_UNREADABLE",
        key=str(path),
        message=f"{path} has no measured speed: {reason:.120}",
        fix="Measure again with `toolkit calibrate --speed`, or name the file that benchmarks/card_speed.py wrote on the card",
    )
