"""Proofs of the splits that a run asks for, made before its model is built: on a small twin, or read from an earlier run's."""

from __future__ import annotations

from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from toolkit.errors import PlanError
from toolkit.modeling.architecture import own_class
from toolkit.pipeline_parallel.proof import PROVEN_BY_TESTS, pipeline_proof
from toolkit.tensor_parallel.proof import tensor_proof
from toolkit.tensor_parallel.tables import has_table
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


def prove_splits(config: PreTrainedConfig, *, tensor: int, pipeline: int, trust_remote_code: bool = False) -> None:
    """Make or read the proofs that a model needs for its tensor ranks and stages; tests hold some architectures to them.

    What `tp_plan_for` and `split_model` do later on a model of this configuration is then known.

    Raises:
        PlanError: PIPELINE_ARCHITECTURE if its stages are not the whole model. What `tp_plan_for` refuses, it refuses itself.
    """
    needs_tensor = tensor > 1 and not has_table(config.get_text_config(decoder=True))
    needs_pipeline = pipeline > 1 and config.model_type not in PROVEN_BY_TESTS
    if not needs_tensor and not needs_pipeline:
        return
    kind, own = class_and_config(config, trust_remote_code=trust_remote_code)
    if needs_tensor:
        tensor_proof(kind, own, num_ranks=tensor)
    if needs_pipeline:
        proof = pipeline_proof(kind, own)
        if proof.problem:
            raise _no_pipeline(kind, proof.problem)


def check_twin(model: PreTrainedModel) -> None:
    """Refuse to cut a whole model that has modules that the twin of its proof lacks.

    Raises:
        PlanError: PIPELINE_ARCHITECTURE.
    """
    if model.config.model_type in PROVEN_BY_TESTS:
        return
    proof = pipeline_proof(type(model), model.config)
    if unlike := sorted({*module_kinds(model)} - {*proof.kinds}):
        raise _no_pipeline(type(model), proof.problem or f"its twin has no {unlike[0].replace(':', ', a ')}")


def _no_pipeline(kind: type[PreTrainedModel], why: str) -> PlanError:
    return PlanError.of(
        code="PIPELINE_ARCHITECTURE",
        key="parallel.pipeline",
        message=f"a pipeline of {kind.__name__} could not be proven on a small twin: {why}",
        fix="Set parallel.pipeline to 1",
    )
