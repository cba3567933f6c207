"""What is found in a DeepSpeed configuration, wherever it stands: in a job's section or in a user's file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from toolkit.errors import Problem

# refused: DeepSpeed raises, in its parser or in its engine. meant: DeepSpeed goes on, and what is written must mean
# something else. other: DeepSpeed goes on, without it or with another value.
Outcome = Literal["refused", "meant", "other"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that DeepSpeed refuses, ignores or reads in another way than it is written.

    Args:
        code: Of docs/errors.md.
        path: Dotted path of the key as it is written.
        message: What is wrong, after the path.
        fix: What to do, without a full stop.
        outcome: What DeepSpeed does about it.
        meant: Path of the key that was probably meant, or "".
        source: Function of DeepSpeed that does it.
    """

    code: str
    path: str
    message: str
    fix: str
    outcome: Outcome
    meant: str = ""
    source: str = "deepspeed runtime/config.py"


def refused(path: str, message: str, fix: str, *, source: str) -> Finding:
    """Says that DeepSpeed raises on a value."""
    return Finding(code="DEEPSPEED_VALUE", path=path, message=message, fix=fix, outcome="refused", source=source)


def ineffective(
    path: str, because: str, fix: str, *, value: str = "", source: str = "deepspeed runtime/config.py"
) -> Finding:
    """Says that a key, or the `=value` that it has, has no effect."""
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
    """Where a configuration stands, for messages.

    Args:
        label: What messages begin with: `ds.json: `, or nothing.
        prefix: What stands before each path: `deepspeed.` in a job, else nothing.
        suggest: Says what to do instead of a mistyped key, given the one that was meant.
    """

    label: str = ""
    prefix: str = ""
    suggest: Callable[[str], str] = "Did you mean {}".format

    def problem(self, finding: Finding) -> Problem:
        """Says a finding as an error."""
        return Problem(
            code=finding.code,
            key=f"{self.prefix}{finding.path}",
            message=f"{self.label}{self.prefix}{finding.path}{finding.message}",
            fix=self.suggest(finding.meant) if finding.meant else finding.fix,
            source=finding.source,
        )
