"""Sequence parallelism: between its regions, a decoder's layers hold each rank's piece of the sequence.

The embedding gives the whole sequence, of which the first layer takes its rank's piece; after the final norm it is whole
again. A region gathers its input and reduce-scatters its output, in place of an all-reduce of the output and one of the
input's gradient. So norms, residuals, and what dropout keeps, are shared by the ranks; masks, rotary tables and positions
stay whole, as attention needs them.

Source:
    arXiv 2205.05198, section 4.2.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from toolkit.errors import PlanError
from toolkit.tensor_parallel.gradient_sums import sum_gradients
from toolkit.tensor_parallel.linear import ColumnParallelLinear, Reads, share_input
from toolkit.tensor_parallel.pieces import SEQUENCE_DIM
from toolkit.tensor_parallel.random_state import RandomRegion
from toolkit.tensor_parallel.regions import gather_from_region, scatter_to_region
from toolkit.tensor_parallel.styles import Column, Experts, Region, Replicated, Row, Style, regions
from toolkit.topology.grid import join

# Names that architectures of transformers give to the norm behind the last layer.
_FINAL_NORMS = ("norm", "ln_f", "final_layer_norm", "final_layernorm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """Where a model's sequence lies in pieces, by names of its modules.

    Args:
        layers: Its decoder layers, in their order.
        end: The last module on pieces: the final norm, or the last layer of a model without one.
        gathering: Parents of one region each, which gather their columns' input.
        whole: Modules inside which all is as without sequence parallelism: mixtures of experts, whose router and experts
            both read the whole sequence.
        drops: Whether anything is drawn at random in training.
    """

    layers: tuple[str, ...]
    end: str
    gathering: frozenset[str]
    whole: frozenset[str]
    drops: bool

    def reads(self, region: Region) -> Reads:
        """Gives what the columns of a region are called with."""
        if region.parent in self.gathering:
            return "gathered"
        return "piece" if region.parent in self.layers else "whole"

    def gives_piece(self, row: str) -> bool:
        """Whether a row's output is a piece."""
        return not any(_inside(row, whole) for whole in self.whole)

    @property
    def on_pieces(self) -> tuple[str, ...]:
        """Modules that act on pieces, apart from the regions inside them."""
        return self.layers if self.end in self.layers else (*self.layers, self.end)


def find_decoder(model: nn.Module, found: Mapping[str, Style]) -> Decoder:
    """Finds where the sequence of a dense model may lie in pieces.

    Args:
        model: It is left as it is.
        found: Styles by names of its modules.

    Raises:
        PlanError: TP_SEQUENCE_ARCHITECTURE, with what keeps the model from sequence parallelism.
    """
    inside = [name for name, style in found.items() if isinstance(style, Column | Row | Experts)]
    stacks = {_stack_of(name) for name in inside}
    if len(stacks) != 1 or None in stacks:
        raise _refused(model, f"its sharded modules lie in {len(stacks)} places instead of one list of decoder layers")
    [stack] = stacks
    assert stack is not None
    layers = tuple(f"{stack}.{name}" for name, _ in model.get_submodule(stack).named_children())
    base = model.get_submodule(stack.rpartition(".")[0])
    norm = next((name for name in _FINAL_NORMS if getattr(base, name, None) is not None), None)
    end = layers[-1] if norm is None else f"{stack.rpartition('.')[0]}.{norm}".removeprefix(".")
    parents = {region.parent for region in regions(found)}
    children = [f"{layer}.{child}" for layer in layers for child, _ in model.get_submodule(layer).named_children()]
    whole = {child for child in children if _must_stay_whole(child, parents, found)}
    gathering = {parent for parent in parents if parent not in layers and not any(_inside(parent, x) for x in whole)}
    decoder = Decoder(
        layers=layers, end=end, gathering=frozenset(gathering), whole=frozenset(whole), drops=_drops(model)
    )
    reasons = list(dict.fromkeys(_reasons(model, decoder, found)))
    if reasons:
        raise _refused(model, join(reasons))
    return decoder


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
            if _acts_on_pieces(inner, module, decoder):
                sum_gradients(module, module._parameters, group=tp_group)
    _cut_and_join(model, decoder, tp_group)


