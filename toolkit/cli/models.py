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
    support: Annotated[
        str | None,
        typer.Option(
            "--support",
            metavar="MODEL",
            help="Try what is supported of a model: the estimate, tensor ranks, stages, adapters, the export; with the reason of each no. "
            "MODEL is a name of this list, a hub id, a local folder or a config.json.",
        ),
    ] = None,
    trust_remote_code: Annotated[
        bool,
        typer.Option("--trust-remote-code", help="With --support, let code from the model's repository run."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """List the models whose dimensions travel with the package, for planning without network or weights.

    A job may also name any hub id or local folder.

    Example: `toolkit models`, `toolkit models llama-3.1-8b`, `toolkit models --support deepseek-v2-lite`.

    JSON keys: models: a list of objects with name, hub_id, model_type, architecture, num_parameters, config, and the
    sizes by their names in config.json (hidden_size, num_hidden_layers, …). With --support: model, model_type, architecture,
    and verdicts: a list of objects with part (estimate, tensor, pipeline, lora, export), supported, sizes (numbers of
    tensor ranks or stages) and detail (what was found, or the reason).
    """
    if support is not None:
        if name is not None:
            raise typer.BadParameter("it names the model itself: leave NAME out", param_hint="--support")
        _print_support(support, trust_remote_code=trust_remote_code, as_json=as_json)
        return
    if trust_remote_code:
        raise typer.BadParameter("it is about the model of --support", param_hint="--trust-remote-code")
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


def _print_support(model: str, *, trust_remote_code: bool, as_json: bool) -> None:
    from toolkit.support.support import support_of

    found = support_of(model, trust_remote_code=trust_remote_code)
    if as_json:
        print_json(found.to_dict())
        return
    table = new_table((found.architecture, "supported", "sizes", "detail"))
    for one in found.verdicts:
        sizes = (
            f"{one.sizes[0]} to {one.sizes[-1]}"
            if one.part == "pipeline" and one.sizes
            else ", ".join(map(str, one.sizes))
        )
        table.add_row(one.part, "yes" if one.supported else "no", sizes or "–", one.detail)
    print_table(table)


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
