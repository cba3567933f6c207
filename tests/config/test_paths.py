"""Paths of a job that the system refuses to look at."""

from __future__ import annotations

from pathlib import Path

import pytest

from toolkit.cli.job_checks import check
from toolkit.config.job import Cluster, Data, Job, Model, Train
from toolkit.config.paths import num_bytes, path_kind
from toolkit.errors import SpecError


def loop(folder: Path) -> Path:
    (folder / "loop").symlink_to("loop")
    return folder / "loop"


# Each name is short enough for a file system; the whole is not.
TOO_LONG = "/".join(["a"] * 2040)


def test_kinds(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("12345")
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "nowhere").symlink_to("absent")
    found = {
        name: path_kind(tmp_path / name, key="x") for name in ("", "file", "link", "nowhere", "absent", "file/below")
    }
    assert found == {
        "": "folder", "file": "file", "link": "file", "nowhere": "absent", "absent": "absent", "file/below": "absent",
    }  # fmt: skip
    assert path_kind(Path("/dev/null"), key="x") == "other"
    assert num_bytes(tmp_path, key="x") == 10  # the link is read as well
    assert num_bytes(tmp_path / "file", key="x") == 5


def test_what_the_system_refuses_is_one_error(tmp_path: Path) -> None:
    for path, says in (
        (loop(tmp_path), "symbolic links"),
        (tmp_path / "loop" / "below", "symbolic links"),
        (tmp_path / TOO_LONG / "b" / TOO_LONG, "too long"),
        (tmp_path / ("a" * 300), "too long"),
        (tmp_path / "a\0b", "null"),
    ):
        with pytest.raises(SpecError) as caught:
            path_kind(path, key="data.train")
        (problem,) = caught.value.problems
        assert (problem.code, problem.key) == ("PATH_UNREADABLE", "data.train")
        assert says in problem.message
        assert len(problem.message) < 300


def test_a_folder_that_this_user_may_not_enter_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, **options: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "stat", refuse)  # root, as whom tests may run, may enter all
    with pytest.raises(SpecError, match=r"Permission denied.*Make it readable for this user") as caught:
        path_kind(tmp_path, key="model.name")
    assert caught.value.codes == ("PATH_UNREADABLE",)


@pytest.mark.parametrize("bad", ["loop", "below a file"])
def test_every_path_of_a_job_is_named_at_once(tmp_path: Path, bad: str) -> None:
    path = str(loop(tmp_path) if bad == "loop" else tmp_path / "loop" / "below")
    if bad != "loop":
        (tmp_path / "loop").write_text("a file")
    job = Job(
        model=Model(name=path, tokenizer=path),
        cluster=Cluster(gpu="cpu"),
        train=Train(output_dir=Path(path)),
        data=Data(train=path, eval=path, chat_template=path),
    )
    found = {problem.key: problem.code for problem in check(job).problems}
    keys = ("model.name", "model.tokenizer", "train.output_dir", "data.train", "data.eval", "data.chat_template")
    if bad == "loop":
        assert found == dict.fromkeys(keys, "PATH_UNREADABLE")
    else:
        assert found == {
            "model.name": "MODEL_NOT_FOUND", "model.tokenizer": "TOKENIZER_NOT_FOUND", "train.output_dir": "OUTPUT_PATH",
            "data.train": "DATA_NOT_FOUND", "data.eval": "DATA_NOT_FOUND", "data.chat_template": "DATA_CHAT_TEMPLATE_FILE",
        }  # fmt: skip
