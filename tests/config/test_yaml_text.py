"""YAML as people write it: duplicate keys, anchors, values that are not what they look like, files without an end."""

import textwrap
from pathlib import Path

import pytest

from toolkit.config.job import Job
from toolkit.config.loader import apply_override, parse_job
from toolkit.config.yaml_text import load_yaml, parse_yaml
from toolkit.errors import SpecError

SMALL = "model: m\ncluster: {gpu: cpu}\n"


def job_of(text: str, *overrides: str) -> Job:
    document = parse_yaml(textwrap.dedent(text), name="job.yaml")
    for override in overrides:
        apply_override(document, override)
    return parse_job(document)


def problems_of(text: str, *overrides: str):
    with pytest.raises(SpecError) as caught:
        job_of(text, *overrides)
    return caught.value.problems


def only(text: str, *overrides: str):
    (problem,) = problems_of(text, *overrides)
    return problem


def test_aliases_that_stand_for_billions_are_refused():
    lines = ["a: &a [x, x, x, x, x, x, x, x, x]"]
    lines += [f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join([f'*{chr(97 + i)}'] * 9)}]" for i in range(9)]
    assert only("\n".join(lines)).code == "YAML_RECURSIVE"


def test_a_second_document_is_said_to_be_one():
    problem = only(SMALL + "---\n" + SMALL)
    assert problem.code == "YAML_SYNTAX"
    assert "a second document" in problem.message


def test_an_endless_file_is_not_read_to_its_end():
    with pytest.raises(SpecError) as caught:
        load_yaml(Path("/dev/zero"))
    assert caught.value.codes == ("FILE_UNREADABLE",)


def test_a_duplicate_key_names_both_lines():
    problem = only("model: m\ncluster: {gpu: cpu}\ntrain:\n  seed: 1\n  max_steps: 2\n  seed: 3\n")
    assert (problem.code, problem.key) == ("YAML_DUPLICATE", "seed")
    assert "line 6" in problem.message
    assert "line 4" in problem.message


@pytest.mark.parametrize("text", ["1: a", "true: a", "null: a", "? [a, b]\n: c", "on: 1"])
def test_a_key_that_is_not_a_word(text):
    assert only(text).code == "YAML_KEY"


@pytest.mark.parametrize(
    "text",
    [
        "a: [",
        "a: b: c",
        "a:\n\t- b",
        "a: *nowhere",
        "a: !!python/object:os.system {}",
        "a: 2024-13-45",
        "a: !!int x",
        "a: !!bool maybe",
        "a: !!map b",
        "a: !!timestamp b",
        "a: \x00",
        'a: "\\U99999999"',
        'a: "\\ud800"',
        "a: !!int &x",
        "a: 1\n---\nb: 2",
    ],
)
def test_broken_yaml(text):
    problem = only(text)
    assert problem.code == "YAML_SYNTAX"
    assert problem.message.startswith("job.yaml")


@pytest.mark.parametrize(
    ("text", "key", "says"),
    [
        (
            "train:\n  output_dir: 2026-99-99",
            "train.output_dir",
            "train.output_dir=2026-99-99 is not a date: month must",
        ),
        ("train:\n  max_steps: " + "9" * 5000, "train.max_steps", "… is not a whole number: Exceeds the limit (4300"),
        ('data:\n  train: "a\\ud800"', "data.train", "data.train=a\\ud800 is not Unicode text: it has half of a"),
        ("data:\n  train: [a, {b: !!int c}]", "data.train[1].b", "data.train[1].b=c is not a whole number: "),
        ("train:\n  fp8: !!bool maybe", "train.fp8", "train.fp8=maybe is not true or false: "),
    ],
)
def test_a_value_that_is_not_what_it_looks_like_names_key_and_line(text, key, says):
    problem = only(text)
    assert (problem.code, problem.key) == ("YAML_SYNTAX", key)
    assert problem.message.startswith("job.yaml, line 2: ")
    assert says in problem.message
    assert problem.fix.startswith("Write ")
    assert not job_of(SMALL, "train.output_dir=2026-99-99").train.output_dir.is_absolute()  # an override is a text then


def test_an_anchor_inside_itself_and_a_bottomless_nest():
    assert only(SMALL + "deepspeed: &a {b: *a}").code == "YAML_RECURSIVE"
    assert only("a: " + "[" * 2000 + "]" * 2000).code == "YAML_RECURSIVE"


def test_anchors_and_merges_work():
    job = job_of("model: m\ncluster: {gpu: cpu}\ntrain: {<<: {seed: 3, max_steps: 2}, seed: 4}\n")
    assert (job.train.seed, job.train.max_steps) == (4, 2)


def test_a_merge_of_a_merge_is_no_duplicate():
    text = "deepspeed: {a: {b: {c: &b {<<: &a {x: 1}, x: 2}}}, d: {<<: *b, y: 3}}\n"
    assert parse_yaml(text, name="a.yaml")["deepspeed"]["a"]["b"]["c"] == {"x": 2}


@pytest.mark.parametrize(("text", "kind"), [("- a", "list"), ("just words", "str"), ("", "nothing"), ("3", "int")])
def test_what_is_not_a_mapping(text, kind):
    problem = only(text)
    assert problem.code == "YAML_NOT_MAPPING"
    assert kind in problem.message
