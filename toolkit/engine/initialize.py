"""Creation of a run from a plan: process groups, model, optimizer, engine."""

from __future__ import annotations

import logging
import os
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from toolkit.arguments import checks_arguments
from toolkit.catalog.pretrained import weight_problems
from toolkit.distributed.deepspeed_mpu import ModelParallelUnit
from toolkit.distributed.deepspeed_private import (
    OffloadedPartitions,
    left_on_host,
    reset_mpu,
    restore_patches,
    shorten_step,
    undo_first_step,
    unite_optimizers,
)
from toolkit.distributed.world import World, destroy_world, init_world
from toolkit.engine.extensions import build_extensions
from toolkit.engine.lr_scheduler import LazyLRScheduler
from toolkit.engine.memory_tracker import PhaseMemoryTracker
from toolkit.engine.optimizers import made_here
from toolkit.engine.placement import Placement, place_rank
from toolkit.engine.run import Run
from toolkit.engine.seed import seed_random_state
from toolkit.engine.zero3_trace import compare_within
from toolkit.errors import PlanError, first_line, raise_all
from toolkit.launch.build_tools import build_settings, built_with
from toolkit.modeling.build import build_model, no_weight
from toolkit.offload.overlapped import OverlappedOffload
from toolkit.offload.streamed_layers import StreamedLayers, streamable
from toolkit.planning.deepspeed_config import engine_config
from toolkit.planning.plan import Plan
from toolkit.tensor_parallel.guard import guard_engine

logger = logging.getLogger(__name__)


