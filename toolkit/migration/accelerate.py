"""Accelerate's configuration: how many processes there are, and how they share the model.

Source: accelerate 1.15 commands/config/config_args.py, commands/launch.py, utils/dataclasses.py.
"""

from __future__ import annotations

from toolkit.migration.deepspeed import PROFILES
from toolkit.migration.reading import Reading, as_list
from toolkit.migration.table import SHARE_ROWS, SHARED_ROWS, Subject, Table, carried, not_carried, not_needed
from toolkit.migration.values import positive

_PRECISIONS = {"no": "fp32", "false": "fp32", "fp16": "fp16", "bf16": "bf16", "fp8": "fp8"}
_KINDS = {"DEEPSPEED": "zero", "FSDP": "fsdp2", "MULTI_GPU": "ddp", "MULTI_CPU": "ddp", "NO": "ddp"}


def machines(r: Reading) -> None:
    """Read the processes, of which Accelerate counts those of all machines."""
    nodes, processes = r.number("num_machines"), r.number("num_processes")
    if nodes is not None and nodes > 0:
        r.carry("cluster.nodes", int(nodes), "num_machines")
    of_node, rest = divmod(int(processes), int(nodes or 1)) if processes and processes > 0 else (0, 0)
    if of_node and not rest:
        r.carry("cluster.gpus_per_node", of_node, "num_processes")
    r.refuse(
        "the machines do not have as many processes each",
        "num_processes",
        fix="Set cluster.gpus_per_node and cluster.nodes",
    )
    cards = as_list(r.value("gpu_ids"))
    if cards and cards != ["all"] and not of_node:
        r.carry("cluster.gpus_per_node", len(cards), "gpu_ids")
    r.unneeded("the cards are the first of each machine, or those of CUDA_VISIBLE_DEVICES", "gpu_ids")
    if r.is_on("use_cpu") or r.is_on("cpu") or r.value("distributed_type") == "MULTI_CPU":
        r.carry("cluster.gpu", "cpu", "use_cpu", "cpu")
    r.unneeded("the job runs on cards", "use_cpu", "cpu")


def strategy(r: Reading) -> None:
    """Read how the ranks share the model."""
    written = r.value("distributed_type")
    kind = (
        "NO" if written is False else str(written or "").upper().rpartition(".")[2]
    )  # NO without quotes is false in YAML
    switches = {"use_deepspeed": "DEEPSPEED", "use_fsdp": "FSDP", "multi_gpu": "MULTI_GPU"}
    kind = kind or next((name for key, name in switches.items() if r.is_on(key)), "")
    if kind in _KINDS:
        r.carry("parallel.strategy", _KINDS[kind], "distributed_type", *switches)
    elif kind:
        fix = "parallel.strategy may be zero, ddp or fsdp2; parallel.tensor and parallel.pipeline are those of Megatron-LM"
        r.refuse(f"a job has no strategy {kind}", "distributed_type", fix=fix)
    r.unneeded("it is off", *switches)
    _deepspeed(r, on=kind == "DEEPSPEED")
    _fsdp(r, on=kind == "FSDP")


def _deepspeed(r: Reading, *, on: bool) -> None:
    section = "deepspeed_config"
    mine = [key for key in r.leaves if key.startswith(f"{section}.")]
    if not on:
        r.unneeded("the ranks do not train with DeepSpeed", *mine)
        return
    file = f"{section}.deepspeed_config_file"
    if r.given(file):
        r.follow(file)
        r.unneeded("the DeepSpeed file says it", *(f"{section}.{key}" for key in _IN_FILE))
    else:
        stage = r.number(f"{section}.zero_stage")
        r.carry("parallel.zero_stage", 2 if stage is None else int(stage), f"{section}.zero_stage")
        _offload(r, section)
        _numbers(r, section)
    r.unneeded(
        "weights are streamed into their shards", f"{section}.zero3_init_flag", f"{section}.zero3_save_16bit_model"
    )
    r.unneeded("the toolkit starts the processes", *(f"{section}.{key}" for key in _LAUNCHES))


