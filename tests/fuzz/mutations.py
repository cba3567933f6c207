"""Changes sound inputs a little: a tree of values, then its text, then its bytes.

What is drawn at random is refused at the first look; what is nearly right gets far.
"""

from __future__ import annotations

import copy
import random
import string
from collections.abc import Callable, Sequence
from typing import Any

Tree = Any
Path = tuple[Any, ...]

WORDS = (
    "", " ", "auto", "null", "none", "None", "true", "yes", "on", "~", "~root", "~nobody-here", "/", ".", "..", "../..",
    "/dev/null", "/dev/zero", "/dev/full", "/proc/self/environ", "/proc/self/fd/0", "a" * 300, "a/" * 2000 + "a", "x" * 5000,
    "\x00", "a\x00b", "a\nb", "\t", "\x1b[31m", "\ud800", "\u202eevil", "😀", "é", "e\u0301", "名", "a b", "a,b", "a=b", "{}", "[]",
    "%s", "{0}", "{x}", "$HOME", "`id`", "; rm x", "--help", "-", "'", '"', "0", "1", "-1", "1e400", "0x10", "1_000", "٣",
    "1:30", "nan", "inf", "2024-01-01", "https://example.org/x", "C:\\x", "con", "[", "*", "?", "**", "(", "a{9999999}", "\\",
    "all", "cpu", "latest", "job.yaml", "model", "data.jsonl", "\u2028", "\ufeff", "\x85",
)  # fmt: skip
NUMBERS: tuple[Any, ...] = (
    0, 1, -1, 2, 3, 5, 7, 8, 16, 64, 100, 127, 1000, 1023, 1024, 65535, 65536, 10**6, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63,
    2**64, 10**18, 10**30, 10**310, -(2**31), -(2**63), 0.0, -0.0, 0.5, 0.1, 1.0, 1.5, 1e-3, 1e-9, 1e-38, 1e-45, 5e-324, 1e20, 1e38,
    1e39, 1e308, 0.999999999999, float("inf"), float("-inf"), float("nan"),
)  # fmt: skip


def deep(rng: random.Random, levels: int) -> Tree:
    """A value inside many lists or mappings."""
    value: Tree = rng.choice(NUMBERS[:4])
    in_lists = rng.random() < 0.5
    for _ in range(levels):
        value = [value] if in_lists else {"a": value}
    return value


def odd_value(rng: random.Random) -> Tree:
    """A value of any kind, often at the edge of one."""
    return rng.choice(
        (
            lambda: rng.choice(WORDS),
            lambda: rng.choice(WORDS),
            lambda: rng.choice(NUMBERS),
            lambda: rng.choice(NUMBERS),
            lambda: rng.choice((None, True, False)),
            lambda: rng.choice(
                ([], {}, [[]], [None], {"a": {}}, {"": ""}, [1, "a"], ["a"], [{}], {"type": "x"}, ["a", "a"])
            ),
            lambda: [rng.choice(WORDS) for _ in range(rng.randrange(3))],
            lambda: [rng.choice(NUMBERS) for _ in range(rng.randrange(3))],
            lambda: {rng.choice(WORDS): rng.choice(NUMBERS)},
            lambda: deep(rng, rng.choice((3, 30, 300))),
        )
    )()  # type: ignore[no-untyped-call]


def paths(tree: Tree, prefix: Path = ()) -> list[Path]:
    """Every place in a tree but its root."""
    found: list[Path] = []
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        found.append((*prefix, key))
        found.extend(paths(value, (*prefix, key)))
    return found


def get(tree: Tree, path: Path) -> Tree:
    """The value at a place."""
    for key in path:
        tree = tree[key]
    return tree


def put(tree: Tree, path: Path, value: Tree) -> None:
    """Sets the value at a place whose parent exists."""
    get(tree, path[:-1])[path[-1]] = value


