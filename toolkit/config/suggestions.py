"""Which known name a mistyped one was meant to be."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

# Similarity (difflib's ratio) from which a name is a slip of another one and no word of its own. `moe` and `model` have
# 0.75, `streaming` and `train` 0.71; a letter too many, missing or wrong leaves 0.8 and more of words of five letters.
SLIP = 0.78
# Letters from which the beginning of a name stands for it: `overlap` for `overlap_comm`.
_MIN_BEGINNING = 5


def nearest(name: str, known: Iterable[str], *, n: int = 1) -> list[str]:
    """Return the known names that `name` is a slip of, best first; none when it is merely another word.

    Args:
        name: As written; upper and lower case are the same.
        known: The names to choose from.
        n: How many at most.
    """
    scored = [(_likeness(name.lower(), candidate.lower()), candidate) for candidate in known]
    return _best([(score, 0.0, candidate) for score, candidate in scored], n)


def nearest_key(path: str, known: Iterable[str], *, n: int = 1) -> list[str]:
    """The same for dotted paths: the last word decides, since a section that two keys share does not make them alike.

    Among equals the whole path does.
    """
    leaf, whole = _leaf(path.lower()), path.lower()
    return _best([(_likeness(leaf, _leaf(key.lower())), _ratio(whole, key.lower()), key) for key in known], n)


def _best(scored: list[tuple[float, float, str]], n: int) -> list[str]:
    ordered = sorted((entry for entry in scored if entry[0] >= SLIP), key=lambda entry: entry[:2], reverse=True)
    return [candidate for _, _, candidate in ordered[:n]]


def _likeness(word: str, candidate: str) -> float:
    begins = len(word) >= _MIN_BEGINNING and candidate.startswith(word)
    return max(_ratio(word, candidate), SLIP if begins else 0.0)


def _leaf(path: str) -> str:
    return path.rpartition(".")[2]


def _ratio(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other, autojunk=False).ratio()
