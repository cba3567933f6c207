"""Memory of a model that is not from Hugging Face, under a DeepSpeed configuration: `tk.estimate_module`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.utils._pytree import tree_map

from toolkit.arguments import Positive, checks_arguments
from toolkit.catalog.gpus import find_gpu
from toolkit.deepspeed_spec.nested import auto_paths
from toolkit.deepspeed_spec.user_file import read_user_config
from toolkit.errors import PlanError, SpecError
from toolkit.memory.engines.ledger import MemoryLedger
from toolkit.memory.engines.settings import EngineSettings
from toolkit.memory.kernels.device import Device
from toolkit.memory.report.overhead import overhead, workspace_bytes
from toolkit.memory.report.ranks import phases_of_ledger, replay_ranks
from toolkit.memory.report.report import CardReport, RankReport
from toolkit.memory.trace.fake_run import trace_module
from toolkit.modeling.architecture import DTYPES
from toolkit.topology.grid import Grid

Precision = Literal["bf16", "fp16", "fp32"]

ASSUMPTION = (
    "every module is traced as it is, in eager execution; the batch has the shapes of example_batch, and the script runs under "
    "torch's default allocator"
)


@checks_arguments
def estimate_module(
    module: nn.Module,
    example_batch: Mapping[str, Any] | Sequence[Any],
    *,
    loss: Callable[[Any], torch.Tensor] | None = None,
    gpu: str = "h100-sxm-80gb",
    num_gpus: Positive = 1,
    zero_stage: Literal[0, 1, 2, 3] | None = None,
    precision: Precision | None = None,
    deepspeed_config: Mapping[str, Any] | str | Path | None = None,
) -> CardReport:
    """Estimate the memory of each card on which DeepSpeed trains a model of any kind.

    One micro-batch runs on fake tensors, every module of it; nothing is computed, and the model may be on the meta device.

    Args:
        module: Model to train; weights without `requires_grad` are frozen.
        example_batch: One micro-batch: keyword arguments of the model as a mapping, or its positional ones. Of tensors only
            shapes and types count.
        loss: Maps the model's output to the scalar loss; by default the output itself, or its `loss`.
        gpu: Card, as in `toolkit gpus`.
        num_gpus: Data-parallel ranks.
        zero_stage: ZeRO stage of AdamW in `precision`, 0 by default.
        precision: Data type of the weights, `bf16` by default.
        deepspeed_config: Configuration or its file, without "auto" values, instead of `zero_stage` and `precision`; the model is
            not built under `zero.Init`.

    Raises:
        SpecError: GPU_UNKNOWN; ARGUMENT for `zero_stage` or `precision` beside a configuration; each key of the configuration that DeepSpeed would refuse or ignore; DEEPSPEED_AUTO.
        PlanError: TRACE_FAILED, also where the loss is no scalar tensor with a gradient.
    """
    card = find_gpu(gpu)
    settings = EngineSettings.read(
        _configuration(deepspeed_config, zero_stage, precision), dp_size=num_gpus, zero_init=False
    )
    dtype = "fp16" if settings.fp16 else "bf16" if settings.itemsize == 2 else "fp32"
    events = trace_module(
        module,
        lambda model: _loss_of(model, example_batch, loss),
        dtype=DTYPES[dtype],
        device=Device.of(card),
        marks_modules=settings.zero_stage == 3,
    )
    on_cpu = card.memory_bytes is None
    workspace = 0 if on_cpu else workspace_bytes(Device.of(card).capability)
    num_communicators = int(num_gpus > 1) + int(settings.zero.zero_hpz_partition_size > 1)
    grid, ledgers = Grid(dp=num_gpus), replay_ranks(events, settings, workspace=workspace)

    def report_of(ledger: MemoryLedger) -> RankReport:
        phases = phases_of_ledger(ledger)
        peak = max(phase.allocated_bytes for phase in phases.values())
        around = overhead(peak, num_communicators=num_communicators, allocator="native")
        return RankReport(
            rank=0,
            coordinate=grid.coordinate(0),
            phases=phases,
            allocator_slack_bytes=around.slack_bytes,
            context_and_nccl_bytes=0 if on_cpu else around.context_and_nccl_bytes,
            num_communicators=num_communicators,
        )

    kinds = {id(ledger): report_of(ledger) for ledger in {id(each): each for each in ledgers.values()}.values()}
    ranks = [
        replace(kinds[id(ledger)], rank=rank, coordinate=grid.coordinate(rank)) for rank, ledger in ledgers.items()
    ]
    fullest = max(ranks, key=lambda rank: rank.required_bytes)
    return CardReport(
        ranks=tuple(ranks),
        allocator="native",
        allocator_slack_bytes=fullest.allocator_slack_bytes,
        context_and_nccl_bytes=fullest.context_and_nccl_bytes,
        gpu_capacity_bytes=card.memory_bytes,
        assumptions=(ASSUMPTION,),
        num_communicators=num_communicators,
    )


def _configuration(
    given: Mapping[str, Any] | str | Path | None, zero_stage: int | None, precision: Precision | None
) -> Mapping[str, Any]:
    if given is None:
        own: dict[str, Any] = {"optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": zero_stage or 0}}
        return own if precision == "fp32" else own | {precision or "bf16": {"enabled": True}}
    for name, value in (("zero_stage", zero_stage), ("precision", precision)):
        if value is not None:
            raise SpecError.of(
                code="ARGUMENT",
                key=name,
                message=f"{name}={value} is given beside deepspeed_config, which says it too",
                fix=f"Leave out {name}, or deepspeed_config",
            )
    config = read_user_config(given).config
    if autos := sorted(auto_paths(config)):
        raise SpecError.of(
            code="DEEPSPEED_AUTO",
            key=autos[0],
            message=f'{autos[0]} is "auto", which Trainer fills in from its arguments, and there are none here',
            fix="Give its value",
        )
    return config


def _loss_of(
    model: nn.Module, batch: Mapping[str, Any] | Sequence[Any], loss: Callable[[Any], torch.Tensor] | None
) -> Any:
    made = tree_map(
        lambda value: torch.empty_like(value, device="cpu") if isinstance(value, torch.Tensor) else value, batch
    )
    outputs = model(**made) if isinstance(made, Mapping) else model(*made)
    found = loss(outputs) if loss is not None else getattr(outputs, "loss", outputs)
    if not isinstance(found, torch.Tensor) or found.numel() != 1 or not found.requires_grad:
        what = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, torch.Tensor) else type(found).__name__
        if isinstance(found, torch.Tensor) and not found.requires_grad:
            what += " without a gradient: no weight with requires_grad takes part in it"
        raise PlanError.of(
            code="TRACE_FAILED",
            key="loss",
            message=f"the loss of {type(model).__name__} is {what}; it must be a scalar tensor with a gradient",
            fix="Pass loss=, a function of the model's output that returns such a scalar",
        )
    return found
