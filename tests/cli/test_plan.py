"""`toolkit plan`: the table, JSON, files of a row, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from toolkit.cli.app import main
from toolkit.errors import SpecError
from toolkit.planning.resolve import resolve

pytestmark = pytest.mark.usefixtures("kept_traces")

PRICES = """
provider: Mine
currency: USD
date: 2026-11-01
source: https://example.org/prices
offers:
  - {instance: one, gpu: l4-24gb, gpus: 1, host_memory_gib: 64, usd_per_hour: 0.8}
"""
JOB = """
model: {name: smollm2-135m, init: random}
train: {sequence_length: 512, train_batch_size: 4, max_steps: 1000, gradient_checkpointing: true, loss: full, torch_compile: false}
parallel: {zero_stage: 2}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("TOOLKIT_NO_CACHE", "1")
    (tmp_path / "prices.yaml").write_text(PRICES)
    (tmp_path / "job.yaml").write_text(JOB)
    return tmp_path


ASKED = ("plan", "job.yaml", "--prices", "prices.yaml", "--gpus", "l4", "--no-liger")


def test_a_table_and_the_files_of_its_row(capsys, folder):
    assert main([*ASKED, "--write", "out/planned.yaml", "--emit", "files", "--report", "report.html"]) == 0
    shown = capsys.readouterr().out
    row = next(line for line in shown.splitlines() if " Mine one " in line)
    assert "1 × l4-24gb" in row
    assert "recommended: row 1, 1 × l4-24gb" in shown
    assert "read 2026-11-01" in shown
    made = resolve(folder / "out" / "planned.yaml")
    assert (made.job.cluster.gpu, made.settings.batch.train, made.settings.gradient_checkpointing) == (
        "l4-24gb",
        4,
        1.0,
    )
    assert made.job.train.max_steps == 1000
    assert (folder / "files" / "deepspeed.json").exists()
    assert resolve(folder / "files" / "job.yaml").settings == made.settings
    assert "<!doctype html>" in (folder / "report.html").read_text()


def test_a_model_and_tokens_give_a_job_that_says_what_is_missing(capsys, folder):
    arguments = ["--model", "smollm2-135m", "--tokens", "1M", "--sequence-length", "512", "--train-batch-size", "4"]
    pinned = [
        "train.gradient_checkpointing=true",
        "train.loss=full",
        "train.torch_compile=false",
        "parallel.zero_stage=2",
    ]
    asked = ["plan", *arguments, *ASKED[2:], *(f"--set={each}" for each in pinned)]
    assert main([*asked, "--epochs", "2", "--write", "planned.yaml", "--report", "report.html"]) == 0
    assert "before `toolkit train`, fill in data and model: the job says how" in capsys.readouterr().out
    made = resolve(folder / "planned.yaml")
    assert made.job.train.max_steps == 977  # 2,000,000 / 2048 = 976.6
    text, page = (folder / "planned.yaml").read_text(), (folder / "report.html").read_text()
    assert "# train.max_steps: 2,000,000 tokens / (4 sequences × 512 tokens a step), rounded up" in text
    for shown in (text, page):
        assert "#   data: Add" in shown
        assert "#   model: Name the hub id HuggingFaceTB/SmolLM2-135M" in shown
    assert page.index("#   model: Name") < page.index("toolkit train planned.yaml")
    assert main(["validate", "planned.yaml"]) == 0
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "would refuse it" in line]
    assert "TRAIN_NO_DATA" in line
    assert "MODEL_NO_WEIGHTS" in line


def never(*_, **__):
    raise AssertionError("the search has begun")


