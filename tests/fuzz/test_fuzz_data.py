"""Any data file is exactly the documents that are in it, or one clear refusal."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
from data_files import document_of, records_in, write_file, write_template
from fuzzing import FULL_COUNT, Case, attempt, is_chosen, run_cases
from train_jobs import write_inputs
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from toolkit.config.job import Data
from toolkit.data.chat_template import set_chat_template
from toolkit.data.formats import CONVERSATION, Tokeniser
from toolkit.data.prepare import prepare
from toolkit.data.sources import Documents, load_documents, progress_bars
from toolkit.dataset_inspection.chat_template import CHATML, read_chat_template
from toolkit.dataset_inspection.inspect import peek


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    root = tmp_path_factory.mktemp("fuzz-data")
    write_inputs(root, num_documents=10)
    with pytest.MonkeyPatch.context() as patch, progress_bars(False):
        patch.chdir(root)
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        patch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
        yield root


@pytest.fixture(scope="module")
def tokenizer(place: Path) -> PreTrainedTokenizerFast:
    made = AutoTokenizer.from_pretrained(place / "model")
    made.chat_template = read_chat_template(CHATML)
    return made


def _documents(loaded: Documents) -> list[Any]:
    rows = loaded.train.documents.to_list()
    if CONVERSATION in loaded.train.documents.column_names:
        rows = [json.loads(row[CONVERSATION]) for row in rows]
    if loaded.formats == ("text",):
        return [row["text"] for row in rows]
    if loaded.formats == ("prompt_completion",):
        return [(row["prompt"], row["completion"]) for row in rows]
    return [[{"role": turn["role"], "content": turn.get("content")} for turn in row["messages"]] for row in rows]


def _tokenised(loaded: Documents, tokenizer: Any) -> dict[str, list[list[int]]]:
    """As `datasets` does it: with what Arrow makes of a record."""
    tokeniser = Tokeniser(tokenizer=tokenizer, format=loaded.formats[0], loss_on="all")
    batch = loaded.train.documents[:]
    return tokeniser(batch, list(range(len(loaded.train.documents))))


def _data_case(case: Case, root: Path, tokenizer: Any) -> None:
    rng = case.rng
    folder = root / "files"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    path = write_file(rng, folder, case.number)
    case.outcome = "not written"
    if path is None:
        return
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    case.note("\n".join(f"{file.name}: {file.read_bytes()[:1200]!r}" for file in files))
    template = None
    if rng.random() < 0.15:
        template = str(write_template(rng, folder / "chat.jinja", read_chat_template(CHATML)))
        case.note(Path(template).read_bytes())
    data = Data(
        train=str(path), loss_on=rng.choice(("all", "all", "all", "completion", "assistant")), chat_template=template
    )
    case.outcome = "refused"
    (facts, problems), _ = attempt(lambda: peek(data))  # type: ignore[misc]
    if problems:
        assert all(problem.code.startswith("DATA_") for problem in problems)
        return
    case.outcome = "refused as it loads"
    tokenizer.chat_template = read_chat_template(CHATML)
    _, error = attempt(lambda: set_chat_template(tokenizer, data))
    if error is not None:
        case.outcome += f" {error.codes}"
        return
    template = tokenizer.chat_template
    loaded, error = attempt(lambda: load_documents(data, facts, seed=0, cache_dir=folder / "cache", template=template))
    if loaded is None:
        case.outcome += f" {error.codes}"  # type: ignore[union-attr]
        return
    tokens, error = attempt(lambda: _tokenised(loaded, tokenizer))
    if tokens is None:
        case.outcome = f"refused as it is tokenised {error.codes}"  # type: ignore[union-attr]
        return
    case.outcome = "read"
    found, inside = _documents(loaded), [document_of(record, loaded.formats[0]) for record in records_in(path)]
    if loaded.formats[0] == "text":  # what is blank is no document, and some readers leave it out
        found, inside = ([text for text in texts if text is None or text.strip()] for texts in (found, inside))
    assert found == inside
    if rng.random() < 0.2:
        _assert_prepared(case, data, tokens, tokenizer, folder)


def _assert_prepared(case: Case, data: Data, tokens: dict[str, list[list[int]]], tokenizer: Any, folder: Path) -> None:
    """Every token of every document is in the rows, once and in order."""
    made, refused = attempt(
        lambda: prepare(data, tokenizer=tokenizer, sequence_length=8, seed=0, cache_dir=folder / "cache")
    )
    if made is None:
        assert refused is not None
        assert set(refused.codes) <= {"DATA_TOO_SMALL", "DATA_NO_TARGETS", "DATA_LOSS_ON"}, refused
        return
    if data.loss_on == "all":
        every = [token for document in tokens["input_ids"] for token in document]
        rows = [token for index in range(len(made.train)) for token in made.train[index]["input_ids"].tolist()]
        assert rows == every[: len(rows)]
        assert len(every) - len(rows) < 8
    assert made.train.report.documents == sum(bool(document) for document in tokens["input_ids"])


def _run_data(place: Path, tokenizer: Any, count: int) -> dict[str, int]:
    return run_cases("data", count, lambda case: _data_case(case, place, tokenizer))


def test_data_files(place: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    outcomes = _run_data(place, tokenizer, 60)
    if not is_chosen():
        assert min(outcomes["read"], outcomes["refused"]) > 8


@pytest.mark.full
def test_data_files_in_full(place: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    _run_data(place, tokenizer, FULL_COUNT)
