"""A pipeline's rank on fake tensors, run by the engine's own loop: all its layers, all micro-batches, every message."""

from __future__ import annotations

import contextlib
import json
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from deepspeed.runtime.utils import register_output_backward_hooks
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from traced_models import config_of

from toolkit.config.job import Job
from toolkit.distributed.p2p import PendingRecv
from toolkit.distributed.world import World
from toolkit.engine import pipeline
from toolkit.engine.memory_tracker import PhaseMemoryTracker
from toolkit.memory.engines.replay import EngineReplay
from toolkit.memory.engines.settings import EngineSettings, engine_settings
from toolkit.memory.engines.step_program import StepProgram, step_program
from toolkit.memory.kernels.device import Device
from toolkit.memory.kernels.dispatch import cuda_kernels
from toolkit.memory.trace.events import Marker, MemoryTrace, Release
from toolkit.memory.trace.fake_ops import disable_layer_dropout, inplace_collectives
from toolkit.memory.trace.run import trace_ranks
from toolkit.memory.trace.spec import TraceSpec
from toolkit.memory.trace.tracker import StorageTracker
from toolkit.modeling.architecture import model_config
from toolkit.modeling.build import BuildOptions, add_adapters, construct_empty, finish_model, shard_model
from toolkit.modeling.materialize import allocate
from toolkit.planning.plan import Plan
from toolkit.planning.resolve import resolve
from toolkit.topology.communicators import MAX_SENDS_IN_FLIGHT

LENGTH = 32
H100 = Device(capability=9.0)


def staged_job(
    folder: Path,
    name: str = "llama",
    *,
    gpus: int | None = None,
    train: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
    data: dict[str, Any] | None = None,
    deepspeed: dict[str, Any] | None = None,
    **parallel: Any,
) -> Job:
    """Return a job whose pipeline takes H100s, of one of the small models."""
    path = folder / "config.json"
    path.write_text(json.dumps(config_of(name, **(config or {})).to_dict()), encoding="utf-8")
    settings = {
        "precision": "bf16",
        "sequence_length": LENGTH,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 8,
        **(train or {}),
    }
    ranks = gpus or parallel.get("pipeline", 1) * parallel.get("tensor", 1)
    return Job.model_validate(
        {
            "model": {"name": str(path), "init": "random"},
            "cluster": {"gpu": "h100-sxm-80gb", "gpus_per_node": ranks},
            "train": settings,
            "parallel": {"zero_stage": 1, **parallel},
            "deepspeed": deepspeed or {},
            **({} if data is None else {"data": data}),
        }
    )


def staged_plan(folder: Path, name: str = "llama", **values: Any) -> Plan:
    """Return the plan of such a job."""
    return resolve(staged_job(folder, name, **values))


class Bare(EngineReplay):
    """An engine that holds nothing: what is left are the passes and messages of a rank, and its gradients."""

    def initialize(self) -> None: ...

    def gradient(self, parameter: Any, size: int) -> None: ...

    def end_backward(self, *, first: bool, last: bool) -> None: ...

    def reduce(self) -> None:
        self.account.free_all("gradients")

    def step(self) -> None: ...


def predicted(plan: Plan, pp_rank: int, *, traces: tuple[MemoryTrace, ...] | None = None) -> dict[str, int]:
    """Return the peaks of a rank's passes as the estimate has them, bytes."""
    trace = (traces or trace_ranks(plan, marks_modules=False))[pp_rank]
    return peaks_of(trace, engine_settings(plan), step_program(plan, pp_rank))


def peaks_of(trace: MemoryTrace, settings: EngineSettings, course: StepProgram) -> dict[str, int]:
    """Replays passes alone, bytes."""
    account = Bare(trace, settings, workspace_bytes=0, course=course).run()
    return {
        phase: account.peaks[phase].allocated_bytes - in_whole_blocks(trace.buffers_bytes)
        for phase in ("forward", "backward")
    }


