"""Which modules of a decoder can run on shards of the sequence, or what forbids it, found before anything is changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import nn

from toolkit.errors import PlanError
from toolkit.tensor_parallel.linear import Reads
from toolkit.tensor_parallel.plan import (
    ColumnParallel,
    Experts,
    Region,
    Replicated,
    RowParallel,
    Style,
    pattern_of,
    regions,
)
from toolkit.topology.grid import join

# Names that architectures of transformers give to the norm after the last layer.
_FINAL_NORMS = ("norm", "ln_f", "final_layer_norm", "final_layernorm")
# Name of a module that forbids sequence parallelism ("" for the model), and the reason.
_Reason = tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """The modules of a model between which the sequence is sharded, by name.

    Args:
        layers: Decoder layers, in order.
        end: Last module on a sharded sequence: the final norm, or the last layer of a model without one.
        gathering: Parents of one region each, which gather their columns' input.
        whole: Modules that run on the whole sequence, as without sequence parallelism: mixtures of sliced experts, whose router
            and experts both read the whole sequence, and modules that may mix tokens and are not sharded.
        routing: Mixtures that run on shards of the sequence, whose whole experts exchange the tokens themselves.
        drops: Whether training may draw random numbers, such as dropout masks.
    """

    layers: tuple[str, ...]
    end: str
    gathering: frozenset[str]
    whole: frozenset[str]
    routing: frozenset[str]
    drops: bool

    def reads(self, region: Region) -> Reads:
        """Return which kind of input the columns of a region are called with."""
        if region.parent in self.gathering:
            return "gathered"
        return "piece" if region.parent in self.layers else "whole"

    def outputs_shard(self, row: str) -> bool:
        """Return whether the output of a row is a shard of the sequence."""
        return not any(is_inside(row, whole) for whole in self.whole)

    def acts_on_pieces(self, name: str) -> bool:
        """Return whether a module of a layer, or the last one on a sharded sequence, lies outside the modules that gather."""
        return not any(is_inside(name, outer) for outer in self.gathering | self.whole)

    @property
    def on_pieces(self) -> tuple[str, ...]:
        """Modules whose input is a shard of the sequence."""
        return self.layers if self.end in self.layers else (*self.layers, self.end)


def find_decoder(model: nn.Module, found: Mapping[str, Style]) -> Decoder:
    """Find the modules of a dense model that can run on shards of the sequence.

    Args:
        model: Dense model; it is not changed.
        found: Styles by module name.

    Raises:
        PlanError: TP_SEQUENCE_ARCHITECTURE, with the reasons that forbid sequence parallelism of the model.
    """
    inside = [name for name, style in found.items() if isinstance(style, ColumnParallel | RowParallel | Experts)]
    stacks = {_stack_of(name) for name in inside}
    if len(stacks) != 1 or "" in stacks:
        where = "outside a list" if "" in stacks else f"in {len(stacks)} lists"
        raise _refused(model, [("", f"its sharded modules lie {where} of decoder layers instead of all in one")])
    decoder = _decoder(model, found, stacks.pop())
    reasons = [*_model_reasons(model), *_layer_reasons(model, decoder, found), *_random_reasons(model, decoder)]
    if reasons:
        raise _refused(model, reasons)
    return decoder


def is_inside(name: str, outer: str) -> bool:
    """Return whether a module is another one or lies inside it, judged by their names."""
    return name == outer or name.startswith(f"{outer}.")


def _decoder(model: nn.Module, found: Mapping[str, Style], stack: str) -> Decoder:
    layers = tuple(f"{stack}.{name}" for name, _ in model.get_submodule(stack).named_children())
    base = stack.rpartition(".")[0]
    norms = (name for name in _FINAL_NORMS if getattr(model.get_submodule(base), name, None) is not None)
    parents = {region.parent for region in regions(found)}
    children = [f"{layer}.{child}" for layer in layers for child, _ in model.get_submodule(layer).named_children()]
    routing = {child for child in children if _routes_pieces(model, child, parents, found)}
    whole = {child for child in children if child not in routing and _stays_whole(model, child, parents, found)}
    gathering = {parent for parent in parents if parent not in layers and not any(is_inside(parent, x) for x in whole)}
    return Decoder(
        layers=layers,
        end=next((f"{base}.{name}".removeprefix(".") for name in norms), layers[-1]),
        gathering=frozenset(gathering),
        whole=frozenset(whole),
        routing=frozenset(routing),
        drops=_drops(model),
    )


def _routes_pieces(model: nn.Module, child: str, parents: set[str], found: Mapping[str, Style]) -> bool:
    """Return whether a layer's child is a mixture of whole experts whose tokens may be routed shard by shard.

    A loss of the routers takes averages over all tokens of all layers, so that it needs their whole output.
    """
    experts = [name for name, style in found.items() if isinstance(style, Experts) and is_inside(name, child)]
    whole = all(style.whole for name, style in found.items() if isinstance(style, Experts) and name in experts)
    collects = getattr(getattr(model, "config", None), "output_router_logits", False)
    fused = sum(is_inside(parent, child) for parent in parents) > 1
    return bool(experts) and child not in experts and whole and not collects and not fused


def _stays_whole(model: nn.Module, child: str, parents: set[str], found: Mapping[str, Style]) -> bool:
    """Return whether a layer's child has modules other than columns that may need the whole sequence, or nested regions."""
    styles = [style for name, style in found.items() if is_inside(name, child)]
    sharded = any(isinstance(style, ColumnParallel | RowParallel) for style in styles)
    matrix = any(parameter.dim() > 1 for parameter in model.get_submodule(child).parameters())
    return (
        any(isinstance(style, Experts) for style in styles)
        or (Replicated(reads_shards=False) in styles and (sharded or matrix))
        or sum(is_inside(parent, child) for parent in parents) > 1
    )


