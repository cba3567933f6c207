"""The units of a model: its parts in the order in which a forward pass reads their weights, and calls before each is read.

Unit 0 is what stands before the decoder layers, such as the embeddings; the layers follow, from 1 on, and after them the last unit is the
rest: the final norm and the head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from toolkit.introspect import decoder_layers


def units_of(model: nn.Module) -> dict[nn.Parameter, int]:
    """Return the unit of the model that reads each weight first."""
    layers = decoder_layers(model)
    find: Any = getattr(model, "get_input_embeddings", None)
    embeddings = None if find is None else find()
    units = dict.fromkeys(embeddings.parameters() if isinstance(embeddings, nn.Module) else (), 0)
    for number, layer in enumerate(layers, start=1):
        for weight in layer.parameters():
            units.setdefault(weight, number)
    outside = 0  # until the first layer's weights have passed
    for weight in model.parameters():
        if units.setdefault(weight, outside) > 0:
            outside = len(layers) + 1
    return units


def call_before_units(model: nn.Module, call: Callable[[int], None]) -> Iterator[Callable[[], None]]:
    """Call a function with the number of each unit before a forward pass reads it; yield what takes the calls off again.

    Without decoder layers there is one call, for all of the model.
    """
    layers = decoder_layers(model)
    last = len(layers) + 1

    def first(module: nn.Module, given: Any) -> None:
        call(0 if layers else last)

    def rest(module: nn.Module, given: Any, output: Any) -> None:
        call(last)

    yield model.register_forward_pre_hook(first).remove
    for number, layer in enumerate(layers, start=1):
        yield _before(layer, lambda number=number: call(number))  # type: ignore[misc]
    if layers:
        yield layers[-1].register_forward_hook(rest).remove


def call_before_passes(model: nn.Module, call: Callable[[], None]) -> Iterator[Callable[[], None]]:
    """Call a function before each module that runs all decoder layers, outermost first; yield what takes the calls off again.

    Such a module may be inside of another: `generate` of PEFT's model calls the one that it wraps alone.
    """
    layers = set(decoder_layers(model))
    for module in model.modules():
        if layers and layers <= set(module.modules()) and module not in layers:
            yield module.register_forward_pre_hook(lambda module, given: call()).remove


def _before(layer: nn.Module, call: Callable[[], None]) -> Callable[[], None]:
    """Call a function before each forward pass of a layer, outside of its compiled code; return what takes it off."""
    compiled: Any = layer._compiled_call_impl
    if compiled is None:
        return layer.register_forward_pre_hook(lambda module, given: call()).remove

    def wait_and_run(*args: Any, **kwargs: Any) -> Any:
        call()
        return compiled(*args, **kwargs)

    layer._compiled_call_impl = wait_and_run

    def restore() -> None:
        layer._compiled_call_impl = compiled

    return restore
