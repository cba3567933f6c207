"""Tables of styles found in a model: which modules can be sharded, by the layers that they are made of and what they were called with.

A twin runs once, which shows what each linear layer reads and which one writes a module's output. Kinds of modules are
recognised, not models: attention with or without fused weights, latent projections, gates, norms inside heads, sinks; gated
and plain feed-forward layers; stacked experts. What is not recognised stays whole on each rank. What is found is a guess:
`toolkit.tensor_parallel.proof` tries it.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from toolkit.tensor_parallel.linear import input_features, is_linear, output_features
from toolkit.tensor_parallel.plan import (
    Attention,
    ColumnParallel,
    Experts,
    Feature,
    FeatureNorm,
    Heads,
    PerHead,
    Replicated,
    RowParallel,
    Style,
    Vocabulary,
    inside,
    pattern_of,
)

# Children that write a module's output, by the names that architectures give them.
_ROWS = re.compile(
    r"^(?:o_proj|out_proj|dense|c_proj|down_proj|fc2|fc_out|wo|w2|w_1|lin2|layer_2|out_lin|linear_out|attention_out|"
    r"dense_4h_to_h|proj_down|output_linear|output|proj|to_out|linear_2|attn_out|o_b_proj|o)$",
    re.IGNORECASE,
)
_FUSED = re.compile(r"qkv|query_key_value|^c_attn$|w_?pack|^att_proj$", re.IGNORECASE)
_KEY_VALUE = re.compile(
    r"^(?:w?[kv]|(?:k|v|kv)_(?:proj|lin)|(?:key|value)(?:_proj)?|project_[kv]|[kv]_proj_\w+)$", re.IGNORECASE
)
# The narrow half of a latent projection, which all heads read.
_NARROW = re.compile(r"_a_proj(?:_with_mqa)?$|_down_proj$|^(?:q|kv)_down\w*$|compress", re.IGNORECASE)
_GATE_UP = re.compile(r"gate_?up|^wi$|^input_linear$|^gate_and_up|w13", re.IGNORECASE)

# Attributes of an attention with its numbers of heads, and with the width of its query heads.
_QUERY_NUMBERS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "num_head", "nhead", "num_q_heads", "heads")
_KEY_NUMBERS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "kv_heads", "num_key_heads", "num_kv")
_RATIOS = ("num_key_value_groups", "n_rep", "num_queries_per_kv")
_QUERY_WIDTHS = (
    "all_head_size",
    "embed_dim",
    "split_size",
    "hidden_size",
    "attention_hidden_size",
    "inner_dim",
    "d_model",
    "q_dim",
    "dim",
    "inner_size",
    "attn_dim",
    "query_dim",
)
_KEY_WIDTHS = ("kv_dim", "key_value_dim")
_READS_CONFIG = re.compile(r"self\.config\.(?:num_attention_heads|num_key_value_heads)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One module that can perhaps be sharded, with all modules of its pattern.

    Args:
        pattern: Pattern of its name in a table.
        tables: Ways to shard it, the likeliest first.
    """

    pattern: str
    tables: tuple[Mapping[str, Style], ...]


def heads_of(config: Any) -> Heads:
    """Return the numbers of heads in a configuration, by the names that architectures give them."""
    text = config.get_text_config(decoder=True)
    query = _of_all_layers(text, "num_attention_heads") or 1
    names = ("num_key_value_heads", "num_kv_heads", "kv_n_heads", "multi_query_group_num")
    found = [_of_all_layers(text, name) for name in names]
    if getattr(text, "multi_query", False) and not getattr(text, "new_decoder_architecture", False):
        return Heads(query=query, key_value=1)
    nested = getattr(text, "attn_config", None)
    found.append(getattr(nested, "kv_n_heads", None))
    own = next((value for value in found if isinstance(value, int) and value > 0), query)
    return Heads(query=query, key_value=min(own, query))


def _of_all_layers(config: Any, name: str) -> int | None:
    """Return a number of heads; of layers with numbers of their own the one that divides all of them."""
    try:
        value = getattr(config, name, None)
    except Exception:  # transformers refuses to read what layers have of their own as one (configuration_utils.py)
        own = [getattr(config.per_layer_config[layer], name) for layer in range(config.num_hidden_layers)]
        return math.gcd(*own)
    return value if isinstance(value, int) else None


