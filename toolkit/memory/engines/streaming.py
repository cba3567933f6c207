"""Which weights the toolkit streams from host memory, and what the card holds of them.

Source:
    toolkit/offload/streamed_layers.py StreamedLayers; toolkit/engine/initialize.py place_for_streaming.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

from toolkit.memory.engines.settings import EngineSettings
from toolkit.memory.trace.events import Parameter, in_blocks
from toolkit.planning.offload import STREAMED_LAYERS

_LAYER = re.compile(r".*?\.\d+(?=\.)")


def streamed_layers(parameters: Iterable[Parameter], *, trained: bool) -> dict[str, int]:
    """Return the bytes of the streamed weights of each decoder layer, by its path; of frozen ones, or of trained ones too.

    >>> _LAYER.match("model.layers.10.mlp.experts.3.up_proj.weight").group()
    'model.layers.10'
    """
    found: defaultdict[str, int] = defaultdict(int)
    for parameter in parameters:
        layer = _LAYER.match(parameter.name)
        if layer is not None and (trained or not parameter.trainable):
            found[layer.group()] += parameter.size
    return dict(found)


def flat_on_host(parameters: Iterable[Parameter], settings: EngineSettings) -> bool:
    """Return whether the optimizer's flat weights are in host memory: where trained weights are streamed."""
    return settings.streamed == "all" and any(each.trainable and _LAYER.match(each.name) for each in parameters)


def slot_bytes(layers: Iterable[int]) -> int:
    """Return the bytes of the card's slots for layers of these sizes."""
    sizes = sorted(layers, reverse=True)
    return min(STREAMED_LAYERS, len(sizes)) * in_blocks(max(sizes, default=0))
