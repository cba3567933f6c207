"""The one place where a model is built: attention, weights, adapters and checkpointing, in one visible order."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.initialization import no_init_weights

from toolkit.catalog.architectures import no_class
from toolkit.config.job import Fp8, Lora
from toolkit.distributed.deepspeed_mpu import ModelParallelUnit
from toolkit.distributed.world import World
from toolkit.errors import PlanError, SpecError, ToolkitError, first_line
from toolkit.launch.packages import LIGER_KERNELS
from toolkit.modeling.checkpointing import apply_gradient_checkpointing
from toolkit.modeling.chunked_loss import apply_loss
from toolkit.modeling.fp8 import apply_fp8, check_device
from toolkit.modeling.fp8 import check_installed as check_fp8_installed
from toolkit.modeling.fused_kernels import apply_kernels
from toolkit.modeling.initialization import initialize_weights, tie_weights
from toolkit.modeling.liger import check_installed, import_for
from toolkit.modeling.lora import apply_lora
from toolkit.modeling.materialize import allocate
from toolkit.modeling.weights import load_pretrained
from toolkit.pipeline_parallel.param_tags import mark_stage
from toolkit.pipeline_parallel.part import StagePart, inner_model, stage_info
from toolkit.pipeline_parallel.split import split_model
from toolkit.planning.plan import Plan
from toolkit.planning.stage_parts import layers_of_ranks
from toolkit.tensor_parallel.apply import apply_tensor_parallel
from toolkit.tensor_parallel.grad_sync import register_gradient_sums
from toolkit.tensor_parallel.param_tags import mark_parameters
from toolkit.tensor_parallel.tables import tp_plan_for

DTYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


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
        SpecError: MODEL_CLASS when transformers has no causal LM of this configuration.
        PlanError: ATTENTION_PACKAGE, MODEL_BUILD, LORA_TARGETS, LORA_DROPOUT_EXPERTS, CHECKPOINTING_LAYERS,
            LOSS_ARCHITECTURE, LOSS_LIGER_HEAD, LOSS_LIGER_PACKAGE, FP8_PACKAGE, FP8_CAPABILITY, FP8_LAYERS,
            KERNELS_PACKAGE, KERNELS_MODEL; with tensor ranks also those of `apply_tensor_parallel`, with stages those of
            `split_model`.
        CheckpointError: If the weights do not fit the model.
    """
    if plan.job.train.loss == "liger":
        check_installed()
    if plan.settings.kernels == "liger":
        import_for(LIGER_KERNELS)
    if plan.settings.precision == "fp8":
        check_fp8_installed()
        check_device(device)
    config = model_config(plan)
    import_architecture(config, trust_remote_code=plan.job.model.trust_remote_code)
    dp_group = None if world is None else world.dp_group
    dense: PreTrainedModel | None = None
    if world is None or world.grid.size("model") == 1:
        with _partitioned(plan, dp_group), torch.device(device):
            model = construct_for(plan, config)
    else:
        with torch.device("meta"):
            dense, model = construct_for(plan, config), construct_for(plan, config)
        for made in (dense, model):
            tie_weights(made)
        _take_part(plan, model, device=device, world=world)
    if weights is None:
        initialize_weights(model, seed=plan.job.train.seed, dense=dense)
    else:
        load_pretrained(model, weights, group=dp_group, dense=dense, progress=on_progress)
    adapted: Any = apply_plan(plan, model)
    if world is not None and world.grid.size("model") > 1:
        _mark(plan, adapted, world=world)
    return adapted  # type: ignore[no-any-return]


def _take_part(plan: Plan, model: PreTrainedModel, *, device: torch.device, world: World) -> None:
    """Reduce a model on the meta device to this rank's part, and allocate it without initialising it."""
    if world.tp_group is not None:
        apply_tensor_parallel(
            model, tp_plan_for(model), tp_group=world.tp_group, sequence_parallel=plan.settings.sequence_parallel
        )
    if world.grid.pp > 1:
        split_model(model, stage_part(plan, world.coordinate.pp))
    if plan.settings.zero_stage < 3:
        allocate(model, device=device)
        return
    if world.tp_group is not None:
        gather_as_one(model)
    config, mpu = plan.deepspeed_config(), ModelParallelUnit(world)
    allocate(model, device=device, zero_config=config, dp_group=world.dp_group, mpu=mpu)


def stage_part(plan: Plan, pp_rank: int) -> StagePart:
    """Return the layers of a pipeline rank: those of every pp-th stage, starting with its first."""
    held = layers_of_ranks(plan.settings.partition, pp=plan.grid.pp)[pp_rank]
    return StagePart(chunks=held.chunks, num_layers=held.num_layers)


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


def apply_plan(plan: Plan, model: PreTrainedModel) -> nn.Module:
    """Apply adapters, float8, kernels, checkpointing, the loss and compilation to a built model, in this order."""
    train, settings = plan.job.train, plan.settings
    model.config.use_cache = False
    adapted: Any = model
    if train.method == "lora":
        adapted = apply_lora(model, train.lora or Lora(), seed=train.seed)
    if settings.precision == "fp8":
        apply_fp8(adapted, train.fp8 or Fp8(), emulate=plan.on_cpu)
    apply_kernels(adapted, settings.kernels)
    apply_gradient_checkpointing(
        adapted, fraction=settings.gradient_checkpointing, offload_inputs=plan.profile.activations
    )
    cut = stage_info(model)
    if cut is None or cut.part.last:  # other stages of a pipeline have no head
        apply_loss(adapted, train.loss)
    if train.torch_compile:
        compile_layers(model)
    adapted.train()
    return adapted  # type: ignore[no-any-return]


