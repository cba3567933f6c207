"""Uploads to a hub on this machine: one commit with every file, or one error and a whole folder."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import huggingface_hub
import pytest
from local_hub import LocalHub, served

import toolkit as tk
from toolkit.checkpoint.state import State
from toolkit.errors import RunError
from toolkit.exporter.hub import _figures, push

WEIGHTS = bytes(range(256)) * 8


class Hub(LocalHub):
    """The part of the hub that `create_repo` and `upload_folder` call."""

    repos: ClassVar[dict[str, dict[str, Any]]] = {}
    objects: ClassVar[dict[str, bytes]] = {}
    fail: ClassVar[str] = ""

    def reply(self) -> tuple[int, dict[str, str], bytes]:
        return 404, {}, b"{}"

    def do_POST(self) -> None:  # noqa: N802 - the server's name
        body = self.rfile.read(int(self.headers["Content-Length"]))
        host = f"http://127.0.0.1:{self.server.server_port}"  # type: ignore[attr-defined]
        if self.headers["Authorization"] != "Bearer hf_writes":
            return self.send(403, {"error": "You do not have write access"})
        if self.path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization'] or 'me'}/{asked['name']}"
            if name in self.repos:
                return self.send(409, {"error": "exists", "url": f"{host}/{name}"})
            self.repos[name] = {"visibility": asked.get("visibility"), "files": {}}
            return self.send(200, {"url": f"{host}/{name}"})
        if self.path == "/api/validate-yaml":
            return self.send(200, {"errors": [], "warnings": []})
        if "/preupload/" in self.path:
            files = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                    "shouldIgnore": False,
                }
                for file in json.loads(body)["files"]
            ]
            return self.send(200, {"files": files})
        if self.path.endswith("/info/lfs/objects/batch"):
            objects = [
                {**each, "actions": {"upload": {"href": f"{host}/lfs/{each['oid']}"}}}
                for each in json.loads(body)["objects"]
            ]
            return self.send(200, {"transfer": "basic", "objects": objects})
        if "/commit/" in self.path:
            if self.fail == "commit":
                return self.send(500, {"error": "out of order"})
            repo = "/".join(self.path.split("/")[3:5])
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    self.repos[repo]["files"][value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    self.repos[repo]["files"][value["path"]] = self.objects[value["oid"]]
            return self.send(200, {"commitUrl": f"{host}/{repo}/commit/1", "commitOid": "1" * 40, "success": True})
        return self.send(404, {"error": self.path})

    def do_PUT(self) -> None:  # noqa: N802 - the server's name
        if self.fail == "network":
            self.rfile.read(10)
            self.connection.close()
            return
        self.objects[self.path.rpartition("/")[2]] = self.rfile.read(int(self.headers["Content-Length"]))
        self.send(200, {})

    def send(self, status: int, value: dict[str, Any]) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(content)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    monkeypatch.setenv("HF_TOKEN", "hf_writes")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    sleepless = SimpleNamespace(**{**vars(__import__("time")), "sleep": lambda seconds: None})
    monkeypatch.setattr(huggingface_hub.utils._http, "time", sleepless)
    Hub.repos, Hub.objects, Hub.fail = {}, {}, ""
    with served(Hub) as address:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)
        yield Hub


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.safetensors").write_bytes(WEIGHTS)
    (tmp_path / "README.md").write_text("---\ntags: [a]\n---\n# card\n")
    return tmp_path


def test_every_file_is_in_one_commit_of_a_private_repository(hub, folder):
    address = push(folder, "me/mine")
    assert address.endswith("/me/mine")
    assert hub.repos["me/mine"]["visibility"] == "private"
    assert hub.repos["me/mine"]["files"] == {path.name: path.read_bytes() for path in folder.iterdir()}
    push(folder, "me/mine")  # one that exists
    push(folder, "shown", public=True)
    assert hub.repos["me/shown"]["visibility"] == "public"


@pytest.mark.parametrize(
    ("code", "repo", "token", "fail", "said"),
    [
        ("HUB_RIGHTS", "me/mine", "hf_reads", "", "403"),
        ("HUB_REPO", "me/mine/deep", "hf_writes", "", "me/mine/deep"),
        ("HUB_FAILED", "me/mine", "hf_writes", "commit", "500"),
        ("HUB_FAILED", "me/mine", "hf_writes", "network", "did not finish"),
    ],
)
def test_a_push_that_fails_is_one_error_with_the_way_on(hub, folder, monkeypatch, code, repo, token, fail, said):
    monkeypatch.setenv("HF_TOKEN", token)
    hub.fail = fail
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(RunError) as caught:
        push(folder, repo)
    assert caught.value.codes == (code,)
    assert said in str(caught.value)
    assert f"hf upload {repo} {folder}" in str(caught.value)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert not any(each["files"] for each in hub.repos.values())


def test_no_token_and_no_network(hub, folder, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(RunError, match="HUB_FAILED"):
        push(folder, "me/mine")
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(folder / "none"))
    with pytest.raises(RunError, match="HUB_TOKEN"):
        push(folder, "me/mine")


def test_a_card_has_the_losses_of_named_validation_sets(tmp_path):
    data = {"train": "train.jsonl", "eval": {"code": "code.jsonl", "text": "text.jsonl"}}
    job = {"model": "llama-3.2-1b", "cluster": {"gpu": "cpu"}, "train": {"max_steps": 9, "eval_steps": 2}, "data": data}
    lines = [
        {"step": 2, "eval_code_loss": 2.0, "eval_text_loss": 3.0},
        {"step": 4, "eval_code_loss": 1.5, "eval_text_loss": 2.5},
        {"step": 6, "eval_code_loss": 1.0, "eval_text_loss": 2.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    state = State(step=4, num_steps=9, saved_at=1.0, zero_stage=2, world_size=1, train_batch_size=8, versions={})
    figures = dict(_figures(tk.resolve(tk.Job.model_validate(job)), state, tmp_path / "metrics.jsonl"))
    assert figures["last validation loss of code"] == "1.5000", "up to the checkpoint"
    assert figures["last validation loss of text"] == "2.5000"
    assert "last validation loss" not in figures
