"""The one place where a model is built, for training and for the memory trace, in one visible order.

Construct on the meta device or under ZeRO-3, shard, split, allocate, load or draw the weights, add adapters, then finish:
float8, kernels, checkpointing, the loss, compilation. The trace takes the same steps on fake tensors; it prunes layers after
the first one, and allocates after the adapters.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from toolkit.arguments import checks_arguments
from toolkit.catalog.tasks import has_new_head
from toolkit.config.job import ExpertSharding, Fp8, Fsdp2, Kept, Kernels, Lora, Loss, Task
from toolkit.context_parallel.apply import apply_context_parallel
from toolkit.context_parallel.slices import SequenceSlice
from toolkit.distributed.deepspeed_mpu import ModelParallelUnit
from toolkit.distributed.deepspeed_private import mark_leaf
from toolkit.distributed.world import World
from toolkit.errors import PlanError, Problem, raise_all
from toolkit.introspect import decoder_layers, tied_keys, vision_tower
from toolkit.launch.packages import LIGER_KERNELS
from toolkit.modeling.adapter_folder import load_adapter
from toolkit.modeling.architecture import DTYPES, construct, import_architecture, model_config
from toolkit.modeling.checkpointing import checkpoint_layers, layers_to_checkpoint
from toolkit.modeling.chunked_loss import apply_loss
from toolkit.modeling.fp8 import apply_fp8, check_device
from toolkit.modeling.fp8 import check_installed as check_fp8_installed
from toolkit.modeling.fused_kernels import apply_kernels
from toolkit.modeling.initialization import initialize_weights, tie_weights
from toolkit.modeling.liger import check_installed, import_for
from toolkit.modeling.lora import apply_lora
from toolkit.modeling.materialize import allocate
from toolkit.modeling.nf4 import hold_in_nf4, import_bitsandbytes
from toolkit.modeling.proofs import check_twin, prove_splits
from toolkit.modeling.tiled_mlp import apply_tiled_mlp
from toolkit.modeling.weights import load_pretrained
from toolkit.pipeline_parallel.param_tags import mark_stage
from toolkit.pipeline_parallel.part import inner_model, stage_info
from toolkit.pipeline_parallel.split import split_model
from toolkit.pipeline_schedule import StageSpec
from toolkit.planning.plan import Plan
from toolkit.tensor_parallel.apply import apply_tensor_parallel
from toolkit.tensor_parallel.grad_sync import register_gradient_sums
from toolkit.tensor_parallel.param_tags import mark_parameters
from toolkit.tensor_parallel.tables import tp_plan_for


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildOptions:
    """What decides how a model is built, in addition to its configuration and the ranks that share it.

    Args:
        dtype: Data type of the parameters.
        task: What the model is trained to do, which decides its class.
        has_new_head: Whether the pretrained weights may lack the head of the task, which is then drawn.
        trust_remote_code: Whether the model's own code may run.
        sequence_parallel: Whether tensor ranks also hold shards of the sequence between the sharded layers.
        experts: How tensor ranks share stacked experts.
        quantized: Whether the linear layers but the head hold NF4 (QLoRA).
        lora: LoRA section; None trains all parameters.
        freeze: Regular expressions for the names of weights that are not trained.
        freeze_vision: Whether the vision tower is not trained, and with adapters the language model alone has some.
        seed: Seed of the adapters.
        fp8: How the decoder layers' linear modules multiply in float8; None where they do not.
        fp8_emulated: Whether they do so without float8 kernels, as on a CPU.
        kernels: Kernels of norms and gated activations.
        checkpointing: Share of the layers that recompute, 0 to 1.
        checkpoint_every: Every how many layers recompute, if above 1, in place of the share.
        checkpoint_keep: Results that these layers keep.
        mlp_tiles: Tiles of a row's tokens that feed-forward layers compute one after the other.
        offload_inputs: Whether the inputs of those layers are kept in host memory.
        loss: How a causal language model computes its loss.
        torch_compile: Whether each decoder layer is compiled.
        label_smoothing: Share of each target that is spread over the vocabulary.
        z_loss: Weight of the squared logarithm of the softmax's denominator.
        compute_loss: Name of the user's loss function.
        neftune: Scale of the noise on the embeddings in training.
        grows: Whether the embeddings have more rows than the pretrained ones.
    """

    dtype: torch.dtype = torch.bfloat16
    task: Task = "causal-lm"
    has_new_head: bool = False
    trust_remote_code: bool = False
    sequence_parallel: bool = False
    experts: ExpertSharding = "sliced"
    quantized: bool = False
    lora: Lora | None = None
    freeze: tuple[str, ...] = ()
    freeze_vision: bool = False
    seed: int = 0
    fp8: Fp8 | None = None
    fp8_emulated: bool = False
    kernels: Kernels = "eager"
    checkpointing: float = 0.0
    checkpoint_every: int = 1
    checkpoint_keep: tuple[Kept, ...] = ()
    mlp_tiles: int = 1
    offload_inputs: bool = False
    loss: Loss = "full"
    torch_compile: bool = False
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    compute_loss: str | None = None
    neftune: float = 0.0
    grows: bool = False

    @property
    def error_rank(self) -> int:
        """Rank up to which packed layers keep the errors of their rounding: the largest of their adapters, under LoftQ."""
        lora = self.lora
        corrects = lora is not None and lora.init_lora_weights == "loftq"
        return max(lora.r, *lora.rank_pattern.values(), 0) if lora is not None and corrects else 0

    @property
    def head_seed(self) -> int | None:
        """Seed of a classifier's head that the pretrained weights lack; None where they must have all."""
        return self.seed if self.has_new_head else None

    @classmethod
    def of(cls, plan: Plan, **others: Any) -> Self:
        """Return the options of a plan; `others` are those that a subclass adds, or values in place of the plan's."""
        train, settings = plan.job.train, plan.settings
        values: dict[str, Any] = {
            "dtype": DTYPES[settings.dtype],
            "task": settings.task,
            "has_new_head": has_new_head(settings.task, plan.model.config),
            "trust_remote_code": plan.job.model.trust_remote_code,
            "sequence_parallel": settings.sequence_parallel,
            "experts": settings.experts,
            "quantized": train.method == "qlora",
            "lora": None if train.method == "full" else train.adapters,
            "freeze": train.freeze,
            "freeze_vision": settings.freeze_vision,
            "seed": train.seed,
            "fp8": train.float8 if settings.precision == "fp8" else None,
            "fp8_emulated": plan.on_cpu,
            "kernels": settings.kernels,
            "checkpointing": settings.gradient_checkpointing,
            "checkpoint_every": train.recomputation.every_n_layers,
            "checkpoint_keep": train.recomputation.keep,
            "mlp_tiles": train.mlp_tiles,
            "offload_inputs": plan.profile.activations,
            "loss": train.loss,
            "torch_compile": train.torch_compile,
            "label_smoothing": train.label_smoothing_factor,
            "z_loss": train.z_loss,
            "compute_loss": train.compute_loss,
            "neftune": train.neftune_noise_alpha,
            "grows": plan.job.model.resizes,
        }
        return cls(**values | others)


