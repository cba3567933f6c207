"""prepare: files of each kind to packed sequences, cached, the same on every call."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
from quick_python import quick_python
from tokenizers.processors import TemplateProcessing

from toolkit.config.job import Data
from toolkit.data.prepare import prepare
from toolkit.data.sources import split_rows
from toolkit.errors import DataError

Writer = Callable[..., Path]


@pytest.fixture
def build(tmp_path: Path, tokenizer: Any) -> Callable[..., Any]:
    def prepare_here(data: Data, **options: Any) -> Any:
        given = {"tokenizer": tokenizer, "sequence_length": 64, "seed": 0, "cache_dir": tmp_path / "cache"}
        return prepare(data, base=tmp_path, **(given | options))

    return prepare_here


def rows(dataset: Any) -> list[list[int]]:
    return [row["input_ids"].tolist() for row in dataset]


def test_wrapped_rows_are_the_documents_in_file_order(
    write: Writer, build: Any, tokenizer: Any, texts: list[str]
) -> None:
    write([{"text": text, "note": number} for number, text in enumerate(texts)])
    prepared = build(Data(train="train.jsonl"))
    stream = [token for text in texts for token in [*tokenizer(text).input_ids, tokenizer.eos_token_id]]
    assert list(itertools.chain.from_iterable(rows(prepared.train))) == stream[: len(stream) // 64 * 64]
    assert prepared.format == "text"
    report = prepared.train.report
    assert (report.documents, report.dropped_tokens) == (len(texts), len(stream) % 64)


def test_every_kind_of_source_gives_the_same_sequences(
    write: Writer, build: Any, texts: list[str], tmp_path: Path
) -> None:
    flat = [text.replace("\n", " ").strip() or "x" for text in texts]
    records = datasets.Dataset.from_dict({"text": flat})
    write([{"text": text} for text in flat])
    (tmp_path / "a.json").write_text(json.dumps([{"text": text} for text in flat]))
    (tmp_path / "a.txt").write_text("\ufeff" + "\n\n".join(flat) + "\n")  # with the mark that Windows writes
    records.to_csv(tmp_path / "a.csv", index=False)
    records.to_parquet(tmp_path / "a.parquet")
    records.save_to_disk(tmp_path / "saved")
    expected = rows(build(Data(train="train.jsonl")).train)
    assert len(expected) > 50
    for name in ("a.json", "a.txt", "a.csv", "a.parquet", "saved"):
        assert rows(build(Data(train=name)).train) == expected, name
    both = rows(build(Data(train=("a.txt", "a.csv"), packing="none")).train)
    assert both == rows(build(Data(train="a.txt", packing="none")).train) * 2


def test_csv_numbers_and_na_stay_text(build: Any, tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "a.csv").write_text("prompt,completion,n\n1.50,NA,1\n2,null,2\n")
    prepared = build(Data(train="a.csv", packing="none"))
    assert [tokenizer.decode(row) for row in rows(prepared.train)] == ["1.50NA<eos>", "2null<eos>"]


def test_cells_of_a_csv_file_stay_in_their_columns(build: Any, tmp_path: Path, tokenizer: Any) -> None:
    long = "x" * 200_000  # more than the csv module takes by itself
    (tmp_path / "a.csv").write_bytes(f"prompt,completion\none,two\n\r,three\n{long},four\n".encode())
    prepared = build(Data(train="a.csv", packing="none"), sequence_length=250_000)
    assert [tokenizer.decode(row) for row in rows(prepared.train)] == ["onetwo<eos>", "three<eos>", f"{long}four<eos>"]


def test_messages_with_different_keys_load(write: Writer, build: Any, tokenizer: Any) -> None:
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}{{ m.name }}: {{ m.content }}\n{% endfor %}"
    write([{"messages": [{"role": "user", "content": "hi", "name": "Ada"}, {"role": "assistant", "content": "yo"}]}])
    prepared = build(Data(train="train.jsonl", packing="none", loss_on="all"))
    assert tokenizer.decode(rows(prepared.train)[0]) == "userAda: hi\nassistant: yo\n"


def test_marks_and_unread_keys_of_several_files(write: Writer, build: Any, tokenizer: Any) -> None:
    """Files whose messages have different keys are one data set; what a file leaves out of the loss stays out."""
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}{{ m.name }}: {{ m.content }}\n{% endfor %}"
    named = {"role": "user", "content": "hi", "name": "Ada"}
    write([{"messages": [named, {"role": "assistant", "content": "bad", "weight": 0, "id": 7}]}], "own.jsonl")
    turns = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "bad", "train": False}]
    write(
        [{"conversations": [*turns, {"from": "gpt", "value": "good", "train": True, "model": "x"}]}], "sharegpt.jsonl"
    )
    prepared = build(Data(train=("own.jsonl", "sharegpt.jsonl"), packing="none", loss_on="all"))
    first, second = prepared.train
    assert tokenizer.decode(first["input_ids"]) == "userAda: hi\nassistant: bad\n"
    learned = tokenizer.decode(first["labels"][first["labels"] != -100])  # no row learns its first token
    assert learned.endswith("Ada: hi\n")
    learned = tokenizer.decode(second["labels"][second["labels"] != -100])
    assert learned.endswith(": hi\nassistant: good\n")
    own, sharegpt = prepared.warnings
    assert own.startswith("own.jsonl: its messages have unused keys: id (1 ×)")
    assert "model (1 ×)" in sharegpt


def test_completion_only_labels(write: Writer, build: Any, tokenizer: Any) -> None:
    write([{"prompt": "Name a", "completion": " list"}, {"prompt": "Name another", "completion": " one"}])
    dataset = build(Data(train="train.jsonl", packing="separated", loss_on="completion")).train
    labels = dataset[0]["labels"]
    assert tokenizer.decode(labels[labels != -100]) == " list<eos> one<eos>"


def test_validation_fraction_holds_out_documents_once_and_by_seed(
    write: Writer, build: Any, texts: list[str], tokenizer: Any
) -> None:
    write([{"text": text} for text in texts])
    data = Data(train="train.jsonl", validation_fraction=0.2, packing="none")
    prepared = build(data, sequence_length=2048)
    documents = [[*tokenizer(text).input_ids, tokenizer.eos_token_id] for text in texts]
    held, kept = rows(prepared.eval), rows(prepared.train)
    assert (len(held), len(kept)) == (12, 48)
    assert sorted(held + kept) == sorted(documents)
    assert kept == [document for document in documents if document in kept]
    assert rows(build(data, sequence_length=2048, seed=0).eval) == held
    assert rows(build(data, sequence_length=2048, seed=1).eval) != held


def test_named_sets_have_formats_columns_and_caps_of_their_own(
    write: Writer, build: Any, texts: list[str], tokenizer: Any
) -> None:
    write([{"text": text} for text in texts])
    write([{"question": text, "answer": " yes"} for text in texts[:6]], "asked.jsonl")
    pairs = {"path": "asked.jsonl", "columns": {"prompt": "question", "completion": "answer"}, "loss_on": "completion"}
    asked = pairs | {"max_rows": 2}
    prepared = build(Data(train="train.jsonl", eval={"asked": asked, "seen": "train.jsonl"}, packing="none"))
    assert prepared.eval is None
    assert list(prepared.validation) == ["asked", "seen"]
    learned = [row["labels"][row["labels"] != -100] for row in prepared.eval_sets["asked"]]
    assert [tokenizer.decode(labels) for labels in learned] == [" yes<eos>"] * 2
    assert rows(prepared.eval_sets["seen"]) == rows(prepared.train)
    assert prepared.format == "mixed"
    for source, key in (
        ({"path": "gone.jsonl"}, "data.eval.asked"),
        ({**asked, "split": "test"}, "data.eval.asked.split"),
    ):
        error = caught(build, Data(train="train.jsonl", eval={"asked": source}))
        assert [problem.key for problem in error.problems] == [key]
    error = caught(build, Data(train="train.jsonl", eval={"asked": asked}, eval_split="test"))
    assert error.codes == ("DATA_SPLIT",)


def test_split_rows_rounds_but_leaves_both_parts_something() -> None:
    assert [len(part) for part in split_rows(3, 0.01, seed=0)] == [1, 2]
    assert [len(part) for part in split_rows(3, 0.99, seed=0)] == [2, 1]
    with pytest.raises(DataError, match="DATA_TOO_SMALL"):
        split_rows(1, 0.5, seed=0)


def test_eval_files_and_max_samples(write: Writer, build: Any, texts: list[str]) -> None:
    write([{"text": text} for text in texts])
    write([{"text": text} for text in texts[:7]], "eval.jsonl")
    prepared = build(Data(train="train.jsonl", eval="eval.jsonl", max_samples=20, packing="none"))
    assert (len(prepared.train), len(prepared.eval)) == (20, 7)


def test_a_second_call_and_another_process_reuse_the_token_files(
    write: Writer, build: Any, texts: list[str], tmp_path: Path, tokenizer: Any
) -> None:
    write([{"text": text} for text in texts])
    first = rows(build(Data(train="train.jsonl")).train)
    stores = list((tmp_path / "cache").glob("tokens-*"))
    assert len(stores) == 1
    written = (stores[0] / "tokens.bin").stat().st_mtime_ns
    tokenizer("x", padding="max_length", max_length=8, truncation=True)  # changes the tokenizer's inner state
    beginning = rows(build(Data(train="train.jsonl"), sequence_length=16).train)[0]
    assert beginning == first[0][:16]
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    code = (
        "import sys; from pathlib import Path; from transformers import AutoTokenizer;"
        "from toolkit.data.prepare import prepare; from toolkit.config.job import Data; base = Path(sys.argv[1]);"
        "tokenizer = AutoTokenizer.from_pretrained(base / 'tokenizer');"
        "out = prepare(Data(train='train.jsonl'), tokenizer=tokenizer, sequence_length=64, seed=0,"
        " cache_dir=base / 'cache', base=base); print([row['input_ids'].tolist() for row in out.train])"
    )
    done = subprocess.run([quick_python(), "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == first
    assert [path.name for path in (tmp_path / "cache").glob("tokenising-*")] == []
    assert list((tmp_path / "cache").glob("tokens-*")) == stores
    assert (stores[0] / "tokens.bin").stat().st_mtime_ns == written


def test_another_tokenizer_or_target_is_another_cache(
    write: Writer, build: Any, tokenizer: Any, tmp_path: Path
) -> None:
    write([{"prompt": "a", "completion": "bc"}] * 3)
    for loss_on in ("all", "completion"):
        build(Data(train="train.jsonl", packing="none", loss_on=loss_on))
    tokenizer.add_tokens(["bc"])
    build(Data(train="train.jsonl", packing="none"))
    assert len(list((tmp_path / "cache").glob("tokens-*"))) == 3


def test_processes_do_not_change_the_result(write: Writer, build: Any, texts: list[str], tmp_path: Path) -> None:
    write([{"text": text} for text in texts])
    alone = rows(build(Data(train="train.jsonl")).train)
    assert rows(build(Data(train="train.jsonl"), num_proc=2, cache_dir=tmp_path / "other").train) == alone


def test_an_empty_first_batch_does_not_fix_the_type(build: Any, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\n" * 1500 + "words at last\n")
    report = build(Data(train="a.txt", packing="none")).train.report
    assert (report.documents, report.dropped_documents) == (1, 1500)


def test_progress_bars_are_left_as_they_were(write: Writer, build: Any, capfd: Any) -> None:
    write([{"text": "a b c"}] * 40)
    before = datasets.are_progress_bars_disabled()
    build(Data(train="train.jsonl", packing="none"))
    assert datasets.are_progress_bars_disabled() == before
    assert "Tokenising" not in capfd.readouterr().err


def caught(build: Any, data: Data, **options: Any) -> DataError:
    with pytest.raises(DataError) as error:
        build(data, **options)
    return error.value


def test_a_token_beyond_the_embedding(write: Writer, build: Any, tokenizer: Any, texts: list[str]) -> None:
    write([{"text": text} for text in texts])
    error = caught(build, Data(train="train.jsonl"), vocab_size=300)
    assert error.codes == ("DATA_VOCAB",)
    assert "vocab_size=300" in str(error)
    assert f"{len(tokenizer)} tokens" in str(error)
    tokenizer.add_tokens(["<never seen>"])
    assert len(tokenizer) == 513
    build(Data(train="train.jsonl"), vocab_size=512)


def test_padding_avoids_a_token_that_the_model_lacks(write: Writer, build: Any, tokenizer: Any) -> None:
    write([{"text": "a list"}] * 3)
    tokenizer.add_special_tokens({"pad_token": "<new pad>"})
    assert tokenizer.pad_token_id == 512
    dataset = build(Data(train="train.jsonl", packing="separated"), vocab_size=512).train
    assert dataset[0]["input_ids"][-1] == tokenizer.eos_token_id


def test_too_small(write: Writer, build: Any, texts: list[str]) -> None:
    write([{"text": text} for text in texts[:3]])
    error = caught(build, Data(train="train.jsonl", packing="none"), train_batch_size=8)
    assert error.codes == ("DATA_TOO_SMALL",)
    assert "sequences=3" in str(error)
    assert "at most 3" in str(error)
    write([{"text": "short"}], "eval.jsonl")
    error = caught(build, Data(train="train.jsonl", eval="eval.jsonl"), train_batch_size=1)
    assert [problem.key for problem in error.problems] == ["data.eval"]


def test_no_targets(write: Writer, build: Any, texts: list[str]) -> None:
    write([{"prompt": "a long prompt " * 40, "completion": "short"}] * 4)
    error = caught(build, Data(train="train.jsonl", packing="none", loss_on="completion"))
    assert error.codes == ("DATA_NO_TARGETS",)
    write([{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}] * 4)
    of_roles = Data(train="train.jsonl", packing="none", loss_on=("nobody",), chat_template="chatml")
    assert "data.loss_on=nobody leaves no token" in str(error := caught(build, of_roles))
    assert "Name roles that messages have" in str(error)


def test_a_record_that_the_peek_did_not_reach(write: Writer, build: Any) -> None:
    write([{"text": "a"}] * 1200 + [{"text": None}])
    error = caught(build, Data(train="train.jsonl"))
    assert error.codes == ("DATA_TYPE",)
    assert str(error).startswith("train.jsonl, record at line 1201: text is absent or null")
    assert error.problems[0].key == "data.train"
    with pytest.raises(DataError, match="record at line 1201"):
        build(Data(train="train.jsonl"), num_proc=2)


def test_a_record_is_named_by_its_file_whatever_joined_and_split_the_data(
    build: Any, tmp_path: Path, texts: list[str]
) -> None:
    (tmp_path / "whole.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    lines = [json.dumps({"text": "a" if number != 1300 else None}) for number in range(1500)]
    (tmp_path / "torn.jsonl").write_text("\n" + "\n\n".join(lines))
    named = re.escape("torn.jsonl, record at line 2602: text is absent or null")
    both = ["whole.jsonl", "torn.jsonl"]
    for data in (Data(train=both, validation_fraction=0.5), Data(train="whole.jsonl", eval=both[::-1])):
        with pytest.raises(DataError, match=named) as raised:
            build(data)
        assert raised.value.problems[0].key == ("data.train[1]" if data.eval is None else "data.eval[0]")


def test_a_line_that_the_peek_did_not_reach(write: Writer, build: Any) -> None:
    path = write([{"text": "a"}] * 1200)
    path.write_text(path.read_text() + "oops\n")
    error = caught(build, Data(train="train.jsonl"))
    assert error.codes == ("DATA_JSON",)
    assert "line 1201" in str(error)


def test_a_hub_set_that_does_not_load(build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    error = caught(build, Data(train="no-such-org/no-such-set"))
    assert error.codes == ("DATA_HUB",)
    assert "no-such-org/no-such-set" in str(error)


def test_mistakes_of_the_job_are_found_before_loading(build: Any) -> None:
    assert caught(build, Data(train="absent.jsonl", eval="gone.jsonl")).codes == ("DATA_NOT_FOUND", "DATA_NOT_FOUND")


def test_no_chat_template(write: Writer, build: Any) -> None:
    write([{"messages": [{"role": "user", "content": "hi"}]}])
    assert caught(build, Data(train="train.jsonl")).codes == ("DATA_NO_CHAT_TEMPLATE",)


CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}, {"role": "user", "content": "and"}]


@pytest.mark.parametrize("loss_on", ["all", "assistant"])
def test_chatml_for_a_tokenizer_without_a_template(write: Writer, build: Any, tokenizer: Any, loss_on: Any) -> None:
    write([{"messages": CHAT}])
    data = Data(train="train.jsonl", packing="none", loss_on=loss_on, chat_template="chatml")
    prepared = build(data, sequence_length=256)
    (row,) = prepared.train
    expected = (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyo<|im_end|><eos>\n<|im_start|>user\nand<|im_end|>\n"
    )
    assert tokenizer.decode(row["input_ids"]) == expected
    learned = tokenizer.decode(row["input_ids"][row["labels"] != -100])
    assert learned == (expected[1:] if loss_on == "all" else "yo<|im_end|><eos>")  # nothing predicts the first token
    opened = tokenizer.apply_chat_template(CHAT[:1], tokenize=False, add_generation_prompt=True)
    assert expected.startswith(opened)
    assert opened.endswith("<|im_start|>assistant\n")


def test_chatml_begins_as_the_tokenizer_begins_its_texts(write: Writer, build: Any, tokenizer: Any) -> None:
    begins = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", tokenizer.convert_tokens_to_ids("<bos>"))])
    tokenizer.backend_tokenizer.post_processor = begins
    tokenizer.bos_token = "<bos>"
    write([{"messages": CHAT[:2]}])
    prepared = build(Data(train="train.jsonl", packing="none", chat_template="chatml"))
    assert tokenizer.decode(rows(prepared.train)[0]).startswith("<bos><|im_start|>user\nhi")


def test_a_template_file_is_saved_with_the_tokenizer(write: Writer, build: Any, tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "mine.jinja").write_text("{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}")
    write([{"messages": CHAT[:2]}])
    prepared = build(Data(train="train.jsonl", packing="none", chat_template="mine.jinja"))
    assert tokenizer.decode(rows(prepared.train)[0]) == "[user] hi\n[assistant] yo\n"
    tokenizer.save_pretrained(tmp_path / "saved-tokenizer")
    assert (tmp_path / "saved-tokenizer" / "chat_template.jinja").read_text().startswith("{% for m in messages %}[")
    (tmp_path / "mine.jinja").write_text("{% for m in messages %}")
    assert caught(build, Data(train="train.jsonl", chat_template="mine.jinja")).codes == ("DATA_CHAT_TEMPLATE_FILE",)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}x", "no system role"),
        ("{{ messages[0].content / 2 }}", "unsupported operand"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ strftime_later() }}", "'strftime_later' is undefined"),
    ],
)
def test_a_conversation_that_the_template_refuses_is_named(
    write: Writer, build: Any, tmp_path: Path, template: str, reason: str
) -> None:
    (tmp_path / "mine.jinja").write_text(template)
    system = {"role": "system", "content": "Be kind."}
    write([{"messages": [system, *CHAT[:2]]}])
    for loss_on in ("all", "assistant"):
        data = Data(train="train.jsonl", packing="none", loss_on=loss_on, chat_template="mine.jinja")
        error = caught(build, data)
        assert error.codes == ("DATA_CHAT_TEMPLATE",)
        assert re.search("record (1 of the data|at line 1)", str(error))
        assert reason in str(error)


def test_a_template_without_end_of_nesting_is_refused(write: Writer, build: Any, tmp_path: Path) -> None:
    (tmp_path / "mine.jinja").write_text("{{ (" * 3000)
    write([{"messages": CHAT[:2]}])
    assert caught(build, Data(train="train.jsonl", chat_template="mine.jinja")).codes == ("DATA_CHAT_TEMPLATE_FILE",)


def test_alpaca_and_sharegpt_files_train_as_their_own_columns_do(
    write: Writer, build: Any, tokenizer: Any, tmp_path: Path
) -> None:
    asked = {"instruction": "Add.", "input": "1 and 2", "output": "3"}
    write([asked, asked | {"input": ""}], "alpaca.jsonl")
    datasets.Dataset.from_list([asked, asked | {"input": ""}]).save_to_disk(tmp_path / "alpaca")
    data = Data(train="alpaca.jsonl", packing="none", loss_on="completion")
    prepared = build(data, sequence_length=512)
    first, second = (tokenizer.decode(row) for row in rows(prepared.train))
    assert "### Instruction:\nAdd.\n\n### Input:\n1 and 2\n\n### Response:\n3<eos>" in first
    assert "### Input" not in second
    assert {tokenizer.decode(row["input_ids"][row["labels"] != -100]) for row in prepared.train} == {"3<eos>"}
    assert rows(build(data.model_copy(update={"train": "alpaca"}), sequence_length=512).train) == rows(prepared.train)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*") if path.is_file()}
    build(data, sequence_length=512)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*") if path.is_file()} == before

    write([{"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yo"}]}], "sharegpt.jsonl")
    write([{"messages": CHAT[:2]}], "own.jsonl")
    chats = build(
        Data(train=("sharegpt.jsonl", "own.jsonl"), packing="none", chat_template="chatml"), sequence_length=128
    )
    assert len(set(map(tuple, rows(chats.train)))) == 1
    assert len(chats.train) == 2


def test_a_fault_past_the_head_of_an_alpaca_file(write: Writer, build: Any) -> None:
    record = {"instruction": "Add.", "output": "3"}
    write([record] * 1200 + [{"instruction": "Add.", "output": None}])
    error = caught(build, Data(train="train.jsonl"))
    assert error.codes == ("DATA_TYPE",)
    assert "train.jsonl, record at line 1201: output is absent" in str(error)


def test_columns_that_nothing_reads_are_named(write: Writer, build: Any, texts: list[str]) -> None:
    write([{"prompt": text, "input": "more", "completion": "x", "id": 3} for text in texts])
    (warning,) = build(Data(train="train.jsonl", packing="none")).warnings
    assert "train.jsonl: the column input is not used" in warning


def test_a_long_document_is_refused_by_its_place(write: Writer, build: Any, texts: list[str]) -> None:
    write([{"text": "short"}, {"text": "x" * 99}, {"text": "y" * 150}])
    with pytest.raises(DataError, match=r"record at line 2 has .* as 1 more do, the longest") as error:
        build(Data(train="train.jsonl", packing="none", long_rows="refuse"))
    assert error.value.codes == ("DATA_LONG_ROWS",)
    assert build(Data(train="train.jsonl", packing="none", long_rows="drop")).train.report.dropped_long == 2


def test_tokens_and_texts_are_the_same_rows(write: Writer, build: Any, tokenizer: Any, texts: list[str]) -> None:
    write([{"text": text} for text in texts], "a.jsonl")
    ids = [[*tokenizer(text).input_ids, tokenizer.eos_token_id] for text in texts]
    write([{"input_ids": each, "labels": [-100, *each[1:]]} for each in ids], "b.jsonl")
    one, other = (build(Data(train=name, packing="separated")).train for name in ("a.jsonl", "b.jsonl"))
    assert rows(one) == rows(other)
    assert [row["labels"].tolist() for row in one] == [row["labels"].tolist() for row in other]
    write([{"input_ids": [5, 9999]}], "c.jsonl")
    with pytest.raises(DataError, match="DATA_VOCAB"):
        build(Data(train="c.jsonl", packing="none"), vocab_size=512)
