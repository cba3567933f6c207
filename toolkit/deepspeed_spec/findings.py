"""Findings in a DeepSpeed configuration, in a job's section or in a user's file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from toolkit.errors import Problem

_LONGEST_PATH = 200

# refused: DeepSpeed raises, in its parser or in its engine. meant: DeepSpeed continues, and the key is surely a
# mistake for another. other: DeepSpeed continues, without it or with another value.
Outcome = Literal["refused", "meant", "other"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that DeepSpeed refuses, ignores or reads in another way than it is written.

    Args:
        code: Error code, as in docs/errors.md.
        path: Dotted path of the key as it is written.
        message: What is wrong, as words that follow the path.
        fix: Correction, without a full stop.
        outcome: What DeepSpeed does about it.
        meant: Path of the key that was probably meant, or "".
        source: Function of DeepSpeed that does so.
    """

    code: str
    path: str
    message: str
    fix: str
    outcome: Outcome
    meant: str = ""
    source: str = "deepspeed runtime/config.py"


def shortened(path: str) -> str:
    """Return a path for a message, cut if it is far longer than any of DeepSpeed."""
    return path if len(path) <= _LONGEST_PATH else f"{path[:_LONGEST_PATH]}…"


def refused(path: str, message: str, fix: str, *, source: str) -> Finding:
    """Return the finding that DeepSpeed raises on a value."""
    return Finding(code="DEEPSPEED_VALUE", path=path, message=message, fix=fix, outcome="refused", source=source)


def ineffective(
    path: str, because: str, fix: str, *, value: str = "", source: str = "deepspeed runtime/config.py"
) -> Finding:
    """Return the finding that a key, or the `=value` that it has, has no effect."""
    return Finding(
        code="DEEPSPEED_IGNORED",
        path=path,
        message=f"{value} has no effect with {because}",
        fix=fix,
        outcome="other",
        source=source,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The place of a configuration, for messages.

    Args:
        label: Beginning of messages: `ds.json: `, or nothing.
        prefix: Text before each path: `deepspeed.` in a job, else nothing.
        suggest: Function from the key that was meant to the fix of a mistyped one.
    """

    label: str = ""
    prefix: str = ""
    suggest: Callable[[str], str] = "Did you mean {}".format

    def problem(self, finding: Finding) -> Problem:
        """Return a finding as an error."""
        return Problem(
            code=finding.code,
            key=f"{self.prefix}{shortened(finding.path)}",
            message=f"{self.label}{self.prefix}{shortened(finding.path)}{finding.message}",
            fix=self.suggest(finding.meant) if finding.meant else finding.fix,
            source=finding.source,
        )
