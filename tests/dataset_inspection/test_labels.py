"""Labels of records: their numbers, and what is wrong with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from toolkit.config.job import Data
from toolkit.dataset_inspection.inspect import peek
from toolkit.dataset_inspection.labels import Labels, data_of_task, encode, format_problems

ONE = Labels(names=("no", "yes", "both"), problem_type="single_label_classification", are_named=True)
SEVERAL = Labels(names=("no", "yes", "both"), problem_type="multi_label_classification", are_named=True)
NUMBER = Labels(names=("LABEL_0",), problem_type="regression")
NUMBERS = Labels(names=("LABEL_0", "LABEL_1"), problem_type="regression")
TAGS = Labels(names=("O", "B"), are_named=True)


@pytest.mark.parametrize(
    ("labels", "record", "wanted"),
    [
        (ONE, {"label": "yes"}, [1]),
        (ONE, {"label": 2}, [2]),
        (ONE, {"label": 2.0}, [2]),
        (ONE, {"label": "2"}, [2]),
        (ONE, {"label": True}, [1]),
        (SEVERAL, {"label": ["both", "no"]}, [1, 0, 1]),
        (SEVERAL, {"label": [0, 1, 1]}, [0, 1, 1]),
        (SEVERAL, {"label": []}, [0, 0, 0]),
        (NUMBER, {"label": -0.5}, [-0.5]),
        (NUMBER, {"label": "-0.5"}, [-0.5]),  # as a .csv file has it
        (NUMBERS, {"label": [1, 2.5]}, [1, 2.5]),
        (TAGS, {"tokens": ["a", "b", "c"], "tags": ["B", 0, -100]}, [1, 0, -100]),
    ],
)
def test_labels_are_names_or_numbers(labels: Labels, record: dict[str, Any], wanted: list[float]) -> None:
    assert encode(record, labels) == wanted


@pytest.mark.parametrize(
    ("labels", "record", "says"),
    [
        (ONE, {"label": 3}, "label=3 is outside 0 to 2, and num_labels=3"),
        (ONE, {"label": -1}, "outside 0 to 2"),
        (ONE, {"label": "maybe"}, "'maybe' is not the name of a class: no, yes, both"),
        (ONE, {"label": "²"}, "'²' is not the name of a class: no, yes, both"),
        (ONE, {"label": "9" * 5000}, "is not the name of a class: no, yes, both"),
        (ONE, {"label": 0.5}, "label is a number, not the name"),
        (ONE, {"label": [1]}, "label is a list"),
        (SEVERAL, {"label": 1}, "label is a number, not a list, and problem_type=multi_label_classification"),
        (SEVERAL, {"label": [1, 0]}, "label has 2 numbers, and num_labels=3"),
        (SEVERAL, {"label": [1, 0, 2]}, "neither 0 nor 1"),
        (ONE, {"label": "²"}, "is not the name of a class"),
        (NUMBER, {"label": "high"}, "is no number that fp32 holds, and problem_type=regression"),
        (NUMBER, {"label": "nan"}, "is no number"),
        (NUMBER, {"label": True}, "is no number"),
        (NUMBER, {"label": float("nan")}, "is no number"),
        (NUMBER, {"label": float("inf")}, "is no number"),
        (NUMBER, {"label": 1e39}, "is no number"),
        (NUMBER, {"label": 10**400}, "is no number"),
        (NUMBERS, {"label": 1.0}, "label has 1 numbers, and num_labels=2"),
        (TAGS, {"tokens": ["a", "b"], "tags": ["B", "X"]}, "tags[1]='X' is not the name of a class"),
    ],
)
def test_what_is_no_label_of_the_model_is_said(labels: Labels, record: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=r"label|tag") as caught:
        encode(record, labels)
    assert says in str(caught.value)


def looked_at(folder: Path, labels: Labels, *records: dict[str, Any]) -> list[tuple[str, str]]:
    (folder / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    task = "sequence-classification" if labels.of_sequences else "token-classification"
    data = data_of_task(Data(train=str(folder / "a.jsonl")), task)  # type: ignore[arg-type]
    return [(problem.code, str(problem)) for problem in peek(data, labels=labels)[1]]


def test_all_problems_of_a_file_are_told_at_once(tmp_path: Path) -> None:
    found = looked_at(
        tmp_path,
        ONE,
        *({"text": "a", "label": "yes"}, {"text": "b", "label": 7}, {"text": "c", "label": "never"}),
        *({"text": "d"}, {"text": None, "label": 1}),
    )
    assert [code for code, _ in found] == ["DATA_TYPE", "DATA_LABELS", "DATA_LABELS"]
    assert "record at line 4: label is absent or null (and 1 more records)" in found[0][1]
    assert "label is a string in the record at line 1, and a number in that at line 2" in found[1][1]
    assert "label=7 is outside 0 to 2, and num_labels=3 (and 1 more records); label='never' is not" in found[2][1]


def test_the_fix_has_the_classes_that_were_found(tmp_path: Path) -> None:
    unnamed = Labels(names=("LABEL_0", "LABEL_1"), problem_type="single_label_classification")
    (found,) = looked_at(tmp_path, unnamed, {"text": "a", "label": "spam"}, {"text": "b", "label": "ham"})
    assert "Set model.labels to the names of all classes, such as [ham, spam]" in found[1]
    named = Labels(names=("good", "bad"), problem_type="single_label_classification", are_named=True)
    (found,) = looked_at(tmp_path, named, {"text": "a", "label": "bda"}, {"text": "b", "label": "good"})
    assert "Correct the records, or add bda to the classes that model.labels names" in found[1]
    (found,) = looked_at(tmp_path, unnamed, {"text": "a", "label": 4}, {"text": "b", "label": 0})
    assert "Set model.num_labels to at least 5" in found[1]
    (found,) = looked_at(tmp_path, unnamed, {"text": "a", "label": "4"}, {"text": "b", "label": ""})
    assert "Set model.num_labels to at least 5" in found[1]
    (found,) = looked_at(tmp_path, ONE, {"text": "a", "label": 4})
    assert "Name at least 5 classes in model.labels" in found[1]
    (found,) = looked_at(tmp_path, SEVERAL, {"text": "a", "label": [2]})
    assert "or of a 0 or 1 for each of the 3" in found[1]


def test_tokens_and_tags_of_different_lengths_are_told(tmp_path: Path) -> None:
    (found,) = looked_at(tmp_path, TAGS, {"tokens": ["a", "b"], "ner_tags": ["O"]})
    assert found[0] == "DATA_TYPE"
    assert "there are 2 tokens and 1 tags" in found[1]


@pytest.mark.parametrize(
    ("record", "format_"),
    [
        ({"sentence1": "a", "sentence2": "b", "label": 1, "idx": 4}, "text_label"),
        ({"premise": "a", "hypothesis": "b", "label": 1}, "text_label"),
        ({"sentence": "a", "label": 1}, "text_label"),
        ({"text": "a", "text_pair": None, "label": 1}, "text_label"),
        ({"tokens": ["a"], "labels": [0]}, "tokens_tags"),
        ({"words": ["a"], "tags": [0]}, "tokens_tags"),
    ],
)
def test_columns_of_published_sets_are_read(tmp_path: Path, record: dict[str, Any], format_: str) -> None:
    assert looked_at(tmp_path, ONE if format_ == "text_label" else TAGS, record) == []


def test_data_without_labels_says_what_its_columns_must_be(tmp_path: Path) -> None:
    (found,) = looked_at(tmp_path, ONE, {"prompt": "a", "completion": "b"})
    assert found[0] == "DATA_COLUMNS"
    assert "text and label, with text_pair" in found[1]


def test_records_with_text_and_label_are_text_to_a_language_model(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a", "label": "x"}\n', encoding="utf-8")
    data = Data(train=str(tmp_path / "a.jsonl"))
    assert data_of_task(data, "causal-lm") is data
    assert peek(data)[0].format == "text"


def test_a_format_of_another_task_is_refused() -> None:
    (problem,) = format_problems(Data(train="a.jsonl", format="text"), "sequence-classification")
    assert (problem.code, problem.key) == ("TASK_UNUSED", "data.format")
    (problem,) = format_problems(Data(train="a.jsonl", format="tokens_tags"), "causal-lm")
    assert "its records have labels to learn" in problem.message
    assert problem.fix.startswith("Set data.format to one of auto, text, prompt_completion, messages, tokens, or")
    (problem,) = format_problems(Data(train="a.jsonl", format="text_label"), "token-classification")
    assert "its records have labels of another kind" in problem.message
    (problem,) = format_problems(Data(train="a.jsonl", format="text_label"), "image-text-to-text")
    assert problem.fix.startswith("Set data.format to one of auto, messages, or")
    assert not [*format_problems(Data(train="a.jsonl", format="text_label"), "sequence-classification")]
