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
import json, sys
from pathlib import Path
from toolkit.data.sources import load_documents
from toolkit.errors import ToolkitError
from toolkit.dataset_inspection.inspect import check_data
from toolkit.config.job import Data
from toolkit.data.sources import load_documents

found = []
for revision in json.loads(sys.argv[1]):
    data = Data(train="org/set", revision=revision)
    try:
        train = load_documents(data, check_data(data), seed=0, cache_dir=Path(sys.argv[2])).train
        found.append(train["text"][:])
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
    assert loaded.train[:] == {"messages": [said[0]["messages"]]}
