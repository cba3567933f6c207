"""Instructions that a pipeline rank executes in order: compute, and messages to its neighbours.

Rank p of pp has chunks c = 0 … virtual_stages - 1, and chunk c of rank p is stage c × pp + p. An instruction names the chunk
on its rank and the micro-batch, both from 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """Base of all instructions.

    Args:
        chunk: Index of the chunk on the rank that executes it.
        micro_batch: Index of the micro-batch in the step.
    """

    chunk: int
    micro_batch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute(Instruction):
    """Base of the instructions that compute."""


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
    """The gradient of the chunk's input alone, which is all that the previous stage waits for."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardWeight(Compute):
    """The gradient of the chunk's weights, any time after its `BackwardInput`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message(Instruction):
    """Base of the point-to-point messages. None blocks: a send is only started, a receive only posted.

    Args:
        peer: Pipeline rank that it is sent to or received from.
    """

    peer: int


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SendActivation(Message):
    """Start of sending the output of the preceding `Forward` to the next stage."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiveActivation(Message):
    """Posted receive of the input of this chunk's and micro-batch's `Forward`, which waits for it."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SendGradient(Message):
    """Start of sending the input gradient from the preceding `Backward` or `BackwardInput` to the previous stage."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiveGradient(Message):
    """Posted receive of the output gradient, which this chunk's and micro-batch's backward pass waits for."""
