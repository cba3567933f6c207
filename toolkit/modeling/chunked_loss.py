"""A causal language model of any architecture that computes its loss without all logits.

The model's own forward pass runs with its head replaced by a placeholder that records the head's input; the head is then
called once, with the targets. So ZeRO-3 gathers the head like any module, adapters stay in place, and everything else
that the model computes, such as a router's loss, is kept.

B: sequences of a micro batch, S: tokens of a sequence, D: width, V: vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeCausalLMOutputWithPast, MoeModelOutputWithPast

from toolkit.config.job import Loss
from toolkit.context_parallel.slices import SequenceSlice
from toolkit.errors import PlanError, first_line
from toolkit.modeling import liger
from toolkit.modeling.linear_cross_entropy import LogitMap, chunked_cross_entropy, linear_cross_entropy
from toolkit.modeling.loss import shifted

# Head outputs for testing what a model does to them; different magnitudes and signs distinguish scaling from capping.
PROBE = (-41.0, -7.5, -0.5, 0.0, 0.25, 3.0, 19.0, 64.0)
PROBE_TOLERANCE = 1e-5

# Maps head, hidden states and targets to the loss.
HeadLoss = Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]


def apply_loss(model: Any, loss: Loss, *, part: SequenceSlice | None = None) -> None:
    """Make a model that is called with `labels` return the summed loss instead of logits; `full` leaves it unchanged.

    Args:
        model: A `PreTrainedModel`, or a `peft.PeftModel` around one; adapters must be in place.
        loss: Value of `train.loss`.
        part: Slice of the sequence that the model computes; None for all of it. Labels are those of the whole sequence.

    Raises:
        PlanError: LOSS_ARCHITECTURE if the model does not end in one head whose output is at most scaled or capped;
            LOSS_LIGER_HEAD for a head that Liger's kernel does not support; LOSS_LIGER_PACKAGE.
    """
    if loss == "full":
        return
    inner: PreTrainedModel = model.get_base_model() if hasattr(model, "peft_config") else model
    if loss == "liger":
        liger.check_installed()
    path = _head_path(inner, loss)
    mapped = find_logit_map(inner, path, loss)
    evaluate = _head_loss(inner.get_submodule(path), mapped, loss)
    # The model and its head are looked up in each call, so that a deep copy runs its own.
    own_forward = inner.forward.__func__

    def forward(self: PreTrainedModel, *args: Any, labels: torch.Tensor | None = None, **inputs: Any) -> Any:
        if labels is None:
            return own_forward(self, *args, **inputs)
        with _without_head(self, path) as taken:
            outputs = own_forward(self, *args, **inputs)
        [hidden_BSD] = taken.inputs
        targets_BS = shifted(labels, part)
        return MoeCausalLMOutputWithPast(
            loss=evaluate(self.get_submodule(path), hidden_BSD.flatten(0, -2), targets_BS.flatten()),
            aux_loss=getattr(outputs, "aux_loss", None),
        )

    inner.forward = MethodType(forward, inner)


def find_logit_map(model: PreTrainedModel, head_path: str, loss: Loss) -> LogitMap:
    """Find the map from a head's output to the logits, by running the model's outermost forward pass on known numbers.

    Args:
        model: Model on any device, meta included: its weights are not read.
        head_path: Module name of the head.
        loss: Value of `train.loss`, for the error.

    Raises:
        PlanError: LOSS_ARCHITECTURE if the map is not the identity, a factor or a cap.
    """
    given = torch.tensor(PROBE)
    with _without_head(model, head_path, answer=given.view(1, 1, -1), alone=True) as taken, torch.no_grad():
        try:
            outputs = model.forward(input_ids=torch.zeros((1, 1), dtype=torch.int64))
            seen = outputs.logits.float().flatten()
        except Exception as error:  # any model code, which may need more than its head
            raise _refused(
                model, loss, f"its forward pass cannot be separated from its head's: {first_line(error)}"
            ) from error
    if len(taken.inputs) != 1 or seen.shape != given.shape:
        raise _refused(model, loss, f"it calls its head {len(taken.inputs)} times")
    scale = float(seen[4] / given[4])
    caps = [value for name, value in vars(model.config.get_text_config(decoder=True)).items() if _is_cap(name, value)]
    for mapped in (LogitMap(), LogitMap(scale=scale), *(LogitMap(cap=float(cap)) for cap in caps)):
        if torch.allclose(mapped.apply(given), seen, rtol=PROBE_TOLERANCE, atol=PROBE_TOLERANCE):
            return mapped
    raise _refused(
        model, loss, "it does more to its head's output than scale it or cap it by a value of its config.json"
    )


def _is_cap(name: str, value: Any) -> bool:
    return "cap" in name and isinstance(value, float | int) and not isinstance(value, bool) and value > 0


class _Taken(nn.Module):
    """Placeholder for a head: records its input and returns no logits."""

    _head: Any

    def __init__(self, head: Any, answer: torch.Tensor | None) -> None:
        super().__init__()
        self.inputs: list[torch.Tensor] = []
        object.__setattr__(self, "_head", head)  # not as a submodule: the engine must find the head in only one place
        self._answer = answer

    @property
    def weight(self) -> Any:
        """The head's weight, for models that read its dtype."""
        return self._head.weight

    def forward(self, hidden_BSD: torch.Tensor) -> torch.Tensor:
        self.inputs.append(hidden_BSD)
        return hidden_BSD.new_zeros((*hidden_BSD.shape[:-1], 1)) if self._answer is None else self._answer


