"""The labels of classifiers in data: which records have them, the numbers of their classes, and what is wrong with them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from toolkit.arguments import shown
from toolkit.config.job import Data, EvalSource, ProblemType, Task
from toolkit.dataset_inspection.formats import FORMAT_COLUMNS, LABEL_FORMATS, Format, kind_of
from toolkit.errors import Problem
from toolkit.units import whole_number

_FORMATS: Mapping[Task, Format] = {"sequence-classification": "text_label", "token-classification": "tokens_tags"}
# Label of a word that does not count in the loss, as everywhere in transformers.
NOT_LEARNED = -100
# Most class names that a message lists.
_LISTED = 12
# Largest number of fp32, in which the loss of a regression is computed.
_FP32_MAX = (2 - 2**-23) * 2.0**127


@dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    """The labels that a model learns.

    Args:
        names: Names of the classes, in the order of their numbers.
        problem_type: What a text's label is: one class, several, or numbers; None for the tags of words.
        are_named: Whether the names are the user's or the model's, not transformers' LABEL_0, LABEL_1, ...
    """

    names: tuple[str, ...]
    problem_type: ProblemType | None = None
    are_named: bool = False

    @property
    def identity(self) -> str:
        """All that the numbers of labels depend on."""
        return f"{self.problem_type} {self.names}"

    @property
    def of_sequences(self) -> bool:
        """Whether a text has a label, and not each word."""
        return self.problem_type is not None


def data_of_task(data: Data, task: Task) -> Data:
    """Return a data section with each text in a row of its own where the task has labels or images, and the format of its labels."""
    if task == "image-text-to-text":
        return data.model_copy(update={"packing": "none"})
    format_ = _FORMATS.get(task)
    if format_ is None:
        return data
    update: dict[str, Any] = {"format": _format(data.format, format_), "packing": "none"}
    if data.sources is not None:
        update["sources"] = tuple(_of_format(source, format_) for source in data.sources)
    if data.eval_sets:
        update["eval"] = {name: _of_format(source, format_) for name, source in data.eval_sets.items()}
    return data.model_copy(update=update)


def _format(written: str, format_: Format) -> str:
    return format_ if written == "auto" else written


def _of_format(source: EvalSource, format_: Format) -> EvalSource:
    return source.model_copy(update={"format": _format(source.format, format_)})


def format_problems(data: Data, task: Task) -> Iterable[Problem]:
    """Yield a problem for each format that a job names and that is not one of its task."""
    wanted = _FORMATS.get(task)
    named = {"data.format": data.format}
    named |= {f"data.sources[{at}].format": source.format for at, source in enumerate(data.sources or ())}
    named |= {f"data.eval.{name}.format": source.format for name, source in data.eval_sets.items()}
    for key, format_ in named.items():
        if format_ in ("auto", wanted) or (wanted is None and format_ not in LABEL_FORMATS):
            continue
        others = [one for one in FORMAT_COLUMNS if one not in LABEL_FORMATS]
        allowed = [wanted] if wanted else ["messages"] if task == "image-text-to-text" else others
        learned = "labels" if wanted is None else "no labels" if format_ in others else "labels of another kind"
        yield Problem(
            code="TASK_UNUSED",
            key=key,
            message=f"format={format_} with task={task}: its records have {learned} to learn",
            fix=f"Set {key} to one of {', '.join(['auto', *allowed])}, or set model.task",
        )


def encode(record: Mapping[str, Any], labels: Labels) -> list[float]:
    """Return the numbers of a record's labels: of a text one, or one for each class; of tags one for each word.

    Raises:
        ValueError: With what is wrong with the record.
    """
    if labels.of_sequences:
        return _of_text(record.get("label"), labels)
    tags = record["tags"]
    return [
        float(NOT_LEARNED) if tag == NOT_LEARNED else _class(tag, labels, f"tags[{at}]") for at, tag in enumerate(tags)
    ]


def _of_text(label: Any, labels: Labels) -> list[float]:
    size = len(labels.names)
    if labels.problem_type == "single_label_classification":
        return [_class(label, labels, "label")]
    if labels.problem_type == "regression":
        numbers = [_number(one) for one in (label if isinstance(label, list) else [label])]
        if len(numbers) != size:
            raise ValueError(f"label has {len(numbers)} numbers, and num_labels={size}")
        return numbers
    if not isinstance(label, list):
        raise ValueError(f"label is {kind_of(label)}, not a list, and problem_type=multi_label_classification")
    if label and all(isinstance(one, str) for one in label):
        chosen = {_class(one, labels, "label") for one in label}
        return [float(number in chosen) for number in range(size)]
    if len(label) != size and not (label == [] and labels.are_named):
        raise ValueError(f"label has {len(label)} numbers, and num_labels={size}")
    if any(one not in (0, 1) for one in label):
        raise ValueError(f"label={shown(label)} has a number that is neither 0 nor 1")
    return [float(one) for one in label] or [0.0] * size


def _number(value: Any) -> float:
    """Return a number to learn, which a .csv file has as text."""
    try:
        number = float(value) if isinstance(value, str) else value
        if isinstance(number, int | float) and not isinstance(number, bool) and abs(number) <= _FP32_MAX:
            return float(number)
    except ValueError:
        pass
    raise ValueError(f"label={shown(value)} is no number that fp32 holds, and problem_type=regression")


def _class(value: Any, labels: Labels, name: str) -> float:
    """Return the number of a class that is given by its name or its number."""
    size = len(labels.names)
    if isinstance(value, str):
        if value in labels.names:
            return float(labels.names.index(value))
        number = whole_number(value)
        if number is None:
            raise ValueError(f"{name}={shown(value)} is not the name of a class: {_listed(labels.names)}")
        value = number
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int):
        raise ValueError(f"{name} is {kind_of(value)}, not the name or the number of a class")
    if not 0 <= value < size:
        raise ValueError(f"{name}={value} is outside 0 to {size - 1}, and num_labels={size}")
    return float(value)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more


def label_fix(labels: Labels, values: Iterable[Any]) -> str:
    """Return the fix for labels that are not those of the model, from those that were found."""
    found = [one for value in values for one in (value if isinstance(value, list) else [value])]
    if labels.problem_type == "regression":
        return "Give each record as many numbers as model.num_labels, or set model.problem_type"
    words = sorted({one for one in found if isinstance(one, str) and one.strip() and whole_number(one) is None})
    if labels.are_named and (others := [word for word in words if word not in labels.names]):
        return f"Correct the records, or add {', '.join(others[:_LISTED])} to the classes that model.labels names"
    if words:
        return f"Set model.labels to the names of all classes, such as [{', '.join(words[:_LISTED])}]"
    if labels.problem_type == "multi_label_classification":
        return f"Give each record a list of names of classes, or of a 0 or 1 for each of the {len(labels.names)}"
    numbers = [int(one) for one in found if _is_integer(one)]
    if numbers and max(numbers) >= len(labels.names):
        least = max(numbers) + 1
        named = f"Name at least {least} classes in model.labels"
        return f"{named if labels.are_named else f'Set model.num_labels to at least {least}'}, or correct the records"
    return "Correct or remove the records; model.labels names the classes"


def _is_integer(value: Any) -> bool:
    if isinstance(value, str):
        return whole_number(value) is not None
    return isinstance(value, int) or (isinstance(value, float) and value.is_integer())


def label_problems(
    records: Sequence[tuple[int, Mapping[str, Any]]], labels: Labels, *, key: str, name: str
) -> list[Problem]:
    """Return the problems of the labels of a source's first records: those that are no labels of the model, and those of several types.

    Args:
        records: Line and content of each record, in our own columns.
        labels: Labels of the model.
        key: Key path of the source.
        name: Its name.
    """
    column = "label" if labels.of_sequences else "tags"
    faults: list[tuple[int, str]] = []
    kinds: dict[str, int] = {}
    for line, record in records:
        value = record.get(column)
        if isinstance(value, list) and not labels.of_sequences:
            kinds |= {kind_of(one): line for one in value if kind_of(one) not in kinds and one != NOT_LEARNED}
        elif value is not None:
            kinds.setdefault(kind_of(value), line)
        try:
            encode(record, labels)
        except ValueError as error:
            faults.append((line, str(error)))
    problems = []
    if len(kinds) > 1:
        (first, at), (other, there), *_ = kinds.items()
        message = f"{name}: {column} is {first} in the record at line {at}, and {other} in that at line {there}"
        problems.append(
            Problem(code="DATA_LABELS", key=key, message=message, fix="Give all labels as names, or all as numbers")
        )
    if faults:
        causes = Counter(fault for _, fault in faults)
        more = f" (and {len(faults) - 1} more records)" if len(faults) > 1 else ""
        line, fault = faults[0]
        values = [record.get(column) for _, record in records]
        message = f"{name}, record at line {line}: {fault}{more}"
        if len(causes) > 1 and len(causes) <= 3:
            message += "; " + "; ".join(other for other in causes if other != fault)
        problems.append(Problem(code="DATA_LABELS", key=key, message=message, fix=label_fix(labels, values)))
    return problems