def _offload(r: Reading, section: str) -> None:
    optimizer, param = (
        str(r.value(f"{section}.offload_{part}_device") or "none").lower() for part in ("optimizer", "param")
    )
    devices = (optimizer, param)
    keys = tuple(f"{section}.offload_{part}_device" for part in ("optimizer", "param"))
    paths = tuple(f"{section}.offload_{part}_nvme_path" for part in ("optimizer", "param"))
    if devices in PROFILES:
        r.carry("parallel.offload", PROFILES[devices], *keys)
    else:
        fix = "parallel.offload may be " + ", ".join(PROFILES.values())
        r.refuse(
            f"a job has no profile with the optimizer on {devices[0]} and parameters on {devices[1]}", *keys, fix=fix
        )
    for device, path in zip(devices, paths, strict=True):
        if device == "nvme" and str(r.value(path)) not in ("None", "none"):
            r.carry("cluster.nvme_path", str(r.value(path)), path)
    r.unneeded("nothing is offloaded to NVMe", *paths)


def _numbers(r: Reading, section: str) -> None:
    for key, target in (
        ("gradient_accumulation_steps", "gradient_accumulation_steps"),
        ("gradient_clipping", "max_grad_norm"),
    ):
        value = r.number(f"{section}.{key}")
        if value is not None:
            r.carry(f"train.{target}", value, f"{section}.{key}")
        r.unneeded("the script decides it", f"{section}.{key}")


_IN_FILE = (
    *(
        "zero_stage",
        "offload_optimizer_device",
        "offload_param_device",
        "offload_optimizer_nvme_path",
        "offload_param_nvme_path",
    ),
    *("gradient_accumulation_steps", "gradient_clipping", "zero3_save_16bit_model"),
)
_LAUNCHES = (
    "deepspeed_multinode_launcher",
    "deepspeed_hostfile",
    "deepspeed_exclusion_filter",
    "deepspeed_inclusion_filter",
    "deepspeed_moe_layer_cls_names",
)


def _fsdp(r: Reading, *, on: bool) -> None:
    mine = [key for key in r.leaves if key.startswith("fsdp_config.")]
    if not on:
        r.unneeded("the ranks do not train with FSDP", *mine)
        return
    shards = str(r.value("fsdp_config.fsdp_sharding_strategy") or "FULL_SHARD").upper()
    shards = {"1": "FULL_SHARD", "2": "SHARD_GRAD_OP", "3": "NO_SHARD", "4": "HYBRID_SHARD"}.get(shards, shards)
    again = r.value("fsdp_config.fsdp_reshard_after_forward")
    keys = ("fsdp_config.fsdp_sharding_strategy", "fsdp_config.fsdp_reshard_after_forward")
    if str(again).upper() in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"):
        shards, again = str(again).upper(), None
    if shards == "NO_SHARD":
        r.refuse("nothing is sharded, which is DDP", *keys, fix="Set parallel.strategy: ddp")
    elif "GRAD_OP" in shards or str(again).lower() == "false" or shards.endswith("ZERO2"):
        r.carry("parallel.fsdp2.reshard_after_forward", False, *keys)
    else:
        r.carry("parallel.fsdp2.reshard_after_forward", True, *keys)
    if shards.startswith("HYBRID"):
        r.carry(
            "parallel.fsdp2.dp_replicate_size",
            r.draft.get("cluster.nodes") or 1,
            keys[0],
            note="a replica of the model for each node",
        )
    if r.is_on("fsdp_config.fsdp_offload_params"):
        r.carry("parallel.fsdp2.cpu_offload", True, "fsdp_config.fsdp_offload_params")
    r.unneeded("state stays on the cards", "fsdp_config.fsdp_offload_params")
    if r.is_on("fsdp_config.fsdp_activation_checkpointing"):
        r.carry("train.gradient_checkpointing", True, "fsdp_config.fsdp_activation_checkpointing")
    r.unneeded("the trainer's arguments say it", "fsdp_config.fsdp_activation_checkpointing")
    r.unneeded("FSDP2 shards each decoder layer, streams weights in, and checkpoints are shards", *mine)


