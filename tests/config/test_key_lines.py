import json
from pathlib import Path

import pytest

from toolkit.cli.app import main
from toolkit.config.key_lines import with_lines
from toolkit.config.loader import load_job
from toolkit.errors import PlanError, Problem, SpecError
from toolkit.planning.resolve import resolve

JOB = """\
model: quickstart-llama
cluster: &cluster
  gpu: h100-sxm-80gb
  num_nodes: 1            # another tool's name of cluster.nodes
train:
  max_length: 128
  train_batch_size: 3
  method: lora
  lora: {r: 8,
         lora_alpha: 16}
deepspeed:
  zero_optimization:
    reduce_bucket_size: 1e8
"""


@pytest.fixture
def job(tmp_path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    return path


def line(path: Path, key: str, *overrides: str) -> int | None:
    (found,) = with_lines([Problem(code="KEY_VALUE", key=key, message="m", fix="f")], path, overrides)
    assert found.file == ("" if found.line is None else str(path))
    return found.line


@pytest.mark.parametrize(
    ("key", "number"),
    [
        ("train", 5),
        ("train.train_batch_size", 7),
        ("train.lora.lora_alpha", 10),
        ("train.sequence_length", 6),  # written under another name
        ("cluster.nodes", 4),
        ("deepspeed.zero_optimization.reduce_bucket_size", 13),
        ("model.name", 1),  # the section is a name alone
        ("train.seed", 5),  # not written: its section
        ("train.lora.lora_dropout", 9),
        ("data.train", None),  # neither is written
        ("train.jsonl", None),  # a file, not a key
        ("", None),
    ],
)
def test_the_line_of_a_key_or_of_its_section(job, key, number):
    assert line(job, key) == number


def test_keys_that_an_override_sets_have_no_line(job):
    assert line(job, "train.train_batch_size", "train.train_batch_size=5") is None
    assert line(job, "train.sequence_length", "train.max_length=5") is None
    assert line(job, "train.lora.r", "train.lora={r: 4}") is None
    assert line(job, "train.lora", "train.lora.r=4") == 9


def test_keys_of_a_merge_have_the_line_that_they_stand_on(job):
    job.write_text("a: &a\n  seed: 1\n  max_steps: 2\ntrain:\n  max_steps: 3\n  <<: *a\n")
    assert (line(job, "train.seed"), line(job, "train.max_steps")) == (2, 5)


@pytest.mark.parametrize("text", ["a: [", "a: 1\na: 2\n", "a: &a [*a]", "- 1", "", "a: \x00", 'a: "\\U99999999"'])
def test_a_file_without_keys_leaves_problems_unchanged(job, text):
    job.write_text(text)
    assert line(job, "train.seed") is None
    assert line(job.parent, "train.seed") is None


def test_python_is_told_lines_too(job):
    job.write_text(JOB.replace("max_length: 128", "max_length: many"))
    with pytest.raises(SpecError) as caught:
        load_job(job)
    assert [(problem.code, problem.key, problem.line) for problem in caught.value.problems] == [
        ("KEY_VALUE", "train.max_length", 6)
    ]
    assert str(caught.value).startswith(f"{job}, line 6: train.max_length='many'")
    job.write_text(JOB.replace("train_batch_size: 3", "warmup_steps: 9\n  max_steps: 3"))
    with pytest.raises(PlanError) as refused:
        resolve(job)
    assert [(problem.key, problem.line) for problem in refused.value.problems] == [("train.warmup_steps", 7)]


def test_the_command_prints_them(job, capsys):
    assert main(["emit", str(job), "--out", "unused", "--set", "cluster.gpus_per_node=2"]) == 2
    (told,) = [told for told in capsys.readouterr().err.splitlines() if told.startswith("error: ")]
    assert told.startswith(f"error: {job}, line 7: train.train_batch_size: ")
    assert main(["validate", str(job), "--set", "cluster.gpus_per_node=2", "--set", "train.sed=1", "--json"]) == 2
    problems = json.loads(capsys.readouterr().out)["problems"]
    assert {problem["key"]: problem["line"] for problem in problems} == {"train.sed": None, "train.train_batch_size": 7}


def test_a_plan_file_has_no_lines(job, tmp_path, capsys):
    job.write_text(JOB.replace("train_batch_size: 3", "max_steps: 4"))
    assert main(["emit", str(job), "--out", str(tmp_path / "out")]) == 0
    capsys.readouterr()
    assert main(["validate", str(tmp_path / "out" / "plan.json"), "--set", "train.seed=x", "--json"]) == 2
    assert [problem["line"] for problem in json.loads(capsys.readouterr().out)["problems"]] == [None]
