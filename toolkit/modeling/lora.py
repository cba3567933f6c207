"""LoRA adapters through peft."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from toolkit.arguments import checks_arguments
from toolkit.config.job import CLASSIFYING, Lora, Task
from toolkit.errors import PlanError, Problem, first_line, raise_all
from toolkit.introspect import language_model
from toolkit.modeling.heads import head_modules, poolers
from toolkit.modeling.nf4 import begin_with_errors, keeps_error
from toolkit.modeling.sharded_adapters import adapted_by, draw_adapters, shard_adapters
from toolkit.pipeline_parallel.part import stage_info
from toolkit.planning.rules.adapters import lora_pattern_problem
from toolkit.tensor_parallel.guard import PartOfModel, guard_part
from toolkit.tensor_parallel.linear import ShardedLinear

# peft's names of tasks, by which its classes read and save an adapter; a masked language model has none.
_PEFT_TASKS: dict[Task, str | None] = {
    "causal-lm": "CAUSAL_LM",
    "sequence-classification": "SEQ_CLS",
    "token-classification": "TOKEN_CLS",
    "masked-lm": None,
    "seq2seq-lm": "SEQ_2_SEQ_LM",
    "image-text-to-text": "CAUSAL_LM",
}


@checks_arguments
def apply_lora(
    model: PreTrainedModel, lora: Lora, *, seed: int, task: Task = "causal-lm", language_alone: bool = False
) -> Any:
    """Freeze the model and add adapters in its own precision.

    Args:
        model: Model to adapt, in place.
        lora: Section of the job with the adapters.
        task: What the model is trained to do; the head of a classifier is trained whole, as in peft.
        seed: Seed of the A matrices; B starts at zero, or both as a part of the model's weights, so its outputs do not change.
        language_alone: Whether only the language model of one that reads images gets adapters.

    Returns:
        A `peft.PeftModel`.

    Raises:
        PlanError: LORA_TARGETS if `lora.target_modules` matches nothing that can be adapted; LORA_SAVE if
            `lora.modules_to_save` matches nothing; LORA_PATTERN if an entry of a pattern does; LORA_DROPOUT_EXPERTS for
            dropout on stacked experts.

    Source:
        arXiv 2106.09685; peft tuners/lora.
    """
    from peft import LoraConfig, get_peft_model  # seconds of imports, for adapters alone

    targets = lora.target_modules
    linear = _linear_names(model)
    raise_all(PlanError, _unmatched(model, lora))
    heads = (*head_modules(model), *poolers(model)) if task in CLASSIFYING else ()
    is_filled = not next(model.parameters()).is_meta
    if lora.init_lora_weights == "loftq" and is_filled and not any(map(keeps_error, model.modules())):
        raise _nothing_rounded()
    unadapted = [
        *(_on_other_stages(model) or ()),
        *(_own_linears(model) if targets == "all-linear" else ()),
        *(_beside_language(model) if language_alone else ()),
        *(name for name in _linears(model) if f"{name}.".startswith(tuple(f"{head}." for head in heads))),
    ]
    config = LoraConfig(
        task_type=_PEFT_TASKS[task],
        r=lora.r,
        lora_alpha=lora.lora_alpha,
        lora_dropout=lora.lora_dropout,
        target_modules=_resolved_targets(model, targets),
        exclude_modules=unadapted or None,
        modules_to_save=list(dict.fromkeys((*lora.modules_to_save, *heads))) or None,
        use_rslora=lora.use_rslora,
        use_dora=lora.use_dora,
        init_lora_weights=True if lora.init_lora_weights in ("default", "loftq") else lora.init_lora_weights,
        rank_pattern=dict(lora.rank_pattern),
        alpha_pattern=dict(lora.alpha_pattern),
    )
    config._register_custom_module(adapted_by())
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings(
                    "ignore", message="Unsupported layer type .*ParallelLinear", category=UserWarning
                )
                # peft would cast adapters of 16-bit models to fp32; the engine keeps its own fp32 master copy.
                adapted = get_peft_model(model, config, autocast_adapter_dtype=False)
            raise_all(PlanError, _unadapted(adapted, lora))
            _cast_adapters(adapted, model.dtype)
            if stage_info(model) is not None:
                # The saved configuration is that of the whole adapter, not of this rank's layers.
                adapted.active_peft_config.exclude_modules = None
                adapted.active_peft_config.target_modules = targets if isinstance(targets, str) else set(targets)
            shard_adapters(adapted)
            if isinstance(model, PartOfModel):
                guard_part(adapted, held_part=model.held_part, tp_group=model.tensor_group)
            if lora.init_lora_weights == "pissa":
                adapted.active_peft_config.init_lora_weights = True  # whoever builds it again reads base and adapters
            else:
                draw_adapters(adapted, seed=seed, deviates=lora.init_lora_weights == "gaussian")
            if lora.init_lora_weights == "loftq":
                begin_with_errors(adapted)
            return adapted
        except (ValueError, re.error) as error:
            if "lora_dropout" in str(error):
                raise _dropout_on_experts(model, lora, linear) from None
            raise PlanError.of(
                code="LORA_TARGETS",
                key="train.lora.target_modules",
                message=f"target_modules={targets!r} cannot be adapted in {type(model).__name__}: {first_line(error)}",
                fix=f"Name some of {', '.join(linear)}, or all-linear",
                source="peft tuners/tuners_utils.py",
            ) from None


def _cast_adapters(adapted: torch.nn.Module, dtype: torch.dtype) -> None:
    """Give adapters the model's precision, which peft takes from the weights below them: packed ones are integers."""
    for weight in adapted.parameters():
        if weight.requires_grad and weight.dtype != dtype:
            weight.data = weight.data.to(dtype)


