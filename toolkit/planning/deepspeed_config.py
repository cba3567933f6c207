"""DeepSpeed's JSON configuration, for three consumers and without "auto"; every key is set in one place.

Sources: deepspeed runtime/config.py, runtime/zero/config.py, runtime/zero/offload_config.py,
runtime/precision_config.py; transformers integrations/deepspeed.py; accelerate utils/deepspeed.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from toolkit.catalog.dimensions import Fields
from toolkit.errors import PlanError, raise_all
from toolkit.planning.offload import offload_keys, parameter_buffer_size
from toolkit.planning.rules.integrations import consumer_problems
from toolkit.planning.unchecked_plan import UncheckedPlan

Consumer = Literal["toolkit", "trainer", "accelerate"]

# Elements of a bucket of gradients under an overlapped step on the host; the card holds two.
OVERLAPPED_BUCKET = 100_000_000


def deepspeed_config(draft: UncheckedPlan, consumer: Consumer) -> dict[str, Any]:
    """Return the configuration that `consumer` needs.

    `toolkit` has the optimizer, and no scheduler: ours knows the number of steps only once the data is read.
    `trainer` has the same optimizer, equal to `TrainingArguments`. `accelerate` has none: the script creates it.

    Raises:
        PlanError: Every reason for which the consumer cannot run the plan.
    """
    raise_all(PlanError, consumer_problems(draft, consumer))
    settings = draft.settings
    dtype = settings.dtype
    config: dict[str, Any] = {
        # DeepSpeed multiplies by all data-parallel ranks, also those that share rows (runtime/config.py _batch_assertion).
        "train_batch_size": settings.batch.train * draft.job.parallel.context,
        "train_micro_batch_size_per_gpu": settings.batch.micro,
        "gradient_accumulation_steps": settings.batch.accumulation,
        "gradient_clipping": draft.job.train.max_grad_norm,
        "bf16": {"enabled": dtype == "bf16"},
        "fp16": {"enabled": dtype == "fp16"},
        "data_types": {"grad_accum_dtype": draft.engine_accumulation_dtype},
        "zero_optimization": _zero_section(draft, consumer),
    }
    if draft.job.parallel.pipeline > 1:
        # Our loop runs all micro-batches of a step; the engine is told of one. DeepSpeed's timer would synchronize with the
        # device at each forward pass, and deadlock on receives whose sends depend on this rank going on.
        config |= {
            "train_batch_size": settings.batch.micro * draft.job.dp_size,
            "gradient_accumulation_steps": 1,
            "timers": {"throughput": {"enabled": False}},
        }
    if consumer != "toolkit" and draft.on_cpu and settings.zero_stage == 3:
        # On CPU both join gloo without DeepSpeed, whose zero.Init then counts one rank and finds the product wrong
        # (runtime/config.py _batch_assertion); the engine, which counts all, multiplies it out itself.
        del config["train_batch_size"]
    made_outside = consumer == "accelerate" or draft.job.train.in_8_bits
    if not made_outside:
        config["optimizer"] = _optimizer_section(draft)
    if draft.job.train.optimizer == "sgd" or made_outside:
        # zero/utils.py ZERO_SUPPORTED_OPTIMIZERS lists neither torch SGD nor a script's own optimizers.
        config["zero_allow_untested_optimizer"] = True
    if consumer == "accelerate" and draft.profile.optimizer and draft.job.train.optimizer != "adamw":
        # Accelerate would replace the script's optimizer, SGD too, by DeepSpeedCPUAdam (utils/deepspeed.py
        # map_pytorch_optim_to_deepspeed), and DeepSpeed would refuse another one (engine.py _configure_optimizer).
        config["zero_force_ds_cpu_optimizer"] = False
    return merge(config, draft.job.deepspeed)


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` updated with the keys of `over`, section by section."""
    merged = dict(base)
    for key, value in over.items():
        inner = merged.get(key)
        merged[key] = merge(inner, value) if isinstance(inner, Mapping) and isinstance(value, Mapping) else value
    return merged


