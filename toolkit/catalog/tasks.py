"""The task of a model: what its configuration says, and whether it has a class for what a job asks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

from toolkit.catalog.architectures import own_class_name, runs_own_code, task_classes
from toolkit.config.job import CLASSIFYING, Model, ProblemType, Task
from toolkit.errors import Problem

# What a task trains, in words.
NOUNS: Mapping[Task, str] = {
    "causal-lm": "causal language model",
    "sequence-classification": "classifier of sequences",
    "token-classification": "classifier of tokens",
    "masked-lm": "masked language model",
    "seq2seq-lm": "encoder-decoder",
    "image-text-to-text": "model that reads images and writes text",
}
# Ends of class names that tell the task alone.
_SUFFIXES: Mapping[str, Task] = {
    "ForSequenceClassification": "sequence-classification",
    "ForTokenClassification": "token-classification",
    "ForMaskedLM": "masked-lm",
}
# End of the classes of encoder-decoders and of models that read images, some of which are among the causal language models.
_CONDITIONAL = "ForConditionalGeneration"


def task_of(model: Model, config: Mapping[str, Any]) -> Task:
    """Return the task of a job's model: the one that the job names, or that of `default_task`."""
    return model.task or default_task(config)[0]


def default_task(config: Mapping[str, Any]) -> tuple[Task, str]:
    """Return the task that a `config.json` says, and the reason; where it says none, a causal language model.

    >>> default_task({"model_type": "bert", "architectures": ["BertForSequenceClassification"]})
    ('sequence-classification', 'config.json has architectures=BertForSequenceClassification')
    >>> default_task({"model_type": "t5", "is_encoder_decoder": True})[0]
    'seq2seq-lm'
    >>> default_task({"model_type": "llama"})
    ('causal-lm', 'config.json says no other task')
    """
    model_type, named = str(config.get("model_type")), _named(config)
    first = named[0] if named else task_classes("causal-lm").get(model_type, "")
    said = f"config.json has {f'architectures={named[0]}' if named else f'model_type={model_type}'}"
    for suffix, task in _SUFFIXES.items():
        if first.endswith(suffix):
            return task, said
    if config.get("is_encoder_decoder") and model_type in task_classes("seq2seq-lm") and _generates(first):
        return "seq2seq-lm", said
    if first.endswith(_CONDITIONAL) and model_type in task_classes("image-text-to-text"):
        return "image-text-to-text", said
    return "causal-lm", "config.json says no other task"


def num_labels_of(model: Model, config: Mapping[str, Any]) -> tuple[int, str]:
    """Return the number of classes of a classifier, and the reason: the job's, those of config.json, or transformers' default.

    >>> num_labels_of(Model(name="m", labels=("no", "yes", "both")), {})
    (3, 'model.labels names them')
    """
    if model.labels is not None:
        return len(model.labels), "model.labels names them"
    if model.num_labels is not None:
        return model.num_labels, "written in the job"
    for key in ("id2label", "num_labels"):
        value = config.get(key)
        if key == "id2label" and isinstance(value, Mapping) and value:
            return len(value), "id2label of config.json"
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value, "num_labels of config.json"
    return 2, "transformers' default, as neither the job nor config.json says"


def label_names(model: Model, config: Mapping[str, Any], num_labels: int) -> tuple[str, ...]:
    """Return the names of the classes: the job's, those of config.json if as many, or transformers' LABEL_0, LABEL_1, ...

    >>> label_names(Model(name="m"), {"id2label": {"1": "yes", "0": "no"}}, 2)
    ('no', 'yes')
    """
    if model.labels is not None:
        return model.labels
    own = config.get("id2label")
    if isinstance(own, Mapping) and len(own) == num_labels:
        named = {str(number): str(name) for number, name in own.items()}
        if all(str(number) in named for number in range(num_labels)):
            return tuple(named[str(number)] for number in range(num_labels))
    return tuple(f"LABEL_{number}" for number in range(num_labels))


