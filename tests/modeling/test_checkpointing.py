"""Checkpointed layers recompute, as many as asked; gradients stay the same; inputs that should leave do."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from tiny_models import tiny_model, tokens
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from toolkit.config.job import Kept
from toolkit.errors import PlanError
from toolkit.memory.kernels.device import Device
from toolkit.memory.trace.events import held
from toolkit.memory.trace.run import trace_model
from toolkit.memory.trace.spec import TraceSpec
from toolkit.modeling.checkpointing import apply_gradient_checkpointing, evenly_spaced

LAYERS = 5


def model_of(architecture: str = "llama", **overrides: Any) -> PreTrainedModel:
    layers = {"n_layer": LAYERS} if architecture == "gpt2" else {"num_hidden_layers": LAYERS}
    model = tiny_model(architecture, **layers, **overrides).train()
    model.config.use_cache = False
    return model


def layers_of(model: PreTrainedModel) -> nn.ModuleList:
    return model.transformer.h if hasattr(model, "transformer") else model.model.layers


def gradients(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    torch.manual_seed(11)
    model(input_ids=tokens(), labels=tokens(), use_cache=False).loss.backward()
    return {name: weight.grad for name, weight in model.named_parameters()}


def count_forwards(model: PreTrainedModel) -> list[int]:
    counts = [0] * LAYERS

    def count(index: int) -> None:
        counts[index] += 1

    for index, layer in enumerate(layers_of(model)):
        first = next(
            module for module in layer.modules() if isinstance(module, nn.LayerNorm) or "RMSNorm" in repr(module)
        )
        first = next(child for child in first.modules() if not list(child.children()))
        first.register_forward_pre_hook(lambda *_, index=index: count(index))
    return counts


@pytest.mark.parametrize("offload", [False, True], ids=["on device", "on host"])
@pytest.mark.parametrize(
    ("fraction", "recomputing"), [(0.0, []), (0.2, [0]), (0.4, [0, 2]), (0.6, [0, 1, 3]), (1.0, [0, 1, 2, 3, 4])]
)
def test_the_asked_share_of_the_layers_runs_twice(fraction: float, recomputing: list[int], offload: bool) -> None:
    model = model_of()
    counts = count_forwards(model)
    assert apply_gradient_checkpointing(model, fraction=fraction, offload_inputs=offload) == len(recomputing)
    gradients(model)
    assert counts == [2 if index in recomputing else 1 for index in range(LAYERS)]


def test_every_nth_layer_runs_twice() -> None:
    model = model_of()
    counts = count_forwards(model)
    assert apply_gradient_checkpointing(model, fraction=1 / 3, every=3, offload_inputs=False) == 2
    gradients(model)
    assert counts == [2, 1, 1, 2, 1]


KEPT: list[tuple[Kept, ...]] = [("linear",), ("attention",), ("linear", "attention")]


@pytest.mark.parametrize("keep", KEPT)
@pytest.mark.parametrize(
    ("architecture", "overrides"),
    [("llama", {}), ("gpt2", {"resid_pdrop": 0.3, "embd_pdrop": 0.1}), ("llama", {"attn_implementation": "eager"})],
)
def test_gradients_are_the_same_whatever_is_kept(
    architecture: str, overrides: dict[str, Any], keep: tuple[Kept, ...]
) -> None:
    expected = gradients(model_of(architecture, **overrides))
    model = model_of(architecture, **overrides)
    apply_gradient_checkpointing(model, fraction=1.0, keep=keep, offload_inputs=False)
    found = gradients(model)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


class Counts(TorchDispatchMode):
    """Counts operators, and keeps weak references to what they made."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: Counter[str] = Counter()
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators[func._schema.name] += 1
        result = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return result

    def held(self) -> int:
        """Bytes that still exist of what was made."""
        return sum(size for reference, size in self.made.values() if not reference.expired())


def _kept(keep: tuple[Kept, ...], *, fraction: float = 1.0) -> tuple[int, Counter[str]]:
    """Bytes between the passes of a run on CPU, and the operators of its backward pass."""
    model = model_of(attn_implementation="eager")
    apply_gradient_checkpointing(model, fraction=fraction, keep=keep, offload_inputs=False)
    with Counts() as forward:
        loss = model(input_ids=tokens(), labels=tokens()).loss
        held = forward.held()
    with Counts() as backward:
        loss.backward()
    return held, backward.operators


def test_what_is_kept_is_not_computed_again_and_what_the_estimate_foresees() -> None:
    none, kept, plain = _kept(()), _kept(("linear",)), _kept((), fraction=0.0)
    assert kept[1]["aten::mm"] == plain[1]["aten::mm"] < none[1]["aten::mm"]
    config = model_of().config
    batch, length = tokens().shape
    spec: dict[str, Any] = {
        "micro_batch": batch,
        "sequence_length": length,
        "dtype": torch.float32,
        "attention": "eager",
    }

    def traced(**told: Any) -> int:
        trace = trace_model(config, TraceSpec(device=Device(capability=9.0), checkpointing=1.0, **spec, **told))
        return sum(held(trace.forward).values())

    assert kept[0] - none[0] == traced(checkpoint_keep=("linear",)) - traced()


def test_an_evaluation_does_not_recompute() -> None:
    model = model_of()
    apply_gradient_checkpointing(model, fraction=1.0, offload_inputs=True)
    counts = count_forwards(model)
    with torch.no_grad():
        model.eval()(input_ids=tokens())
    assert counts == [1] * LAYERS


