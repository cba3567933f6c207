"""From the trace of a pruned model to that of the whole model, by repeating traced layers for all that they represent.

This is exact: a segment is what each of its layers does, except for memory that crosses between the layers and their
surroundings. What all layers share is released once, by the layer that needs it last; what each layer passes beyond its
neighbours, such as router logits, is released as often as there are layers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch

from toolkit.memory.kernels.operations import Operation, OperationRecorder
from toolkit.memory.trace.events import LayerRef, Marker, Parameter, Release, ResolvedEvent, Run, TracedEvent, join
from toolkit.memory.trace.representatives import LayerStack
from toolkit.memory.trace.segments import Locator, Segment
from toolkit.tensor_parallel.apply import parameter_shards
from toolkit.tensor_parallel.layout import Shard

T = TypeVar("T")


def expand(segments: Sequence[Segment], stacks: Sequence[LayerStack], *, backward: bool) -> tuple[ResolvedEvent, ...]:
    """Return the events of the whole model.

    Args:
        segments: Segments of the pruned model, in the order in which they ran.
        stacks: Layers of the pruned model.
        backward: Whether the layers run from last to first.
    """
    return tuple(join(_stretch(segments, stacks, backward=backward)))


def _stretch(segments: Sequence[Segment], stacks: Sequence[LayerStack], *, backward: bool) -> Iterator[ResolvedEvent]:
    if all(len(stack.kept) == stack.num_layers for stack in stacks):
        for segment in segments:
            yield from _as_traced(segment, stacks)
        return
    for index, group in itertools.groupby(segments, key=lambda segment: segment.owner and segment.owner[0]):
        if index is None:
            for segment in group:
                yield from _outside(segment.events, stacks)
            continue
        mine: dict[int, list[TracedEvent]] = {}
        for segment in group:
            assert segment.owner is not None
            mine.setdefault(segment.owner[1], []).extend(segment.events)
        yield from _layers(mine, stacks, index, backward=backward)


def _as_traced(segment: Segment, stacks: Sequence[LayerStack]) -> Iterator[ResolvedEvent]:
    """Yield a segment of a model whose layers were all traced."""
    for event in segment.events:
        if isinstance(event, Release):
            yield _released(event, 1)
        elif isinstance(event, Marker):
            owner = segment.owner
            yield _placed(event, stacks, owner and owner[0], 0 if owner is None else owner[1])
        else:
            yield ResolvedEvent(event)


def _outside(events: Iterable[TracedEvent], stacks: Sequence[LayerStack]) -> Iterator[ResolvedEvent]:
    for event in events:
        if isinstance(event, Release):
            yield _released(event, _count(event.birth, stacks))
        elif isinstance(event, Marker):
            yield _placed(event, stacks, None, 0)
        else:
            yield ResolvedEvent(event)


def _layers(
    mine: dict[int, list[TracedEvent]], stacks: Sequence[LayerStack], at: int, *, backward: bool
) -> Iterator[ResolvedEvent]:
    stack = stacks[at]
    order = range(stack.num_layers)
    # Something that layers share is released by the last of them to run: in the backward pass by the first layer.
    final = {position: layer for layer, position in enumerate(stack.stands_for)}
    if backward:
        final = {position: layer for layer, position in reversed(list(enumerate(stack.stands_for)))}
    for layer in reversed(order) if backward else order:
        position = stack.stands_for[layer]
        for event in mine.get(position, []):
            if isinstance(event, Release):
                if event.birth is not None and event.birth[0] == at and stack.count(event.birth[1]) > 1:
                    yield _released(event, 1)
                elif final[position] == layer:
                    yield _released(event, _count(event.birth, stacks))
            elif isinstance(event, Marker):
                yield _placed(event, stacks, at, layer)
            else:
                yield ResolvedEvent(event)
    for position, events in mine.items():
        if position not in final:  # a layer traced as a neighbour of others may be the one that releases it
            shared = (event for event in events if isinstance(event, Release))
            yield from (_released(event, _count(event.birth, stacks)) for event in shared)


def _placed(mark: Marker, stacks: Sequence[LayerStack], at: int | None, layer: int) -> ResolvedEvent:
    """Return a mark with its absolute name, which replaces its place among the traced layers."""
    own = mark if mark.place is None else replace(mark, place=None)
    return ResolvedEvent(own, _name(mark, stacks, at, layer))


def _name(mark: Marker, stacks: Sequence[LayerStack], at: int | None, layer: int) -> str:
    """Return a mark's absolute name, where layer `layer` of stack `at` runs."""
    if mark.place is not None:
        stack = stacks[mark.place[0]]
        owner = f"{stack.prefix}.{stack.kept[mark.place[1]]}"
    elif mark.layer is None or at is None:
        return mark.name
    else:
        owner = f"{stacks[at].prefix}.{stacks[at].first + layer + mark.layer}"
    return f"{owner}.{mark.name}" if mark.name else owner


