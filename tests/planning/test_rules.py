import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from plan_jobs import TOY, V100, gpu_of, job_of, model_of, plan_of, problems_of

import toolkit.deepspeed_spec
import toolkit.planning
from toolkit.deepspeed_spec.user_file import read_user_config
from toolkit.errors import PlanError, SpecError
from toolkit.planning.deepspeed_config import merge
from toolkit.planning.resolve import resolve_with
from toolkit.planning.rules import RULES
from toolkit.planning.rules.tensor import WHOLE_MODEL_TYPES


def zero_keys(**keys):
    return {"zero_optimization": keys}


# (code, key, what the message must hold, the smallest job that breaks the rule)
BROKEN = [
    ("GROUP_BY_LENGTH", "data.group_by_length", "packing=wrapped", {"data": {"train": "org/set", "group_by_length": True}}),
    ("ADDED_TOKENS", "model.added_tokens", "no modules_to_save", {"model": {"name": "quickstart-llama", "added_tokens": ["<a>"]}, "train": {"method": "lora"}}),
    ("STREAMING", "data.streaming", "without train.max_steps", {"data": {"train": "org/set", "streaming": True}}),
    ("STREAMING", "data.shuffle_buffer", "without data.streaming", {"data": {"train": "org/set", "shuffle_buffer": 9}}),
    ("STREAMING", "data.validation_fraction", "the whole data set", {"train": {"max_steps": 9}, "data": {"train": "org/set", "streaming": True, "validation_fraction": 0.1}}),
    ("STREAMING", "data.sources[0].weight", "weight=2.0", {"train": {"max_steps": 9}, "data": {"sources": [{"path": "a.jsonl", "weight": 2.0}], "streaming": True}}),
    ("DATA_SOURCES", "data", "no training data", {"data": {"eval": "a.jsonl"}}),
    ("DATA_SOURCES", "data.train", "beside data.sources", {"data": {"train": "a.jsonl", "sources": [{"path": "b.jsonl"}]}}),
    ("DATA_SOURCES", "data.max_samples", "its own max_rows", {"data": {"max_samples": 3, "sources": [{"path": "b.jsonl"}]}}),
    ("PIPELINE_UNUSED", "parallel.virtual_stages", "pipeline=1", {"parallel": {"virtual_stages": 2}}),
    ("PIPELINE_UNUSED", "parallel.partition", "partition=[2, 2]", {"parallel": {"partition": [2, 2]}}),
    ("PARTITION_STAGES", "parallel.pipeline", "num_hidden_layers=16", {"model": "llama-3.2-1b", "ranks": 17, "parallel": {"pipeline": 17}}),
    ("PARTITION_STAGES", "parallel.pipeline", "20", {"model": "llama-3.2-1b", "ranks": 4, "train": {"gradient_accumulation_steps": 4}, "parallel": {"pipeline": 4, "pipeline_schedule": "interleaved", "virtual_stages": 5}}),
    ("PARTITION_LAYERS", "parallel.partition", "[8, 9]", {"model": "llama-3.2-1b", "ranks": 2, "parallel": {"pipeline": 2, "partition": [8, 9]}}),
    ("PARTITION_STAGES", "parallel.partition", "[8, 4, 4]", {"model": "llama-3.2-1b", "ranks": 2, "parallel": {"pipeline": 2, "partition": [8, 4, 4]}}),
    ("SCHEDULE_VIRTUAL_STAGES", "parallel.virtual_stages", "pipeline_schedule=1f1b", {"model": "llama-3.2-1b", "ranks": 2, "parallel": {"pipeline": 2, "pipeline_schedule": "1f1b", "virtual_stages": 2}}),
    ("ZERO_BUBBLE_UNSUPPORTED", "parallel.zero_stage", "ZeRO-3 releases a weight", {"model": "llama-3.2-1b", "ranks": 4, "parallel": {"pipeline": 2, "zero_stage": 3, "pipeline_schedule": "zb-h1"}}),
    ("ZERO_BUBBLE_UNSUPPORTED", "parallel.zero_stage", "ZeRO-2 reduces gradients during", {"model": "llama-3.2-1b", "ranks": 4, "parallel": {"pipeline": 2, "zero_stage": 2, "pipeline_schedule": "zb-h1"}}),
    ("ZERO_BUBBLE_UNSUPPORTED", "train.method", "adapters have so few weights", {"model": "llama-3.2-1b", "ranks": 2, "train": {"method": "lora"}, "parallel": {"pipeline": 2, "zero_stage": 1, "pipeline_schedule": "zb-h1"}}),
    ("ZERO_BUBBLE_UNSUPPORTED", "train.torch_compile", "in one", {"model": "llama-3.2-1b", "ranks": 2, "train": {"torch_compile": True}, "parallel": {"pipeline": 2, "zero_stage": 1, "pipeline_schedule": "zb-h1"}}),
    ("SCHEDULE_VIRTUAL_STAGES", "parallel.virtual_stages", "virtual_stages=1", {"model": "llama-3.2-1b", "ranks": 2, "train": {"gradient_accumulation_steps": 4}, "parallel": {"pipeline": 2, "pipeline_schedule": "interleaved", "virtual_stages": 1}}),
    ("PIPELINE_BLOCKING_OPTION", "deepspeed.comms_logger", "comms_logger with pipeline=2", {"model": "llama-3.2-1b", "ranks": 2, "parallel": {"pipeline": 2}, "deepspeed": {"comms_logger": {"verbose": False}}}),
    ("PIPELINE_BLOCKING_OPTION", "deepspeed.flops_profiler.enabled", "flops_profiler.enabled=true with pipeline=2", {"model": "llama-3.2-1b", "ranks": 2, "parallel": {"pipeline": 2}, "deepspeed": {"flops_profiler": {"enabled": True}}}),
    ("PIPELINE_BLOCKING_OPTION", "deepspeed.zero_optimization.overlap_comm", "overlap_comm=true with pipeline=2 and zero_stage=2", {"model": "llama-3.2-1b", "ranks": 4, "parallel": {"pipeline": 2, "zero_stage": 2}, "deepspeed": {"zero_optimization": {"overlap_comm": True}}}),
    ("PIPELINE_ZERO_STAGE", "parallel.zero_stage", "zero_stage=0", {"model": "llama-3.2-1b", "ranks": 2, "parallel": {"pipeline": 2, "zero_stage": 0}}),
    ("PIPELINE_UNSUPPORTED", "train.lora.modules_to_save", "lm_head", {"model": "llama-3.2-1b", "ranks": 2, "train": {"method": "lora", "lora": {"modules_to_save": ["lm_head"]}}, "parallel": {"pipeline": 2}}),
    ("PIPELINE_UNSUPPORTED", "train.lora.target_modules", "pipeline rank 1, which has layers 8-15, norm, head", {"model": "llama-3.2-1b", "ranks": 2, "train": {"method": "lora", "lora": {"target_modules": r"model\.layers\.0\..*q_proj"}}, "parallel": {"pipeline": 2, "partition": [8, 8]}}),
    ("PIPELINE_UNSUPPORTED", "train.lora.target_modules", "pipeline rank 0", {"model": "llama-3.2-1b", "ranks": 4, "train": {"method": "lora", "lora": {"target_modules": r"model\.layers\.(5|9|15)\..*q_proj"}}, "parallel": {"pipeline": 4}}),
    ("PIPELINE_UNSUPPORTED", "train.lora.target_modules", "pipeline rank 0", {"model": "llama-3.2-1b", "ranks": 2, "train": {"method": "lora", "lora": {"target_modules": ["lm_head"]}}, "parallel": {"pipeline": 2}}),
    ("PIPELINE_UNSUPPORTED", "train.precision", "precision=fp8", {"model": "llama-3.2-1b", "ranks": 2, "train": {"precision": "fp8"}, "parallel": {"pipeline": 2}}),
    ("PIPELINE_UNSUPPORTED", "parallel.offload", "optimizer-nvme", {"model": "llama-3.2-1b", "ranks": 2, "nvme_path": "/local", "parallel": {"pipeline": 2, "offload": "optimizer-nvme", "zero_stage": 3}}),
    ("CONTEXT_HEADS", "parallel.context", "num_attention_heads=32", {"model": "llama-3.1-8b", "ranks": 6, "train": {"sequence_length": 3072}, "parallel": {"context": 3}}),
    ("CONTEXT_SEQUENCE", "parallel.context", "sequence_length=4095", {"model": "llama-3.1-8b", "ranks": 2, "train": {"sequence_length": 4095}, "parallel": {"context": 2}}),
    ("CONTEXT_UNSUPPORTED", "parallel.pipeline", "pipeline=2", {"model": "llama-3.1-8b", "ranks": 4, "parallel": {"context": 2, "pipeline": 2}}),
    ("CONTEXT_UNSUPPORTED", "parallel.tensor", "tensor=2", {"model": "llama-3.1-8b", "ranks": 4, "parallel": {"context": 2, "tensor": 2}}),
    ("CONTEXT_UNSUPPORTED", "parallel.strategy", "strategy=fsdp2", {"model": "llama-3.1-8b", "ranks": 2, "parallel": {"context": 2, "strategy": "fsdp2"}}),
    ("CONTEXT_UNSUPPORTED", "train.precision", "precision=fp8", {"model": "llama-3.1-8b", "ranks": 2, "train": {"precision": "fp8"}, "parallel": {"context": 2}}),
    ("CONTEXT_UNSUPPORTED", "train.torch_compile", "torch_compile=true", {"model": "llama-3.1-8b", "ranks": 2, "train": {"torch_compile": True}, "parallel": {"context": 2}}),
    ("TILED_MLP", "train.mlp_tiles", "some tiles would have no tokens", {"model": "llama-3.1-8b", "train": {"sequence_length": 512, "mlp_tiles": 513}}),
    ("TILED_MLP", "train.mlp_tiles", "sequence_length=512 / context=2", {"model": "llama-3.1-8b", "ranks": 2, "train": {"sequence_length": 512, "mlp_tiles": 512}, "parallel": {"context": 2}}),
    ("TILED_MLP", "train.mlp_tiles", "tensor=2", {"model": "llama-3.1-8b", "ranks": 2, "train": {"sequence_length": 4096, "mlp_tiles": 4}, "parallel": {"tensor": 2}}),
    ("TILED_MLP", "train.mlp_tiles", "keep=[linear]", {"model": "llama-3.1-8b", "train": {"sequence_length": 4096, "mlp_tiles": 4, "gradient_checkpointing": {"keep": ["linear"]}}}),
    ("TILED_MLP", "train.mlp_tiles", "num_experts=8", {"model": "mixtral-8x7b", "ranks": 8, "train": {"sequence_length": 4096, "mlp_tiles": 4}, "parallel": {"zero_stage": 3}}),
    ("TP_HEADS", "parallel.tensor", "num_attention_heads=32: a rank must have whole heads", {"model": "llama-3.1-8b", "ranks": 6, "parallel": {"tensor": 3}}),
    ("TP_HEADS", "parallel.tensor", "num_key_value_heads=10", {"model": "phi-4", "ranks": 4, "parallel": {"tensor": 4}}),
    ("TP_EXPERTS", "parallel.experts", "tensor=1: there are no tensor ranks", {"model": "mixtral-8x7b", "parallel": {"experts": "whole"}}),
    ("TP_EXPERTS", "parallel.experts", "a dense model", {"model": "llama-3.1-8b", "parallel": {"tensor": 2, "experts": "whole"}}),
    ("TP_EXPERTS", "parallel.tensor", "does not divide num_experts=8", {"model": "mixtral-8x7b", "ranks": 16, "gpus_per_node": 16, "parallel": {"tensor": 16, "experts": "whole"}}),
    ("TP_EXPERTS", "parallel.experts", "torch_compile=true", {"model": "mixtral-8x7b", "train": {"torch_compile": True}, "parallel": {"tensor": 2, "experts": "whole"}}),
    ("TP_UNSUPPORTED", "train.precision", "precision=fp8", {"model": "llama-3.1-8b", "train": {"precision": "fp8"}, "parallel": {"tensor": 2}}),
    ("TP_UNSUPPORTED", "train.loss", "loss=chunked", {"model": "llama-3.1-8b", "train": {"loss": "chunked"}, "parallel": {"tensor": 2}}),
    ("TP_UNSUPPORTED", "train.lora.lora_dropout", "0.1", {"model": "llama-3.1-8b", "train": {"method": "lora", "lora": {"lora_dropout": 0.1}}, "parallel": {"tensor": 2}}),
    ("TP_UNSUPPORTED", "train.lora.modules_to_save", "lm_head", {"model": "llama-3.1-8b", "train": {"method": "lora", "lora": {"modules_to_save": ["lm_head"]}}, "parallel": {"tensor": 2}}),
    ("TP_UNSUPPORTED", "train.lora.target_modules", "all-linear", {"model": "mixtral-8x7b", "train": {"method": "lora"}, "parallel": {"tensor": 2}}),
    ("TP_UNSUPPORTED", "parallel.offload", "optimizer-nvme", {"model": "llama-3.1-8b", "nvme_path": "/local", "parallel": {"tensor": 2, "offload": "optimizer-nvme", "zero_stage": 3}}),
    ("TP_SEQUENCE", "parallel.sequence_parallel", "tensor=1", {"parallel": {"sequence_parallel": True}}),
    ("TP_SEQUENCE", "parallel.sequence_parallel", "sequence_length=511", {"model": "llama-3.1-8b", "train": {"sequence_length": 511}, "parallel": {"tensor": 2, "sequence_parallel": True}}),
    ("TP_ZERO_STAGE", "parallel.zero_stage", "zero_stage=0", {"model": "llama-3.1-8b", "parallel": {"tensor": 2, "zero_stage": 0}}),
    ("PRECISION_CARD", "train.precision", V100, {"gpu": V100, "train": {"precision": "bf16"}}),
    ("PRECISION_CARD", "train.precision", "fp16", {"gpu": "cpu", "train": {"precision": "fp16"}}),
    ("PRECISION_CARD", "train.precision", "no float8 units", {"gpu": "a100-sxm-80gb", "train": {"precision": "fp8"}}),
    ("FP8_UNUSED", "train.fp8", "precision=bf16", {"train": {"precision": "bf16", "fp8": {"recipe": "rowwise"}}}),
    ("ATTENTION_CARD", "train.attention", V100, {"gpu": V100, "train": {"attention": "flash_attention_2"}}),
    ("ATTENTION_CARD", "train.attention", "cpu", {"gpu": "cpu", "train": {"attention": "flash_attention_2", "precision": "bf16"}}),
    ("ATTENTION_PRECISION", "train.attention", "fp32", {"train": {"attention": "flash_attention_2", "precision": "fp32"}}),
    ("LOSS_CARD", "train.loss", "gpu=cpu", {"gpu": "cpu", "train": {"loss": "liger"}}),
    ("KERNELS_CARD", "train.kernels", "gpu=cpu", {"gpu": "cpu", "train": {"kernels": "liger"}}),
    ("KERNELS_MODEL", "train.kernels", "model_type=gpt2", {"model": "gpt2", "train": {"kernels": "liger"}}),
    ("KERNELS_COMPILE", "train.kernels", "torch_compile=true", {"train": {"kernels": "liger", "torch_compile": True}}),
    ("LOSS_PRECISION", "train.loss", "fp16", {"train": {"loss": "liger", "precision": "fp16"}}),
    ("SEQUENCE_LENGTH", "train.sequence_length", "max_position_embeddings=512", {"train": {"sequence_length": 513}}),
    ("SEQUENCE_LENGTH", "train.sequence_length", "its position table ends", {"model": "gpt2", "train": {"sequence_length": 1025}}),
    ("OPTIMIZER_CARD", "train.optimizer", "lion", {"gpu": "cpu", "train": {"optimizer": "lion"}}),
    ("OFFLOAD_STAGE", "parallel.offload", "use its CPU optimizer", {"parallel": {"zero_stage": 0, "offload": "optimizer-cpu"}}),
    ("OFFLOAD_STAGE", "parallel.offload", "ignore it", {"parallel": {"zero_stage": 2, "offload": "full-cpu"}}),
    ("OFFLOAD_NVME_PATH", "cluster.nvme_path", "needs a path for its swap files", {"parallel": {"offload": "optimizer-nvme"}}),
    ("OFFLOAD_NVME_FROZEN", "parallel.offload", "init=random", {"model": {"name": TOY, "init": "random"}, "nvme_path": "/local", "train": {"method": "lora"}, "parallel": {"offload": "full-nvme"}}),
    (
        "OFFLOAD_ENGINE",
        "parallel.offload_engine",
        "no optimizer state",
        {"parallel": {"offload_engine": "overlapped"}},
    ),
    *(
        ("OFFLOAD_ENGINE", "parallel.offload_engine", words, {**job, "parallel": {"offload": "full-cpu", "offload_engine": "overlapped", **job.get("parallel", {})}})
        for words, job in (
            ("ZeRO-3 partitions", {"parallel": {"zero_stage": 3}}),
            ("tensor=2 shards", {"parallel": {"tensor": 2}}),
            ("reads a stage's weights", {"parallel": {"pipeline": 2}}),
            ("compiles layers", {"train": {"torch_compile": True}}),
            ("context=2 shares", {"parallel": {"context": 2}}),
            ("method=qlora", {"train": {"method": "qlora"}}),
            ("no kernel on the host", {"train": {"optimizer": "sgd"}}),
        )
    ),
    ("OFFLOAD_STAGE", "parallel.offload", "at least 2", {"parallel": {"zero_stage": 1, "offload": "full-cpu", "offload_engine": "overlapped"}}),
    ("OFFLOAD_RATIO", "parallel.offload_ratio", "0.5", {"parallel": {"offload_ratio": 0.5}}),
    ("OFFLOAD_PARTIAL_ENGINE", "parallel.offload", "lion has no kernel", {"train": {"optimizer": "lion"}, "parallel": {"zero_stage": 2, "offload": "optimizer-cpu-partial"}}),
    ("OFFLOAD_PARTIAL_ENGINE", "parallel.offload", "the job asks for it", {"parallel": {"zero_stage": 1, "offload": "optimizer-cpu-partial", "offload_engine": "deepspeed"}}),
    ("OFFLOAD_PARTIAL_OPTIMIZER", "train.optimizer", "lion", {"train": {"optimizer": "lion"}, "parallel": {"offload": "optimizer-cpu-partial"}}),
    ("OFFLOAD_HOST_MEMORY", "parallel.offload", "64 GiB", {"model": "llama-3.1-8b", "host_memory_gib": 64, "train": {"sequence_length": 64}, "parallel": {"offload": "full-cpu"}}),
    ("CHECKPOINTING_KEEP", "train.gradient_checkpointing", "torch_compile=true", {"train": {"torch_compile": True, "gradient_checkpointing": {"keep": ["linear"]}}}),
    ("CHECKPOINTING_KEEP", "train.gradient_checkpointing", "precision=fp8", {"train": {"precision": "fp8", "gradient_checkpointing": {"keep": ["linear"]}}}),
    ("CHECKPOINTING_KEEP", "train.gradient_checkpointing", "num_experts=8", {"model": "mixtral-8x7b", "train": {"gradient_checkpointing": {"keep": ["linear"]}}}),
    ("CHECKPOINTING_KEEP", "train.gradient_checkpointing", "activations-cpu", {"train": {"gradient_checkpointing": {"keep": ["linear"]}}, "parallel": {"offload": "activations-cpu"}}),
    ("CHECKPOINTING_KEEP", "train.gradient_checkpointing", "tensor=2", {"model": "llama-3.2-1b", "train": {"gradient_checkpointing": {"keep": ["linear"]}}, "parallel": {"tensor": 2, "sequence_parallel": False}}),
    ("CHECKPOINTING_KEEP", "train.gradient_checkpointing", "attention=eager", {"train": {"attention": "eager", "gradient_checkpointing": {"keep": ["attention"]}}}),
    ("CHECKPOINTING_KEEP", "train.gradient_checkpointing", "attn_pdrop=0.1", {"model": "gpt2", "train": {"gradient_checkpointing": {"keep": ["attention"]}}}),
    ("NUMA_CARD", "cluster.numa_binding", "there is none", {"gpu": "cpu", "numa_binding": True}),
    ("OFFLOAD_ACTIVATIONS", "parallel.offload", "false", {"train": {"gradient_checkpointing": False}, "parallel": {"offload": "activations-cpu"}}),
    ("ACCUMULATION_DTYPE", "train.gradient_accumulation_dtype", "fp16", {"train": {"precision": "bf16", "gradient_accumulation_dtype": "fp16"}}),
    ("ACCUMULATION_STAGE", "train.gradient_accumulation_dtype", "zero_stage=0", {"train": {"gradient_accumulation_dtype": "fp32"}, "parallel": {"zero_stage": 0}}),
    ("COMPILE_ZERO3", "train.torch_compile", "zero_stage=3", {"train": {"torch_compile": True}, "parallel": {"zero_stage": 3}}),
    ("STRATEGY_KEY", "parallel.ddp", "strategy=zero would ignore it", {"parallel": {"ddp": {"bucket_cap_mb": 50}}}),
    ("STRATEGY_REPLICAS", "parallel.fsdp2.dp_replicate_size", "dp_replicate_size=3 with", {"parallel": {"strategy": "fsdp2", "fsdp2": {"dp_replicate_size": 3}}}),
    ("LORA_UNSUPPORTED", "train.lora.init_lora_weights", "init_lora_weights=pissa with strategy=fsdp2", {"train": {"method": "lora", "lora": {"init_lora_weights": "pissa"}}, "parallel": {"strategy": "fsdp2"}}),
    ("LORA_UNSUPPORTED", "train.lora.init_lora_weights", "rounded to 4 bits again", {"train": {"method": "qlora", "lora": {"init_lora_weights": "pissa"}}, "parallel": {"zero_stage": 2}}),
    ("LORA_UNSUPPORTED", "train.lora.init_lora_weights", "init_lora_weights=loftq with method=lora: nothing is rounded", {"train": {"method": "lora", "lora": {"init_lora_weights": "loftq"}}, "parallel": {"zero_stage": 2}}),
    ("COMM_HOOK", "parallel.ddp.power_sgd_rank", "an option of power_sgd", {"ranks": 2, "parallel": {"strategy": "ddp", "ddp": {"power_sgd_rank": 2}}}),
    ("COMM_HOOK", "parallel.ddp.comm_hook", "one rank reduces nothing", {"ranks": 1, "parallel": {"strategy": "ddp", "ddp": {"comm_hook": "power_sgd"}}}),
    ("COMM_HOOK", "parallel.ddp.comm_hook", "precision=bf16", {"ranks": 2, "parallel": {"strategy": "ddp", "ddp": {"comm_hook": "fp16"}}}),
    ("COMM_HOOK", "parallel.ddp.comm_hook", "with one node it", {"ranks": 2, "parallel": {"strategy": "ddp", "ddp": {"comm_hook": "hierarchical"}}}),
    ("COMM_HOOK", "parallel.ddp.comm_hook", "inside one node links are faster", {"ranks": 2, "parallel": {"strategy": "ddp", "ddp": {"comm_hook": "top_k"}}}),
    ("COMM_HOOK", "parallel.ddp.comm_hook", "top_k_ratio=0.4 of 2 nodes", {"ranks": 2, "nodes": 2, "parallel": {"strategy": "ddp", "ddp": {"comm_hook": "top_k", "top_k_ratio": 0.4}}}),
    ("COMM_HOOK", "parallel.ddp.power_sgd_start_step", "would never act", {"ranks": 2, "train": {"max_steps": 10}, "parallel": {"strategy": "ddp", "ddp": {"comm_hook": "power_sgd"}}}),
    ("STRATEGY_UNSUPPORTED", "parallel.ddp.static_graph", "gradient_accumulation_steps=2", {"train": {"gradient_accumulation_steps": 2}, "parallel": {"strategy": "ddp", "ddp": {"static_graph": True}}}),
    ("STRATEGY_UNSUPPORTED", "train.precision", "precision=fp16 under strategy=ddp", {"train": {"precision": "fp16"}, "parallel": {"strategy": "ddp"}}),
    ("STRATEGY_UNSUPPORTED", "train.optimizer", "optimizer=adafactor under strategy=fsdp2", {"train": {"optimizer": "adafactor"}, "parallel": {"strategy": "fsdp2"}}),
    ("STRATEGY_UNSUPPORTED", "train.optimizer", "flat partitions, which have neither", {"train": {"optimizer": "adafactor"}}),
    ("STRATEGY_UNSUPPORTED", "train.gradient_accumulation_dtype", "gradient_accumulation_dtype=fp32 under strategy=fsdp2", {"train": {"gradient_accumulation_dtype": "fp32"}, "parallel": {"strategy": "fsdp2"}}),
    *(
        ("LORA_UNSUPPORTED", "train.lora.use_dora", part, {"model": "llama-3.1-8b", **job, "train": {"method": "lora", "lora": {"use_dora": True}, **job.get("train", {})}})
        for part, job in {
            "zero_stage=3": {"parallel": {"zero_stage": 3}},
            "tensor=2": {"parallel": {"tensor": 2, "zero_stage": 2}},
            "pipeline=2": {"parallel": {"pipeline": 2, "zero_stage": 2}},
            "method=qlora": {"train": {"method": "qlora"}, "parallel": {"zero_stage": 2}},
            "precision=fp8": {"train": {"precision": "fp8"}, "parallel": {"zero_stage": 2}},
        }.items()
    ),
    *(
        ("LORA_UNSUPPORTED", f"train.lora.{name}", "pipeline=2", {"model": "llama-3.1-8b", "train": {"method": "lora", "lora": {name: value}}, "parallel": {"pipeline": 2, "zero_stage": 2}})
        for name, value in {"rank_pattern": {"q_proj": 4}, "alpha_pattern": {"q_proj": 4}, "loraplus_lr_ratio": 4}.items()
    ),
    ("LORA_ADAPTER", "train.lora.adapter", "cannot be read", {"train": {"method": "lora", "lora": {"adapter": "/nowhere"}}}),
    ("WEIGHTS_PATTERN", "train.freeze", "not a regular expression", {"train": {"freeze": ["("]}}),
    ("WEIGHTS_CHOICE", "train.freeze", "method=lora", {"train": {"method": "lora", "freeze": ["embed"]}}),
    ("WEIGHTS_CHOICE", "train.freeze", "pipeline=2", {"model": "llama-3.1-8b", "train": {"freeze": ["embed"]}, "parallel": {"pipeline": 2}}),
    ("WEIGHTS_CHOICE", "train.learning_rates", "learning_rate_scaling=linear", {"train": {"learning_rates": {"embed": 1e-6}, "learning_rate_scaling": "linear", "learning_rate_reference_batch_size": 8}}),
    ("QLORA_STAGE", "train.method", "zero_stage=3", {"train": {"method": "qlora"}, "parallel": {"zero_stage": 3}}),
    ("OPTIMIZER_CARD", "train.optimizer", "paged_adamw_8bit with gpu=cpu", {"gpu": "cpu", "train": {"optimizer": "paged_adamw_8bit"}, "parallel": {"strategy": "ddp"}}),
    ("OPTIMIZER_CARD", "train.optimizer", "with cpu_offload=true", {"train": {"optimizer": "paged_adamw_8bit"}, "parallel": {"strategy": "fsdp2", "fsdp2": {"cpu_offload": True}}}),
    ("OFFLOAD_OPTIMIZER", "train.optimizer", "optimizer-cpu", {"train": {"optimizer": "adamw_8bit"}, "parallel": {"offload": "optimizer-cpu", "zero_stage": 2}}),
    ("STRATEGY_UNSUPPORTED", "train.optimizer", "DeepSpeed's own Muon", {"train": {"optimizer": "muon"}}),
    ("LORA_TARGETS", "train.lora.target_modules", "target_modules=q_proj, v_proj with model_type=gpt2", {"model": "gpt2", "train": {"method": "lora", "lora": {"target_modules": ["q_proj", "v_proj"]}}}),
    ("LORA_TARGETS", "train.lora.target_modules", "model_type=llama", {"train": {"method": "lora", "lora": {"target_modules": "c_attn"}}}),
    ("LORA_PATTERN", "train.lora.rank_pattern", "no layer with an adapter", {"train": {"method": "lora", "lora": {"rank_pattern": {"c_attn": 4}}}}),
    ("LORA_PATTERN", "train.lora.alpha_pattern", "alpha_pattern has up_proj", {"train": {"method": "lora", "lora": {"target_modules": ["q_proj"], "alpha_pattern": {"up_proj": 4}}}}),
    ("PROFILE_STEPS", "train.profile", "records 3, and the run ends after max_steps=4", {"train": {"max_steps": 4, "profile": {}}}),
    ("FP8_LAYERS", "train.precision", "model_type=gpt2", {"model": "gpt2", "train": {"precision": "fp8"}}),
    ("HUB_UNUSED", "train.hub_private_repo", "hub_private_repo=false", {"train": {"hub_private_repo": False}}),
    ("LORA_UNUSED", "train.lora", "method=full", {"train": {"lora": {"r": 4}}}),
    ("OPTIMIZER_KEY", "train.momentum", "adamw", {"train": {"momentum": 0.9}}),
    ("OPTIMIZER_KEY", "train.adam_epsilon", "lion", {"train": {"optimizer": "lion", "adam_epsilon": 1e-6}}),
    ("OPTIMIZER_KEY", "train.adam_beta1", "sgd", {"train": {"optimizer": "sgd", "adam_beta1": 0.9}}),
    ("LORA_DROPOUT_EXPERTS", "train.lora.lora_dropout", "0.1", {"model": "mixtral-8x7b", "train": {"method": "lora", "lora": {"lora_dropout": 0.1}}}),
    ("STEPS_CONFLICT", "train.max_steps", "num_train_epochs=2", {"train": {"max_steps": 5, "num_train_epochs": 2}}),
    ("STEPS_CONFLICT", "train.saves_per_epoch", "save_steps=5: both", {"train": {"saves_per_epoch": 2, "save_steps": 5, "max_steps": None}}),
    ("STEPS_CONFLICT", "train.evals_per_epoch", "max_steps=5", {"train": {"evals_per_epoch": 2, "max_steps": 5}, "data": {"train": "a.jsonl", "eval": "b.jsonl"}}),
    ("BEST_STEPS", "train.saves_per_epoch", "no evaluation has judged", {"train": {"saves_per_epoch": 1, "evals_per_epoch": 2, "load_best_model_at_end": True, "max_steps": None}, "data": {"train": "a.jsonl", "eval": "b.jsonl"}}),
    ("WARMUP_CONFLICT", "train.warmup_steps", "warmup_ratio=0.1", {"train": {"warmup_steps": 5, "warmup_ratio": 0.1}}),
    ("WARMUP_UNUSED", "train.lr_scheduler_type", "constant", {"train": {"lr_scheduler_type": "constant", "warmup_steps": 5}}),
    ("SCHEDULE_FREE", "train.lr_scheduler_type", "lr_scheduler_type=cosine with optimizer=schedule_free_adamw", {"train": {"optimizer": "schedule_free_adamw"}, "parallel": {"strategy": "ddp"}}),
    ("SCHEDULE_FREE", "train.adam_beta1", "division by it", {"train": {"optimizer": "schedule_free_adamw", "lr_scheduler_type": "constant", "adam_beta1": 0}, "parallel": {"strategy": "ddp"}}),
    ("STRATEGY_UNSUPPORTED", "train.optimizer", "need other weights than steps", {"train": {"optimizer": "schedule_free_adamw", "lr_scheduler_type": "constant"}}),
    ("WARMUP_UNUSED", "train.lr_scheduler_type", "constant", {"train": {"lr_scheduler_type": "constant", "warmup_ratio": 0.5}}),
    ("WARMUP_LENGTH", "train.warmup_steps", "max_steps=5", {"train": {"warmup_steps": 5, "max_steps": 5}}),
    ("WARMUP_LENGTH", "train.warmup_ratio", "1", {"train": {"warmup_ratio": 1.0}}),
    ("MIN_LEARNING_RATE", "train.min_learning_rate_ratio", "the floor", {"train": {"lr_scheduler_type": "cosine_with_min_lr"}}),
    ("MIN_LEARNING_RATE", "train.min_learning_rate_ratio", "cosine", {"train": {"min_learning_rate_ratio": 0.1}}),
    ("POLYNOMIAL_RATE", "train.learning_rate", "1e-07", {"train": {"lr_scheduler_type": "polynomial", "learning_rate": 1e-7}}),
    ("LEARNING_RATE_SCALING", "train.learning_rate_scaling", "sqrt", {"train": {"learning_rate_scaling": "sqrt"}}),
    ("LEARNING_RATE_SCALING", "train.learning_rate_scaling", "32", {"train": {"learning_rate_reference_batch_size": 32}}),
    ("EVAL_WITHOUT_DATA", "train.eval_steps", "5", {"train": {"eval_steps": 5}}),
    ("EVAL_WITHOUT_DATA", "train.per_device_eval_batch_size", "5", {"train": {"per_device_eval_batch_size": 5}, "data": {"train": "org/set"}}),
    ("EVAL_WITHOUT_DATA", "train.load_best_model_at_end", "true", {"train": {"load_best_model_at_end": True}}),
    ("EVAL_WITHOUT_DATA", "train.early_stopping_patience", "3", {"train": {"early_stopping_patience": 3}}),
    ("EVAL_WITHOUT_DATA", "train.samples", "samples=…", {"train": {"samples": {"prompts": ["Once"]}}}),
    ("SAVE_ASYNC", "train.save_async", "swap files", {"nvme_path": "/nvme", "train": {"save_async": True}, "parallel": {"offload": "optimizer-nvme"}}),
    ("SAVE_ONLY_MODEL", "train.save_only_model", "swap files", {"nvme_path": "/nvme", "train": {"save_only_model": True}, "parallel": {"offload": "optimizer-nvme"}}),
    ("LOSS_OPTION", "train.label_smoothing_factor", "loss=chunked", {"train": {"label_smoothing_factor": 0.1, "loss": "chunked"}}),
    ("LOSS_OPTION", "train.z_loss", "loss=chunked", {"train": {"z_loss": 1e-4, "loss": "chunked"}}),
    ("LOSS_OPTION", "train.compute_loss", "loss=chunked", {"train": {"compute_loss": "a:b", "loss": "chunked"}}),
    ("LOSS_OPTION", "train.compute_loss", "tensor=2", {"model": "llama-3.2-1b", "train": {"compute_loss": "a:b"}, "parallel": {"tensor": 2}}),
    ("LOSS_OPTION", "train.compute_loss", "z_loss=0.5", {"train": {"compute_loss": "a:b", "z_loss": 0.5}}),
    ("LOSS_OPTION", "train.router_aux_loss_coef", "model_type=llama", {"train": {"router_aux_loss_coef": 0.1}}),
    ("LOSS_OPTION", "train.neftune_noise_alpha", "tensor=2", {"model": "llama-3.2-1b", "train": {"neftune_noise_alpha": 5}, "parallel": {"tensor": 2}}),
    ("BEST_UNUSED", "train.metric_for_best_model", "loss", {"train": {"metric_for_best_model": "loss"}}),
    ("BEST_UNUSED", "train.greater_is_better", "false", {"train": {"greater_is_better": False}}),
    ("BEST_UNUSED", "train.early_stopping_threshold", "0.1", {"train": {"early_stopping_threshold": 0.1, "load_best_model_at_end": True}, "data": {"train": "org/set", "validation_fraction": 0.1}}),
    ("BEST_METRIC", "train.metric_for_best_model", "accuracy", {"train": {"metric_for_best_model": "accuracy", "load_best_model_at_end": True}, "data": {"train": "org/set", "validation_fraction": 0.1}}),
    ("BEST_METRIC", "train.metric_for_best_model", "eval_code_loss alone", {"train": {"load_best_model_at_end": True}, "data": {"train": "org/set", "eval": {"code": "org/code"}}}),
    ("BEST_METRIC", "train.metric_for_best_model", "and others so named", {"train": {"compute_metrics": "a:b", "load_best_model_at_end": True, "metric_for_best_model": "maths_accuracy"}, "data": {"train": "org/set", "eval": {"code": "org/code"}}}),
    ("BEST_STEPS", "train.save_steps", "eval_steps=4", {"train": {"save_steps": 6, "eval_steps": 4, "load_best_model_at_end": True}, "data": {"train": "org/set", "validation_fraction": 0.1}}),
    ("BEST_STEPS", "train.save_steps", "eval_steps=0.25", {"train": {"save_steps": 0.5, "eval_steps": 0.25, "load_best_model_at_end": True}, "data": {"train": "org/set", "validation_fraction": 0.1}}),
    ("METRICS_LOGITS", "train.compute_metrics", "loss=chunked", {"train": {"compute_metrics": "a:b", "loss": "chunked"}, "data": {"train": "org/set", "validation_fraction": 0.1}}),
    ("METRICS_LOGITS", "train.compute_metrics", "tensor=2", {"model": "llama-3.2-1b", "train": {"compute_metrics": "a:b"}, "parallel": {"tensor": 2}, "data": {"train": "org/set", "validation_fraction": 0.1}}),
    ("PACKING_COMPILE", "data.packing", "torch_compile", {"data": {"train": "org/set", "packing": "separated"}, "train": {"torch_compile": True}}),
    ("BATCH_EQUATION", "train.train_batch_size", "7", {"train": {"train_batch_size": 7}}),
    ("DEEPSPEED_REMOVED", "deepspeed.amp", "removed", {"deepspeed": {"amp": {"enabled": False}}}),
    ("DEEPSPEED_REMOVED", "deepspeed.zero_optimization.mics_shard_size", "removed", {"deepspeed": zero_keys(mics_shard_size=2)}),
    ("STRATEGY_KEY", "deepspeed.gradient_clipping", "a key of DeepSpeed", {"parallel": {"strategy": "fsdp2"}, "deepspeed": {"gradient_clipping": 1.0}}),
    ("STRATEGY_UNSUPPORTED", "train.gradient_accumulation_dtype", "in their own dtype", {"train": {"gradient_accumulation_dtype": "fp32"}, "parallel": {"strategy": "ddp"}}),
    ("DEEPSPEED_SET_ELSEWHERE", "deepspeed.optimizer", "set elsewhere", {"deepspeed": {"optimizer": {"params": {"lr": "auto"}}}}),
    ("DEEPSPEED_SET_ELSEWHERE", "deepspeed.zero_optimization.stage", "set elsewhere", {"deepspeed": zero_keys(stage="auto")}),
    ("DEEPSPEED_SET_ELSEWHERE", "deepspeed.bf16.enabled", "set elsewhere", {"deepspeed": {"bf16": {"enabled": True}}}),
    ("DEEPSPEED_SET_ELSEWHERE", "deepspeed.compile", "set elsewhere", {"deepspeed": {"compile": {"backend": "inductor"}}}),
    ("DEEPSPEED_AUTO", "deepspeed.zero_optimization.reduce_bucket_size", "auto", {"deepspeed": zero_keys(reduce_bucket_size="auto")}),
    ("DEEPSPEED_UNKNOWN", "deepspeed.gradient_cliping", "gradient_cliping", {"deepspeed": {"gradient_cliping": 1.0}}),
    ("DEEPSPEED_UNKNOWN", "deepspeed.zero_optimisation", "zero_optimisation", {"deepspeed": {"zero_optimisation": {"stage": 3}}}),
    ("DEEPSPEED_VALUE", "deepspeed.zero_optimization.reduce_bucket_size", "'5e8' (str)", {"deepspeed": zero_keys(reduce_bucket_size="5e8")}),
    ("DEEPSPEED_VALUE", "deepspeed.zero_optimization.reduce_bucket_size", "0 (int)", {"deepspeed": zero_keys(reduce_bucket_size=0)}),
    ("DEEPSPEED_VALUE", "deepspeed.zero_optimization.reduce_bucket_size", "None", {"deepspeed": zero_keys(reduce_bucket_size=None)}),
    ("DEEPSPEED_VALUE", "deepspeed.zero_optimization", "None", {"deepspeed": {"zero_optimization": None}}),
    ("DEEPSPEED_VALUE", "deepspeed.zero_optimization", "3", {"deepspeed": {"zero_optimization": 3}}),
    ("DEEPSPEED_VALUE", "deepspeed.gradient_predivide_factor", "'2'", {"deepspeed": {"gradient_predivide_factor": "2"}}),
    ("DEEPSPEED_IGNORED", "deepspeed.comms_logger.enabled", "turns the logger on", {"deepspeed": {"comms_logger": {"enabled": False}}}),
    ("DEEPSPEED_IGNORED", "deepspeed.zero_optimization.reduce_bucket_size", "zero_stage=0", {"deepspeed": zero_keys(reduce_bucket_size=5), "parallel": {"zero_stage": 0}}),
    ("DEEPSPEED_IGNORED", "deepspeed.zero_optimization.stage3_max_live_parameters", "zero_stage=2", {"deepspeed": zero_keys(stage3_max_live_parameters=5), "parallel": {"zero_stage": 2}}),
    ("DEEPSPEED_IGNORED", "deepspeed.zero_optimization.allgather_bucket_size", "zero_stage=3", {"deepspeed": zero_keys(allgather_bucket_size=6), "parallel": {"zero_stage": 3}}),
    ("DEEPSPEED_IGNORED", "deepspeed.zero_optimization.round_robin_gradients", "zero_stage=3", {"deepspeed": zero_keys(round_robin_gradients=True), "parallel": {"zero_stage": 3}}),
    ("DEEPSPEED_IGNORED", "deepspeed.zero_optimization.overlap_comm", "BF16_Optimizer", {"deepspeed": zero_keys(overlap_comm=True), "train": {"gradient_accumulation_dtype": "fp32"}, "parallel": {"zero_stage": 1}}),
    ("DEEPSPEED_IGNORED", "deepspeed.zero_optimization.contiguous_gradients", "turns it on", {"deepspeed": zero_keys(contiguous_gradients=False), "parallel": {"zero_stage": 2, "offload": "optimizer-cpu"}}),
    ("DEEPSPEED_IGNORED", "deepspeed.zero_optimization.offload_optimizer", "offload=none", {"deepspeed": zero_keys(offload_optimizer={"pin_memory": True})}),
    ("DEEPSPEED_IGNORED", "deepspeed.zero_optimization.offload_param", "offload=optimizer-cpu", {"deepspeed": zero_keys(offload_param={"pin_memory": True}), "parallel": {"zero_stage": 3, "offload": "optimizer-cpu"}}),
    ("DEEPSPEED_IGNORED", "deepspeed.zero_optimization.offload_param.buffer_size", "full-cpu", {"deepspeed": zero_keys(offload_param={"buffer_size": 5}), "parallel": {"offload": "full-cpu"}}),
    ("DEEPSPEED_IGNORED", "deepspeed.zero_optimization.stage3_prefetch_bucket_size", "sets it to 1", {"deepspeed": zero_keys(stage3_prefetch_bucket_size=5, stage3_allgather_sequential=True), "parallel": {"zero_stage": 3}}),
    ("DEEPSPEED_IGNORED", "deepspeed.fp16", "precision=bf16", {"train": {"precision": "bf16"}, "deepspeed": {"fp16": {"loss_scale": 0}}}),
    ("DEEPSPEED_IGNORED", "deepspeed.fp16.hysteresis", "loss_scale=128", {"deepspeed": {"fp16": {"loss_scale": 128, "hysteresis": 2}}, "train": {"precision": "fp16"}}),
    ("DEEPSPEED_IGNORED", "deepspeed.bf16.check_grad_overflow", "zero_stage=3", {"deepspeed": {"bf16": {"check_grad_overflow": False}}, "parallel": {"zero_stage": 3}}),
    ("DEEPSPEED_IGNORED", "deepspeed.bf16.immediate_grad_update", "zero_stage=2", {"deepspeed": {"bf16": {"immediate_grad_update": True}}, "parallel": {"zero_stage": 2}}),
    ("DEEPSPEED_IGNORED", "deepspeed.gradient_predivide_factor", "prescale", {"deepspeed": {"prescale_gradients": True, "gradient_predivide_factor": 1.0, **zero_keys(reduce_scatter=False)}}),
    ("DEEPSPEED_IGNORED", "deepspeed.aio", "offload=none", {"deepspeed": {"aio": {"queue_depth": 8}}}),
    ("DEEPSPEED_PRESCALE", "deepspeed.prescale_gradients", "reduce_scatter=true", {"deepspeed": {"prescale_gradients": True}}),
    ("DEEPSPEED_PRESCALE", "deepspeed.gradient_predivide_factor", "reduce_scatter=true", {"deepspeed": {"gradient_predivide_factor": 2.0}}),
    ("DEEPSPEED_UNSUPPORTED", "deepspeed.sequence_parallel_size", "parallel.tensor alone", {"deepspeed": {"sequence_parallel_size": 2}}),
    ("DEEPSPEED_UNSUPPORTED", "deepspeed.zero_optimization.offload_optimizer.super_offload", "not estimated", {"parallel": {"zero_stage": 3, "offload": "optimizer-cpu"}, "deepspeed": zero_keys(offload_optimizer={"super_offload": True})}),
    ("DEEPSPEED_VALUE", "deepspeed.zero_optimization.reduce_bucket_size", "reads as 1", {"deepspeed": zero_keys(reduce_bucket_size=True)}),
    ("DEEPSPEED_VALUE", "deepspeed.dump_state", "reads as true", {"deepspeed": {"dump_state": "false"}}),
    ("DEEPSPEED_IGNORED", "deepspeed.flops_profiler", "enabled left out", {"deepspeed": {"flops_profiler": {"profile_step": 2}}}),
    ("DEEPSPEED_IGNORED", "deepspeed.disable_allgather", "never reads it", {"deepspeed": {"disable_allgather": True}}),
    ("DEEPSPEED_UNSUPPORTED", "deepspeed.zero_optimization.legacy_stage1", "no longer has that optimizer", {"deepspeed": zero_keys(legacy_stage1=True)}),
    ("DEEPSPEED_PREDIVIDE", "deepspeed.gradient_predivide_factor", "2 times too small", {"deepspeed": {"gradient_predivide_factor": 2.0, **zero_keys(reduce_scatter=False)}, "parallel": {"zero_stage": 3}}),
    ("DEEPSPEED_PREDIVIDE", "deepspeed.gradient_predivide_factor", "data-parallel ranks", {"model": "llama-3.2-1b", "ranks": 4, "deepspeed": {"gradient_predivide_factor": 2.0, **zero_keys(reduce_scatter=False)}, "parallel": {"pipeline": 2, "zero_stage": 3}}),
    ("DEEPSPEED_VALUE", "deepspeed.zero_optimization.allgather_bucket_size", "5 (int)", {"deepspeed": zero_keys(allgather_bucket_size=5)}),
    ("DEEPSPEED_IGNORED", "deepspeed.zero_optimization.reduce_scatter", "always scatters", {"deepspeed": zero_keys(reduce_scatter=False, contiguous_gradients=False), "parallel": {"zero_stage": 3}}),
    ("DEEPSPEED_HPZ", "deepspeed.zero_optimization.zero_hpz_partition_size", "world of 4", {"ranks": 4, "deepspeed": zero_keys(zero_hpz_partition_size=3), "parallel": {"zero_stage": 3}}),
    ("DEEPSPEED_HPZ", "deepspeed.zero_optimization.zero_hpz_partition_size", "world of 2", {"deepspeed": zero_keys(zero_hpz_partition_size=4), "parallel": {"zero_stage": 3}}),
    ("DEEPSPEED_GROUPS", "deepspeed.zero_optimization.zero_hpz_partition_size", "neighbouring", {"model": "llama-3.1-8b", "ranks": 4, "parallel": {"tensor": 2, "zero_stage": 3}, "deepspeed": zero_keys(zero_hpz_partition_size=2)}),
    ("DEEPSPEED_GROUPS", "deepspeed.zero_optimization.zero_hpz_partition_size", "with pipeline=2", {"model": "llama-3.2-1b", "ranks": 4, "parallel": {"pipeline": 2, "zero_stage": 3}, "deepspeed": zero_keys(zero_hpz_partition_size=4)}),
    ("DEEPSPEED_GROUPS", "deepspeed.zero_optimization.zero_quantized_gradients", "zero_quantized_gradients=true with tensor=2 and pipeline=2", {"model": "llama-3.2-1b", "ranks": 8, "parallel": {"tensor": 2, "pipeline": 2, "zero_stage": 3}, "deepspeed": zero_keys(zero_quantized_gradients=True)}),
    ("DEEPSPEED_CARD", "deepspeed.zero_optimization.zero_quantized_weights", "cpu", {"gpu": "cpu", "deepspeed": zero_keys(zero_quantized_weights=True), "parallel": {"zero_stage": 3}}),
    ("DEEPSPEED_QUANTIZED", "deepspeed.zero_optimization.reduce_scatter", "false", {"deepspeed": zero_keys(zero_quantized_gradients=True, reduce_scatter=False), "parallel": {"zero_stage": 3}}),
    ("DEEPSPEED_BUFFERS", "deepspeed.zero_optimization.offload_optimizer.buffer_count", "buffer_count=3", {"nvme_path": "/local", "deepspeed": zero_keys(offload_optimizer={"buffer_count": 3}), "parallel": {"offload": "optimizer-nvme"}}),
    ("DEEPSPEED_BUFFERS", "deepspeed.zero_optimization.offload_optimizer.buffer_count", "buffer_count=4", {"nvme_path": "/local", "deepspeed": zero_keys(offload_optimizer={"pipeline_read": True}), "parallel": {"offload": "optimizer-nvme"}}),
]  # fmt: skip

