"""Files that are whole or absent, and plain files inside one folder."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from toolkit.io import (
    json_text,
    made_folder,
    nearest_folder,
    open_plain,
    plain_file,
    read_plain,
    read_plain_object,
    read_text,
    write_json,
    write_text,
)


def test_a_file_is_replaced_whole_or_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"é": 1}, sync=True)
    with pytest.raises(TypeError):
        write_json(path, {"b": [2, object()]})
    with pytest.raises(UnicodeEncodeError):
        write_json(path, {"b": "\ud800"})
    assert json.loads(path.read_text(encoding="utf-8")) == {"é": 1}
    assert list(tmp_path.iterdir()) == [path], "nothing is left aside"


def test_no_file_takes_the_place_of_a_device_or_a_pipe(tmp_path: Path) -> None:
    master, terminal = os.openpty()
    try:
        write_text(Path(os.ttyname(terminal)), "whole\n")
        assert Path(os.ttyname(terminal)).is_char_device()
        assert os.read(master, 100).split() == [b"whole"]
    finally:
        os.close(master)
        os.close(terminal)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="is not a file"):
        write_text(tmp_path / "pipe", "x")
    assert (tmp_path / "pipe").is_fifo()


def test_only_plain_files_inside_the_folder_are_opened(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "file").write_text("12345")
    (tmp_path / "outside").write_text("{}")
    (folder / "inside").symlink_to(folder / "sub" / "file")
    (folder / "out").symlink_to(tmp_path / "outside")
    (folder / "zero").symlink_to("/dev/zero")
    os.mkfifo(folder / "pipe")
    (tmp_path / "link").symlink_to(folder)
    for root in (folder, tmp_path / "link"):
        for name in ("sub/file", "inside"):
            with open_plain(root, name) as file:
                assert file.read() == b"12345"
    refused = {
        "out": "points outside",
        "zero": "points outside",
        "../outside": "points outside",
        str(tmp_path / "outside"): "points outside",
        "pipe": "is a pipe",
        "sub": "is a folder",
    }
    for name, what in refused.items():
        with pytest.raises(OSError, match=what):
            plain_file(folder, name)
    with pytest.raises(FileNotFoundError):
        plain_file(folder, "absent")
    with pytest.raises(OSError, match="is a device"):
        plain_file(Path("/dev"), "zero")
    assert read_plain(folder, "sub/file", max_bytes=5) == b"12345"
    with pytest.raises(OSError, match="more than 4 bytes"):
        read_plain(folder, "sub/file", max_bytes=4)


@pytest.mark.parametrize("content", [b"[]", b"\xff", '{"a": 1}'.encode("utf-16"), b'{"a":' * 10_000, b"1" * 5000])
def test_what_is_no_object_is_a_value_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(ValueError):
        read_plain_object(tmp_path, "a.json")


def test_a_text_without_end_is_not_read_to_it(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("é".encode() * 4)
    assert read_text(tmp_path / "a.txt", max_bytes=8) == "éééé"
    with pytest.raises(ValueError, match="more than 7 bytes"):
        read_text(tmp_path / "a.txt", max_bytes=7)
    with pytest.raises(ValueError, match="more than 4096 bytes"):
        read_text(Path("/dev/zero"), max_bytes=4096)


def test_a_pipe_is_waited_for_only_where_somebody_writes_to_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert read_text(tmp_path / "pipe") == ""
    reader, writer = os.pipe()  # as a shell's <(…)
    late = threading.Timer(0.1, lambda: (os.write(writer, b"late"), os.close(writer)))
    late.start()
    assert read_text(Path(f"/dev/fd/{reader}")) == "late"
    os.close(reader)


def test_folders_that_were_made_for_nothing_go_again(tmp_path: Path, pythons_recursion_limit: None) -> None:
    assert nearest_folder(tmp_path / "a" / "b") == tmp_path
    with made_folder(tmp_path / "a" / "b"):
        assert nearest_folder(tmp_path / "a" / "b") == tmp_path / "a" / "b"
    assert not any(tmp_path.iterdir())
    with made_folder(tmp_path / "a" / "b"):
        (tmp_path / "a" / "file").touch()
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["file"]
    with pytest.raises(OSError), made_folder(tmp_path / "c" / ("x" * 300)):
        pass
    assert not (tmp_path / "c").exists()
    with pytest.raises(OSError, match="too many folders"), made_folder(tmp_path / ("c/" * 1500)):
        pass
    assert not (tmp_path / "c").exists()


def test_json_without_numbers_that_json_lacks() -> None:
    assert json_text({"é": [1]}) == '{\n  "é": [\n    1\n  ]\n}\n'
    with pytest.raises(ValueError, match="nan"):
        json_text({"a": float("nan")})
