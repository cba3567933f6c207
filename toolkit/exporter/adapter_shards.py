"""The tensor-parallel shards of a `peft.PeftModel`, derived from those of its base.

Y = X·Wᵀ + s·X·Aᵀ·Bᵀ: B (out, r) is sharded like the output of W (out, in), A (r, in) like its input; the other is replicated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from toolkit.exporter.adapter import LoraTarget, base_key, factor_of
from toolkit.tensor_parallel.layout import Shard


def adapted_shards(
    names: Iterable[str], base: Mapping[str, Shard], targets: Mapping[str, LoraTarget]
) -> dict[str, Shard]:
    """Return the shard of each sharded tensor, by its name in a checkpoint.

    Args:
        names: Names of the checkpoint's tensors.
        base: Shards of the base model, by its own names.
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
    """Yield the factor, A or B, that is sharded, for each sharded weight."""
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
