"""Tokenizer facts against tokenizers that the libraries really save."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from toolkit.catalog.tokenizer import read_tokenizer_facts
from toolkit.errors import SpecError

PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"
MARKED = "{% for m in messages %}{%- generation -%}{{ m.content }}{% endgeneration %}{% endfor %}"


def tokenizer(kind: str = "level") -> PreTrainedTokenizerFast:
    model = {
        "level": lambda: models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"),
        "bpe": lambda: models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]),
        "unigram": lambda: models.Unigram([("a", -1.0), ("b", -2.0), ("c", -3.0)], 0, False),
    }[kind]()
    fast = Tokenizer(model)
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="</s>", pad_token="<pad>")


@pytest.mark.parametrize("kind", ["level", "bpe", "unigram"])
def test_vocabulary_and_marks_equal_the_loaded_tokenizer(tmp_path: Path, kind: str) -> None:
    tokenizer(kind).save_pretrained(tmp_path)
    loaded = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    facts = read_tokenizer_facts(tmp_path)
    assert facts is not None
    assert facts.vocab_size == max(loaded.get_vocab().values()) + 1 == 5
    assert facts.eos_token == loaded.eos_token == "</s>"
    assert not facts.has_chat_template


def test_ids_with_holes_reach_the_largest(tmp_path: Path) -> None:
    tokenizer().save_pretrained(tmp_path)
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text())
    content["added_tokens"][-1]["id"] = 99
    path.write_text(json.dumps(content))
    facts = read_tokenizer_facts(tmp_path)
    assert facts is not None
    assert facts.vocab_size == 100


def test_a_saved_chat_template_is_found(tmp_path: Path) -> None:
    made = tokenizer()
    made.chat_template = MARKED
    made.save_pretrained(tmp_path)
    assert (tmp_path / "chat_template.jinja").is_file()
    facts = read_tokenizer_facts(tmp_path)
    assert facts is not None
    assert (facts.has_chat_template, facts.chat_template) == (True, MARKED)


def test_several_templates_are_judged_by_the_default(tmp_path: Path) -> None:
    made = tokenizer()
    made.chat_template = {"default": PLAIN, "tool_use": MARKED}
    made.save_pretrained(tmp_path)
    facts = read_tokenizer_facts(tmp_path)
    assert facts is not None
    assert (facts.has_chat_template, facts.chat_template) == (True, PLAIN)


@pytest.mark.parametrize(
    ("declared", "expected"),
    [
        (MARKED, (True, MARKED)),
        ([{"name": "default", "template": MARKED}], (True, MARKED)),
        ([{"name": "tool_use", "template": MARKED}], (True, None)),
        (None, (False, None)),
    ],
)
def test_templates_of_the_old_form(tmp_path: Path, declared: object, expected: tuple[bool, str | None]) -> None:
    content = {"chat_template": declared, "eos_token": {"content": "<eos>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(content))
    facts = read_tokenizer_facts(tmp_path)
    assert facts is not None
    assert (facts.has_chat_template, facts.chat_template) == expected
    assert (facts.eos_token, facts.vocab_size) == ("<eos>", None)


def test_a_slow_vocabulary_with_added_tokens(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text(json.dumps({"a": 0, "b": 1}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": {"2": {"content": "<x>"}}}))
    facts = read_tokenizer_facts(tmp_path)
    assert facts is not None
    assert facts.vocab_size == 3


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert read_tokenizer_facts(tmp_path) is None


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"model": {"vocab": 3}}', '{"model": {"vocab": {"a": "b"}}}'])
def test_a_damaged_tokenizer_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(SpecError, match=r"tokenizer\.json.*TOKENIZER_INVALID"):
        read_tokenizer_facts(tmp_path)


@pytest.mark.parametrize(
    "declared", [5, [5], ["a"], [{"name": "default"}], {"default": 5}, [{"name": "default", "template": None}]]
)
def test_a_chat_template_of_no_known_form_is_named(tmp_path: Path, declared: object) -> None:
    tokenizer().save_pretrained(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": declared}))
    with pytest.raises(SpecError, match=r"chat_template.*TOKENIZER_INVALID"):
        read_tokenizer_facts(tmp_path)


def test_a_tokenizer_nested_too_deep(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("[" * 100_000)
    with pytest.raises(SpecError, match=r"nested too deep.*TOKENIZER_INVALID"):
        read_tokenizer_facts(tmp_path)