def _zero_section(draft: UncheckedPlan, consumer: Consumer) -> dict[str, Any]:
    settings = draft.settings
    stage = settings.zero_stage
    section: dict[str, Any] = {"stage": stage}
    if stage == 0:
        return section
    if stage < 3:
        # stage_1_and_2.py asserts a multiple of its nccl_start_alignment_factor, 2.
        section["allgather_bucket_size"] = settings.reduce_bucket_size + settings.reduce_bucket_size % 2
    if draft.optimizer_wrapper == "bf16":
        return section
    nvme = draft.job.cluster.nvme_path
    # A parameter on disk occupies one of five swap buffers until it is released, so none may be kept
    # (swap_tensor/partitioned_param_swapper.py swap_in asserts "Not enough buffers").
    on_disk = draft.profile.parameters == "nvme"
    section |= {
        "overlap_comm": stage == 3 or _reduces_beside(draft),
        "contiguous_gradients": True,
        "reduce_scatter": True,
        "reduce_bucket_size": settings.reduce_bucket_size,
    }
    if stage == 3:
        section |= {
            "sub_group_size": settings.sub_group_size,
            "stage3_prefetch_bucket_size": 50_000_000,
            "stage3_param_persistence_threshold": 100_000,
            "stage3_max_live_parameters": 1_000_000_000,
            "stage3_max_reuse_distance": 0 if on_disk else 1_000_000_000,
            # Trainer.save_model and Accelerator.get_state_dict return no weights without it (transformers #25817).
            "stage3_gather_16bit_weights_on_model_save": consumer != "toolkit",
        }
    return section | offload_keys(
        draft.profile,
        zero_stage=stage,
        ratio=settings.offload_ratio,
        nvme_path=str(nvme) if nvme else None,
        pin_memory=not draft.on_cpu,
        swap_buffer_size=parameter_buffer_size(
            largest_parameter=_largest_parameter(draft),
            num_parameters=draft.model.num_parameters,
            dp_size=draft.job.dp_size,
        ),
    )


def _reduces_beside(draft: UncheckedPlan) -> bool:
    """Return whether stages 1 and 2 reduce a bucket of gradients while the backward pass fills a second one.

    Two H200s, 8B, ZeRO-2: of a step of 1.92 s the reductions took 0.21 without it (benchmarks/results/jobs-2xh200.jsonl). A
    pipeline's passes reduce at their end, and an offloaded optimizer copies each bucket to the host.
    """
    several = draft.job.dp_size > 1 and not draft.on_cpu
    return several and draft.job.parallel.pipeline == 1 and draft.profile.optimizer is None


def _largest_parameter(draft: UncheckedPlan) -> int:
    """Return the elements of the embedding, or of a layer's experts, which transformers keeps in one tensor."""
    model = draft.model
    width = Fields(model.config).expert_width if model.num_experts else 0
    experts = 2 * model.num_experts * width * model.hidden_size  # gate and up projections
    return max(model.vocab_size * model.hidden_size, experts)


def _optimizer_section(draft: UncheckedPlan) -> dict[str, Any]:
    train = draft.job.train
    params: dict[str, Any] = {"lr": draft.settings.learning_rate}
    if train.optimizer == "sgd":
        return {"type": "SGD", "params": params | {"momentum": train.momentum, "weight_decay": train.weight_decay}}
    params |= {"betas": [train.adam_beta1, train.adam_beta2], "weight_decay": train.weight_decay}
    if train.optimizer == "lion":
        return {"type": "Lion", "params": params}
    params["eps"] = train.adam_epsilon
    if draft.uses_torch_adam:
        # engine.py get_optimizer_configuration: torch.optim.AdamW in place of FusedAdam or CPUAdam.
        params["torch_adam"] = True
    if train.optimizer == "adamw_torch_fused":
        params["fused"] = True
    return {"type": "AdamW", "params": params}


def engine_config(draft: UncheckedPlan) -> dict[str, Any]:
    """Return the configuration of the toolkit's own runs: that of the emitted files, unless the toolkit steps the optimizer.

    Under an overlapped step on the host the toolkit gives the optimizer. DeepSpeed page-locks nothing, since the host's memory is not what the card reads; gradients
    leave in buckets of 100 million elements or less, so that the card holds few of them, reduced beside the backward pass.

    Raises:
        PlanError: As of `deepspeed_config`.
    """
    config = deepspeed_config(draft, "toolkit")
    if draft.offload_engine != "overlapped":
        return config
    zero = dict(config["zero_optimization"])
    zero["offload_optimizer"] = dict(zero["offload_optimizer"]) | {"pin_memory": False}
    zero["reduce_bucket_size"] = min(int(zero["reduce_bucket_size"]), OVERLAPPED_BUCKET)
    zero["overlap_comm"] = True
    changed = {key: value for key, value in config.items() if key not in ("optimizer", "data_types")}
    if zero["stage"] == 1:  # stage 2 adds micro-batches up in fp32, on the host
        changed["data_types"] = config["data_types"]
    return changed | {
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
