"""The YAML file of `accelerate launch`, with every key where Accelerate reads it.

Sources: accelerate commands/config/config_args.py (ClusterConfig), utils/dataclasses.py
(DeepSpeedPlugin._deepspeed_config_checks), utils/launch.py (prepare_deepspeed_cmd_env).
"""

from __future__ import annotations

from typing import Any

from toolkit.errors import PlanError, raise_all
from toolkit.planning.rules.integrations import consumer_problems
from toolkit.planning.unchecked_plan import UncheckedPlan

# FSDP2 for Accelerate (utils/dataclasses.py FullyShardedDataParallelPlugin) and, under `fsdp_config`, for Trainer.
FSDP2: dict[str, Any] = {
    "version": 2,
    "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "cpu_ram_efficient_loading": True,
    "offload_params": False,
    "reshard_after_forward": True,
    "state_dict_type": "SHARDED_STATE_DICT",
}


def accelerate_config(
    draft: UncheckedPlan, *, deepspeed_config_file: str, main_process_ip: str | None = None
) -> dict[str, Any]:
    """Return the YAML as a mapping; under DeepSpeed, precision, accumulation and clipping are in its file alone.

    Args:
        deepspeed_config_file: Path of the JSON for Accelerate scripts, as `accelerate launch` will open it; unused under DDP
            and FSDP2.
        main_process_ip: Name or address of the node of rank 0. Without it, several nodes start only with
            `accelerate launch --main_process_ip`; each node always needs its own `--machine_rank`.

    Raises:
        PlanError: An Accelerate script cannot run the plan.
    """
    raise_all(PlanError, consumer_problems(draft, "accelerate"))
    cluster = draft.job.cluster
    config: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        **_strategy(draft, deepspeed_config_file),
        "machine_rank": 0,
        "num_machines": cluster.nodes,
        "num_processes": cluster.num_ranks,
        # Ranks follow --machine_rank only under static, the one backend that `accelerate launch` takes from a file:
        # c10d assigns them by arrival (torch distributed/run.py config_from_args).
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": draft.on_cpu,
    }
    if cluster.nodes > 1:
        if "deepspeed_config" in config:
            # The default multi-node launcher is pdsh, which without a hostfile trains on one node (launcher/runner.py).
            config["deepspeed_config"]["deepspeed_multinode_launcher"] = "standard"
        if main_process_ip is not None:
            config["main_process_ip"] = main_process_ip
    if cluster.master_port is not None:
        config["main_process_port"] = cluster.master_port
    return config


def fsdp2_keys(draft: UncheckedPlan, *, prefix: str = "") -> dict[str, Any]:
    """Return FSDP2's keys for Accelerate or, without a prefix, for Trainer."""
    options = draft.job.parallel.fsdp2_options
    own = {"reshard_after_forward": options.reshard_after_forward, "offload_params": options.cpu_offload}
    return {f"{prefix}{key}": value for key, value in (FSDP2 | own).items()}


def _strategy(draft: UncheckedPlan, deepspeed_config_file: str) -> dict[str, Any]:
    """Return the keys of the strategy; of DDP and FSDP2 with their precision, which under DeepSpeed its own file has."""
    strategy = draft.job.parallel.strategy
    if strategy == "zero":
        return {
            "deepspeed_config": {
                "deepspeed_config_file": deepspeed_config_file,
                "zero3_init_flag": draft.settings.zero_stage == 3,
            },
            "distributed_type": "DEEPSPEED",
        }
    precision = {"mixed_precision": "no" if draft.settings.dtype == "fp32" else draft.settings.dtype}
    if strategy == "fsdp2":
        return {
            "distributed_type": "FSDP",
            "fsdp_config": fsdp2_keys(draft, prefix="fsdp_"),
        } | precision
    several = draft.job.cluster.num_ranks > 1
    return {"distributed_type": f"MULTI_{'CPU' if draft.on_cpu else 'GPU'}" if several else "NO"} | precision
