"""All private names of DeepSpeed that the toolkit reads, calls or replaces, as they are in DeepSpeed 0.19.8.

DeepSpeed may change them in any release: tests/distributed/test_deepspeed_private.py fails for each that is no longer as
described here. DeepSpeed is imported by the functions that need it, which takes seconds.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

# Modules of DeepSpeed that import ZeRO-3's trace check by name.
TRACE_CHECK = "assert_ints_same_as_other_ranks"
TRACE_CHECK_USERS = (
    "deepspeed.runtime.zero.stage3",
    "deepspeed.runtime.zero.partition_parameters",
    "deepspeed.runtime.zero.partitioned_param_coordinator",
)
TraceCheck = Callable[[list[int]], None]

SWAP_SUFFIX = ".tensor.swp"
_FLUSH = "_flush_coalesced_reduction_zero12"
_LEAF = "_z3_leaf"
_FLAT_WEIGHTS = "fp32_flat_groups"


# The process: module globals.


def reset_groups() -> None:
    """Empty DeepSpeed's caches of process groups, which may be from an earlier run of this process.

    Source:
        utils/groups.py (_WORLD_GROUP and its like are module globals that are never reset), comm/comm.py (cdb).
    """
    import deepspeed.comm.comm as comm
    from deepspeed.utils import groups

    comm.cdb = None
    importlib.reload(groups)


def reset_mpu() -> None:
    """Forget the model-parallel unit of an earlier engine: an engine without one would use it (utils/groups.py mpu)."""
    from deepspeed.utils import groups

    groups.mpu = None


def skip_shared_memory_build() -> None:
    """Keep DeepSpeed from compiling an extension on CPU that only tensor-parallel inference uses (inference_all_reduce).

    That needs a compiler and half a minute, and a run that is killed meanwhile leaves a lock for which all later ones wait
    silently.

    Source:
        comm/torch.py build_shm_op; ops/__init__.py __compatible_ops__.
    """
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


_BUILDERS = {
    "async_io": "AsyncIOBuilder",
    "cpu_adam": "CPUAdamBuilder",
    "cpu_lion": "CPULionBuilder",
    "fused_adam": "FusedAdamBuilder",
    "fused_lion": "FusedLionBuilder",
    "pin_memory": "PinMemoryBuilder",
    "quantizer": "QuantizerBuilder",
    "deepspeed_shm_comm": "ShareMemCommBuilder",
}


def load_extension(name: str) -> None:
    """Compile one of DeepSpeed's extensions, unless that is done, and load it, as the engine would at its first use.

    Source:
        accelerator/abstract_accelerator.py create_op_builder; ops/op_builder/builder.py OpBuilder.load.
    """
    from deepspeed.accelerator import get_accelerator

    get_accelerator().create_op_builder(_BUILDERS[name]).load(verbose=False)


def replace_trace_check(check: TraceCheck) -> None:
    """Have ZeRO-3 call `check` with the ids that a rank has recorded, until `restore_patches`.

    Source:
        runtime/zero/utils.py assert_ints_same_as_other_ranks; partitioned_param_coordinator.py record_module.
    """
    for name in TRACE_CHECK_USERS:
        setattr(importlib.import_module(name), TRACE_CHECK, check)


def restore_patches() -> None:
    """Restore ZeRO-3's own trace check, and torch's linear function, which ZeRO-3 replaces and never restores.

    Source:
        runtime/zero/partition_parameters.py _enable_mem_efficient_linear (linear_bk is what torch had before).
    """
    from deepspeed.runtime.zero.linear import zero3_linear_wrap
    from deepspeed.runtime.zero.partition_parameters import InsertPostInitMethodToModuleSubClasses as Patched
    from deepspeed.runtime.zero.utils import assert_ints_same_as_other_ranks

    replace_trace_check(assert_ints_same_as_other_ranks)
    if functional.linear is zero3_linear_wrap:
        functional.linear = Patched.linear_bk


def forget_engine(engine: Any) -> None:
    """Let the memory of an ended engine be freed: ZeRO-3 keeps each model on a stack of the module, and in a cache of a class.

    Source:
        runtime/zero/parameter_offload.py FWD_MODULE_STACK; partitioned_param_coordinator.py __params_to_release, a method behind
        functools.lru_cache and utils/nvtx.py instrument_w_nvtx.
    """
    from deepspeed.runtime.zero import parameter_offload
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

    ended = set(engine.module.modules())
    stack = parameter_offload.FWD_MODULE_STACK
    stack[:] = [module for module in stack if module not in ended]
    released = PartitionedParameterCoordinator._PartitionedParameterCoordinator__params_to_release
    for cell in released.__closure__:
        if hasattr(cell.cell_contents, "cache_clear"):
            cell.cell_contents.cache_clear()


# Parameters that ZeRO-3 has partitioned.


def is_partitioned(weight: Tensor) -> bool:
    """True if ZeRO-3 partitions a weight, gathered at the moment or not (partition_parameters.py _convert_to_zero_parameters)."""
    return hasattr(weight, "ds_id")


def is_absent(weight: Tensor) -> bool:
    """True if ZeRO-3 partitions a weight and it is not gathered (partition_parameters.py ZeroParamStatus)."""
    status = getattr(weight, "ds_status", None)
    return status is not None and status == type(status).NOT_AVAILABLE


def is_swapped(weight: Tensor) -> bool:
    """True if the partition of a weight is on NVMe (partition_parameters.py, offload_param with device nvme)."""
    return getattr(weight, "nvme_swapper", None) is not None


def full_shape(weight: Tensor) -> tuple[int, ...]:
    """Return the shape of a whole weight, partitioned or not."""
    return tuple(getattr(weight, "ds_shape", weight.shape))


def count_elements(weight: Tensor) -> int:
    """Count the elements of a whole weight, partitioned or not."""
    return int(getattr(weight, "ds_numel", weight.numel()))


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """Count a model's parameters, all and trainable ones; a partitioned one counts as a whole."""
    total = trainable = 0
    for weight in model.parameters():
        count = count_elements(weight)
        total += count
        trainable += count if weight.requires_grad else 0
    return total, trainable