def misspelt(rng: random.Random, word: str) -> str:
    """A word with a slip."""
    if not word:
        return "x"
    at = rng.randrange(len(word))
    return rng.choice(
        (
            word[:at] + word[at + 1 :],
            word[:at] + word[at] + word[at:],
            word[:at] + rng.choice(string.ascii_lowercase + "_.- \u0430") + word[at + 1 :],
            word.upper(),
            word.capitalize(),
            word + rng.choice(("s", " ", "_", ".x", ":")),
            word.replace("_", "-"),
            word.swapcase(),
        )
    )


def change_value(rng: random.Random, value: Tree) -> Tree:
    """A neighbour of a value: another size, type or spelling of the same."""
    if isinstance(value, bool):
        return rng.choice((not value, int(value), str(value), str(value).lower(), "yes" if value else "no", None))
    if isinstance(value, int | float):
        return rng.choice(
            (
                lambda: value + 1,
                lambda: value - 1,
                lambda: -value,
                lambda: value * 2,
                lambda: value * 3,
                lambda: value * 1000,
                lambda: value // 2 if isinstance(value, int) else value / 2,
                lambda: float(value) if abs(value) < 1e300 else 1e308,
                lambda: int(value) if abs(value) < 1e300 else 0,
                lambda: str(value),
                lambda: f" {value} ",
                lambda: f"{value}k",
                lambda: [value],
                lambda: rng.choice(NUMBERS),
            )
        )()  # type: ignore[no-untyped-call]
    if isinstance(value, str):
        return rng.choice(
            (
                lambda: misspelt(rng, value),
                lambda: rng.choice(WORDS),
                lambda: value + rng.choice(WORDS),
                lambda: rng.choice(WORDS) + value,
                lambda: value * rng.choice((2, 50)),
                lambda: [value],
                lambda: {value: value},
                lambda: {"name": value},
            )
        )()  # type: ignore[no-untyped-call]
    if isinstance(value, list):
        return rng.choice(
            (
                list,
                lambda: value + value[:1],
                lambda: value[::-1],
                lambda: [value],
                lambda: value * 20,
                lambda: dict(enumerate(map(str, value))),
                lambda: value[0] if value else None,
                lambda: [*value, None],
                lambda: [*value, odd_value(rng)],
            )
        )()  # type: ignore[no-untyped-call]
    if isinstance(value, dict):
        return rng.choice(
            (
                dict,
                lambda: [value],
                lambda: list(value.items()),
                lambda: list(value),
                lambda: {"inner": value},
                lambda: {**value, rng.choice(WORDS): odd_value(rng)},
                lambda: None,
                lambda: "section",
            )
        )()  # type: ignore[no-untyped-call]
    return odd_value(rng)


def mutate(rng: random.Random, tree: Tree, *, names: Sequence[str] = ()) -> Tree:
    """A tree with one change.

    Args:
        rng: Where it is drawn from.
        tree: Left as it is.
        names: Keys to rename others to.
    """
    made = copy.deepcopy(tree)
    places = paths(made)
    if not places:
        return odd_value(rng)
    place = rng.choice(places)
    parent, key = get(made, place[:-1]), place[-1]
    way = rng.randrange(12)
    if way < 5:
        parent[key] = change_value(rng, parent[key])
    elif way < 7:
        parent[key] = odd_value(rng)
    elif way == 7:
        del parent[key]
    elif way == 8 and isinstance(parent, dict):
        parent[misspelt(rng, str(key)) if rng.random() < 0.6 or not names else rng.choice(names)] = parent.pop(key)
    elif way == 9:  # two places change their contents
        other = rng.choice(places)
        if other[: len(place)] != place and place[: len(other)] != other:
            first, second = copy.deepcopy(get(made, place)), copy.deepcopy(get(made, other))
            put(made, place, second)
            put(made, other, first)
    elif way == 10:  # a part of the tree turns up elsewhere, too
        taken = copy.deepcopy(get(made, rng.choice(places)))
        if isinstance(parent, dict):
            parent[rng.choice(names) if names else str(rng.choice(place))] = taken
        else:
            parent.insert(rng.randrange(len(parent) + 1), taken)
    elif isinstance(parent, dict):
        parent[rng.choice(names or WORDS)] = odd_value(rng)
    else:
        parent.append(odd_value(rng))
    return made


