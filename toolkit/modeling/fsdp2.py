"""A model whose weights torch's FSDP2 shards over the data-parallel ranks.

Construct on the meta device, add adapters, finish, shard, allocate this rank's parts, then fill them weight by weight: no rank
ever holds the whole model. The groups are those of Accelerate, whose own preparation starts from a whole model in each
process.

Source:
    torch distributed/fsdp/_fully_shard; accelerate utils/fsdp_utils.py fsdp2_prepare_model (a group for each decoder layer and
    for the embedding, one for final norm and head that stays gathered between forward and backward pass; trainable weights in
    fp32); arXiv 2304.11277.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from transformers import PreTrainedModel

from toolkit.config.job import Fsdp2
from toolkit.distributed.dtensors import copy_whole, whole_of
from toolkit.errors import PlanError
from toolkit.introspect import decoder_layers
from toolkit.modeling.initialization import initialize_weights
from toolkit.modeling.local_shard import LocalShard
from toolkit.modeling.nf4 import begin_with_errors
from toolkit.modeling.sharded_adapters import draw_adapters
from toolkit.modeling.weights import load_pretrained

Places = Mapping[str, tuple[nn.Module, str]]


def places_of(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Return the module and the attribute that hold each tensor of a model's state, tied ones under all of their keys."""
    modules = dict(model.named_modules())
    return {key: (modules[key.rpartition(".")[0]], key.rpartition(".")[2]) for key in model.state_dict(keep_vars=True)}


def mesh_of(options: Fsdp2, group: dist.ProcessGroup, device: torch.device) -> DeviceMesh:
    """Return the mesh over which weights are sharded: the data-parallel ranks, by replica if there are several.

    Collectives:
        With several replicas all ranks create the groups inside and between them.
    """
    replicas, size = options.dp_replicate_size, dist.get_world_size(group)
    if replicas == 1:
        return DeviceMesh.from_group(group, device.type)
    return init_device_mesh(device.type, (replicas, size // replicas), mesh_dim_names=("replicate", "shard"))


def shard_over_ranks(
    model: Any, *, mesh: DeviceMesh, options: Fsdp2, dtype: torch.dtype, reduce_dtype: torch.dtype, tied: bool
) -> None:
    """Shard a model's weights, in place; those that are trained have fp32 shards.

    Args:
        model: A `PreTrainedModel` or a `peft.PeftModel` around one, on the meta device.
        mesh: The data-parallel ranks, as `mesh_of` returns them.
        options: Section of the job.
        dtype: Data type in which layers are gathered.
        reduce_dtype: Data type in which gradients are reduced.
        tied: Whether embedding and head share a weight.
    """
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.float32)
    ways: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce_dtype),
        "offload_policy": CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")
        if options.cpu_offload
        else OffloadPolicy(),
    }
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    reshards = options.reshard_after_forward
    for layer in decoder_layers(base):
        fully_shard(layer, **ways, reshard_after_forward=reshards)
    embedding, head = base.get_input_embeddings(), base.get_output_embeddings()
    if not tied:
        fully_shard(embedding, **ways, reshard_after_forward=reshards)
    tail = [module for module in (_final_norm(base), embedding if tied else None, head) if module is not None]
    if tail:  # classifiers on encoders have none of these
        fully_shard(tail, **ways, reshard_after_forward=False)
    fully_shard(model, **ways)


def _final_norm(model: Any) -> nn.Module | None:
    """Return the norm after the last decoder layer: the last child of the decoder whose class is a norm, as Accelerate finds it."""
    decoder = getattr(model, model.base_model_prefix, model)
    norms = [child for child in decoder.children() if "norm" in type(child).__name__.lower()]
    return norms[-1] if norms else None