def _resolved_targets(model: PreTrainedModel, targets: str | tuple[str, ...]) -> str | list[str]:
    """Return the targets in peft's form, with `all-linear` expanded, since peft's own would skip sharded layers."""
    if not isinstance(targets, str):
        return list(targets)
    sharded = any(isinstance(module, ShardedLinear) for module in model.modules())
    if targets != "all-linear" or not sharded:
        return targets
    head = model.get_output_embeddings()
    apart = {*_own_linears(model)}
    return [
        name
        for name, module in model.named_modules()
        if module is not head and _is_linear(module) and name not in apart
    ]


def _on_other_stages(model: PreTrainedModel) -> list[str] | None:
    """Return the names of modules of a split model that other stages own and adapt; None for a whole model."""
    info = stage_info(model)
    return None if info is None else list(info.absent)


def _beside_language(model: PreTrainedModel) -> list[str]:
    """Return the names of linear layers outside of the language model and its head, of a model that reads images."""
    inside, _ = language_model(model)
    head = model.get_output_embeddings()
    return [
        name
        for name, module in model.named_modules()
        if _is_linear(module) and module is not head and not name.startswith(f"{inside}.")
    ]


def _own_linears(model: PreTrainedModel) -> list[str]:
    """Return the names of linear layers of a class of the model's own file that compute something else, such as routers with several results."""
    home = type(model).__mro__[1 if isinstance(model, PartOfModel) else 0].__module__
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and type(module).__module__ == home and not _maps_features(module)
    ]


def _maps_features(linear: torch.nn.Linear) -> bool:
    """Return whether a linear layer turns rows of its inputs into rows of its outputs, tried without numbers."""
    sizes = {"weight": (linear.out_features, linear.in_features), "bias": (linear.out_features,)}
    weights = {name: torch.empty(sizes[name], device="meta") for name, _ in linear.named_parameters() if name in sizes}
    try:
        output = torch.func.functional_call(linear, weights, torch.empty((2, linear.in_features), device="meta"))
    except Exception:  # code of any model
        return False
    return isinstance(output, torch.Tensor) and output.shape == (2, linear.out_features)


def _is_linear(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.Linear | Conv1D | ShardedLinear)


def _linears(model: PreTrainedModel) -> list[str]:
    return [name for name, module in model.named_modules() if _is_linear(module)]


def _linear_names(model: PreTrainedModel) -> list[str]:
    """Return the distinct last components of the names of linear layers."""
    return sorted({name.rpartition(".")[2] for name in _linears(model)})


def _unmatched(model: PreTrainedModel, lora: Lora) -> Iterator[Problem]:
    """Yield the entries of `modules_to_save` that peft would ignore silently."""
    names = [name for name, _ in model.named_modules() if name]
    for wanted in lora.modules_to_save:
        if not any(name.endswith(wanted) for name in names):
            yield Problem(
                code="LORA_SAVE",
                key="train.lora.modules_to_save",
                message=f"modules_to_save={wanted} is not a module of {type(model).__name__}, so nothing would be trained in full",
                fix=f"Name modules of the model, such as {_name_of(model, model.get_output_embeddings())}, or leave it out",
                source="peft utils/other.py _set_trainable",
            )


def _unadapted(adapted: Any, lora: Lora) -> Iterator[Problem]:
    """Yield the entries of `rank_pattern` and `alpha_pattern` that peft would ignore silently."""
    if adapted.active_peft_config.target_parameters:  # of stacked experts, for which peft renames patterns
        return
    names = [name for name, module in adapted.named_modules() if hasattr(module, "lora_A")]
    last = sorted({name.rpartition(".")[2] for name in names})
    for key in ("rank_pattern", "alpha_pattern"):
        for wanted in getattr(lora, key):
            if not any(f".{name}".endswith(f".{wanted}") for name in names):
                yield lora_pattern_problem(key, wanted, last)


def _name_of(model: PreTrainedModel, wanted: torch.nn.Module) -> str:
    return next(str(name) for name, module in model.named_modules() if module is wanted)


def _nothing_rounded() -> PlanError:
    return PlanError.of(
        code="LORA_UNSUPPORTED",
        key="train.lora.init_lora_weights",
        message="init_lora_weights=loftq begins with the error of rounding to 4 bits, and no layer of the model keeps one",
        fix="Set train.method to qlora and build the model by the plan (`apply_plan`), or set train.lora.init_lora_weights to default",
    )


def _dropout_on_experts(model: PreTrainedModel, lora: Lora, linear: list[str]) -> PlanError:
    return PlanError.of(
        code="LORA_DROPOUT_EXPERTS",
        key="train.lora.lora_dropout",
        message=(
            f"lora_dropout={lora.lora_dropout:g} with target_modules={lora.target_modules!r}: the experts of "
            f"{type(model).__name__} are stacked in one parameter, whose adapter has no dropout"
        ),
        fix="Set train.lora.lora_dropout to 0, or train.lora.target_modules to linear layers outside the experts, "
        f"such as {', '.join(name for name in linear if name.endswith('_proj'))}",
        source="peft tuners/lora/layer.py ParamWrapper",
    )
