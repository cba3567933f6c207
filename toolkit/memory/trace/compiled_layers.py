"""The layers of a traced model that run compiled, and those that stay eager, by the numbers that the whole model gives them."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

from toolkit.memory.kernels.compiled import LayerCompiler
from toolkit.memory.kernels.fake_attention import NAME as FLASH
from toolkit.memory.trace.representatives import LayerStack, kinds_of
from toolkit.memory.trace.spec import TraceSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledStacks:
    """Layers that torch.compile compiles, each by itself (toolkit modeling/build.py compile_layers).

    Args:
        compiler: What compiles them.
        stacks: Layers of the traced model.
        kinds: Kinds of the traced layers of each stack.
        name: Class of the layers.
    """

    compiler: LayerCompiler
    stacks: Sequence[LayerStack]
    kinds: Sequence[Sequence[Hashable]]
    name: str

    @classmethod
    def of(cls, spec: TraceSpec, model: Any, stacks: Sequence[LayerStack]) -> Self:
        """Have the traced layers of a model run compiled, before the trace hooks them."""
        compiler, kinds, names = LayerCompiler(device=spec.device), [], []
        for stack in stacks:
            layers = model.get_submodule(stack.prefix)
            own = slice(stack.offset, stack.offset + len(stack.kept))
            kinds.append(kinds_of(model, layers)[own])
            names += [type(layer).__name__ for layer in layers]
            if spec.attention == FLASH:
                compiler.reasons |= dict.fromkeys(kinds[-1], "flash-attn's kernels are not torch's")
                continue
            compiler.install(layers[own], kinds[-1])
        return cls(compiler=compiler, stacks=stacks, kinds=kinds, name=" and ".join(dict.fromkeys(names)))

    def describe(self) -> Iterator[str]:
        """Yield what compiled the layers, and which of them stay eager and why."""
        by_reason: dict[str, list[int]] = {}
        num_layers = 0
        for stack, kinds in zip(self.stacks, self.kinds, strict=True):
            num_layers += stack.num_layers
            for layer, position in enumerate(stack.stands_for):
                reason = self.compiler.reasons.get(kinds[position])
                if reason is not None:
                    by_reason.setdefault(reason, []).append(stack.first + layer)
        if sum(map(len, by_reason.values())) < num_layers:
            yield f"compiled layers are estimated from the code that torch {torch.__version__} writes for them"
        for reason, layers in by_reason.items():
            which = "all layers" if len(layers) == num_layers else f"layers {_ranges(layers)}"
            yield f"under torch.compile {which} ({self.name}) are estimated as eager, which needs no less: {reason}"


def _ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers as ranges.

    >>> _ranges([0, 1, 2, 5, 7, 8])
    '0-2, 5, 7-8'
    """
    stretches: list[list[int]] = []
    for number in numbers:
        if stretches and number == stretches[-1][-1] + 1:
            stretches[-1].append(number)
        else:
            stretches.append([number])
    return ", ".join(str(each[0]) if len(each) == 1 else f"{each[0]}-{each[-1]}" for each in stretches)
