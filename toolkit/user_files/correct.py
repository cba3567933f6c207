"""Corrected copies of files, written beside the originals: never over them."""

from __future__ import annotations

import io
import json
import os
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from ruamel.yaml import YAML
from ruamel.yaml.error import MantissaNoDotYAML1_1Warning
from ruamel.yaml.scalarstring import SingleQuotedScalarString

from toolkit.credentials import masked, masked_text
from toolkit.user_files.check import check_read
from toolkit.user_files.json_edit import is_same, with_value, without
from toolkit.user_files.read import UserFile, read_text
from toolkit.user_files.report import Edit, Found, Report
from toolkit.user_files.setup import located, references

# Rounds of correcting and checking again: a correction may bring another fault to light.
_MAX_ROUNDS = 4
# Words that YAML 1.1 reads as true or false unless they are quoted.
_YAML_WORDS = frozenset({"yes", "no", "on", "off", "true", "false", "y", "n", "null", "~", ""})


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change that a corrected copy has.

    Args:
        file: Name of the file.
        key: Dotted path of the key; `line 3` in a file of lines.
        old: What the file has there, as JSON; "" if it has nothing.
        new: What its copy has; "" if it has nothing.
        reason: The fault that it corrects.
    """

    file: str
    key: str
    old: str
    new: str
    reason: str

    def __str__(self) -> str:
        if not self.new:
            what = f"deleted, was {self.old}" if self.old else "deleted"
        else:
            what = f"{self.old} → {self.new}" if self.old else f"added: {self.new}"
        return f"{self.file}: {self.key}: {what} ({self.reason})"


def corrected(report: Report) -> tuple[dict[str, str], Report, tuple[Change, ...]]:
    """Return the corrected text of each file that changes, by its name, the report on the files as corrected, and each change.

    Corrections are made and the files checked again until nothing is left that can be corrected. A correction after which
    there are more errors than before is not made.
    """
    files, found = list(report.files), report
    changes: list[Change] = []
    for _ in range(_MAX_ROUNDS):
        chosen = _edits(found.found)
        changed = [_with_edits(file, [edit for edit, _ in chosen.get(file.name, [])]) for file in files]
        if [file.text for file in changed] == [file.text for file in files]:
            break
        after = check_read(changed)
        if after.count("error") > found.count("error"):
            break
        for old, new in zip(files, changed, strict=True):
            if old.text != new.text:
                changes += [_change(old, edit, each) for edit, each in chosen[old.name]]
        files, found = changed, after
    texts = {
        new.name: new.text
        for old, new in zip(report.files, files, strict=True)
        if new.text != old.text and old.path is not None
    }
    return texts, found, tuple(changes)


def corrected_copies(report: Report, texts: Mapping[str, str]) -> dict[str, tuple[Path, str]]:
    """Return the path and text of each corrected copy by the name of its original: `ds.fixed.json` beside `ds.json`.

    A file that names another which is corrected names its corrected copy. Nothing is written.
    """
    targets = {file.name: _free(file.path) for file in report.files if file.path is not None and file.name in texts}
    pointing = {
        file.name: edits
        for file in report.files
        if file.path is not None and (edits := list(_pointers(file, report.files, targets)))
    }
    for file in report.files:
        if file.path is not None and file.name in pointing and file.name not in targets:
            targets[file.name] = _free(file.path)
    copies: dict[str, tuple[Path, str]] = {}
    for file in report.files:
        if file.name not in targets:
            continue
        text = texts.get(file.name, file.text)
        if pointing.get(file.name):
            text = _with_edits(read_text(text, name=file.name, path=file.path), pointing[file.name]).text
        copies[file.name] = targets[file.name], text
    return copies


def _pointers(file: UserFile, files: Sequence[UserFile], targets: Mapping[str, Path]) -> Iterable[Edit]:
    if file.kind not in ("accelerate", "trainer-arguments"):
        return
    for reference in references(file):
        path = located(reference)
        for other in files:
            if path is not None and other.path is not None and other.name in targets and path.samefile(other.path):
                target = str(Path(reference.target).with_name(targets[other.name].name))
                yield Edit(file=file.name, path=tuple(reference.key.split(".")), action="set", value=target)


def _free(path: Path) -> Path:
    """Return a name beside a file that no file has: `ds.fixed.json`, then `ds.fixed-2.json`."""
    stem, suffix = (path.name, "") if path.name.startswith(".") else (path.stem, path.suffix)
    names = (f"{stem}.fixed{'' if number == 1 else f'-{number}'}{suffix}" for number in range(1, 10_000))
    return next(target for name in names if not os.path.lexists(target := path.with_name(name)))


def _change(file: UserFile, edit: Edit, found: Found) -> Change:
    if edit.action == "line":
        number = int(edit.path[0])
        old, key = file.text.splitlines()[number - 1], f"line {number}"
        return Change(file=file.name, key=key, old=masked_text(old), new="", reason=found.message)
    node: Any = file.keys
    for part in edit.path:
        node = node.get(part) if isinstance(node, Mapping) else None
    key = ".".join(edit.path)
    values = [
        "" if value is None else json.dumps(masked(value, name=key), ensure_ascii=False, default=str)
        for value in (node, edit.value)
    ]
    new = values[1] if edit.action == "set" else ""
    return Change(file=file.name, key=key, old=values[0], new=new, reason=found.message)


def _edits(found: Iterable[Found]) -> dict[str, list[tuple[Edit, Found]]]:
    """Return the changes of each file, each with its fault; of two that set the same key the first counts."""
    edits: dict[str, list[tuple[Edit, Found]]] = {}
    taken: set[tuple[str, tuple[str, ...]]] = set()
    for each in found:
        own = {(edit.file, edit.path) for edit in each.edits}
        if taken.intersection(own) or each.level == "note":
            continue
        taken |= own
        for edit in each.edits:
            edits.setdefault(edit.file, []).append((edit, each))
    return edits


def _with_edits(file: UserFile, edits: Sequence[Edit]) -> UserFile:
    if not edits or file.path is None:
        return file
    if file.kind in ("hostfile", "deepspeed-env"):
        lines = {int(edit.path[0]) for edit in edits if edit.action == "line"}
        rows = file.text.splitlines(keepends=True)
        text = "".join(row for number, row in enumerate(rows, start=1) if number not in lines)
    elif file.kind in ("command-line", "sbatch"):
        return file
    elif file.text.lstrip().startswith("{"):
        text = _edited_json(file.text, edits)
    else:
        text = _edited_yaml(file.text, edits)
    return read_text(text, name=file.name, path=file.path)


def _edited_json(text: str, edits: Sequence[Edit]) -> str:
    document, kept = json.loads(text), text
    for edit in edits:
        _apply(document, edit)
        kept = without(kept, edit.path) if edit.action == "remove" else with_value(kept, edit.path, edit.value)
    if is_same(kept, document):
        return kept
    found = re.search(r"\n([ \t]+)\"", text)
    return json.dumps(document, indent=found.group(1) if found else 2, ensure_ascii=False) + "\n"


def _edited_yaml(text: str, edits: Sequence[Edit]) -> str:
    editor = YAML(typ="rt")
    editor.version = (1, 1)  # the version that PyYAML reads, in which `no` is false
    editor.preserve_quotes = True
    editor.width = 4096
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MantissaNoDotYAML1_1Warning)  # it becomes a number only where an edit says so
        document = editor.load(text)
    for edit in edits:
        _apply(document, edit, quotes=True)
    written = io.StringIO()
    editor.dump(document, written)
    kept = written.getvalue()
    if not text.startswith("%YAML"):
        kept = re.sub(r"\A%YAML 1\.1\n---\n", "", kept)
    wanted = yaml.safe_load(text)
    for edit in edits:
        _apply(wanted, edit)
    return kept if yaml.safe_load(kept) == wanted else text  # rather no correction than another value


def _apply(document: Any, edit: Edit, *, quotes: bool = False) -> None:
    *parents, leaf = edit.path
    node = document
    for part in parents:
        if not isinstance(node, Mapping):
            return
        if node.get(part) is None and edit.action == "set":
            node[part] = {}  # type: ignore[index]
        node = node.get(part)
    if not isinstance(node, dict):
        return
    if edit.action == "remove":
        node.pop(leaf, None)
        return
    value = edit.value
    if quotes and isinstance(value, str) and value.lower() in _YAML_WORDS:
        value = SingleQuotedScalarString(value)
    node[leaf] = value
