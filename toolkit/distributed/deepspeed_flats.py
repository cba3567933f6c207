"""The flat fp32 tensors that DeepSpeed's optimizers step, as they are in DeepSpeed 0.19.8, and which elements of which weights they hold.

Every wrapper of DeepSpeed steps tensors of its own, each a row of pieces of weights: ZeRO-1 and 2 a rank's part of all weights of a
parameter group, ZeRO-3 a rank's part of each weight, stage 0 whole weights. What this module adds to `deepspeed_private` is that
one view of them, through which a state of any other layout is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from toolkit.distributed.deepspeed_private import partition_rank, write_partitions


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Consecutive elements of a weight, row by row, in a flat tensor.

    Args:
        weight: The parameter of the model, as this rank has it: a tensor rank's is its shard.
        start: First element, of the weight.
        stop: End of its elements.
        at: Place of the first element in the flat tensor.
    """

    weight: nn.Parameter
    start: int
    stop: int
    at: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Flat:
    """A tensor that an optimizer steps.

    Args:
        stepped: The tensor, a key of the optimizer's state.
        optimizer: Optimizer that steps it.
        pieces: What it holds; padding is in no piece.
    """

    stepped: Tensor
    optimizer: torch.optim.Optimizer
    pieces: Sequence[Piece]


def flats_of(engine: Any) -> Iterator[Flat]:
    """Yield the flat tensors of a DeepSpeed engine, all in memory: not of one with a profile of NVMe.

    The weights in training precision follow when the iterator ends, as after a step: take all of it.

    Collectives:
        Those of the gathering of weights that follows a step.

    Source:
        runtime/zero/stage_1_and_2.py, stage3.py, runtime/bf16_optimizer.py, runtime/fp16/fused_optimizer.py, unfused_optimizer.py: step.
    """
    optimizer = engine.optimizer
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        yield from _of_stage_3(optimizer)
    elif hasattr(optimizer, "single_partition_of_fp32_groups"):
        yield from _of_parts(optimizer, optimizer.single_partition_of_fp32_groups, optimizer.bit16_groups)
    elif hasattr(optimizer, "fp32_groups_flat_partition"):
        yield from _of_parts(optimizer, optimizer.fp32_groups_flat_partition, optimizer.bf16_groups)
    elif hasattr(optimizer, "fp32_groups_flat"):
        yield from _of_copies(optimizer.optimizer, zip(optimizer.fp32_groups_flat, optimizer.fp16_groups, strict=True))
    elif hasattr(optimizer, "fp32_groups"):
        pairs = zip(optimizer.fp32_groups, optimizer.fp16_groups, strict=True)
        each = ((copy, [weight]) for copies, weights in pairs for copy, weight in zip(copies, weights, strict=True))
        yield from _of_copies(optimizer.optimizer, each)
    else:
        yield from flats_of_weights(optimizer)


def flats_of_weights(optimizer: torch.optim.Optimizer) -> Iterator[Flat]:
    """Yield the weights that an optimizer steps themselves."""
    for group in optimizer.param_groups:
        for weight in group["params"]:
            pieces = (Piece(weight=weight, start=0, stop=weight.numel(), at=0),)
            yield Flat(stepped=weight, optimizer=optimizer, pieces=pieces)


def _of_parts(optimizer: Any, parts: Sequence[Tensor], groups: Sequence[Sequence[nn.Parameter]]) -> Iterator[Flat]:
    """Yield this rank's part of each parameter group, under ZeRO-1 and 2, then gather the weights (`update_lp_params`)."""
    for part, weights in zip(parts, groups, strict=True):
        pieces = []
        for weight in weights:
            mapping: Any = weight._hp_mapping  # type: ignore[attr-defined]
            if mapping is not None:  # this rank has some of it
                own, there = mapping.lp_fragment_address, mapping.hp_fragment_address
                pieces.append(Piece(weight=weight, start=own.start, stop=own.start + own.numel, at=there.start))
        yield Flat(stepped=part, optimizer=optimizer.optimizer, pieces=pieces)
    optimizer.update_lp_params()


