"""FlashAttention-2 without its package: transformers' own code around stand-ins for the kernels.

B: sequences, S: tokens, H: heads, D: width of a head, T: tokens of all documents end to end.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional
from transformers import PreTrainedModel
from transformers import modeling_flash_attention_utils as utils
from transformers.masking_utils import AttentionMaskInterface

from toolkit.memory.kernels.fake_fused import FusedAttention

NAME = "flash_attention_2"

# Globals that modeling_flash_attention_utils.py lazy_import_flash_attention sets; 5.17 lacks one of them.
_LOADED = (
    "_loaded_implementation",
    "_flash_fn",
    "_flash_varlen_fn",
    "_flash_with_kvcache_fn",
    "_pad_fn",
    "_unpad_fn",
    "_process_flash_kwargs_fn",
    "_process_with_kvcache_kwargs_fn",
)
# Its functions that read the values of tensors.
_REPLACED = ("_lazy_imports", "_get_unpad_data", "_is_packed_sequence", "prepare_fa_kwargs_from_position_ids")


def _attend(
    query_BSHD: torch.Tensor,
    key_BSHD: torch.Tensor,
    value_BSHD: torch.Tensor,
    *,
    window_size: Any = None,
    softcap: float = 0.0,
    deterministic: bool = False,
    **_: Any,
) -> torch.Tensor:
    """Stand in for flash_attn_func (flash_attn/flash_attn_interface.py FlashAttnFunc).

    transformers passes only arguments that the signature names (_lazy_define_process_function).
    """
    heads = (tensor.transpose(1, 2) for tensor in (query_BSHD, key_BSHD, value_BSHD))
    return FusedAttention.apply(*heads, None).transpose(1, 2)  # type: ignore[no-any-return, no-untyped-call]


def _attend_documents(
    query_THD: torch.Tensor,
    key_THD: torch.Tensor,
    value_THD: torch.Tensor,
    *,
    window_size: Any = None,
    softcap: float = 0.0,
    deterministic: bool = False,
    **_: Any,
) -> torch.Tensor:
    """Stand in for flash_attn_varlen_func (FlashAttnVarlenFunc)."""
    return _attend(query_THD[None], key_THD[None], value_THD[None])[0]


def _import_stand_ins(*_: Any, **__: Any) -> tuple[Any, ...]:
    return _attend, _attend_documents, None, utils._pad_input, utils._unpad_input


def _unpad_data(attention_mask_BS: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return the indices, starts and length of unpadded rows, as if no token were padding."""
    lengths_B = attention_mask_BS.sum(dim=-1, dtype=torch.int32)
    starts_B = functional.pad(torch.cumsum(lengths_B, dim=0, dtype=torch.int32), (1, 0))
    return torch.empty(attention_mask_BS.numel(), dtype=torch.int64), starts_B, attention_mask_BS.shape[-1]


def _document_starts(position_ids_BS: torch.Tensor) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[int, int]]:
    """Return the starts and lengths of one document: the number of documents changes a few bytes only."""
    starts = torch.empty(2, dtype=torch.int32)
    return (starts, starts), (position_ids_BS.numel(), position_ids_BS.numel())


def _mask(*_: Any, attention_mask: torch.Tensor | None = None, **__: Any) -> torch.Tensor | None:
    """Return the mask, as if some row were padded (masking_utils.py flash_attention_mask)."""
    return attention_mask


def _adjust(original: Any) -> Any:
    """Return a check that the model's class supports the attention, without a check for the package."""

    def adjust(self: Any, attn_implementation: str | None, *args: Any, **kwargs: Any) -> Any:
        if attn_implementation != NAME:
            return original(self, attn_implementation, *args, **kwargs)
        if not self._supports_flash_attn:
            raise ValueError(f"{type(self).__name__} does not support Flash Attention 2")
        # Models with an attention class of their own import this only if the package is there (Falcon, GPT-Neo, Bark).
        vars(sys.modules[type(self).__module__]).setdefault("_flash_attention_forward", utils._flash_attention_forward)
        utils.lazy_import_flash_attention(NAME)
        return NAME

    return adjust


@contextlib.contextmanager
def traced_flash(*, packed: bool) -> Iterator[None]:
    """Run transformers' FlashAttention-2 on fake tensors.

    Args:
        packed: Whether a row holds several documents.
    """
    kept = {name: getattr(utils, name) for name in (*_LOADED, *_REPLACED) if hasattr(utils, name)}
    adjust, mask = PreTrainedModel._check_and_adjust_attn_implementation, AttentionMaskInterface()[NAME]
    utils._loaded_implementation = None
    utils._lazy_imports = _import_stand_ins
    utils._get_unpad_data = _unpad_data
    utils._is_packed_sequence = lambda position_ids, batch_size: packed and position_ids is not None and batch_size == 1
    utils.prepare_fa_kwargs_from_position_ids = _document_starts
    PreTrainedModel._check_and_adjust_attn_implementation = _adjust(adjust)
    AttentionMaskInterface.register(NAME, _mask)
    try:
        yield
    finally:
        for name in (*_LOADED, *_REPLACED):
            if name in kept:
                setattr(utils, name, kept[name])
            else:  # a stand-in that nothing had loaded before
                vars(utils).pop(name, None)
        PreTrainedModel._check_and_adjust_attn_implementation = adjust
        AttentionMaskInterface.register(NAME, mask)
