"""How the modules of a model are sharded, as data: a table from module names to styles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from torch import nn

from toolkit.tensor_parallel.layout import Layout, Part

# Kind of a layer's features: those of query heads, of key or value heads, or of no heads.
Feature = Literal["query", "key_value", "width"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """Attention heads of the whole model.

    Args:
        query: Number of query heads of a layer.
        key_value: Number of key heads of a layer, each with its value head.
    """

    query: int
    key_value: int

    def on_rank(self, num_ranks: int) -> Heads:
        """Return the heads that one rank computes; a replicated key head counts on each of its ranks."""
        return Heads(query=self.query // num_ranks, key_value=max(1, self.key_value // num_ranks))

    def count(self, feature: Feature) -> int:
        """Return the number of heads of a kind; 1 for features that belong to no heads."""
        return {"query": self.query, "key_value": self.key_value, "width": 1}[feature]


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnParallel:
    """A linear layer whose output features are sharded.

    Args:
        parts: Kinds of features in the output, in order: several if layers are fused.
        interleaved: Whether the parts repeat for each key head, as in GPT-NeoX, instead of for all heads together.
    """

    parts: tuple[Feature, ...]
    interleaved: bool = False

    def layout(self, length: int, heads: Heads) -> Layout:
        """Return the layout of `length` output features.

        >>> ColumnParallel(parts=("query", "key_value", "key_value")).layout(80, Heads(query=6, key_value=2)).parts[1]
        Part(num_units=2, unit_size=8)

        Raises:
            ValueError: If the parts do not divide the length.
        """
        if set(self.parts) == {"width"}:
            part = Part(num_units=_divided(length, len(self.parts)))
            return Layout(parts=(part,) * len(self.parts))
        blocks = heads.key_value if self.interleaved else 1
        counts = [heads.count(feature) // blocks for feature in self.parts]
        size = _divided(length, blocks * sum(counts))
        return Layout(parts=tuple(Part(num_units=count, unit_size=size) for count in counts), num_blocks=blocks)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowParallel:
    """A linear layer whose input features are sharded, like the output of the columns before it."""

    part: Feature

    def layout(self, length: int, heads: Heads) -> Layout:
        """Return the layout of `length` input features; raise ValueError like `ColumnParallel.layout`."""
        return ColumnParallel(parts=(self.part,)).layout(length, heads)


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """An embedding whose rows, or a head whose logits, are sharded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Stacked experts of a mixture (`gate_up_proj` or `up_proj`, `down_proj`), each with its inner features sharded, or whole on one rank.

    Args:
        whole: Whether each expert is whole on one of the ranks, which have equally many (expert parallelism).
        transposed: Whether the weight of an expert has shape (in, out), as GPT-OSS has it.
        interleaved: Whether the features of gate and up alternate in `gate_up_proj`, instead of halves.
        passes: Children that return their input, as experts without weights do.
    """

    whole: bool = False
    transposed: bool = False
    interleaved: bool = False
    passes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureNorm:
    """An RMS norm over all features that a column shards, not over those of one head.

    Args:
        part: Kind of those features.
        rounds_before_weight: Whether the normalised features are rounded to their dtype before the weight multiplies them.
    """

    part: Feature
    rounds_before_weight: bool = False

    def layout(self, length: int, heads: Heads) -> Layout:
        """Return the layout of `length` features; raise ValueError like `ColumnParallel.layout`."""
        return ColumnParallel(parts=(self.part,)).layout(length, heads)


@dataclass(frozen=True, slots=True, kw_only=True)
class PerHead:
    """A module between columns and rows with other parameters for each head, the first dimension of each of them.

    Args:
        part: Kind of the heads.
    """

    part: Feature


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicated:
    """A module that is replicated on each rank.

    Args:
        reads_shards: Whether it lies between columns and rows, as the norms of query and key heads do, so that its
            gradient is summed over the ranks.
    """

    reads_shards: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """The module around query, key and value: its attributes with numbers of heads are set to those of this rank.

    Args:
        query: Attributes with a number proportional to the query heads.
        key_value: Attributes with the number of key heads.
        ratio: Attributes with the number of query heads per key head.
        reads_config: Whether its forward pass reads numbers of heads from its `config`.
        per_head: Its own parameters with an element for each query head, such as sinks.
        enters: Whether the gradient of all its inputs is summed where they enter it, not where columns read them: then
            replicated layers inside, such as the narrow half of a latent projection, may be between them.
    """

    query: tuple[str, ...] = ()
    key_value: tuple[str, ...] = ()
    ratio: tuple[str, ...] = ()
    reads_config: bool = False
    per_head: tuple[str, ...] = ()
    enters: bool = False


Style = ColumnParallel | RowParallel | Vocabulary | Experts | FeatureNorm | PerHead | Replicated | Attention


@dataclass(frozen=True, slots=True, kw_only=True)
class TPPlan:
    """How a model is sharded.

    Args:
        heads: Attention heads of the whole model.
        table: Styles by module name; `*` stands for one component of it, such as a layer's number, and `name:Class` for a
            component that is a module of that class, where layers of several kinds have modules of one name.
    """

    heads: Heads
    table: Mapping[str, Style]


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """The sharded computation inside one module: columns that read one input, and the row that reads their output.

    Args:
        parent: Name of the module that contains them; "" for the model itself.
        columns: Names of the columns.
        rows: Names of the rows; a valid table has exactly one.
    """

    parent: str
    columns: tuple[str, ...]
    rows: tuple[str, ...]


def with_whole_experts(table: Mapping[str, Style]) -> dict[str, Style]:
    """Return a table in which stacked experts are whole on their ranks."""
    return {name: replace(style, whole=True) if isinstance(style, Experts) else style for name, style in table.items()}


def has_whole_experts(table: Mapping[str, Style]) -> bool:
    """Return whether a table has stacked experts that are whole on their ranks."""
    return any(isinstance(style, Experts) and style.whole for style in table.values())


def regions(found: Mapping[str, Style]) -> list[Region]:
    """Return the regions of modules with styles: for each parent, heads and other features form separate regions."""
    found_in: dict[tuple[str, bool], tuple[list[str], list[str]]] = {}
    for name, style in found.items():
        parent = name.rpartition(".")[0]
        if isinstance(style, ColumnParallel):
            found_in.setdefault((parent, "width" in style.parts), ([], []))[0].append(name)
        elif isinstance(style, RowParallel):
            found_in.setdefault((parent, style.part == "width"), ([], []))[1].append(name)
    return [
        Region(parent=parent, columns=tuple(columns), rows=tuple(rows))
        for (parent, _), (columns, rows) in found_in.items()
    ]


def matching(model: nn.Module, pattern: str) -> list[str]:
    """Return the names of a model's modules that match a pattern of a table."""
    plain, kinds = [], {}
    for depth, part in enumerate(pattern.split("."), 1):
        name, _, kind = part.partition(":")
        plain.append(name)
        if kind:
            kinds[depth] = kind
    found = [name for name, _ in model.named_modules() if _matches(name.split("."), plain)]
    if not kinds:
        return found
    return [name for name in found if all(_class_at(model, name, depth) == kind for depth, kind in kinds.items())]


def _class_at(model: nn.Module, name: str, depth: int) -> str:
    return type(model.get_submodule(".".join(name.split(".")[:depth]))).__name__


def inside(parent: str, child: str) -> str:
    """Return the full name of a child: `parent.child`, or `child` if the parent is the model itself."""
    return f"{parent}.{child}" if parent else child


def pattern_of(name: str) -> str:
    """Return a module name with its numbers replaced by `*`.

    >>> pattern_of("model.layers.12.mlp")
    'model.layers.*.mlp'
    """
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _matches(name: list[str], pattern: list[str]) -> bool:
    return len(name) == len(pattern) and all(want in ("*", part) for part, want in zip(name, pattern, strict=True))


def _divided(length: int, count: int) -> int:
    size, left_over = divmod(length, count)
    if left_over:
        raise ValueError(f"{count} does not divide {length} features")
    return size
