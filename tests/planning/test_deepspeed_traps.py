"""What DeepSpeed, Accelerate and transformers really do with the jobs that the rules refuse.

Each test shows one trap, by running the library where a CPU can show it, else by reading the function that the rule cites:
a new version of the library that changes it fails here, and the rule can go.
"""

import inspect
import re
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from deepspeed.ops.lion import FusedLion
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.swap_tensor import partitioned_optimizer_swapper, pipelined_optimizer_swapper
from deepspeed.runtime.swap_tensor.aio_config import get_aio_config
from deepspeed.runtime.zero import parameter_offload, partition_parameters
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import groups
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    Trainer,
    TrainingArguments,
    get_scheduler,
    modeling_utils,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward

# The rule's code, and the test below that shows what happens without the rule.
TRAPS = {
    "BATCH_EQUATION": "test_deepspeed_floors_a_batch_to_zero_accumulation",
    "PRECISION_CARD": "test_the_engine_refuses_a_precision_only_when_it_starts",
    "ATTENTION_CARD": "test_transformers_asks_for_flash_kernels_only_when_the_model_is_built",
    "ATTENTION_PRECISION": "test_transformers_only_warns_of_flash_attention_in_fp32",
    "ATTENTION_SOFTCAP": "test_sdpa_drops_or_refuses_the_soft_cap_when_it_runs",
    "SEQUENCE_LENGTH": "test_positions_past_the_limit",
    "OPTIMIZER_CARD": "test_fused_lion_does_not_start_on_a_cpu",
    "OFFLOAD_STAGE": "test_offload_ignores_the_stage",
    "OFFLOAD_NVME_PATH": "test_nvme_without_a_path_fails_in_the_engine",
    "OFFLOAD_PARTIAL_OPTIMIZER": "test_a_partial_offload_needs_cpu_adam",
    "ACCUMULATION_DTYPE": "test_any_accumulation_dtype_is_accepted",
    "ACCUMULATION_STAGE": "test_stage_0_has_no_mixed_accumulation",
    "COMPILE_ZERO3": "test_zero3_hooks_break_each_graph",
    "OPTIMIZER_KEY": "test_trainer_ignores_keys_of_other_optimizers",
    "STEPS_CONFLICT": "test_trainer_takes_steps_over_epochs",
    "WARMUP_UNUSED": "test_a_constant_schedule_ignores_its_warmup",
    "WARMUP_LENGTH": "test_a_warmup_longer_than_the_run_never_peaks",
    "MIN_LEARNING_RATE": "test_the_floor_belongs_to_one_schedule",
    "POLYNOMIAL_RATE": "test_a_polynomial_schedule_ends_at_a_rate_of_its_own",
    "DEEPSPEED_AUTO": "test_auto_is_dropped_for_the_default",
    "DEEPSPEED_SET_ELSEWHERE": "test_two_homes_of_one_value_are_accepted",
    "DEEPSPEED_UNKNOWN": "test_unknown_keys_are_accepted",
    "DEEPSPEED_VALUE": "test_wrong_types_are_coerced_or_kept",
    "DEEPSPEED_IGNORED": "test_each_optimizer_takes_its_own_keys",
    "DEEPSPEED_PRESCALE": "test_prescaling_needs_all_reduce",
    "DEEPSPEED_PREDIVIDE": "test_stage_3_divides_twice",
    "DEEPSPEED_HPZ": "test_the_secondary_partition_is_cut_or_must_divide",
    "DEEPSPEED_CARD": "test_cuda_code_on_a_cpu",
    "DEEPSPEED_QUANTIZED": "test_quantized_gradients_need_reduce_scatter",
    "DEEPSPEED_BUFFERS": "test_swap_buffers_run_out_in_the_engine",
}


def parse(**config):
    return DeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, **config})


def zero(**keys):
    return parse(zero_optimization=keys).zero_config


def source(function):
    return inspect.getsource(function)


def parameters_of(kind):
    return set(inspect.signature(kind.__init__).parameters)


def optimizer():
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)


def rates(name, steps, **given):
    sgd = optimizer()
    scheduler = get_scheduler(name, sgd, num_training_steps=steps, **given)
    found = []
    for _ in range(steps):
        found.append(sgd.param_groups[0]["lr"])
        sgd.step()
        scheduler.step()
    return found


