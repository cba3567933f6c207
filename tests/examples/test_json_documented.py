"""docs/json.md has a row for every key that `--json` prints, and none for another."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from train_jobs import write_inputs, write_job

from toolkit.cli.app import main
from toolkit.cli.launching import outcome_as_dict
from toolkit.cli.train_report import _places
from toolkit.errors import Problem
from toolkit.launch.outcome import RunOutcome, WorkerFailure
from toolkit.planning.resolve import resolve

ROOT = Path(__file__).parents[2]
JOBS = ROOT / "configs" / "jobs"
SECTIONS = dict(
    part.partition("\n")[::2] for part in (ROOT / "docs" / "json.md").read_text(encoding="utf-8").split("\n## ")[1:]
)
PROBLEM = Problem(code="USAGE", message="a message", fix="A fix")


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def tables(section: str) -> list[set[str]]:
    """The keys in the first column of each table of a section."""
    found = re.findall(r"^\| key \|.*\n\|[-|]+\n((?:\|.*\n?)+)", SECTIONS[section], re.MULTILINE)
    return [
        {key for row in table.splitlines() for key in re.findall(r"`([^`]+)`", row.split("|")[1])} for table in found
    ]


def paths(value: Any, prefix: str = "") -> Iterator[str]:
    """Paths of the leaves, as the page writes them; lists of plain values and empty ones are leaves."""
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from paths(inner, f"{prefix}.{name}" if prefix else name)
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for inner in value:
            yield from paths(inner, f"{prefix}[]")
    else:
        yield prefix


def printed(capsys, *arguments: str) -> dict[str, Any]:
    main([*arguments, "--json"])
    return json.loads(capsys.readouterr().out)


def leaves(documented: set[str]) -> set[str]:
    """Those rows that are not sections of other rows."""
    return {key for key in documented if not any(other.startswith((f"{key}.", f"{key}[]")) for other in documented)}


def test_problems():
    assert set(paths({"problems": [PROBLEM.as_dict()]})) == tables("Problems")[0]


def test_validate(capsys):
    result, choices, keys = tables("toolkit validate")
    found = printed(capsys, "validate", str(JOBS / "llama-3.1-8b-full-pipeline2-tensor2-4xh100.yaml"), "--explain")
    seen = {re.sub(r"^(choices\[\]\.value).*", r"\1", path) for path in paths(found)}
    assert seen == leaves(result) | choices
    assert set(paths(printed(capsys, "validate", "--keys"))) == keys


def test_estimate(capsys):
    result, row, gpus = tables("toolkit estimate")
    job = str(JOBS / "qwen2.5-7b-zero2-offload-2xa100.yaml")
    found = printed(capsys, "estimate", job)
    named = {
        re.sub(
            r"(host_bytes_per_rank|phases|causes|step_time\.parts)\.[^.]+",
            r"\1.NAME",
            re.sub(r"(\.set)\..*", r"\1", path),
        )
        for path in paths(found)
    }
    assert named == leaves(result)
    swept = printed(capsys, "estimate", job, "--sweep", "train.per_device_train_batch_size=1")
    assert set(swept) == {"fits", "keys", "rows"}
    assert set(swept["rows"][0]) == row | {"values"}
    chosen = printed(capsys, "estimate", job, "--gpus", "h100-sxm-80gb")
    assert set(chosen) == {"fits", "gpus"}
    assert set(chosen["gpus"][0]) == row | gpus


def test_train(capsys, tmp_path):
    result, dry = tables("toolkit train")
    plan = resolve(JOBS / "quickstart.yaml")
    failure = WorkerFailure(rank=1, ended_by="SIGKILL", log_file=None, last_lines=(), error=None, problems=(PROBLEM,))
    outcome = RunOutcome(exit_code=3, interrupted=False, failure=failure)
    ended = outcome_as_dict(plan, outcome) | _places(None, None, command=None)
    assert {path.partition("[]")[0] for path in paths(ended)} == leaves(result)
    found = printed(capsys, "train", str(write_job(write_inputs(tmp_path), "run")), "--dry-run")
    assert set(found) == dry
