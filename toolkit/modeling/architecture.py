"""The transformers configuration and class of a plan's model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from toolkit.arguments import shown
from toolkit.catalog.architectures import AUTO_CLASSES
from toolkit.catalog.tasks import label_names, no_class
from toolkit.config.job import CLASSIFYING, Task
from toolkit.errors import PlanError, SpecError, ToolkitError, first_line
from toolkit.planning.plan import Plan

DTYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


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
    _scale_rope(config, plan)
    _name_labels(config, plan)
    if plan.job.model.resizes:
        config.get_text_config(decoder=True).vocab_size = plan.model.vocab_size
    if (weight := plan.job.train.router_aux_loss_coef) is not None:
        for part in (config, config.get_text_config(decoder=True)):
            if hasattr(part, "router_aux_loss_coef"):
                part.router_aux_loss_coef, part.output_router_logits = weight, weight > 0
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


def _name_labels(config: PreTrainedConfig, plan: Plan) -> None:
    """Set the classes of a classifier."""
    settings = plan.settings
    if settings.task not in CLASSIFYING:
        return
    names = label_names(plan.job.model, plan.model.config, settings.num_labels)
    config.id2label = dict(enumerate(names))
    config.label2id = {name: number for number, name in enumerate(names)}
    config.problem_type = settings.problem_type


def _scale_rope(config: PreTrainedConfig, plan: Plan) -> None:
    """Set the rotary embeddings that the job asks for; those of a folder are read as they lie there.

    Raises:
        SpecError: MODEL_ROPE, if the configuration class has others in each kind of layer.
    """
    scaling = plan.job.model.rope_scaling
    if scaling is None:
        return
    wanted = plan.model.config["rope_parameters"]
    own = getattr(config, "rope_parameters", None)
    if not isinstance(own, dict) or own.get("rope_type") not in ("default", scaling.type):
        raise SpecError.of(
            code="MODEL_ROPE",
            key="model.rope_scaling",
            message=f"rope_scaling={scaling.type}: {type(config).__name__} has rope_parameters={own}, which cannot be scaled as one",
            fix="Remove it, or set rope_parameters in the model's config.json",
        )
    config.rope_parameters = own | wanted
    config.max_position_embeddings = plan.model.config["max_position_embeddings"]
    if getattr(config, "head_dim", 0) is None:  # Mixtral's: the functions of transformers would multiply by it
        config.head_dim = plan.model.head_dim


def auto_class(task: Task) -> Any:
    """Return the class of transformers that builds the models of a task."""
    return getattr(transformers, AUTO_CLASSES[task])


def import_architecture(config: PreTrainedConfig, *, trust_remote_code: bool = False, task: Task = "causal-lm") -> None:
    """Import the modeling code of a configuration, before anything patches `nn.Module`.

    `zero.Init` wraps the constructor of each class that is defined while it is active and restores the original at its
    end, without the decorators applied in between: a second Mixtral in the process would have experts without a config.

    Raises:
        SpecError: MODEL_CLASS when transformers has no class of this configuration for the task; MODEL_CONFIG_INVALID for code that
            may run and is not named as transformers names it.

    Source:
        deepspeed runtime/zero/partition_parameters.py InsertPostInitMethodToModuleSubClasses.
    """
    reference = own_class(config, task) if trust_remote_code else None
    classes = auto_class(task)._model_mapping
    if reference is not None:
        get_class_from_dynamic_module(reference, config.name_or_path)
    elif type(config) not in classes:
        raise SpecError(no_class(config.model_type, task=task))
    else:
        classes[type(config)]  # the lookup imports the class


def own_class(config: PreTrainedConfig, task: Task = "causal-lm") -> str | None:
    """Return the reference to the class that a model brings for a task; None if it brings none.

    Raises:
        SpecError: MODEL_CONFIG_INVALID for code that is not named as transformers names it.
    """
    own = getattr(config, "auto_map", None) or {}
    name = AUTO_CLASSES[task]
    reference = own.get(name) if isinstance(own, Mapping) else own
    if reference is None or (isinstance(own, Mapping) and isinstance(reference, str) and reference):
        return reference
    raise SpecError.of(
        code="MODEL_CONFIG_INVALID",
        key="model",
        message=f"auto_map={shown(own)} in the model's config.json names no class: it maps {name} to the class to run",
        fix=f'Set auto_map to an object such as {{"{name}": "modeling_mine.Mine"}}, or model.trust_remote_code to false',
        source="transformers models/auto/auto_factory.py from_config",
    )


def construct(
    config: PreTrainedConfig, *, dtype: torch.dtype, trust_remote_code: bool = False, task: Task = "causal-lm"
) -> PreTrainedModel:
    """Construct the model of a configuration for a task, in `dtype`, under the contexts that the caller has entered."""
    try:
        model = auto_class(task).from_config(
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
    model.config.architectures = [type(model).__name__]  # a checkpoint's config.json has it, and says the task by it
    return model
