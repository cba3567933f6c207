"""Guards against treating a rank's part of a model as the whole: in DDP and FSDP, `save_pretrained`, `save_16bit_model` and `generate`.

Only the instance that was sharded or split changes its class. Nothing in torch is patched.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from toolkit.errors import PlanError
from toolkit.topology.grid import join

_BY_ENGINE = "Train it with `tk.initialize`, whose engine knows the tensor group"


class PartOfModel(nn.Module):
    """Mixin for a model of which this rank has only a part.

    Attributes:
        held_part: Description of the part, for messages; "" for a whole model of the same class.
        tensor_group: Ranks that have the other shards of its layers: wrappers that replicate or shard parameters must not
            span them. None if no layer is sharded.
    """

    held_part: str = ""
    tensor_group: Any = None

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """Yield the same as `nn.Module.named_modules`, which `parameters` and similar methods call.

        Raises:
            PlanError: TP_REPLICATED if the calling wrapper would copy this rank's shards to another rank of its tensor group.
        """
        checks = self.tensor_group is not None and not torch.compiler.is_compiling()
        if checks:
            _check_callers(sys._getframe(), self.tensor_group)
        for name, module in super().named_modules(*args, **kwargs):
            if checks and "shards" in module.__dict__:
                _check_placement(module, self.tensor_group)
            yield name, module


def guard_part(model: nn.Module, *, held_part: str, tp_group: dist.ProcessGroup | None = None) -> None:
    """Make a model refuse calls that would treat this rank's part as the whole.

    `save_pretrained`, `push_to_hub` and `generate` are refused; with a tensor group, and before any
    communication, so are DistributedDataParallel, `fully_shard` and DeepSpeed over ranks that have other shards, and
    FullyShardedDataParallel. DDP and `fully_shard` over data-parallel ranks, which have the same shards, are allowed.

    Args:
        model: Sharded or split model, or a wrapper of one such as peft's; its class becomes a subclass of the same name.
        held_part: Description of this rank's part, for messages.
        tp_group: Ranks that have the other shards of its layers.
    """
    if isinstance(model, PartOfModel):
        return
    part: Any = model
    kind: Any = type(model)
    part.__class__ = _guarded(kind)
    part.held_part, part.tensor_group = held_part, tp_group


def guard_engine(engine: Any, model: nn.Module) -> None:
    """Make DeepSpeed's engine refuse `save_16bit_model`, which writes rank 0's part under the names of whole weights.

    Args:
        engine: Engine of a model of which each rank has a part.
        model: That model, guarded.
    Source:
        deepspeed 0.19.8, runtime/engine.py, DeepSpeedEngine.save_16bit_model.
    """
    engine.save_16bit_model = partial(_refusal("save_16bit_model"), model)


@cache
def _guarded(kind: Any) -> Any:
    own: dict[str, Any] = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    own |= {name: _refusal(name) for name in _REFUSED if callable(getattr(kind, name, None))}
    return type(kind.__name__, (PartOfModel, kind), own)


# Reason and fix for each method that would treat the part as the whole.
_SAVE = (
    "no `from_pretrained` could join the shards of all ranks",
    "Save the run with `tk.save` and write the whole model with `tk.export`; in your own loop join each sharded "
    "weight by `parameter_shards(model)[name].gather(weight, tp_group=tp_group)`",
)
_GENERATE = (
    "not all scores from which a token is chosen",
    "Write the whole model with `tk.export` and generate with that; in your own loop over tensor-parallel ranks "
    "choose tokens from `gather_scores` of the logits",
)
_REFUSED = {"save_pretrained": _SAVE, "push_to_hub": _SAVE, "save_16bit_model": _SAVE, "generate": _GENERATE}


def _refusal(name: str) -> Callable[..., None]:
    why, fix = _REFUSED[name]

    def refuse(self: Any, *args: Any, **kwargs: Any) -> None:
        message = f"{name} of {type(self).__name__}: this rank has {self.held_part}, and {why}"
        raise PlanError.of(
            code="PART_GENERATE" if _REFUSED[name] is _GENERATE else "PART_SAVE", key=name, message=message, fix=fix
        )

    return refuse


def _check_callers(frame: FrameType | None, tp_group: dist.ProcessGroup) -> None:
    """Look for the constructor of a wrapper in the calling frames: torch does not notify the module."""
    while frame is not None:
        if frame.f_code.co_name == "__init__":
            _check_wrapper(frame.f_locals.get("self"), tp_group)
        frame = frame.f_back


def _check_wrapper(wrapper: object, tp_group: dist.ProcessGroup) -> None:
    if isinstance(wrapper, DistributedDataParallel):
        # DDP sets the group before it reads the parameters (torch nn/parallel/distributed.py).
        ranks = dist.get_process_group_ranks(wrapper.process_group)
        if shared := _shared(ranks, tp_group):
            raise _replicated("DistributedDataParallel", shared, "process_group=")
    elif _is_of(wrapper, "torch.distributed.fsdp", "FullyShardedDataParallel"):
        raise PlanError.of(
            code="TP_REPLICATED",
            key="FullyShardedDataParallel",
            message="FullyShardedDataParallel flattens the parameters of a model that tensor-parallel ranks share, "
            "and the hooks that sum their gradients over those ranks are lost",
            fix=f"Use DistributedDataParallel or `fully_shard` over the data-parallel ranks. {_BY_ENGINE}",
        )
    elif _is_of(wrapper, "deepspeed.runtime.engine", "DeepSpeedEngine") and getattr(wrapper, "mpu", None) is None:
        raise _replicated("deepspeed.initialize without mpu=", dist.get_process_group_ranks(tp_group), "mpu=")


def _check_placement(module: nn.Module, tp_group: dist.ProcessGroup) -> None:
    """Refuse shards that `fully_shard` has sharded again over ranks that have other shards."""
    parameters: dict[str, Any] = module._parameters
    for parameter in parameters.values():
        if _is_of(parameter, "torch.distributed.tensor", "DTensor") and (
            shared := _shared(parameter.device_mesh.mesh.flatten().tolist(), tp_group)
        ):
            raise _replicated("fully_shard", shared, "mesh=")


def _is_of(value: object, module: str, name: str) -> bool:
    """Return whether a value is of a class whose module takes long to import: it has been imported if there is one."""
    found = sys.modules.get(module)
    return found is not None and isinstance(value, getattr(found, name))


def _shared(ranks: list[int], tp_group: dist.ProcessGroup) -> list[int]:
    """Return the ranks of a wrapper that have different shards of one model; empty if there is only this rank."""
    shared = sorted(set(ranks) & set(dist.get_process_group_ranks(tp_group)))
    return shared if len(shared) > 1 else []


def _replicated(wrapper: str, ranks: list[int], argument: str) -> PlanError:
    return PlanError.of(
        code="TP_REPLICATED",
        key=wrapper,
        message=f"{wrapper} treats ranks {join(ranks)} as copies of one model, but each has other shards of it: those "
        f"of rank {ranks[0]} would replace the others'",
        fix=f"Name only the data-parallel ranks ({argument}), which have the same shards; do not pass this model to "
        f"`accelerator.prepare`. {_BY_ENGINE}",
    )