def precision(r: Reading) -> None:
    """Read the number format, which a trainer's own arguments replace."""
    value = str(r.value("mixed_precision")).lower()
    if r.together.trainer:
        r.unneeded("the trainer's bf16 and fp16 say it", "mixed_precision")
    elif value in _PRECISIONS:
        r.carry("train.precision", _PRECISIONS[value], "mixed_precision")
    steps = r.number("gradient_accumulation_steps")
    if steps is not None and not r.together.trainer:
        r.carry("train.gradient_accumulation_steps", int(steps), "gradient_accumulation_steps")
    r.unneeded("the trainer's arguments say it", "gradient_accumulation_steps")


def axes(r: Reading) -> None:
    """Read the sizes of parallel axes, and torch.compile."""
    section = "parallelism_config"
    tensor, replicas = (
        r.number(f"{section}.parallelism_config_tp_size"),
        r.number(f"{section}.parallelism_config_dp_replicate_size"),
    )
    if tensor and tensor > 1:
        r.carry("parallel.tensor", int(tensor), f"{section}.parallelism_config_tp_size")
    if replicas and replicas > 1 and r.draft.get("parallel.strategy") == "fsdp2":
        r.carry("parallel.fsdp2.dp_replicate_size", int(replicas), f"{section}.parallelism_config_dp_replicate_size")
    for key in ("cp_size", "sp_size"):
        path = f"{section}.parallelism_config_{key}"
        if r.number(path) in (None, 1):
            r.unneeded("ranks read rows of their own", path)
        else:
            r.refuse(SHARED_ROWS, path, fix=SHARE_ROWS)
    r.unneeded("the number of ranks decides it", *(key for key in r.leaves if key.startswith(f"{section}.")))
    backend = next((r.value(key) for key in ("dynamo_config.dynamo_backend", "dynamo_backend") if r.given(key)), None)
    if backend is not None and str(backend).upper() == "INDUCTOR":
        r.carry("train.torch_compile", True, "dynamo_config.dynamo_backend", "dynamo_backend")
    elif backend is not None and str(backend).upper() != "NO":
        r.refuse(
            "torch.compile runs with its defaults",
            "dynamo_config.dynamo_backend",
            "dynamo_backend",
            fix="Set train.torch_compile: true",
        )
    r.unneeded(
        "torch.compile runs with its defaults",
        "dynamo_backend",
        *(key for key in r.leaves if key.startswith("dynamo_config.")),
    )


