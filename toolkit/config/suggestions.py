"""Suggestions of the known name that a mistyped one was meant to be."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

# Similarity (difflib's ratio) from which a name counts as a misspelling of another. `moe` and `model` have 0.75, `streaming`
# and `train` 0.71; one additional, missing or wrong letter leaves at least 0.8 in words of five letters.
SLIP = 0.78
# Length from which a prefix of a name stands for it: `overlap` for `overlap_comm`.
_MIN_BEGINNING = 5
# Length from which a word is no misspelling: comparing two takes the product of their lengths. The longest key has 44 letters.
_LONGEST = 200


def nearest(name: str, known: Iterable[str], *, n: int = 1) -> list[str]:
    """Return the known names that `name` is a misspelling of, best first; empty if there are none.

    Args:
        name: Name as written; case is ignored.
        known: Known names.
        n: Largest number of names to return.
    """
    scored = [(_likeness(name.lower(), candidate.lower()), candidate) for candidate in known]
    return _best([(score, 0.0, candidate) for score, candidate in scored], n)


def nearest_key(path: str, known: Iterable[str], *, n: int = 1) -> list[str]:
    """Return what `nearest` does for dotted paths, by their last components: a common section does not make keys similar.

    Ties are decided by the whole path.
    """
    leaf, whole = _leaf(path.lower()), path.lower()[-_LONGEST:]
    alike = [(likeness, key) for key in known if (likeness := _likeness(leaf, _leaf(key.lower())))]
    return _best([(likeness, _ratio(whole, key.lower()), key) for likeness, key in alike], n)


def _best(scored: list[tuple[float, float, str]], n: int) -> list[str]:
    ordered = sorted((entry for entry in scored if entry[0] >= SLIP), key=lambda entry: entry[:2], reverse=True)
    return [candidate for _, _, candidate in ordered[:n]]


def _likeness(word: str, candidate: str) -> float:
    """Return the similarity of two words; 0 if it is below that of a misspelling, which is mostly known by their letters alone."""
    if len(word) >= _MIN_BEGINNING and candidate.startswith(word):
        return max(_ratio(word, candidate), SLIP)
    if len(word) > _LONGEST:
        return 0.0
    matcher = difflib.SequenceMatcher(None, word, candidate, autojunk=False)
    if matcher.real_quick_ratio() < SLIP or matcher.quick_ratio() < SLIP:
        return 0.0
    ratio = matcher.ratio()
    return ratio if ratio >= SLIP else 0.0


def _leaf(path: str) -> str:
    return path.rpartition(".")[2]


def _ratio(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other, autojunk=False).ratio()