def _of_copies(optimizer: torch.optim.Optimizer, groups: Any) -> Iterator[Flat]:
    """Yield copies of whole weights, one after the other in each, under stage 0 in 16 bit, then round the weights from them."""
    for copy, weights in groups:
        pieces, at = [], 0
        for weight in weights:
            pieces.append(Piece(weight=weight, start=0, stop=weight.numel(), at=at))
            at += weight.numel()
        yield Flat(stepped=copy, optimizer=optimizer, pieces=pieces)
        for piece in pieces:
            taken = copy.data.view(-1)[piece.at : piece.at + piece.stop]
            piece.weight.data.view(-1).copy_(taken)


def _of_stage_3(optimizer: Any) -> Iterator[Flat]:
    """Yield this rank's part of the weights of each sub-group, and round the weights from it."""
    persistent = optimizer.persistent_parameters
    if persistent:
        persistent[0].partition(persistent)
    for number, weights in enumerate(optimizer.fp16_groups):
        pieces = []
        for weight in weights:
            _, at, length = optimizer.grad_position[optimizer.get_param_id(weight)]
            start = partition_rank(optimizer, weight) * length
            stop = min(start + length, int(weight.ds_numel))  # the last parts may be padding
            if start < stop:
                pieces.append(Piece(weight=weight, start=start, stop=stop, at=at))
        yield Flat(stepped=optimizer.fp32_partitioned_groups_flat[number], optimizer=optimizer.optimizer, pieces=pieces)
        write_partitions(optimizer, number)
    optimizer.checkpoint_event_epilogue()


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScale:
    """The state of a loss scaler, which its settings are not part of.

    Args:
        scale: Factor of the loss.
        iteration: Steps that it has seen.
        last_overflow: The last of them that overflowed; -1 if none did.
        hysteresis: Overflows that it waits for before it lowers the factor; None at stage 0, which does not wait.
    """

    scale: float
    iteration: int
    last_overflow: int
    hysteresis: int | None = None


def saved_loss_scale(state: Any) -> LossScale | None:
    """Return the state of the loss scaler in an optimizer's saved state; None if the loss is not scaled dynamically.

    Source:
        runtime/zero/stage_1_and_2.py state_dict, runtime/fp16/fused_optimizer.py state_dict; runtime/fp16/loss_scaler.py.
    """
    if not state.get("dynamic_loss_scale"):
        return None
    scaler = state.get("loss_scaler")
    if scaler is None:
        return LossScale(
            scale=float(state["cur_scale"]),
            iteration=int(state["cur_iter"]),
            last_overflow=int(state.get("last_overflow_iter", -1)),
        )
    return LossScale(
        scale=float(scaler.cur_scale),
        iteration=int(scaler.cur_iter),
        last_overflow=int(scaler.last_overflow_iter),
        hysteresis=int(scaler.cur_hysteresis),
    )


def set_loss_scale(engine: Any, saved: LossScale) -> None:
    """Set the state of an engine's loss scaler; of one that does not scale dynamically nothing."""
    wrapper = engine.optimizer
    scaler = getattr(wrapper, "loss_scaler", None) or getattr(wrapper, "loss_scale_config", None)
    if scaler is None or not getattr(wrapper, "dynamic_loss_scale", getattr(scaler, "dynamic_loss_scale", False)):
        return
    scaler.cur_scale, scaler.cur_iter = saved.scale, saved.iteration
    scaler.last_overflow_iter = saved.last_overflow
    if saved.hysteresis is not None and hasattr(scaler, "cur_hysteresis"):
        scaler.cur_hysteresis = saved.hysteresis


def set_counts(engine: Any, *, steps: int, skipped: int, batch: int) -> None:
    """Set what an engine counts: optimizer steps, those that overflowed, and sequences (runtime/engine.py _load_checkpoint)."""
    engine.global_steps, engine.skipped_steps, engine.global_samples = steps, skipped, steps * batch