def _model_reasons(model: nn.Module) -> Iterator[_Reason]:
    if getattr(getattr(model, "config", None), "layerdrop", 0):
        yield "", "layerdrop drops layers, including the first one"


def _layer_reasons(model: nn.Module, decoder: Decoder, found: Mapping[str, Style]) -> Iterator[_Reason]:
    for name, style in found.items():
        layer = name.rpartition(".")[0]
        if layer in decoder.layers and isinstance(style, ColumnParallel) and "width" not in style.parts:
            yield layer, "computes attention itself, not in a module that could gather its input"
        if layer in decoder.layers and isinstance(style, Experts):
            yield layer, "holds its experts itself, not in a module that could gather their input"
    for layer in decoder.layers:
        for name, module in model.get_submodule(layer).named_modules(prefix=layer):
            matrix = any(parameter.dim() > 1 for parameter in module._parameters.values() if parameter is not None)
            routes = any(is_inside(name, block) for block in decoder.routing)
            if matrix and name not in found and decoder.acts_on_pieces(name) and not routes:
                yield name, "may mix tokens and is not in the plan"


def _random_reasons(model: nn.Module, decoder: Decoder) -> Iterator[_Reason]:
    """Yield conflicts of random state: ranks draw differently on shards of the sequence, but alike on the whole of it."""
    for name in sorted(decoder.whole) if decoder.drops else ():
        module = model.get_submodule(name)
        if any(isinstance(inner, nn.Dropout) and inner.p for inner in module.modules()):
            yield name, "drops elements of the whole sequence, which would differ between ranks"
        if getattr(module, "jitter_noise", 0):
            yield name, "adds noise (router_jitter_noise) and dropout, which would differ between ranks"


def _drops(model: nn.Module) -> bool:
    """Return whether the configuration sets a dropout; of a model without one, whether it has an active dropout module."""
    config = getattr(model, "config", None)
    if config is None:
        return any(isinstance(module, nn.Dropout) and module.p for module in model.modules())
    return any("drop" in name and isinstance(value, float) and value for name, value in config.to_dict().items())


def _stack_of(name: str) -> str:
    """Return the name of the list that a module's layer belongs to: everything before the first number of its name.

    >>> _stack_of("model.layers.3.mlp.experts.0"), _stack_of("head")
    ('model.layers', '')
    """
    parts = name.split(".")
    numbers = [place for place, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[0]]) if numbers else ""


def _refused(model: nn.Module, reasons: list[_Reason]) -> PlanError:
    """Return the error that names each reason once for all layers alike."""
    told = {(pattern_of(name), why): f"{name} {why}".strip() for name, why in reversed(reasons)}
    return PlanError.of(
        code="TP_SEQUENCE_ARCHITECTURE",
        key="parallel.sequence_parallel",
        message=f"sequence parallelism of {type(model).__name__} is not possible: {join(reversed(told.values()))}",
        fix="Set parallel.sequence_parallel to false; in your own script, leave sequence_parallel out",
    )
