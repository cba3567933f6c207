"""Tensor parallelism as a function of an unmodified model."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn

from toolkit.distributed.process_groups import split_group
from toolkit.errors import PlanError, raise_all
from toolkit.introspect import tied_groups
from toolkit.tensor_parallel.autograd import enter_region
from toolkit.tensor_parallel.cross_entropy import VocabParallelCausalLoss
from toolkit.tensor_parallel.decoder import Decoder, find_decoder
from toolkit.tensor_parallel.embedding import VocabParallelEmbedding, embedding_shards, vocabulary_layout
from toolkit.tensor_parallel.experts import expert_shards, shard_experts
from toolkit.tensor_parallel.grad_sync import sum_gradients
from toolkit.tensor_parallel.guard import guard_part
from toolkit.tensor_parallel.layout import Layout, Part, Shard
from toolkit.tensor_parallel.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    column_shards,
    input_features,
    output_features,
    row_shards,
    sharded_parameter,
    share_input,
)
from toolkit.tensor_parallel.norm import ParallelRMSNorm, norm_shards
from toolkit.tensor_parallel.plan import (
    Attention,
    ColumnParallel,
    Experts,
    FeatureNorm,
    Heads,
    PerHead,
    Replicated,
    RowParallel,
    Style,
    TPPlan,
    Vocabulary,
    inside,
    matching,
    regions,
)
from toolkit.tensor_parallel.rng import shard_dropout
from toolkit.tensor_parallel.sequence import shard_sequence
from toolkit.tensor_parallel.validate import problems
from toolkit.tensor_parallel.whole_experts import place_experts, whole_expert_shards

M = TypeVar("M", bound=nn.Module)
# Names that model configurations give to the dropout of attention weights, which acts on shards.
_ATTENTION_DROPOUT = ("attention_dropout", "attn_pdrop")


def apply_tensor_parallel(
    model: M, styles: TPPlan, *, tp_group: dist.ProcessGroup, sequence_parallel: bool = False
) -> M:
    """Shard a dense model in place: from the same model on all ranks of a group to this rank's part of it.

    The model is called as before, on the same batch on all ranks. Its loss, given `labels`, is the dense model's; its logits
    are those of this rank's part of the vocabulary (`gather_scores` joins them). Parameters keep their names. Whatever would
    treat the part as the whole model is refused with a PlanError: DistributedDataParallel and `fully_shard` over ranks of
    `tp_group` (TP_REPLICATED), `save_pretrained` (PART_SAVE), `generate` (PART_GENERATE).

    Args:
        model: Dense model on any device, meta included.
        styles: Table of styles from `tp_plan_for`, or one written by the user.
        tp_group: Ranks that share the model.
        sequence_parallel: Whether activations between the sharded regions are also sharded, along the sequence, whose
            length the ranks must divide (TP_SEQUENCE at the call). Hidden states that a call returns are then shards.

    Returns:
        The same model.

    Raises:
        PlanError: TP_HEADS, TP_DIVISIBILITY if the ranks cannot share the model; TP_STYLE_UNUSED, TP_STYLE_KIND,
            TP_PLAN_SHAPE, TP_PLAN_INCOMPLETE, TP_STYLE_TIED if the table does not fit the model. All are raised together,
            and the model is unchanged. Then TP_SEQUENCE_ARCHITECTURE if the sequence cannot be sharded.
        ValueError: If the model is already sharded, or split into pipeline stages: shard before splitting.
    """
    if hasattr(model, "pipeline_cut"):
        raise ValueError(
            "the model is a stage of a pipeline: shard before splitting: apply_tensor_parallel, then split_model"
        )
    if parameter_shards(model):
        raise ValueError("the model is already sharded")
    raise_all(PlanError, problems(model, styles, num_ranks=tp_group.size()))
    found = _found(model, styles)
    decoder = find_decoder(model, found) if sequence_parallel else None
    tied = tied_groups(model)
    builder = _Builder(styles, tp_group, decoder)
    for name, style in found.items():
        builder.shard(model, name, style)
    for first, *others in tied:
        for other in others:
            _set_parameter(model, other, model.get_parameter(first))
    if decoder is None:
        _join_regions(model, found, tp_group)
    else:
        shard_sequence(model, decoder, found, tp_group=tp_group)
    if isinstance(_head(model), ColumnParallelLinear):
        model.loss_function = VocabParallelCausalLoss(tp_group=tp_group)  # type: ignore[assignment]
    if tp_group.size() > 1:
        held_part = f"its shard of each layer, one of {tp_group.size()} tensor-parallel ranks"
        guard_part(model, held_part=held_part, tp_group=tp_group)
    return model


def _join_regions(model: nn.Module, found: dict[str, Style], tp_group: dist.ProcessGroup) -> None:
    """Let the columns of a region compute together, and give each rank its own random state inside it."""
    for region in regions(found):
        columns = [model.get_submodule(name) for name in region.columns]
        around = found.get(region.parent)
        if isinstance(around, Attention) and around.enters:
            for column in columns:  # of several inputs, whose gradients are summed where they enter
                share_input([column] if isinstance(column, ColumnParallelLinear) else [], reads="gathered")
        else:
            share_input([column for column in columns if isinstance(column, ColumnParallelLinear)])
        if _drops_attention(model):
            parent, row = model.get_submodule(region.parent), model.get_submodule(region.rows[0])
            shard_dropout(parent, columns=columns, row=row, tp_group=tp_group)


def per_head_shards(module: nn.Module, names: Iterable[str], count: int) -> dict[str, Shard]:
    """Return how parameters with an element of their first dimension for each of `count` heads are sharded."""
    layout = Layout(parts=(Part(num_units=count),))
    present = [name for name in names if module._parameters.get(name) is not None]
    return {name: Shard(dim=0, layout=layout, dense_length=count) for name in present}


def parameter_shards(model: nn.Module) -> dict[str, Shard]:
    """Return how each sharded parameter of a model is sharded, by name; whole parameters are left out."""
    return {
        inside(name, own): shard
        for name, module in model.named_modules()
        for own, shard in getattr(module, "shards", {}).items()
        if module._parameters.get(own) is not None
    }


def dense_shards(model: nn.Module, styles: TPPlan, *, num_ranks: int) -> dict[str, Shard]:
    """Return how `apply_tensor_parallel` would shard each parameter of a dense model, by name; whole ones are left out.

    Args:
        model: Dense model on any device, meta included; it is not changed.
        styles: Table of its styles.
        num_ranks: Number of tensor ranks that would share it.

    Raises:
        PlanError: As in `apply_tensor_parallel`.
    """
    raise_all(PlanError, problems(model, styles, num_ranks=num_ranks))
    shards: dict[str, Shard] = {}
    for name, style in _found(model, styles).items():
        module = model.get_submodule(name)
        own = _shards_of(module, style, styles.heads, num_ranks)
        shards |= {inside(name, key): shard for key, shard in own.items() if module._parameters.get(key) is not None}
    return shards


def _shards_of(module: Any, style: Style, heads: Heads, num_ranks: int) -> dict[str, Shard]:
    match style:
        case ColumnParallel():
            return column_shards(module, _layout(module, style, heads, num_ranks))
        case RowParallel():
            return row_shards(module, _layout(module, style, heads, num_ranks))
        case Vocabulary() if isinstance(module, nn.Embedding):
            return embedding_shards(module, num_ranks)
        case Vocabulary():
            return column_shards(module, _layout(module, style, heads, num_ranks))
        case FeatureNorm():
            return norm_shards(_layout(module, style, heads, num_ranks))
        case Experts():
            return whole_expert_shards(module) if style.whole else expert_shards(module, style)
        case PerHead():
            return per_head_shards(module, list(module._parameters), heads.count(style.part))
        case Attention():
            return per_head_shards(module, style.per_head, heads.query)
        case Replicated():
            return {}


def _layout(
    module: nn.Module, style: ColumnParallel | RowParallel | FeatureNorm | Vocabulary, heads: Heads, num_ranks: int
) -> Layout:
    """Return the layout of the dimension along which a style shards a module."""
    match style:
        case ColumnParallel():
            return style.layout(output_features(module), heads)
        case RowParallel():
            return style.layout(input_features(module), heads)
        case FeatureNorm():
            return style.layout(len(module.get_parameter("weight")), heads)
        case Vocabulary():
            return vocabulary_layout(output_features(module), num_ranks)


class _Builder:
    """Replaces a module by its sharded counterpart, or shards it in place."""

    def __init__(self, styles: TPPlan, tp_group: dist.ProcessGroup, decoder: Decoder | None) -> None:
        self._heads = styles.heads
        self._group = tp_group
        self._decoder = decoder
        has_heads = any(
            isinstance(style, ColumnParallel) and "key_value" in style.parts for style in styles.table.values()
        )
        shared = has_heads and styles.heads.key_value < tp_group.size()
        self._replica_group = split_group(tp_group, styles.heads.key_value) if shared else None

    def shard(self, model: nn.Module, name: str, style: Style) -> None:
        module = model.get_submodule(name)
        match style:
            case Vocabulary() if isinstance(module, nn.Embedding):
                model.set_submodule(name, VocabParallelEmbedding(module, tp_group=self._group))
            case ColumnParallel() | RowParallel() | Vocabulary() | FeatureNorm():
                layout = _layout(module, style, self._heads, self._group.size())
                model.set_submodule(name, self._of_layout(module, name, style, layout))
            case Experts(whole=True):
                on_pieces = self._decoder is not None and self._decoder.acts_on_pieces(name)
                place_experts(module, tp_group=self._group, sequence_parallel=on_pieces)
            case Experts():
                shard_experts(module, style, tp_group=self._group)
            case Replicated(reads_shards=True):
                for inner in module.modules():
                    sum_gradients(inner, inner._parameters, group=self._group)
            case PerHead() | Attention():
                self._take_heads(module, style)

    def _of_layout(self, module: nn.Module, name: str, style: Style, layout: Layout) -> nn.Module:
        match style:
            case RowParallel():
                to_piece = self._decoder is not None and self._decoder.outputs_shard(name)
                return RowParallelLinear(module, layout, tp_group=self._group, sequence_parallel=to_piece)
            case Vocabulary():
                return ColumnParallelLinear(module, layout, tp_group=self._group)
            case FeatureNorm():
                return ParallelRMSNorm(
                    module,
                    layout,
                    tp_group=self._group,
                    replica_group=self._replica_group,
                    rounds_before_weight=style.rounds_before_weight,
                )
        return ColumnParallelLinear(module, layout, tp_group=self._group, replica_group=self._replica_group)

    def _take_heads(self, module: Any, style: PerHead | Attention) -> None:
        """Reduce a module's own parameters for each head, and its numbers of heads, to those of this rank."""
        shards = _shards_of(module, style, self._heads, self._group.size())
        if shards:
            module.shards = shards
        for name, shard in shards.items():
            module.register_parameter(name, sharded_parameter(module._parameters[name], shard, tp_group=self._group))
        if isinstance(style, PerHead):
            if self._replica_group is not None and style.part == "key_value":
                sum_gradients(module, shards, group=self._replica_group)
            return
        self._localise(module, style)
        if style.enters:
            rest = [name for name in module._parameters if name not in shards]
            sum_gradients(module, rest, group=self._group)
            enter_region(module, tp_group=self._group)

    def _localise(self, module: Any, style: Attention) -> None:
        size, own = self._group.size(), self._heads.on_rank(self._group.size())
        replicas = max(1, size // self._heads.key_value)  # a key head on several ranks has fewer queries on each
        shares = {**dict.fromkeys((*style.query, *style.key_value), size), **dict.fromkeys(style.ratio, replicas)}
        for name, share in shares.items():
            if hasattr(module, name):  # layers of one pattern may differ in them
                setattr(module, name, max(1, getattr(module, name) // share))
        if style.reads_config:
            module.config = copy.copy(module.config)
            module.config.num_attention_heads, module.config.num_key_value_heads = own.query, own.key_value


def _found(model: nn.Module, styles: TPPlan) -> dict[str, Style]:
    return {name: style for pattern, style in styles.table.items() for name in matching(model, pattern)}


def _drops_attention(model: nn.Module) -> bool:
    config = getattr(model, "config", None)
    return any(getattr(config, name, 0) for name in _ATTENTION_DROPOUT)


def _head(model: nn.Module) -> nn.Module | None:
    find = getattr(model, "get_output_embeddings", None)
    return None if find is None else find()


def _set_parameter(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    owner, _, own = name.rpartition(".")
    model.get_submodule(owner).register_parameter(own, parameter)