def build_model(
    plan: Plan,
    *,
    device: torch.device,
    weights: Path | None = None,
    world: World | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> nn.Module:
    """Build the plan's model on this rank, ready for the engine.

    Under ZeRO-3 each parameter is partitioned when its module is built, and tensor ranks and stages allocate only their
    parts, so the whole model is never in the memory of one rank.

    Args:
        plan: Resolved plan.
        device: Device of the parameters.
        weights: Folder of safetensors; None to draw the weights from `train.seed`.
        world: Process groups of this rank; None for a single process.
        on_progress: Called with the number of loaded tensors and their total while weights load.

    Returns:
        A `PreTrainedModel`, or a `peft.PeftModel` around one.

    Raises:
        SpecError: MODEL_CLASS when transformers has no class of this configuration for the task.
        PlanError: ATTENTION_PACKAGE, MODEL_BUILD, LORA_TARGETS, LORA_DROPOUT_EXPERTS, CHECKPOINTING_LAYERS,
            LOSS_ARCHITECTURE, LOSS_LIGER_HEAD, LOSS_LIGER_PACKAGE, FP8_PACKAGE, FP8_CAPABILITY, FP8_LAYERS,
            KERNELS_PACKAGE, KERNELS_MODEL, QLORA_PACKAGE, QLORA_LAYERS; with tensor ranks also those of `apply_tensor_parallel`, with stages those of
            `split_model`.
        CheckpointError: If the weights do not fit the model.
    """
    options = BuildOptions.of(plan)
    _check_packages(options, device)
    config = model_config(plan)
    import_architecture(config, trust_remote_code=options.trust_remote_code, task=options.task)
    prove_splits(
        config,
        tensor=plan.grid.tp,
        pipeline=plan.grid.pp,
        context=plan.grid.cp,
        experts=options.experts,
        trust_remote_code=options.trust_remote_code,
    )
    dp_group = None if world is None else _group_for(device, world)
    if plan.job.parallel.strategy == "fsdp2" and world is not None:
        return _build_sharded(
            config,
            options,
            plan.job.parallel.fsdp2_options,
            world=world,
            device=device,
            weights=weights,
            on_progress=on_progress,
        )
    dense: PreTrainedModel | None = None
    if options.quantized:
        dense, model = _twins(config, options)
        hold_in_nf4(model, dtype=options.dtype, error_rank=options.error_rank)
        allocate(model, device=device)
    elif (world is None or world.grid.size("model") == 1) and _ties_early(plan, config):
        model = construct_empty(config, options)
        tie_weights(model)
        allocate(model, device=device)
    elif world is None or world.grid.size("model") == 1:
        with _partitioned(plan, dp_group), torch.device(device), no_init_weights():
            model = _construct(config, options)
    else:
        dense, model = _twins(config, options)
        part = plan.stage(world.coordinate.pp) if world.grid.pp > 1 else None
        shard_model(model, options, tp_group=world.tp_group, part=part)
        zero_config = plan.deepspeed_config() if plan.settings.zero_stage == 3 else None
        allocate(model, device=device, zero_config=zero_config, dp_group=dp_group, mpu=ModelParallelUnit(world))
    drawn_on = device if world is None else world.device  # the model itself may wait in host memory
    if weights is None:
        initialize_weights(model, seed=options.seed, dense=dense, device=drawn_on)
    else:
        load_pretrained(
            model,
            weights,
            group=dp_group,
            dense=dense,
            grows=options.grows,
            head_seed=options.head_seed,
            device=drawn_on,
            progress=on_progress,
        )
    context_group = None if world is None else world.context_group
    adapted = finish_model(add_adapters(model, options), options, context_group=context_group)
    if options.lora is not None and options.lora.adapter is not None:
        load_adapter(adapted, options.lora, options.lora.adapter, tp_group=None if world is None else world.tp_group)
    if world is not None and world.grid.size("model") > 1:
        _mark(plan, adapted, world=world)
    return adapted  # type: ignore[no-any-return]


def _group_for(device: torch.device, world: World) -> dist.ProcessGroup:
    """Return the data-parallel group, or one of the same ranks that sends weights in host memory where a card's cannot."""
    if device == world.device or world.grid.dp == 1:
        return world.dp_group
    ranks = dist.get_process_group_ranks(world.dp_group)
    group: dist.ProcessGroup = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    return group


def _ties_early(plan: Plan, config: PreTrainedConfig) -> bool:
    """Return whether a head that shares the embedding's weight is tied before it is allocated: else both are there for a moment.

    ZeRO-3 partitions modules as they are made, and models that bring their code may need a device in their constructors.
    """
    tied = getattr(config.get_text_config(decoder=True), "tie_word_embeddings", False)
    partitioned = plan.settings.zero_stage == 3 and plan.job.parallel.strategy == "zero"
    return bool(tied) and not partitioned and not plan.job.model.trust_remote_code


def _twins(config: PreTrainedConfig, options: BuildOptions) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Return the model twice on the meta device with its weights tied: to be what it is read from, and to be changed."""
    made = construct_empty(config, options), construct_empty(config, options)
    for model in made:
        tie_weights(model)
    return made


def _build_sharded(
    config: PreTrainedConfig,
    options: BuildOptions,
    sharding: Fsdp2,
    *,
    world: World,
    device: torch.device,
    weights: Path | None,
    on_progress: Callable[[int, int], None] | None,
) -> nn.Module:
    """Build a model whose weights FSDP2 shards over all ranks."""
    # Imports torch's FSDP, which no other build needs.
    from toolkit.modeling.fsdp2 import (
        allocate_shards,
        fill,
        mesh_of,
        move_shards_to_host,
        places_of,
        shard_over_ranks,
    )

    dense, model = _twins(config, options)
    if options.quantized:
        hold_in_nf4(model, dtype=options.dtype, storage=options.dtype, error_rank=options.error_rank)
    places, ties = places_of(model), tied_keys(model)
    adapted = finish_model(add_adapters(model, options), options)
    shard_over_ranks(
        adapted,
        mesh=mesh_of(sharding, world.dp_group, device),
        options=sharding,
        dtype=options.dtype,
        reduce_dtype=options.dtype if sharding.reduce_dtype is None else DTYPES[sharding.reduce_dtype],
        tied=bool(ties),
    )
    allocate_shards(adapted, device=device, ties=ties, places=places)
    fill(
        adapted,
        model,
        dense=dense,
        places=places,
        weights=weights,
        seed=options.seed,
        grows=options.grows,
        head_seed=options.head_seed,
        deviates=options.lora is not None and options.lora.init_lora_weights == "gaussian",
        group=world.dp_group,
        progress=on_progress,
    )
    if options.lora is not None and options.lora.adapter is not None:
        load_adapter(adapted, options.lora, options.lora.adapter)
    if sharding.cpu_offload:
        move_shards_to_host(adapted)
    return adapted  # type: ignore[no-any-return]


@checks_arguments
def apply_plan(plan: Plan, model: PreTrainedModel) -> nn.Module:
    """Add to a model built elsewhere what the plan has: adapters, float8, kernels, checkpointing, the loss, compilation."""
    options = BuildOptions.of(plan)
    if options.quantized:
        hold_in_nf4(model, dtype=options.dtype, error_rank=options.error_rank)
    adapted = finish_model(add_adapters(model, options), options)
    if options.lora is not None and options.lora.adapter is not None:
        load_adapter(adapted, options.lora, options.lora.adapter)
    return adapted  # type: ignore[no-any-return]


def construct_empty(config: PreTrainedConfig, options: BuildOptions) -> PreTrainedModel:
    """Construct the whole model on the meta device, its weights not tied yet."""
    with no_init_weights(), torch.device("meta"):
        return _construct(config, options)


def _construct(config: PreTrainedConfig, options: BuildOptions) -> PreTrainedModel:
    return construct(config, dtype=options.dtype, trust_remote_code=options.trust_remote_code, task=options.task)


def shard_model(
    model: PreTrainedModel, options: BuildOptions, *, tp_group: dist.ProcessGroup | None, part: StageSpec | None
) -> None:
    """Reduce a model on the meta device to one rank's part.

    Args:
        model: Whole model with its weights tied; modified in place.
        options: Of the model.
        tp_group: Ranks that share each layer; None for whole layers.
        part: Layers of a pipeline rank; None for all.
    """
    if part is not None:
        check_twin(model)
    if tp_group is not None:
        pieces = options.sequence_parallel
        styles = tp_plan_for(model, num_ranks=tp_group.size(), sequence_parallel=pieces, experts=options.experts)
        apply_tensor_parallel(model, styles, tp_group=tp_group, sequence_parallel=pieces)
        _gather_layers_whole(model)
    if part is not None:
        split_model(model, part)


def add_adapters(model: PreTrainedModel, options: BuildOptions) -> Any:
    """Return the model without a cache of keys and values, with its adapters if it has any, and frozen where the job says so.

    Raises:
        PlanError: WEIGHTS_PATTERN if a pattern finds no weight, or all of them are frozen; those of `apply_lora`.
    """
    model.config.use_cache = model.config.get_text_config(decoder=True).use_cache = False
    if options.task == "seq2seq-lm":
        for module in model.modules():  # encoder and decoder have copies of the configuration
            if isinstance(getattr(module, "config", None), PreTrainedConfig):
                module.config.use_cache = False
    freeze_weights(model, options.freeze)
    if options.freeze_vision:
        vision_tower(model)[1].requires_grad_(False)
    if options.lora is None:
        return model
    return apply_lora(model, options.lora, seed=options.seed, task=options.task, language_alone=options.freeze_vision)


def freeze_weights(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze the weights whose names a regular expression finds."""
    names = [name for name, _ in model.named_parameters()]
    raise_all(PlanError, no_weight("freeze", patterns, names))
    for name, weight in model.named_parameters():
        if any(re.search(pattern, name) for pattern in patterns):
            weight.requires_grad_(False)
    if not any(weight.requires_grad for weight in model.parameters()):
        raise PlanError.of(
            code="WEIGHTS_PATTERN",
            key="train.freeze",
            message=f"freeze={', '.join(patterns)} finds every weight: nothing would be trained",
            fix="Leave some weights out",
        )


def no_weight(key: str, patterns: Iterable[str], names: Sequence[str]) -> Iterator[Problem]:
    """Yield a problem for each pattern that finds none of the names of weights that are trained."""
    for pattern in patterns:
        if not any(re.search(pattern, name) for name in names):
            yield Problem(
                code="WEIGHTS_PATTERN",
                key=f"train.{key}",
                message=f"{key} has {pattern}, which is in the name of no trained weight, such as {', '.join(names[:2])}",
                fix="Write a part of such a name, or a regular expression that finds it",
            )


def finish_model(
    model: Any,
    options: BuildOptions,
    *,
    checkpointed: Sequence[nn.Module] | None = None,
    context_group: dist.ProcessGroup | None = None,
) -> Any:
    """Apply float8, kernels, tiles, checkpointing, slices of the sequence, the loss and compilation to a model with its adapters, in this order.

    Args:
        model: A `PreTrainedModel`, or a `peft.PeftModel` around one; modified in place.
        options: Of the model.
        checkpointed: Decoder layers that recompute; chosen among the model's own by default.
        context_group: Ranks that share each row; None where each has whole rows.

    Returns:
        The model, in training mode.
    """
    if options.fp8 is not None:
        apply_fp8(model, options.fp8, emulate=options.fp8_emulated)
    apply_kernels(model, options.kernels)
    if options.mlp_tiles > 1:
        apply_tiled_mlp(model, options.mlp_tiles)
    if checkpointed is None:
        checkpointed = layers_to_checkpoint(model, fraction=options.checkpointing, every=options.checkpoint_every)
    checkpoint_layers(checkpointed, keep=options.checkpoint_keep, offload_inputs=options.offload_inputs)
    part = None
    if context_group is not None:
        part = SequenceSlice.of(context_group)
        apply_context_parallel(model, group=context_group)
    info = stage_info(model)
    if options.neftune and (info is None or info.part.first):  # which alone has the embeddings
        add_noise(model, options.neftune)
    if info is None or info.part.last:  # other stages of a pipeline have no head
        apply_loss(model, options.loss, part=part)
    if options.torch_compile:
        compile_layers(model)
    model.train()
    return model


def add_noise(model: Any, alpha: float) -> None:
    """Add uniform noise of at most α / √(tokens of a row × width) to the embeddings in training.

    Source:
        arXiv 2310.05914; transformers integrations/neftune.py neftune_post_forward_hook, which draws the same.
    """

    def noisy(module: nn.Module, inputs: Any, output_BSD: torch.Tensor) -> torch.Tensor:
        if not module.training:
            return output_BSD
        bound = alpha / math.sqrt(output_BSD.shape[1] * output_BSD.shape[2])
        return output_BSD + torch.empty_like(output_BSD).uniform_(-bound, bound)

    model.get_input_embeddings().register_forward_hook(noisy)


def compile_layers(model: nn.Module) -> int:
    """Compile each decoder layer separately, so that identical layers share one compilation.

    Source:
        torch tutorial "Reducing torch.compile cold start compilation time with regional compilation".
    """
    layers = decoder_layers(model)
    for layer in layers:
        layer.compile()
    return len(layers)


def _check_packages(options: BuildOptions, device: torch.device) -> None:
    """Refuse options whose package or card is missing, before anything is built."""
    if options.loss == "liger":
        check_installed()
    if options.kernels == "liger":
        import_for(LIGER_KERNELS)
    if options.quantized:
        import_bitsandbytes()
    if options.fp8 is not None:
        check_fp8_installed()
        check_device(device)


def _gather_layers_whole(model: nn.Module) -> None:
    """Make ZeRO-3 gather each decoder layer as one: of columns that read one input, the first computes for all.

    The unit is not just the attention, since DeepSpeed's hook for the gradients of a gathered module sees only positional
    inputs, and transformers calls attention by keyword.

    Source:
        deepspeed runtime/zero/stage3.py, leaf modules; torch nn/modules/module.py register_full_backward_hook.
    """
    for layer in decoder_layers(model):
        mark_leaf(layer)


def _mark(plan: Plan, model: Any, *, world: World) -> None:
    """Mark the parameters that this rank counts in the gradient norm, and register the hooks that sum gradients."""
    if world.tp_group is not None:
        if plan.settings.zero_stage == 3 and plan.job.train.method == "lora":
            # After a frozen embedding no input of the first layer would require a gradient, and the leaf's hook would
            # fire early.
            model.enable_input_require_grads()
        register_gradient_sums(model)
        mark_parameters(model, tp_group=world.tp_group)
    if world.grid.pp > 1:
        info = stage_info(model)
        assert info is not None, "`split_model` has left it"
        mark_stage(inner_model(model), world=world, copies=info.tied_copy)


@contextlib.contextmanager
def _partitioned(plan: Plan, dp_group: Any) -> Iterator[None]:
    if plan.settings.zero_stage != 3 or plan.job.parallel.strategy != "zero":
        yield
        return
    import deepspeed

    # Torch notes at the first such call which functions make tensors. If zero.Init has replaced them by then, `torch.device` as a
    # context has no effect on torch's own for as long as the process lives, and transformers loads no buffer that it computes.
    with torch.device("meta"):
        torch.empty(0)
    # No dtype= here: _set_dtype would turn fp32 into bf16 if fp16 is not supported; the configuration sets the dtype.
    with deepspeed.zero.Init(data_parallel_group=dp_group, config_dict_or_path=plan.deepspeed_config()):
        yield
