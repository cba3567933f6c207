"""Images that messages name and no file has, found before a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from toolkit.config.job import Data
from toolkit.dataset_inspection.inspect import peek
from toolkit.errors import Problem


def record(*content: dict[str, Any], **columns: Any) -> dict[str, Any]:
    asked = [*content, {"type": "text", "text": "What is it?"}]
    return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": "A cat."}], **columns}


def found(folder: Path, *records: dict[str, Any], name: str = "a.jsonl") -> tuple[Problem, ...]:
    (folder / "sub").mkdir(exist_ok=True)
    (folder / "sub" / "here.png").write_bytes(b"not opened")
    (folder / "sub" / name).write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    return peek(Data(train=f"sub/{name}", packing="none"), base=folder, images=True)[1]


def test_files_beside_the_data_and_bytes_are_found(tmp_path):
    url = {"url": (tmp_path / "sub" / "here.png").as_uri()}
    assert not found(
        tmp_path,
        record({"type": "image", "path": "here.png"}),
        record({"type": "image", "path": str(tmp_path / "sub" / "here.png")}),
        record({"type": "image_url", "image_url": url}),
        record({"type": "image", "base64": "aGVyZQ=="}),
        record({"type": "image"}, images=["here.png"]),
        record(image="here.png"),
        record(),
    )


@pytest.mark.parametrize(
    ("content", "columns", "said"),
    [
        ({"type": "image", "path": "gone.png"}, {}, "messages[0].content[0]: image {sub}/gone.png does not exist"),
        ({"type": "image"}, {"images": ["gone.png"]}, "images[0]: image {sub}/gone.png does not exist"),
        ({"type": "image"}, {"image": "here.png/gone"}, "image: image {sub}/here.png/gone does not exist"),
        ({"type": "image", "path": "."}, {}, "messages[0].content[0]: image {sub} is a folder"),
        ({"type": "image", "path": "empty.png"}, {}, "image {sub}/empty.png is empty (0 bytes)"),
        ({"type": "image", "path": "n" * 300}, {}, "cannot be read: File name too long"),
        ({"type": "image", "url": "https://host/cat.png"}, {}, "image https://host/cat.png is on the network"),
        ({"type": "image", "base64": "a"}, {}, "whose base64 is damaged"),
    ],
)
def test_an_image_that_no_file_has_is_told_with_its_record_and_key(tmp_path, content, columns, said):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "empty.png").touch()
    (problem,) = found(tmp_path, record({"type": "image", "path": "here.png"}), record(content, **columns))
    assert (problem.code, problem.key) == ("DATA_IMAGE", "data.train")
    assert problem.message.startswith("sub/a.jsonl, record at line 2, ")
    assert said.format(sub=tmp_path / "sub") in problem.message


def test_the_first_is_told_with_the_number_of_the_others(tmp_path):
    gone = [record({"type": "image", "path": f"{number}.png"}) for number in range(3)]
    (problem,) = found(tmp_path, record(), *gone)
    assert "line 2, messages[0].content[0]: " in problem.message
    assert problem.message.endswith("0.png does not exist (and 2 more images of the first 4 records)")


def test_images_of_conversations_of_other_tools_are_looked_for(tmp_path):
    said = [{"from": "human", "value": "<image> What is it?"}, {"from": "gpt", "value": "A cat."}]
    (problem,) = found(tmp_path, {"conversations": said, "image": "gone.png"})
    assert "line 1, image: image " in problem.message
