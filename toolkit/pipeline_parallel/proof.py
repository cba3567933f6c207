"""Proof of a cut into stages: a twin of the model runs whole and as a chain of stages of one layer each, and both are compared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from toolkit.artifacts.records import Records
from toolkit.errors import ToolkitError, first_line
from toolkit.pipeline_parallel.decoder_layout import find_layers
from toolkit.pipeline_parallel.part import stage_info
from toolkit.pipeline_parallel.split import split_model
from toolkit.pipeline_parallel.stage import forward_stage, hidden_dtype, hidden_shape
from toolkit.pipeline_schedule import StageSpec
from toolkit.twins.comparison import (
    ROUNDING,
    TOLERANCE,
    NoTwinError,
    Run,
    SplitProof,
    build_twin,
    copy_of,
    difference,
    failing_module,
    gradient_difference,
    make_batch,
    module_kinds,
    plain_torch,
    run,
)
from toolkit.twins.kept import kept_proof


def pipeline_proof(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> SplitProof:
    """Return the proof of a model's cut, made now or by an earlier process; arguments as of `prove_pipeline`."""
    return kept_proof(
        "pipeline", model_class, config, records=Records(SplitProof), make=lambda: prove_pipeline(model_class, config)
    )


def prove_pipeline(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> SplitProof:
    """Cut a twin of a model between all its layers, and compare loss, scores and every gradient with those of the whole.

    Args:
        model_class: Class of the model.
        config: Its configuration.
    """
    with plain_torch():
        try:
            twin = build_twin(model_class, config)
            batch = make_batch()
            wanted = run(copy_of(twin), batch)
        except NoTwinError as error:
            return SplitProof.refused(str(error))
        proof = _compare(twin, batch, wanted)
        if proof.problem and TOLERANCE < proof.difference < ROUNDING:  # which double precision shows
            try:
                twin = twin.double()
                proof = _compare(twin, batch, run(copy_of(twin), batch))
            except NoTwinError:  # some models mix in tensors of single precision
                return proof
        return proof


def _compare(twin: PreTrainedModel, batch: Mapping[str, torch.Tensor], wanted: Run) -> SplitProof:
    try:
        found = _run_stages(twin, batch)
    except ToolkitError as error:
        return SplitProof.refused(error.problems[0].message)
    except Exception as error:  # code of any model
        place = failing_module(error, twin)
        return SplitProof.refused(
            f"its stages do not run{f', at {place}' if place else ''}: {type(error).__name__}: {first_line(error)}"
        )
    worst = abs(found.loss - wanted.loss) if found.loss == found.loss else float("inf")
    if found.logits is None or wanted.logits is None:
        return SplitProof.refused("its stages return no scores")
    worst = max(worst, difference(found.logits, wanted.logits))
    if not worst <= TOLERANCE:
        return SplitProof.refused(f"loss and scores of its stages differ by {worst:.1e}", difference=worst)
    for name, gradient in wanted.gradients.items():
        gap = gradient_difference(found.gradients.get(name), gradient)
        worst = max(worst, gap)
        if not gap <= TOLERANCE:
            return SplitProof.refused(f"the gradient of {name} differs by {gap:.1e} on its stage", difference=gap)
    return SplitProof(difference=worst, kinds=module_kinds(twin), problem="")


def _run_stages(twin: PreTrainedModel, batch: Mapping[str, torch.Tensor]) -> Run:
    """Run the stages one after the other, as if they sent to each other; return what the whole model would have shown."""
    stack: Any = twin.get_submodule(find_layers(twin))
    layers = len(stack)
    stages: list[PreTrainedModel] = []
    for layer in range(layers):
        stage = copy_of(twin)
        split_model(stage, StageSpec(chunks=(range(layer, layer + 1),), num_layers=layers))
        stages.append(stage)
    sent: list[tuple[torch.Tensor, torch.Tensor]] = []
    received: torch.Tensor | None = None
    output: Any = None
    for stage in stages:
        output = forward_stage(stage, batch, received=received)
        if isinstance(output, torch.Tensor):
            received = torch.empty(hidden_shape(stage, batch), dtype=hidden_dtype(stage)).copy_(output.detach())
            sent.append((output, received))
    output.loss.backward()
    for own, other in reversed(sent):
        own.backward(other.grad)  # type: ignore[no-untyped-call]
    made = Run(loss=output.loss.item(), logits=output.logits.detach())
    for stage in stages:
        info = stage_info(stage)
        assert info is not None, "`split_model` has left it"
        for name, weight in stage.named_parameters(remove_duplicate=False):
            if weight.grad is not None:
                for key in {info.tied_copy.get(name, name), name}:
                    known = made.gradients.get(key)
                    made.gradients[key] = weight.grad if known is None else known + weight.grad
    for stage in stages:  # of a tie the sum, under each of its names
        info = stage_info(stage)
        for copy_key, kept in (info.tied_copy if info is not None else {}).items():
            made.gradients[copy_key] = made.gradients[kept]
    return made