def find_candidates(twin: PreTrainedModel, batch: Mapping[str, torch.Tensor]) -> list[Candidate]:
    """Return what can perhaps be sharded of a twin: the vocabulary, then modules in the order of the model."""
    calls = _Calls(twin, batch)
    heads = heads_of(twin.config)
    kinds: dict[str, set[str]] = {}
    for name, module in twin.named_modules():
        kinds.setdefault(pattern_of(name), set()).add(type(module).__name__)
    found: dict[str, list[dict[str, Style]]] = {}
    for name, module in twin.named_modules():
        if name not in calls.met or not name:
            continue
        ways = list(_ways(twin, name, module, calls, heads))
        if not ways:
            continue
        pattern = pattern_of(name)
        if len(kinds[pattern]) > 1:  # layers of several kinds under one name
            pattern = f"{pattern}:{type(module).__name__}"
        named = [{inside(pattern, own) if own else pattern: style for own, style in way.items()} for way in ways]
        known = found.setdefault(pattern, [{} for _ in named])
        for merged, way in zip(known, named, strict=False):
            for own, style in way.items():
                merged[own] = _joined(merged.get(own), style)
    vocabulary = _vocabulary(twin, calls)
    head = [Candidate(pattern="", tables=(dict.fromkeys(vocabulary, Vocabulary()),))] if vocabulary else []
    return head + [Candidate(pattern=pattern, tables=tuple(ways)) for pattern, ways in found.items()]


def _joined(known: Style | None, style: Style) -> Style:
    """Return the style of modules of one pattern; layers differ in which sinks and which numbers of heads they have."""
    if not (isinstance(known, Attention) and isinstance(style, Attention)):
        return style
    return Attention(
        query=_union(known.query, style.query),
        key_value=_union(known.key_value, style.key_value),
        ratio=_union(known.ratio, style.ratio),
        reads_config=known.reads_config or style.reads_config,
        per_head=_union(known.per_head, style.per_head),
        enters=known.enters or style.enters,
    )


def _union(some: tuple[str, ...], others: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys((*some, *others)))


