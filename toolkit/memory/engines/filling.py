"""What lies beside a model's weights while they are drawn, read, packed and given adapters, before the engine has them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from toolkit.memory.engines.settings import EngineSettings
from toolkit.memory.trace.events import Parameter

FP32_ITEMSIZE = 4
# Names in transformers: of embeddings that FSDP2 gathers by themselves, and of all embeddings and output projections of decoders.
_EMBEDDINGS = ("embed_in", "embed_tokens", "wte", "wpe", "word_embeddings", "tok_embeddings")
EMBEDDINGS_AND_HEADS = ("embed_tokens", "embed_in", "embed_positions", "wte", "wpe", "lm_head", "embed_out")


def filling_bytes(parameters: Iterable[Parameter], settings: EngineSettings, *, shards: bool) -> int:
    """Return the most bytes of whole weights that are on the card beside the model's own while it is filled.

    Weights of shards and packed ones are drawn layer by layer, in the training precision, or sent whole one by one; others are in
    their places at once. DeepSpeed resets the peak when it starts, so that under ZeRO none of it is seen.

    Args:
        parameters: Of the model with its adapters.
        settings: Settings of the engine.
        shards: Whether ranks hold shards of the weights.

    Source:
        toolkit/modeling/initialization.py _draw_unit; toolkit/modeling/weights.py _sent, which is fp32 for fp32 shards.
    """
    base = [parameter for parameter in parameters if not _is_adapter(parameter)]
    if not shards and not any(map(_is_packed, base)):
        return 0
    if settings.drawn:
        units: defaultdict[str, int] = defaultdict(int)
        for parameter in base:
            units[group_of(parameter.module)] += _whole_numel(parameter) * settings.itemsize
        return max(units.values(), default=0)
    sent = [0]
    for parameter in base:
        if _is_packed(parameter):
            sent.append(_whole_numel(parameter) * settings.itemsize + parameter.size)
        elif shards:
            sent.append(parameter.numel * (FP32_ITEMSIZE if parameter.trainable else parameter.itemsize))
    return max(sent)


def adapter_bytes(parameters: Iterable[Parameter]) -> int:
    """Return the bytes of LoRA's matrices, which are made when the weights are there."""
    return sum(parameter.size for parameter in parameters if _is_adapter(parameter))


def decomposed_bytes(parameters: Iterable[Parameter]) -> int:
    """Return the bytes of the largest weight that PiSSA decomposes, in fp32, and of its vectors (peft tuners/lora/layer.py pissa_init)."""
    frozen = (p for p in parameters if not p.trainable and len(p.shape) == 2)
    sizes = (2 * p.numel + min(p.shape) ** 2 for p in frozen if not p.module.endswith(EMBEDDINGS_AND_HEADS))
    return FP32_ITEMSIZE * max(sizes, default=0)


def errors_bytes(trainable: Sequence[Parameter], *, itemsize: int) -> int:
    """Return the bytes of what all packed layers keep of their errors, in fp32, and of the largest error that is decomposed.

    Beside it are the whole weight, in training precision, and that unpacked once more, or four squares of the shorter side: the
    product, its eigenvectors and LAPACK's two (toolkit/modeling/nf4.py; ssyevd).
    """
    adapters = [parameter for parameter in trainable if _is_adapter(parameter)]
    lengths = {parameter.name: parameter.shape[".lora_A." in parameter.name] for parameter in adapters}
    most = 0
    for name in (name for name in lengths if ".lora_A." in name):
        sides = sorted((lengths[name], lengths[name.replace(".lora_A.", ".lora_B.")]))
        numel = sides[0] * sides[1]
        rest = max(itemsize * numel, 4 * FP32_ITEMSIZE * sides[0] ** 2)
        most = max(most, (FP32_ITEMSIZE + itemsize) * numel + rest)
    return FP32_ITEMSIZE * sum(parameter.numel for parameter in adapters) + most


def group_of(module: str) -> str:
    """Return the part of a model that is gathered, drawn and stepped together: a layer, the embedding, or the tail of norm and head.

    >>> group_of("model.layers.3.mlp.down_proj"), group_of("model.embed_tokens"), group_of("lm_head")
    ('model.layers.3', 'embedding', 'tail')
    """
    parts = module.split(".")
    for index, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: index + 1])
    return "embedding" if any(word in module for word in _EMBEDDINGS) else "tail"


def _is_adapter(parameter: Parameter) -> bool:
    return ".lora_A." in parameter.name or ".lora_B." in parameter.name


def _is_packed(parameter: Parameter) -> bool:
    return not parameter.trainable and parameter.itemsize == 1


def _whole_numel(parameter: Parameter) -> int:
    """Return the numbers of a weight, of which a byte of a packed one has two."""
    return parameter.numel * (2 if _is_packed(parameter) else 1)
