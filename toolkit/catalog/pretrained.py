"""Whether a model's pretrained weights are available, and what to do if they are not."""

from __future__ import annotations

from toolkit.catalog.models import ModelSpec
from toolkit.catalog.weights import find_weights
from toolkit.errors import Problem


def weight_problems(model: ModelSpec) -> tuple[Problem, ...]:
    """Return the problems of loading a model's weights; none for a hub model, which only its download can show.

    Returns:
        MODEL_NO_WEIGHTS or WEIGHTS_BIN, or an empty tuple.
    """
    if model.origin == "hub":
        return ()
    if model.path is not None and model.path.is_dir():
        found = find_weights(model.path)
        if found.format == "bin":
            return (
                Problem(
                    code="WEIGHTS_BIN",
                    key="model",
                    message=f"{model.path} has pytorch_model.bin, a pickle, and no safetensors",
                    fix="Convert it: AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(FOLDER)",
                ),
            )
        if found.loadable:
            return ()
        if found.missing or found.damaged:
            broken = ", ".join([*(f"{name} is missing" for name in found.missing), *found.damaged])
            message, fix = f"the weights in {model.path} are incomplete: {broken}", "Download or copy the folder again"
            return (_no_weights(message, fix),)
    hub = f"the hub id {model.hub_id}" if model.hub_id else "a hub id"
    return (
        _no_weights(
            f"model={model.name} gives dimensions only: there are no weights to fine-tune",
            f"Name {hub} or a folder with safetensors, or set model.init to random to train from scratch",
        ),
    )


def _no_weights(message: str, fix: str) -> Problem:
    return Problem(code="MODEL_NO_WEIGHTS", key="model", message=message, fix=fix)
