"""Most modules have their test at the mirrored path: toolkit/a/b.py is tested by tests/a/test_b.py."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
LEAST = 0.6


def test_most_modules_have_their_test_at_the_mirrored_path() -> None:
    modules = [path.relative_to(ROOT / "toolkit") for path in (ROOT / "toolkit").rglob("*.py")]
    modules = [path for path in modules if not path.name.startswith("__")]
    lacking = [path for path in modules if not (ROOT / "tests" / path.parent / f"test_{path.name}").exists()]
    assert len(modules) > 300
    assert 1 - len(lacking) / len(modules) >= LEAST, (
        f"without a test of their own: {', '.join(map(str, sorted(lacking)))}"
    )
