"""The trace of a few layers is that of all layers, to the byte and to the event."""

import pytest
import torch
from traced_models import BATCH, CONFIGS, H100, LENGTH, WAYS, config_of, peaks, trace_of, traced
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.llama import modeling_llama

from toolkit.config.job import Lora
from toolkit.errors import PlanError
from toolkit.memory.engines.ledger import MemoryLedger
from toolkit.memory.trace.attribution import LOSS
from toolkit.memory.trace.events import Marker, Run, held

# Each kind of layers in one way, and some others; the rest of the product is `full`, and architectures whose layers are like others'.
ZERO3 = "ZeRO-3 with checkpointing"
WAY_OF = {name: ZERO3 if name in ("llama", "gpt2", "qwen3_moe") else "plain" for name in CONFIGS}
# Of the last few layers are all of them.
LIKE_OTHERS = (
    *("gemma2", "gpt_oss", "qwen3_moe", "olmoe", "gpt_neox", "falcon", "phi3", "mixtral", "mixtral-router-loss"),
)
QUICK = [
    *((name, way) for name, way in WAY_OF.items() if name not in LIKE_OTHERS),
    ("llama", "every second layer"),
    ("llama", "linear and attention kept"),
    ("llama", "inputs on the host"),
    ("llama", "LoRA with checkpointing"),
    ("llama", "chunked loss"),
]
REST = [(name, way) for name in CONFIGS for way in WAYS if (name, way) not in QUICK]


def assert_few_layers_give_what_all_give(name, way):
    few, whole = traced(name, way), traced(name, way, all_layers=True)
    assert few.parameters == whole.parameters
    assert few.buffers_bytes == whole.buffers_bytes
    assert few.host_copies == whole.host_copies
    assert few.forward == whole.forward
    assert few.backward == whole.backward
    assert few.after == whole.after
    assert few.num_layers == whole.num_layers == whole.num_traced_layers
    assert held((*few.forward, *few.backward, *few.after)) == {}, "what a micro-batch allocates is gone after it"


@pytest.mark.parametrize(("name", "way"), QUICK)
def test_few_layers_give_what_all_give(name, way):
    assert_few_layers_give_what_all_give(name, way)


@pytest.mark.full
@pytest.mark.parametrize(("name", "way"), REST)
def test_few_layers_give_what_all_give_in_every_other_way(name, way):
    assert_few_layers_give_what_all_give(name, way)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full) if name in LIKE_OTHERS else name for name in CONFIGS]
)
def test_parameters_are_those_of_the_model(name):
    config = config_of(name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="eager")
    expected = [(path, parameter.numel(), path.rpartition(".")[0]) for path, parameter in model.named_parameters()]
    found = traced(name, WAY_OF[name]).parameters
    assert [(parameter.name, parameter.numel, parameter.module) for parameter in found] == expected
    # DeepSpeed casts what a model makes in fp32, such as DeepSeek-V3's routers.
    assert {parameter.itemsize for parameter in found} == {2}


def test_parameters_that_a_model_makes_in_fp32_are_cast():
    made = trace_of(config_of("deepseek_v3"), micro_batch=1, sequence_length=8, device=H100, dtype=torch.float16)
    assert {parameter.itemsize for parameter in made.parameters} == {2}


def gradients(trace):
    return [placed for placed in trace.backward if isinstance(placed.event, Marker) and placed.event.kind == "gradient"]


def test_each_parameter_gets_one_gradient_of_its_size():
    trace = traced("gemma2")
    marks = gradients(trace)
    assert sorted(placed.name for placed in marks) == sorted(parameter.name for parameter in trace.parameters)
    size_of = {parameter.name: parameter.size for parameter in trace.parameters}
    for placed in marks:
        assert size_of[placed.name] <= placed.event.size < size_of[placed.name] + 512


