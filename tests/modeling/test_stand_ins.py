"""Stand-ins answer for numbers what the real functions answer, and give way to the real modules."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.fx.experimental import symbolic_shapes

from toolkit.modeling.stand_ins import StandIn, _symbols

STAND_IN = SimpleNamespace(**_symbols())


@pytest.mark.parametrize(
    "name", ["expect_true", "guard_or_false", "guard_or_true", "statically_known_true", "guard_size_oblivious"]
)
def test_truths(name: str) -> None:
    for value in (True, False):
        assert getattr(STAND_IN, name)(value) is getattr(symbolic_shapes, name)(value) is value
    with pytest.raises(AssertionError):
        getattr(STAND_IN, name)(1)


@pytest.mark.parametrize(
    "name",
    [
        "has_free_symbols",
        "has_free_unbacked_symbols",
        "is_nested_int",
        "is_symbolic",
        "has_guarding_hint",
        "guard_int",
        "guarding_hint_or_throw",
        "is_concrete_int",
        "has_static_value",
    ],
)
def test_numbers_have_no_symbols(name: str) -> None:
    for value in (0, 7):
        assert getattr(STAND_IN, name)(value) == getattr(symbolic_shapes, name)(value)


@pytest.mark.parametrize("given", [(3, 3), (3, 4), ([1, 2], (1, 2)), ([1, 2], [1, 3]), ((1,), (1, 1))])
def test_equal(given: tuple[object, object]) -> None:
    assert STAND_IN.sym_eq(*given) == symbolic_shapes.sym_eq(*given)


def test_tensors_have_no_symbols() -> None:
    tensor = torch.empty(2, 3)
    assert not STAND_IN.free_unbacked_symbols(tensor)
    assert not symbolic_shapes.free_unbacked_symbols(tensor)
    assert STAND_IN.sym_and(True, False, True) is symbolic_shapes.sym_and(True, False, True)
    assert STAND_IN.sym_or(False, True) is symbolic_shapes.sym_or(False, True)


def test_a_name_that_is_not_known_is_the_real_one(monkeypatch: pytest.MonkeyPatch) -> None:
    import colorsys
    import sys

    stand_in = StandIn("colorsys", {"ONE_THIRD": "known"})
    monkeypatch.setitem(sys.modules, "colorsys", stand_in)
    assert stand_in.ONE_THIRD == "known"
    assert stand_in.rgb_to_hls(1, 1, 1) == colorsys.rgb_to_hls(1, 1, 1)
    assert sys.modules["colorsys"] is not stand_in
