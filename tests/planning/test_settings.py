"""How many bytes a number of the training precision takes."""

from __future__ import annotations

import pytest
from plan_jobs import plan_of

from toolkit.planning.settings import Settings


@pytest.mark.parametrize(("precision", "itemsize"), [("fp32", 4), ("bf16", 2), ("fp16", 2), ("fp8", 2)])
def test_a_parameter_takes_two_bytes_but_in_fp32(precision, itemsize):
    settings: Settings = plan_of(model="llama-3.2-1b", train={"precision": precision}).settings
    assert settings.itemsize == itemsize