def zero_init(config: Mapping[str, Any], *, dp_group: dist.ProcessGroup | None, mpu: Any) -> Any:
    """Return ZeRO-3's partitioner of modules that exist already, for `partition_module`.

    Its `dtype` is that of all floating-point weights. Given a module, here one without weights, DeepSpeed replaces torch's
    linear function as it does for a model built in its context (partition_parameters.py Init.__init__).
    """
    import deepspeed

    return deepspeed.zero.Init(
        module=nn.Module(), data_parallel_group=dp_group, config_dict_or_path=dict(config), mpu=mpu
    )


def partition_module(init: Any, module: nn.Module) -> None:
    """Partition a module's own weights, as after its construction in the context (partition_parameters.py Init)."""
    init._post_init_method(module)


def mark_leaf(module: nn.Module) -> None:
    """Make ZeRO-3 gather a module together with those inside it, without an import of DeepSpeed.

    Source:
        utils/z3_leaf_module.py set_z3_leaf_module.
    """
    setattr(module, _LEAF, True)


def is_leaf(module: nn.Module) -> bool:
    """True if ZeRO-3 gathers a module together with those inside it (utils/z3_leaf_module.py z3_leaf_module)."""
    return bool(getattr(module, _LEAF, False))


# Backward passes and the reduction of their gradients.


def expect_backward(engine: Any) -> None:
    """Announce a backward pass from a gradient of another rank, whose loss was scaled there.

    Source:
        runtime/engine.py scale, _backward_post_hook: under fp16 the engine checks by it that the loss was scaled.
    """
    engine._manual_backward_expected = True


