"""What an error looks like, whatever the value holds that it repeats."""

from __future__ import annotations

import pytest

from toolkit.errors import Problem, first_line


def test_what_no_one_would_read_to_its_end_is_shortened() -> None:
    key = "k" * 1_000_000
    problem = Problem(code="KEY_UNKNOWN", key=key, message=f"{key} is unknown", fix="Remove it")
    assert len(problem.key) < 5000
    assert str(problem).startswith("kkk")
    assert "k … k" in str(problem)
    assert str(problem).endswith("k is unknown. Remove it. [KEY_UNKNOWN]")
    assert len(str(problem)) < 5000


@pytest.mark.parametrize(("text", "said"), [("\n no.\nand why", "no"), (" ", "ValueError")])
def test_a_library_is_quoted_on_one_line_without_a_full_stop(text: str, said: str) -> None:
    assert first_line(ValueError(text)) == said