def model_config(plan: Plan) -> PreTrainedConfig:
    """Return the transformers configuration of the plan's model, with the attention implementation of the plan.

    Raises:
        SpecError: MODEL_CLASS; MODEL_CONFIG_INVALID for values that transformers refuses and that planning does not read.
    """
    try:
        config = _read_config(plan)
    except ToolkitError:
        raise
    except Exception as error:  # a class that reads foreign input may raise anything
        if isinstance(error, ValueError) and not isinstance(error, StrictDataclassError):
            raise  # an unknown model type
        reason = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(".")
        raise SpecError.of(
            code="MODEL_CONFIG_INVALID",
            key="model",
            message=f"transformers cannot use the config.json of {plan.model.name}: {reason}",
            fix="Correct that value, or download config.json again",
            source="transformers configuration_utils.py",
        ) from error
    config._attn_implementation = plan.settings.attention
    return config


def _read_config(plan: Plan) -> PreTrainedConfig:
    spec = plan.model
    raw = dict(spec.config)
    if spec.path is not None and Path(spec.path).is_dir():
        return AutoConfig.from_pretrained(spec.path, trust_remote_code=plan.job.model.trust_remote_code)
    if "auto_map" in raw and spec.hub_id is not None:
        return AutoConfig.from_pretrained(
            spec.hub_id, revision=spec.revision, trust_remote_code=plan.job.model.trust_remote_code
        )
    model_type = raw.pop("model_type")
    try:
        return AutoConfig.for_model(model_type, **raw)
    except ValueError as error:
        raise SpecError(no_class(model_type)) from error


def import_architecture(config: PreTrainedConfig, *, trust_remote_code: bool = False) -> None:
    """Import the modeling code of a configuration, before anything patches `nn.Module`.

    `zero.Init` wraps the constructor of each class that is defined while it is active and restores the original at its
    end, without the decorators applied in between: a second Mixtral in the process would have experts without a config.

    Raises:
        SpecError: MODEL_CLASS when transformers has no causal LM of this configuration.

    Source:
        deepspeed runtime/zero/partition_parameters.py InsertPostInitMethodToModuleSubClasses.
    """
    reference = (getattr(config, "auto_map", None) or {}).get("AutoModelForCausalLM")
    if reference is not None and trust_remote_code:
        get_class_from_dynamic_module(reference, config.name_or_path)
    elif type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise SpecError(no_class(config.model_type))
    else:
        MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]  # the lookup imports the class


def construct_for(plan: Plan, config: PreTrainedConfig) -> PreTrainedModel:
    """Construct the plan's causal LM under the contexts that the caller has entered; its weights are not drawn."""
    with no_init_weights():
        return construct(config, dtype=DTYPES[plan.settings.dtype], trust_remote_code=plan.job.model.trust_remote_code)


def construct(config: PreTrainedConfig, *, dtype: torch.dtype, trust_remote_code: bool = False) -> PreTrainedModel:
    """Construct the causal LM of a configuration, in `dtype`, under the contexts that the caller has entered."""
    try:
        return AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=config._attn_implementation, trust_remote_code=trust_remote_code
        )
    except ImportError as error:
        raise PlanError.of(
            code="ATTENTION_PACKAGE",
            key="train.attention",
            message=f"attention={config._attn_implementation} cannot be used: {first_line(error)}",
            fix="Install the package that it names, or set train.attention to sdpa",
        ) from None
    except ValueError as error:
        raise PlanError.of(
            code="MODEL_BUILD",
            key="model",
            message=f"transformers cannot build {type(config).__name__}: {first_line(error)}",
            fix="Change train.attention or the model's config.json accordingly",
        ) from error


def compile_layers(model: nn.Module) -> int:
    """Compile each decoder layer separately, so that identical layers share one compilation.

    Source:
        torch tutorial "Reducing torch.compile cold start compilation time with regional compilation".
    """
    layers = decoder_layers(model)
    for layer in layers:
        layer.compile()
    return len(layers)


def gather_as_one(model: nn.Module) -> None:
    """Make ZeRO-3 gather each decoder layer as one: of columns that read one input, the first computes for all.

    The unit is not just the attention, since DeepSpeed's hook for the gradients of a gathered module sees only positional
    inputs, and transformers calls attention by keyword.

    Source:
        deepspeed utils/z3_leaf_module.py; runtime/zero/stage3.py, leaf modules; torch nn/modules/module.py
        register_full_backward_hook.
    """
    from deepspeed.utils import set_z3_leaf_module

    for layer in decoder_layers(model):
        set_z3_leaf_module(layer, True)


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers that transformers checkpoints one by one."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


@contextlib.contextmanager
def _partitioned(plan: Plan, dp_group: Any) -> Iterator[None]:
    if plan.settings.zero_stage != 3:
        yield
        return
    import deepspeed

    # No dtype= here: _set_dtype would turn fp32 into bf16 if fp16 is not supported; the configuration sets the dtype.
    with deepspeed.zero.Init(data_parallel_group=dp_group, config_dict_or_path=plan.deepspeed_config()):
        yield