def allocate_shards(model: nn.Module, *, device: torch.device, ties: Mapping[str, str], places: Places) -> None:
    """Allocate this rank's parts of a sharded model, uninitialised, with tied weights once: `to_empty` would allocate and untie each."""
    tied = [(places[target], places[source]) for target, source in ties.items() if {target, source} <= places.keys()]
    for (module, name), _ in tied:
        module._parameters[name] = None
    model.to_empty(device=device)
    for (module, name), (owner, attribute) in tied:
        module._parameters[name] = owner._parameters[attribute]


def move_shards_to_host(model: nn.Module) -> None:
    """Move this rank's parts of the weights to RAM; buffers stay, as what runs on the card reads them there."""
    buffers = [(module, dict(module._buffers)) for module in model.modules()]
    model.to("cpu")
    for module, held in buffers:
        module._buffers.update(held)


def fill(
    model: Any,
    base: PreTrainedModel,
    *,
    dense: PreTrainedModel,
    places: Places,
    weights: Path | None,
    seed: int,
    grows: bool,
    head_seed: int | None,
    deviates: bool,
    group: dist.ProcessGroup,
    progress: Callable[[int, int], None] | None,
) -> None:
    """Fill a sharded model with pretrained or random weights, and its adapters.

    Args:
        model: The model with its adapters.
        base: The model of transformers inside it.
        dense: Its whole twin on the meta device, with its tied weights.
        places: Where each key of the twin is in `base`.
        weights: Folder of safetensors; None to draw the weights from `seed`.
        seed: Seed of the weights that are drawn.
        grows: As of `load_pretrained`.
        head_seed: The same.
        deviates: As of `draw_adapters`.
        group: The data-parallel ranks.
        progress: As of `load_pretrained`.
    """
    names = {module: name for name, module in base.named_modules()}
    keys = {key: f"{names[module]}.{attribute}".lstrip(".") for key, (module, attribute) in places.items()}
    part = LocalShard(shards={}, tp_group=None, own_keys=keys)
    if weights is None:
        initialize_weights(base, seed=seed, dense=dense, part=part)
    else:
        load_pretrained(
            base,
            weights,
            group=group,
            dense=dense,
            part=part,
            grows=grows,
            head_seed=head_seed,
            progress=progress,
        )
    if model is not base:
        _fill_adapters(model, seed=seed, deviates=deviates, group=group)


@torch.no_grad()
def _fill_adapters(model: nn.Module, *, seed: int, deviates: bool, group: dist.ProcessGroup) -> None:
    """Fill LoRA's matrices, B with zeros, DoRA's lengths, and the copies of modules that are trained whole."""
    from peft.tuners.lora import Linear as LoraLinear
    from peft.utils.other import ModulesToSaveWrapper

    filled: set[nn.Parameter] = set()
    for module in model.modules():
        if isinstance(module, LoraLinear):
            for name in module.lora_A:
                module.lora_B[name].weight.zero_()
                filled |= {module.lora_A[name].weight, module.lora_B[name].weight}
            for length in module.lora_magnitude_vector.values():
                rows = whole_of(module.get_base_layer().weight)
                copy_whole(length.weight, torch.linalg.norm(rows, dim=1))
                filled.add(length.weight)
        elif isinstance(module, ModulesToSaveWrapper):
            for copy in module.modules_to_save.values():
                for (_, value), (_, source) in zip(_held(copy), _held(module.original_module), strict=True):
                    _copy_whole_of(source, value)
                    filled.add(value)  # type: ignore[arg-type]
    draw_adapters(model, seed=seed, deviates=deviates)
    begin_with_errors(model, group=group)
    left = [name for name, value in model.named_parameters() if value.requires_grad and value not in filled]
    if left:
        raise PlanError.of(
            code="LORA_TARGETS",
            key="train.lora.target_modules",
            message=f"strategy=fsdp2 shards the adapters of linear layers alone, and {left[0]} is not one of them",
            fix="Name linear layers in train.lora.target_modules, or set parallel.strategy to zero or ddp",
        )


def _held(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _copy_whole_of(source: Any, target: torch.Tensor) -> None:
    copy_whole(target, whole_of(source))