@contextmanager
def reduced_at_end(engine: Any) -> Iterator[None]:
    """Reduce the gradients of all backward passes of a block at its end, unless it raises.

    DeepSpeed reduces even then: a rank out of memory would deadlock with the others.

    Source:
        runtime/engine.py coalesce_grad_reduction.
    """
    try:
        with engine.coalesce_grad_reduction():
            try:
                yield
            except BaseException:
                vars(engine)[_FLUSH] = lambda optimizer: None
                raise
    finally:
        vars(engine).pop(_FLUSH, None)


def reduce_now(engine: Any) -> None:
    """Reduce the gradients that parameters have, as `coalesce_grad_reduction` does at its end under the engine's stage."""
    stage3 = engine.zero_optimization_partition_weights()
    (engine._flush_coalesced_reduction_zero3 if stage3 else engine._flush_coalesced_reduction_zero12)(engine.optimizer)


def begin_backward(engine: Any, number: int) -> None:
    """Tell ZeRO-2 or 3 how many backward passes the next one's parameters have had in this step: the first starts their sum.

    Source:
        runtime/zero/stage_1_and_2.py setup_buckets, which increments micro_step_id first; stage3.py partition_grads. The flag is
        otherwise cleared by a forward pass, which may not come between.
    """
    engine.optimizer.clear_backward_seen_flag()
    engine.optimizer.micro_step_id = number if engine.zero_optimization_partition_weights() else number - 1


def forget_averaged_gradients(optimizer: Any) -> None:
    """Forget the gradients of the step before in ZeRO-2: under offload it keeps them after an overflow, and would add to
    infinite values (runtime/zero/stage_1_and_2.py averaged_gradients)."""
    optimizer.averaged_gradients = dict.fromkeys(optimizer.averaged_gradients)


def allow_backward_without_gradients(optimizer: Any) -> None:
    """Have ZeRO-2 create empty buckets for a backward pass without trainable layers: it assumes that they exist.

    Source:
        runtime/zero/stage_1_and_2.py setup_buckets, overlapping_partition_gradients_reduce_epilogue.
    """
    end = optimizer.overlapping_partition_gradients_reduce_epilogue

    def make_and_end() -> None:
        optimizer.setup_buckets()
        end()

    optimizer.overlapping_partition_gradients_reduce_epilogue = make_and_end


def hold_back(optimizer: Any, takes: Callable[[nn.Parameter], bool]) -> None:
    """Have ZeRO-2 or 3 leave the gradients alone of parameters for which `takes` returns true, after each backward pass.

    Source:
        runtime/zero/stage_1_and_2.py and stage3.py reduce_ready_partitions_and_remove_grads.
    """
    reduce = optimizer.reduce_ready_partitions_and_remove_grads

    def reduce_others(parameter: nn.Parameter, *group: int) -> None:
        if not takes(parameter):
            reduce(parameter, *group)

    optimizer.reduce_ready_partitions_and_remove_grads = reduce_others


def end_accumulation(engine: Any) -> None:
    """Prepare the reduced gradients of ZeRO-2 or 3 for the step, after the last backward pass (runtime/engine.py step)."""
    engine.set_gradient_accumulation_boundary(True)
    engine.optimizer.finalize_gradient_accumulation_boundary()


# Optimizers and checkpoints.


def inner_optimizer(engine: Any) -> Any:
    """Return torch's or DeepSpeed's own optimizer, inside the wrapper (runtime/engine.py _configure_optimizer)."""
    return engine.basic_optimizer


def undo_first_step(optimizer: Any) -> None:
    """Undo the step with zero gradients by which stage 0 in 16 bit allocates its states, which stay: Adam's correction of its
    moments would count it, and weights would decay.

    Source:
        runtime/fp16/fused_optimizer.py and unfused_optimizer.py initialize_optimizer_states; stages 1 and 2 make no such step.
    """
    if hasattr(optimizer, "fp32_groups_flat"):
        groups = [(optimizer.fp32_groups_flat, optimizer.fp16_groups_flat)]
    else:
        groups = list(zip(optimizer.fp32_groups, optimizer.fp16_groups, strict=True))
    for pair in groups:
        for master, weight in zip(*pair, strict=True):
            master.data.copy_(weight.data)
    for state in optimizer.optimizer.state.values():
        for key in {"step", "exp_avg", "exp_avg_sq", "momentum_buffer"} & state.keys():
            value = state[key]
            if isinstance(value, Tensor):
                value.zero_()
            elif value is not None:
                state[key] = 0