@checks_arguments
def initialize(
    plan: Plan,
    *,
    weights: str | Path | None = None,
    world: World | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Run:
    """Join the launcher's process groups, build the model and start its engine.

    DeepSpeed's extensions are compiled first. Torch's fused AdamW takes the place of DeepSpeed's where that cannot be built; the run's plan
    says so.

    Python's, NumPy's and torch's random states are seeded from `train.seed`, the data-parallel rank and the stage, whatever
    was drawn before.

    Args:
        plan: Resolved plan.
        weights: Folder of safetensors; by default the plan's own model folder or hub snapshot, or random initialization
            if the plan says so.
        world: Process groups that are already joined; by default they are joined here.
        on_progress: Called with tensors loaded and total tensors while weights load.

    Returns:
        The run, a context manager that frees the engine and the groups.

    Raises:
        PlanError: The launcher or the machine does not match the plan.
        RunError: BUILD_TOOLS, BUILD_FAILED, BUILD_LOCK.
        CheckpointError: The weights do not fit the model.
    """
    quiet_libraries()
    world = world or init_world(plan.grid, backend=plan.gpu.backend)
    memory = PhaseMemoryTracker(world.device)
    placement = Placement(num_sharing=1)
    try:
        placement = place_rank(plan, world)  # before the threads and the memory that it is about
        plan = build_extensions(plan, world)
        settings = build_settings(plan)
        for setting in settings.values() if world.is_main else ():
            logger.warning(setting.reason)
        folder = None if weights is None else Path(weights)
        if folder is None and plan.settings.init == "pretrained":
            folder = locate_weights(plan)
        schedule = LazyLRScheduler(plan)
        with built_with(settings):
            device = torch.device("cpu") if plan.profile.streams else world.device
            model = build_model(plan, device=device, weights=folder, world=world, on_progress=on_progress)
            engine = start_engine(plan, model, schedule, world=world, num_sharing=placement.num_sharing)
        # After the model is built: dropout must not depend on whether its weights are initialized or loaded.
        seed_random_state(plan.job.train.seed, dp_rank=world.coordinate.dp, pp_rank=world.coordinate.pp)
        memory.end("init")
        return Run(plan=plan, world=world, engine=engine, schedule=schedule, memory=memory, placement=placement)
    except BaseException:
        restore_patches()
        placement.release()
        if world.size == 1:  # a notebook continues; with several ranks, waiting could hang
            destroy_world(world)
        raise


def start_engine(
    plan: Plan, model: nn.Module, schedule: LazyLRScheduler, *, world: World, num_sharing: int | None = None
) -> Any:
    """Wrap a built model in the engine of the plan's strategy: DeepSpeed's, or torch's DDP or FSDP2.

    Args:
        plan: Resolved plan.
        model: Built model.
        schedule: Of the learning rate.
        world: Process groups.
        num_sharing: Ranks that share this one's processors; by default all of its node.
    """
    groups = parameter_groups(
        model,
        weight_decay=plan.job.train.weight_decay,
        rate=plan.settings.learning_rate,
        rates=plan.job.train.learning_rates,
        of_b=plan.job.train.adapters.loraplus_lr_ratio,
    )
    if plan.job.parallel.strategy != "zero":
        from toolkit.engine.torch_engine import TorchEngine

        return TorchEngine(plan, model, groups, schedule, world=world)
    import deepspeed

    alone = world.grid.size("model") == 1
    compare_within(world.dp_group)  # reset when the run is closed
    if alone:
        reset_mpu()
    overlaps = plan.offload_engine == "overlapped"
    own = plan.job.train.in_8_bits or overlaps
    streamed = streamable(model, trained=plan.job.train.method == "full") if plan.profile.streams else []
    if plan.profile.streams and not streamed:
        raise PlanError.of(
            code="OFFLOAD_ENGINE",
            key="parallel.offload_engine",
            message=f"offload_engine=overlapped with offload=full-cpu: {type(model).__name__} has no decoder layers with weights of their own",
            fix="Remove parallel.offload_engine, or set parallel.offload to optimizer-cpu",
            source="toolkit offload/streamed_layers.py",
        )
    with place_for_streaming(model, streamed, device=world.device) if plan.profile.streams else nullcontext():
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=made_here(plan, groups, model) if own else None,
            model_parameters=groups,
            lr_scheduler=schedule.build,
            config=engine_config(plan),
            mpu=None if alone else ModelParallelUnit(world),
            dist_init_required=False,
        )
    if not alone:
        guard_engine(engine, model)
    if plan.optimizer_wrapper == "16-bit":
        undo_first_step(engine.optimizer)
    if plan.optimizer_wrapper == "zero":
        shorten_step(engine.optimizer)
    if plan.twin_flow:
        unite_optimizers(engine.optimizer)
    if overlaps:
        engine.overlapped = OverlappedOffload(
            OffloadedPartitions(engine.optimizer),
            model,
            accumulates=plan.settings.zero_stage == 2 and plan.settings.batch.accumulation > 1,
            device=world.device,
            node_size=min(world.size, plan.job.cluster.gpus_per_node),
            share=plan.settings.offload_ratio,
            streamed=StreamedLayers(model, streamed, device=world.device) if plan.profile.streams else None,
            num_sharing=num_sharing,
        )
    return engine


def place_for_streaming(
    model: nn.Module, streamed: Sequence[nn.Parameter], *, device: torch.device
) -> AbstractContextManager[None]:
    """Move what is not streamed of a model in host memory to the card, and return the block in which its engine leaves the rest there.

    If trained weights are streamed, all of them stay: the optimizer's flat weights are in host memory.
    """
    trains = any(weight.requires_grad for weight in streamed)
    kept = {weight for weight in model.parameters() if trains and weight.requires_grad} | set(streamed)
    for module in model.modules():
        for weight in module._parameters.values():
            if weight is not None and weight not in kept:
                weight.data = weight.data.to(device)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
    return left_on_host(model, kept)