ELSEWHERE = {
    "OFFLOAD_PROFILE": "test_offload.py",
    **dict.fromkeys(
        ("DEEPSPEED_SYNTAX", "DEEPSPEED_DUPLICATE", "ESTIMATE_UNSUPPORTED"),
        "../deepspeed_spec/test_user_file.py",
    ),
    "TOKENIZER_NOT_FOUND": "../artifacts/test_commands.py",
    "MODEL_CONFIG_INVALID": "rules/test_model.py",
    "TASK_UNSUPPORTED": "rules/test_tasks.py",
    **dict.fromkeys(("IMAGES_UNSUPPORTED", "IMAGES_UNUSED", "IMAGES_LENGTH", "IMAGES_MODEL"), "rules/test_images.py"),
    **dict.fromkeys(("TASK_LABELS", "TASK_PARALLEL", "TASK_UNUSED"), "rules/test_tasks.py"),
    "TRAIN_NO_DATA": "../cli/test_emit.py",
    "ACCELERATE_FILE": "../deepspeed_spec/test_accelerate_config.py",
    "PLAN_UNREADABLE": "test_plan.py",
    "EMIT_UNWRITABLE": "test_plan.py",
    "INTEGRATION_STREAMING": "test_trainer_config.py, test_accelerate_config.py",
    "INTEGRATION_ACTIVATIONS": "test_trainer_config.py, test_accelerate_config.py",
    "INTEGRATION_OFFLOAD": "test_trainer_config.py",
    "INTEGRATION_CHECKPOINTING": "test_trainer_config.py, test_accelerate_config.py",
    "INTEGRATION_FP8": "test_trainer_config.py, test_accelerate_config.py",
    "INTEGRATION_CPU": "../trainer/test_three_ways.py",
    "INTEGRATION_STRATEGY": "../trainer/test_three_ways.py",
    "INTEGRATION_PIPELINE": "test_trainer_config.py, test_accelerate_config.py",
    "INTEGRATION_CONTEXT": "test_trainer_config.py, test_accelerate_config.py",
    "INTEGRATION_TENSOR": "test_trainer_config.py, test_accelerate_config.py",
    "INTEGRATION_KERNELS": "test_trainer_config.py, test_accelerate_config.py",
    "INTEGRATION_LOOP": "test_trainer_config.py",
    "INTEGRATION_MODEL": "test_trainer_config.py",
    "INTEGRATION_LIGER": "test_trainer_config.py",
    "INTEGRATION_LOSS": "test_trainer_config.py, test_accelerate_config.py",
    "INTEGRATION_LEARNING_RATE": "test_accelerate_config.py",
    "INTEGRATION_POLYNOMIAL": "test_trainer_config.py",
}