def shorten_step(optimizer: Any) -> None:
    """Have ZeRO take the norms of all gradients in one pass over them; in stages 1 and 2 cast them in one more and scale them in a third.

    DeepSpeed copies each gradient into fp64 first, eight bytes an element, and multiplies by a number on the card in a kernel that
    reads one element at a time: 25 and 7 ms of a step with 2.2 billion weights on an H200. Before that it looks for overflow, 13
    kernels a parameter; a norm that is not finite tells as much. Of a weight that several ranks have whole one counts the gradient;
    the others add zero times its norm, which is NaN if that is not finite on them alone. It flattens the gradients in 16 bit and
    casts the flat ones, so that there are three copies at a time; here they are cast on their way. On a card norms are summed in
    fp32, in blocks whose sums are added as a tree; elsewhere in fp64.

    Source:
        runtime/zero/stage_1_and_2.py step, check_overflow, get_grad_norm_direct, unscale_and_clip_grads; stage3.py
        get_grad_norm_direct.
    """
    combine, scale = optimizer.get_grad_norm_direct, optimizer.unscale_and_clip_grads
    in_flats = hasattr(optimizer, "bit16_groups") and not optimizer.cpu_offload
    tells_overflow = in_flats and optimizer.compute_grad_norm and optimizer.check_grad_overflow

    def norm(gradients: Iterable[Tensor], params: Any, norm_type: float = 2) -> Tensor:
        kept = [gradient.detach() for gradient in gradients if not getattr(gradient, "_zero_padding", False)]
        if norm_type == 2 and kept:
            dtype = torch.float32 if kept[0].is_cuda else torch.float64
            kept = list(torch._foreach_norm(kept, 2, dtype=dtype))
            if tells_overflow:
                kept = [*kept[: len(params)], 0 * torch.stack(kept).sum()]
                params = [*params, SimpleNamespace(model_parallel=True)]  # counted on each rank
        result: Tensor = combine(kept, params, norm_type)
        return result

    def multiply(flats: list[Tensor], total_norm: Tensor) -> None:
        if not optimizer.clip_grad and optimizer.loss_scale == 1:
            return
        factor = torch.ones((), device=optimizer.device)
        scale([factor], total_norm)
        torch._foreach_mul_(flats, factor)

    def flatten(tensors: list[Tensor]) -> Tensor:
        dtype = optimizer.single_partition_of_fp32_groups[0].dtype
        flat = torch.empty(sum(tensor.numel() for tensor in tensors), dtype=dtype, device=tensors[0].device)
        parts = torch.split(flat, [tensor.numel() for tensor in tensors])
        torch._foreach_copy_(list(parts), [tensor.detach().reshape(-1) for tensor in tensors])
        return flat

    def step(closure: Any = None) -> None:
        other = optimizer.flatten
        optimizer.flatten = flatten
        try:
            do_step(closure)
        finally:
            optimizer.flatten = other

    optimizer.get_grad_norm_direct = norm
    if in_flats:
        do_step = optimizer.step
        optimizer.step = step
        optimizer.unscale_and_clip_grads = multiply
        if tells_overflow:
            optimizer.check_overflow = lambda partition_gradients=True: None