@pytest.mark.parametrize(
    ("options", "code", "key", "words"),
    [
        (["--write", "job.yaml"], 2, "--write", "is the job that is planned"),
        (["--write", "job.yaml", "--overwrite"], 2, "--write", "is the job that is planned"),
        (["--emit", ".", "--overwrite"], 2, "--emit", "is the job that is planned"),
        (["--write", "prices.yaml"], 2, "--write", "exists and would be overwritten"),
        (["--report", "prices.yaml"], 2, "--report", "exists and would be overwritten"),
        (["--write", "a", "--report", "a"], 2, "--report", "is the file of --write"),
        (["--emit", "theirs", "--overwrite"], 2, "--emit", "theirs/plan.json exists and was not written by"),
        (["--emit", "prices.yaml"], 3, "--emit", "prices.yaml cannot be written"),
        (["--write", "prices.yaml/a.yaml"], 3, "--write", "prices.yaml is not a folder"),
        (["--report", "theirs"], 3, "--report", "cannot be written: it is a folder"),
        (["--write", "a" * 250], 3, "--write", "cannot be written: File name too long"),
    ],
)
def test_files_that_cannot_be_written_are_told_before_the_search(
    capsys, folder, monkeypatch, options, code, key, words
):
    (folder / "theirs").mkdir()
    (folder / "theirs" / "plan.json").write_text("{}")
    monkeypatch.setattr("toolkit.planner.make.ask", never)
    before = sorted(folder.rglob("*"))
    assert main([*ASKED, *options, "--json"]) == code
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert problem["key"] == key
    assert words in problem["message"]
    assert key in problem["fix"]
    assert sorted(folder.rglob("*")) == before


def test_every_file_that_cannot_be_written_is_told_at_once(capsys, monkeypatch):
    monkeypatch.setattr("toolkit.planner.make.ask", never)
    assert main([*ASKED, "--write", "prices.yaml", "--emit", "prices.yaml", "--report", "prices.yaml/b"]) == 2
    assert "3 problems" in capsys.readouterr().err


def test_a_file_is_replaced_where_the_user_says_so(folder):
    (folder / "planned.yaml").write_text("mine")
    assert main([*ASKED, "--write", "planned.yaml"]) == 2
    assert (folder / "planned.yaml").read_text() == "mine"
    assert main([*ASKED, "--write", "planned.yaml", "--overwrite", "--no-compiled"]) == 0
    assert resolve(folder / "planned.yaml").job.train.max_steps == 1000


@pytest.mark.parametrize(
    ("options", "length"),
    [
        ((), (1000, None)),
        (("--tokens", "1M"), (489, None)),
        (
            ("--set", "train.max_steps=null", "--set", "data.train=x.jsonl", "--epochs", "3", "--tokens", "1M"),
            (None, 3),
        ),
        (("--set", "train.max_steps=null", "--epochs", "2", "--tokens", "1M"), (977, None)),
        (("--set", "train.max_steps=null", "--epochs", "2"), (None, 2)),
    ],
)
def test_the_length_of_the_run_is_part_of_the_job(options, length):
    from toolkit.planner.make import ask

    sets = [options[at + 1] for at, each in enumerate(options) if each == "--set"]
    given = {name: options[options.index(f"--{name}") + 1] for name in ("tokens", "epochs") if f"--{name}" in options}
    epochs = float(given["epochs"]) if "epochs" in given else None
    train = ask("job.yaml", overrides=sets, tokens=given.get("tokens"), epochs=epochs, prices="prices.yaml").job.train
    assert (train.max_steps, train.num_train_epochs) == length


def test_intervals_by_the_epoch_are_shares_of_the_tokens_steps():
    from toolkit.planner.make import ask

    sets = ["train.max_steps=null", "train.saves_per_epoch=2"]
    train = ask("job.yaml", overrides=sets, tokens="1M", epochs=2.0, prices="prices.yaml").job.train
    assert (train.max_steps, train.saves_per_epoch, train.save_steps) == (977, None, 0.25)


@pytest.mark.parametrize(
    ("options", "compiled"),
    [
        ((), None),
        (("--compiled",), True),
        (("--no-compiled", "--write", "a.yaml"), False),
        (("--write", "a.yaml"), True),
        (("--emit", "files"), True),
        (("--report", "a.html"), True),
        (("--write", "a.yaml", "--row", "1"), None),
    ],
)
def test_compiled_layers_are_tried_where_a_plan_is_written(monkeypatch, options, compiled):
    asked = []

    def refuse(job, **values):
        asked.append(values["compiled"])
        raise SpecError.of(code="PLAN_TOKENS", message="no", fix="none")

    monkeypatch.setattr("toolkit.planner.make.ask", refuse)
    assert main([*ASKED, *options]) == 2
    assert asked == [compiled]


