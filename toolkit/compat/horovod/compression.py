"""How tensors are sent: as they are, or in 16 bits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, final

import torch


class Compressor(ABC):
    """What a tensor becomes before it is sent, and after."""

    @staticmethod
    @abstractmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor to send, and what `decompress` needs."""

    @staticmethod
    @abstractmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return the tensor in its own type again."""


@final
class NoneCompressor(Compressor):
    """Sends tensors as they are."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor itself."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return the tensor itself."""
        return tensor


@final
class FP16Compressor(Compressor):
    """Sends floating-point tensors as fp16, and reduces them in fp16."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor in fp16, and its own type."""
        return (tensor.half() if tensor.is_floating_point() else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return the tensor in its own type."""
        return tensor.to(ctx)


class Compression:
    """The compressions that operations and optimizers take."""

    none = NoneCompressor
    fp16 = FP16Compressor
