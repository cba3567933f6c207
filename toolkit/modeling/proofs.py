"""Proofs of the splits that a run asks for, made before its model is built: on a small twin, or read from an earlier run's.

`python -m toolkit.modeling.proofs PLAN` makes those of a plan in a process of its own, before its ranks start, and prints what it found
as JSON.
"""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from toolkit.config.job import ExpertSharding
from toolkit.context_parallel.proof import context_proof
from toolkit.errors import PlanError, ToolkitError
from toolkit.modeling.architecture import import_architecture, model_config, own_class
from toolkit.pipeline_parallel.proof import pipeline_proof
from toolkit.planning.plan import Plan
from toolkit.planning.rules.pipeline import STAGED_MODEL_TYPES
from toolkit.tensor_parallel.proof import tensor_proof
from toolkit.tensor_parallel.tables import has_table, tp_plan_for
from toolkit.twins.comparison import module_kinds


def class_and_config(
    config: PreTrainedConfig, *, trust_remote_code: bool
) -> tuple[type[PreTrainedModel], PreTrainedConfig]:
    """Return the class of the causal language model of a configuration, and the part of the configuration that it is built from.

    Source:
        transformers models/auto/auto_factory.py from_config: a multimodal configuration may have a class for its text alone.
    """
    reference = own_class(config) if trust_remote_code else None
    if reference is not None:
        return get_class_from_dynamic_module(reference, config.name_or_path), config
    found: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    kind = found[0] if isinstance(found, tuple) else found
    text = config.sub_configs.get("text_config")
    if text is not None and getattr(kind, "config_class", None) == text:
        return kind, config.get_text_config()
    return kind, config


def prove_splits(
    config: PreTrainedConfig,
    *,
    tensor: int,
    pipeline: int,
    context: int = 1,
    experts: ExpertSharding = "sliced",
    trust_remote_code: bool = False,
) -> None:
    """Make or read the proofs that a model needs for its tensor ranks, stages and slices; tests hold some architectures to the first two.

    What `tp_plan_for` and `split_model` do later on a model of this configuration is then known.

    Raises:
        PlanError: PIPELINE_ARCHITECTURE if its stages are not the whole model; CONTEXT_ARCHITECTURE if its slices are not. What `tp_plan_for` refuses, it refuses itself.
    """
    needs_tensor = tensor > 1 and not has_table(config.get_text_config(decoder=True))
    needs_pipeline = pipeline > 1 and config.model_type not in STAGED_MODEL_TYPES
    if not needs_tensor and not needs_pipeline and context == 1:
        return
    kind, own = class_and_config(config, trust_remote_code=trust_remote_code)
    if needs_tensor:
        tensor_proof(kind, own, num_ranks=tensor, experts=experts)
    if needs_pipeline:
        proof = pipeline_proof(kind, own)
        if proof.problem:
            raise _no_pipeline(kind, proof.problem)
    if context > 1:
        shared = context_proof(kind, own)
        if shared.problem:
            raise _no_context(kind, shared.problem)


def check_twin(model: PreTrainedModel) -> None:
    """Refuse to cut a whole model that has modules that the twin of its proof lacks.

    Raises:
        PlanError: PIPELINE_ARCHITECTURE.
    """
    if model.config.model_type in STAGED_MODEL_TYPES:
        return
    proof = pipeline_proof(type(model), model.config)
    if unlike := sorted({*module_kinds(model)} - {*proof.kinds}):
        raise _no_pipeline(type(model), proof.problem or f"its twin has no {unlike[0].replace(':', ', a ')}")


def proofs_of(plan: Plan) -> dict[str, dict[str, Any]]:
    """Return the figures of the proofs that a plan needs: largest differences, what ranks share, and a hash of the table.

    Raises:
        PlanError: TP_ARCHITECTURE, PIPELINE_ARCHITECTURE, CONTEXT_ARCHITECTURE for a model that is refused.
    """
    if plan.grid.size("model") * plan.grid.cp == 1:
        return {}
    config, trusted = model_config(plan), plan.job.model.trust_remote_code
    import_architecture(config, trust_remote_code=trusted)
    experts = plan.settings.experts
    prove_splits(
        config,
        tensor=plan.grid.tp,
        pipeline=plan.grid.pp,
        context=plan.grid.cp,
        experts=experts,
        trust_remote_code=trusted,
    )
    kind, own = class_and_config(config, trust_remote_code=trusted)
    found: dict[str, dict[str, Any]] = {}
    if plan.grid.tp > 1 and not has_table(own):
        with torch.device("meta"):
            model = kind._from_config(own)
        pieces = plan.settings.sequence_parallel
        tp_plan_for(model, num_ranks=plan.grid.tp, sequence_parallel=pieces, experts=experts)
        proof = tensor_proof(kind, own, num_ranks=plan.grid.tp, experts=experts)
        found["tensor"] = {
            "difference": proof.difference,
            "shared": proof.sharded,
            "whole": dict(proof.whole),
            "table": hashlib.sha256(repr(sorted(proof.table.items())).encode()).hexdigest(),
        }
    if plan.grid.pp > 1 and own.model_type not in STAGED_MODEL_TYPES:
        found["pipeline"] = {"difference": pipeline_proof(kind, own).difference}
    if plan.grid.cp > 1:
        found["context"] = {"difference": context_proof(kind, own).difference}
    return found


def _no_context(kind: type[PreTrainedModel], why: str) -> PlanError:
    return PlanError.of(
        code="CONTEXT_ARCHITECTURE",
        key="parallel.context",
        message=f"slices of sequences of {kind.__name__} could not be proven on a small twin: {why}",
        fix="Set parallel.context to 1",
    )


def _no_pipeline(kind: type[PreTrainedModel], why: str) -> PlanError:
    return PlanError.of(
        code="PIPELINE_ARCHITECTURE",
        key="parallel.pipeline",
        message=f"a pipeline of {kind.__name__} could not be proven on a small twin: {why}",
        fix="Set parallel.pipeline to 1",
    )


def main(path: Path) -> None:
    """Print the proofs of a plan, or the problems of one that is refused, as JSON."""
    try:
        print(json.dumps({"proofs": proofs_of(Plan.load(path))}))
    except ToolkitError as error:
        print(json.dumps({"problems": [asdict(problem) for problem in error.problems]}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
