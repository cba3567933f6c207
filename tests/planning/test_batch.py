import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.errors import PlanError
from toolkit.planning.batch import Batch, default_micro, solve_batch, valid_triples

OPEN = st.none() | st.integers(1, 40)


def solve(**given_values):
    return solve_batch(
        **{"micro": None, "accumulation": None, "train": None, "dp_size": 1, "sequence_length": 2048, **given_values}
    )


def problem(**given_values):
    with pytest.raises(PlanError) as caught:
        solve(**given_values)
    (found,) = caught.value.problems
    assert found.code == "BATCH_EQUATION"
    return found


def attempt(**given_values):
    try:
        return solve(**given_values)
    except PlanError as error:
        return error


@settings(max_examples=500, deadline=None)
@given(micro=OPEN, accumulation=OPEN, train=st.none() | st.integers(1, 200), dp_size=st.integers(1, 16))
def test_a_solution_is_given_exactly_when_there_is_one(micro, accumulation, train, dp_size):
    exists = train is None or any(
        train % (m * dp_size) == 0 and accumulation in (None, train // (m * dp_size))
        for m in ([micro] if micro else range(1, train + 1))
    )
    found = attempt(micro=micro, accumulation=accumulation, train=train, dp_size=dp_size)
    assert isinstance(found, Batch) == exists
    if isinstance(found, PlanError):
        assert "accumulation_steps=0" not in str(found)
        assert "×0" not in found.problems[0].fix
        return
    assert min(found.micro, found.accumulation) >= 1
    assert found.train == found.micro * found.accumulation * dp_size
    for name, value in (("micro", micro), ("accumulation", accumulation), ("train", train)):
        assert value is None or getattr(found, name) == value


@given(train=st.integers(1, 500), dp_size=st.integers(1, 16))
def test_the_triples_are_all_there_are(train, dp_size):
    expected = [(m, train // dp_size // m) for m in range(1, train + 1) if train % (m * dp_size) == 0]
    assert [(batch.micro, batch.accumulation) for batch in valid_triples(train, dp_size)] == expected
    assert all(batch.train == train for batch in valid_triples(train, dp_size))


@pytest.mark.parametrize(
    ("sequence_length", "micro"), [(1, 4096), (512, 8), (2048, 2), (4096, 1), (4097, 1), (100_000, 1)]
)
def test_the_default_micro_batch_stays_within_its_tokens(sequence_length, micro):
    assert default_micro(sequence_length) == micro


def test_an_open_micro_batch_takes_the_largest_divisor_within_its_tokens():
    assert solve(train=12, sequence_length=1024) == Batch(micro=4, accumulation=3, dp_size=1)
    assert solve(train=7, sequence_length=1024) == Batch(micro=1, accumulation=7, dp_size=1)


def test_one_visible_rank_shows_the_numbers_and_the_world():
    # starcoder issue 41, DeepSpeed issue 4703
    found = problem(train=256, micro=4, accumulation=8)
    assert "train_batch_size=256" in found.message
    assert "per_device_train_batch_size=4 × gradient_accumulation_steps=8 × 1 data-parallel rank = 32" in found.message
    assert "all ranks of a pipeline, tensor or context group count once" in found.message
    assert "4×64" in found.fix
    assert "8×32" in found.fix
    assert "start more data-parallel ranks" in found.fix


def test_a_batch_smaller_than_its_micro_batch_never_accumulates_zero_times():
    # OpenRLHF issue 584
    found = problem(train=1, micro=2)
    assert "train_batch_size=1" in found.message
    assert "per_device_train_batch_size=2" in found.message
    assert "1×1" in found.fix
    assert "0" not in found.fix


def test_a_batch_that_the_ranks_do_not_divide_names_the_nearest_that_they_do():
    found = problem(train=10, dp_size=4)
    assert "train_batch_size=8 (the nearest that 4 divides)" in found.fix
    assert "1×2, 2×1" in found.fix
    assert "train_batch_size=4" in problem(train=3, dp_size=4).fix
    assert "train_batch_size=12" in problem(train=11, dp_size=4).fix


def test_the_numbers_of_many_ranks():
    assert "× 8 data-parallel ranks = 256" in problem(train=100, micro=4, accumulation=8, dp_size=8).message
    assert "count once" not in problem(train=100, micro=4, accumulation=8, dp_size=8).message


def test_a_batch_says_its_equation():
    assert str(Batch(micro=2, accumulation=4, dp_size=8)) == "64 = 2 micro × 4 accumulation × 8 data-parallel ranks"