def codes_in_source() -> set[str]:
    folders = (Path(package.__file__).parent for package in (toolkit.planning, toolkit.deepspeed_spec))
    sources = [path for folder in folders for path in folder.rglob("*.py")]
    return {code for path in sources for code in re.findall(r'code="([A-Z0-9_]+)"', path.read_text(encoding="utf-8"))}


@pytest.mark.parametrize(
    ("train", "unset"),
    [
        ({"max_steps": 5, "num_train_epochs": 2}, ("train.max_steps=null", "train.num_train_epochs=null")),
        ({"warmup_steps": 1, "warmup_ratio": 0.1}, ("train.warmup_steps=null", "train.warmup_ratio=null")),
    ],
)
def test_two_keys_of_which_one_may_stay_say_how_to_unset_the_other(train, unset):
    (problem,) = problems_of(train=train)
    assert all(f"`--set {each}`" in problem.fix for each in unset)


@pytest.mark.parametrize(("code", "key", "part", "job"), BROKEN, ids=[f"{row[0]}-{row[1]}" for row in BROKEN])
def test_a_broken_rule_is_the_only_problem(code, key, part, job):
    (problem,) = problems_of(**job)
    assert (problem.code, problem.key) == (code, key)
    assert part in problem.message
    assert problem.fix
    assert not problem.fix.endswith(".")


