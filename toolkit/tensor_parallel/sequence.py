"""Sequence parallelism: between the tensor-parallel regions of a decoder, each rank has a shard of the sequence.

The embedding returns the whole sequence, of which the first layer takes this rank's shard; after the final norm it is whole
again. A region gathers its input and reduce-scatters its output, in place of an all-reduce of the output and one of the
input's gradient. So the activations of norms, residuals and dropout are sharded; masks, rotary tables and positions stay
whole, as attention needs them.

Source:
    arXiv 2205.05198, section 4.2.2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from toolkit.errors import PlanError
from toolkit.tensor_parallel.autograd import SEQUENCE_DIM, gather_from_region, scatter_to_region
from toolkit.tensor_parallel.decoder import Decoder
from toolkit.tensor_parallel.grad_sync import sum_gradients
from toolkit.tensor_parallel.linear import ColumnParallelLinear, share_input
from toolkit.tensor_parallel.plan import Style, regions
from toolkit.tensor_parallel.rng import TensorParallelRNG


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """How ranks shard the sequence between the layers; `sequence_pieces` of the list of layers, for pipeline stages.

    Args:
        tp_group: Ranks that each have a shard.
        random_region: Random state from the first layer's input to the output of the last module on a sharded sequence,
            where ranks draw different numbers; None if nothing is drawn.
    """

    tp_group: dist.ProcessGroup
    random_region: TensorParallelRNG | None


def shard_sequence(
    model: nn.Module, decoder: Decoder, found: Mapping[str, Style], *, tp_group: dist.ProcessGroup
) -> None:
    """Shard the sequence of a model whose modules are already sharded."""
    for region in regions(found):
        columns = [model.get_submodule(name) for name in region.columns]
        own = [column for column in columns if isinstance(column, ColumnParallelLinear)]
        shared = share_input(own, reads=decoder.reads(region))
        if region.parent in decoder.gathering:
            _on_input(model.get_submodule(region.parent), shared.gather)
    for name in decoder.whole:
        _on_input(model.get_submodule(name), lambda x: gather_from_region(x, dim=SEQUENCE_DIM, tp_group=tp_group))
        _on_output(model.get_submodule(name), lambda x: scatter_to_region(x, dim=SEQUENCE_DIM, tp_group=tp_group))
    for name in decoder.on_pieces:
        for inner, module in model.get_submodule(name).named_modules(prefix=name):
            if decoder.acts_on_pieces(inner) and not hasattr(module, "shards"):  # a row's bias has a whole gradient
                sum_gradients(module, module._parameters, group=tp_group)
    _cut_and_join(model, decoder, tp_group)


def _cut_and_join(model: nn.Module, decoder: Decoder, tp_group: dist.ProcessGroup) -> None:
    """Shard the sequence before the first layer and gather it after the last module; ranks draw differently in between."""
    first, end = model.get_submodule(decoder.layers[0]), model.get_submodule(decoder.end)
    region = TensorParallelRNG(tp_group)

    def cut(x: torch.Tensor) -> torch.Tensor:
        check_length(x.shape[SEQUENCE_DIM], tp_group.size())
        if decoder.drops:
            region.forget()  # a recomputed first layer never reaches the end, which would leave the region
            if first.training:
                region.enter(x.device)
        return scatter_to_region(x, dim=SEQUENCE_DIM, tp_group=tp_group)

    def joined(piece: torch.Tensor) -> torch.Tensor:
        if decoder.drops:
            region.leave()
        return gather_from_region(piece, dim=SEQUENCE_DIM, tp_group=tp_group)

    _on_input(first, cut)
    _on_output(end, joined)
    layers: Any = model.get_submodule(decoder.layers[0].rpartition(".")[0])
    layers.sequence_pieces = Pieces(tp_group=tp_group, random_region=region if decoder.drops else None)


def _on_input(module: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Change the first argument of a module, which is the hidden states everywhere in transformers."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        if args:
            return (change(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": change(kwargs["hidden_states"])}

    module.register_forward_pre_hook(hook, with_kwargs=True)


def _on_output(module: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Change the output of a module, or the first of several outputs."""

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)

    module.register_forward_hook(hook)


def check_length(length: int, num_ranks: int) -> None:
    """Refuse a sequence that cannot be divided into equal shards.

    Raises:
        PlanError: TP_SEQUENCE if the ranks do not divide the length.
    """
    if length % num_ranks:
        raise PlanError.of(
            code="TP_SEQUENCE",
            key="parallel.sequence_parallel",
            message=f"tensor={num_ranks} does not divide a sequence of {length} tokens: with sequence parallelism "
            "each rank has an equal shard",
            fix=f"Pad sequences to a multiple of {num_ranks}, or set parallel.sequence_parallel to false",
        )
