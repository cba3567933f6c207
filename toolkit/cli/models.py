"""`toolkit models`: the catalogue of model dimensions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from toolkit.cli.options import JsonOption
from toolkit.cli.output import new_table, print_fields, print_json, print_table

if TYPE_CHECKING:
    from toolkit.catalog.models import ModelSpec


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(models)


def models(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Show one model with its config.")] = None,
    as_json: JsonOption = False,
) -> None:
    """List the models whose dimensions travel with the package, for planning without network or weights.

    A job may also name any hub id or local folder.

    Example: `toolkit models`, `toolkit models llama-3.1-8b`.

    JSON keys: models: a list of objects with name, hub_id, model_type, architecture, num_parameters, config, and the
    sizes by their names in config.json (hidden_size, num_hidden_layers, …).
    """
    from toolkit.catalog.models import model_names, read_catalogue_model, resolve_model
    from toolkit.config.job import Model

    if name is not None:
        read_catalogue_model(name)  # its error lists the names, where a hub lookup would report a missing network
    specs = [resolve_model(Model(name=known)) for known in (model_names() if name is None else (name,))]
    if as_json:
        print_json({"models": [_as_dict(spec) for spec in specs]})
    elif name is None:
        _print_all(specs)
    else:
        _print_one(specs[0])


def _print_all(specs: list[ModelSpec]) -> None:
    from toolkit.units import format_count

    numbers = ("parameters", "layers", "hidden", "heads", "kv", "experts", "vocabulary", "positions")
    table = new_table(("name", *numbers, "hub id"), right=numbers)
    for spec in sorted(specs, key=lambda spec: (spec.model_type, spec.num_parameters or 0)):
        table.add_row(
            spec.name,
            "–" if spec.num_parameters is None else format_count(spec.num_parameters),
            *map(str, (spec.num_hidden_layers, spec.hidden_size, spec.num_attention_heads, spec.num_key_value_heads)),
            str(spec.num_experts or "–"),
            str(spec.vocab_size),
            str(spec.max_position_embeddings or "–"),
            spec.hub_id or "–",
        )
    print_table(table)


def _print_one(spec: ModelSpec) -> None:
    import yaml

    values = _as_dict(spec)
    config = values.pop("config")
    print(spec.name)
    print_fields([(key.replace("_", " "), "–" if value is None else str(value)) for key, value in values.items()])
    print("\nconfig.json")
    print("\n".join(f"  {line}" for line in yaml.safe_dump(config, sort_keys=False).splitlines()))


def _as_dict(spec: ModelSpec) -> dict[str, Any]:
    left_out = ("origin", "path", "revision", "has_weights")
    return {key: value for key, value in spec.to_dict().items() if key not in left_out}
