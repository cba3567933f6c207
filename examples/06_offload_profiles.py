"""Prints every offload profile for a model and a card: what it moves, what it costs, and the DeepSpeed section it becomes.

    python examples/06_offload_profiles.py llama-3.1-8b rtx-4090-24gb --host-memory-gib 256
    python examples/06_offload_profiles.py llama-3.3-70b h100-sxm-80gb --gpus-per-node 8 --nvme-path /local

Imports no torch. A profile that the job cannot have says why, and what would let it.
"""

from __future__ import annotations

import argparse
import json

import toolkit as tk


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="hub id, folder, config.json or a name that `toolkit models` lists")
    parser.add_argument("gpu", help="a name that `toolkit gpus` lists")
    parser.add_argument("--gpus-per-node", type=int, default=1)
    parser.add_argument(
        "--host-memory-gib", type=float, help="RAM of a node; the catalogue's typical host when left out"
    )
    parser.add_argument("--nvme-path", help="local folder of each node for the NVMe profiles")
    options = parser.parse_args()

    cluster = tk.Cluster(
        gpu=options.gpu,
        gpus_per_node=options.gpus_per_node,
        host_memory_gib=options.host_memory_gib,
        nvme_path=options.nvme_path,
    )
    job = tk.Job(model=options.model, cluster=cluster)
    for name, profile in tk.OFFLOAD_PROFILES.items():
        print(f"\n{name}: {profile.explanation}")
        try:
            plan = tk.resolve(job.with_(parallel={"offload": name, "zero_stage": max(2, profile.min_zero_stage)}))
        except tk.ToolkitError as error:
            print(f"  not for this job: {error}")
            continue
        zero = plan.deepspeed_config()["zero_optimization"]
        section = {key: zero[key] for key in ("stage", "offload_optimizer", "offload_param") if key in zero}
        print(f"  zero_optimization: {json.dumps(section)}")
        if profile.activations:
            print("  DeepSpeed has no key for it: toolkit's own checkpointing moves them")


if __name__ == "__main__":
    main()
