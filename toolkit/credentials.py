"""Tokens, keys and passwords in what users write: found by their names and by their looks, and masked in whatever is printed or kept."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

MASK = "********"

# Anywhere in a name, also grown together with other words: PGPASSWORD, clientSecret, OPENAI_APIKEY.
_ANYWHERE = re.compile(
    r"(?i)passw|passphrase|secret|credential|webhook|authorization|(?:api|access|private)_?key|(?:api|access|auth)_?token"
)
# Beside `token` in names of the vocabulary, of counts and of layers' settings, which hold no credentials.
_OF_TEXTS = frozenset(
    {
        *("id", "ids", "index", "indices", "type", "types", "pad", "bos", "eos", "unk", "sep", "cls", "mask", "special", "fake", "split"),
        *("image", "video", "audio", "vision", "start", "end", "begin", "stop", "add", "added", "new", "per", "level", "num", "max", "min"),
        *("count", "length", "mean", "weight", "loss", "prob", "probs", "class", "latency", "lr", "drop", "dropping", "dropout"),
        *("dispatcher", "embedding", "embeddings", "trainable"),
    }
)  # fmt: skip
# Right before `key` in names without capitals, where `key` alone is a column or an attention's key.
_OF_SERVICES = frozenset(
    {
        *("api", "access", "auth", "account", "ssh", "ssl", "tls", "rsa", "license", "signing", "encryption", "storage", "service"),
        *("aws", "gcp", "azure", "openai", "anthropic", "hf", "hub", "wandb", "comet", "neptune", "clearml", "swanlab"),
    }
)  # fmt: skip
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
# user:password@ or, of http, token@ in front of a host; a port before a later @ is none. Lengths are bounded, and so is the time.
_URL_USER = re.compile(
    r"://(?:(?P<user>[^\s/?#@:]{0,200}):(?!\d+[/?#])[^\s@]{1,200}@(?:[^\s/?#@]{0,200}@)*"
    r"|(?P<only>(?<=http://|ttps://)[^\s/?#@:]{1,200})@)"
)
_SIGN = re.compile(
    r"""(?<![\w.-])(?P<quote>["']?)(?P<name>-{0,2}[A-Za-z_][\w.-]{0,200})(?P=quote)(?:=|(?<=["'])\s{0,9}:\s*|(?<=[A-Z]):\s*)"""
)
_OPTION = re.compile(r"(?<![\w.-])(?P<name>--?[A-Za-z][\w-]{0,200})\s+(?=[^\s-])")
_VALUE = re.compile(r""""(?:[^"\\]|\\.)*"|'[^']*'|[^\s,;&"'}\]]+""")
_PLAIN = frozenset({"true", "false", "null", "True", "False", "None", "…"})
# How services spell their tokens: Hugging Face, GitHub, GitLab, OpenAI and others, AWS, Slack, NVIDIA.
_LOOKS = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|sk-[\w-]{20,}|AKIA[A-Z0-9]{16}"
    r"|xox[abprs]-[\w-]{10,}|nvapi-[\w-]{20,})"
)


def is_credential(name: str) -> bool:
    """Return whether the value of a variable, an option or a key with this name is nobody else's to read.

    >>> [is_credential(name) for name in ("AWS_SESSION_TOKEN", "--token", "wandb_api_key", "PGPASSWORD", "MY_KEY")]
    [True, True, True, True, True]
    >>> [is_credential(name) for name in ("tokenizer", "max_tokens", "pad_token", "key", "num_key_value_heads", "PWD")]
    [False, False, False, False, False, False]
    """
    if _ANYWHERE.search(name.replace("-", "_")):
        return True
    words = _WORD.findall(name)
    return any(_is_credential_word(words, at) for at in range(len(words)))


def masked(value: Any, *, name: str = "") -> Any:
    """Return a value as reports may repeat it, with a mask in place of each credential.

    Args:
        value: A value of a file, of a command line or of the environment; lists and sections are masked inside.
        name: Its name. Of one that names a credential the whole value is masked, but for truth values and what is empty.
    """
    if isinstance(value, Mapping):
        return {key: masked(item, name=f"{name}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([masked(item, name=name) for item in value])
    if value is None or isinstance(value, bool) or value == "":
        return value
    if is_credential(name):
        return MASK
    return _masked_behind(_OPTION, masked_text(value)) if isinstance(value, str) else value


def masked_text(text: str, *hidden: Any) -> str:
    """Return a sentence or a line of a file with a mask in place of credentials: in URLs, behind names, by their looks.

    Args:
        text: The text.
        hidden: Values that are credentials, wherever they stand in it.
    """
    for value in sorted({str(each) for each in hidden if str(each).strip()}, key=len, reverse=True):
        text = re.sub(rf"(?<!\w){re.escape(value)}(?!\w)", MASK, text)
    text = _URL_USER.sub(_masked_user, text)
    return _LOOKS.sub(MASK, _masked_behind(_SIGN, text))


def _is_credential_word(words: list[str], at: int) -> bool:
    word = words[at].lower()
    beside = {each.lower() for each in words[max(at - 1, 0) : at + 2]} - {word}
    if word.endswith("token"):
        return not beside & _OF_TEXTS
    if word.endswith("key") and words[at].isupper():
        return True
    if word == "key":
        return words[at - 1].lower() in _OF_SERVICES if at else False
    return (word == "pass" and words[at].isupper()) or (word == "pwd" and len(words) > 1)


def _masked_user(found: re.Match[str]) -> str:
    user = "" if found["user"] is None else f"{found['user']}:"
    return f"://{user}{MASK}@"


def _masked_behind(names: re.Pattern[str], text: str) -> str:
    """Return a text with a mask for each value behind the name of a credential."""
    parts, at = list[str](), 0
    while (found := names.search(text, at)) is not None:
        parts.append(text[at : found.end()])
        at = found.end()
        value = _VALUE.match(text, at) if is_credential(found["name"]) else None
        if value is not None and value.group() not in _PLAIN:
            parts.append(MASK)
            at = value.end()
    return "".join([*parts, text[at:]])
