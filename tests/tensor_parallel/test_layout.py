"""Which slices a rank holds: every element is held, equally often by equally many, and joining undoes cutting."""

from __future__ import annotations

import doctest
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from toolkit.tensor_parallel import embedding as vocabulary_module
from toolkit.tensor_parallel import layout as layout_module
from toolkit.tensor_parallel.embedding import ROWS_MULTIPLE, vocabulary_layout
from toolkit.tensor_parallel.layout import Layout, Part, Shard


def number_shared_with(num_ranks: int) -> st.SearchStrategy[int]:
    """Numbers of units that so many ranks can share: multiples of them, and divisors."""
    divisors = [number for number in range(1, num_ranks) if num_ranks % number == 0]
    return st.one_of(
        st.sampled_from([num_ranks * times for times in (1, 2, 3)]), st.sampled_from([*divisors, num_ranks])
    )


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Layout, int]:
    num_ranks = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    num_blocks = draw(number_shared_with(num_ranks))
    sharing = max(1, num_ranks // num_blocks)
    part = st.builds(Part, num_units=number_shared_with(sharing), unit_size=st.integers(1, 3))
    return Layout(parts=tuple(draw(st.lists(part, min_size=1, max_size=3))), num_blocks=num_blocks), num_ranks


@given(layouts())
def test_each_element_is_held_by_as_many_ranks_as_are_said_to_own_it(drawn: tuple[Layout, int]) -> None:
    layout, num_ranks = drawn
    said, held = Counter[int](), Counter[int]()
    for rank in range(num_ranks):
        ranges = layout.ranges(rank, num_ranks)
        assert len(ranges) == len(layout.owners(num_ranks))
        for own, owners in zip(ranges, layout.owners(num_ranks), strict=True):
            held.update(own)
            said.update(dict.fromkeys(own, owners))
    assert sorted(held) == list(range(layout.length))
    assert {element: said[element] / count for element, count in held.items()} == dict(held)


@given(layouts())
def test_all_ranks_hold_equally_much(drawn: tuple[Layout, int]) -> None:
    layout, num_ranks = drawn
    assert len({sum(map(len, layout.ranges(rank, num_ranks))) for rank in range(num_ranks)}) == 1


@given(layouts(), st.integers(0, 2))
def test_a_shard_is_the_slices_of_its_dimension(drawn: tuple[Layout, int], dim: int) -> None:
    layout, num_ranks = drawn
    shape = [2, 2, 2]
    shape[dim] = layout.length
    dense = torch.arange(4 * layout.length).reshape(shape)
    for rank in range(num_ranks):
        indices = torch.tensor([index for own in layout.ranges(rank, num_ranks) for index in own])
        shard = Shard(dim=dim, layout=layout, dense_length=layout.length).take(dense, rank=rank, num_ranks=num_ranks)
        assert torch.equal(shard, dense.index_select(dim, indices))


@pytest.mark.parametrize(("units", "ranks"), [(3, 2), (2, 3), (6, 4), (4, 6)])
def test_units_that_cannot_be_shared_evenly_are_refused(units: int, ranks: int) -> None:
    with pytest.raises(ValueError, match=f"{units} units over {ranks} ranks"):
        Layout(parts=(Part(num_units=units),)).ranges(0, ranks)


@given(st.integers(1, 500), st.integers(1, 8))
def test_a_vocabulary_is_padded_by_less_than_a_multiple_for_each_rank(vocab_size: int, num_ranks: int) -> None:
    layout = vocabulary_layout(vocab_size, num_ranks)
    assert 0 <= layout.length - vocab_size < num_ranks * ROWS_MULTIPLE
    assert layout.length % (num_ranks * ROWS_MULTIPLE) == 0
    shard = Shard(dim=0, layout=layout, dense_length=vocab_size)
    dense = 1 + torch.arange(vocab_size)[:, None]
    joined = torch.cat([shard.take(dense, rank=rank, num_ranks=num_ranks) for rank in range(num_ranks)])
    assert torch.equal(joined[:vocab_size], dense)
    assert joined[vocab_size:].eq(0).all()


@pytest.mark.parametrize("module", [layout_module, vocabulary_module])
def test_the_examples_of_the_docstrings(module: object) -> None:
    result = doctest.testmod(module)  # type: ignore[arg-type]
    assert result.attempted
    assert result.failed == 0