def test_adapters_alone_get_gradients():
    trace = traced("llama", "LoRA")
    marked = {placed.name for placed in gradients(trace)}
    assert marked == {parameter.name for parameter in trace.parameters if parameter.trainable}
    assert all(".lora_" in name for name in marked)


def test_a_deep_model_takes_no_more_layers_than_a_shallow_one():
    deep = trace_of(config_of("llama", num_hidden_layers=80), micro_batch=1, sequence_length=8, device=H100)
    assert (deep.num_traced_layers, deep.num_layers) == (3, 80)


def test_router_losses_need_every_layer():
    assert traced("mixtral-router-loss").num_traced_layers == 6
    assert traced("mixtral").num_traced_layers == 3


def test_layers_that_run_twice_are_all_traced(monkeypatch):
    once = modeling_llama.LlamaModel.forward

    def twice(self, input_ids=None, inputs_embeds=None, **kwargs):
        first = once(self, input_ids=input_ids, inputs_embeds=inputs_embeds, **kwargs)
        return once(self, inputs_embeds=first.last_hidden_state, **kwargs)

    single = traced("llama")
    monkeypatch.setattr(modeling_llama.LlamaModel, "forward", twice)
    double = trace_of(config_of("llama"), micro_batch=BATCH, sequence_length=LENGTH, device=H100)
    assert double.num_traced_layers == double.num_layers == 6
    assert held((*double.forward, *double.backward, *double.after)) == {}
    assert peaks(double)["forward"] > 1.7 * peaks(single)["forward"]


def test_checkpointing_keeps_one_tensor_a_layer():
    width, layers = 32, 6
    kept = BATCH * LENGTH * width * 2
    plain, checkpointed = peaks(traced("llama")), peaks(traced("llama", "checkpointing"))
    assert checkpointed["forward"] < plain["forward"] / 3
    assert checkpointed["forward"] >= layers * kept


def test_kept_results_are_held_from_pass_to_pass():
    none, kept = peaks(traced("llama", "checkpointing")), peaks(traced("llama", "linear and attention kept"))
    linear = 32 + 16 + 16 + 32 + 48 + 48 + 32  # features of q, k, v, o, gate, up and down
    attention = 32 * 2 + 4 * 4  # the output, and the fp32 log-sum-exp of four heads
    assert kept["forward"] - none["forward"] == 6 * BATCH * LENGTH * (2 * linear + attention)


def test_inputs_that_wait_on_the_host_leave_the_device():
    on_device, on_host = traced("llama", "checkpointing"), traced("llama", "inputs on the host")
    width, layers = 32, 6
    assert on_host.host_copies == (BATCH * LENGTH * width * 2,) * layers
    assert on_device.host_copies == ()
    assert peaks(on_host)["forward"] <= peaks(on_device)["forward"] - 4 * BATCH * LENGTH * width * 2


def test_the_configuration_is_left_as_it_is():
    config = config_of("gemma3_text")
    before = config.to_dict()
    trace_of(config, micro_batch=1, sequence_length=8, device=H100)
    assert config.to_dict() == before


@pytest.mark.parametrize("attention", ["eager", "sdpa", "flash_attention_2"])
def test_a_trace_leaves_transformers_and_torch_as_they_were(attention):
    def everything():
        from torch.nn import functional
        from transformers import masking_utils, modeling_flash_attention_utils
        from transformers.integrations import moe

        return {
            **vars(modeling_flash_attention_utils),
            "sdpa": functional.scaled_dot_product_attention,
            "dropout": functional.dropout,
            "grouped_mm": functional.grouped_mm,
            "can_use": moe._can_use_grouped_mm,
            "packed": masking_utils.find_packed_sequence_indices,
            "mask": masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["flash_attention_2"],
        }

    before = everything()
    trace_of(config_of("phi3"), micro_batch=1, sequence_length=8, device=H100, attention=attention)
    assert everything() == before