class _Absent(nn.Module):
    """Placeholder for all of a model but its head: returns the hidden state of one token."""

    _absent: nn.Module

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        object.__setattr__(self, "_absent", module)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._absent, name)
        return self if isinstance(value, nn.Module) else value  # a model inside the model, such as OPT's decoder

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return _AbsentOutput(last_hidden_state=torch.zeros((1, 1, 1)))


class _AbsentOutput(MoeModelOutputWithPast):  # type: ignore[misc]
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


@contextlib.contextmanager
def _without_head(
    model: PreTrainedModel, path: str, *, answer: torch.Tensor | None = None, alone: bool = False
) -> Iterator[_Taken]:
    """Replace the head of a model by a placeholder for a block and, with `alone`, all other modules too."""
    before = dict(model._modules)
    taken = _Taken(before[path], answer)
    model._modules[path] = taken
    if alone:
        others = {name: module for name, module in before.items() if module is not None and name != path}
        model._modules.update({name: _Absent(module) for name, module in others.items()})
    try:
        yield taken
    finally:
        model._modules.update(before)


def _head_path(model: PreTrainedModel, loss: Loss) -> str:
    head = model.get_output_embeddings()
    path: str | None = next((name for name, module in model.named_children() if module is head), None)
    if head is None or path is None:
        raise _refused(model, loss, "its head is not a module of the model itself")
    return path


def _head_loss(head: Any, mapped: LogitMap, loss: Loss) -> HeadLoss:
    """Return the function that computes the loss through the head's own call."""
    linear = _trained_linear(head)
    if linear is not None:
        linear.forward = MethodType(_forward_with_targets, linear)  # type: ignore[method-assign]
        fused = liger.liger_cross_entropy if loss == "liger" else linear_cross_entropy
        return lambda head, hidden, targets: head(hidden, targets, mapped, fused)
    if loss == "liger":
        raise PlanError.of(
            code="LOSS_LIGER_HEAD",
            key="train.loss",
            message=f"loss=liger with a head of class {type(head).__name__}: Liger's kernel takes one linear layer",
            fix="Set train.loss to chunked, or leave the head out of train.lora.target_modules",
            source="liger_kernel ops/fused_linear_cross_entropy.py",
        )
    width = getattr(head, "out_features", None) or head.weight.shape[0]
    return lambda head, hidden, targets: chunked_cross_entropy(head, hidden, targets, mapped, vocab_size=width)


def _trained_linear(head: Any) -> nn.Linear | None:
    """Return the linear layer of a head, or the one that peft trains in its place (`modules_to_save`); else None."""
    if hasattr(head, "modules_to_save"):
        head = head.modules_to_save[head.active_adapters[0]]
    return head if type(head) is nn.Linear else None


def _forward_with_targets(
    self: nn.Linear,
    hidden: torch.Tensor,
    targets_T: torch.Tensor | None = None,
    mapped: LogitMap | None = None,
    fused: Callable[..., torch.Tensor] | None = None,
) -> torch.Tensor:
    """Return the loss if targets are given: inside the head's own call ZeRO-3 has gathered its weights."""
    if targets_T is None or fused is None:
        return functional.linear(hidden, self.weight, self.bias)
    return fused(hidden, self.weight, self.bias, targets_T, mapped)


def _refused(model: PreTrainedModel, loss: Loss, reason: str) -> PlanError:
    return PlanError.of(
        code="LOSS_ARCHITECTURE",
        key="train.loss",
        message=f"loss={loss} cannot be computed for {type(model).__name__}: {reason}",
        fix="Set train.loss to full",
    )
