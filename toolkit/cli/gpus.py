"""`toolkit gpus`: the catalogue of cards."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolkit.cli.options import JsonOption
from toolkit.cli.output import new_table, print_fields, print_json, print_table
from toolkit.errors import SpecError

if TYPE_CHECKING:
    from toolkit.catalog.gpus import Gpu
    from toolkit.catalog.prices import PricedOffer


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(gpus)


def gpus(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Show one card with its sources.")] = None,
    prices: Annotated[
        bool,
        typer.Option(
            "--prices",
            help="List what the cards cost an hour, and where; then [NAME] may be a list as for --prices-from.",
        ),
    ] = False,
    prices_from: Annotated[
        str | None,
        typer.Option("--prices-from", metavar="FILE_OR_URL", help="Prices of your own, in the form of configs/prices."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List the GPUs that `cluster.gpu` may name; with a name, each figure and its source; with --prices, what they cost.

    A card that is not among them is described in the job: `cluster: {gpu: {name: l20, memory_gib: 44.5}}`.

    Example: `toolkit gpus`, `toolkit gpus h100-sxm-80gb`.

    JSON keys: gpus: a list of objects with name, vendor, architecture, compute_capability, note, precisions, host,
    sources, and the figures that `sources` names, each with its unit in its name. With --prices: prices (name, oldest,
    newest), offers (provider, instance, gpu, gpus, divisible, host_memory_gib, network_gbit_per_second, usd_per_hour,
    spot_usd_per_hour, date, source), notes.
    """
    from toolkit.catalog.gpus import find_in, load_catalogue

    catalogue = load_catalogue()
    if prices and prices_from is None and name is not None and not _is_card(catalogue, name) and _is_list(name):
        name, prices_from = None, name  # `--prices FILE`, as `toolkit plan` spells it
    shown = list(catalogue.values()) if name is None else [find_in(catalogue, name)]
    if prices or prices_from is not None:
        _show_prices(None if name is None else shown[0].name, prices_from, as_json=as_json)
    elif as_json:
        print_json({"gpus": [gpu.model_dump(mode="json") for gpu in shown]})
    elif name is None:
        _print_all(shown)
    else:
        _print_one(shown[0])


def _is_card(catalogue: dict[str, Gpu], name: str) -> bool:
    from toolkit.catalog.gpus import find_in

    try:
        return bool(find_in(catalogue, name))
    except SpecError:
        return False


def _is_list(name: str) -> bool:
    """Return whether a name is an address or a path rather than a misspelt card."""
    return "/" in name or name.endswith((".yaml", ".yml", ".json")) or Path(name).exists()


def _show_prices(gpu: str | None, where: str | None, *, as_json: bool) -> None:
    from datetime import datetime

    from toolkit.catalog.prices import load_prices

    known = load_prices(where)
    offers = known.offers if gpu is None else known.of(gpu)
    notes = known.notes(datetime.now().astimezone().date(), offers)
    if as_json:
        named = {"name": known.name, "oldest": str(known.oldest), "newest": str(known.newest)}
        print_json({"prices": named, "offers": [offer.to_dict() for offer in offers], "notes": notes})
        return
    numbers = ("cards", "RAM GiB", "network Gbit/s", "USD/h", "USD/h a card", "spot USD/h")
    table = new_table(("card", "provider", "instance", *numbers, "read on"), right=numbers)
    for entry in sorted(offers, key=lambda each: (each.offer.gpu, _card_price(each), each.provider)):
        offer = entry.offer
        table.add_row(
            offer.gpu,
            entry.provider,
            offer.instance,
            f"1–{offer.gpus}" if offer.divisible else str(offer.gpus),
            _scaled(offer.host_memory_gib, 1),
            _scaled(offer.network_gbit_per_second, 1),
            _scaled(offer.usd_per_hour, 1, 2),
            f"{_card_price(entry):.2f}",
            _scaled(offer.spot_usd_per_hour, 1, 2),
            str(entry.date),
        )
    print_table(table)
    print(f"prices: {known.dated}; of a whole machine unless it says a card; sources with --json")
    for note in notes:
        print(note)


def _card_price(entry: PricedOffer) -> float:
    return (entry.offer.usd_per_hour or entry.offer.spot_usd_per_hour or 0.0) / entry.offer.gpus


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
