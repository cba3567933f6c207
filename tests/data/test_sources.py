"""A set on disk is read whatever format it had; the revision of a hub data set: against a hub of two commits, and then without it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
from local_hub import LocalHub, served

from toolkit.config.job import Data
from toolkit.data.prepare import prepare
from toolkit.data.sources import load_documents
from toolkit.dataset_inspection.inspect import peek

OLD, NEW = "a" * 40, "b" * 40
NAMES = {"main": NEW, "v1": OLD, OLD: OLD, NEW: NEW}


class Hub(LocalHub):
    """Answers for org/set as huggingface.co does: one file, whose text names its commit."""

    def reply(self) -> tuple[int, dict[str, str], bytes]:
        words = self.path.partition("?")[0].split("/")
        commit = next((NAMES[word] for word in words if word in NAMES), NEW)
        file = json.dumps({"text": f"of {commit[0]}"}).encode()
        status, body, error = 200, b"", ""
        if "revision" in words and words[-1] not in NAMES:
            status, error = 404, "RevisionNotFound"
        elif "tree" in words:
            body = json.dumps([{"type": "file", "path": "train.jsonl", "size": len(file), "oid": "0" * 40}]).encode()
        elif words[1:4] == ["api", "datasets", "org"]:
            body = json.dumps({"id": "org/set", "sha": commit, "siblings": [{"rfilename": "train.jsonl"}]}).encode()
        elif words[-1] == "train.jsonl":
            body = file
        else:
            status, error = 404, "EntryNotFound"
        return status, {"X-Error-Code": error, "ETag": f'"{commit}"', "X-Repo-Commit": commit}, body


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with served(Hub) as address:
        yield address


# In a process of its own: huggingface_hub reads its environment on import.
ASK = """
import json, os, sys
from pathlib import Path
from toolkit.data.sources import load_documents, load_source
from toolkit.errors import ToolkitError
from toolkit.dataset_inspection.inspect import check_data
from toolkit.config.job import Data
from toolkit.data.sources import load_documents

found = []
for revision in json.loads(sys.argv[1]):
    data = Data(train="org/set", revision=revision)
    try:
        train = load_documents(data, check_data(data), seed=0, cache_dir=Path(sys.argv[2])).train.documents
        found.append(train["text"][:])
        if "HF_ENDPOINT" in os.environ:  # a stream is of the hub itself
            [(key, source)] = data.sources_of("train")
            facts = check_data(data).train[0]
            stream = load_source(facts, source, key=key, cache_dir=Path(sys.argv[2]), streaming=True)
            assert [record["text"] for record in stream] == found[-1]
    except ToolkitError as error:
        found.append([*error.codes, str(error)])
