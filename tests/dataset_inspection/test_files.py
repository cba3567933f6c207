"""Files of a data set, found by their patterns."""

from __future__ import annotations

from pathlib import Path

from toolkit.config.job import Data
from toolkit.dataset_inspection.files import first_bad_json_line
from toolkit.dataset_inspection.inspect import peek


def test_the_first_bad_line_is_found_beyond_the_head(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n' * 3000 + "oops\n")
    assert peek(Data(train="a.jsonl"), base=tmp_path)[1] == ()
    assert (first_bad_json_line(path) or "").startswith("line 3001 is not JSON")