@pytest.mark.parametrize("count", range(1, 9))
def test_chosen_layers_are_spread_evenly(count: int) -> None:
    for wanted in range(1, count + 1):
        chosen = sorted(evenly_spaced(count, wanted / count))
        assert len(chosen) == wanted
        gaps = [after - before for before, after in zip(chosen, [*chosen[1:], count], strict=True)]
        assert max(gaps) - min(gaps) <= 1
    assert len(evenly_spaced(count, 0.001)) == 1


@pytest.mark.parametrize(
    ("architecture", "overrides"),
    [
        ("llama", {}),
        ("gpt2", {}),
        ("gemma2", {}),
        ("mixtral", {"num_local_experts": 4}),
        ("llama", {"attention_dropout": 0.3}),
        ("gpt2", {"attn_pdrop": 0.3, "resid_pdrop": 0.3, "embd_pdrop": 0.1}),
    ],
)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_gradients_are_the_same(architecture: str, overrides: dict[str, Any], attention: str) -> None:
    if architecture == "gemma2":
        attention = "eager"  # it soft-caps its scores, which sdpa cannot
    overrides = {**overrides, "attn_implementation": attention}
    expected = gradients(model_of(architecture, **overrides))
    for fraction, offload in ((1.0, False), (1.0, True), (0.6, True)):
        model = model_of(architecture, **overrides)
        apply_gradient_checkpointing(model, fraction=fraction, offload_inputs=offload)
        found = gradients(model)
        assert found.keys() == expected.keys()
        unequal = [name for name, value in found.items() if not torch.equal(value, expected[name])]
        assert unequal == []


def test_dropout_of_an_adapter_is_drawn_again_alike() -> None:
    from toolkit.config.job import Lora
    from toolkit.modeling.lora import apply_lora

    def adapted(**checkpointing: Any) -> dict[str, torch.Tensor]:
        model = apply_lora(model_of(), Lora(r=4, lora_dropout=0.5), seed=0)
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                nn.init.constant_(weight, 0.1)
        if checkpointing:
            apply_gradient_checkpointing(model, fraction=1.0, **checkpointing)
        return {name: value for name, value in gradients(model.train()).items() if value is not None}

    expected = adapted()
    assert all("lora" in name for name in expected)
    for offload in (False, True):
        found = adapted(offload_inputs=offload)
        assert found.keys() == expected.keys(), "a frozen embedding must not cut the graph"
        assert all(torch.equal(value, expected[name]) for name, value in found.items())


@pytest.mark.parametrize("offload", [False, True], ids=["on device", "on host"])
def test_inputs_leave_the_device_after_the_forward_pass(offload: bool) -> None:
    model = model_of()
    apply_gradient_checkpointing(model, fraction=1.0, offload_inputs=offload)
    inputs: list[StorageWeakRef] = []
    hooks = [
        layer.register_forward_hook(
            lambda _, __, output: inputs.append(StorageWeakRef(_hidden(output).untyped_storage()))
        )
        for layer in layers_of(model)
    ]
    loss = model(input_ids=tokens(), labels=tokens()).loss
    for hook in hooks:
        hook.remove()
    # What a layer gives is the input of the next; the last one's is kept by the final norm.
    expired = [reference.expired() for reference in inputs[:-1]]
    assert expired == [offload] * (LAYERS - 1)
    loss.backward()


def _hidden(output: Any) -> torch.Tensor:
    return output[0] if isinstance(output, tuple) else output


def test_a_model_without_layers_that_recompute_is_refused() -> None:
    with pytest.raises(PlanError) as caught:
        apply_gradient_checkpointing(nn.Linear(2, 2), fraction=1.0, offload_inputs=False)
    assert caught.value.codes == ("CHECKPOINTING_LAYERS",)
    assert apply_gradient_checkpointing(nn.Linear(2, 2), fraction=0.0, offload_inputs=False) == 0


def _peak_bytes(*, offload: bool, fraction: float) -> tuple[int, int]:
    """Memory beyond the weights at the end of a forward pass, and its peak over forward and backward, bytes."""
    width = {"hidden_size": 1024, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 8}
    model = tiny_model("llama", num_hidden_layers=24, max_position_embeddings=4096, **width).cuda().bfloat16().train()
    model.config.use_cache = False
    apply_gradient_checkpointing(model, fraction=fraction, offload_inputs=offload)
    ids = torch.randint(3, 64, (2, 4096), device="cuda")
    model(input_ids=ids, labels=ids).loss.backward()  # gradients and kernels' workspaces are there from now on
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss = model(input_ids=ids, labels=ids).loss
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated() - before
    loss.backward()
    return held, torch.cuda.max_memory_allocated() - before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_memory_on_a_gpu_falls_by_the_inputs() -> None:
    inputs = 24 * 2 * 4096 * 1024 * 2  # layers × batch × sequence × width × bytes of bf16
    kept, kept_peak = _peak_bytes(offload=False, fraction=1.0)
    moved, moved_peak = _peak_bytes(offload=True, fraction=1.0)
    assert kept - moved == pytest.approx(inputs, rel=0.1)
    assert kept_peak - moved_peak > 0.7 * inputs
    none_held, _ = _peak_bytes(offload=False, fraction=0.0)
    half_held, _ = _peak_bytes(offload=False, fraction=0.5)
    assert kept < half_held < none_held
