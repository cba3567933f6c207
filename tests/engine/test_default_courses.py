"""The courses of the default run have among them what each kind of parallelism must meet: the rest is `full`."""

from __future__ import annotations

from courses import Case, claims

from tests.engine import (
    test_forward_backward,
    test_methods,
    test_nvme_offload,
    test_pipeline_engine,
    test_tensor_parallel_engine,
    test_torch_engine,
)
from tests.planning.test_strategy_table import METHODS, OFFLOADS, ROWS, table

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


def test_each_cell_of_the_table_that_says_yes_has_a_course() -> None:
    files = (*FILES, test_methods, test_torch_engine)
    courses = [case for file in files for case in file.CASES.values()]
    precisions = {
        (row_of(case), case.train.get("method", "full"), case.train.get("precision", "fp32")) for case in courses
    }
    moved = {(row_of(case), case.offload) for case in courses}
    moved |= {("ZeRO-3", offload) for offload, _ in test_nvme_offload.CASES.values()}
    for row in ROWS:
        for said, pairs in zip(table("all weights")[row], METHODS, strict=True):
            for method, precision in pairs:
                if said == "yes" and precision != "fp8":  # test_engine_fp8.py
                    assert (row, method, precision) in precisions, (row, method, precision)
        for said, offload in zip(table("nothing")[row], OFFLOADS, strict=True):
            if said == "yes":
                assert (row, offload) in moved, (row, offload)


def row_of(case: Case) -> str:
    if case.tensor > 1 or case.pipeline > 1:
        return "tensor ranks" if case.pipeline == 1 else "pipeline"
    if case.strategy != "zero":
        return case.strategy.upper()
    return f"ZeRO-{case.plan().settings.zero_stage if case.stage is None else case.stage}"
