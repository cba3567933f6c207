"""What a pipeline rank does, one instruction after the other: compute, and messages to the ranks beside it.

A rank p of pp holds chunks c = 0 … virtual_stages - 1, and chunk c of rank p is stage c × pp + p. An instruction names the
rank's own chunk, and the micro-batch, both from 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """Base of all instructions.

    Args:
        chunk: Chunk of the rank that executes it.
        micro_batch: Which micro-batch of the step.
    """

    chunk: int
    micro_batch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute(Instruction):
    """Base of what keeps the card busy."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Forward(Compute):
    """The chunk's forward pass; its activations are kept until `Backward` or `BackwardWeight`."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Backward(Compute):
    """The whole backward pass: the gradient of the chunk's input and of its weights."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardInput(Compute):
    """The gradient of the chunk's input alone, which is all that the stage before waits for."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardWeight(Compute):
    """The gradient of the chunk's weights, some time after its `BackwardInput`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message(Instruction):
    """Base of what goes over a link. No message blocks: a send is started and left alone, a receive is only posted.

    Args:
        peer: Pipeline rank at the other end.
    """

    peer: int


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SendActivation(Message):
    """Starts to send what the `Forward` before it gave, to the next stage."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiveActivation(Message):
    """Posts the receive of what the `Forward` of this chunk and micro-batch takes; that `Forward` waits for it."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SendGradient(Message):
    """Starts to send the input's gradient that the `Backward` or `BackwardInput` before it gave, to the stage before."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiveGradient(Message):
    """Posts the receive of the output's gradient, for which the backward of this chunk and micro-batch waits."""