def _cut_and_join(model: nn.Module, decoder: Decoder, tp_group: dist.ProcessGroup) -> None:
    """Cuts the sequence before the first layer and joins it behind the last module on pieces; between, ranks draw apart."""
    first, end = model.get_submodule(decoder.layers[0]), model.get_submodule(decoder.end)
    region = RandomRegion(tp_group)

    def cut(x: torch.Tensor) -> torch.Tensor:
        _check_length(x.shape[SEQUENCE_DIM], tp_group.size())
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


def _acts_on_pieces(name: str, module: nn.Module, decoder: Decoder) -> bool:
    """Whether a module's own parameters meet this rank's piece alone. A row's bias does not: its gradient is gathered."""
    return not hasattr(module, "shards") and not any(_inside(name, x) for x in decoder.gathering | decoder.whole)


def _must_stay_whole(child: str, parents: set[str], found: Mapping[str, Style]) -> bool:
    """Whether a layer's child holds what reads its input whole but is no column, or regions within regions."""
    styles = [style for name, style in found.items() if _inside(name, child)]
    if any(isinstance(style, Experts) or style == Replicated(reads_shards=False) for style in styles):
        return any(isinstance(style, Column | Row | Experts) for style in styles)
    return sum(_inside(parent, child) for parent in parents) > 1


def _reasons(model: nn.Module, decoder: Decoder, found: Mapping[str, Style]) -> Iterator[str]:
    if getattr(model.config if hasattr(model, "config") else None, "layerdrop", 0):
        yield "layerdrop leaves out layers, the first one too"
    for region in regions(found):
        heads = any(
            _column(found, name).parts != ("width",) * len(_column(found, name).parts) for name in region.columns
        )
        if heads and region.parent in decoder.layers:
            yield f"{region.parent} computes attention itself, not in a module that could gather its input"
    for layer in decoder.layers:
        if any(
            _inside(name, layer) and isinstance(style, Experts) and name.rpartition(".")[0] == layer
            for name, style in found.items()
        ):
            yield f"{layer} holds its experts itself, not in a module that could gather their input"
        for name, module in model.get_submodule(layer).named_modules(prefix=layer):
            matrix = any(parameter.dim() > 1 for parameter in module._parameters.values() if parameter is not None)
            if matrix and name not in found and _acts_on_pieces(name, module, decoder):
                yield f"{name} may mix tokens and has no style"
    for name in decoder.whole if decoder.drops else ():
        if any(isinstance(module, nn.Dropout) and module.p for module in model.get_submodule(name).modules()):
            yield f"{name} drops elements on the whole sequence"
        if getattr(model.get_submodule(name), "jitter_noise", 0):
            yield f"{name} adds noise (router_jitter_noise) beside dropout"


def _column(found: Mapping[str, Style], name: str) -> Column:
    style = found[name]
    assert isinstance(style, Column)
    return style


def _stack_of(name: str) -> str | None:
    """Gives the list in which a module's layer stands: all before the first number of its name."""
    parts = name.split(".")
    numbers = [place for place, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[0]]) if numbers and numbers[0] else None


def _inside(name: str, outer: str) -> bool:
    return name == outer or name.startswith(f"{outer}.")


def _drops(model: nn.Module) -> bool:
    """Whether a configuration names any dropout, or a model that has none holds a module of it."""
    config = getattr(model, "config", None)
    if config is None:
        return any(isinstance(module, nn.Dropout) and module.p for module in model.modules())
    return any("drop" in name and isinstance(value, float) and value for name, value in config.to_dict().items())


def _check_length(length: int, num_ranks: int) -> None:
    if length % num_ranks:
        raise PlanError.of(
            code="TP_SEQUENCE",
            key="parallel.tensor",
            message=f"tensor={num_ranks} does not divide a sequence of {length} tokens: with sequence parallelism each rank holds "
            "an equal piece",
            fix=f"Pad sequences to a multiple of {num_ranks}, or turn sequence parallelism off",
        )


def _refused(model: nn.Module, why: str) -> PlanError:
    return PlanError.of(
        code="TP_SEQUENCE_ARCHITECTURE",
        key="parallel.tensor",
        message=f"sequence parallelism of {type(model).__name__} is not possible: {why}",
        fix="Turn sequence parallelism off",
    )