def test_every_trap_is_shown():
    assert set(TRAPS.values()) <= set(globals())


def test_deepspeed_floors_a_batch_to_zero_accumulation():
    with pytest.raises(AssertionError, match="accumulation steps: 0"):
        DeepSpeedConfig({"train_batch_size": 1, "train_micro_batch_size_per_gpu": 2})
    with pytest.raises(AssertionError, match="10 != 3"):
        DeepSpeedConfig({"train_batch_size": 10, "train_micro_batch_size_per_gpu": 3})


def test_the_engine_refuses_a_precision_only_when_it_starts():
    parse(fp16={"enabled": True})
    assert "Type fp16 is not supported on your device." in source(DeepSpeedEngine._do_sanity_check)
    assert "Type bf16 is not supported on your device." in source(DeepSpeedEngine._do_sanity_check)


@pytest.mark.skipif(find_spec("flash_attn") is not None, reason="the package is here")
def test_transformers_asks_for_flash_kernels_only_when_the_model_is_built():
    small = {
        "vocab_size": 8,
        "hidden_size": 8,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "intermediate_size": 8,
    }
    config = LlamaConfig(**small, attn_implementation="flash_attention_2")
    with pytest.raises((ImportError, ValueError)):
        AutoModelForCausalLM.from_config(config, attn_implementation="flash_attention_2", dtype=torch.bfloat16)


def test_transformers_only_warns_of_flash_attention_in_fp32():
    text = source(modeling_utils)
    where = re.search("only supports[` ]+torch.float16[` ]+and[` ]+torch.bfloat16", text)
    assert where
    assert "logger.warning_once" in text[where.start() - 400 : where.start()]


def test_sdpa_drops_or_refuses_the_soft_cap_when_it_runs():
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 1, 4, 8) * 100 for _ in range(3))
    module = SimpleNamespace(is_causal=True)
    plain, _ = sdpa_attention_forward(module, query, key, value, None)
    try:
        capped, _ = sdpa_attention_forward(module, query, key, value, None, softcap=1.0)
    except ValueError as error:
        capped = plain
        assert "softcap" in str(error)  # noqa: PT017 -- releases differ: the older ones drop it
    assert torch.equal(capped, plain)