class TestDataLayouts:
    """A mask costs one byte a pair of tokens for the model, and two a layer for the kernel."""

    length = 256

    def peak(self, packing, attention="sdpa"):
        return peaks(traced("llama", packing=packing, attention=attention, sequence_length=self.length))["forward"]

    def test_plain_rows_need_no_mask(self):
        extra = self.peak("none") - self.peak("wrapped")
        pairs = BATCH * self.length**2
        layers = 6
        assert extra >= pairs * (1 + 2 * layers)

    def test_padding_is_assumed_and_said(self):
        assert "a padded one" in traced("llama", "padded").assumptions[0]
        assert traced("llama").assumptions == ()

    def test_padded_and_separated_rows_need_the_same_mask(self):
        assert self.peak("separated") == pytest.approx(self.peak("none"), rel=0.02)

    def test_flash_attention_reads_documents_off_the_positions(self):
        assert self.peak("separated", "flash_attention_2") == pytest.approx(
            self.peak("wrapped", "flash_attention_2"), rel=0.05
        )

    def test_flash_attention_copies_padded_rows(self):
        assert self.peak("none", "flash_attention_2") > self.peak("wrapped", "flash_attention_2")

    def test_eager_attention_keeps_every_score(self):
        assert self.peak("wrapped", "eager") > 2 * self.peak("wrapped")

    def test_tokens_take_eight_bytes_each(self):
        first = next(placed.event for placed in traced("llama").forward if isinstance(placed.event, Run))
        assert dict(first.peak)["inputs and model"] >= 2 * BATCH * LENGTH * 8


def test_longer_sequences_take_memory_in_proportion():
    short, long = (peaks(traced("llama", sequence_length=length))["forward"] for length in (1024, 2048))
    assert long == pytest.approx(2 * short, rel=0.01)


def test_a_head_of_its_own_costs_logits_in_the_vocabulary():
    def peak(vocabulary):
        config = LlamaConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, vocab_size=vocabulary
        )
        return peaks(trace_of(config, micro_batch=1, sequence_length=64, device=H100))["backward"]

    # fp32 logits, their softmax's gradient and the 16-bit logits or their gradient: 4 + 4 + 2 bytes at least.
    assert peak(40_000) - peak(20_000) >= 64 * 20_000 * 10


def peak_causes(trace, phase):
    account = MemoryLedger()
    for name, events in (("forward", trace.forward), ("backward", trace.backward)):
        account.enter(name)
        for placed in events:
            if isinstance(placed.event, Run):
                account.apply(placed.event)
    return account.peaks[phase].causes


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_without_logits_the_loss_stays_a_cause_of_its_own_and_shrinks(phase):
    options = {"micro_batch": 2, "sequence_length": 2048, "device": H100, "marks_modules": True}
    config = config_of("llama", vocab_size=64_000, max_position_embeddings=2048)
    sizes = {loss: peak_causes(trace_of(config, loss=loss, **options), phase) for loss in ("full", "chunked", "liger")}
    logits = 2 * 2048 * 64_000
    assert sizes["full"][LOSS] == pytest.approx(10 * logits if phase == "forward" else 12 * logits, rel=0.01)
    for loss in ("chunked", "liger"):
        assert 0 < sizes[loss].get(LOSS, 0) < 0.2 * sizes["full"][LOSS], loss


def test_a_head_with_adapters_is_traced_in_chunks_of_tokens():
    lora = Lora(r=4, target_modules=("q_proj", "lm_head"))
    options = {"micro_batch": 2, "sequence_length": 1024, "device": H100, "lora": lora}
    config = config_of("llama", vocab_size=64_000, max_position_embeddings=2048)
    full, chunked = (peaks(trace_of(config, loss=loss, **options)) for loss in ("full", "chunked"))
    assert chunked["backward"] < 0.5 * full["backward"]
    with pytest.raises(PlanError) as caught:
        trace_of(config, loss="liger", **options)
    assert caught.value.codes == ("LOSS_LIGER_HEAD",)
