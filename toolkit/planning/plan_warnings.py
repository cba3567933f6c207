"""What a valid plan may be warned of: values that are allowed, and rarely meant."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.catalog.tasks import has_new_head
from toolkit.catalog.weights import INDEX, SINGLE, unread_weights
from toolkit.planning.rules.tensor import TENSOR_MODEL_TYPES
from toolkit.planning.stage_parts import bubble_warning
from toolkit.planning.unchecked_plan import UncheckedPlan

# Largest peak learning rates that pass without a warning. A step of Adam or Lion changes each weight by about the learning
# rate, and weights are initialized with a standard deviation of about 0.02 (transformers initializer_range): 0.01 changes
# each by half of its size. LoRA's change is a product of two factors, of which one starts at zero, and is smaller.
LARGEST_LEARNING_RATE = {"full": 1e-2, "lora": 1e-1, "qlora": 1e-1}
# SGD multiplies the gradient, whose size depends on the model: published recipes of language models go up to 30 (arXiv
# 1708.02182).
LARGEST_SGD_LEARNING_RATE = 100.0


def plan_warnings(draft: UncheckedPlan) -> Iterator[str]:
    """Yield a warning, one sentence each, of every allowed value that is rarely meant."""
    yield from bubble_warning(draft)
    yield from learning_rate_warning(draft)
    yield from lost_updates_warning(draft)
    yield from derived_table_warning(draft)
    yield from new_head_warning(draft)
    yield from unread_weights_warning(draft)


def unread_weights_warning(draft: UncheckedPlan) -> Iterator[str]:
    """Yield a warning of weights in the model's folder that nothing reads."""
    folder = draft.model.path
    if draft.settings.init != "pretrained" or folder is None or not (unread := unread_weights(folder)):
        return
    single = (folder / SINGLE).is_file()
    shown = f"{', '.join(unread[:3])}{f' and {len(unread) - 3} more' if len(unread) > 3 else ''}"
    why = (
        f"{SINGLE} is, as in transformers"
        if single
        else f"{INDEX} does not name {'it' if len(unread) == 1 else 'them'}"
    )
    yield f"model={draft.model.name} has weights that are not read, {shown}: {why}. Remove them, or download or save the model again"


def new_head_warning(draft: UncheckedPlan) -> Iterator[str]:
    """Yield a warning of a classifier's head that the pretrained model lacks."""
    settings, model = draft.settings, draft.model
    if settings.init == "pretrained" and has_new_head(settings.task, model.config):
        yield (
            f"model={model.name} is a {model.architecture or model.model_type}: its head for num_labels={settings.num_labels} is new, and drawn from "
            f"train.seed={draft.job.train.seed}"
        )


def derived_table_warning(draft: UncheckedPlan) -> Iterator[str]:
    """Yield a warning of tensor ranks for an architecture whose table of styles is derived from its modules."""
    size, model_type = draft.job.parallel.tensor, draft.model.model_type
    if size > 1 and model_type not in TENSOR_MODEL_TYPES:
        yield (
            f"tensor={size} with model_type={model_type}, for which no table of styles is written: one is derived from the model and "
            "proven on a small twin before the run starts, which refuses it if the two differ. `toolkit models --support "
            f"{draft.model.name}` shows the outcome now"
        )


def lost_updates_warning(draft: UncheckedPlan) -> Iterator[str]:
    """Yield a warning of weights that are trained in 16 bit without an fp32 copy, as DDP trains them."""
    if draft.job.parallel.strategy == "ddp" and draft.settings.dtype != "fp32":
        yield (
            f"precision={draft.settings.precision} under strategy=ddp keeps no fp32 copy of the weights: a step that changes one by "
            "less than about a 256th of its size is lost to rounding. strategy=fsdp2, or zero with zero_stage 1, keeps one"
        )


def learning_rate_warning(draft: UncheckedPlan) -> Iterator[str]:
    """Yield a warning of a learning rate under which training usually diverges."""
    train, rate = draft.job.train, draft.settings.learning_rate
    sgd = train.optimizer == "sgd"
    largest = LARGEST_SGD_LEARNING_RATE if sgd else LARGEST_LEARNING_RATE[train.method]
    if rate <= largest:
        return
    scaled = f" after learning_rate_scaling={train.learning_rate_scaling}" if rate != train.learning_rate else ""
    customary = "" if sgd else f" ({'1e-5' if train.method == 'full' else '1e-4'} is customary)"
    yield (
        f"learning_rate={rate:g}{scaled} is above {largest:g}, where {train.optimizer} with method={train.method} "
        f"usually diverges{customary}. If this is not intended, set train.learning_rate"
    )
