"""The YAML file of `accelerate launch`, with every key where Accelerate reads it.

Sources: accelerate commands/config/config_args.py (ClusterConfig), utils/dataclasses.py
(DeepSpeedPlugin._deepspeed_config_checks), utils/launch.py (prepare_deepspeed_cmd_env).
"""

from __future__ import annotations

from typing import Any

from toolkit.errors import PlanError, raise_all
from toolkit.planning.rules.integrations import consumer_problems
from toolkit.planning.unchecked_plan import UncheckedPlan


def accelerate_config(
    draft: UncheckedPlan, *, deepspeed_config_file: str, main_process_ip: str | None = None
) -> dict[str, Any]:
    """Return the YAML as a mapping; precision, accumulation and clipping are in the DeepSpeed file alone.

    Args:
        deepspeed_config_file: Path of the JSON for Accelerate scripts, as `accelerate launch` will open it.
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
        "deepspeed_config": {
            "deepspeed_config_file": deepspeed_config_file,
            "zero3_init_flag": draft.settings.zero_stage == 3,
        },
        "distributed_type": "DEEPSPEED",
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
        # The default multi-node launcher is pdsh, which without a hostfile trains on one node (launcher/runner.py).
        config["deepspeed_config"]["deepspeed_multinode_launcher"] = "standard"
        if main_process_ip is not None:
            config["main_process_ip"] = main_process_ip
    if cluster.master_port is not None:
        config["main_process_port"] = cluster.master_port
    return config
