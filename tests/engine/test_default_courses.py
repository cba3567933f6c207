"""The courses of the default run have among them every pair of values that some course has: the rest is `full`."""

from __future__ import annotations

from courses import pairs

from tests.engine import test_forward_backward, test_pipeline_engine, test_tensor_parallel_engine

FILES = (test_forward_backward, test_pipeline_engine, test_tensor_parallel_engine)


def test_the_default_run_meets_every_pair() -> None:
    met = {pair for file in FILES for pair in pairs(file.CASES[name] for name in file.DEFAULT)}
    assert met == {pair for file in FILES for pair in pairs(file.CASES.values())}


def test_no_course_is_there_for_nothing() -> None:
    for file in FILES:
        for name in file.DEFAULT:
            others = {
                pair
                for other in FILES
                for pair in pairs(other.CASES[each] for each in other.DEFAULT if (other, each) != (file, name))
            }
            assert pairs([file.CASES[name]]) - others, name
