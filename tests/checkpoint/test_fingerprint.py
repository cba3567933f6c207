"""Whether a job still reads what a checkpoint's run read: by content, wherever the files lie."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from toolkit.checkpoint.fingerprint import Source, identify, source_notes, source_problems
from toolkit.config.job import Job

_STORED = TypeAdapter(dict[str, tuple[Source, ...]])


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
    stored = _STORED.validate_json(_STORED.dump_json(recorded), strict=True)
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


def test_sources_are_known_by_the_content_of_their_files(files: Path) -> None:
    both = [{"path": str(files / name)} for name in ("a.jsonl", "b.jsonl")]
    then = _job(sources=both)
    recorded = identify(then)
    assert _problems(_job(sources=both), then, recorded) == []
    assert _problems(_job(sources=both[::-1]), then, recorded) == [("CHECKPOINT_DATA", "data.sources")]
    (files / "b.jsonl").write_text('{"text": "another"}')
    assert _problems(then, then, recorded) == [("CHECKPOINT_DATA", "data.sources")]


def test_a_function_is_known_by_the_text_of_its_module(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(files))
    (files / "my_function.py").write_text("def kept(record): return record")
    job = _job(train=str(files / "a.jsonl"), preprocess="my_function:kept")
    recorded = identify(job)
    assert _problems(job, job, recorded) == []
    (files / "my_function.py").write_text("def kept(record): return None")
    assert _problems(job, job, recorded) == [("CHECKPOINT_DATA", "data.preprocess")]


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
    assert recorded["data.train"] == (Source(name="org/absent-set"),)
    assert _problems(then, then, recorded) == []
    assert _problems(_job(train="org/other-set"), then, recorded) == [("CHECKPOINT_DATA", "data.train")]


@pytest.mark.parametrize("named", [True, False])
def test_a_tokenizer_that_changed_is_another(files: Path, named: bool) -> None:
    """Whether the job names it, or it lies in the model's folder."""
    folder = files / "tokenizer"
    job = _job(tokenizer=str(folder), train="org/set") if named else _in_folder(folder)
    recorded = identify(job)
    (folder / "model.safetensors").write_bytes(b"no part of a tokenizer")
    assert _problems(job, job, recorded) == []
    for name in ("tokenizer.json", "chat_template.jinja", "tiktoken.model", "additional_chat_templates/tool.jinja"):
        (folder / name).parent.mkdir(exist_ok=True)
        before = (folder / name).read_bytes() if (folder / name).exists() else None
        (folder / name).write_text("changed")
        (problem,) = source_problems(job, job, recorded, Path("checkpoint-4"))
        assert (problem.code, problem.key) == ("CHECKPOINT_DATA", "model.tokenizer")
        assert f"the tokenizer of {folder} has changed since checkpoint-4 was saved: {name}" in problem.message
        (folder / name).unlink() if before is None else (folder / name).write_bytes(before)
    assert _problems(job, job, recorded) == []
    moved = folder.rename(files / "moved")
    assert _problems(_in_folder(moved), job, recorded) == [], "wherever it lies, and whoever names it"


def _in_folder(folder: Path) -> Job:
    return Job.model_validate({"model": str(folder), "cluster": {"gpu": "cpu"}, "data": {"train": "org/set"}})


def test_a_tokenizer_of_the_hub_is_known_by_what_its_cache_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    job = Job.model_validate({"model": "org/model", "cluster": {"gpu": "cpu"}, "data": {"train": "org/set"}})
    nothing = identify(job)
    repository = tmp_path / "models--org--model"
    for commit, text in (("a" * 40, "{}"), ("b" * 40, '{"other": 1}')):
        (repository / "snapshots" / commit).mkdir(parents=True)
        (repository / "snapshots" / commit / "tokenizer.json").write_text(text)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    recorded = identify(job)
    assert [source.name for source in recorded["tokenizer"]] == ["tokenizer.json"]
    assert _problems(job, job, nothing) == _problems(job, job, recorded) == []
    (repository / "snapshots" / ("a" * 40) / "vocab.json").write_text("{}")
    assert _problems(job, job, recorded) == [], "the cache holds what was asked for so far"
    (repository / "refs" / "main").write_text("b" * 40)
    assert _problems(job, job, recorded) == [("CHECKPOINT_DATA", "model.tokenizer")]


def test_what_version_0_1_0_recorded(files: Path) -> None:
    """One digest of the files of a tokenizer that the job names; nothing of one in the model's folder."""
    job = _job(tokenizer=str(files / "tokenizer"), train="org/set")
    digest = hashlib.sha256(hashlib.sha256(b"{}").digest()).hexdigest()
    recorded = {
        "data.train": (Source(name="org/set"),),
        "model.tokenizer": (Source(name="t", num_bytes=2, modified_ns=1, sha256=digest),),
    }
    assert _problems(job, job, recorded) == []
    assert source_notes(recorded) == ()
    (files / "tokenizer" / "tokenizer.json").write_text("{} ")
    assert _problems(job, job, recorded) == [("CHECKPOINT_DATA", "model.tokenizer")]
    beside = _in_folder(files / "tokenizer")
    del recorded["model.tokenizer"]
    assert _problems(beside, beside, recorded) == []
    (note,) = source_notes(recorded)
    assert "does not record its tokenizer" in note
