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
from toolkit.engine.comm_hooks import Hook, comm_hook
from toolkit.engine.lr_scheduler import LazyLRScheduler
from toolkit.engine.optimizers import TABLES, complete_state, made_here
from toolkit.engine.sharded_files import (
    ENGINE_FILE,
    HOOK,
    OPTIMIZER,
    WEIGHT,
    Averaged,
    EngineRecord,
    ShardReader,
    WriteTensors,
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
        self._hook: Any = None if self._wrapper is model else _hooked(plan, self._wrapper, world)
        self.optimizer: Any = made_here(plan, groups, model)
        self._averages = plan.job.train.optimizer == "schedule_free_adamw"
        self.lr_scheduler = schedule.build(self.optimizer)
        self._micro_batches = 0
        self._norm: Tensor | None = None

    @property
    def basic_optimizer(self) -> torch.optim.Optimizer:
        """torch's optimizer, under the name that DeepSpeed's engine gives its own."""
        return self.optimizer  # type: ignore[no-any-return]

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
        self._norm = _total_norm(gradients, device=self._world.device)
        limit = self._plan.job.train.max_grad_norm
        if limit:
            # torch nn/utils/clip_grad.py _clip_grads_with_norm_
            factor = (limit / (self._norm + 1e-6)).clamp(max=1.0)
            torch._foreach_mul_(_held(gradients), factor.to(gradients[0].device))
        self.optimizer.step()
        options = self._plan.job.parallel.ddp_options
        # Those that lie in buckets stay there; the search for unused weights needs them to be absent.
        self.optimizer.zero_grad(set_to_none=not options.gradient_as_bucket_view or options.find_unused_parameters)
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
        """Return to training, schedule-free AdamW to the weights at which it takes gradients."""
        self._wrapper.train()
        if self._averages:
            self.optimizer.train()

    def eval(self) -> None:
        """Turn to evaluation, of schedule-free AdamW's average of the weights."""
        self._wrapper.eval()
        if self._averages:
            self.optimizer.eval()

    def destroy(self) -> None:
        """Drop the gradients and the optimizer's state; the model lives as long as someone refers to it."""
        self.optimizer.zero_grad()
        self.optimizer.state.clear()

    # ------------------------------------------------------------------------------------------------------ checkpoints
    def save_checkpoint(self, folder: str, *, tag: str, exclude_frozen_parameters: bool, write: WriteTensors) -> None:
        """Write weights and, unless the plan saves weights alone, optimizer state below `folder/tag`, each rank its part, and the tag's name.

        Of schedule-free AdamW the weights are the average, so that what is saved is what is evaluated and exported.

        Collectives:
            Those of torch's distributed checkpoint.
        """
        if self._averages:
            self.optimizer.eval()
        try:
            self._save(folder, tag=tag, exclude_frozen_parameters=exclude_frozen_parameters, write=write)
        finally:
            if self._averages:
                self.optimizer.train()

    def _save(self, folder: str, *, tag: str, exclude_frozen_parameters: bool, write: WriteTensors) -> None:
        target = Path(folder) / tag
        weights = dict(self._weights(trained_only=exclude_frozen_parameters))
        states = {
            self._name_of_state(name, key, weight, value): value
            if isinstance(value, Tensor)
            else torch.tensor(float(value))
            for name, weight in (() if self._plan.job.train.save_only_model else self._trained())
            for key, value in self.optimizer.state[weight].items()
            if key not in TABLES
        }
        hooked = {} if self._plan.job.train.save_only_model else dict(self._of_hook())
        named = {f"{WEIGHT}{name}": weight.detach() for name, weight in weights.items()}
        save_tensors(target, named | states | hooked, write=write)
        if self._world.is_main:
            record = EngineRecord(
                scheduler_epoch=self.lr_scheduler.last_epoch,
                optimizer_state=tuple(sorted({key.rpartition(".")[2] for key in states})),
                dtype=self._plan.settings.dtype,
                shared=_shared(self.module, weights),
                averages=self._counted() if self._averages else None,
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
            states[weight] = {}
            for key in record.optimizer_state:
                for place, whole in ((name, True), (f"{name}@{self._world.rank}", False)):
                    if (known := f"{OPTIMIZER}{place}.{key}") in saved:
                        states[weight][key] = wanted[known] = self._room_for(key, weight, saved[known], whole=whole)
        prefixes = (f"{HOOK}{SHARED}.", f"{HOOK}{self._world.rank}.") if hasattr(self._hook, "restore") else ()
        hooked = {name: _like(kept, self._world) for name, kept in saved.items() if name.startswith(prefixes)}
        load_tensors(source, wanted | hooked, reader=reader)
        if prefixes:
            kept = {name.removeprefix(HOOK).partition(".")[2]: tensor for name, tensor in hooked.items()}
            self._hook.restore(kept, steps=record.scheduler_epoch)
        for weight, state in states.items():
            complete_state(self.optimizer, weight, state)
        self.optimizer.state.clear()
        self.optimizer.state.update({weight: state for weight, state in states.items() if state})
        self.lr_scheduler.last_epoch = record.scheduler_epoch
        if self._averages:
            groups, averages = self.optimizer.param_groups, record.averages or ()
            if len(averages) != len(groups):
                raise ValueError(
                    f"{ENGINE_FILE} has {len(averages)} averages of weights, the optimizer {len(groups)} groups"
                )
            for group, counted in zip(groups, averages, strict=True):
                group.update(counted, k=record.scheduler_epoch, train_mode=False)
            self.optimizer.train()
        return tag, {}

    def _counted(self) -> tuple[Averaged, ...]:
        """Return what schedule-free AdamW has counted for each of its groups, beside the steps."""
        groups = self.optimizer.param_groups
        return tuple({"weight_sum": float(group["weight_sum"]), "lr_max": float(group["lr_max"])} for group in groups)

    def _name_of_state(self, name: str, key: str, weight: Tensor, value: Any) -> str:
        """Return the name of a part of a weight's state, with the rank where only that one has it."""
        alone = is_dtensor(weight) and isinstance(value, Tensor) and not is_dtensor(value) and key != STEP
        return f"{OPTIMIZER}{name}@{self._world.rank}.{key}" if alone else f"{OPTIMIZER}{name}.{key}"

    def _weights(self, *, trained_only: bool) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad or not trained_only:
                yield name, parameter
        kept = self.module.state_dict(keep_vars=True)
        yield from ((name, buffer) for name, buffer in self.module.named_buffers() if name in kept)

    def _of_hook(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what a communication hook keeps: tensors of this rank, then those that all ranks have."""
        kept = self._hook.tensors() if hasattr(self._hook, "restore") else ({}, {})
        for whose, tensors in zip((self._world.rank, SHARED), kept, strict=True):
            yield from ((f"{HOOK}{whose}.{name}", tensor.contiguous()) for name, tensor in tensors.items())

    def _room_for(self, key: str, weight: nn.Parameter, saved: Any, *, whole: bool) -> Tensor:
        """Return an empty tensor for a saved one of a weight's state: sharded as the weight, or of its own shape and type."""
        if key == STEP:
            return torch.zeros((), device=weight.device if self.optimizer.defaults.get("fused") else None)
        alike = tuple(saved.size) == tuple(weight.shape) and saved.properties.dtype == weight.dtype
        if whole if is_dtensor(weight) else alike:
            return torch.zeros_like(weight)
        return torch.zeros(saved.size, dtype=saved.properties.dtype, device=weight.device)

    def _trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, weight) for name, weight in self.module.named_parameters() if weight.requires_grad)


SHARED = "all"  # in the names of a hook's tensors, in place of a rank
STEP = "step"  # the count of steps of one parameter: a scalar, on the host unless the optimizer is one kernel


def _like(saved: Any, world: World) -> Tensor:
    return torch.empty(saved.size, dtype=saved.properties.dtype, device=world.device)


def _hooked(plan: Plan, wrapper: Any, world: World) -> Hook | None:
    """Give DDP the plan's communication hook, and return it."""
    names: dict[Tensor, str] = {
        weight: name for name, weight in wrapper.module.named_parameters() if weight.requires_grad
    }
    hook = comm_hook(plan, names, world=world)
    if hook is not None:
        wrapper.register_comm_hook(hook, lambda hook, bucket: hook(bucket))  # torch reads annotations of functions
    return hook


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
        gradient_as_bucket_view=options.gradient_as_bucket_view,
    )


def _total_norm(gradients: list[Tensor], *, device: torch.device) -> Tensor:
    """Return the 2-norm of all gradients on a device, summed in fp32 whatever their dtype.

    Collectives:
        Under FSDP2 one all-reduce among the ranks of a replica.
    """
    norms = torch._foreach_norm(_held(gradients), 2.0, dtype=torch.float32)
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms)).to(device)
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