def test_json(capsys):
    assert main([*ASKED, "--json", "--epochs", "2", "--tokens", "1M"]) == 0
    found = json.loads(capsys.readouterr().out)
    (row,) = found["rows"]
    assert found["recommended"] == row["row"] == 1
    assert found["question"]["tokens"] * found["question"]["epochs"] == 2e6
    assert row["usd"] == pytest.approx(row["hours"] * 0.8)
    assert row["hours_low"] < row["hours"] < row["hours_high"]
    assert row["required_bytes"] <= row["gpu_capacity_bytes"]
    assert row["settings"]["train.gradient_checkpointing"] == 1.0
    assert found["written"] == []
    page = (Path(__file__).parents[2] / "docs" / "json.md").read_text(encoding="utf-8")
    section = page.split("## toolkit plan\n")[1].split("\n## ")[0]
    heads = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    documented = {
        re.split(r"[.\[]", key.removeprefix("rows[]."))[0] for head in heads for key in re.findall(r"`([^`]+)`", head)
    }
    assert documented == {*found, *row} - {"rows"}


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("--tokens", "0"), "PLAN_TOKENS", "tokens=0"),
        (("--gpus", "h900"), "GPU_UNKNOWN", "gpu=h900"),
        (("--budget-usd", "-1"), "PLAN_LIMIT", "budget-usd=-1"),
        (("--budget-usd", "1e-9"), "PLAN_BUDGET", "the cheapest plan is 1 × l4-24gb"),
        (("--deadline-hours", "1e-9"), "PLAN_DEADLINE", "the fastest 1 × l4-24gb"),
        (("--row", "9"), "PLAN_ROW", "row=9"),
        (("--set", "train.sequence_lengh=3"), "KEY_UNKNOWN", "sequence_lengh"),
    ],
)
def test_what_is_refused(capsys, arguments, code, words):
    assert main([*ASKED, *arguments, "--json"]) == 2
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert problem["code"] == code
    assert words in problem["message"]


@pytest.mark.parametrize(("name", "code"), [("./bad", "MODEL_CLASS"), ("./absent", "MODEL_NOT_FOUND")])
def test_a_model_of_the_command_line_is_named_with_its_option(capsys, folder, name, code):
    (folder / "bad").mkdir()
    sizes = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 100,
        "intermediate_size": 128,
    }
    (folder / "bad" / "config.json").write_text(json.dumps({"model_type": "foo"} | sizes))
    assert main(["plan", "--model", name, "--tokens", "1M", "--prices", "prices.yaml", "--json"]) == 2
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert (problem["code"], problem["key"]) == (code, "--model")
    assert f"model={name}" in problem["message"]


def test_unknown_cards_are_those_of_the_option(capsys, folder):
    (folder / "job.yaml").write_text(JOB + "cluster: {gpu: l4-24gb}\n")
    assert main([*ASKED[:-3], "--gpus", "foo,h100-sxn"]) == 2
    first, second, _ = capsys.readouterr().err.splitlines()
    assert first.startswith("error: --gpus: gpu=foo is not in the GPU catalogue. Name one of a10-24gb, ")
    assert (
        second
        == "error: --gpus: gpu=h100-sxn is not in the GPU catalogue. Did you mean h100-sxm-80gb? `toolkit gpus` lists all. [GPU_UNKNOWN]"
    )


def test_prices_in_another_currency(capsys, folder):
    (folder / "prices.yaml").write_text(PRICES.replace("USD", "EUR"))
    assert main([*ASKED]) == 2
    assert "currency=EUR" in capsys.readouterr().err


def test_without_job_and_model(capsys):
    assert main(["plan", "--tokens", "1M"]) == 2
    assert "PLAN_NO_MODEL" in capsys.readouterr().err