def parameter_groups(
    model: nn.Module,
    *,
    weight_decay: float,
    rate: float = 0.0,
    rates: Mapping[str, float] = MappingProxyType({}),
    of_b: float | None = None,
) -> list[Any]:
    """Return the trainable parameters; biases and norms apart where others decay, and weights with a rate of their own.

    There is one group if nothing differs: ZeRO-1 and 2 flatten and step group by group.

    Args:
        model: Built model.
        weight_decay: That of matrices.
        rate: Peak learning rate.
        rates: Other peak rates, by regular expressions of which the first that finds a weight's name counts.
        of_b: Factor of the rate of LoRA's B matrices that have no other.
    Raises:
        PlanError: WEIGHTS_PATTERN if a pattern finds no trained weight.
    Source:
        transformers trainer.py get_decay_parameter_names; arXiv 2402.12354 (LoRA+).
    """
    trainable = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    raise_all(PlanError, no_weight("learning_rates", rates, [name for name, _ in trainable]))
    if not (weight_decay or rates or of_b):
        return [parameter for _, parameter in trainable]
    exempt = _names_without_decay(model) if weight_decay else frozenset()
    groups: dict[tuple[float | None, float], list[nn.Parameter]] = {}
    for name, parameter in trainable:
        own = next((value for pattern, value in rates.items() if re.search(pattern, name)), None)
        if own is None and of_b is not None and re.search(r"\.lora_(embedding_)?B\.", name):
            own = rate * of_b
        groups.setdefault((own, 0.0 if name in exempt else weight_decay), []).append(parameter)
    # What learns at `rate` is first: it is the rate that a run reports.
    order = sorted(groups, key=lambda key: (key[0] is not None, key[0] or 0.0, -key[1]))
    return [
        {"params": groups[own, decay], "weight_decay": decay, **({} if own is None else {"lr": own})}
        for own, decay in order
    ]


def _names_without_decay(model: nn.Module) -> frozenset[str]:
    names = set()
    for prefix, module in model.named_modules():
        is_norm = "norm" in type(module).__name__.lower()
        for name, _ in module.named_parameters(recurse=False):
            if is_norm or name == "bias":
                names.add(f"{prefix}.{name}" if prefix else name)
    return frozenset(names)


def locate_weights(plan: Plan) -> Path:
    """Return the local folder of the plan's weights, downloaded from the hub if needed.

    Rank 0 of each node downloads; `huggingface_hub` locks its cache, so the other ranks wait for it.

    Raises:
        PlanError: MODEL_NO_WEIGHTS, WEIGHTS_BIN, MODEL_DOWNLOAD.
    """
    model = plan.model
    raise_all(PlanError, weight_problems(model))
    if model.path is not None:
        return model.path
    assert model.hub_id is not None, "weights without a folder are the hub's"
    return _download(model.hub_id, model.revision)


def _download(hub_id: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        folder = snapshot_download(
            hub_id, revision=revision, allow_patterns=["*.safetensors", "*.safetensors.index.json", "*.json"]
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise PlanError.of(
            code="MODEL_DOWNLOAD",
            key="model",
            message=f"the weights of {hub_id} cannot be fetched: {first_line(error)}",
            fix="Check the network and HF_TOKEN, or name a local folder",
        ) from None
    return Path(folder)


def _is_of_use(record: logging.LogRecord) -> bool:
    return "untested optimizer" not in record.getMessage()


def quiet_libraries() -> None:
    """Limit the libraries' logging to warnings and errors; their start-up messages would bury our progress."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    for name in ("DeepSpeed", "deepspeed", "torch.distributed", "transformers"):
        logging.getLogger(name).setLevel(logging.WARNING)
        # It knows its own optimizers alone (deepspeed runtime/engine.py _do_optimizer_sanity_check); ours are tested here.
        logging.getLogger(name).addFilter(_is_of_use)
    # DeepSpeed calls these for older versions of torch; torch 2.13 names newer ones (deepspeed comm/torch.py).
    renamed = r"`torch\.distributed\.\w+` is deprecated"
    warnings.filterwarnings("ignore", message=renamed, category=FutureWarning)
    # peft calls it under transformers 5.23 or later (peft peft_model.py PeftModel.__init__).
    warnings.filterwarnings("ignore", message=r"`is_gradient_checkpointing` is deprecated", category=FutureWarning)
