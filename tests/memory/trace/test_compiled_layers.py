"""Which layers of a compiled model stay eager, by their numbers in the whole model."""

from __future__ import annotations

import torch
from traced_models import H100

from toolkit.memory.kernels.compiled import LayerCompiler
from toolkit.memory.trace.compiled_layers import CompiledStacks
from toolkit.memory.trace.representatives import LayerStack

VERSION = f"compiled layers are estimated from the code that torch {torch.__version__} writes for them"


def described(reasons):
    """Describes ten layers, of which every fifth has another kind, three of them traced."""
    stack = LayerStack(prefix="layers", kept=(0, 4, 5), stands_for=(0, 0, 0, 0, 1, 2, 2, 2, 2, 1))
    compiler = LayerCompiler(device=H100, reasons=reasons)
    kinds = [["sliding", "full", "sliding"]]
    return list(CompiledStacks(compiler=compiler, stacks=[stack], kinds=kinds, name="Layer").describe())


def test_all_that_compiles_is_one_line():
    assert described({}) == [VERSION]


def test_layers_that_stay_eager_are_numbered():
    eager = "are estimated as eager, which needs no less: a graph breaks"
    assert described({"full": "a graph breaks"}) == [VERSION, f"under torch.compile layers 4, 9 (Layer) {eager}"]
    assert described({"sliding": "a graph breaks"}) == [VERSION, f"under torch.compile layers 0-3, 5-8 (Layer) {eager}"]
    both = dict.fromkeys(("full", "sliding"), "a graph breaks")
    assert described(both) == [f"under torch.compile all layers (Layer) {eager}"]