@pytest.mark.parametrize(("virtual_stages", "schedule"), [(1, "1f1b"), (2, "interleaved")])
def test_the_schedule_to_take_instead_of_zb_h1_runs_the_same_stages(virtual_stages, schedule):
    parallel = {"pipeline": 2, "zero_stage": 2, "virtual_stages": virtual_stages}
    (problem,) = problems_of(model="llama-3.2-1b", ranks=4, parallel=parallel | {"pipeline_schedule": "zb-h1"})
    assert problem.fix.endswith(f"parallel.pipeline_schedule to {schedule}")
    assert not problems_of(model="llama-3.2-1b", ranks=4, parallel=parallel | {"pipeline_schedule": schedule})


def test_every_code_of_the_package_is_triggered_by_a_test():
    alone = {
        "OFFLOAD_PARTIAL_SIZE",
        "STRATEGY_KEY",
        "TP_ARCHITECTURE",
        "FP8_STRATEGY",
        "FP8_METHOD",
        "ATTENTION_CLASS",
        "ATTENTION_SOFTCAP",
        "CHECKPOINTING_LAYERS",
    }
    asked = {"PARTITION_STAGES", "PARTITION_LAYERS", "SCHEDULE_VIRTUAL_STAGES"}  # of toolkit.pipeline_schedule
    asked |= {"DATA_SOURCES"}  # of toolkit.dataset_inspection
    assert codes_in_source() | asked == {row[0] for row in BROKEN} | set(ELSEWHERE) | alone
    for code, files in ELSEWHERE.items():
        for name in files.split(", "):
            assert code in (Path(__file__).parent / name).read_text(encoding="utf-8")


