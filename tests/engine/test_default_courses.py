"""The courses of the default run have among them what each kind of parallelism must meet: the rest is `full`."""

from __future__ import annotations

from courses import claims

from tests.engine import test_forward_backward, test_pipeline_engine, test_tensor_parallel_engine

FILES = (test_forward_backward, test_pipeline_engine, test_tensor_parallel_engine)


def test_the_default_run_meets_every_value_and_each_kind_of_parallelism_every_stage_sum_and_schedule() -> None:
    met = {claim for file in FILES for claim in claims(file.CASES[name] for name in file.DEFAULT)}
    assert met == {claim for file in FILES for claim in claims(file.CASES.values())}


def test_no_course_is_there_for_nothing() -> None:
    for file in FILES:
        for name in file.DEFAULT:
            others = {
                claim
                for other in FILES
                for claim in claims(other.CASES[each] for each in other.DEFAULT if (other, each) != (file, name))
            }
            assert claims([file.CASES[name]]) - others, name
