"""The ranks of a job lie on its cards, whatever shares the model."""

import pytest
from plan_jobs import problems_of


def test_a_group_over_nodes_is_refused() -> None:
    (problem,) = problems_of(model="llama-3.1-8b", nodes=2, ranks=1, parallel={"tensor": 2})
    assert problem.code == "TP_SPANS_NODES"


@pytest.mark.parametrize(
    ("ranks", "parallel", "product", "valid"),
    [
        (6, {"tensor": 4}, "pipeline=1 × tensor=4 = 4", "one of 1, 2, 3, 6"),
        (6, {"pipeline": 4}, "pipeline=4 × tensor=1 = 4", "one of 1, 2, 3, 6"),
        (4, {"tensor": 2, "pipeline": 4}, "pipeline=4 × tensor=2 = 8", "one of 1, 2, 4"),
        (1, {"pipeline": 2}, "pipeline=2 × tensor=1 = 2", "Set pipeline × tensor to 1, or"),
    ],
)
def test_ranks_that_are_no_multiple_of_a_replica_are_refused(ranks, parallel, product, valid) -> None:
    (problem,) = problems_of(model="llama-3.1-8b", ranks=ranks, parallel=parallel)
    assert problem.code == "GRID_WORLD"
    assert product in problem.message
    assert valid in problem.fix
