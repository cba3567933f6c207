"""Records are named by the line that an editor shows, for every kind of file that has lines."""

from __future__ import annotations

import json
from pathlib import Path

import datasets
import numpy as np
import pytest

from toolkit.config.job import Data
from toolkit.data.origins import Origins
from toolkit.dataset_inspection.inspect import check_data


@pytest.mark.parametrize(
    ("name", "content", "place"),
    [
        ("a.jsonl", '\ufeff{"text": "x"}\n\n \n{"text": "y"}\n', "a.jsonl, record at line 4"),
        ("a.json", '{"text": "x"}\n{"text": "y"}\n', "a.json, record at line 2"),
        ("a.json", json.dumps([{"text": "x"}, {"text": "y"}], indent=1), "a.json, record 2"),
        ("a.txt", "x\ny\n", "a.txt, record at line 2"),
        ("a.csv", 'text\n"x,\nx"\n\ny\n', "a.csv, record at line 5"),
    ],
)
def test_the_place_of_the_second_record(tmp_path: Path, name: str, content: str, place: str) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8")
    sources = check_data(Data(train=name), base=tmp_path).train
    assert Origins(sources=sources, keys=("data.train",), counts=(2,)).of(1) == ("data.train", place)


def test_documents_that_were_selected_of_several_sources(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x\ny\n")
    datasets.Dataset.from_dict({"text": ["z"] * 3}).to_parquet(tmp_path / "b.parquet")
    sources = check_data(Data(train=("a.txt", "b.parquet")), base=tmp_path).train
    keys = ("data.train[0]", "data.train[1]")
    origins = Origins(sources=sources, keys=keys, counts=(2, 3), rows=np.array([1, 2, 4]))
    assert origins.of(0) == ("data.train[0]", "a.txt, record at line 2")
    assert origins.of(1) == ("data.train[1]", "b.parquet, record 1")
    assert origins.of(2) == ("data.train[1]", "b.parquet, record 3")