class _Calls:
    """What one run of a twin showed of its modules.

    Args:
        met: Names of the modules that were called.
        reads: For each linear layer, whether its input is the input of the module that holds it.
        writes: Whether its output is that module's output.
    """

    def __init__(self, twin: PreTrainedModel, batch: Mapping[str, torch.Tensor]) -> None:
        self.met: set[str] = set()
        self._inputs: dict[str, list[torch.Tensor]] = {}
        self._outputs: dict[str, list[torch.Tensor]] = {}
        hooks = []
        for name, module in twin.named_modules():
            hooks.append(module.register_forward_pre_hook(self._on_input(name), with_kwargs=True))
            hooks.append(module.register_forward_hook(self._on_output(name)))
        try:
            twin(**batch)
        finally:
            for hook in hooks:
                hook.remove()

    def _on_input(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            self.met.add(name)
            self._inputs.setdefault(name, [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)])

        return hook

    def _on_output(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self._outputs.setdefault(name, [x for x in tree_leaves(output) if isinstance(x, torch.Tensor)])

        return hook

    def reads(self, parent: str, child: str) -> bool:
        """Return whether a child's input is an input of its parent."""
        return _meet(self._inputs.get(inside(parent, child), [])[:1], self._inputs.get(parent, []))

    def writes(self, parent: str, child: str) -> bool:
        """Return whether a child's output is an output of its parent."""
        return _meet(self._outputs.get(inside(parent, child), [])[:1], self._outputs.get(parent, []))

    def between(self, parent: str, child: str, width: int) -> bool:
        """Return whether a child reads features of a width that is not the width of its parent's inputs."""
        own, outer = (self._inputs.get(name, [])[:1] for name in (inside(parent, child), parent))
        return any(x.dim() > 0 and x.shape[-1] == width for x in own) and not any(
            x.shape[-1:] == (width,) for x in outer
        )


def _meet(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return any(one.data_ptr() == other.data_ptr() and one.numel() == other.numel() for one in some for other in others)


def _ways(
    twin: PreTrainedModel, name: str, module: nn.Module, calls: _Calls, heads: Heads
) -> Iterator[dict[str, Style]]:
    """Yield the ways to shard a module: styles by the name inside it, "" for itself."""
    stacked = _experts(module)
    if stacked is not None:
        yield {"": stacked}
        return
    linears = {
        own: child for own, child in module.named_children() if is_linear(child) and inside(name, own) in calls.met
    }
    if len(linears) < 2 or any(isinstance(child, nn.Conv1d) for child in module.children()):
        return
    rows = [own for own in linears if calls.writes(name, own)] or [own for own in linears if _ROWS.match(own)]
    if len(rows) != 1:
        rows = [own for own in rows if _ROWS.match(own)][-1:]
    if len(rows) != 1:
        return
    [row] = rows
    columns = {own: child for own, child in linears.items() if own != row}
    if _is_attention(module):
        yield from _attention(name, module, columns, row, calls, heads)
        return
    yield from _feed_forward(name, module, columns, row, calls)


def _feed_forward(
    name: str, module: nn.Module, columns: Mapping[str, nn.Module], row: str, calls: _Calls
) -> Iterator[dict[str, Style]]:
    """Yield the way to shard a feed-forward layer by its inner features, if that is what a module is."""
    inner = input_features(module.get_submodule(row))
    weighted = {own: child for own, child in module.named_children() if any(True for _ in child.parameters())}
    if any(
        not is_linear(child) for child in weighted.values()
    ):  # a decoder layer that holds its feed-forward layers itself
        columns = {own: child for own, child in columns.items() if output_features(child) in (inner, 2 * inner)}
    if not columns or not {output_features(child) for child in columns.values()} <= {inner, 2 * inner}:
        return
    if any(value is not None for value in module._parameters.values()):
        return
    styles: dict[str, Style] = {}
    for own, child in weighted.items():
        if own in columns:
            fused = output_features(child) == 2 * inner
            styles[own] = ColumnParallel(parts=("width", "width") if fused else ("width",))
        elif own != row:
            sizes = [weight.shape for weight in child.parameters()]
            if hasattr(child, "variance_epsilon") and sizes == [(inner,)]:
                styles[own] = FeatureNorm(part="width", rounds_before_weight=_rounds_before_weight(child))
            else:
                styles[own] = Replicated(reads_shards=calls.between(name, own, inner))
    yield {**styles, row: RowParallel(part="width")}


def _is_attention(module: nn.Module) -> bool:
    marks = (
        "is_causal",
        "scaling",
        "scale_attn",
        "num_key_value_groups",
        "head_dim",
        "num_heads",
        "n_heads",
        "norm_factor",
        "layer_idx",
    )
    return any(hasattr(module, mark) for mark in marks) and not hasattr(module, "act_fn")


def _attention(
    name: str, module: Any, columns: Mapping[str, nn.Module], row: str, calls: _Calls, heads: Heads
) -> Iterator[dict[str, Style]]:
    """Yield the ways to shard attention by its heads."""
    width = input_features(module.get_submodule(row))
    if heads.query == 1 or width % heads.query:
        return
    of_head = width // heads.query
    styles: dict[str, Style] = {row: RowParallel(part="query")}
    fused: list[str] = []
    for own, child in columns.items():
        length = output_features(child)
        if _FUSED.search(own) and calls.reads(name, own):
            fused.append(own)
        elif _NARROW.search(own) or length % heads.key_value:
            styles[own] = Replicated(reads_shards=True)
        elif _KEY_VALUE.match(own):
            styles[own] = ColumnParallel(parts=("key_value",))
        elif length % heads.query == 0:
            styles[own] = ColumnParallel(parts=("query",))
        else:
            styles[own] = Replicated(reads_shards=True)
    if not fused and not any(isinstance(style, ColumnParallel) for style in styles.values()):
        return
    for own, child in module.named_children():
        if own not in columns and own != row and any(True for _ in child.parameters()):
            styles[own] = _norm(own, child, of_head, heads)
    enters = any(style == Replicated(reads_shards=True) and own in columns for own, style in styles.items()) or any(
        not calls.reads(name, own) for own in columns
    )
    own_parameters = [own for own, value in module._parameters.items() if value is not None]
    per_head = tuple(own for own in own_parameters if module._parameters[own].shape[0] == heads.query)
    enters = enters or len(per_head) < len(own_parameters)
    enters = enters or any(
        _has_matrix(module.get_submodule(own)) for own, style in styles.items() if isinstance(style, Replicated)
    )
    around = _numbers(module, width, heads, per_head=per_head, enters=enters)
    if not fused:
        yield {"": around, **styles}
        return
    three = ColumnParallel(parts=("query", "key_value", "key_value"))
    interleaved = ColumnParallel(parts=("query", "key_value", "key_value"), interleaved=True)
    for style in (three, interleaved):
        yield {"": around, **styles, **dict.fromkeys(fused, style)}


def _has_matrix(module: nn.Module) -> bool:
    return any(weight.dim() > 1 for weight in module.parameters())


def _norm(own: str, child: nn.Module, of_head: int, heads: Heads) -> Style:
    """Return the style of a module between columns and rows: a norm of each head's features, or of those of all heads."""
    [*weights] = [weight for weight in child._parameters.values() if weight is not None]
    part: Feature = "key_value" if re.match(r"k|v", own) else "query"
    count = heads.count(part)
    if weights and all(weight.dim() == 2 and weight.shape[0] == count for weight in weights):
        return PerHead(part=part)
    flat = len(weights) == 1 and weights[0].dim() == 1 and hasattr(child, "variance_epsilon")
    if flat and count > 1 and len(weights[0]) == count * of_head and not list(child.children()):
        return FeatureNorm(part=part, rounds_before_weight=_rounds_before_weight(child))
    return Replicated(reads_shards=True)


def _rounds_before_weight(norm: nn.Module) -> bool:
    """Return whether a norm rounds to the input's dtype before its weight multiplies, as its source says."""
    try:
        text = inspect.getsource(type(norm).forward)
    except (OSError, TypeError):
        return True
    return re.search(r"self\.weight\s*\*\s*\w+\.to\(", text) is not None


def _numbers(module: Any, width: int, heads: Heads, *, per_head: tuple[str, ...], enters: bool) -> Attention:
    """Return the attributes of an attention that count heads or their features."""
    values = {
        name: value for name, value in vars(module).items() if isinstance(value, int) and not isinstance(value, bool)
    }
    query = [name for name in _QUERY_NUMBERS if values.get(name, 0) > 1]
    query += [name for name in _QUERY_WIDTHS if values.get(name) == width]
    key_value = [name for name in _KEY_NUMBERS if values.get(name, 0) > 1]
    try:
        reads_config = _READS_CONFIG.search(inspect.getsource(type(module).forward)) is not None
    except (OSError, TypeError):
        reads_config = False
    return Attention(
        query=tuple(query),
        key_value=tuple(key_value),
        ratio=tuple(name for name in _RATIOS if name in values),
        reads_config=reads_config,
        per_head=per_head,
        enters=enters,
    )


def _experts(module: nn.Module) -> Experts | None:
    """Return the style of stacked experts; None for any other module."""
    own = {name: weight for name, weight in module._parameters.items() if weight is not None}
    up = "gate_up_proj" if "gate_up_proj" in own else "up_proj"
    if up not in own or "down_proj" not in own or own[up].dim() != 3 or own["down_proj"].dim() != 3:
        return None
    if own.keys() - {up, "gate_proj", "down_proj", f"{up}_bias", "down_proj_bias"}:
        return None
    (_, first, second), (_, third, fourth) = own[up].shape, own["down_proj"].shape
    times = 2 if up == "gate_up_proj" else 1
    if second == third and first == times * fourth:
        transposed = False
    elif first == fourth and second == times * third:
        transposed = True
    else:
        return None
    interleaved = up == "gate_up_proj" and not getattr(module, "is_concatenated", True)
    passes = tuple(name for name, child in module.named_children() if isinstance(child, nn.Identity))
    return Experts(transposed=transposed, interleaved=interleaved, passes=passes)


def _vocabulary(twin: PreTrainedModel, calls: _Calls) -> list[str]:
    ends = (twin.get_input_embeddings(), twin.get_output_embeddings())
    return [
        name
        for name, module in twin.named_modules()
        if any(module is end for end in ends)
        and name in calls.met
        and (is_linear(module) or type(module) is nn.Embedding or hasattr(module, "embed_scale"))
    ]