_STARTED = (
    "compute_environment machine_rank main_process_ip rdzv_backend same_network debug main_training_function enable_cpu_affinity downcast_bf16 "
    "config_file quiet module no_python num_cpu_threads_per_process max_restarts monitor_interval role rdzv_conf tee log_dir m q "
    "main_training_function_ no_tpu_cluster use_parallelism_config"
)
_MEGATRON = " ".join(
    f"megatron_lm_{key}"
    for key in (
        *(
            "tp_degree",
            "pp_degree",
            "num_micro_batches",
            "sequence_parallelism",
            "recompute_activations",
            "use_distributed_optimizer",
        ),
        *(
            "gradient_clipping",
            "use_custom_fsdp",
            "no_load_optim",
            "no_save_optim",
            "eod_mask_loss",
            "overlap_cpu_optimizer_d2h_h2d",
        ),
        *(
            "optimizer_cpu_offload",
            "use_precision_aware_optimizer",
            "decoder_last_pipeline_num_layers",
            "recompute_granularity",
        ),
        *(
            "recompute_method",
            "recompute_num_layers",
            "attention_backend",
            "expert_model_parallel_size",
            "context_parallel_size",
        ),
        *(
            "attention_dropout",
            "hidden_dropout",
            "attention_softmax_in_fp32",
            "expert_tensor_parallel_size",
            "calculate_per_token_loss",
        ),
        "use_rotary_position_embeddings",
    )
)
ACCELERATE = Table(
    tool="Accelerate",
    rows=(
        carried("main_process_port", "cluster.master_port", convert=positive),
        *not_needed("the toolkit, or any launcher, starts the processes", _STARTED),
        *not_carried("a job does not run on TPUs or SageMaker", "tpu_env tpu_name tpu_zone tpu_use_cluster tpu_use_sudo tpu_vm command_file commands tpu ec2_instance_type iam_role_name profile region image_uri sagemaker_inputs_file sagemaker_metrics_file additional_args py_version pytorch_version transformers_version vm env aws_access_key_id aws_secret_access_key"),
        *not_carried("Megatron-LM's axes are keys of their own", "megatron_lm_config use_megatron_lm", fix="Set parallel.tensor, parallel.pipeline and parallel.sequence_parallel"),
        *not_carried("Megatron-LM's axes are keys of their own", _MEGATRON, fix="Set parallel.tensor, parallel.pipeline and parallel.sequence_parallel"),
        *not_carried("float8 is torchao's here", "fp8_config fp8_backend fp8_use_autocast_during_eval fp8_margin fp8_interval fp8_format fp8_amax_history_len fp8_amax_compute_algo fp8_override_linear_precision fp8_opt_level fp8_enable_fsdp_float8_all_gather fp8_pad_inner_dim", fix="Set train.precision: fp8 and train.fp8.recipe"),
        *not_carried("processes are not started by mpirun", "mpirun_config mpirun_hostfile mpirun_ccl"),
        *not_carried("cards are those of NVIDIA or AMD", "use_xpu ipex_config"),
    ),
    subjects=(
        Subject(
            keys=("num_machines", "num_processes", "gpu_ids", "use_cpu", "cpu"),
            to=("cluster.nodes", "cluster.gpus_per_node", "cluster.gpu"),
            says="`num_processes` counts those of all machines. `--gpu` of the command says which cards they are.",
            run=machines,
        ),
        Subject(
            keys=(
                *("distributed_type", "use_deepspeed", "use_fsdp", "multi_gpu"),
                *(f"deepspeed_config.{key}" for key in ("deepspeed_config_file", "zero3_init_flag", *dict.fromkeys((*_IN_FILE, *_LAUNCHES)))),
                *(f"fsdp_config.fsdp_{key}" for key in (
                    *("version", "sharding_strategy", "reshard_after_forward", "offload_params", "activation_checkpointing", "auto_wrap_policy"),
                    *("transformer_layer_cls_to_wrap", "min_num_params", "state_dict_type", "cpu_ram_efficient_loading", "use_orig_params"),
                    *("sync_module_states", "backward_prefetch", "backward_prefetch_policy", "forward_prefetch", "activation_checkpointing_offload"),
                )),
            ),
            to=("parallel.strategy", "parallel.zero_stage", "parallel.offload", "parallel.fsdp2"),
            says="DEEPSPEED is `zero`, FSDP of either version `fsdp2`, MULTI_GPU and NO `ddp`. A DeepSpeed file that is named is read too.",
            run=strategy,
        ),
        Subject(
            keys=("mixed_precision", "gradient_accumulation_steps"),
            to=("train.precision", "train.gradient_accumulation_steps"),
            says="For scripts of one's own; Trainer's arguments replace it.",
            run=precision,
        ),
        Subject(
            keys=(
                *(f"parallelism_config.parallelism_config_{key}" for key in ("tp_size", "dp_replicate_size", "dp_shard_size", "cp_size", "sp_size", "cp_backend", "cp_comm_strategy", "sp_backend", "sp_seq_length", "sp_seq_length_is_variable", "sp_attn_implementation")),
                *(f"dynamo_config.dynamo_{key}" for key in ("backend", "mode", "use_dynamic", "use_fullgraph", "use_regional_compilation")),
                "dynamo_backend",
            ),
            to=("parallel.tensor", "parallel.fsdp2.dp_replicate_size", "train.torch_compile"),
            says="Tensor ranks, replicas of FSDP2, and torch.compile.",
            run=axes,
        ),
    ),
    source="Accelerate 1.15",
)  # fmt: skip
