"""What the model's class allows: its task, and the attention implementations that it has."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.catalog.architectures import Architecture, architecture_of
from toolkit.catalog.tasks import class_problems
from toolkit.config.fields import MAX_LABELS
from toolkit.errors import Problem
from toolkit.planning.unchecked_plan import UncheckedPlan
from toolkit.topology.grid import join


def class_of_task(draft: UncheckedPlan) -> Iterator[Problem]:
    """Require that transformers has a class of the model for its task."""
    model, task = draft.model, draft.settings.task
    trusted = draft.job.model.trust_remote_code
    yield from class_problems(model.config, name=model.name, trust_remote_code=trusted, task=task)


def _built(draft: UncheckedPlan) -> Architecture | None:
    model = draft.model
    folder = model.path if model.origin == "folder" else None
    trusted, task = draft.job.model.trust_remote_code, draft.settings.task
    return architecture_of(model.config, trust_remote_code=trusted, folder=folder, task=task)


def layers_that_recompute(draft: UncheckedPlan) -> Iterator[Problem]:
    """Refuse recomputation with old classes whose layers transformers cannot checkpoint."""
    built, fraction = _built(draft), draft.settings.gradient_checkpointing
    if fraction and built is not None and built.checkpoints is False:
        yield Problem(
            code="CHECKPOINTING_LAYERS",
            key="train.gradient_checkpointing",
            message=f"gradient_checkpointing={fraction:g} with {built.class_name}: none of its layers is a GradientCheckpointingLayer",
            fix="Set train.gradient_checkpointing to false",
            source="transformers modeling_layers.py",
        )


def attention_of_class(draft: UncheckedPlan) -> Iterator[Problem]:
    """Require an attention that the model's class implements, and for soft-capped scores a kernel that caps."""
    built, attention = _built(draft), draft.settings.attention
    if built is None or built.attention is None or attention in built.attention:
        yield from _soft_capped(draft)
        return
    why = f"transformers has no {attention} for this class"
    if attention == "flash_attention_2" and built.flash_kernel is not None:
        why = f"transformers would use {built.flash_kernel} instead, which the class requires"
    valid = built.attention
    yield Problem(
        code="ATTENTION_CLASS",
        key="train.attention",
        message=f"attention={attention} with {built.class_name}: {why}",
        fix=f"Set train.attention to {'one of ' if len(valid) > 1 else ''}{join(valid)}, or leave it out",
        source="transformers modeling_utils.py get_correct_attn_implementation",
    )


def _soft_capped(draft: UncheckedPlan) -> Iterator[Problem]:
    cap = draft.model.config.get("attn_logit_softcapping")
    if draft.settings.attention == "sdpa" and cap:
        yield Problem(
            code="ATTENTION_SOFTCAP",
            key="train.attention",
            message=(
                f"attention=sdpa with attn_logit_softcapping={cap}: torch's kernel cannot cap attention scores, so "
                "outputs would differ from the pretrained model's"
            ),
            fix="Set train.attention to eager, or to flash_attention_2 on a card that has it",
            source="transformers integrations/sdpa_attention.py",
        )


def mode_that_trains(draft: UncheckedPlan) -> Iterator[Problem]:
    """Refuse xLSTM in its published inference mode in 16 bit: its states are fp32, and the weights do not match them."""
    model, dtype = draft.model, draft.settings.dtype
    if model.model_type == "xlstm" and model.config.get("mode", "inference") == "inference" and dtype != "fp32":
        yield Problem(
            code="MODEL_CONFIG_INVALID",
            key="model",
            message=f"mode=inference in the config.json of {model.name} computes fp32 states, which cannot be "
            f"multiplied with weights in {dtype}",
            fix='Set "mode": "train" in its config.json',
            source="transformers models/xlstm/modeling_xlstm.py xLSTMBackend",
        )


def few_labels(draft: UncheckedPlan) -> Iterator[Problem]:
    """Refuse a number of labels for which transformers would make names for hours; a causal language model uses none."""
    labels = draft.model.config.get("num_labels")
    if isinstance(labels, int | float) and labels > MAX_LABELS:
        yield Problem(
            code="MODEL_CONFIG_INVALID",
            key="model",
            message=f"num_labels={labels:g} in the config.json of {draft.model.name} is above {MAX_LABELS:,}: transformers "
            "makes a name for each label, and a language model has none",
            fix="Remove num_labels from its config.json",
            source="transformers configuration_utils.py PreTrainedConfig.num_labels",
        )


RULES = (class_of_task, attention_of_class, layers_that_recompute, mode_that_trains, few_labels)
