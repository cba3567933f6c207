"""Attention of whole sequences by ranks that each have a slice of them: all-to-alls give each rank some heads of all tokens.

B: sequences, S: tokens of a sequence, s: those of a rank's slice, H: heads, h: those of a rank, N: ranks, D: width of a head.

Source:
    arXiv 2309.14509, section 3.1.
"""

from __future__ import annotations

import copy
import math
import sys
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import AttentionInterface, PreTrainedConfig

from toolkit.distributed.exchange import exchange_pieces

# Name of the function in transformers' interface, by which the configuration of an attention module asks for it.
NAME = "toolkit_context"
_PLACE = "context_place"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """What an attention module needs to know of its ranks.

    Args:
        group: Ranks that share rows.
        config: Configuration of the module before its attention was replaced, whose attention runs on a rank's heads.
    """

    group: dist.ProcessGroup
    config: PreTrainedConfig


def share_attention(module: nn.Module, *, group: dist.ProcessGroup, replaced: dict[int, PreTrainedConfig]) -> None:
    """Make the attention inside a module run over the whole sequence, on this rank's heads.

    Args:
        module: Decoder layer, in which each module with a configuration gets another one.
        group: Ranks that share rows.
        replaced: Configurations that were made for earlier modules, by the identity of the original.
    """
    AttentionInterface.register(NAME, _context_attention)
    for inner in module.modules():
        config = getattr(inner, "config", None)
        if not isinstance(config, PreTrainedConfig):
            continue
        if id(config) not in replaced:
            replaced[id(config)] = copy.copy(config)
            replaced[id(config)]._attn_implementation = NAME
        setattr(inner, _PLACE, _Place(group=group, config=config))
        inner.config = replaced[id(config)]


def _context_attention(
    module: nn.Module,
    query_BHsD: torch.Tensor,
    key_BHsD: torch.Tensor,
    value_BHsD: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend over the whole sequence; the arguments and the result are those of transformers' attention functions.

    Args:
        attention_mask: Mask of whole rows, as the model made it.

    Collectives:
        forward: an all-to-all of queries, keys, values and the output each, of which (N - 1) / N leave the rank; backward: the same.
        Where ranks are more than key heads, these are sent to several.
    """
    place: _Place = getattr(module, _PLACE)
    group = place.group
    num_heads = query_BHsD.shape[1]
    copies = group.size() // math.gcd(key_BHsD.shape[1], group.size())
    if copies > 1:
        key_BHsD, value_BHsD = (heads.repeat_interleave(copies, dim=1) for heads in (key_BHsD, value_BHsD))
    query_BhSD, key_BhSD, value_BhSD = (_heads_of_all_tokens(x, group) for x in (query_BHsD, key_BHsD, value_BHsD))
    own = _OnRank(
        module, place.config, group=group, num_heads=num_heads, groups=query_BhSD.shape[1] // key_BhSD.shape[1]
    )
    if isinstance(options.get("s_aux"), torch.Tensor):
        options["s_aux"] = own.part(options["s_aux"])
    attend = _attention_of(module, place.config)
    output_BShD, _ = attend(own, query_BhSD, key_BhSD, value_BhSD, attention_mask, **options)
    return _tokens_of_all_heads(output_BShD, group), None


class _OnRank:
    """An attention module as its attention function sees it: with the heads of this rank."""

    def __init__(
        self, module: nn.Module, config: PreTrainedConfig, *, group: dist.ProcessGroup, num_heads: int, groups: int
    ) -> None:
        self._module, self._group, self._num_heads = module, group, num_heads
        self.config = config
        self.num_key_value_groups = groups

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        return self.part(value) if name == "sinks" else value

    def part(self, of_heads: torch.Tensor) -> torch.Tensor:
        """Return the elements of this rank's heads."""
        return (
            of_heads.chunk(self._group.size())[self._group.rank()] if of_heads.shape == (self._num_heads,) else of_heads
        )


def _attention_of(module: nn.Module, config: PreTrainedConfig) -> Any:
    """Return the function that the module would have called: one of transformers', or its own file's for `eager`."""
    file = sys.modules[type(module).__module__]
    interface = getattr(file, "ALL_ATTENTION_FUNCTIONS", None) or AttentionInterface()
    return interface.get_interface(config._attn_implementation, getattr(file, "eager_attention_forward", None))


def _heads_of_all_tokens(x_BHsD: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return this rank's heads of the whole sequence. Shape (B, h, S, D), in memory as (B, S, h, D)."""
    batch, num_heads, length, width = x_BHsD.shape
    size = group.size()
    sent_NBshD = x_BHsD.view(batch, size, num_heads // size, length, width).permute(1, 0, 3, 2, 4)
    found_NBshD = exchange_pieces(sent_NBshD, group=group)
    whole_BShD: torch.Tensor = found_NBshD.transpose(0, 1).reshape(batch, size * length, num_heads // size, width)
    return whole_BShD.transpose(1, 2)


def _tokens_of_all_heads(x_BShD: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return all heads of this rank's slice of the sequence. Shape (B, s, H, D)."""
    batch, length, heads, width = x_BShD.shape
    size = group.size()
    sent_NBshD = x_BShD.reshape(batch, size, length // size, heads, width).transpose(0, 1)
    found_NBshD = exchange_pieces(sent_NBshD, group=group)
    whole_BsHD: torch.Tensor = found_NBshD.permute(1, 2, 0, 3, 4).reshape(batch, length // size, size * heads, width)
    return whole_BsHD
