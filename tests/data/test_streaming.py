"""Streams of rows: an epoch has each document once over all ranks, rows are as those of whole data sets, a position is exact."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset

from toolkit.config.job import Data
from toolkit.config.user_code import find_beside
from toolkit.data.collate import Collator
from toolkit.data.prepare import prepare
from toolkit.data.preview import preview
from toolkit.data.streaming import Position, StreamLoader, as_saved
from toolkit.errors import DataError
from toolkit.trainer.sample import sample_documents, train_tokenizer

LENGTH = 16


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(sample_documents()[:20], vocab_size=300)


def records(number: int, name: str = "") -> list[dict[str, Any]]:
    return [{"text": f"{name}{index} " + "word " * (index % 9)} for index in range(number)]


def written(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def stream(tmp_path: Path, tokenizer: Any, **keys: Any) -> Any:
    data = Data.model_validate({"streaming": True, "shuffle_buffer": 7, **keys})
    return prepare(
        data, tokenizer=tokenizer, sequence_length=LENGTH, seed=3, cache_dir=tmp_path / "cache", vocab_size=300
    )


def texts(tokenizer: Any, rows: list[dict[str, np.ndarray]]) -> list[str]:
    return [tokenizer.decode(row["input_ids"].tolist()) for row in rows]


def drawn(position: Position, number: int) -> list[dict[str, np.ndarray]]:
    return [position.row() for _ in range(number)]


@pytest.mark.parametrize(
    "dp_size", [pytest.param(1, marks=pytest.mark.full), 2, pytest.param(3, marks=pytest.mark.full)]
)
def test_each_epoch_has_every_document_once_over_all_ranks(tmp_path, tokenizer, dp_size):
    """Two files: the ranks share them by file where they divide, else by record."""
    source = [written(tmp_path / f"{name}.jsonl", records(24, name)) for name in "ab"]
    prepared = stream(tmp_path, tokenizer, train=source, packing="none")
    whole = stream(tmp_path, tokenizer, train=source, packing="none", streaming=False, shuffle_buffer=None)
    for _ in range(2):
        found: list[str] = []
        for rank in range(dp_size):
            position = Position(prepared.train, dp_rank=rank, dp_size=dp_size)
            first, second = (drawn(position, 48 // dp_size) for _ in range(2))
            assert texts(tokenizer, first) != texts(tokenizer, second)  # another order
            assert sorted(texts(tokenizer, first)) == sorted(texts(tokenizer, second))
            found += texts(tokenizer, first)
        expected = [whole.train[row] for row in range(len(whole.train))]
        assert sorted(found) == sorted(texts(tokenizer, expected))


@pytest.mark.parametrize("packing", ["none", "wrapped", "separated"])
def test_rows_are_those_of_the_whole_set_in_its_order(tmp_path, tokenizer, packing):
    source = written(tmp_path / "a.jsonl", records(30))
    streamed = stream(tmp_path, tokenizer, train=source, packing=packing, shuffle_buffer=1, long_rows="split").train
    packed = stream(
        tmp_path, tokenizer, train=source, packing=packing, long_rows="split", streaming=False, shuffle_buffer=None
    ).train
    rows = drawn(Position(streamed, dp_rank=0, dp_size=1), len(packed))
    if packing == "separated":  # the rows are filled in another order: the documents are the same
        assert all(len(row["input_ids"]) == LENGTH for row in rows)
        assert sum((row["position_ids"] == 0).sum() for row in rows) > len(rows)
        for row in rows:
            assert (row["labels"][row["position_ids"] == 0] == -100).all()
        return
    for row, expected in zip(rows, (packed[at] for at in range(len(packed))), strict=True):
        assert all((row[name] == expected[name]).all() for name in expected)


@pytest.mark.parametrize(
    ("packing", "kind"),
    [
        ("wrapped", "parquet"),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (("none", "jsonl"), ("separated", "saved"), ("separated", "jsonl"), ("none", "parquet"))
        ),
    ],
)
def test_a_position_goes_on_exactly(tmp_path, tokenizer, packing, kind):
    """At many places, over the end of an epoch, with two sources of other lengths."""
    rows = [records(24, "a"), records(70, "b")]
    names = [str(tmp_path / f"{index}.{kind}") for index in range(2)]
    for name, each in zip(names, rows, strict=True):
        if kind == "jsonl":
            written(Path(name), each)
        elif kind == "parquet":
            Dataset.from_list(each).to_parquet(name, batch_size=10)
        else:
            Dataset.from_list(each).save_to_disk(name)
    train = stream(tmp_path, tokenizer, train=names, packing=packing).train
    for rank, size in ((0, 1), (1, 2)):
        position = Position(train, dp_rank=rank, dp_size=size)
        states, expected = [], []
        for _ in range(140):
            states.append(as_saved(position.snapshot()))
            expected.append(position.row())
        assert position.epoch > 0
        for at in (0, 1, 17, 52, 105):
            resumed = Position(train, dp_rank=rank, dp_size=size, state=states[at])
            for row, same in zip(drawn(resumed, 30), expected[at : at + 30], strict=True):
                assert all((row[name] == same[name]).all() for name in same)


def test_a_loader_holds_the_place_of_the_step_that_was_taken(tmp_path, tokenizer):
    """Not of the one that the thread has fetched ahead, and a second iteration goes on; most of the file is still to be read."""
    train = stream(tmp_path, tokenizer, train=written(tmp_path / "a.jsonl", records(400))).train

    def loader(num_steps: int, state: Any = None) -> StreamLoader:
        return StreamLoader(
            train,
            collate=Collator.of(train),
            micro_batch_size=2,
            gradient_accumulation_steps=2,
            dp_rank=0,
            dp_size=1,
            num_steps=num_steps,
            state=state,
        )

    whole = [step[1]["input_ids"].tolist() for step in loader(20)]
    broken, seen = loader(20), []
    assert len(broken) == 20
    for step in broken:
        seen.append(step[1]["input_ids"].tolist())
        if len(seen) == 3:
            break
    state = loader(17, broken.state()).state()  # saved again before a record is read
    resumed = [step[1]["input_ids"].tolist() for step in loader(17, state)]
    assert seen + resumed == whole
    chained, state = [], None
    for left in range(20, 0, -4):  # each loader resumes the one before
        part = loader(left, state)
        for number, step in enumerate(part):
            chained.append(step[1]["input_ids"].tolist())
            if number == 3:
                break
        state = part.state()
    assert chained == whole
    assert seen + [step[1]["input_ids"].tolist() for step in broken] == whole


@pytest.mark.parametrize("sizes", [(2, 1, 4), (1, 4, 2), (4, 2, 4)])
def test_a_stream_goes_on_with_other_ranks_in_the_order_in_which_it_began(tmp_path, tokenizer, sizes):
    """Each step has the rows of the run that never stopped, whoever reads them."""
    train = stream(tmp_path, tokenizer, train=written(tmp_path / "a.jsonl", records(300))).train

    def steps(size: int, count: int, state: Any = None) -> tuple[list[list[Any]], Any]:
        """The rows of some steps over all ranks, and the position of all of them."""
        found: list[list[Any]] = [[] for _ in range(count)]
        parts: dict[int, Any] = {}
        for rank in range(size):
            loader = StreamLoader(
                train,
                collate=Collator.of(train),
                micro_batch_size=2,
                gradient_accumulation_steps=4 // size,
                dp_rank=rank,
                dp_size=size,
                num_steps=count,
                state=state,
            )
            for step, batches in enumerate(loader):
                found[step] += [row for batch in batches for row in batch["input_ids"].tolist()]
            parts |= loader.state()["parts"]
        return found, {"num_parts": loader.state()["num_parts"], "parts": parts}

    whole, _ = steps(sizes[0], 9)
    seen, state = [], None
    for size in sizes:
        more, state = steps(size, 3, state)
        seen += more
    assert seen == whole
    assert state["num_parts"] == sizes[0]
    assert [len(step) for step in whole] == [8] * 9


def test_sources_functions_and_formats_of_their_own(tmp_path, tokenizer):
    (tmp_path / "records_of_a_stream.py").write_text(
        "def kept(record):\n    return None if record.get('q', '').endswith('1') else record\n"
    )
    find_beside(tmp_path / "job.yaml")
    pairs = written(tmp_path / "pairs.jsonl", [{"q": f"ask {index}", "a": "say"} for index in range(20)])
    alpaca = written(tmp_path / "alpaca.jsonl", [{"instruction": "do", "input": "", "output": "done", "q": ""}] * 20)
    sources = [
        {"path": pairs, "columns": {"prompt": "q", "completion": "a"}, "loss_on": "completion"},
        {"path": alpaca},
    ]
    prepared = stream(tmp_path, tokenizer, sources=sources, preprocess="records_of_a_stream:kept", packing="none")
    assert prepared.format == "prompt_completion"
    rows = drawn(Position(prepared.train, dp_rank=0, dp_size=1), 38)
    asked = [row for row, text in zip(rows, texts(tokenizer, rows), strict=True) if text.startswith("ask")]
    assert len(asked) == 18
    assert all((row["labels"] == -100).sum() > 2 for row in asked)
    found = preview(prepared, tokenizer, rows=2)
    assert found["streamed"]
    assert found["train"]["documents"] == 38
    assert len(found["rows"]) == 2


def test_records_that_cannot_be_used_are_named(tmp_path, tokenizer):
    late = [*records(20), {"text": 3}]
    source = written(tmp_path / "a.jsonl", [{"prompt": row["text"] and "p", "completion": "c"} for row in records(20)])
    with pytest.raises(DataError) as caught:
        drawn(Position(stream(tmp_path, tokenizer, train=written(tmp_path / "long.jsonl", [{"text": "w"}] * 20 + [{"text": "w " * 90}]), long_rows="refuse").train, dp_rank=0, dp_size=1), 30)  # fmt: skip
    assert caught.value.codes == ("DATA_LONG_ROWS",)
    assert "record at line 21" in str(caught.value)
    blank = stream(tmp_path, tokenizer, train=written(tmp_path / "blank.jsonl", [{"text": "x y"}, {"text": " "}])).train
    with pytest.raises(DataError, match="rank 1 of 2") as caught:
        Position(blank, dp_rank=1, dp_size=2).row()
    assert caught.value.codes == ("DATA_TOO_SMALL",)
    with pytest.raises(DataError) as caught:
        stream(tmp_path, tokenizer, train=written(tmp_path / "late.jsonl", late))
    assert caught.value.codes == ("DATA_TYPE",)
    broken = tmp_path / "broken.jsonl"
    broken.write_text(
        "".join(json.dumps(row) + "\n" for row in records(1500)) + "{oops\n"
    )  # past what is looked at first
    with pytest.raises(DataError) as caught:
        drawn(Position(stream(tmp_path, tokenizer, train=str(broken)).train, dp_rank=0, dp_size=1), 9000)
    assert caught.value.codes == ("DATA_JSON",)
    assert "line 1501" in str(caught.value)
    short = stream(tmp_path, tokenizer, train=source, packing="none", loss_on="completion", long_rows="drop").train
    assert Position(short, dp_rank=0, dp_size=1).row()["input_ids"].size
