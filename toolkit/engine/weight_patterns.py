"""Patterns of a job that find no weight, told before a run: `python -m toolkit.engine.weight_patterns PLAN` prints them as JSON."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

import torch

from toolkit.engine.initialize import parameter_groups
from toolkit.errors import Problem, ToolkitError
from toolkit.modeling.architecture import import_architecture, model_config
from toolkit.modeling.build import BuildOptions, add_adapters, construct_empty
from toolkit.modeling.initialization import tie_weights
from toolkit.planning.plan import Plan

_CODE = "WEIGHTS_PATTERN"


def pattern_problems(plan: Plan) -> list[Problem]:
    """Return what is wrong with `train.freeze` and `train.learning_rates`, by the names of the whole model on the meta device."""
    options = BuildOptions.of(plan, quantized=False)
    if options.lora is not None:  # how adapters begin changes no name, and may need the weights
        options = replace(options, lora=options.lora.model_copy(update={"init_lora_weights": "default"}))
    config = model_config(plan)
    import_architecture(config, trust_remote_code=options.trust_remote_code, task=options.task)
    model = construct_empty(config, options)
    tie_weights(model)
    problems: list[Problem] = []
    adapted = model
    try:
        with torch.device("meta"):
            adapted = add_adapters(model, options)
    except ToolkitError as error:
        problems += error.problems
    try:
        parameter_groups(adapted, weight_decay=0.0, rates=plan.job.train.learning_rates)
    except ToolkitError as error:
        problems += error.problems
    return [problem for problem in problems if problem.code == _CODE]  # the run itself tells of others


def main(path: Path) -> None:
    """Print the problems of a plan's patterns as JSON."""
    print(json.dumps({"problems": [asdict(problem) for problem in pattern_problems(Plan.load(path))]}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
