"""How the modules of a model are sharded, as data: a table from names to styles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import nn

from toolkit.tensor_parallel.layout import Layout, Part

# What the features of a layer are: those of query heads, of key or value heads, or of no heads.
Feature = Literal["query", "key_value", "width"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """Attention heads of the whole model.

    Args:
        query: Query heads of a layer.
        key_value: Key heads of a layer, each with its value head.
    """

    query: int
    key_value: int

    def on_rank(self, num_ranks: int) -> Heads:
        """Return the heads that one rank computes; a key head that several ranks hold counts on each."""
        return Heads(query=self.query // num_ranks, key_value=max(1, self.key_value // num_ranks))

    def count(self, feature: Feature) -> int:
        """Return the number of heads of a kind; for features of no heads, 1."""
        return {"query": self.query, "key_value": self.key_value, "width": 1}[feature]


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnParallel:
    """A linear layer whose output features are dealt out.

    Args:
        parts: What the output holds, one after the other: several where layers are fused.
        interleaved: Whether the parts repeat for each key head, as in GPT-NeoX, instead of for all heads together.
    """

    parts: tuple[Feature, ...]
    interleaved: bool = False

    def layout(self, length: int, heads: Heads) -> Layout:
        """Return the layout of `length` output features.

        >>> ColumnParallel(parts=("query", "key_value", "key_value")).layout(80, Heads(query=6, key_value=2)).parts[1]
        Part(num_units=2, unit_size=8)

        Raises:
            ValueError: Where the parts do not divide the length.
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
    """A linear layer whose input features are dealt out, as the columns before it dealt out their output."""

    part: Feature

    def layout(self, length: int, heads: Heads) -> Layout:
        """Return the layout of `length` input features; ValueError as `ColumnParallel.layout`."""
        return ColumnParallel(parts=(self.part,)).layout(length, heads)


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """An embedding whose rows, or a head whose scores, are dealt out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Stacked experts of a mixture (`gate_up_proj`, `down_proj`), each with its inner features dealt out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureNorm:
    """An RMS norm over all of the features that a column deals out, not over those of one head.

    Args:
        part: What those features are.
        rounds_before_weight: Whether the normed features are rounded to their type before the weight multiplies them.
    """

    part: Feature
    rounds_before_weight: bool = False

    def layout(self, length: int, heads: Heads) -> Layout:
        """Return the layout of `length` features; ValueError as `ColumnParallel.layout`."""
        return ColumnParallel(parts=(self.part,)).layout(length, heads)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicated:
    """A module that each rank holds whole.

    Args:
        reads_shards: Whether it stands between columns and rows, as the norms of query and key heads do, so that its
            gradient is the sum over the ranks.
    """

    reads_shards: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """The module around query, key and value: what it knows of its number of heads is set to this rank's.

    Args:
        query: Attributes that hold a number that shrinks with the query heads.
        key_value: Attributes that hold the number of key heads.
        ratio: Attributes that hold query heads for each key head.
        reads_config: Whether its forward pass reads numbers of heads from its `config`.
    """

    query: tuple[str, ...] = ()
    key_value: tuple[str, ...] = ()
    ratio: tuple[str, ...] = ()
    reads_config: bool = False


Style = ColumnParallel | RowParallel | Vocabulary | Experts | FeatureNorm | Replicated | Attention


@dataclass(frozen=True, slots=True, kw_only=True)
class TPPlan:
    """How a model is sharded.

    Args:
        heads: Of the whole model.
        table: Styles by module name; `*` stands for one component of it, such as a layer's number.
    """

    heads: Heads
    table: Mapping[str, Style]


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """What is computed on shards inside one module: columns that read one input, and the row that takes what they give.

    Args:
        parent: Name of the module that holds them; "" for the model itself.
        columns: Their names.
        rows: Name of the row; a sound table has one.
    """

    parent: str
    columns: tuple[str, ...]
    rows: tuple[str, ...]


def regions(found: Mapping[str, Style]) -> list[Region]:
    """Return the regions of modules with styles: those of heads apart from those of other features, for each parent."""
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
    """Return the names of a model's modules that a pattern of a table stands for."""
    wanted = pattern.split(".")
    return [name for name, _ in model.named_modules() if _matches(name.split("."), wanted)]


def inside(parent: str, child: str) -> str:
    """Return the name of what a module holds: `parent.child`, and of what the model itself holds: `child`."""
    return f"{parent}.{child}" if parent else child


def pattern_of(name: str) -> str:
    """Return a name with `*` for numbers.

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