def test_keys_of_deepspeed_say_nothing_to_another_strategy():
    found = problems_of(parallel={"strategy": "ddp", "zero_stage": 2}, deepspeed={"zero_optimization": {}})
    assert {(problem.code, problem.key) for problem in found} == {
        ("STRATEGY_KEY", "parallel.zero_stage"),
        ("STRATEGY_KEY", "deepspeed.zero_optimization"),
    }


OVERLAPPED = {"offload_engine": "overlapped"}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
@pytest.mark.parametrize(
    ("parallel", "refused"),
    [
        ({"offload": "optimizer-cpu"} | OVERLAPPED, ("STRATEGY_KEY", "parallel.offload")),
        ({"offload": "optimizer-cpu-partial"}, ("STRATEGY_KEY", "parallel.offload")),
        ({"offload": "full-cpu"}, ("STRATEGY_KEY", "parallel.offload")),
        ({"offload": "full-cpu"} | OVERLAPPED, ("STRATEGY_KEY", "parallel.offload")),
        (OVERLAPPED, ("OFFLOAD_ENGINE", "parallel.offload_engine")),
        ({"tensor": 2}, ("TP_UNSUPPORTED", "parallel.strategy")),
        ({"pipeline": 2}, ("PIPELINE_UNSUPPORTED", "parallel.strategy")),
    ],
)
def test_what_a_strategy_does_not_have_is_refused_once(strategy, parallel, refused):
    """And not also for a stage that the job does not name, which other strategies have in name alone."""
    (problem,) = problems_of(model="llama-3.2-1b", ranks=2, parallel={"strategy": strategy, **parallel})
    assert (problem.code, problem.key) == refused


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
@pytest.mark.parametrize(
    "other",
    [
        {"train": {"optimizer": "adamw_8bit"}},
        {"model": {"name": "llama-3.2-1b", "init": "random"}, "train": {"method": "lora"}},
        {"train": {"save_only_model": True, "save_async": True}},
        {"host_memory_gib": 1},
    ],
    ids=["8-bit", "frozen", "saves", "memory"],
)
def test_a_profile_that_a_strategy_lacks_is_refused_once_whatever_else_is_wrong_with_it(strategy, other):
    for offload in ("optimizer-cpu", "full-cpu", "optimizer-nvme", "full-nvme"):
        job = {"model": "llama-3.2-1b", **other, "parallel": {"strategy": strategy, "offload": offload}}
        (problem,) = problems_of(**job)
        assert (problem.code, problem.key) == ("STRATEGY_KEY", "parallel.offload")
        assert not problems_of(**{**job, "parallel": {"strategy": strategy}})


