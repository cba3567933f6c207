"""What a task allows: the keys of its labels, and what of the rest of a job it has no use for."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.config.job import CLASSIFYING, NEXT_TOKEN, Data, Task
from toolkit.dataset_inspection.labels import format_problems
from toolkit.errors import Problem
from toolkit.planning.unchecked_plan import UncheckedPlan

# Tasks for which `toolkit train` makes the batches.
TRAINED_TASKS: tuple[Task, ...] = (*NEXT_TOKEN, *CLASSIFYING)
_WHOLE = ("tensor", "pipeline")


def labels(draft: UncheckedPlan) -> Iterator[Problem]:
    """Refuse labels of a task that has none, and labels that contradict each other."""
    model, settings = draft.job.model, draft.settings
    if settings.task not in CLASSIFYING:
        for name in ("labels", "num_labels", "problem_type"):
            if getattr(model, name) is not None:
                yield _labels(
                    name,
                    f"{name} with task={settings.task}, which gives no scores to classes",
                    "Remove it, or set model.task to sequence-classification",
                )
        return
    if model.labels is not None:
        if model.num_labels not in (None, len(model.labels)):
            yield _labels(
                "num_labels",
                f"num_labels={model.num_labels}, and model.labels names {len(model.labels)}",
                "Remove model.num_labels",
            )
        if twice := sorted({name for name in model.labels if model.labels.count(name) > 1}):
            yield _labels("labels", f"labels has {', '.join(twice)} more than once", "Name each class once")
    if settings.task == "token-classification" and model.problem_type is not None:
        yield _labels(
            "problem_type",
            f"problem_type={model.problem_type} with task=token-classification: a token has one class",
            "Remove it",
        )
    if settings.problem_type == "single_label_classification" and settings.num_labels == 1:
        yield _labels(
            "problem_type",
            "problem_type=single_label_classification with num_labels=1: every text has the same class",
            "Set model.num_labels to the number of classes, or model.problem_type to regression",
        )


def _labels(name: str, message: str, fix: str) -> Problem:
    return Problem(
        code="TASK_LABELS",
        key=f"model.{name}",
        message=message,
        fix=fix,
        source="transformers loss/loss_utils.py ForSequenceClassificationLoss",
    )


def whole_model(draft: UncheckedPlan) -> Iterator[Problem]:
    """Refuse tensor ranks and stages of models whose heads these do not cut."""
    task, parallel = draft.settings.task, draft.job.parallel
    if task in NEXT_TOKEN:
        return
    for name in _WHOLE:
        if (size := getattr(parallel, name)) > 1:
            yield Problem(
                code="TASK_PARALLEL",
                key=f"parallel.{name}",
                message=f"{name}={size} with task={task}: only models of task=causal-lm are shared so",
                fix=f"Set parallel.{name} to 1, and parallel.zero_stage to 3 if the model is too large for a card",
            )
    if parallel.strategy == "fsdp2" and task not in CLASSIFYING:
        yield Problem(
            code="TASK_PARALLEL",
            key="parallel.strategy",
            message=f"strategy=fsdp2 with task={task}: biases or embeddings that several modules share cannot be sharded apart",
            fix="Set parallel.strategy to zero, with parallel.zero_stage 3 for shards of the weights, or to ddp",
        )


def keys_without_use(draft: UncheckedPlan) -> Iterator[Problem]:
    """Refuse keys that act on the next token of a text, and data of another task."""
    task, train, settings = draft.settings.task, draft.job.train, draft.settings
    if draft.job.data is not None:
        yield from format_problems(draft.job.data, task)
    if task in NEXT_TOKEN:
        return
    if train.loss != "full":
        yield _unused(
            "train.loss", train.loss, task, "its head is small, or has more than one layer", "Set train.loss to full"
        )
    if train.samples is not None:
        yield _unused("train.samples", "…", task, "the model does not continue texts", "Remove it")
    if train.router_aux_loss_coef is not None:
        why = "its model computes no loss of its routers"
        yield _unused("train.router_aux_loss_coef", f"{train.router_aux_loss_coef:g}", task, why, "Remove it")
    if task not in CLASSIFYING:
        return
    if settings.problem_type in ("multi_label_classification", "regression"):
        for name in ("label_smoothing_factor", "z_loss"):
            if value := getattr(train, name):
                why = f"problem_type={settings.problem_type} has no softmax over classes"
                yield _unused(f"train.{name}", f"{value:g}", task, why, "Remove it")
    if draft.job.data is not None:
        yield from _data(draft.job.data, task)


def _data(data: Data, task: Task) -> Iterator[Problem]:
    if "packing" in data.model_fields_set and data.packing != "none":
        why = "the labels of a row are those of one text"
        yield _unused("data.packing", data.packing, task, why, "Set data.packing to none, or leave it out")
    if data.streaming:
        yield _unused(
            "data.streaming", "true", task, "labels are checked before the run", "Set data.streaming to false"
        )
    if data.long_rows == "split":
        yield _unused(
            "data.long_rows",
            "split",
            task,
            "the parts of a text have no labels of their own",
            "Set data.long_rows to truncate, refuse or drop",
        )
    for name in ("system_prompt", "chat_template"):
        if getattr(data, name) is not None:
            yield _unused(f"data.{name}", "…", task, "its texts are no conversations", "Remove it")
    if data.loss_on != "all":
        yield _unused("data.loss_on", data.loss_on, task, "all labels count in the loss", "Remove it")
    named = [(f"data.sources[{at}]", each) for at, each in enumerate(data.sources or ())]
    for key, source in (*named, *((f"data.eval.{name}", each) for name, each in data.eval_sets.items())):
        if source.loss_on not in (None, "all"):
            yield _unused(f"{key}.loss_on", source.loss_on, task, "all labels count in the loss", "Remove it")


def _unused(key: str, value: object, task: Task, why: str, fix: str) -> Problem:
    said = ", ".join(value) if isinstance(value, tuple) else value
    return Problem(
        code="TASK_UNUSED", key=key, message=f"{key.rpartition('.')[2]}={said} with task={task}: {why}", fix=fix
    )


RULES = (labels, whole_model, keys_without_use)
