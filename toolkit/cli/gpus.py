"""`toolkit gpus`: the catalogue of cards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolkit.cli.options import JsonOption
from toolkit.cli.output import new_table, print_fields, print_json, print_table

if TYPE_CHECKING:
    from toolkit.catalog.gpus import Gpu


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(gpus)


def gpus(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Show one card with its sources.")] = None,
    as_json: JsonOption = False,
) -> None:
    """List the GPUs that `cluster.gpu` may name; with a name, each figure and its source.

    A card that is not among them is described in the job: `cluster: {gpu: {name: l20, memory_gib: 44.5}}`.

    Example: `toolkit gpus`, `toolkit gpus h100-sxm-80gb`.

    JSON keys: gpus: a list of objects with name, vendor, architecture, compute_capability, note, precisions, host,
    sources, and the figures that `sources` names, each with its unit in its name.
    """
    from toolkit.catalog.gpus import find_in, load_catalogue

    catalogue = load_catalogue()
    shown = list(catalogue.values()) if name is None else [find_in(catalogue, name)]
    if as_json:
        print_json({"gpus": [gpu.model_dump(mode="json") for gpu in shown]})
    elif name is None:
        _print_all(shown)
    else:
        _print_one(shown[0])


def _print_all(cards: list[Gpu]) -> None:
    from toolkit.units import GIB

    numbers = ("memory GiB", "memory GB/s", "bf16 TFLOP/s", "fp16 TFLOP/s", "link GB/s")
    table = new_table(("name", "architecture", *numbers, "link", "host RAM GiB"), right=(*numbers, "host RAM GiB"))
    for gpu in cards:
        table.add_row(
            gpu.name,
            gpu.architecture,
            _scaled(gpu.memory_bytes, GIB, 2),
            _scaled(gpu.memory_bandwidth_bytes_per_second, 1e9),
            _scaled(gpu.dense_bf16_flops_per_second, 1e12),
            _scaled(gpu.dense_fp16_flops_per_second, 1e12),
            _scaled(gpu.link_bandwidth_bytes_per_second, 1e9),
            gpu.link_kind or "–",
            str(gpu.host.host_memory_gib) if gpu.host else "–",
        )
    print_table(table)


def _print_one(gpu: Gpu) -> None:
    facts = [("vendor", gpu.vendor), ("architecture", gpu.architecture), ("precisions", ", ".join(gpu.precisions))]
    facts += [("compute capability", gpu.compute_capability)] if gpu.compute_capability else []
    facts += [("link", gpu.link_kind)] if gpu.link_kind else []
    facts += [("note", gpu.note)] if gpu.note else []
    print(gpu.name)
    print_fields(facts)
    figures = [field for field in gpu.figures() if field in gpu.sources]
    if not figures:
        return
    table = new_table(("figure", "value", "source"), right=("value",))
    for field in figures:
        table.add_row(*_figure(field, getattr(gpu, field)), gpu.sources[field])
    print_table(table)


def _figure(field: str, value: Any) -> tuple[str, str]:
    """Return name and value for display, with the unit that the field's name ends in."""
    from toolkit.units import format_bytes

    if field == "host":
        return "typical host", f"{value.gpus_per_node} GPUs, {value.host_memory_gib} GiB, {value.cpu_cores} cores"
    for ending, unit, size in (("_bytes_per_second", "GB/s", 1e9), ("_flops_per_second", "TFLOP/s", 1e12)):
        if field.endswith(ending):
            return field.removesuffix(ending).replace("_", " "), f"{value / size:g} {unit}"
    if field.endswith("_bytes"):
        return field.removesuffix("_bytes").replace("_", " "), format_bytes(value)
    return field.replace("_", " "), f"{value:g}"


def _scaled(value: float | None, size: float, digits: int = 0) -> str:
    return "–" if value is None else f"{value / size:.{digits}f}"
