"""The layers of a pipeline's rank, and the few of them and of other ranks' layers that its trace needs."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from toolkit.memory.trace.representatives import (
    LayerStack,
    Numbering,
    copy_pruned,
    kinds_of,
    layer_types,
    numbering_of,
    prune_layers,
    select_representatives,
)
from toolkit.pipeline_parallel import StageSpec
from toolkit.pipeline_parallel.decoder_layout import find_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruned:
    """The layers of a model in a stage's trace.

    Args:
        kept: Original indices, ascending: the stage's own, and some of other stages, which exist and do not run.
        stacks: One stack per chunk.
        part: The rank's part of the pruned model.
    """

    kept: tuple[int, ...]
    stacks: tuple[LayerStack, ...]
    part: StageSpec


def choose(prefix: str, kinds: Sequence[Hashable], types: Sequence[Hashable], part: StageSpec) -> Pruned:
    """Choose few layers of each chunk that represent all, and those of other stages that affect what a pass computes.

    The latter are those where hidden states enter and leave, and one of each kind that the configuration lists, since
    models make a mask and rotary tables for each kind that they have.

    Args:
        prefix: Path of the list of layers.
        kinds: Kind of each layer of the model.
        types: Entries of each layer in the configuration.
        part: Layers of the rank.
    """
    shortened = [select_representatives([kinds[index] for index in chunk]) for chunk in part.chunks]
    own = [[chunk.start + index for index in kept] for chunk, (kept, _) in zip(part.chunks, shortened, strict=True)]
    absent = {chunk.start - 1 for chunk in part.chunks} | {chunk.stop for chunk in part.chunks}
    absent &= set(range(part.num_layers))
    seen = {types[index] for indices in (*own, absent) for index in indices}
    for index, found in enumerate(types):
        if found not in seen:
            seen.add(found)
            absent.add(index)
    return _pruned(prefix, part, own, [stands_for for _, stands_for in shortened], absent)


def choose_all(prefix: str, part: StageSpec) -> Pruned:
    """Return a choice of all layers."""
    own = [list(chunk) for chunk in part.chunks]
    others = {index for index in range(part.num_layers) if not part.owns(index)}
    return _pruned(prefix, part, own, [tuple(range(len(chunk))) for chunk in part.chunks], others)


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeModel:
    """A model on the meta device of which stages are copied, and what is known of its layers.

    Args:
        model: The model, its weights not tied yet.
        prefix: Path of its list of layers.
        kinds: Number of each layer's kind.
        types: Entries of each layer in the configuration.
        numbering: Attributes that number the layers.
    """

    model: Any
    prefix: str
    kinds: tuple[int, ...]
    types: tuple[Hashable, ...]
    numbering: Numbering

    @classmethod
    def of(cls, model: Any) -> WholeModel:
        """Read the layers of a model."""
        prefix = find_layers(model)
        layers: Any = model.get_submodule(prefix)
        numbers: dict[Hashable, int] = {}
        return cls(
            model=model,
            prefix=prefix,
            kinds=tuple(numbers.setdefault(kind, len(numbers)) for kind in kinds_of(model, layers)),
            types=tuple(layer_types(model, len(layers))),
            numbering=numbering_of(layers),
        )

    def part(
        self, part: StageSpec, *, checkpointed: Sequence[nn.Module]
    ) -> tuple[Any, list[LayerStack], StageSpec, list[nn.Module]]:
        """Return a copy with what a stage's trace needs, its layers, the rank's part of it, and the copies of layers that recompute.

        Args:
            part: Layers of the rank.
            checkpointed: Layers of this model that recompute.
        """
        layers: Any = self.model.get_submodule(self.prefix)
        recompute = set(map(id, checkpointed))
        kinds = [(kind, id(layer) in recompute) for kind, layer in zip(self.kinds, layers, strict=True)]
        chosen = choose(self.prefix, kinds, self.types, part)
        kept = LayerStack(prefix=self.prefix, kept=chosen.kept, stands_for=tuple(range(part.num_layers)))
        along = [layers[index] for index in chosen.kept if id(layers[index]) in recompute]
        made, few = copy_pruned(self.model, kept, self.numbering, along)
        return made, list(chosen.stacks), chosen.part, few


def prune_to_part(
    model: nn.Module, part: StageSpec, *, all_layers: bool, checkpointed: Sequence[nn.Module]
) -> tuple[list[LayerStack], StageSpec]:
    """Prune a whole model to what a stage's trace needs, and return its layers and the rank's part of it.

    Args:
        model: Whole model on the meta device.
        part: Layers of the rank.
        all_layers: Whether to keep every layer of the rank.
        checkpointed: Layers that recompute.
    """
    prefix = find_layers(model)
    layers: Any = model.get_submodule(prefix)
    chosen = choose_all(prefix, part)
    if not all_layers:
        chosen = choose(
            prefix, kinds_of(model, layers, checkpointed=checkpointed), layer_types(model, len(layers)), part
        )
    prune_layers(model, [LayerStack(prefix=prefix, kept=chosen.kept, stands_for=tuple(range(part.num_layers)))])
    return list(chosen.stacks), chosen.part


def _pruned(
    prefix: str, part: StageSpec, own: list[list[int]], stands_for: list[tuple[int, ...]], absent: set[int]
) -> Pruned:
    kept = tuple(sorted({index for indices in own for index in indices} | absent))
    offsets = [kept.index(indices[0]) for indices in own]
    stacks = tuple(
        LayerStack(prefix=prefix, kept=tuple(indices), stands_for=represented, first=chunk.start, offset=offset)
        for indices, represented, chunk, offset in zip(own, stands_for, part.chunks, offsets, strict=True)
    )
    chunks = tuple(range(offset, offset + len(indices)) for indices, offset in zip(own, offsets, strict=True))
    return Pruned(kept=kept, stacks=stacks, part=StageSpec(chunks=chunks, num_layers=len(kept)))