print(json.dumps(found))
"""


def ask(home: Path, *revisions: str | None, **environment: str) -> list[list[str]]:
    """What each revision loads, or the code and text of its error."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    kept |= {"HF_HOME": str(home), "OMP_NUM_THREADS": "1", **environment}
    command = [sys.executable, "-W", "ignore", "-c", ASK, json.dumps(revisions), str(home / "cache")]
    done = subprocess.run(command, env=kept, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    answer: list[list[str]] = json.loads(done.stdout.splitlines()[-1])
    return answer


@pytest.mark.full
def test_the_revision_is_what_is_read_with_the_hub_and_without(tmp_path: Path, endpoint: str) -> None:
    newest, tag, commit, absent = ask(tmp_path, None, "v1", OLD, "absent", HF_ENDPOINT=endpoint)
    assert (newest, tag, commit) == (["of b"], ["of a"], ["of a"])
    assert absent[0] == "DATA_REVISION"
    assert "org/set has no revision absent" in absent[1]
    # datasets itself would take what was cached last, the old commit, for each of these.
    newest, commit, other, tag = ask(tmp_path, None, OLD, NEW, "v1", HF_HUB_OFFLINE="1")
    assert (newest, commit) == (["of a"], ["of a"])
    assert other[0] == "DATA_REVISION"
    assert f"revision={NEW} is unreachable, and the cache has {OLD}" in other[1]
    assert tag[0] == "DATA_HUB", "what commit a tag stands for only the hub knows"


def test_a_revision_of_local_files_or_of_two_repositories(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')

    def codes(**data: Any) -> list[tuple[str, str]]:
        return [(problem.code, problem.key) for problem in peek(Data(revision="v1", **data), base=tmp_path)[1]]

    refused = [("DATA_REVISION", "data.revision")]
    assert codes(train="a.jsonl") == refused
    assert codes(train="org/set", eval="a.jsonl") == refused
    assert codes(train=["org/set", "org/other"]) == refused
    assert codes(train="org/set") == codes(train="org/set", eval="org/set") == []


@pytest.mark.parametrize("format_", [{"columns": []}, {"type": "numpy"}])
def test_the_format_that_a_set_was_saved_with_hides_nothing(tmp_path: Path, format_: dict[str, Any]) -> None:
    said = [{"messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]}]
    datasets.Dataset.from_list(said).with_format(**format_).save_to_disk(tmp_path / "saved")
    data = Data(train=str(tmp_path / "saved"))
    facts, problems = peek(data)
    assert not problems
    loaded = load_documents(data, facts, seed=0, cache_dir=tmp_path / "cache", template=None)
    assert loaded.train.documents[:] == {"messages": [said[0]["messages"]]}


@pytest.fixture
def several(tmp_path: Path, write: Any) -> list[dict[str, Any]]:
    """Texts, pairs under other names, and messages."""
    write([{"body": f"text {number}", "text": "not this"} for number in range(6)], "texts.jsonl")
    write([{"question": f"ask {number}", "answer": f" say {number}"} for number in range(4)], "pairs.jsonl")
    said = [[{"role": "user", "content": f"hi {n}"}, {"role": "assistant", "content": f"yo {n}"}] for n in range(3)]
    write([{"messages": messages} for messages in said], "chats.jsonl")
    return [
        {"path": "texts.jsonl", "columns": {"text": "body"}, "weight": 0.5, "max_rows": 4},
        {"path": "pairs.jsonl", "columns": {"prompt": "question", "completion": "answer"}, "loss_on": "completion"},
        {"path": "chats.jsonl", "weight": 2.0, "loss_on": "assistant"},
    ]


def test_sources_of_other_formats_weights_and_columns_make_one_epoch(
    tmp_path: Path, tokenizer: Any, several: list[dict[str, Any]]
) -> None:
    def prepared(seed: int = 0, **options: Any) -> Any:
        data = Data(sources=several, chat_template="chatml", packing="none", **options)
        return prepare(
            data, tokenizer=tokenizer, sequence_length=64, seed=seed, cache_dir=tmp_path / "c", base=tmp_path
        )

    def texts(dataset: Any) -> list[tuple[str, str]]:
        rows = [dataset[index] for index in range(len(dataset))]
        return [
            (tokenizer.decode(row["input_ids"]), tokenizer.decode(row["labels"][row["labels"] >= 0])) for row in rows
        ]

    found = prepared()
    assert found.format == "mixed"
    assert [(share.records, share.documents) for share in found.sources] == [(4, 2), (4, 4), (3, 6)]
    rows = texts(found.train)
    assert len(rows) == 12
    assert len(set(rows[:2])) == 2
    assert {text for text, _ in rows[:2]} < {f"text {number}<eos>" for number in range(4)}
    assert rows[2:6] == [(f"ask {number} say {number}<eos>", f" say {number}<eos>") for number in range(4)]
    assert rows[6:9] == rows[9:]
    assert rows[6][1] == "yo 0<|im_end|><eos>"
    assert texts(prepared().train) == rows
    assert any(texts(prepared(seed=seed).train)[:2] != rows[:2] for seed in (1, 2, 3))

    held = prepared(validation_fraction=0.3)
    kept_out, trained = (set(texts(part)) for part in (held.eval, held.train))
    assert kept_out
    assert not kept_out & trained


def test_one_source_is_the_same_as_train(tmp_path: Path, tokenizer: Any, write: Any, texts: list[str]) -> None:
    write([{"text": text} for text in texts])
    options = {"tokenizer": tokenizer, "sequence_length": 64, "seed": 0, "cache_dir": tmp_path / "c", "base": tmp_path}
    one, other = (
        prepare(data, **options).train for data in (Data(train="train.jsonl"), Data(sources=[{"path": "train.jsonl"}]))
    )
    assert all((one[row]["input_ids"] == other[row]["input_ids"]).all() for row in range(len(one)))
    assert len(list((tmp_path / "c").glob("tokens-*"))) == 1, "the token files of the first are those of the second"


def test_mistakes_in_a_source_name_its_key(tmp_path: Path, several: list[dict[str, Any]]) -> None:
    def codes(source: dict[str, Any], **data: Any) -> list[tuple[str, str]]:
        found = peek(Data(sources=[{"path": "pairs.jsonl", **several[1]}, source], **data), base=tmp_path)[1]
        return [(problem.code, problem.key) for problem in found]

    assert codes(several[0]) == []
    assert codes({"path": "texts.jsonl", "columns": {"text": "bod"}}) == [("DATA_COLUMNS", "data.sources[1].columns")]
    twice = {"path": "texts.jsonl", "columns": {"text": "body", "prompt": "body"}}
    assert codes(twice) == [("DATA_COLUMNS", "data.sources[1].columns")]
    assert codes({**several[0], "format": "messages"}) == [("DATA_FORMAT", "data.sources[1].format")]
    assert codes({**several[0], "loss_on": "assistant"}) == [("DATA_LOSS_ON", "data.sources[1].loss_on")]
    assert codes({**several[0], "split": "test"}) == [("DATA_SPLIT", "data.sources[1].split")]
    assert codes({**several[0], "revision": "v1"}) == [("DATA_REVISION", "data.sources[1].revision")]
    assert codes(several[0], format="text") == [("DATA_SOURCES", "data.format")]
    assert codes(several[0], chat_template="chatml") == [("DATA_CHAT_TEMPLATE_UNUSED", "data.chat_template")]
