"""The classes of `train.callbacks` are made before a run starts, or refused."""

from __future__ import annotations

import pytest
from tiny_plans import tiny_plan

from toolkit.errors import RunError
from toolkit.trainer.callbacks import make_callbacks


class Sound:
    def on_save(self, run: object, folder: object) -> None: ...


class NeedsMore:
    def __init__(self, size: int) -> None: ...


class DoesNothing: ...


def test_a_class_is_made_once_for_each_time_it_is_named() -> None:
    made = make_callbacks(tiny_plan(train={"callbacks": [f"{__name__}:Sound"] * 2}))
    assert [type(callback).__name__ for callback in made] == ["Sound", "Sound"]
    assert made[0] is not made[1]


@pytest.mark.parametrize(("name", "reason"), [("NeedsMore", "size"), ("DoesNothing", "no method that a run calls")])
def test_a_class_that_cannot_be_used(name: str, reason: str) -> None:
    with pytest.raises(RunError, match=reason) as caught:
        make_callbacks(tiny_plan(train={"callbacks": [f"{__name__}:{name}"]}))
    assert caught.value.codes == ("CALLBACK",)
