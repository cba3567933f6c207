"""A function of the user's: what it returns is read, its faults name the record, and another text of it is another result."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from toolkit.config.job import Data
from toolkit.config.user_code import code_files
from toolkit.data.prepare import prepare
from toolkit.data.preview import preview
from toolkit.dataset_inspection.inspect import peek
from toolkit.errors import DataError, ToolkitError

CODE = """
def kept(record):
    if record["score"] < 2:
        return None
    return {"prompt": record["q"], "completion": " " + record["a"], "score": record["score"]}

def faulty(record):
    return {"prompt": record["q"], "completion": 1 / (record["score"] - 3)}

def text(record):
    return record["q"]

def nothing(record):
    return None

def quits(record):
    raise SystemExit(3)

def numbered(record):
    print("noise")
    return {1: record["q"], "text": record["q"]}
"""


@pytest.fixture
def look(tmp_path: Path, tokenizer: Any, write: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    write([{"q": f"ask {number}", "a": f"say {number}", "score": number} for number in range(4)])
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "my_records.py").write_text(CODE)
    monkeypatch.delitem(sys.modules, "my_records", raising=False)
    importlib.invalidate_caches()

    def texts(name: str, **options: Any) -> list[str]:
        data = Data(train="train.jsonl", preprocess=f"my_records:{name}", packing="none", **options)
        made = prepare(data, tokenizer=tokenizer, sequence_length=64, seed=0, cache_dir=tmp_path / "c", base=tmp_path)
        return ["".join(text for text, _ in row["text"]) for row in preview(made, tokenizer, rows=9)["rows"]]

    return texts


def test_what_it_returns_is_read_and_kept(look: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert look("kept") == ["ask 2 say 2<eos>", "ask 3 say 3<eos>"]
    monkeypatch.setattr(sys.modules["my_records"], "kept", lambda record: 1 / 0)  # its file is the same
    assert look("kept", loss_on="completion") == ["ask 2 say 2<eos>", "ask 3 say 3<eos>"]
    (tmp_path / "my_records.py").write_text(CODE.replace("< 2", "< 3.0"))
    sys.modules.pop("my_records")
    importlib.invalidate_caches()
    assert look("kept") == ["ask 3 say 3<eos>"]


@pytest.mark.parametrize(
    ("name", "code", "says"),
    [
        ("faulty", "DATA_PREPROCESS", "train.jsonl, record at line 4: ZeroDivisionError"),
        ("text", "DATA_PREPROCESS", "record at line 1 cannot be read: str is neither a dict nor None"),
        ("quits", "DATA_PREPROCESS", "record at line 1: SystemExit: 3"),
        ("nothing", "DATA_TOO_SMALL", "leaves none of the records"),
        ("absent", "USER_CODE", "absent"),
    ],
)
def test_its_faults_are_told(look: Any, name: str, code: str, says: str) -> None:
    with pytest.raises(ToolkitError, match=says) as error:
        look(name)
    assert error.value.codes == (code,)


def test_errors_name_the_record_that_a_result_was_made_of(look: Any, write: Any) -> None:
    write([{"q": "x" * 90, "a": "y", "score": score} for score in (0, 1, 2)])
    with pytest.raises(DataError, match="record at line 3 has"):
        look("kept", long_rows="refuse")


def test_a_check_runs_it_on_one_record_for_the_columns(
    look: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def checked(name: str, **options: Any) -> tuple[Any, list[str]]:
        data = Data(train="train.jsonl", preprocess=f"my_records:{name}", **options)
        facts, problems = peek(data, base=tmp_path, runs_code=True)
        return facts.format, [problem.code for problem in problems]

    assert checked("kept") == ("prompt_completion", [])
    assert checked("kept", loss_on="assistant") == ("prompt_completion", ["DATA_LOSS_ON"])
    assert checked("kept", format="messages")[1] == ["DATA_FORMAT"]
    assert checked("text")[1] == ["DATA_PREPROCESS"]
    assert checked("nothing") == (None, [])
    assert checked("quits")[1] == ["DATA_PREPROCESS"]
    assert checked("numbered") == ("text", [])
    assert capsys.readouterr().out == "", "what it prints is not the command's answer"
    assert peek(Data(train="train.jsonl", preprocess="my_records:text"), base=tmp_path)[1] == ()


def test_modules_beside_it_that_it_imports_count_too(look: Any, tmp_path: Path) -> None:
    (tmp_path / "my_records.py").write_text(
        "from my_words import WORD\n" + CODE + "\ndef said(record): return {'text': WORD}\n"
    )
    (tmp_path / "my_words.py").write_text("import my_letters\nWORD = my_letters.A * 3\n")
    (tmp_path / "my_letters.py").write_text("A = 'a'\n")
    names = ("my_records", "my_words", "my_letters")
    assert [path.stem for path in code_files("my_records:said")] == list(names)
    assert look("said") == ["aaa<eos>"] * 4
    (tmp_path / "my_letters.py").write_text("A = 'bc'\n")
    for name in names:
        sys.modules.pop(name)
    importlib.invalidate_caches()
    assert look("said") == ["bcbcbc<eos>"] * 4
