"""Compiled layers in a trace: less than eager ones, the same for few layers as for all, eager where they cannot compile."""

from __future__ import annotations

import pytest
import torch
from torch._inductor import config as inductor_config
from torch.nn import functional
from traced_models import H100, peaks, traced
from transformers.models.llama.modeling_llama import LlamaMLP

from toolkit.config.job import Lora
from toolkit.memory.kernels import compiled

pytestmark = pytest.mark.usefixtures("compiled_anew")


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory):
    """Has the module's own folder for code; what other tests have lowered is not read."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        patch.setenv("TOOLKIT_NO_CACHE", "")
        yield folder


def untold(trace):
    """The assumptions of a trace, but for the version of torch."""
    return [line for line in trace.assumptions if "torch.compile" in line]


def test_a_compiled_layer_keeps_less_than_an_eager_one_and_its_code_is_kept(cache):
    eager, once = traced("llama"), traced("llama", torch_compile=True)
    assert untold(once) == []
    assert once.assumptions == (
        f"compiled layers are estimated from the code that torch {torch.__version__} writes for them",
    )
    assert peaks(once)["forward"] < 0.9 * peaks(eager)["forward"]
    assert [each.name for each in once.parameters] == [each.name for each in eager.parameters]
    files = sorted((cache / "accelerator-toolkit" / "inductor").iterdir())
    assert len(files) == 2  # both halves of one graph
    before = [path.stat().st_mtime_ns for path in files]
    files[0].write_text("damaged")
    again = traced.__wrapped__("llama", torch_compile=True)
    assert peaks(again) == peaks(once)
    assert [path.stat().st_mtime_ns == time for path, time in zip(files, before, strict=True)] == [False, True]


def test_functions_of_torch_are_as_before():
    kept = functional.scaled_dot_product_attention
    traced("llama", torch_compile=True)
    assert functional.scaled_dot_product_attention is kept


def test_a_layer_that_takes_too_long_stays_eager(monkeypatch):
    monkeypatch.setattr(compiled, "SECONDS_PER_GRAPH", 0.0)
    limited = traced.__wrapped__("llama", torch_compile=True)
    assert peaks(limited) == peaks(traced("llama"))
    assert untold(limited) == [
        "under torch.compile all layers (LlamaDecoderLayer) are estimated as eager, which needs no less: it is not compiled "
        "within 0 s"
    ]


def test_a_layer_that_breaks_the_graph_stays_eager(monkeypatch):
    forward = LlamaMLP.forward

    def broken(self, x):
        torch._dynamo.graph_break()
        return forward(self, x)

    monkeypatch.setattr(LlamaMLP, "forward", broken)
    trace = traced.__wrapped__("llama", torch_compile=True)
    assert peaks(trace) == peaks(traced.__wrapped__("llama"))
    [line] = untold(trace)
    assert "Call to `torch._dynamo.graph_break()`" in line


def test_a_torch_that_has_changed_its_compiler_compiles_nothing(monkeypatch):
    monkeypatch.setattr(compiled, "missing_names", lambda: ["torch._inductor.graph:GraphLowering.codegen"])
    trace = traced.__wrapped__("llama", torch_compile=True)
    assert peaks(trace) == peaks(traced("llama"))
    [line] = untold(trace)
    assert "has changed its compiler (torch._inductor.graph:GraphLowering.codegen)" in line


def test_flash_attention_of_its_own_package_is_not_compiled():
    trace = traced("llama", "flash", torch_compile=True)
    assert peaks(trace) == peaks(traced("llama", "flash"))
    assert len(untold(trace)) == 1


def test_what_a_process_has_set_for_its_own_models_changes_nothing():
    wanted = peaks(traced("llama", torch_compile=True))
    with (
        torch.compiler.set_stance("force_eager"),
        inductor_config.patch(max_autotune=True, cpp_wrapper=True),
        torch.autograd.set_detect_anomaly(True),
        torch.autocast("cpu", dtype=torch.bfloat16),
        torch.no_grad(),
        torch.device("meta"),
    ):
        trace = traced.__wrapped__("llama", torch_compile=True)
        assert inductor_config.max_autotune
    assert untold(trace) == []
    assert peaks(trace) == wanted


def test_without_a_folder_nothing_is_kept():
    cache = compiled.LayerCompiler(device=H100, cache=None)
    assert cache.reasons == {}


@pytest.mark.full
@pytest.mark.parametrize(
    "way",
    ["plain", "checkpointing", "half of the layers checkpointed", "LoRA", "LoRA with checkpointing", "padded", "fp32"],
)
@pytest.mark.parametrize("architecture", ["llama", "gemma3_text", "phi3", "gpt_neox", "qwen3_moe"])
def test_few_layers_represent_all(architecture, way):
    few, every = (traced(architecture, way, torch_compile=True, all_layers=whole) for whole in (False, True))
    # Grouped products of experts break the graph beside adapters, and in fp32.
    breaks = architecture == "qwen3_moe" and (way.startswith("LoRA") or way == "fp32")
    assert untold(few) == untold(every)
    assert [("Qwen3MoeDecoderLayer" in told, "estimated as eager" in told) for told in untold(few)] == breaks * [
        (True, True)
    ]
    assert peaks(few) == peaks(every)
    if way in (
        "plain",
        "padded",
    ):  # a layer's compiled code frees nothing before its end, which shows where little else is kept
        assert peaks(few)["forward"] <= peaks(traced(architecture, way))["forward"]


@pytest.mark.full
def test_an_evaluation_and_dropout_compile_too():
    for values in ({"evaluation": True}, {"lora": Lora(r=4, lora_dropout=0.1)}):
        trace = traced.__wrapped__("llama", torch_compile=True, **values)
        assert untold(trace) == []
        assert peaks(trace)["forward"] <= peaks(traced.__wrapped__("llama", **values))["forward"]