def problem_type_of(model: Model, config: Mapping[str, Any], num_labels: int) -> tuple[ProblemType, str]:
    """Return what a classifier of sequences learns, and the reason.

    Source:
        transformers loss/loss_utils.py ForSequenceClassificationLoss: numbers for one label, else one class.
    """
    if model.problem_type is not None:
        return model.problem_type, "written in the job"
    for kind in get_args(ProblemType):
        if config.get("problem_type") == kind:
            return kind, "problem_type of config.json"
    if num_labels == 1:
        return "regression", "num_labels=1, as in transformers"
    return "single_label_classification", f"num_labels={num_labels}, as in transformers"


def has_new_head(task: Task, config: Mapping[str, Any]) -> bool:
    """Return whether a classifier's head is not that of the pretrained model, as far as its config.json says."""
    named = _named(config)
    return task in CLASSIFYING and task_classes(task).get(str(config.get("model_type"))) not in named


def _generates(name: str) -> bool:
    return not name or name.endswith((_CONDITIONAL, "MTModel", "ForTextToText", "EncoderDecoderModel"))


def _named(config: Mapping[str, Any]) -> list[str]:
    declared = config.get("architectures")
    return [str(entry) for entry in declared] if isinstance(declared, list | tuple) else []


def class_problems(
    config: Mapping[str, Any], *, name: str, trust_remote_code: bool, task: Task = "causal-lm"
) -> Iterator[Problem]:
    """Yield the problems of building a folder's model as its task needs it.

    A head for classes may be new, on a model that has another head or none; what generates text needs the head that it has.

    Args:
        config: Content of config.json.
        name: Name of the model in the job.
        trust_remote_code: Whether code from the model's repository may run; such a model cannot be checked.
        task: Value of `model.task`.
    """
    types, model_type = task_classes(task), config.get("model_type")
    if not types or not isinstance(model_type, str):
        return
    if runs_own_code(config, trust_remote_code=trust_remote_code, task=task):
        return
    named, built = _named(config), types.get(model_type)
    if built is None:
        yield no_class(model_type, named, name=name, brings_code=own_class_name(config, task) is not None, task=task)
    elif task in ("sequence-classification", "token-classification", "masked-lm"):
        return
    elif named and built.lower() not in (entry.lower() for entry in named):  # old folders write LLaMAForCausalLM
        why = f"what would be trained is a {built}" + (", which has a head" if named[0].endswith("Model") else "")
        yield _other_task(name, named[0], why, f"Name a folder with a {built}", task)
    elif task == "causal-lm" and built.endswith(_CONDITIONAL):
        why = "it also reads images or audio, which no data of this task has"
        yield _other_task(name, built, why, "Name a folder with its language model alone", task)


def no_class(
    model_type: str,
    architectures: Sequence[str] = (),
    *,
    name: str | None = None,
    brings_code: bool = False,
    task: Task = "causal-lm",
) -> Problem:
    """Return the problem MODEL_CLASS: the installed transformers has no class of a type for a task."""
    named = f" ({', '.join(architectures)})" if architectures else ""
    given = "" if name is None else f"model={name}: "
    own = ", or set model.trust_remote_code to true, which runs the code of its repository" if brings_code else ""
    other = (
        "a decoder model"
        if task == "causal-lm"
        else f"a model that has one, or set model.task to {_others(model_type)}"
    )
    return Problem(
        code="MODEL_CLASS",
        key="model",
        message=f"{given}model_type={model_type}{named} has no {NOUNS[task]} in the installed transformers",
        fix=f"Choose {other}, or update transformers{own}",
        source="transformers models/auto/modeling_auto.py",
    )


def _others(model_type: str) -> str:
    """Return the tasks for which a type has a class, as words."""
    return " or ".join(task for task in NOUNS if model_type in task_classes(task)) or "one that it has"


def _other_task(name: str, architecture: str, why: str, fix: str, task: Task) -> Problem:
    return Problem(
        code="MODEL_TASK",
        key="model",
        message=f"model={name} is a {architecture}, which task={task} does not train: {why}",
        fix=f"{fix}, or set model.task to what it is",
        source="architectures of its config.json",
    )
