"""What is refused with context parallelism that needs more than one key of a job to be refused for that alone."""

from __future__ import annotations

from typing import Any

import pytest

from toolkit.config.job import Job
from toolkit.errors import PlanError
from toolkit.planning.resolve import resolve

SAMPLES = {"train": {"samples": {"prompts": ["a"]}}}
ROUTERS = {"model": "mixtral-8x7b", "train": {"router_aux_loss_coef": 0.01}}
OWN_LOSS = {"train": {"compute_loss": "torch.nn.functional:cross_entropy"}}


@pytest.mark.parametrize(
    ("key", "others"),
    [("train.samples", SAMPLES), ("train.compute_loss", OWN_LOSS), ("train.router_aux_loss_coef", ROUTERS)],
)
def test_what_needs_whole_rows_is_refused(key: str, others: dict[str, Any]) -> None:
    job = {"model": "llama-3.1-8b", "cluster": {"gpu": "h100-sxm-80gb", "gpus_per_node": 2}, **others}
    with pytest.raises(PlanError) as caught:
        resolve(Job.model_validate(job | {"parallel": {"context": 2}}))
    assert ("CONTEXT_UNSUPPORTED", key) in [(problem.code, problem.key) for problem in caught.value.problems]


def test_one_size_that_fits_is_named_alone() -> None:
    job = {"model": "llama-3.1-8b", "cluster": {"gpu": "h100-sxm-80gb"}, "parallel": {"context": 2}}
    with pytest.raises(PlanError, match="Set context to 1, or gpus_per_node"):
        resolve(Job.model_validate(job))


@pytest.mark.parametrize(("coefficient", "refused"), [(0.01, True), (0.0, False), (None, False)])
def test_the_loss_of_routers_is_that_of_whole_rows(coefficient: float | None, refused: bool) -> None:
    """The job's own weight has the model compute it, whatever its config.json says."""
    job = {"model": "olmoe-1b-7b", "cluster": {"gpu": "h100-sxm-80gb", "gpus_per_node": 2}, "parallel": {"context": 2}}
    made = Job.model_validate(job | {"train": {"router_aux_loss_coef": coefficient}})
    if not refused:
        assert resolve(made).grid.cp == 2
        return
    with pytest.raises(
        PlanError, match=r"router_aux_loss_coef=0\.01 with context above 1: the router's loss is of the mean"
    ) as caught:
        resolve(made)
    assert caught.value.codes == ("CONTEXT_UNSUPPORTED",)
    assert caught.value.problems[0].fix.startswith("Set train.router_aux_loss_coef to 0, or")
