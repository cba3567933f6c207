"""Twins run whole and in parts on the CPU, and what of the parts' outputs and gradients is not the whole's."""

from __future__ import annotations

import contextlib
import copy
import threading
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedConfig, PreTrainedModel

from toolkit.errors import first_line
from toolkit.twins.sizes import VOCABULARY, twin_config

# Largest difference in fp32, of the loss and outputs as they are and of gradients as a share of their largest element.
TOLERANCE = 1e-5
# Difference up to which a failed comparison may be rounding, so that it is made again in double precision.
ROUNDING = 1e-3
# Elements of a gradient below which all of it may be rounding: that of a bias of keys is, since it changes nothing.
SMALL = 1e-2
ROWS, TOKENS = 2, 12


class NoTwinError(Exception):
    """No small twin of a model runs on the CPU, so that nothing can be proven of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitProof:
    """What the comparison of a twin and its parts showed.

    Args:
        difference: Largest difference from the twin: of loss and scores, and of gradients as a share of their largest element.
        kinds: Patterns and classes of the twin's modules: of a model that has others, the twin has proven nothing.
        problem: Why the model is refused; "" if it is not.
    """

    difference: float
    kinds: tuple[str, ...]
    problem: str

    @classmethod
    def refused(cls, problem: str, *, difference: float = float("inf")) -> SplitProof:
        """Return the proof of a model that is refused."""
        return cls(difference=difference, kinds=(), problem=problem)


@contextlib.contextmanager
def plain_torch() -> Iterator[None]:
    """Run real operations on the CPU in a `with` block, whatever modes and default devices are on, and leave no random state changed."""
    with (
        unset_fake_temporarily(),
        torch.device("cpu"),
        torch.random.fork_rng(devices=[]),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
    ):
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


def build_twin(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    """Build the twin of a model in fp32, its weights drawn and none of them what its class initialises it to.

    Raises:
        NoTwinError: If the class refuses the small sizes.
    """
    try:
        small = twin_config(config)
        torch.manual_seed(0)
        for attention in ("sdpa", "eager"):  # the first that the class supports
            try:
                model: PreTrainedModel = model_class._from_config(
                    small, attn_implementation=attention, dtype=torch.float32
                )
                break
            except ValueError:
                if attention == "eager":
                    raise
    except Exception as error:  # code of any model
        raise NoTwinError(
            f"its configuration has no small twin: {type(error).__name__}: {first_line(error)}"
        ) from error
    with torch.no_grad():
        for weight in model.parameters():
            if weight.is_floating_point():
                weight.add_(torch.randn_like(weight), alpha=0.05)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model.config.use_cache = model.config.get_text_config(decoder=True).use_cache = False
    return model.train()


def make_batch() -> dict[str, torch.Tensor]:
    """Return token ids and labels, some of which do not count. Shape (ROWS, TOKENS)."""
    ids = torch.randint(VOCABULARY // 2, VOCABULARY - 1, (ROWS, TOKENS), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, :4] = -100
    return {"input_ids": ids, "labels": labels}


@dataclass(slots=True, kw_only=True)
class Run:
    """What one run of a model showed.

    Args:
        loss: Its loss.
        logits: Its scores; whole where ranks have parts of them.
        outputs: First tensor that each module returned, in the order of their ends.
        gradients: Gradient of each parameter, by name.
    """

    loss: float = 0.0
    logits: torch.Tensor | None = None
    outputs: dict[str, torch.Tensor] = field(default_factory=dict)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)


def run(model: Any, batch: Mapping[str, torch.Tensor]) -> Run:
    """Run a model forward and backward.

    Raises:
        NoTwinError: If it fails, with the module at fault.
    """
    made = Run()
    hooks = [module.register_forward_hook(_keep(made, name)) for name, module in model.named_modules()]
    try:
        outputs = model(**batch)
        outputs.loss.backward()
    except threading.BrokenBarrierError:  # another rank has failed
        raise
    except Exception as error:
        place = failing_module(error, model) or "outside its modules"
        raise NoTwinError(f"{place}: {type(error).__name__}: {first_line(error)}") from error
    finally:
        for hook in hooks:
            hook.remove()
    made.loss, made.logits = outputs.loss.item(), outputs.logits.detach()
    made.gradients = gradients_of(model)
    return made


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the gradient of each parameter by name, tied ones under each name; without those that have none."""
    return {
        name: weight.grad.detach()
        for name, weight in model.named_parameters(remove_duplicate=False)
        if weight.grad is not None
    }


def gradient_difference(found: torch.Tensor | None, wanted: torch.Tensor) -> float:
    """Return the largest difference of a gradient, as a share of its largest element if that is above `SMALL`; infinite without one."""
    scale = max(SMALL, wanted.abs().max().item())
    return float("inf") if found is None else difference(found / scale, wanted / scale)


def difference(found: torch.Tensor, wanted: torch.Tensor, *, least: float = 1.0) -> float:
    """Return the largest difference, as a share of the largest element of `wanted` if that is above `least`."""
    if found.shape != wanted.shape:
        return float("inf")
    if not wanted.numel():
        return 0.0
    found, wanted = found.double(), wanted.double()
    largest = wanted.abs().nan_to_num(0, 0, 0).max().item()
    gap = (found - wanted).abs()
    gap = torch.where((found == wanted) | (found.isnan() & wanted.isnan()), 0.0, gap)
    worst = gap.max().item()
    return float("inf") if worst != worst else worst / max(least, largest)


def failing_module(error: BaseException, model: nn.Module) -> str:
    """Return the name of the innermost module whose forward pass was running; "" for the model's own."""
    names = {id(module): name for name, module in model.named_modules()}
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        module = frame.f_locals.get("self")
        name: str = names.get(id(module), "") if isinstance(module, nn.Module) else ""
        if name:
            return name
    return ""


def module_kinds(model: nn.Module) -> tuple[str, ...]:
    """Return the pattern of the name of each module, with its class: numbers in names are `*`."""
    found = {
        f"{'.'.join('*' if part.isdigit() else part for part in name.split('.'))}:{type(module).__name__}"
        for name, module in model.named_modules()
        if name
    }
    return tuple(sorted(found))


def copy_of(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy without gradients."""
    made = copy.deepcopy(model)
    made.zero_grad(set_to_none=True)
    return made


def _keep(made: Run, name: str) -> Any:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        first = next((leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)), None)
        if first is not None and first.is_floating_point() and name not in made.outputs:
            made.outputs[name] = first.detach().clone()

    return hook