def test_streamed_layers_are_refused_for_a_stage_for_their_own_reason():
    parallel = {"zero_stage": 1, "offload": "full-cpu"} | OVERLAPPED
    (problem,) = problems_of(parallel=parallel)
    assert problem.code == "OFFLOAD_STAGE"
    assert "the gradients of a step would stay on the card" in problem.message


@pytest.mark.parametrize(
    ("code", "job"),
    [
        ("FP8_STRATEGY", {"parallel": {"strategy": "ddp"}}),
        ("FP8_STRATEGY", {"parallel": {"strategy": "fsdp2"}}),
        ("FP8_METHOD", {"train": {"method": "qlora"}}),
    ],
)
def test_float8_is_estimated_for_no_engine_but_ours(code, job):
    with_fp8 = {**job, "train": {"precision": "fp8", **job.get("train", {})}}
    found = {problem.code: problem for problem in problems_of(**with_fp8)}
    assert set(found) == {code}
    assert found[code].key == "train.precision"
    assert code not in {problem.code for problem in problems_of(**job)}


def test_a_partial_offload_of_a_model_of_unknown_size():
    job = job_of(parallel={"offload": "optimizer-cpu-partial"})
    with pytest.raises(PlanError) as caught:
        resolve_with(job, model=replace(model_of(job.model.name), num_parameters=None), gpu=gpu_of(job.cluster.gpu))
    assert caught.value.codes == ("OFFLOAD_PARTIAL_SIZE",)


