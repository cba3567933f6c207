"""DDP and FSDP2: torch's own data parallelism, behind the part of DeepSpeed's engine that a run uses.

A step is as under ZeRO: each micro-batch forward, backward and `step`, which acts after the last one. Gradients are reduced in
the last backward pass alone, and averaged over the ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from toolkit.distributed.dtensors import is_dtensor
from toolkit.distributed.world import World
from toolkit.engine.lr_scheduler import LazyLRScheduler
from toolkit.engine.optimizers import TABLES, complete_state, made_here
from toolkit.engine.sharded_files import (
    ENGINE_FILE,
    OPTIMIZER,
    WEIGHT,
    EngineRecord,
    ShardReader,
    load_tensors,
    save_tensors,
)
from toolkit.io import write_text
from toolkit.planning.plan import Plan

LATEST = "latest"  # DeepSpeed's name of the file that names the tag


class TorchEngine:
    """A model under DDP or FSDP2 with torch's optimizer.

    Args:
        plan: Resolved plan whose strategy is `ddp` or `fsdp2`.
        model: Built model; for FSDP2 already sharded (`toolkit.modeling.fsdp2`).
        groups: The optimizer's parameter groups.
        schedule: Learning-rate schedule.
        world: Process groups of this rank.

    Attributes:
        module: The model, without DDP's wrapper.
        optimizer: torch's optimizer.
        lr_scheduler: Its scheduler, stepped once per optimizer step.

    Source:
        torch nn/parallel/distributed.py DistributedDataParallel; distributed/fsdp/_fully_shard/_fully_shard.py FSDPModule.
    """

    def __init__(
        self, plan: Plan, model: nn.Module, groups: list[Any], schedule: LazyLRScheduler, *, world: World
    ) -> None:
        self._plan, self._world = plan, world
        self._shards = plan.job.parallel.strategy == "fsdp2"
        self.module = model
        self._wrapper: Any = model if self._shards or world.size == 1 else _replicated(plan, model, world)
        self.optimizer = made_here(plan, groups)
        self.lr_scheduler = schedule.build(self.optimizer)
        self._micro_batches = 0
        self._norm: Tensor | None = None

    @property
    def basic_optimizer(self) -> torch.optim.Optimizer:
        """torch's optimizer, under the name that DeepSpeed's engine gives its own."""
        return self.optimizer

    def __call__(self, **inputs: Any) -> Any:
        """Run the model; in training, DDP and FSDP2 learn whether the backward pass that follows reduces."""
        if not torch.is_grad_enabled():
            outputs = self.module(**inputs)
            for module in self.module.modules() if self._shards else ():
                if isinstance(module, FSDPModule):
                    module.reshard()  # the last group would stay gathered for a backward pass
            return outputs
        if self._shards:
            self._wrapper.set_requires_gradient_sync(self._is_last)
        elif self._wrapper is not self.module:
            self._wrapper.require_backward_grad_sync = self._is_last
        return self._wrapper(**inputs)

    def backward(self, loss: Tensor, *, scale_wrt_gas: bool = False) -> None:
        """Run the backward pass of a loss that is already scaled for the accumulation."""
        assert not scale_wrt_gas, "the loss is a share of the step's mean"
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self) -> None:
        """End a micro-batch; after the last one clip the gradients, step the optimizer and its schedule."""
        is_last = self._is_last
        self._micro_batches += 1
        if not is_last:
            return
        self._micro_batches = 0
        trained = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        gradients = [parameter.grad for parameter in trained if parameter.grad is not None]
        self._norm = _total_norm(gradients)
        limit = self._plan.job.train.max_grad_norm
        if limit:
            # torch nn/utils/clip_grad.py _clip_grads_with_norm_
            factor = (limit / (self._norm + 1e-6)).clamp(max=1.0)
            torch._foreach_mul_(_held(gradients), factor)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.lr_scheduler.step()

    @property
    def _is_last(self) -> bool:
        return self._micro_batches == self._plan.settings.batch.accumulation - 1

    def get_lr(self) -> list[float]:
        """Return the rate of the next step by parameter group."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def get_global_grad_norm(self) -> Tensor | None:
        """Return the norm before clipping of the last step's gradients."""
        return self._norm

    def train(self) -> None:
        self._wrapper.train()

    def eval(self) -> None:
        self._wrapper.eval()

    def destroy(self) -> None:
        """Drop the gradients and the optimizer's state; the model lives as long as someone refers to it."""
        self.optimizer.zero_grad()
        self.optimizer.state.clear()

    # ------------------------------------------------------------------------------------------------------ checkpoints
    def save_checkpoint(self, folder: str, *, tag: str, exclude_frozen_parameters: bool) -> None:
        """Write weights and optimizer state below `folder/tag`, each rank its part, and the tag's name.

        Collectives:
            Those of torch's distributed checkpoint.
        """
        target = Path(folder) / tag
        weights = dict(self._weights(trained_only=exclude_frozen_parameters))
        states = {
            f"{OPTIMIZER}{name}.{key}": value if isinstance(value, Tensor) else torch.tensor(float(value))
            for name, weight in self._trained()
            for key, value in self.optimizer.state[weight].items()
            if key not in TABLES
        }
        save_tensors(target, {f"{WEIGHT}{name}": weight.detach() for name, weight in weights.items()} | states)
        if self._world.is_main:
            record = EngineRecord(
                scheduler_epoch=self.lr_scheduler.last_epoch,
                optimizer_state=tuple(sorted({key.rpartition(".")[2] for key in states})),
                dtype=self._plan.settings.dtype,
                shared=_shared(self.module, weights),
            )
            write_text(target / ENGINE_FILE, record.model_dump_json(indent=2), sync=True)
            write_text(Path(folder) / LATEST, tag, sync=True)

    def load_checkpoint(self, folder: str, *, tag: str, load_module_strict: bool) -> tuple[str, dict[str, Any]]:
        """Restore what `save_checkpoint` wrote, on any number of ranks.

        Args:
            folder: Checkpoint folder.
            tag: Folder of the engine's files in it.
            load_module_strict: Whether frozen weights are among them.

        Raises:
            ValueError: They are not those of this model.
        """
        source = Path(folder) / tag
        record = EngineRecord.read(source)
        wanted = {
            f"{WEIGHT}{name}": weight.detach() for name, weight in self._weights(trained_only=not load_module_strict)
        }
        reader = ShardReader(str(source))
        saved: dict[str, Any] = dict(reader.read_metadata().state_dict_metadata)
        states: dict[nn.Parameter, dict[str, Any]] = {}
        for name, weight in self._trained():
            states[weight] = {
                key: _room_for(key, weight, saved[f"{OPTIMIZER}{name}.{key}"])
                for key in record.optimizer_state
                if f"{OPTIMIZER}{name}.{key}" in saved
            }
            wanted |= {f"{OPTIMIZER}{name}.{key}": value for key, value in states[weight].items()}
        load_tensors(source, wanted, reader=reader)
        for weight, state in states.items():
            complete_state(self.optimizer, weight, state)
        self.optimizer.state.clear()
        self.optimizer.state.update({weight: state for weight, state in states.items() if state})
        self.lr_scheduler.last_epoch = record.scheduler_epoch
        return tag, {}

    def _weights(self, *, trained_only: bool) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad or not trained_only:
                yield name, parameter
        kept = self.module.state_dict(keep_vars=True)
        yield from ((name, buffer) for name, buffer in self.module.named_buffers() if name in kept)

    def _trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, weight) for name, weight in self.module.named_parameters() if weight.requires_grad)


