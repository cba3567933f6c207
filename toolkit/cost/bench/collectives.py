"""Seconds of collectives by size, alone and beside a product."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from toolkit.cost.bench.timing import MIB, Bench, noted
from toolkit.distributed.collectives import gather_into, reduce_scatter_into


def nccl(bench: Bench, out: dict[str, Any]) -> None:
    """Seconds of collectives by bytes (of the whole tensor), alone and beside a product; one rank: only their launch."""
    if not dist.is_initialized():
        for name, value in (("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29571"), ("RANK", "0"), ("WORLD_SIZE", "1")):
            os.environ.setdefault(name, value)
        dist.init_process_group("nccl" if bench.cuda else "gloo")
    world, rank = dist.get_world_size(), dist.get_rank()
    out["world"] = world
    rows = out["rows"] = []
    for size in bench.sizes([65536, MIB, 8 * MIB, 64 * MIB, 400 * MIB, 1024 * MIB], [4096]):
        if world == 1 and size > 64 * MIB:
            break
        whole = bench.random(size // 2 // world * world)
        shard = whole.chunk(world)[rank].clone()
        cases: dict[str, Callable[..., Any]] = {
            "all_reduce": lambda w=whole: dist.all_reduce(w),
            "all_gather": lambda w=whole, s=shard: gather_into(w, s),
            "reduce_scatter": lambda w=whole, s=shard: reduce_scatter_into(s, w),
        }
        if world > 1:
            peer = rank ^ 1

            def exchange(w: torch.Tensor = whole, peer: int = peer) -> None:
                if peer < world:
                    dist.send(w, peer) if rank < peer else dist.recv(w, peer)

            cases["send"] = exchange
        for name, function in cases.items():
            with noted(out, f"{name} {size}"):
                dist.barrier()
                for _ in range(3):
                    function()
                repeats = 3 if bench.quick else 30 if size <= 64 * MIB else 10  # the same on every rank
                bench.sync()
                start = time.perf_counter()
                for _ in range(repeats):
                    function()
                bench.sync()
                rows.append({"collective": name, "bytes": size, "seconds": (time.perf_counter() - start) / repeats})
    if world > 1 and bench.cuda:
        with noted(out, "beside"):
            side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            whole = bench.random(200 * MIB)
            a, b = bench.random(8192, 8192), bench.random(8192, 8192)

            def products_only() -> None:
                for _ in range(6):
                    torch.mm(a, b)

            def reduce_only() -> None:
                with torch.cuda.stream(side):
                    dist.all_reduce(whole)

            def together() -> None:
                reduce_only()
                products_only()

            found = {}
            for name, function in (("products", products_only), ("all_reduce", reduce_only), ("together", together)):
                dist.barrier()
                for index in range(13):
                    if index == 3:
                        bench.sync()
                        start = time.perf_counter()
                    function()
                bench.sync()
                found[name] = (time.perf_counter() - start) / 10
            out["beside"] = found
