"""One finding of the doctor: its kind, what was seen, and the repair with the details of this machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from toolkit.doctor.kinds import KINDS, Level
from toolkit.errors import one_line

# Lists of folders that programs need: one is shortened, and not deleted.
_FOLDER_LISTS = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What a probe has found.

    Args:
        code: Code of its kind.
        level: How serious it is: with an error a job could not run.
        subject: Part of the machine.
        seen: What was seen, with figures.
        why: Why it matters.
        repair: What repairs it; empty where nothing is wrong.
        source: Where the claim stands, or "".
    """

    code: str
    level: Level
    subject: str
    seen: str
    why: str
    repair: str
    source: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return the finding as the JSON object that `--json` prints."""
        return {name: getattr(self, name) for name in self.__slots__}


def found(
    code: str, seen: str, *, level: Level | None = None, why: str = "", source: str = "", **details: object
) -> Finding:
    """Return a finding of a kind.

    Args:
        code: Code of the kind.
        seen: What was seen.
        level: Its level; the kind's usual one when left out.
        why: Why it matters; the kind's reason when left out.
        source: Where the claim stands.
        details: Values for the repair.
    """
    kind = KINDS[code]
    return Finding(
        code=code,
        level=level or kind.level,
        subject=kind.subject,
        seen=one_line(seen),
        why=why or kind.why,
        repair=one_line(kind.repair.format(**details)),
        source=source,
    )


def without_variable(name: str) -> str:
    """Return the repair by which a variable that is set has no effect."""
    return f"Take the folders out of {name} that runs do not need" if name in _FOLDER_LISTS else f"unset {name}"
