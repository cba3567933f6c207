"""peek: facts and every mistake of a job's data, without loading it."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from toolkit.config.job import Data
from toolkit.dataset_inspection.inspect import check_data, peek
from toolkit.errors import DataError, Problem

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]


def write_jsonl(path: Path, *records: Any) -> Path:
    path.write_text("\n".join(json.dumps(record) for record in records) + "\n")
    return path


def only(problems: tuple[Problem, ...], code: str) -> Problem:
    assert [problem.code for problem in problems] == [code]
    return problems[0]


@pytest.mark.parametrize(
    ("record", "format_"),
    [
        ({"text": "a", "source": 3}, "text"),
        ({"prompt": "a", "completion": "b"}, "prompt_completion"),
        ({"messages": CHAT}, "messages"),
    ],
)
def test_format_is_read_off_the_columns_of_every_kind_of_source(
    tmp_path: Path, record: dict[str, Any], format_: str
) -> None:
    import datasets
    import pyarrow
    import pyarrow.parquet

    write_jsonl(tmp_path / "a.jsonl", record, record)
    (tmp_path / "a.json").write_text(json.dumps([record, record], indent=1))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([record]), tmp_path / "a.parquet")
    datasets.Dataset.from_list([record]).save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"train": datasets.Dataset.from_list([record])}).save_to_disk(tmp_path / "splits")
    names = ("a.jsonl", "a.json", "a.parquet", "saved", "splits")
    facts, problems = peek(Data(train=names), base=tmp_path)
    assert problems == ()
    assert facts.format == format_
    assert facts.columns == tuple(record)
    assert [source.format for source in facts.train] == [format_] * 5
    assert [source.kind for source in facts.train] == ["jsonl", "json", "parquet", "saved", "saved"]
    assert facts.train[0].num_bytes == (tmp_path / "a.jsonl").stat().st_size


def test_txt_and_csv(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    (tmp_path / "b.csv").write_text('prompt,completion\n"a, b",c\n')
    assert peek(Data(train="a.txt"), base=tmp_path)[0].format == "text"
    facts, problems = peek(Data(train="b.csv"), base=tmp_path)
    assert (facts.format, facts.columns, problems) == ("prompt_completion", ("prompt", "completion"), ())


@pytest.mark.parametrize("name", ["org/name", "imdb", "allenai/c4.en"])
def test_a_hub_id_has_no_format_yet(tmp_path: Path, name: str) -> None:
    facts, problems = peek(Data(train=name, name="en", split="train[:10]"), base=tmp_path)
    assert problems == ()
    assert (facts.train[0].kind, facts.format, facts.num_bytes) == ("hub", None, None)
    assert peek(Data(train=name, format="messages"), base=tmp_path)[0].format == "messages"


@pytest.mark.parametrize("name", ["data/train.jsonl", "./org/name", "a/b/c", "data/train.tsv"])
def test_what_looks_like_a_path_is_not_found(tmp_path: Path, name: str) -> None:
    problem = only(peek(Data(train=name), base=tmp_path)[1], "DATA_NOT_FOUND")
    assert problem.key == "data.train"


def test_not_found_names_the_nearest_file(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "train.jsonl", {"text": "a"})
    problem = only(peek(Data(train="tarin.jsonl"), base=tmp_path)[1], "DATA_NOT_FOUND")
    assert str(tmp_path / "train.jsonl") in problem.fix


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.txt", "a.csv", "a.parquet"])
@pytest.mark.parametrize("content", ["", "\n \n\n"])
def test_empty(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    problems = peek(Data(train=name), base=tmp_path)[1]
    assert problems[0].code == ("DATA_READ" if name == "a.parquet" and content else "DATA_EMPTY")
    assert len(problems) == 1


@pytest.mark.parametrize("content", ["{}", "[{}, {}]", "{}\n{}\n"])
def test_records_without_a_column_are_no_documents(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.json").write_text(content)
    problem = only(peek(Data(train="a.json"), base=tmp_path)[1], "DATA_EMPTY")
    assert "a.json has only records without a column" in problem.message


def test_an_empty_array_is_empty(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(" [ ]")
    only(peek(Data(train="a.json"), base=tmp_path)[1], "DATA_EMPTY")


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.jsonl", '{"text": "a"}\n\n{"text": "b"\n', "line 3 is not JSON: Expecting ',' delimiter"),
        ("a.jsonl", '{"text": "a"}\n["b"]\n', "line 2 holds a list, not an object"),
        ("a.jsonl", "{'text': 'a'}\n{'text': 'a'}\n", "line 1 is not JSON: Expecting property name"),
        ("a.json", '[{"text": "a"},\n {"text": "b"}\n {"text": "c"}]', "line 3 is not JSON"),
        ("a.json", '[{"text": "a"}, "b"]', "element 2 holds a string, not an object"),
        ("a.json", '[{"text": "a"}', "line 1 is not JSON"),
    ],
)
def test_bad_json_names_file_line_and_fault(tmp_path: Path, name: str, content: str, says: str) -> None:
    (tmp_path / name).write_text(content)
    problem = only(peek(Data(train=name), base=tmp_path)[1], "DATA_JSON")
    assert str(tmp_path / name) in problem.message
    assert says in problem.message


def test_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("é".encode("latin1") + b"\n")
    only(peek(Data(train="a.txt"), base=tmp_path)[1], "DATA_ENCODING")
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "' + "é".encode("latin1") + b'"}\n')
    found = only(peek(Data(train="a.jsonl"), base=tmp_path)[1], "DATA_ENCODING")
    assert "is not UTF-8: line 1, byte 0x" in found.message
    assert "iconv -f LATIN1 -t UTF-8 a.jsonl" in found.fix


@pytest.mark.parametrize(
    ("record", "fix"),
    [
        ({"promt": "a", "completion": "b"}, "promt to prompt"),
        ({"question": "a", "answer": "b"}, "Rename question to prompt, answer to completion"),
        (
            {"instruction": "a", "input": "c", "response": "b"},
            "Rename instruction to prompt, response to completion, and append input to prompt in each record where it",
        ),
        ({"conversation": []}, 'conversation to messages. Each of its items is {"role": "user", "content": "..."}'),
        ({"x": 1}, "Give the columns text; prompt and completion; messages; instruction, input and output (Alpaca)"),
    ],
)
def test_columns_names_the_closest(tmp_path: Path, record: dict[str, Any], fix: str) -> None:
    write_jsonl(tmp_path / "a.jsonl", record)
    assert fix in only(peek(Data(train="a.jsonl"), base=tmp_path)[1], "DATA_COLUMNS").fix


def test_format_against_columns(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", {"text": "a"})
    problem = only(peek(Data(train="a.jsonl", format="messages"), base=tmp_path)[1], "DATA_FORMAT")
    assert (problem.key, problem.fix) == ("data.format", "Set data.format to text")
    write_jsonl(tmp_path / "b.jsonl", {"text": "a", "messages": CHAT})
    problem = only(peek(Data(train="b.jsonl"), base=tmp_path)[1], "DATA_FORMAT")
    assert problem.fix == "Set data.format to one of text, messages"
    assert peek(Data(train="b.jsonl", format="text"), base=tmp_path)[0].format == "text"


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ({"text": 5}, "text is a number, not a string"),
        ({"text": None}, "text is absent or null"),
        ({"prompt": "a", "completion": ["b"]}, "completion is a list"),
        ({"messages": "hi"}, "messages is a string, not a list of {role, content}"),
        ({"messages": []}, "messages is an empty list"),
        ({"messages": ["hi"]}, "messages[0] is a string"),
        ({"messages": [{"from": "human", "value": "x"}]}, "messages[0].role is absent"),
        ({"messages": [*CHAT, {"role": "user", "content": [1]}]}, "messages[2].content[0] is not an object"),
    ],
)
def test_types_name_the_record(tmp_path: Path, record: dict[str, Any], says: str) -> None:
    write_jsonl(tmp_path / "a.jsonl", record)
    problem = only(peek(Data(train=("a.jsonl",)), base=tmp_path)[1], "DATA_TYPE")
    assert problem.key == "data.train[0]"
    assert says in problem.message


def test_a_column_missing_in_a_later_record_is_a_type_fault(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", {"text": "a"}, {"text": "b"}, {"other": "c"})
    assert "line 3" in only(peek(Data(train="a.jsonl"), base=tmp_path)[1], "DATA_TYPE").message


def test_suffix(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("text\na\n")
    (tmp_path / "folder").mkdir()
    assert only(peek(Data(train="a.tsv"), base=tmp_path)[1], "DATA_SUFFIX").message.endswith("suffix=.tsv")
    only(peek(Data(train="folder"), base=tmp_path)[1], "DATA_SUFFIX")


@pytest.mark.parametrize(
    ("record", "loss_on", "fix"),
    [
        ({"text": "a"}, "completion", "all"),
        ({"messages": CHAT}, "completion", "all or assistant or last_assistant"),
        ({"prompt": "a", "completion": "b"}, "assistant", "all or completion"),
    ],
)
def test_loss_on(tmp_path: Path, record: dict[str, Any], loss_on: Any, fix: str) -> None:
    write_jsonl(tmp_path / "a.jsonl", record)
    problem = only(peek(Data(train="a.jsonl", loss_on=loss_on), base=tmp_path)[1], "DATA_LOSS_ON")
    assert problem.fix == f"Set data.loss_on to {fix}"


def test_mixed(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", {"text": "a"})
    write_jsonl(tmp_path / "b.jsonl", {"messages": CHAT})
    facts, problems = peek(Data(train="a.jsonl", eval="b.jsonl"), base=tmp_path)
    assert "a.jsonl is text, b.jsonl is messages" in only(problems, "DATA_MIXED").message
    assert facts.format is None


def test_split_of_a_saved_folder(tmp_path: Path) -> None:
    import datasets

    datasets.DatasetDict({"train": datasets.Dataset.from_dict({"text": ["a"]})}).save_to_disk(tmp_path / "saved")
    problem = only(peek(Data(train="saved", eval="saved"), base=tmp_path)[1], "DATA_SPLIT")
    assert problem.key == "data.eval_split"


def test_keys_that_nothing_would_read(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", {"text": "a"})
    problems = peek(Data(train="a.jsonl", name="x", split="test", eval_split="test"), base=tmp_path)[1]
    assert [problem.key for problem in problems] == ["data.eval_split", "data.name", "data.split"]
    assert {problem.code for problem in problems} == {"DATA_SPLIT"}
    only(peek(Data(train="a.jsonl", eval="a.jsonl", validation_fraction=0.1), base=tmp_path)[1], "DATA_VALIDATION")
    only(peek(Data(train="a.jsonl", max_samples=1, validation_fraction=0.1), base=tmp_path)[1], "DATA_TOO_SMALL")


def test_all_problems_are_raised_together(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": 1}\n{\n')
    with pytest.raises(DataError) as caught:
        check_data(Data(train=("a.jsonl", "b.jsonl"), loss_on="assistant"), base=tmp_path)
    assert caught.value.codes == ("DATA_JSON", "DATA_TYPE", "DATA_NOT_FOUND", "DATA_LOSS_ON")


def test_a_damaged_parquet_and_a_ragged_csv_are_unreadable(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1nonsense")
    (tmp_path / "a.csv").write_text("text\na,b\n")
    only(peek(Data(train="a.parquet"), base=tmp_path)[1], "DATA_READ")
    assert "line 2" in only(peek(Data(train="a.csv"), base=tmp_path)[1], "DATA_READ").message


def test_peek_imports_no_training_library(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", {"text": "a"})
    code = (
        "import sys; from pathlib import Path;"
        "from toolkit.dataset_inspection.inspect import peek; from toolkit.config.job import Data;"
        f"peek(Data(train='a.jsonl'), base=Path({str(tmp_path)!r}));"
        "print({'torch', 'datasets', 'transformers', 'tokenizers', 'pyarrow'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.jsonl", '{"text": ' + DEEP + "}", "line 1 cannot be read: lists or objects are nested too deep"),
        ("a.jsonl", '{"text": "a"}\n{"text": ' + "9" * 5000 + "}", "line 2 cannot be read"),
        ("a.jsonl", '{"text": "\\ud800"}', "line 1 is not Unicode"),
        ("a.jsonl", '{"\\ud800": "a"}', "line 1 is not Unicode"),
        ("a.json", '[{"text": "\\ud800"}]', "element 1 is not Unicode"),
        ("a.json", '[{"text": "a"}] more', "Extra data after the array"),
        ("a.json", '[{"text": "a"},]', "Expecting value"),
    ],
)
def test_json_that_only_a_loader_would_refuse(tmp_path: Path, name: str, content: str, says: str) -> None:
    (tmp_path / name).write_text(content)
    assert says in only(peek(Data(train=name), base=tmp_path)[1], "DATA_JSON").message


def test_an_array_nested_too_deep(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(DEEP)
    assert "nested too deep" in only(peek(Data(train="a.json"), base=tmp_path)[1], "DATA_READ").message


def test_a_surrogate_pair_is_a_character(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "\\ud83d\\ude00"}\n')
    assert peek(Data(train="a.jsonl"), base=tmp_path)[1] == ()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('text\n"abc\nfoo\n', "a quoted cell is not closed"),
        ("text,text\na,b\n", "names 'text' more than once"),
    ],
)
def test_csv_that_pandas_refuses_or_renames(tmp_path: Path, content: str, says: str) -> None:
    (tmp_path / "a.csv").write_text(content)
    assert says in only(peek(Data(train="a.csv"), base=tmp_path)[1], "DATA_READ").message


def test_a_long_cell_is_no_fault(tmp_path: Path) -> None:
    before = csv.field_size_limit()
    (tmp_path / "a.csv").write_text("text\n" + "a" * (before + 1) + "\n")
    assert peek(Data(train="a.csv"), base=tmp_path)[1] == ()
    assert csv.field_size_limit() == before


@pytest.mark.parametrize(
    "files",
    [
        {"dataset_dict.json": "[]"},
        {"dataset_dict.json": '{"splits": 5}'},
        {"dataset_dict.json": '{"splits": ["train"]}'},
        {"state.json": "[]"},
        {"state.json": '{"_data_files": []}', "dataset_info.json": '{"features": null}'},
        {"state.json": '{"_data_files": 3}', "dataset_info.json": '{"features": {"text": {}}}'},
        {"state.json": "{}", "dataset_info.json": "{}"},
        {"state.json": '{"_data_files": []}', "dataset_info.json": '{"features": [{}]}'},
        {"state.json": '{"_data_files": []}', "dataset_info.json": '{"features": "text"}'},
        {"state.json": DEEP},
    ],
    ids=str,
)
def test_a_damaged_saved_folder(tmp_path: Path, files: dict[str, str]) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    problem = only(peek(Data(train=str(tmp_path)))[1], "DATA_READ")
    assert "save_to_disk" in problem.fix


def test_a_saved_folder_whose_texts_lie_nowhere(tmp_path: Path) -> None:
    import datasets

    datasets.Dataset.from_dict({"text": ["one", "three"]}).save_to_disk(tmp_path / "saved")
    (file,) = (tmp_path / "saved").glob("*.arrow")
    offsets = b"".join(number.to_bytes(4, "little") for number in (0, 3, 8))
    assert file.read_bytes().count(offsets) == 1
    file.write_bytes(file.read_bytes().replace(offsets, offsets[:4] + b"\xff\xff\xff\xff" + offsets[8:]))
    assert "save_to_disk" in only(peek(Data(train=str(tmp_path / "saved")))[1], "DATA_READ").fix


def test_links_in_a_circle_and_pipes(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").symlink_to("b.jsonl")
    (tmp_path / "b.jsonl").symlink_to("a.jsonl")
    assert "symbolic links" in only(peek(Data(train="a.jsonl"), base=tmp_path)[1], "PATH_UNREADABLE").message
    os.mkfifo(tmp_path / "pipe.jsonl")
    assert "a pipe" in only(peek(Data(train="pipe.jsonl"), base=tmp_path)[1], "DATA_SUFFIX").message


def test_text_that_is_blank_throughout(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", {"text": ""}, {"text": " \n"})
    assert "blank" in only(peek(Data(train="a.jsonl"), base=tmp_path)[1], "DATA_EMPTY").message
    write_jsonl(tmp_path / "a.jsonl", {"text": ""}, {"text": "a"})
    assert peek(Data(train="a.jsonl"), base=tmp_path)[1] == ()


TEXTS = {
    "jsonl": '{"text": "Zoë"}\n{"text": "b"}\n',
    "json": '[{"text": "Zoë"}, {"text": "b"}]',
    "txt": "one line\nanother\n",
    "csv": "text\none\nanother\n",
}


@pytest.mark.parametrize("suffix", TEXTS)
@pytest.mark.parametrize(
    ("encoding", "named"),
    [
        ("utf-16", "UTF-16"),
        ("utf-16-le", "UTF-16LE"),
        ("utf-16-be", "UTF-16BE"),
        ("utf-32", "UTF-32"),
    ],
)
def test_another_encoding_is_named_with_the_command_that_converts_it(tmp_path, suffix, encoding, named):
    (tmp_path / f"a.{suffix}").write_bytes(TEXTS[suffix].encode(encoding))
    problem = only(peek(Data(train=f"a.{suffix}"), base=tmp_path)[1], "DATA_ENCODING")
    assert problem.key == "data.train"
    assert f"iconv -f {named} -t UTF-8 a.{suffix} > utf8-a.{suffix}" in problem.fix
    command = problem.fix.removeprefix("Convert it: ").partition(", and")[0]
    subprocess.run(command, shell=True, cwd=tmp_path, check=True)
    assert peek(Data(train=f"utf8-a.{suffix}"), base=tmp_path)[1] == ()


def test_one_line_of_utf_16_is_not_taken_for_json(tmp_path):
    """The json module guesses the encoding of bytes, and would read it."""
    (tmp_path / "a.jsonl").write_bytes('{"text": "a"}'.encode("utf-16"))
    only(peek(Data(train="a.jsonl"), base=tmp_path)[1], "DATA_ENCODING")


@pytest.mark.parametrize("text", ["naïve 日本語 🎉\n" * 3, "\ufeffwith a mark\n", "a\0b\n", "x"])
def test_utf_8_is_left_alone(tmp_path, text):
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    assert peek(Data(train="a.txt"), base=tmp_path)[1] == ()