@pytest.mark.parametrize(
    ("config", "part"),
    [
        ({"layerdrop": 0.1}, "layerdrop=0.1"),
        ({"output_router_logits": True, "router_aux_loss_coef": 0.1}, "output_router_logits=true"),
        ({"output_router_logits": True, "router_aux_loss_coef": 0}, "output_router_logits=true"),
        ({"output_router_logits": True}, "output_router_logits=true"),
        ({"layerdrop": 0.0, "output_router_logits": False}, None),
    ],
)
def test_what_stages_cannot_follow_of_a_model_is_refused(config, part):
    model = model_of("llama-3.2-1b")
    job = {"model": "llama-3.2-1b", "ranks": 2, "train": {"gradient_accumulation_steps": 2}}
    changed = replace(model, config_json=json.dumps(model.config | config))
    wrapped = {"model_type": "llama4", "architectures": ["Llama4ForCausalLM"], "text_config": model.config | config}
    multimodal = replace(model, config_json=json.dumps(wrapped))
    for one in (changed, multimodal) if part else (changed,):
        resolve_with(job_of(**job), model=one, gpu=gpu_of("h100-sxm-80gb"))
        plan = partial(resolve_with, job_of(**job, parallel={"pipeline": 2}), model=one, gpu=gpu_of("h100-sxm-80gb"))
        if part is None:
            plan()
            continue
        with pytest.raises(PlanError) as caught:
            plan()
        (problem,) = caught.value.problems
        assert (problem.code, problem.key) == ("PIPELINE_UNSUPPORTED", "model")
        assert part in problem.message


def test_a_stage_that_is_a_switch_is_refused_beside_an_offload_profile():
    (problem,) = problems_of(parallel={"offload": "optimizer-cpu"}, deepspeed={"zero_optimization": True})
    assert (problem.code, problem.key) == ("DEEPSPEED_SET_ELSEWHERE", "deepspeed.zero_optimization.stage")


def refused_on_tensor_ranks(model_type: str, experts: str, **config: int) -> list[tuple[str, str]]:
    model = model_of("llama-3.2-1b")
    other = replace(
        model,
        model_type=model_type,
        config_json=json.dumps({**model.config, "architectures": None, "model_type": model_type, **config}),
        num_attention_heads=0 if model_type in WHOLE_MODEL_TYPES else model.num_attention_heads,
    )
    job = job_of(model="llama-3.2-1b", ranks=2, parallel={"tensor": 2, "experts": experts})
    try:
        resolve_with(job, model=other, gpu=gpu_of("h100-sxm-80gb"))
    except PlanError as error:
        return [(problem.code, problem.key) for problem in error.problems]
    return []


def test_tensor_ranks_of_state_space_models_and_hybrids_are_refused_as_at_the_start():
    for model_type in WHOLE_MODEL_TYPES:
        for experts in ("sliced", "whole"):
            assert refused_on_tensor_ranks(model_type, experts) == [("TP_ARCHITECTURE", "parallel.tensor")]
    for model_type in ("falcon_h1", "bamba"):
        assert refused_on_tensor_ranks(model_type, "sliced") == []
        assert refused_on_tensor_ranks(model_type, "whole") == [("TP_EXPERTS", "parallel.experts")]
    assert refused_on_tensor_ranks("bamba", "whole", moe_num_experts=8) == [], "the proof would find them"