@contextmanager
def left_on_host(model: nn.Module, weights: Iterable[nn.Parameter]) -> Iterator[None]:
    """Have an engine of ZeRO-1 or 2 that is made in the block leave weights in host memory, where they are.

    It would move the model to its card, send all weights to other ranks through the card, and flatten trained ones on the host for
    as long as that takes, but only if the card has too little memory; flattened where they are, they stay there.

    Args:
        model: The model; its weights outside `weights` are on the card.
        weights: Those on the host, equal on all ranks.

    Source:
        runtime/engine.py _configure_distributed_model, _broadcast_model; runtime/zero/stage_1_and_2.py __init__
        (flatten_on_accelerator); accelerator/abstract_accelerator.py available_memory.
    """
    from deepspeed.accelerator import get_accelerator

    accelerator, held = get_accelerator(), list(weights)
    for weight in held:
        weight.ds_optim_param = True  # type: ignore[attr-defined]
    vars(model)["to"] = lambda *_: model
    vars(accelerator)["available_memory"] = lambda *_: sys.maxsize
    try:
        yield
    finally:
        del vars(accelerator)["available_memory"], vars(model)["to"]
        for weight in held:
            del weight.ds_optim_param  # type: ignore[attr-defined]


class OffloadedPartitions:
    """What the optimizer of ZeRO-1 or 2 holds of a rank's weights, and its gradients, for a step on the host that is not DeepSpeed's.

    Args:
        optimizer: Wrapper of stage 1 or 2 with `offload_optimizer`.

    Attributes:
        flats: Weights of each parameter group, one after the other and padded, on the card, or on the host under `left_on_host`.
            Shape (ranks * partition,).
        masters: This rank's fp32 weights of each group, on the host. Shape (partition,).
        optimizer: The optimizer inside the wrapper.
        dp_group: Ranks that share each group.
        gradient_dtype: Type in which gradients are reduced.

    Source:
        runtime/zero/stage_1_and_2.py DeepSpeedZeroOptimizer.__init__, copy_grads_in_partition, step.
    """

    def __init__(self, optimizer: Any) -> None:
        self._wrapper = optimizer
        self.flats: list[Tensor] = optimizer.bit16_groups_flat
        self.masters: list[Tensor] = optimizer.single_partition_of_fp32_groups
        self.optimizer = optimizer.optimizer
        self.dp_group: dist.ProcessGroup = optimizer.dp_process_group
        self.gradient_dtype: torch.dtype = optimizer._gradient_reduction_buffer_dtype()

    def offsets(self, group: int) -> Iterator[tuple[nn.Parameter, int]]:
        """Yield the weights of a group with the place of each in its flat tensor, in the order of the places."""
        wrapper = self._wrapper
        return zip(wrapper.round_robin_bit16_groups[group], wrapper.round_robin_bit16_offsets[group], strict=True)

    def own_parts(self, group: int) -> Iterator[tuple[nn.Parameter, int, int]]:
        """Yield the weights of which this rank has a part, with the part's place in the partition and its elements."""
        for weight in self._wrapper.params_in_partition[group]:
            _, _, place, numel = self._wrapper.grad_position[self._wrapper.get_param_id(weight)]
            yield weight, place, numel

    def release_buffers(self) -> None:
        """Free DeepSpeed's gradients and staging buffers, which a step of its own would use."""
        wrapper = self._wrapper
        for master in self.masters:
            master.grad = None
        for parts in wrapper.offload_gradient_dict.values():  # parameters refer to these lists
            parts.clear()
        wrapper._get_offload_gradient_dict = lambda: None  # made again after a load (_link_all_hp_params)
        wrapper.param_buffer_of_bit16_for_cpu_offload_groups = []
        wrapper.temp_grad_buffer_for_cpu_offload = wrapper.temp_grad_buffer_for_gpu_offload = None

    def gather_by(self, group: dist.ProcessGroup) -> None:
        """Gather weights that a load has restored by a group for host memory, in which the flat tensors are (update_lp_params)."""
        wrapper = self._wrapper

        @torch.no_grad()
        def gather() -> None:
            own = dist.get_rank(group)
            for parts, master in zip(wrapper.parallel_partitioned_bit16_groups, self.masters, strict=True):
                parts[own].copy_(master)
                for rank, part in enumerate(parts):
                    dist.broadcast(part, group_src=rank, group=group)

        wrapper.update_lp_params = gather

    def take_over(self, *, take: Callable[..., None], step: Callable[[], None]) -> None:
        """Send each reduced gradient to `take`, and have `step` do the optimizer's steps.

        Args:
            take: Called with weight and gradient, this rank's part of it, and by name the group and the place in its partition.
            step: Called in place of the wrapper's step.
        """
        wrapper = self._wrapper

        def send(weight: nn.Parameter, group: int | None = None) -> None:
            of_group, start, place, numel = wrapper.grad_position[wrapper.get_param_id(weight)]
            gradient = wrapper.get_param_gradient_attribute(weight)
            take(weight, gradient.view(-1).narrow(0, start, numel), group=of_group, place=place)
            wrapper._record_gradient_stream(gradient, torch.cuda.current_stream() if gradient.is_cuda else None)
            wrapper.clear_grad_attribute(weight)

        wrapper.copy_grads_in_partition = send
        wrapper.step = lambda closure=None: step()

    def combined_norm(self, norms: list[tuple[nn.Parameter, Tensor]], *, device: torch.device) -> float:
        """Return the norm of all ranks' gradients; of a weight that several model-parallel ranks have whole one counts it.

        Args:
            norms: Weights and the norms of this rank's parts of their gradients, scalars on the card.
            device: The card.

        Collectives:
            One all-reduce of a number over the data-parallel ranks, one over the model-parallel ones.
        """
        from deepspeed.runtime.utils import is_model_parallel_parameter

        wrapper = self._wrapper
        counted = [
            norm if wrapper.model_parallel_rank == 0 or is_model_parallel_parameter(weight) else 0 * norm
            for weight, norm in norms
        ]
        square = torch.stack(counted).double().square().sum() if counted else torch.zeros((), device=device).double()
        square = square.to(torch.float32)
        dist.all_reduce(square, group=self.dp_group)
        wrapper._model_parallel_all_reduce(tensor=square, op=dist.ReduceOp.SUM)
        return math.sqrt(float(square))

    def begin_step(self, norm: float) -> float | None:
        """Note a step's norm, and adapt the loss scale; return the factor of its gradients, or None if it must not be taken.

        Args:
            norm: Norm of the gradients, which have the loss scale.
        """
        from deepspeed.runtime.zero.stage_1_and_2 import INITIAL_MICRO_STEP_ID

        wrapper = self._wrapper
        wrapper.micro_step_id = INITIAL_MICRO_STEP_ID
        is_finite = math.isfinite(norm)
        wrapper.overflow = not is_finite and (wrapper.dtype != torch.bfloat16 or wrapper.check_grad_overflow)
        scale = float(wrapper.loss_scale)
        wrapper._update_scale(wrapper.overflow)
        if wrapper.overflow:
            wrapper._global_grad_norm = float("inf")
            wrapper.zero_grad(set_to_none=True)
            return None
        wrapper._global_grad_norm = norm / scale if is_finite else -1.0
        clip = float(wrapper.clip_grad)
        if not clip:
            return 1 / scale
        return 1 / (max(1.0, (norm / scale + 1e-6) / clip) * scale) if is_finite else 0.0

    def note_step(self) -> None:
        """Let DeepSpeed find the states, once they are there, and torch's schedules know of a step (utils/tensor_fragment.py)."""
        self._wrapper._lazy_init_hp_params_optimizer_state()
        self.optimizer._opt_called = True  # torch optim/lr_scheduler.py LRScheduler.step


