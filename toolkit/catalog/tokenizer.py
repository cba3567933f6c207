"""Facts about a tokenizer, read from its files without loading it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.config.paths import is_file
from toolkit.errors import Problem, SpecError
from toolkit.io import read_json_object

FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "tokenizer.model", "vocab.txt", "spiece.model")
_KEY = "model.tokenizer"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFacts:
    """Facts about a tokenizer that plans and data checks need.

    Args:
        vocab_size: Largest token id + 1; None if only loading the tokenizer can tell (a bare SentencePiece model).
        has_chat_template: Whether `messages` can be rendered.
        chat_template: Default template; None if there is none, or only named ones.
        eos_token: EOS token; None if the tokenizer has none.
    """

    vocab_size: int | None
    has_chat_template: bool
    chat_template: str | None
    eos_token: str | None


def read_tokenizer_facts(folder: Path) -> TokenizerFacts | None:
    """Read a tokenizer's files.

    Args:
        folder: Model or tokenizer folder.
    Returns:
        The facts, or None if the folder holds no tokenizer.
    Raises:
        SpecError: PATH_UNREADABLE; TOKENIZER_INVALID, if one of its files cannot be read.
    Source:
        transformers 5, tokenization_utils_base.py: from_pretrained, save_chat_templates.
    """
    if not any(is_file(folder / name, key=_KEY) for name in FILES):
        return None
    config = _read_object(folder / "tokenizer_config.json")
    special = {**_read_object(folder / "special_tokens_map.json"), **config}
    template, other_templates = _templates(folder, config)
    return TokenizerFacts(
        vocab_size=_vocab_size(folder, config),
        has_chat_template=template is not None or other_templates,
        chat_template=template,
        eos_token=_token(special.get("eos_token")),
    )


def _read_object(path: Path) -> dict[str, Any]:
    if not is_file(path, key=_KEY):
        return {}
    try:
        return read_json_object(path)
    except (OSError, ValueError) as error:
        raise _invalid(path, str(error)) from None


def _invalid(path: Path, found: str) -> SpecError:
    return SpecError(
        Problem(
            code="TOKENIZER_INVALID",
            key=str(path),
            message=f"{path} cannot be read: {found}",
            fix="Download the tokenizer again, or set model.tokenizer to another",
        )
    )


def _token(value: Any) -> str | None:
    content = value.get("content") if isinstance(value, Mapping) else value
    return content if isinstance(content, str) and content else None


def _vocab_size(folder: Path, config: Mapping[str, Any]) -> int | None:
    path = folder / "tokenizer.json"
    try:
        if is_file(path, key=_KEY):
            return _largest_id(_ids_of_fast(_read_object(path)))
        path = folder / "vocab.json"
        if is_file(path, key=_KEY):
            added = _read_object(folder / "added_tokens.json").values()
            decoder = map(int, config.get("added_tokens_decoder", {}))
            return _largest_id([*_read_object(path).values(), *added, *decoder])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _invalid(path, f"its vocabulary has an unknown form ({error!r})") from error
    size = config.get("vocab_size")
    return size if isinstance(size, int) and not isinstance(size, bool) and size > 0 else None


def _ids_of_fast(tokenizer: Mapping[str, Any]) -> list[int]:
    vocab = tokenizer["model"]["vocab"]
    # Unigram lists [token, score] pairs whose position is the id; the others map token to id.
    ids = list(range(len(vocab))) if isinstance(vocab, list) else list(vocab.values())
    return ids + [token["id"] for token in tokenizer.get("added_tokens") or ()]


def _largest_id(ids: Iterable[int]) -> int | None:
    return max(ids, default=-1) + 1 or None


def template_fault(template: Any) -> str | None:
    """Return why a tokenizer's `chat_template` is invalid: not a string, a set of named strings or None; else None."""
    named = template if isinstance(template, Mapping) else {"chat_template": "" if template is None else template}
    wrong = [f"{name} is a {type(text).__name__}" for name, text in named.items() if not isinstance(text, str)]
    return f"of its chat templates {', '.join(wrong)}, not a string" if wrong else None


def _templates(folder: Path, config: Mapping[str, Any]) -> tuple[str | None, bool]:
    """Return the default chat template, and whether there are named ones."""
    others = any((folder / "additional_chat_templates").glob("*.jinja"))
    path = folder / "chat_template.jinja"
    if is_file(path, key=_KEY):
        try:
            return path.read_text(encoding="utf-8"), others
        except (OSError, ValueError) as error:
            raise _invalid(path, str(error)) from error
    declared = config.get("chat_template")
    if declared is None:  # of processors that were saved before transformers 5
        declared = _read_object(folder / "chat_template.json").get("chat_template")
    if isinstance(declared, str):
        return declared or None, others
    try:
        pairs = (
            declared.items() if isinstance(declared, Mapping) else ((i["name"], i["template"]) for i in declared or ())
        )
        named = dict(pairs)
        if fault := template_fault(named):
            raise TypeError(fault)
    except (TypeError, KeyError) as error:
        found = "chat_template is neither a string nor a list of objects with name and template, both strings"
        raise _invalid(folder / "tokenizer_config.json", found) from error
    return named.get("default"), others or bool(named)
