"""Nested mappings, as JSON has them, by dotted path."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from toolkit.deepspeed_spec.fields import is_auto

# DeepSpeed has 350 keys, in five levels at most.
MAX_KEYS, MAX_LEVELS = 1000, 32


def size_fault(config: Mapping[str, Any]) -> str | None:
    """Return what is wrong with a configuration of far more keys or levels than DeepSpeed has; None if it is of its size."""
    num_keys = 0
    left: list[tuple[Any, int]] = [(config, 1)]
    while left:
        value, level = left.pop()
        if level > MAX_LEVELS:
            return f"is nested deeper than {MAX_LEVELS} levels"
        if isinstance(value, Mapping):
            num_keys += len(value)
            if num_keys > MAX_KEYS:
                return f"has more than {MAX_KEYS:,} keys"
        inner = value.values() if isinstance(value, Mapping) else value
        left += [(each, level + 1) for each in inner if isinstance(each, Mapping | list | tuple)]
    return None


def paths(section: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Return every dotted path of a mapping, sections included."""
    for key, value in section.items():
        yield f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from paths(value, f"{prefix}{key}.")


def leaf_values(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Return the values of a mapping that are not sections, each with its dotted path."""
    for key, value in section.items():
        if isinstance(value, Mapping):
            yield from leaf_values(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def auto_paths(section: Mapping[str, Any]) -> set[str]:
    """Return the dotted paths of all values that are "auto"."""
    return {path for path, value in leaf_values(section) if is_auto(value)}


def has_path(section: Mapping[str, Any], path: str) -> bool:
    """Return whether a mapping has a key at a dotted path, whatever its value."""
    *parents, leaf = path.split(".")
    return leaf in (subsection(section, ".".join(parents)) if parents else section)


def lookup(section: Mapping[str, Any], path: str) -> Any:
    """Return the value at a dotted path, None where there is none."""
    node: Any = section
    for part in path.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return None
        node = node[part]
    return node


def subsection(section: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    """Return the section at a dotted path, an empty one where there is none."""
    value = lookup(section, path)
    return value if isinstance(value, Mapping) else {}


def is_inside(path: str, roots: Iterable[str]) -> bool:
    """Return whether a dotted path is one of `roots` or lies below one."""
    return any(path == root or path.startswith(f"{root}.") for root in roots)


def without(section: Mapping[str, Any], left_out: Iterable[str], prefix: str = "") -> dict[str, Any]:
    """Return a copy of a mapping without the values at dotted paths."""
    roots = frozenset(left_out)
    return {
        key: without(value, roots, f"{prefix}{key}.") if isinstance(value, Mapping) else value
        for key, value in section.items()
        if f"{prefix}{key}" not in roots
    }


def with_value(section: Mapping[str, Any], path: str, value: Any) -> dict[str, Any]:
    """Return a copy of a mapping with a value at a dotted path, with missing sections created."""
    key, _, rest = path.partition(".")
    return {**section, key: with_value(subsection(section, key), rest, value) if rest else value}