def unite_optimizers(optimizer: Any) -> list[int]:
    """Give both optimizers of Twin-Flow, of the CPU and of the card, one set of states and of parameter groups.

    DeepSpeed saves and loads the states of the CPU's alone, and its schedule sets the learning rates of the CPU's groups alone: the card's
    weights would lose their moments at a resume, and those of the first group keep their first rate. To be called again after a load,
    which replaces both.

    Args:
        optimizer: Wrapper of ZeRO-3, with a share of its state on the CPU.

    Returns:
        Numbers of the sub-groups that have no state: all before the first step.

    Source:
        runtime/zero/stage3.py __init__ (backup_optimizer), _optimizer_step, _rigid_state_dict, _rigid_load_state_dict; those of a card by
        `subgroup_to_device`.
    """
    own, card = optimizer.optimizer, getattr(optimizer, "backup_optimizer", None)
    if card is not None:
        card.state = own.state
        for group, options in zip(own.param_groups, card.param_groups, strict=True):
            for name, value in options.items():  # those that the CPU's optimizer does not have
                group.setdefault(name, value)
        card.param_groups = own.param_groups
    flats = optimizer.fp32_partitioned_groups_flat
    return [number for number, flat in enumerate(flats) if not own.state.get(flat)]


def clipping_norm(engine: Any) -> float | None:
    """Return the norm to which an engine's wrapper clips gradients, which a checkpoint replaces; None without a wrapper.

    Source:
        runtime/zero/stage_1_and_2.py _load_global_state; runtime/bf16_optimizer.py and runtime/fp16/fused_optimizer.py
        load_state_dict.
    """
    return getattr(engine.optimizer, "clip_grad", None)


