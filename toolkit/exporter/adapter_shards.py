"""How the tensors of a `peft.PeftModel` are cut, from how those of its base are.

Y = X·Wᵀ + s·X·Aᵀ·Bᵀ: B (out, r) is cut as the output of W (out, in) is, A (r, in) as its input; the other is whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from toolkit.exporter.adapter import LoraTarget, base_key, factor_of
from toolkit.tensor_parallel.layout import Shard


def adapted_shards(
    names: Iterable[str], base: Mapping[str, Shard], targets: Mapping[str, LoraTarget]
) -> dict[str, Shard]:
    """Return how each tensor is cut, by its name in a checkpoint; whole ones are left out.

    Args:
        names: Of the checkpoint's tensors.
        base: The same of the base model, by its names.
        targets: From `lora_targets`.
    """
    factors = {(target.module, letter): shard for target, letter, shard in _factors(base, targets)}
    shards = {}
    for name in names:
        factor = factor_of(name)
        shard = base.get(base_key(name)) if factor is None else factors.get(factor)
        if shard is not None:
            shards[name] = shard
    return shards


def _factors(base: Mapping[str, Shard], targets: Mapping[str, LoraTarget]) -> Iterable[tuple[LoraTarget, str, Shard]]:
    """Yield the one of A and B that is cut, for each weight that is."""
    for key, target in targets.items():
        shard = base.get(key)
        if shard is not None:
            is_output = shard.dim == target.output_dim
            dim = 0 if is_output else 1
            yield (
                target,
                "B" if is_output else "A",
                Shard(dim=dim, layout=shard.layout, dense_length=shard.dense_length),
            )