@pytest.mark.parametrize("section", ["", "text_config"])
def test_stages_follow_a_mixture_whose_router_loss_the_job_leaves_out(section):
    model = model_of("mixtral-8x7b")
    collects = model.config | {"output_router_logits": True, "router_aux_loss_coef": 0.02}
    config = (
        {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], section: collects} if section else collects
    )
    model = replace(model, config_json=json.dumps(config))

    def found(coefficient: float | None) -> list[tuple[str, str, str]]:
        train = {"gradient_accumulation_steps": 4} | (
            {} if coefficient is None else {"router_aux_loss_coef": coefficient}
        )
        job = job_of(model="mixtral-8x7b", ranks=8, train=train, parallel={"pipeline": 2})
        try:
            resolve_with(job, model=model, gpu=gpu_of("h100-sxm-80gb"))
        except PlanError as error:
            return [(problem.code, problem.key, problem.fix) for problem in error.problems]
        return []

    without = "Set train.router_aux_loss_coef to 0, which leaves that loss out, or set parallel.pipeline to 1"
    assert found(None) == [("PIPELINE_UNSUPPORTED", "model", without)]
    assert found(0) == []
    [(code, key, _)] = found(0.1)
    assert (code, key) == ("LOSS_OPTION", "train.router_aux_loss_coef")


def test_every_problem_is_reported_at_once():
    found = problems_of(
        gpu=V100,
        train={"precision": "bf16", "attention": "flash_attention_2", "train_batch_size": 7, "momentum": 0.5},
        parallel={"zero_stage": 0, "offload": "full-cpu"},
        deepspeed={"gradient_cliping": 1, "optimizer": {}},
    )
    assert {problem.code for problem in found} == {
        "PRECISION_CARD", "ATTENTION_CARD", "BATCH_EQUATION", "OPTIMIZER_KEY", "OFFLOAD_STAGE", "DEEPSPEED_UNKNOWN",
        "DEEPSPEED_SET_ELSEWHERE",
    }  # fmt: skip


def test_a_misspelt_key_names_the_right_one_even_where_it_has_another_home():
    (problem,) = problems_of(deepspeed={"gradient_cliping": 1.0})
    assert "train.max_grad_norm" in problem.fix
    (problem,) = problems_of(deepspeed=zero_keys(reduce_bucket_sise=5))
    assert "deepspeed.zero_optimization.reduce_bucket_size" in problem.fix


@pytest.mark.parametrize(
    ("config", "stage"),
    [
        ({"comms_logger": {"enabled": False}}, 2),
        ({"flops_profiler": {"profile_step": 3}}, 2),
        (zero_keys(stage3_max_live_parameters=5), 2),
        (zero_keys(sub_group_size="auto"), 3),
        (zero_keys(allgather_bucket_size=5), 2),
        (zero_keys(reduce_bucket_size=0), 2),
        (zero_keys(legacy=1), 2),
        ({"prescale_gradients": True}, 2),
        ({"zero_optimisation": {"stage": 3}}, 2),
        ({"nothing_of_the_kind": {}}, 2),
        ({"dump_state": "false"}, 2),
        ({"amp": {}}, 2),
    ],
)
def test_a_job_and_a_file_are_held_to_the_same_rules(config, stage):
    (problem,) = problems_of(deepspeed=config, parallel={"zero_stage": stage})
    notes, found = said_of_a_file(merge(config, zero_keys(stage=stage)))
    assert [(each.code, f"deepspeed.{each.key}") for each in found] in ([], [(problem.code, problem.key)])
    # Where DeepSpeed goes on with it: an error where we start the run, a note where the user does.
    path = problem.key.removeprefix("deepspeed.")
    assert [note.startswith(f"deepspeed_config: {path}") for note in notes] == ([] if found else [True])


def said_of_a_file(config):
    try:
        return read_user_config(config).notes, ()
    except SpecError as error:
        return (), error.problems


SOUND = [
    {"parallel": {"zero_stage": 3}, "deepspeed": zero_keys(max_live_parameters=5e8, stage3_gather_16bit_weights_on_model_save=True, sub_group_size=0)},
    {"deepspeed": {"zero_optimization": {"reduce_bucket_size": "5000", "round_robin_gradients": "yes"}, "steps_per_print": 1e3, "log_level": "INFO"}},
    {"train": {"gradient_accumulation_dtype": "fp32"}},
    {"train": {"gradient_accumulation_dtype": "fp32"}, "parallel": {"zero_stage": 1}, "deepspeed": {"bf16": {"immediate_grad_update": True}}},
    {"train": {"gradient_accumulation_dtype": "fp32"}, "parallel": {"zero_stage": 1}, "deepspeed": {"prescale_gradients": True}},
    {"deepspeed": {"prescale_gradients": True, **zero_keys(reduce_scatter=False)}},
    {"deepspeed": {"gradient_predivide_factor": 2, "communication_data_type": "fp32", "steps_per_print": 5, **zero_keys(reduce_scatter=False)}},
    {"deepspeed": {"prescale_gradients": False}},
    {"model": "llama-3.2-1b", "ranks": 4, "deepspeed": {"gradient_predivide_factor": 4, **zero_keys(reduce_scatter=False)}, "parallel": {"pipeline": 2, "zero_stage": 3}},
    {"train": {"kernels": "liger", "precision": "fp32", "loss": "liger", "method": "lora"}},
    {"gpu": V100, "train": {"kernels": "liger", "precision": "fp16"}},
    {"gpu": "l4-24gb", "train": {"precision": "fp8", "fp8": {"recipe": "rowwise"}, "torch_compile": True}},
    {"gpu": "cpu", "train": {"precision": "fp8", "method": "lora"}, "parallel": {"zero_stage": 3}},
    {"train": {"precision": "fp8", "gradient_accumulation_dtype": "fp32"}, "parallel": {"zero_stage": 1}, "deepspeed": {"bf16": {"immediate_grad_update": True}}},
    {"gpu": V100, "train": {"precision": "fp16"}, "deepspeed": {"fp16": {"hysteresis": 1, "loss_scale_window": 100}}},
    {"ranks": 4, "parallel": {"zero_stage": 3}, "deepspeed": zero_keys(zero_hpz_partition_size=2, zero_quantized_weights=True)},
    {"model": "llama-3.2-1b", "ranks": 4, "parallel": {"pipeline": 2, "zero_stage": 3}, "deepspeed": zero_keys(zero_hpz_partition_size=1, zero_quantized_gradients=False)},
    {"nvme_path": "/local", "parallel": {"offload": "full-nvme"}, "deepspeed": {"aio": {"queue_depth": 32}, **zero_keys(offload_optimizer={"buffer_count": 8, "pipeline_write": True})}},
    {"nvme_path": "/local"},
    {"train": {"optimizer": "sgd"}, "parallel": {"offload": "optimizer-cpu"}},
    {"model": "gemma-2-2b", "train": {"attention": "flash_attention_2"}},
    {"gpu": "mi300x-192gb", "train": {"attention": "flash_attention_2"}},
    {"gpu": "cpu", "train": {"optimizer": "lion"}, "parallel": {"zero_stage": 1, "offload": "optimizer-cpu"}},
    {"train": {"lr_scheduler_type": "constant", "warmup_steps": 0}},
    {"train": {"train_batch_size": 12, "per_device_train_batch_size": 3}},
    {"data": {"train": "org/set", "name": "main", "split": "train[:5]"}},
]  # fmt: skip


@pytest.mark.parametrize("job", SOUND, ids=range(len(SOUND)))
def test_what_is_sound_passes(job):
    assert problems_of(**job) == ()
    plan_of(**job).deepspeed_config()


def test_every_rule_says_what_it_guards():
    assert len(set(RULES)) == len(RULES)
    assert all(rule.__doc__ for rule in RULES)


QLORA = {"method": "qlora"}


def estimable(**sections):
    """What stands against estimating a job."""
    job = job_of(**sections)
    try:
        resolve_with(job, model=model_of(job.model.name), gpu=gpu_of(job.cluster.gpu), to_run=False)
    except PlanError as error:
        return {problem.code: problem for problem in error.problems}
    return {}


def test_what_the_refusal_of_qlora_says_is_accepted():
    assert list(estimable(train=QLORA, parallel={"zero_stage": 3})) == ["QLORA_STAGE"]
    for way in ({"strategy": "fsdp2"}, {"strategy": "ddp"}, *({"zero_stage": stage} for stage in range(3))):
        assert estimable(train=QLORA, parallel=way) == {}, way
    assert estimable(train={"method": "lora"}, parallel={"zero_stage": 3}) == {}


def test_an_offload_that_needs_stage_3_sends_nobody_from_qlora_there():
    problem = estimable(train=QLORA, parallel={"offload": "full-cpu"})["OFFLOAD_STAGE"]
    assert "zero_stage to 3" not in problem.fix
    for name in problem.fix.partition("one of ")[2].split(", "):
        assert estimable(train=QLORA, parallel={"offload": name}) == {}, name
