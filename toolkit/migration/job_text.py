"""The text of a migrated job: YAML whose comments say where each value came from."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from toolkit.config.schema import known_keys
from toolkit.config.yaml_text import parse_value
from toolkit.errors import SpecError, one_line
from toolkit.migration.draft import Draft, Value
from toolkit.migration.outcomes import Entry, Leaf, plain

_COLUMN = 56  # where comments begin, at the earliest
_WIDTH = 140
_MOST_LEAVES = 2  # keys that a comment names


def job_text(draft: Draft, entries: tuple[Entry, ...], *, files: tuple[tuple[str, str], ...]) -> str:
    """Return a job as YAML.

    Args:
        draft: Its values.
        entries: What became of each key, of which those that are not carried are listed at the end.
        files: Files that it came from, each with its tool.
    """
    single = len(files) == 1
    lines = [f"# Migrated from {' and '.join(f'{one_line(name)} ({tool})' for name, tool in files)}."]
    order = {key: at for at, key in enumerate(known_keys())}
    values = draft.written()
    ranked = sorted(
        values, key=lambda key: (order.get(key, order.get(key.partition(".")[0], len(order))), key.count(".") == 0)
    )
    lines += _section({key: values[key] for key in ranked}, indent=0, single=single)
    lost = [entry for entry in entries if entry.outcome == "not carried"]
    if lost:
        lines += ["", "# Not carried:"]
        lines += [f"#   {_place(entry.leaf, single=single)}: {entry.reason}"[:_WIDTH] for entry in lost]
    return "\n".join(lines) + "\n"


def _section(values: Mapping[str, Value], *, indent: int, single: bool) -> Iterator[str]:
    done: set[str] = set()
    pad = "  " * indent
    for key in values:
        name, dot, _ = key.partition(".")
        if name in done:
            continue
        done.add(name)
        if not dot:
            yield from _line(pad, name, values[key], single=single)
            continue
        yield f"{pad}{name}:"
        inside = {each[len(name) + 1 :]: value for each, value in values.items() if each.startswith(f"{name}.")}
        yield from _section(inside, indent=indent + 1, single=single)


def _line(pad: str, name: str, value: Value, *, single: bool) -> Iterator[str]:
    said = comment_of(value, single=single)
    if isinstance(value.value, list) and any(isinstance(item, Mapping) for item in value.value):
        yield _commented(f"{pad}{name}:", said)
        yield from (f"{pad}  - {scalar(item)}" for item in value.value)
    else:
        yield _commented(f"{pad}{name}: {scalar(value.value)}", said)


def _commented(text: str, comment: str) -> str:
    return f"{text:<{_COLUMN}}  # {comment}" if comment else text


def comment_of(value: Value, *, single: bool) -> str:
    """Return where a value came from, without the file if there is one alone."""
    leaves = value.leaves
    names = [_place(leaf, single=single) for leaf in leaves[:_MOST_LEAVES]]
    more = [f"{len(leaves) - _MOST_LEAVES} more"] if len(leaves) > _MOST_LEAVES else []
    return one_line("; ".join(part for part in (", ".join([*names, *more]), value.why) if part))


def _place(leaf: Leaf, *, single: bool) -> str:
    return one_line(
        f"{leaf.path} (line {leaf.line})" if single and leaf.line is not None else f"{leaf.path} ({leaf.place})"
    )


def scalar(value: Any) -> str:
    """Return a value as YAML in one line, which is read back as it is."""
    text = yaml.safe_dump(plain(value), default_flow_style=True, width=10**9, allow_unicode=True, sort_keys=False)
    text = text.removesuffix("\n").removesuffix("\n...").strip()
    try:
        same = "\n" not in text and parse_value(text, name="a value") == plain(value)
    except (SpecError, yaml.YAMLError, ValueError):
        same = False
    return text if same else json.dumps(plain(value), ensure_ascii=False)
