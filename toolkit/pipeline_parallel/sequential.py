"""Cuts an `nn.Sequential` of the user's own into pipeline stages."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from toolkit.arguments import Positive, checks_arguments
from toolkit.errors import PlanError
from toolkit.pipeline_schedule import partition


@checks_arguments
def split_sequential(
    model: nn.Sequential, num_stages: Positive, *, counts: Sequence[int] | None = None
) -> list[nn.Sequential]:
    """Cut a sequence of modules into stages.

    >>> model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))
    >>> tuple(map(len, split_sequential(model, 4)))
    (1, 1, 2, 2)

    Args:
        model: Modules that run one after the other; they are not copied.
        num_stages: Number of stages: ranks of the pipeline, times the stages of each.
        counts: Modules of each stage; by default such that the stage with most parameters has as few as possible.

    Raises:
        PlanError: PARTITION_STAGES, if there are more stages than modules.
        ValueError: If `counts` are not those of the stages, or two stages would share a parameter.
    """
    sizes = [sum(weight.numel() for weight in module.parameters()) for module in model]
    if num_stages > len(model):
        raise PlanError.of(
            code="PARTITION_STAGES",
            key="num_stages",
            message=f"num_stages={num_stages} exceeds the sequence's {len(model)} modules: each stage holds at least one",
            fix="Set num_stages to their number or less",
        )
    counts = partition([float(size) for size in sizes], num_stages) if counts is None else tuple(counts)
    if len(counts) != num_stages or sum(counts) != len(model) or min(counts) < 1:
        raise ValueError(
            f"counts={tuple(counts)} does not give {len(model)} modules to {num_stages} stages, at least one each"
        )
    modules, stages = list(model), []
    for count in counts:
        stages.append(nn.Sequential(*modules[:count]))
        del modules[:count]
    owners: dict[nn.Parameter, int] = {}
    for index, stage in enumerate(stages):
        for name, weight in stage.named_parameters():
            if owners.setdefault(weight, index) != index:
                raise ValueError(
                    f"{name} of stage {index} is a parameter of stage {owners[weight]} too: no rank would sum its gradients"
                )
    return stages
