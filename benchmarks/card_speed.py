"""Measures, on one card in under three minutes, the rates that the time of a training step is made of.

Matrix products, attention, element-wise kernels, losses, optimizers, copies to the host, the host's own time for an
operation and for DeepSpeed's hooks, and, with several ranks, NCCL. One JSON object is printed (and written with `--out`);
a part that fails is recorded as text, and the next ones run.

    python benchmarks/card_speed.py --out card_speed.json
    torchrun --nproc-per-node 2 benchmarks/card_speed.py --only nccl --out nccl.json
    python benchmarks/card_speed.py --device cpu --quick
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from toolkit.cost.bench.measure import BUDGET, PARTS, measure
from toolkit.cost.bench.timing import Bench


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to try the parts on a CPU")
    parser.add_argument("--only", nargs="+", choices=tuple(PARTS), help="these parts alone")
    parser.add_argument("--budget", type=float, default=BUDGET, help="seconds for all parts")
    parser.add_argument("--out", type=Path, help="also write the JSON object here, after each part")
    options = parser.parse_args()
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = (
        torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        if options.device == "cuda"
        else torch.device("cpu")
    )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    names = options.only or (["nccl"] if world > 1 else list(PARTS))

    def keep(result: dict[str, Any]) -> None:
        if options.out is not None and rank == 0:
            options.out.write_text(json.dumps(result), encoding="utf-8")

    result = measure(Bench(device, quick=options.quick), names, budget=options.budget, keep=keep)
    keep(result)
    if rank == 0:
        print(json.dumps(result))
    if dist.is_initialized():
        with contextlib.suppress(Exception):
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