def test_positions_past_the_limit():
    small = {"vocab_size": 8, "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1}
    llama = LlamaConfig(**small, intermediate_size=8, max_position_embeddings=4)
    AutoModelForCausalLM.from_config(llama)(torch.zeros(1, 8, dtype=torch.long))  # silently, untrained positions
    gpt2 = GPT2Config(vocab_size=8, n_embd=8, n_head=2, n_layer=1, n_positions=4)
    with pytest.raises(IndexError):
        AutoModelForCausalLM.from_config(gpt2)(torch.zeros(1, 8, dtype=torch.long))


def test_fused_lion_does_not_start_on_a_cpu():
    with pytest.raises(Exception):  # noqa: B017 -- a missing attribute, compiler or CUDA_HOME, as the machine has it
        FusedLion([torch.nn.Parameter(torch.zeros(1))])


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_offload_ignores_the_stage(stage):
    config = parse(
        zero_optimization={"stage": stage, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    )
    assert config.zero_config.offload_param.device == "cpu"  # accepted, though only stage 3 reads it
    assert "offload_param_config" not in parameters_of(DeepSpeedZeroOptimizer)
    # Even at stage 0 the CPU optimizer replaces the one on the GPU.
    assert DeepSpeedEngine.zero_use_cpu_optimizer(SimpleNamespace(_config=config)) is True


def test_nvme_without_a_path_fails_in_the_engine():
    offload = zero(stage=3, offload_optimizer={"device": "nvme"}).offload_optimizer
    assert offload.nvme_path is None
    with pytest.raises(TypeError, match="not NoneType"):
        DeepSpeedZeroOptimizer_Stage3._configure_tensor_swapping(SimpleNamespace(), offload, None)


def test_a_partial_offload_needs_cpu_adam():
    assert zero(stage=3, offload_optimizer={"device": "cpu", "ratio": 0.5}).offload_optimizer.ratio == 0.5
    assert "Hybrid Optimizer Only Supports DeepSpeedCPUAdam" in source(DeepSpeedZeroOptimizer_Stage3.__init__)


def test_any_accumulation_dtype_is_accepted():
    for dtype in ("fp16", "int8", "nonsense"):
        config = parse(bf16={"enabled": True}, data_types={"grad_accum_dtype": dtype}, zero_optimization={"stage": 2})
        assert config.grad_accum_dtype == dtype


def test_stage_0_has_no_mixed_accumulation():
    parse(bf16={"enabled": True}, data_types={"grad_accum_dtype": "fp32"})
    assert 'NotImplementedError(f"unsupported mix of' in source(DeepSpeedEngine._do_optimizer_sanity_check)


def test_zero3_hooks_break_each_graph():
    text = source(parameter_offload.DeepSpeedZeRoOffload)
    assert "@torch.compiler.disable" in text
    assert "register_forward_pre_hook" in text


def test_trainer_ignores_keys_of_other_optimizers(tmp_path):
    arguments = TrainingArguments(output_dir=str(tmp_path), optim="sgd", adam_beta1=0.5, use_cpu=True)
    _, given = Trainer.get_optimizer_cls_and_kwargs(arguments)
    assert "betas" not in given
    with pytest.raises(TypeError):
        torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0, betas=(0.9, 0.9))


def test_trainer_takes_steps_over_epochs(tmp_path):
    arguments = TrainingArguments(output_dir=str(tmp_path), max_steps=5, num_train_epochs=2, use_cpu=True)
    assert (arguments.max_steps, arguments.num_train_epochs) == (5, 2)


def test_a_constant_schedule_ignores_its_warmup():
    assert rates("constant", 4, num_warmup_steps=3) == [1.0] * 4
    assert rates("constant_with_warmup", 4, num_warmup_steps=3)[0] == 0.0


def test_a_warmup_longer_than_the_run_never_peaks(tmp_path):
    assert max(rates("cosine", 5, num_warmup_steps=10)) < 0.5
    arguments = TrainingArguments(output_dir=str(tmp_path), warmup_steps=1.0, use_cpu=True)
    assert arguments.get_warmup_steps(100) == 1  # a ratio of one is read as one step


def test_a_polynomial_schedule_ends_at_a_rate_of_its_own():
    low = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-7)
    with pytest.raises(ValueError, match="lr_end"):
        get_scheduler("polynomial", low, num_warmup_steps=0, num_training_steps=4)


def test_the_floor_belongs_to_one_schedule():
    with pytest.raises(ValueError, match="min_lr"):
        rates("cosine_with_min_lr", 4, num_warmup_steps=0)
    with pytest.raises(TypeError):
        rates("cosine", 4, num_warmup_steps=0, scheduler_specific_kwargs={"min_lr_rate": 0.1})


def test_auto_is_dropped_for_the_default():
    assert zero(stage="auto").stage == 0
    assert zero(stage=2, reduce_bucket_size="auto").reduce_bucket_size == 500_000_000
    assert parse(gradient_clipping="auto").gradient_clipping == "auto"  # compared with a number at the first step


def test_two_homes_of_one_value_are_accepted():
    config = parse(bf16={"enabled": False}, bfloat16={"enabled": True})
    assert not config.bfloat16_config.enabled
    parse(optimizer={"type": "AdamW", "params": {"lr": "three"}})
    parse(activation_checkpointing={"partition_activationz": True})


def test_unknown_keys_are_accepted():
    config = parse(gradient_cliping=0.5, zero_optimisation={"stage": 3}, comms_config={"enabled": True})
    assert config.gradient_clipping == 1.0
    assert config.zero_optimization_stage == 0
    with pytest.raises(ValueError, match="Extra"):
        zero(stage=1, reduce_bucket_sise=5)


def test_wrong_types_are_coerced_or_kept():
    assert zero(stage=1, reduce_bucket_size=True).reduce_bucket_size == 1
    assert zero(stage=1, reduce_bucket_size="5").reduce_bucket_size == 5
    assert parse(steps_per_print="5").steps_per_print == "5"  # `step % "5"` at the first step
    assert parse(gradient_predivide_factor="2").gradient_predivide_factor == "2"
    # The section alone turns the logger on.
    assert parse(comms_logger={"enabled": False}).comms_config.comms_logger_enabled is True
    # An odd size parses, and the optimizer of stages 1 and 2 asserts an even one.
    assert zero(stage=1, allgather_bucket_size=3).allgather_bucket_size == 3
    assert "allgather_bucket_size must be a multiple of nccl_start_alignment_factor" in source(
        DeepSpeedZeroOptimizer.__init__
    )


