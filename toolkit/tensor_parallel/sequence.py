"""Sequence parallelism: between its regions, a decoder's layers hold each rank's piece of the sequence.

The embedding gives the whole sequence, of which the first layer takes its rank's piece; after the final norm it is whole
again. A region gathers its input and reduce-scatters its output, in place of an all-reduce of the output and one of the
input's gradient. So norms, residuals, and what dropout keeps, are shared by the ranks; masks, rotary tables and positions
stay whole, as attention needs them.

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
    """How ranks share the sequence between the layers, kept as `sequence_pieces` on the list of layers for its stages.

    Args:
        tp_group: The ranks, each with a piece.
        random_region: Where they draw apart: from the first layer's input to the output of the last module on pieces;
            None where nothing is drawn.
    """

    tp_group: dist.ProcessGroup
    random_region: TensorParallelRNG | None


def shard_sequence(
    model: nn.Module, decoder: Decoder, found: Mapping[str, Style], *, tp_group: dist.ProcessGroup
) -> None:
    """Lays a model's sequence in pieces, once its modules are sharded."""
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
            if decoder.acts_on_pieces(inner) and not hasattr(module, "shards"):  # the gradient of a row's bias is whole
                sum_gradients(module, module._parameters, group=tp_group)
    _cut_and_join(model, decoder, tp_group)


def _cut_and_join(model: nn.Module, decoder: Decoder, tp_group: dist.ProcessGroup) -> None:
    """Cuts the sequence before the first layer and joins it behind the last module on pieces; between, ranks draw apart."""
    first, end = model.get_submodule(decoder.layers[0]), model.get_submodule(decoder.end)
    region = TensorParallelRNG(tp_group)

    def cut(x: torch.Tensor) -> torch.Tensor:
        check_length(x.shape[SEQUENCE_DIM], tp_group.size())
        if decoder.drops:
            region.forget()  # a first layer that is run again for its gradient has no end that would leave
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
    """Changes what a module is called with first, the hidden states in all of transformers."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        if args:
            return (change(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": change(kwargs["hidden_states"])}

    module.register_forward_pre_hook(hook, with_kwargs=True)


def _on_output(module: nn.Module, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Changes what a module gives, or the first of several things."""

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)

    module.register_forward_hook(hook)


def check_length(length: int, num_ranks: int) -> None:
    """Refuses a sequence that has no equal pieces.

    Raises:
        PlanError: TP_SEQUENCE.
    """
    if length % num_ranks:
        raise PlanError.of(
            code="TP_SEQUENCE",
            key="parallel.sequence_parallel",
            message=f"tensor={num_ranks} does not divide a sequence of {length} tokens: with sequence parallelism each rank holds "
            "an equal piece",
            fix=f"Pad sequences to a multiple of {num_ranks}, or set parallel.sequence_parallel to false",
        )
