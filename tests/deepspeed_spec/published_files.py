"""DeepSpeed files as training tools publish them, rebuilt from the keys that DeepSpeed and transformers document."""

from __future__ import annotations

from typing import Any

AUTO_BATCH = {
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}
AUTO_PRECISION = {
    "bf16": {"enabled": "auto"},
    "fp16": {
        "enabled": "auto",
        "auto_cast": False,
        "loss_scale": 0,
        "initial_scale_power": 32,
        "loss_scale_window": 1000,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
}
ADAMW = {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")}
CPU = {"device": "cpu", "pin_memory": True}
STAGE_3 = {
    "stage": 3,
    "overlap_comm": True,
    "contiguous_gradients": True,
    "sub_group_size": 0,
    "reduce_bucket_size": "auto",
}
PREFIXED = {
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_gather_16bit_weights_on_model_save": True,
}
# DeepSpeed takes both names of these; Trainer fills in the longer.
SHORT = {key.removeprefix("stage3_"): value for key, value in PREFIXED.items()}
MIXED = {**{key: PREFIXED[key] for key in list(PREFIXED)[:2]}, **{key: SHORT[key] for key in list(SHORT)[2:]}}
OWN_OPTIMIZER = {"zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True}
COMPILED = {"compile": {"disable": False, "backend": "inductor"}}
BF16 = {"bf16": {"enabled": True}}

ACCEPTED: dict[str, dict[str, Any]] = {
    "zero1": {
        **AUTO_BATCH,
        **AUTO_PRECISION,
        "optimizer": ADAMW,
        "zero_optimization": {"stage": 1, "overlap_comm": True},
    },
    "zero2": {
        **AUTO_BATCH,
        **AUTO_PRECISION,
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "cpu"},
            "contiguous_gradients": True,
            "overlap_comm": True,
        },
    },
    "zero3": {**AUTO_BATCH, **AUTO_PRECISION, "zero_optimization": {**STAGE_3, **PREFIXED}},
    "zero3_bf16": {**AUTO_BATCH, **BF16, "zero_optimization": {**STAGE_3, **SHORT}},
    "zero3_bf16_cpuoffload_all": {
        **AUTO_BATCH,
        **BF16,
        **OWN_OPTIMIZER,
        "zero_optimization": {**STAGE_3, **MIXED, "offload_optimizer": CPU, "offload_param": CPU},
    },
    "zero3_bf16_cpuoffload_params": {
        **AUTO_BATCH,
        **BF16,
        **OWN_OPTIMIZER,
        "zero_optimization": {**STAGE_3, **MIXED, "offload_param": CPU},
    },
}
REFUSED: dict[str, dict[str, Any]] = {
    "zero1_torch_compile": {
        **AUTO_BATCH,
        **AUTO_PRECISION,
        **COMPILED,
        "zero_optimization": {"stage": 1, "overlap_comm": True},
    },
    "zero2_torch_compile": {
        **AUTO_BATCH,
        **AUTO_PRECISION,
        **COMPILED,
        "zero_optimization": {"stage": 2, "overlap_comm": True},
    },
}