def in_whole_blocks(size: int) -> int:
    return -(-size // 512) * 512


class _Level:
    """A recorder that only knows how much is held, and how much has been."""

    def __init__(self) -> None:
        self.now = self.peak = 0

    def change(self, cause: str, size: int) -> None:
        self.now += size
        self.peak = max(self.peak, self.now)

    def note(self, event: Marker | Release) -> None:
        if isinstance(event, Release):
            self.now -= event.size

    def reset(self) -> None:
        self.peak = self.now


class _Channels:
    """Neighbours that do not exist: what is sent lives until so many more messages have been sent."""

    ends = None

    def __init__(self, *_: Any, **__: Any) -> None:
        self._sent: deque[torch.Tensor] = deque()

    def send(self, tensor: torch.Tensor, kind: str, *, to: int) -> None:
        self._sent.append(tensor.contiguous())
        while len(self._sent) > MAX_SENDS_IN_FLIGHT:
            self._sent.popleft()

    def receive(self, shape: Any, kind: str, *, source: int, like: torch.Tensor) -> PendingRecv:
        return PendingRecv(tensor=like.new_empty(shape), work=SimpleNamespace(wait=lambda: None))

    def finish(self) -> None:
        self._sent.clear()


class _Engine:
    """What of DeepSpeed's engine a pass meets: the hooks on what a stage gives, and gradients that stay."""

    def __init__(self, model: Any) -> None:
        self.module = model
        self._whole = False

    def __call__(self, **inputs: Any) -> Any:
        outputs = self.module(**inputs)
        register_output_backward_hooks(outputs, lambda: None, lambda grad: grad if self._whole else grad / 1)
        return outputs

    def backward(self, loss: torch.Tensor, *, scale_wrt_gas: bool) -> None:
        self._whole = True
        loss.backward()
        self._whole = False

    @contextlib.contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        yield

    def step(self) -> None:
        for parameter in self.module.parameters():
            parameter.grad = None


def direct(plan: Plan, pp_rank: int, monkeypatch: Any) -> dict[str, int]:
    """Runs two steps of a rank by the engine's loop, and gives the peaks of its passes, bytes."""
    monkeypatch.setattr(pipeline, "P2PChannels", _Channels)
    settings = plan.settings
    level = _Level()
    with cuda_kernels(H100, packed=plan.job.data is not None and plan.job.data.packing == "separated"):
        options = replace(BuildOptions.of(plan), torch_compile=False)
        full = construct_empty(model_config(plan), options)
        full.tie_weights()
        shard_model(full, options, tp_group=None, part=plan.stage(pp_rank))
        with torch.device("meta"):
            model = add_adapters(full, options)
        with FakeTensorMode(allow_non_fake_inputs=True):
            allocate(model, device=torch.device("cpu"), dtype=options.dtype)
            with unset_fake_temporarily():
                finish_model(model, options)
            model.train()
            grid = plan.grid
            world = World(
                rank=grid.rank(type(grid.coordinate(0))(pp=pp_rank, dp=0, tp=0)),
                local_rank=0,
                device=torch.device("cpu"),
                grid=grid,
                coordinate=type(grid.coordinate(0))(pp=pp_rank, dp=0, tp=0),
                dp_group=None,
                tp_group=None,
                owns_groups=False,
            )
            memory = PhaseMemoryTracker(world.device, read=lambda: level.peak, reset=level.reset)
            passes = pipeline.PipelineForwardBackward(plan, world, _Engine(model), memory)
            num_targets = torch.ones(())
            tracker = StorageTracker(
                level, cause=lambda: "", owner=lambda: None, answers=[disable_layer_dropout, inplace_collectives]
            )
            tracker.ignore([*model.parameters(), *model.buffers(), num_targets, passes._like])
            with tracker:
                for _ in range(2):
                    batches = [_batch(plan, model) for _ in range(settings.batch.accumulation)]
                    passes.run(batches, num_targets)
                    del batches
    assert level.now == 0, "all that a step allocates is gone after it"
    return {phase: memory.peaks[phase] - SUM_OF_LOSSES for phase in ("forward", "backward")}


# `run` starts with the number that it gives back.
SUM_OF_LOSSES = 512


def _batch(plan: Plan, model: Any) -> dict[str, torch.Tensor]:
    inputs, labels = TraceSpec.of(plan).make_batch()
    return {**inputs, "labels": labels}