STEP = "step"  # the count of steps of one parameter: a scalar on the host


def _room_for(key: str, weight: nn.Parameter, saved: Any) -> Tensor:
    """Return an empty tensor for a saved one of a weight's state: sharded as the weight, or of its own shape and type."""
    if key == STEP:
        return torch.zeros(())
    if is_dtensor(weight) or (tuple(saved.size) == tuple(weight.shape) and saved.properties.dtype == weight.dtype):
        return torch.zeros_like(weight)
    return torch.zeros(saved.size, dtype=saved.properties.dtype, device=weight.device)


def _replicated(plan: Plan, model: nn.Module, world: World) -> nn.Module:
    from torch.nn.parallel import DistributedDataParallel

    device, options = world.device, plan.job.parallel.ddp_options
    return DistributedDataParallel(
        model,
        device_ids=None if device.type == "cpu" else [device],
        process_group=world.dp_group,
        bucket_cap_mb=options.bucket_cap_mb,
        find_unused_parameters=options.find_unused_parameters,
        static_graph=options.static_graph,
        broadcast_buffers=options.broadcast_buffers,
    )


def _total_norm(gradients: list[Tensor]) -> Tensor:
    """Return the 2-norm of all gradients, summed in fp32 whatever their dtype.

    Collectives:
        Under FSDP2 one all-reduce among the ranks of a replica.
    """
    norm: Tensor = torch.linalg.vector_norm(
        torch.stack(torch._foreach_norm(_held(gradients), 2.0, dtype=torch.float32))
    )
    mesh: Any = getattr(gradients[0], "device_mesh", None)
    if mesh is None:
        return norm
    squared = norm.square()
    dist.all_reduce(squared, group=mesh.get_group(mesh.ndim - 1))  # replicas hold the same
    return squared.sqrt()


def _held(gradients: list[Any]) -> list[Tensor]:
    """Return what this rank holds of each gradient."""
    return [gradient.to_local() if is_dtensor(gradient) else gradient for gradient in gradients]


def _shared(model: nn.Module, weights: dict[str, Tensor]) -> dict[str, str]:
    """Return the further names of weights that modules share, each with the name under which it is written."""
    named = {id(weight): name for name, weight in weights.items()}
    return {
        name: named[id(weight)]
        for name, weight in model.named_parameters(remove_duplicate=False)
        if id(weight) in named and named[id(weight)] != name
    }
