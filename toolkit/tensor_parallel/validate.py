"""Checks of whether a table can shard a model, made before anything is changed."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from itertools import starmap
from typing import get_args

from torch import nn

from toolkit.errors import Problem
from toolkit.introspect import tied_groups
from toolkit.tensor_parallel.linear import input_features, is_linear, output_features
from toolkit.tensor_parallel.plan import (
    Attention,
    ColumnParallel,
    Experts,
    FeatureNorm,
    Heads,
    PerHead,
    RowParallel,
    Style,
    TPPlan,
    Vocabulary,
    inside,
    matching,
    pattern_of,
    regions,
)
from toolkit.topology.grid import divisors, join

_KEY, _EXPERTS = "parallel.tensor", "parallel.experts"
# Alignment of a row of weights, for the products of all experts in one kernel (torch.nn.functional.grouped_mm).
_KERNEL_BYTES = 16


def problems(model: nn.Module, styles: TPPlan, *, num_ranks: int) -> Iterator[Problem]:
    """Yield the problems of a table and a number of ranks for a model; once for all layers alike."""
    if not styles.table:
        yield Problem(
            code="TP_STYLE_UNUSED",
            key="table",
            message=f"the plan is empty: {type(model).__name__} would be replicated on each rank",
            fix="Name the modules to shard, or use the plan of tp_plan_for(model)",
        )
    strange = {pattern: style for pattern, style in styles.table.items() if not isinstance(style, Style)}
    if strange:
        yield from starmap(_no_style, strange.items())
        return
    found: dict[str, Style] = {}
    for pattern, style in styles.table.items():
        names = matching(model, pattern)
        if not names:
            yield _matches_nothing(model, pattern)
        found.update(dict.fromkeys(names, style))
    first = {pattern_of(name): name for name in reversed(found)}
    yield from _head_problems(styles.heads, found, num_ranks)
    for pattern, name in reversed(first.items()):
        yield from _module_problems(model.get_submodule(name), pattern, found[name], styles.heads, num_ranks)
    yield from _neighbour_problems(model, found)
    yield from _tied_problems(model, found)


def _no_style(pattern: str, value: object) -> Problem:
    kinds = ", ".join(kind.__name__ for kind in get_args(Style))
    return Problem(
        code="TP_STYLE_KIND",
        key=pattern,
        message=f"{pattern} is given {value!r} in the plan, which is not a style",
        fix=f"Give it one of {kinds}, of toolkit.tensor_parallel",
    )


def _matches_nothing(model: nn.Module, pattern: str) -> Problem:
    names = list(dict.fromkeys(pattern_of(name) for name, _ in model.named_modules() if name))
    near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.0)
    return Problem(
        code="TP_STYLE_UNUSED",
        key=pattern,
        message=f"{pattern} in the plan matches no module of {type(model).__name__}",
        fix=f"Remove it, or name one such as {join(near)}",
    )


def _head_problems(heads: Heads, found: Mapping[str, Style], num_ranks: int) -> Iterator[Problem]:
    used = {feature for style in found.values() if isinstance(style, ColumnParallel) for feature in style.parts}
    if not used & {"query", "key_value"}:
        return
    if heads.query % num_ranks:
        number, why = f"num_attention_heads={heads.query}", "a rank must have whole heads"
    elif heads.key_value % num_ranks and num_ranks % heads.key_value:
        number, why = (
            f"num_key_value_heads={heads.key_value}",
            "every key head must be on the same number of ranks",
        )
    else:
        return
    valid = [size for size in divisors(heads.query) if heads.key_value % size == 0 or size % heads.key_value == 0]
    yield Problem(
        code="TP_HEADS",
        key=_KEY,
        message=f"tensor={num_ranks} does not divide {number}: {why}",
        fix=f"Set tensor to one of {join(valid)}",
    )


def _module_problems(module: nn.Module, pattern: str, style: Style, heads: Heads, num_ranks: int) -> Iterator[Problem]:
    replaced = isinstance(style, ColumnParallel | RowParallel | Vocabulary | FeatureNorm)
    if not _fits(module, style) or (replaced and not pattern):
        place = pattern or "the model itself"
        yield Problem(
            code="TP_STYLE_KIND",
            key=pattern,
            message=f"{place} is a {type(module).__name__}, which {type(style).__name__} cannot shard",
            fix="Name a module with a floating-point weight of its own: a linear layer for ColumnParallel and RowParallel, an embedding "
            "or a linear layer for Vocabulary, stacked experts for Experts, an RMS norm for FeatureNorm",
        )
    elif isinstance(style, ColumnParallel | RowParallel | FeatureNorm):
        length = _features(module, style)
        try:
            style.layout(length, heads)
        except ValueError as error:
            yield Problem(
                code="TP_PLAN_SHAPE",
                key=pattern,
                message=f"{pattern} does not have the parts of {style}: {error}, with {heads}",
                fix="Give the parts in the order in which its weight has them, and the model's heads",
            )
            return
        width = length // len(style.parts) if isinstance(style, ColumnParallel) else length
        if "width" in (style.parts if isinstance(style, ColumnParallel) else (style.part,)):
            yield from _width_problems(pattern, width, num_ranks)
    elif isinstance(style, Experts) and style.whole:
        yield from _whole_expert_problems(module, pattern, style, num_ranks)
    elif isinstance(style, Experts):
        weight = module.get_parameter("down_proj")
        inner = weight.shape[1 if style.transposed else 2]
        yield from _width_problems(pattern, inner, num_ranks, multiple=_KERNEL_BYTES // weight.element_size())


def _whole_expert_problems(module: nn.Module, pattern: str, style: Experts, num_ranks: int) -> Iterator[Problem]:
    """Yield why experts cannot each be whole on one of the ranks."""
    counts = {len(weight) for weight in module._parameters.values() if weight is not None}
    if len(counts) > 1 or style.passes:
        why = f"{pattern} has experts without weights, which no rank owns"
        yield Problem(code="TP_EXPERTS", key=pattern, message=f"experts=whole: {why}", fix=f"Set {_EXPERTS} to sliced")
    elif (count := counts.pop()) % num_ranks:
        yield Problem(
            code="TP_EXPERTS",
            key=_KEY,
            message=f"tensor={num_ranks} does not divide the {count} experts of {pattern}: with experts=whole each rank has equally many",
            fix=f"Set tensor to one of {join(divisors(count))}, or {_EXPERTS} to sliced",
        )


def _width_problems(pattern: str, width: int, num_ranks: int, *, multiple: int = 1) -> Iterator[Problem]:
    valid = [size for size in divisors(width) if width // size % multiple == 0]
    if num_ranks not in valid:
        each = f"a multiple of {multiple}, as the kernels require" if multiple > 1 else "equally many"
        yield Problem(
            code="TP_DIVISIBILITY",
            key=_KEY,
            message=f"tensor={num_ranks} cannot shard the {width} features of {pattern}: each rank needs {each}",
            fix=f"Set tensor to one of {join(valid)}" if valid else "Set tensor to 1",
        )


def _features(module: nn.Module, style: ColumnParallel | RowParallel | FeatureNorm) -> int:
    match style:
        case ColumnParallel():
            return output_features(module)
        case RowParallel():
            return input_features(module)
    return len(module.get_parameter("weight"))


def _fits(module: nn.Module, style: Style) -> bool:
    match style:
        case ColumnParallel() | RowParallel():
            return is_linear(module)
        case Vocabulary():
            return is_linear(module) or (isinstance(module, nn.Embedding) and _scales_at_most(module))
        case FeatureNorm():
            return hasattr(module, "variance_epsilon") and list(module._parameters) == ["weight"]
        case Experts():
            names = {name for name, weight in module._parameters.items() if weight is not None}
            up = "gate_up_proj" if "gate_up_proj" in names else "up_proj"
            known = {up, "down_proj", "gate_proj", f"{up}_bias", "down_proj_bias"}
            return {up, "down_proj"} <= names <= known and module.get_parameter("down_proj").dim() == 3
        case PerHead():
            return any(weight is not None for weight in module._parameters.values())
    return True


def _scales_at_most(embedding: nn.Embedding) -> bool:
    return type(embedding) is nn.Embedding or hasattr(embedding, "embed_scale")


def _neighbour_problems(model: nn.Module, found: Mapping[str, Style]) -> Iterator[Problem]:
    """Yield columns without their row, and modules with weights next to them that are not in the table."""
    unlike = {(pattern_of(region.parent), len(region.columns)): region for region in reversed(regions(found))}
    for region in reversed(unlike.values()):
        names, parent = (*region.columns, *region.rows), pattern_of(region.parent)
        if not region.columns or len(region.rows) != 1:
            rows = join(pattern_of(name) for name in region.rows) or "no RowParallel"
            columns = join(pattern_of(name) for name in region.columns) or "no ColumnParallel"
            place = parent or "the model itself"
            yield _neighbour(
                parent,
                f"the plan gives {place} {columns} and {rows}: a RowParallel must get its input from ColumnParallel "
                "modules",
            )
        for child in _whole_beside(model, region.parent, found):
            sharded = names[0].rpartition(".")[2]
            key = inside(parent, child)
            yield _neighbour(key, f"{key} is not sharded, but {sharded} is")


def _whole_beside(model: nn.Module, parent: str, found: Mapping[str, Style]) -> Iterator[str]:
    """Yield a module's own parameters, and its children with parameters that are not in the table at any depth."""
    module, style = model.get_submodule(parent), found.get(parent)
    if not (isinstance(style, Attention) and style.enters):
        yield from (
            name for name in module._parameters if not isinstance(style, Attention) or name not in style.per_head
        )
    for child, inner in module.named_children():
        name = inside(parent, child)
        known = any(styled == name or styled.startswith(f"{name}.") for styled in found)
        if not known and any(True for _ in inner.parameters()):
            yield child


def _neighbour(key: str, message: str) -> Problem:
    return Problem(
        code="TP_PLAN_INCOMPLETE",
        key=key,
        message=message,
        fix="Give it a style: ColumnParallel, RowParallel, or Replicated(reads_shards=True) if it is between the "
        "two, else Replicated(reads_shards=False)",
    )


def _tied_problems(model: nn.Module, found: Mapping[str, Style]) -> Iterator[Problem]:
    """Yield weights that two modules share and of which only one is sharded."""
    for group in tied_groups(model):
        names = [name.rpartition(".")[0] for name in group]
        if len({type(found.get(name)) for name in names}) > 1:
            yield Problem(
                code="TP_STYLE_TIED",
                key=names[0],
                message=f"{join(sorted(names))} share one weight, but not one style",
                fix="Give all of them Vocabulary(), or none a style",
            )
