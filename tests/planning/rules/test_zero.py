"""What a job is told to change where the toolkit's own step on the host is refused."""

from __future__ import annotations

from typing import Any

import pytest
from plan_jobs import plan_of, problems_of

STREAMED = {"offload": "full-cpu", "offload_engine": "overlapped"}
OVERLAPPED = {"offload": "optimizer-cpu", "offload_engine": "overlapped"}
PARTIAL = {"offload": "optimizer-cpu-partial"}
LION, COMPILED = {"optimizer": "lion"}, {"torch_compile": True}


@pytest.mark.parametrize(
    ("parallel", "train", "fix", "change"),
    [
        ({**STREAMED, "zero_stage": 3}, {}, "Set parallel.zero_stage to 2, or remove", {"zero_stage": 2}),
        ({**STREAMED, "zero_stage": 3}, {}, "or remove parallel.offload_engine", {"offload_engine": None}),
        ({**STREAMED, "zero_stage": 2, "context": 2}, {}, "Set parallel.context to 1", {"context": 1}),
        ({**STREAMED, "zero_stage": 2, "tensor": 2}, {}, "Set parallel.tensor to 1", {"tensor": 1}),
        ({**STREAMED, "zero_stage": 2}, COMPILED, "parallel.offload to optimizer-cpu", {"offload": "optimizer-cpu"}),
        ({**STREAMED, "zero_stage": 2}, LION, "Set train.optimizer to adamw", {"train": {}}),
        ({**OVERLAPPED, "zero_stage": 2}, LION, "or remove parallel.offload_engine", {"offload_engine": None}),
        ({**OVERLAPPED, "zero_stage": 3}, {}, "Set parallel.zero_stage to 1 or 2", {"zero_stage": 1}),
        ({**PARTIAL, "zero_stage": 2}, LION, "Set train.optimizer to adamw", {"train": {}}),
        (
            {**PARTIAL, "zero_stage": 2, "offload_engine": "deepspeed"},
            {},
            "Remove parallel.offload_engine",
            {"offload_engine": None},
        ),
    ],
)
def test_what_the_fix_of_a_refused_engine_says_is_accepted(
    parallel: dict[str, Any], train: dict[str, Any], fix: str, change: dict[str, Any]
) -> None:
    job: dict[str, Any] = {"model": "llama-3.1-8b", "ranks": 2}
    (problem,) = problems_of(**job, parallel=parallel, train=train)
    assert problem.code in ("OFFLOAD_ENGINE", "OFFLOAD_PARTIAL_ENGINE")
    assert fix in problem.fix
    changed = {"train": train, **change}
    plan_of(**job, train=changed.pop("train"), parallel={**parallel, **changed})


def test_tiles_send_nobody_from_streamed_layers_to_what_is_refused() -> None:
    job: dict[str, Any] = {"model": "llama-3.1-8b", "train": {"sequence_length": 4096, "mlp_tiles": 4}}
    (problem,) = problems_of(**job, parallel={**STREAMED, "zero_stage": 2})
    assert problem.fix.startswith("Set parallel.offload to optimizer-cpu, or")
    plan_of(**job, parallel={**STREAMED, "zero_stage": 2, "offload": "optimizer-cpu"})


@pytest.mark.parametrize("parallel", [PARTIAL, OVERLAPPED])
def test_a_stage_without_partitions_is_the_only_problem(parallel: dict[str, Any]) -> None:
    (problem,) = problems_of(model="llama-3.1-8b", ranks=2, parallel={**parallel, "zero_stage": 0})
    assert problem.code == "OFFLOAD_STAGE"
