"""Whether a job still reads what a checkpoint's run read: by content, wherever the files lie."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from toolkit.checkpoint.sources import identify, source_problems
from toolkit.spec.job import Job


def _job(*, tokenizer: str | None = None, **data: Any) -> Job:
    values = {"model": {"name": "m", "tokenizer": tokenizer}, "cluster": {"gpu": "cpu"}, "data": data}
    return Job.model_validate(values)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text(f'{{"text": "{name}"}}\n')
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{}")
    return tmp_path


def _problems(now: Job, then: Job, recorded: Any) -> list[tuple[str, str]]:
    stored = json.loads(json.dumps(recorded))
    return [(problem.code, problem.key) for problem in source_problems(now, then, stored, Path("checkpoint-4"))]


def test_files_that_moved_are_the_same(files: Path) -> None:
    both = [str(files / name) for name in ("a.jsonl", "b.jsonl")]
    then = _job(train=both, eval=str(files / "a.jsonl"), tokenizer=str(files / "tokenizer"))
    recorded = identify(then)
    moved = files / "elsewhere"
    moved.mkdir()
    for name in ("a.jsonl", "b.jsonl", "tokenizer"):
        (files / name).rename(moved / name)
    (moved / "tokenizer" / "model.safetensors").write_bytes(b"no part of a tokenizer")
    both = [str(moved / name) for name in ("a.jsonl", "b.jsonl")]
    now = _job(train=both, eval=str(moved / "a.jsonl"), tokenizer=str(moved / "tokenizer"))
    assert _problems(now, then, recorded) == []
    turned = _job(train=both[::-1], eval=str(moved / "a.jsonl"), tokenizer=str(moved / "tokenizer"))
    assert _problems(turned, then, recorded) == [("CHECKPOINT_DATA", "data.train")]
    assert _problems(now, then, {}) == [
        ("CHECKPOINT_DATA", key) for key in ("data.eval", "data.train", "model.tokenizer")
    ], "earlier versions recorded no content"


def test_a_chat_template_is_known_by_content_or_by_its_name(files: Path) -> None:
    path = files / "chat.jinja"
    path.write_text("{{ messages }}")
    then = _job(train="org/set", chat_template=str(path))
    recorded = identify(then)
    path.write_text("{{ messages }}!")
    assert _problems(then, then, recorded) == [("CHECKPOINT_DATA", "data.chat_template")]
    named = _job(train="org/set", chat_template="chatml")
    assert _problems(named, named, identify(named)) == []
    assert _problems(_job(train="org/set"), named, identify(named)) == [("CHECKPOINT_DATA", "data.chat_template")]


def test_a_file_that_changed_under_its_name_is_another(files: Path) -> None:
    job = _job(train=str(files / "a.jsonl"))
    recorded = identify(job)
    (files / "a.jsonl").write_text('{"text": "b"}\n')
    (problem,) = source_problems(job, job, recorded, Path("checkpoint-4"))
    assert problem.code == "CHECKPOINT_DATA"
    assert "its content has changed since checkpoint-4 was saved" in problem.message


def test_a_file_is_read_again_only_when_it_may_have_changed(files: Path) -> None:
    path = files / "a.jsonl"
    job = _job(train=str(path))
    recorded = identify(job)
    stat = path.stat()
    path.write_text('{"text": "b"}\n')
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert identify(job, known=recorded) == recorded, "taken by size and time"
    path.write_text('{"text": "a"}\n')
    os.utime(path, ns=(1, 1))
    assert _problems(job, job, recorded) == [], "touched, and the same"


def test_the_hub_goes_by_name() -> None:
    then = _job(train="org/absent-set")
    recorded = identify(then)
    assert recorded["data.train"] == [
        {"name": "org/absent-set", "num_bytes": None, "modified_ns": None, "sha256": None}
    ]
    assert _problems(then, then, recorded) == []
    assert _problems(_job(train="org/other-set"), then, recorded) == [("CHECKPOINT_DATA", "data.train")]
