"""The text of a job is YAML that is read back as it was meant."""

from __future__ import annotations

import pytest

from toolkit.config.yaml_text import parse_value
from toolkit.migration.job_text import scalar


@pytest.mark.parametrize(
    "value",
    ["no", "1e-5", "010", "1:30", "", "a: b", "# x", "- y", "é", "a\nb", "null", "~", "0x1F", [1, "on"], {"a": ["b", 2.5]}, 2e-5, 1e22, True, "'", '"', "{a}", "*x", "&x", "%d"],
)  # fmt: skip
def test_a_value_on_one_line(value):
    text = scalar(value)
    assert "\n" not in text
    assert parse_value(text, name="x") == value
