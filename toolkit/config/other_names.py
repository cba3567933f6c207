"""Names of a job's keys in other tools: a name with the same meaning is read as ours, others are refused with a hint.

Sources: transformers TrainingArguments; trl SFTConfig and ModelConfig; DeepSpeed's configuration and launcher; accelerate's
configuration; vLLM EngineArgs; Megatron-LM training/arguments.py; LLaMA-Factory's cutoff_len; peft.
"""

from __future__ import annotations

from pydantic import AliasChoices

# Names that are read in a key's section, by the key's own name, which is unique among all sections.
OTHER_NAMES: dict[str, tuple[str, ...]] = {
    "model": ("model_name_or_path",),
    "nodes": ("num_nodes",),
    "r": ("lora_r",),
    "sequence_length": ("max_length", "max_seq_length", "cutoff_len"),
    "per_device_train_batch_size": ("micro_batch_size", "train_micro_batch_size_per_gpu"),
    "optimizer": ("optim",),
    "attention": ("attn_implementation",),
    "learning_rate": ("lr",),
    "max_grad_norm": ("gradient_clipping",),
    "num_train_epochs": ("num_epochs", "epochs"),
    "tensor": ("tensor_parallel_size", "tensor_model_parallel_size", "tp", "tp_size"),
    "pipeline": ("pipeline_parallel_size", "pipeline_model_parallel_size", "pp", "pp_size"),
}

_DATA_PARALLEL = "cluster.gpus_per_node × cluster.nodes divided by tensor × pipeline, and not a key"
_LOADED = (
    "train.precision, the number format of the computation: bf16, fp16 or fp32; no key sets the dtype in which "
    "weights are loaded"
)

# Names whose meaning or values differ, and what to write in their place.
REFUSED_NAMES: dict[str, str] = {
    "bf16": "train.precision: bf16, a name instead of true",
    "fp16": "train.precision: fp16, a name instead of true",
    "mixed_precision": "train.precision, where 16 bit computes without autocast and `no` is fp32",
    "torch_dtype": _LOADED,
    "dtype": _LOADED,
    "batch_size": "train.per_device_train_batch_size, per rank and forward pass, or train.train_batch_size, per "
    "optimizer step over all ranks",
    "chat_template_path": "data.chat_template, which takes chatml or a file with a Jinja template, not a tokenizer",
    "assistant_only_loss": "data.loss_on: assistant, a name instead of true",
    "completion_only_loss": "data.loss_on: completion, a name instead of true",
    "dp": _DATA_PARALLEL,
    "dp_size": _DATA_PARALLEL,
    "data_parallel_size": _DATA_PARALLEL,
    "stage": "parallel.zero_stage for ZeRO's stage; parallel.pipeline is the number of pipeline stages",
    "zero": "parallel.zero_stage, a number from 0 to 3",
    "scheduler": "train.lr_scheduler_type, a name instead of a section",
    "dataset": "data.train, which takes files, folders and hub ids, not names from a registry of data sets",
    "num_gpus": "cluster.gpus_per_node, which counts the cards of one node",
    "use_peft": "train.method: lora, a name instead of true",
    "load_in_4bit": "train.method: qlora",
    "gradient_checkpointing_enable": "train.gradient_checkpointing",
}


def names_of_field(name: str) -> str | AliasChoices:
    """Return the names under which a field is read, its own first, as a pydantic alias."""
    others = OTHER_NAMES.get(name, ())
    return AliasChoices(name, *others) if others else name
