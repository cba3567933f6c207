"""Where a Hugging Face decoder can be split: found by running it with placeholders in the place of its modules.

The run takes three tokens and no weights, so it is made on the CPU whatever the model's size; it is what every stage between
the first and the last does later. It shows which modules are called before the layers and which after them, what layers
return, and whether anything but the hidden states passes from layer to layer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from toolkit.errors import PlanError, first_line
from toolkit.introspect import layer_lists
from toolkit.pipeline_parallel.stage_context import (
    PartialModuleList,
    PlaceholderModule,
    StageContext,
    hidden_of,
    replaced,
)
from toolkit.planning.pipeline_layout import across_stages

# Most values that layers of transformers return: hidden states, and weights or states that nobody reads in training.
_MOST_RETURNED = 3
# Tokens of the trial run: more than one, to differ from a single step of generation.
_TOKENS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderLayout:
    """The parts of a decoder, by names of its modules.

    Args:
        layers: Name of its list of decoder layers.
        before: Modules with weights or dropout that are called before the first layer.
        behind: Modules with weights or dropout that are called after the last layer, head included.
        returns: Number of values in the tuple that layers return; 0 if they return hidden states alone.
        features: Shape of the hidden states of one token.
    """

    layers: str
    before: tuple[str, ...]
    behind: tuple[str, ...]
    returns: int
    features: tuple[int, ...]


def find_anatomy(model: PreTrainedModel) -> DecoderLayout:
    """Find the parts of a causal language model; the model is not changed.

    Raises:
        PlanError: PIPELINE_LAYERS, PIPELINE_ARCHITECTURE if it cannot be split.
    """
    layers = find_layers(model)
    ends = _ends(model, layers)
    reasons = list(_reasons(model, layers))
    if reasons:
        raise _refused(model, reasons[0])
    trials = []
    for returns in range(_MOST_RETURNED + 1):
        trials.append(_DryRun(model, layers, ends, returns=returns))
        if trials[-1].problem is None:
            break
    else:  # if all runs failed, the problem of the one that got furthest
        raise _refused(model, max(trials, key=lambda one: len(one.calls)).problem or "")
    trial = trials[-1]
    before = tuple(name for name in ends if trial.is_before(name))
    behind = tuple(name for name in ends if name not in before)  # also what the base model does not call: the head
    return DecoderLayout(layers=layers, before=before, behind=behind, returns=trial.returns, features=trial.features)


def find_layers(model: nn.Module) -> str:
    """Return the name of a model's only list of decoder layers.

    Raises:
        PlanError: PIPELINE_LAYERS if there is not exactly one.
    """
    outermost = list(layer_lists(model)) or _lists_of_one_class(model)
    if len(outermost) > 1:  # towers for images or audio have layers too
        decoder = model.get_decoder() if isinstance(model, PreTrainedModel) else model
        outermost = [
            name for name in outermost if any(model.get_submodule(name) is one for one in decoder.children())
        ] or outermost
    if len(outermost) == 1:
        return outermost[0]
    found = f"it has {len(outermost)}: {', '.join(outermost)}" if outermost else "it has none"
    raise PlanError.of(
        code="PIPELINE_LAYERS",
        key="parallel.pipeline",
        message=f"a pipeline splits {type(model).__name__} at its only nn.ModuleList whose members are all a "
        f"GradientCheckpointingLayer, or else num_hidden_layers modules of one class, and {found}",
        fix="Set parallel.pipeline to 1; in your own model, derive the decoder layer from "
        "transformers.modeling_layers.GradientCheckpointingLayer and keep all layers in one nn.ModuleList",
        source="transformers modeling_layers.py",
    )


def _lists_of_one_class(model: Any) -> list[str]:
    """Return the lists of as many modules of one class as the model has layers: those of architectures that cannot recompute them."""
    count = getattr(getattr(model, "config", None), "num_hidden_layers", None)
    lists = {name: list(module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    return [
        name for name, members in lists.items() if len(members) == count and len({type(each) for each in members}) == 1
    ]


def base_of(model: PreTrainedModel) -> Any:
    """Return the module of a causal language model that runs the layers: the model inside it, or itself."""
    return getattr(model, model.base_model_prefix, model)


def width_of(model: PreTrainedModel) -> int:
    """Return the width of the hidden states between layers."""
    return int(model.config.get_text_config(decoder=True).hidden_size)


def _ends(model: nn.Module, layers: str, prefix: str = "") -> list[str]:
    """Return the outermost modules with weights or dropout that do not contain the layers, by name."""
    names: list[str] = []
    for own, module in model.named_children():
        name = f"{prefix}{own}"
        if layers.startswith(f"{name}."):
            names += _ends(module, layers, f"{name}.")
        elif name != layers and (isinstance(module, nn.Dropout) or any(True for _ in module.parameters())):
            names.append(name)
    return names


def _reasons(model: PreTrainedModel, layers: str) -> Iterator[str]:
    """Yield the problems that show without a run."""
    parts = layers.split(".")
    for depth in range(len(parts)):
        name = ".".join(parts[:depth])
        for own, weight in model.get_submodule(name)._parameters.items():
            if weight is not None:
                yield f"{f'{name}.{own}'.lstrip('.')} is used by the model itself, not by a module that a stage could have"
    for value, why in across_stages(model.config.get_text_config(decoder=True).to_dict()):
        yield f"{value}: {why}"


class _DryRun:
    """One run of a model with placeholders for its modules, and what it showed.

    Hidden states require gradients here, which shows any other input of a layer that depends on them.
    """

    def __init__(self, model: PreTrainedModel, layers: str, ends: list[str], *, returns: int) -> None:
        self.calls: list[str | int] = []
        self.problem: str | None = None
        self._layers, self.returns = layers, returns
        self.features: tuple[int, ...] = (width_of(model),)
        self._given: torch.Tensor | None = None
        stack: Any = model.get_submodule(layers)
        self._num_layers = len(stack)
        passage = StageContext(num_layers=self._num_layers, returns=returns)
        self._passage = passage
        # No layer is run, but a model may ask for the dtype of one.
        held = PartialModuleList(stack, frozenset(range(len(stack))), passage)
        stand_ins = {name: PlaceholderModule(passage, model.get_submodule(name)) for name in ends}
        for name, stand_in in stand_ins.items():
            stand_in.register_forward_pre_hook(lambda module, args, name=name: self.calls.append(name))
        try:
            with replaced(model, {**stand_ins, layers: held}), _dry_run_mode(model):
                self._run(model, passage, held)
        except Exception as error:  # any model code, which may need more than its modules
            self._note(f"its forward pass does not run without its modules: {first_line(error)}")
        if [call for call in self.calls if isinstance(call, int)] != list(range(self._num_layers)):
            self._note(f"it does not call the {self._num_layers} layers of {layers} once each, in their order")
        for name in ends:
            met = {
                sum(isinstance(call, int) for call in self.calls[:at])
                for at, call in enumerate(self.calls)
                if call == name
            }
            if len(met) > 1 or not met <= {0, self._num_layers}:
                self._note(f"{name} is called between the layers of {layers}, or on both sides of them")

    def _run(self, model: PreTrainedModel, passage: StageContext, held: PartialModuleList) -> None:
        weight = next(model.parameters())
        device = torch.device("cpu") if weight.is_meta else weight.device
        blank_BSD = torch.zeros((1, _TOKENS, width_of(model)), dtype=model.dtype, device=device, requires_grad=True)
        no_padding = (getattr(model.config.get_text_config(decoder=True), "pad_token_id", None) or 0) + 1
        ids = torch.full((1, _TOKENS), no_padding, dtype=torch.int64, device=device)
        nowhere = range(self._num_layers, self._num_layers)
        with passage.through(nowhere, blank_BSD=blank_BSD, received=None, training=False), torch.device(device):
            for position, layer in enumerate(held):
                layer.register_forward_hook(partial(self._on_layer, position), with_kwargs=True)
            base_of(model)(input_ids=ids, use_cache=False)

    def _on_layer(self, position: int, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """Note a layer's call, and return hidden states that are distinct from all others."""
        self.calls.append(position)
        hidden = hidden_of(args, kwargs)
        if self._given is not None and hidden is not self._given:
            self._note(f"it changes hidden states between layer {position - 1} and layer {position} of {self._layers}")
        others = (args[1:], {name: value for name, value in kwargs.items() if value is not hidden})
        if any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in tree_leaves(others)):
            self._note(
                f"layer {position} of {self._layers} reads the embeddings or another layer's output in addition to its "
                "input"
            )
        if position == 0:
            self.features = tuple(hidden.shape[2:])
        self._given = torch.zeros_like(hidden, requires_grad=True)
        return self._passage.returned(self._given)

    def _note(self, problem: str) -> None:
        self.problem = self.problem or problem

    def is_before(self, name: str) -> bool:
        """Return whether a module is called, and only before the layers."""
        return name in self.calls and self.calls.index(name) < self.calls.index(0)


@contextlib.contextmanager
def _dry_run_mode(model: PreTrainedModel) -> Iterator[None]:
    """Give meta buffers values, turn dropout off, and have masks made as plain tensors, for a block."""
    before = [(module, module.training, dict(module._buffers)) for module in model.modules()]
    config = model.config
    attention = config._attn_implementation
    config._attn_implementation = "eager"
    for module, _, buffers in before:
        module.training = False
        module._buffers.update(_with_values(buffers))
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            yield
    finally:
        for module, training, buffers in before:
            module.training = training
            module._buffers.clear()
            module._buffers.update(buffers)
        config._attn_implementation = attention


def _with_values(buffers: Mapping[str, torch.Tensor | None]) -> dict[str, torch.Tensor]:
    return {
        name: torch.zeros_like(buffer, device="cpu")
        for name, buffer in buffers.items()
        if buffer is not None and buffer.is_meta
    }


def _refused(model: PreTrainedModel, reason: str) -> PlanError:
    return PlanError.of(
        code="PIPELINE_ARCHITECTURE",
        key="parallel.pipeline",
        message=f"{type(model).__name__} cannot be split into stages: {reason}",
        fix="Set parallel.pipeline to 1",
    )
