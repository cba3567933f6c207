"""Every code has a reason and a repair, and the page has the same table."""

from __future__ import annotations

import re
import string
from pathlib import Path

from toolkit.doctor.findings import found
from toolkit.doctor.kinds import KINDS, reference

ROOT = Path(__file__).parents[2]


def test_every_kind_has_a_reason_and_a_repair() -> None:
    for kind in KINDS.values():
        assert kind.why, kind.code
        assert bool(kind.repair) == (kind.level != "ok"), kind.code
        assert re.fullmatch(r"[A-Z][A-Z_]+", kind.code)


def test_the_page_has_every_code() -> None:
    """`python -c "from toolkit.doctor.kinds import reference; print(reference())"` writes the tables."""
    assert reference() in (ROOT / "docs" / "doctor.md").read_text(encoding="utf-8")


def test_every_code_is_found_by_some_probe_and_no_other_is() -> None:
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "toolkit" / "doctor").glob("*.py")]
    named = {code for text in sources for code in re.findall(r'"([A-Z][A-Z_]{3,})"', text)}
    calls = {code for text in sources for code in re.findall(r'found\(\s*"([A-Z_]+)"', text)}
    assert calls <= KINDS.keys()
    assert all(
        sum(f'"{code}"' in text for text in sources) > 1 or code in _within(sources, code)
        for code in named & KINDS.keys()
    )


def _within(sources: list[str], code: str) -> list[str]:
    return [code for text in sources if text.count(f'"{code}"') > 1]


def test_a_repair_has_the_details_of_the_machine() -> None:
    assert found("CARD_MIG", "card 3: MIG is on", index=3).repair == "sudo nvidia-smi -i 3 -mig 0"
    unknown = found("CARD_UNKNOWN", "card 0: L20", name="l20", gib="44.5")
    assert unknown.repair == "cluster: {gpu: {name: l20, memory_gib: 44.5}}"
    for kind in KINDS.values():
        details = {name: "x" for _, name, _, _ in string.Formatter().parse(kind.repair) if name}
        assert found(kind.code, "seen", **details).level == kind.level