def test_each_optimizer_takes_its_own_keys():
    stage3, stage12, bf16 = map(parameters_of, (DeepSpeedZeroOptimizer_Stage3, DeepSpeedZeroOptimizer, BF16_Optimizer))
    shared = {
        "contiguous_gradients",
        "reduce_scatter",
        "reduce_bucket_size",
        "overlap_comm",
        "offload_optimizer_config",
    }
    only12 = {"allgather_bucket_size", "round_robin_gradients", "check_grad_overflow"}
    only3 = {
        "sub_group_size", "prefetch_bucket_size", "param_persistence_threshold", "max_live_parameters",
        "max_reuse_distance", "offload_param_config", "zero_hpz_partition_size", "zero_quantized_weights",
        "zero_module_granularity_threshold", "log_trace_cache_warnings", "enable_sanity_checks",
    }  # fmt: skip
    assert shared <= stage3 & stage12
    assert only12 <= stage12 - stage3
    assert only3 <= stage3 - stage12
    assert "allgather_bucket_size" in bf16
    assert not bf16 & (shared | {"round_robin_gradients", "check_grad_overflow"})
    assert "bfloat16_config.immediate_grad_update" in source(BF16_Optimizer.__init__)
    assert "immediate_grad_update" not in source(DeepSpeedZeroOptimizer) + source(DeepSpeedZeroOptimizer_Stage3)
    assert "self.contiguous_gradients = contiguous_gradients or self.cpu_offload" in source(
        DeepSpeedZeroOptimizer.__init__
    )
    assert "prefetch_bucket_size = 1" in source(DeepSpeedEngine._configure_zero_optimizer)
    text = source(DeepSpeedZeroOptimizer_Stage3)
    assert (
        "self.contiguous_gradients and bucket.elements <= self.reduce_bucket_size and not self.reduce_scatter" in text
    )


def test_prescaling_needs_all_reduce():
    parse(prescale_gradients=True, zero_optimization={"stage": 2})
    assert "pre-scale gradients is not yet supported" in source(DeepSpeedZeroOptimizer.__init__)
    assert "if self.reduce_scatter and self.partition_gradients" in source(DeepSpeedZeroOptimizer.__init__)
    assert "pre-scale gradients is not yet supported with ZeRO-3" in source(DeepSpeedZeroOptimizer_Stage3.__init__)


def test_stage_3_divides_twice():
    # test_engine_accepts.py measures it: with a factor of 2 on two ranks the gradient norm is half of what it should be.
    text = source(DeepSpeedZeroOptimizer_Stage3)
    assert "self.postscale_gradients and self.gradient_predivide_factor != averaging_world_sz" in text
    assert "buffer_to_reduce.div_(averaging_world_sz / float(self.sequence_parallel_size))" in text


def test_the_secondary_partition_is_cut_or_must_divide():
    text = source(groups._create_zero_param_parallel_group)
    assert "min(group_size, world_size)" in text
    assert "_ensure_divisibility(world_size, zero_param_parallel_size_)" in text


def test_cuda_code_on_a_cpu():
    with pytest.raises(AssertionError, match="GDS"):
        get_aio_config({"aio": {"use_gds": True}})
    zero(stage=3, zero_quantized_weights=True, zero_quantized_gradients=True)
    assert "QuantizerBuilder().load()" in source(partition_parameters.CUDAQuantizer)


def test_quantized_gradients_need_reduce_scatter():
    assert "all2all_process_group is not None and self.reduce_scatter == True" in source(
        DeepSpeedZeroOptimizer_Stage3.__init__
    )


def test_swap_buffers_run_out_in_the_engine():
    assert zero(stage=3, offload_optimizer={"device": "nvme", "buffer_count": 0}).offload_optimizer.buffer_count == 0
    plain = source(partitioned_optimizer_swapper.PartitionedOptimizerSwapper.swap_in_optimizer_state)
    assert "swap_info.num_tensors() + (1 if swap_info.has_gradients() else 0)" in plain
    piped = source(pipelined_optimizer_swapper.PipelinedOptimizerSwapper._swap_in_optimizer_state)
    assert "ran out of swap buffers, try increasing 'buffer_count'" in piped