def set_clipping_norm(engine: Any, norm: float) -> None:
    """Set the norm of `clipping_norm`."""
    engine.optimizer.clip_grad = norm


def pickled_classes() -> list[type]:
    """Return the classes of DeepSpeed's own that its checkpoints have.

    Source:
        runtime/zero/stage_1_and_2.py, stage3.py, bf16_optimizer.py: state_dict.
    """
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    return [fragment_address, LossScaler, DynamicLossScaler, ZeroStageEnum]


def sort_by_rank(engine: Any) -> None:
    """Make an engine sort the files of model-parallel ranks by rank number.

    DeepSpeed takes the file at a rank's index in alphabetical order, where `mp_rank_100` comes before `mp_rank_11`: with more than
    100 ranks per model they would load each other's.

    Source:
        runtime/engine.py _get_all_ckpt_names; runtime/state_dict_factory.py SDLoaderBase.load.
    """
    found = engine._get_all_ckpt_names
    engine._get_all_ckpt_names = lambda *place: sorted(found(*place), key=lambda name: (len(name), name))


# What a checkpoint's module states say when the optimizer's are left out.
WEIGHTS_ALONE = "weights_alone"


@contextmanager
def saving_weights_alone(engine: Any) -> Iterator[None]:
    """Leave the optimizer's state and the schedule out of what an engine saves; under stage 3 its files hold the weights, and keep them.

    Source:
        runtime/engine.py _save_checkpoint, _save_zero_checkpoint; runtime/zero/stage3.py _rigid_state_dict.
    """
    files = engine.checkpoint_engine
    save = files.save

    def save_weights(state_dict: dict[str, Any], path: str) -> None:
        optimizer = state_dict.get("optimizer_state_dict")
        if optimizer is None:
            save(state_dict | {"optimizer": None, "lr_scheduler": None, WEIGHTS_ALONE: True}, path)
        elif _FLAT_WEIGHTS in optimizer:
            save(state_dict | {"optimizer_state_dict": {_FLAT_WEIGHTS: optimizer[_FLAT_WEIGHTS]}}, path)

    files.save = save_weights
    try:
        yield
    finally:
        files.save = save


@contextmanager
def saving_files_by(engine: Any, save: Callable[[Any, str], None]) -> Iterator[None]:
    """Make an engine write its files by `save(state_dict, path)` instead of `torch.save`, and copy no weight to host memory before.

    Source:
        runtime/checkpoint_engine/torch_checkpoint_engine.py save, through which runtime/engine.py writes every file of tensors
        but the swap files; runtime/engine.py _save_checkpoint, which copies weights for a writer of whole storages.
    """
    files = engine.checkpoint_engine
    files.save = save
    files.preserves_storage_sharing = lambda: False
    try:
        yield
    finally:
        del files.save, files.preserves_storage_sharing


def load_files_by(engine: Any, read: Callable[..., dict[str, Any]]) -> None:
    """Make an engine load its files by `read(path, map_location=)` instead of a `torch.load` that runs code they name.

    Source:
        runtime/checkpoint_engine/torch_checkpoint_engine.py load, through which runtime/engine.py and
        runtime/state_dict_factory.py read every file.
    """
    engine.checkpoint_engine.load = read


