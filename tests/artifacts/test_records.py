"""Records: what is written is read back equal; what is not of the schema is refused."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.artifacts.records import Records


@dataclass(frozen=True, slots=True)
class Leaf:
    name: str
    size: int = 0
    share: float = 0.0


@dataclass(frozen=True, slots=True)
class Mark:
    kind: Literal["a", "b", 3]
    place: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Tree:
    leaves: tuple[Leaf | Mark, ...]
    causes: dict[str, int]
    parts: Mapping[str, Leaf]
    last: Leaf | None = None
    sizes: list[int] | None = None
    done: bool = False


TREES = Records[Tree](Tree)
_LEAVES = st.builds(Leaf, st.text(), st.integers(), st.floats(allow_nan=False))
_MARKS = st.builds(Mark, st.sampled_from(["a", "b", 3]), st.none() | st.tuples(st.integers(), st.integers()))
_TREES = st.builds(
    Tree,
    st.lists(_LEAVES | _MARKS).map(tuple),
    st.dictionaries(st.text(), st.integers()),
    st.dictionaries(st.text(), _LEAVES),
    st.none() | _LEAVES,
    st.none() | st.lists(st.integers()),
    st.booleans(),
)


@given(_TREES)
def test_what_is_written_is_read_back_equal(tree: Tree) -> None:
    assert TREES.loads(TREES.dumps(tree)) == tree


def test_an_object_that_is_shared_stays_shared_and_is_written_once() -> None:
    leaf, causes = Leaf("once"), {"x": 1}
    both = Records[tuple[Tree, ...]](tuple[Tree, ...])
    text = both.dumps((Tree((leaf, leaf), causes, {}, leaf), Tree((leaf,), causes, {})))
    assert text.count("once") == 1
    first, second = both.loads(text)
    assert first.leaves[0] is first.leaves[1] is first.last is second.leaves[0]
    assert first.causes is second.causes


WHOLE = [[[1, "n", 4, 0.5], [-1, {"x": 1}], [-1, {}], [0, [0], 1, 2, None, None, False]], 3]


def test_the_text_is_plain_json() -> None:
    tree = Tree((Leaf("n", 4, 0.5),), {"x": 1}, {})
    assert json.loads(TREES.dumps(tree)) == WHOLE
    assert TREES.loads(json.dumps(WHOLE)) == tree


@pytest.mark.parametrize(
    ("node", "value"),
    [
        (0, [1, "n", "4", 0.5]), (0, [1, "n", True, 0.5]), (0, [1, "n", 4]), (0, [1, "n", 4, 0.5, 6]), (0, [0, "n", 4, 0.5]),
        (0, [9, "n", 4, 0.5]), (0, [-1, {"x": 1}]), (0, "os"), (1, [-1, {"x": "1"}]), (1, [-1, [1]]), (1, [1, "n", 4, 0.5]),
        (3, [0, [3], 1, 2, None, None, False]), (3, [0, [7], 1, 2, None, None, False]), (3, [0, [-1], 1, 2, None, None, False]),
        (3, [0, 0, 1, 2, None, None, False]), (3, [0, [0], 1, 2, None, None, 0]), (3, [0, [0], 1, 2, 3, None, False]), (3, None),
    ],
)  # fmt: skip
def test_a_document_of_another_shape_is_refused(node: int, value: Any) -> None:
    nodes, root = json.loads(json.dumps(WHOLE))
    nodes[node] = value
    with pytest.raises(ValueError, match=r"."):
        TREES.loads(json.dumps([nodes, root]))


@pytest.mark.parametrize("text", ["", "{}", "[]", "[[], 0]", "[[], null]", "null", "[" * 100_000, "\x80\x04"])
def test_what_is_no_document_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        TREES.loads(text)
    with pytest.raises(ValueError, match=r"."):
        TREES.loads(pickle.dumps(Leaf("x")).decode("latin-1"))


@pytest.mark.parametrize("wrong", [Leaf(name=3), Leaf("x", 1.5), Leaf("x", True)])  # type: ignore[arg-type]
def test_a_value_that_is_not_of_its_type_is_not_written(wrong: Leaf) -> None:
    with pytest.raises(TypeError):
        TREES.dumps(Tree((wrong,), {}, {}))


@pytest.mark.parametrize("root", [Any, object, type, bytes, dict[int, int], tuple[Any, ...], Literal[b"x"]])
def test_a_type_that_is_no_data_makes_no_schema(root: Any) -> None:
    with pytest.raises(TypeError):
        Records(root)


def test_another_field_or_type_is_another_schema() -> None:
    def schema(fields: dict[str, Any]) -> str:
        made = dataclass(type("Made", (), {"__annotations__": fields, "__module__": __name__}))
        return Records(made).schema

    made = (
        {"a": int},
        {"a": str},
        {"b": int},
        {"a": int, "b": int},
        {"a": Literal["x"]},
        {"a": Literal["y"]},
        {"a": int | None},
    )
    assert len({schema(fields) for fields in made}) == len(made)
    assert schema({"a": int}) == schema({"a": int})