def mutate_text(rng: random.Random, text: str, *, snippets: Sequence[str] = ()) -> str:
    """A text with one change: a line, a piece or a character of it."""
    lines = text.split("\n")
    at = rng.randrange(len(lines))
    ways: list[Callable[[], str]] = [
        lambda: "\n".join(lines[:at] + lines[at : at + 1] * 2 + lines[at + 1 :]),
        lambda: "\n".join(lines[:at] + lines[at + 1 :]),
        lambda: "\n".join(lines[:at]),
        lambda: "\n".join(lines[:at] + ["  " + line for line in lines[at : at + 1]] + lines[at + 1 :]),
        lambda: "\n".join(lines[:at] + [line.lstrip() for line in lines[at : at + 1]] + lines[at + 1 :]),
        lambda: text.replace("\n", rng.choice(("\r\n", "\r", "\n\n", "\x0b", "\u2028", "\x85"))),
        lambda: text + rng.choice(("\x00", "\x1a", "}", "]", '"', "\n---\n", "\n...\n", "\n\n\n", "\ufeff")),
        lambda: rng.choice(("\ufeff", "\ufeff\ufeff", "---\n", "%YAML 1.2\n---\n", "#!x\n", "\t", "\n\n")) + text,
        lambda: text * 2,
        lambda: "",
    ]
    position = rng.randrange(len(text) + 1)
    pieces = (
        *snippets,
        "\x00",
        "\t",
        '"',
        "'",
        ":",
        ",",
        "{",
        "}",
        "[",
        "]",
        "#",
        "\\",
        "\\u0000",
        "\\ud800",
        "\ufffd",
        "\u2028",
    )
    ways += [lambda: text[:position] + rng.choice(pieces) + text[position:]] * 5
    ways += [lambda: text[:position] + text[position + rng.choice((1, 1, 1, 2, 10)) :]] * 3
    return rng.choice(ways)()


def mutate_bytes(rng: random.Random, raw: bytes) -> bytes:
    """Bytes with one change: a bit, a piece, a length."""
    at = rng.randrange(len(raw) + 1)
    ways: list[Callable[[], bytes]] = [
        lambda: raw[:at],
        lambda: raw[at:],
        lambda: b"",
        lambda: raw + rng.randbytes(rng.choice((1, 8, 512))),
        lambda: raw[:at] + rng.randbytes(rng.choice((1, 4, 64))) + raw[at:],
        lambda: raw[:at] + raw[at + rng.choice((1, 4, 64)) :],
        lambda: raw[:at] + bytes(64) + raw[at + 64 :],
        lambda: raw[:at] + raw[at:][::-1],
        lambda: rng.randbytes(rng.choice((0, 1, 100, 5000))),
        lambda: bytes(len(raw)),
    ]
    ways += [
        lambda: raw[:at] + bytes([raw[at] ^ (1 << rng.randrange(8))]) + raw[at + 1 :] if at < len(raw) else raw
    ] * 6
    return rng.choice(ways)()


ENCODINGS = ("utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-8-sig", "latin-1", "cp1252", "utf-7", "shift_jis")


def encoded(rng: random.Random, text: str, *, share: float) -> bytes:
    """A text as bytes: mostly UTF-8, at times of another encoding or with a damaged byte."""
    raw = text.encode("utf-8", errors="surrogatepass")
    if rng.random() >= share:
        return raw
    if rng.random() < 0.4:
        return text.encode(rng.choice(ENCODINGS), errors="replace")
    return mutate_bytes(rng, raw)