def zero_file(engine: Any, folder: Path, tag: str) -> Path:
    """Return the file of a rank's optimizer state in a checkpoint (runtime/engine.py _get_zero_ckpt_name)."""
    return Path(engine._get_zero_ckpt_name(str(folder), tag))


# The optimizer of ZeRO-3 with state on NVMe.


def partition_rank(optimizer: Any, weight: nn.Parameter) -> int:
    """Return which part of a weight this rank holds under stage 3 (zero/stage3.py _get_param_partition_rank)."""
    return int(optimizer._get_param_partition_rank(weight))


def write_partitions(optimizer: Any, number: int) -> None:
    """Round the weights of a sub-group of stage 3 from their fp32 copies, as its step does.

    Source:
        deepspeed runtime/zero/stage3.py _reassign_or_swap_out_partitioned_parameters.
    """
    optimizer._reassign_or_swap_out_partitioned_parameters(number)


@dataclass(frozen=True, slots=True, kw_only=True)
class MasterWeights:
    """The master weights of one sub-group of a ZeRO-3 optimizer.

    Args:
        flat: Flat parameter; empty while it is on NVMe.
        numel: Elements of this rank's share.
        swapped: Whether they are on NVMe: those below DeepSpeed's smallest transfer stay in memory.
    """

    flat: Any
    numel: int
    swapped: bool

    @property
    def file(self) -> str:
        """Name of the swap file."""
        return f"{self.flat.ds_id}{SWAP_SUFFIX}"


def master_weights(optimizer: Any) -> list[MasterWeights]:
    """Return the master weights by sub-group.

    Source:
        runtime/zero/stage3.py fp32_partitioned_groups_flat, fp16_partitioned_groups_flat_numel,
        _swappable_optimizer_subgroup; runtime/swap_tensor/optimizer_utils.py SwapTensorContext.
    """
    numels = optimizer.fp16_partitioned_groups_flat_numel
    return [
        MasterWeights(flat=flat, numel=int(numels[index]), swapped=bool(optimizer._swappable_optimizer_subgroup(index)))
        for index, flat in enumerate(optimizer.fp32_partitioned_groups_flat)
    ]


def load_optimizer_state(optimizer: Any, saved: Mapping[str, Any]) -> None:
    """Load the loss scale and the inner optimizer's state of a ZeRO-3 optimizer's `state_dict`.

    Source:
        runtime/zero/stage3.py _rigid_load_state_dict.
    """
    optimizer.loss_scaler = saved["loss_scaler"]
    optimizer.dynamic_loss_scale = saved["dynamic_loss_scale"]
    optimizer.overflow = saved["overflow"]
    optimizer._set_fp32_optimizer_param_groups()
    optimizer.optimizer.load_state_dict(saved["optimizer_state_dict"])
    optimizer._clear_fp32_optimizer_param_groups()


def rename_swap_files(optimizer: Any, files: Iterable[str | None]) -> None:
    """Make an optimizer that has not stepped use other names of swap files; None leaves a sub-group's.

    DeepSpeed names them by parameter ids, which continue from one model of a process to the next.

    Source:
        runtime/swap_tensor/optimizer_utils.py OptimizerSwapper.swap_params_info, OptimizerStateSwapInfo.
    """
    swapper = optimizer.optimizer_swapper
    infos = dict(swapper.swap_params_info)
    for master, file in zip(master_weights(optimizer), files, strict=True):
        if file is None or master.file == file:
            continue
        info = infos[master.flat.ds_id]
        swapper.swap_params_info.pop(master.flat.ds_id, None)
        context = info.tensors[0]  # a fresh engine has swapped only the master weights
        Path(context.swap_path).unlink(missing_ok=True)
        master.flat.ds_id = info.param_id = file.removesuffix(SWAP_SUFFIX)
        context.swap_path = str(Path(swapper.swap_folder) / file)
        swapper.swap_params_info[master.flat.ds_id] = info
