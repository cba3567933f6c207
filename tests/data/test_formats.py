"""Tokenising: exact boundaries, end marks and targets for each format."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import processors

from toolkit.data.formats import Tokeniser, check_tokenizer
from toolkit.errors import DataError


def run(tokenizer: Any, format_: Any, loss_on: str, *records: dict[str, Any]) -> list[tuple[list[int], list[int]]]:
    batch = {name: [record[name] for record in records] for name in records[0]}
    tokeniser = Tokeniser(tokenizer=tokenizer, format=format_, loss_on=loss_on)
    out = tokeniser(batch, list(range(len(records))))
    return list(zip(out["input_ids"], out["targets"], strict=True))


def counted(tokenizer: Any, document: tuple[list[int], list[int]]) -> str:
    ids, targets = document
    return tokenizer.decode([token for token, target in zip(ids, targets, strict=True) if target])


def test_text_ends_with_eos_and_blank_text_is_no_document(tokenizer: Any) -> None:
    first, second = run(tokenizer, "text", "all", {"text": "a list of names"}, {"text": " \n"})
    assert first == ([*tokenizer("a list of names").input_ids, tokenizer.eos_token_id], [1] * len(first[0]))
    assert second == ([], [])


def test_marks_that_the_tokenizer_adds_are_not_doubled(tokenizer: Any) -> None:
    bos, eos = tokenizer.convert_tokens_to_ids("<bos>"), tokenizer.eos_token_id
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", bos), ("<eos>", eos)]
    )
    plain = tokenizer("a list", add_special_tokens=False).input_ids
    assert run(tokenizer, "text", "all", {"text": "a list"})[0][0] == [bos, *plain, eos]
    ids, targets = run(tokenizer, "prompt_completion", "completion", {"prompt": "a list", "completion": " of x"})[0]
    assert (ids[0], ids[-1], ids.count(bos), ids.count(eos)) == (bos, eos, 1, 1)
    assert targets == [0] * (1 + len(plain)) + [1] * (len(ids) - 1 - len(plain))


@pytest.mark.parametrize(
    ("prompt", "completion"), [("Name a", " list"), ("Name a li", "st of x"), ("", "list"), ("a\n", "\nb")]
)
def test_completion_only_counts_the_completion_exactly(tokenizer: Any, prompt: str, completion: str) -> None:
    record = {"prompt": prompt, "completion": completion}
    ids, targets = run(tokenizer, "prompt_completion", "completion", record)[0]
    prompt_ids = tokenizer(prompt).input_ids
    assert ids[: len(prompt_ids)] == prompt_ids
    assert targets == [0] * len(prompt_ids) + [1] * (len(ids) - len(prompt_ids))
    assert counted(tokenizer, (ids, targets)) == completion + "<eos>"
    assert tokenizer.decode(ids) == prompt + completion + "<eos>"
    on_all = run(tokenizer, "prompt_completion", "all", record)[0]
    assert on_all == (ids, [1] * len(ids))


def test_a_merge_over_the_boundary_is_split(tokenizer: Any) -> None:
    whole = tokenizer("the list").input_ids
    assert whole[: len(tokenizer("th").input_ids)] != tokenizer("th").input_ids  # otherwise this test shows nothing
    ids, _ = run(tokenizer, "prompt_completion", "completion", {"prompt": "th", "completion": "e list"})[0]
    assert ids == [*tokenizer("th").input_ids, *tokenizer("e list").input_ids, tokenizer.eos_token_id]


def test_empty_completion_is_no_document(tokenizer: Any) -> None:
    assert run(tokenizer, "prompt_completion", "all", {"prompt": "a", "completion": ""}) == [([], [])]


def test_a_faulty_record_is_named(tokenizer: Any) -> None:
    with pytest.raises(DataError, match="record 2 of the data: text is absent or null") as caught:
        run(tokenizer, "text", "all", {"text": "a"}, {"text": None})
    assert caught.value.codes == ("DATA_TYPE",)


@pytest.mark.parametrize(
    ("format_", "loss_on", "codes"),
    [
        ("text", "all", ("DATA_NO_EOS",)),
        ("text", "completion", ("DATA_LOSS_ON", "DATA_NO_EOS")),
        ("messages", "all", ("DATA_NO_CHAT_TEMPLATE",)),
    ],
)
def test_tokenizers_that_lack_something(tokenizer: Any, format_: Any, loss_on: str, codes: tuple[str, ...]) -> None:
    tokenizer.eos_token = None
    with pytest.raises(DataError) as caught:
        check_tokenizer(tokenizer, format_=format_, loss_on=loss_on)
    assert caught.value.codes == codes


def test_a_chat_template_that_is_no_text(tokenizer: Any) -> None:
    tokenizer.chat_template = {"default": 5}
    with pytest.raises(DataError) as caught:
        check_tokenizer(tokenizer, format_="messages", loss_on="all")
    assert caught.value.codes == ("TOKENIZER_INVALID",)
    check_tokenizer(tokenizer, format_="text", loss_on="all")


def test_tokens_are_taken_as_they_are(tokenizer: Any) -> None:
    plain = run(tokenizer, "tokens", "all", {"input_ids": [5, 6, 7]}, {"input_ids": []})
    assert plain == [([5, 6, 7], [1, 1, 1]), ([], [])]
    labelled = {"input_ids": [5, 6, 7, 1], "labels": [-100, 6, 7, -100], "attention_mask": [1, 1, 1, 0]}
    assert run(tokenizer, "tokens", "all", labelled) == [([5, 6, 7], [0, 1, 1])]


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ({"input_ids": "5 6"}, "input_ids is a string, not a list"),
        ({"input_ids": [5, True]}, "an item that is not a whole number"),
        ({"input_ids": [5, -1]}, "a number that is no token id"),
        ({"input_ids": [5, 6], "labels": [6]}, "labels is not a list of as many"),
        ({"input_ids": [5, 6], "labels": [6, -100]}, "labels are not shifted"),
        ({"input_ids": [5, 6], "attention_mask": [1, 2]}, r"attention_mask\[1\] is 2"),
    ],
)
def test_tokens_that_are_none(tokenizer: Any, record: dict[str, Any], says: str) -> None:
    with pytest.raises(DataError, match=says):
        run(tokenizer, "tokens", "all", record)
