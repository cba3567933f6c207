"""A partition that gives a rank no stage is one refusal, whatever is trained."""

import pytest
from plan_jobs import problems_of


@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_partition_into_fewer_stages_than_ranks(method: str) -> None:
    (problem,) = problems_of(
        model="llama-3.1-8b", ranks=8, parallel={"pipeline": 4, "partition": [16, 16]}, train={"method": method}
    )
    assert problem.key == "parallel.partition"