def _released(release: Release, times: int) -> ResolvedEvent:
    return ResolvedEvent(Run(0, (), ((release.cause, -release.size * times),) if times else ()))


def _count(birth: LayerRef, stacks: Sequence[LayerStack]) -> int:
    """Return how often the whole model allocates what the pruned one allocates once."""
    return 1 if birth is None else stacks[birth[0]].count(birth[1])


def expand_parameters(model: Any, stacks: Sequence[LayerStack]) -> tuple[Parameter, ...]:
    """Return the whole model's parameters in its own order: a layer's are those of the layer that represents it."""
    shards = parameter_shards(model)
    named = ((name, _parameter(parameter, shards.get(name))) for name, parameter in model.named_parameters())
    return tuple(
        replace(parameter, name=name, module=name.rpartition(".")[0]) for name, parameter in _repeated(named, stacks)
    )


def expand_buffers(model: Any, stacks: Sequence[LayerStack]) -> int:
    """Return the bytes of the whole model's buffers."""
    return sum(buffer.nbytes for _, buffer in _repeated(model.named_buffers(), stacks))


def expand_paths(paths: Iterable[str], stacks: Sequence[LayerStack]) -> tuple[str, ...]:
    """Return the paths of modules in the whole model."""
    return tuple(path.rstrip(".") for path, _ in _repeated(((path, None) for path in paths), stacks))


def expand_host_copies(copies: Iterable[tuple[LayerRef, int]], stacks: Sequence[LayerStack]) -> tuple[int, ...]:
    """Return the bytes of each tensor that the whole model keeps on the host."""
    return tuple(size for owner, size in copies for _ in range(_count(owner, stacks)))


def expand_operations(recorder: OperationRecorder, stacks: Sequence[LayerStack]) -> tuple[Operation, ...]:
    """Return the operations of the whole model."""
    return recorder.expanded(lambda owner: _count(owner, stacks))


def _repeated(named: Iterable[tuple[str, T]], stacks: Sequence[LayerStack]) -> Iterator[tuple[str, T]]:
    locate = Locator(stacks)
    order: list[tuple[str, T] | int] = []
    inside: dict[int, dict[int, list[tuple[str, T]]]] = {}
    for name, value in named:
        where = locate(name)
        if where is None:
            order.append((name, value))
            continue
        stack, position, rest = where
        if stack not in inside:
            order.append(stack)
        inside.setdefault(stack, {}).setdefault(position, []).append((rest, value))
    for entry in order:
        if not isinstance(entry, int):
            yield entry
            continue
        for layer, position in enumerate(stacks[entry].stands_for):
            for rest, value in inside[entry].get(position, []):
                yield f"{stacks[entry].prefix}.{stacks[entry].first + layer}.{rest}", value


def _parameter(parameter: torch.Tensor, shard: Shard | None) -> Parameter:
    """Return a parameter without its path."""
    numel = parameter.numel()
    return Parameter(
        name="",
        numel=numel,
        itemsize=parameter.element_size(),
        trainable=parameter.requires_grad,
        module="",
        shape=tuple(parameter.shape),
        dense_numel=numel if shard is None else numel // parameter.shape[shard.dim] * shard.dense_length,
    )
