"""The host's seconds for an operation, for a pass of a small model, and for the hooks of DeepSpeed's ZeRO."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from toolkit.cost.bench.timing import Bench, noted


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations: those that start a kernel, and views."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kernels = self.views = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        first = next((each for each in args if isinstance(each, torch.Tensor)), None)
        made = result if isinstance(result, torch.Tensor) else None
        same = (
            first is not None and made is not None and made.untyped_storage()._cdata == first.untyped_storage()._cdata
        )
        if (same and not function._schema.is_mutable) or "empty" in function._schema.name:
            self.views += 1
        else:
            self.kernels += 1
        return result


def _tiny_model(bench: Bench, layers: int, *, checkpointing: bool = False) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=layers, num_attention_heads=2, num_key_value_heads=1,
        head_dim=64, vocab_size=256, attn_implementation="sdpa", use_cache=False, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.to(bench.device).train()


def _phases(bench: Bench, steps: Sequence[tuple[str, Callable[..., Any]]], *, repeats: int) -> dict[str, float]:
    """Return the median seconds of each phase of a host-bound step, the device waited for after each."""
    found: dict[str, list[float]] = {name: [] for name, _ in steps}
    for index in range(repeats + 3):
        for name, function in steps:
            bench.sync()
            start = time.perf_counter()
            function()
            bench.sync()
            if index >= 3:
                found[name].append(time.perf_counter() - start)
        bench.check_time()
    return {name: sorted(values)[len(values) // 2] for name, values in found.items()}


def host(bench: Bench, out: dict[str, Any]) -> None:
    """Seconds of the host for an operation: alone, in a tiny model's forward, and in its backward pass."""
    x = bench.random(64)
    for name, function in (
        ("add", lambda: x + x),
        ("add_", lambda: x.add_(1.0)),
        ("view", lambda: x.view(8, 8)),
        ("empty", lambda: torch.empty_like(x)),
    ):
        with noted(out, name):
            calls = 50 if bench.quick else 1000
            out[name] = bench.time(lambda f=function, n=calls: [f() for _ in range(n)]) / calls
    with noted(out, "product"):
        square = bench.random(64, 64)
        out["product"] = bench.time(lambda: [torch.mm(square, square) for _ in range(200)]) / 200
    ids = torch.randint(0, 256, (1, 64), device=bench.device)
    repeats = 3 if bench.quick else 20
    for checkpointing in (False, True):
        for layers in bench.sizes([4, 12], [1, 2]):
            key = f"llama {layers}{' checkpointed' if checkpointing else ''}"
            with noted(out, key):
                model = _tiny_model(bench, layers, checkpointing=checkpointing)
                held: dict[str, Any] = {}
                forward = lambda m=model, h=held: h.update(loss=m(input_ids=ids, labels=ids).loss)  # noqa: E731
                backward = lambda h=held: h.pop("loss").backward()  # noqa: E731
                counts = {}
                for name, function in (("forward", forward), ("backward", backward)):
                    with _Counter() as counter:
                        function()
                    counts[name] = {"kernels": counter.kernels, "views": counter.views}
                seconds = _phases(bench, (("forward", forward), ("backward", backward)), repeats=repeats)

                def both(f: Callable[..., Any] = forward, b: Callable[..., Any] = backward) -> None:
                    f()
                    b()

                seconds["pass"] = bench.time(both)
                out[key] = {"seconds": seconds, "counts": counts, "parameters": sum(1 for _ in model.parameters())}


def _forward(engine: Any, ids: torch.Tensor, held: dict[str, Any]) -> None:
    held["loss"] = engine(input_ids=ids, labels=ids).loss


def _backward(engine: Any, held: dict[str, Any]) -> None:
    engine.backward(held.pop("loss"))


def _deepspeed_config(stage: int, **zero: Any) -> dict[str, Any]:
    return {
        "train_batch_size": 1,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "bf16"},
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": False,
            "contiguous_gradients": True,
            "reduce_scatter": True,
            "reduce_bucket_size": 200_000_000,
            "allgather_bucket_size": 200_000_000,
            **zero,
        },
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
        "steps_per_print": 10**9,
    }


def zero(bench: Bench, out: dict[str, Any]) -> None:
    """Seconds of a tiny model's step under DeepSpeed's ZeRO by stage and depth: what its hooks take of the host."""
    import deepspeed
    import deepspeed.ops

    if not bench.cuda:
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled first
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29571")
    for name in ("RANK", "LOCAL_RANK"):
        os.environ.setdefault(name, "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    deepspeed.init_distributed("nccl" if bench.cuda else "gloo", verbose=False)
    ids = torch.randint(0, 256, (1, 64), device=bench.device)
    shallow, deep = (1, 2) if bench.quick else (4, 12)
    cases: list[tuple[str, int, int, dict[str, Any]]] = []
    kinds: tuple[tuple[str, int, dict[str, Any]], ...] = (
        ("zero2", 2, {}),
        ("zero3", 3, {}),
        ("zero1", 1, {}),
        ("zero0", 0, {}),
        ("zero3 checkpointed", 3, {"checkpointing": True}),
        ("zero2 accumulated", 2, {"accumulation": 4}),
        ("zero2 checkpointed", 2, {"checkpointing": True}),
        ("zero3 leaf", 3, {"leaf": True}),
        ("zero3 accumulated", 3, {"accumulation": 4}),
    )
    for name, stage, options in kinds:
        cases += [(name, stage, layers, options) for layers in (shallow, deep)]
    for name, stage, layers, options in cases:
        key = f"{name} {layers}"
        with noted(out, key):
            options = dict(options)
            model = _tiny_model(bench, layers, checkpointing=bool(options.pop("checkpointing", False)))
            if options.pop("leaf", False):
                from transformers.models.llama.modeling_llama import LlamaDecoderLayer

                deepspeed.utils.set_z3_leaf_modules(model, [LlamaDecoderLayer])
            accumulation = options.pop("accumulation", 1)
            config = _deepspeed_config(stage, **options)
            config |= {"gradient_accumulation_steps": accumulation, "train_batch_size": accumulation}
            if not bench.cuda:
                config["optimizer"]["params"]["torch_adam"] = True
            parameters, modules = sum(1 for _ in model.parameters()), sum(1 for _ in model.modules())
            owners = sum(1 for each in model.modules() if any(True for _ in each.parameters(recurse=False)))
            engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=list(model.parameters()))
            held: dict[str, Any] = {}
            steps: list[tuple[str, Callable[..., Any]]] = [
                ("forward", partial(_forward, engine, ids, held)),
                ("backward", partial(_backward, engine, held)),
                ("step", engine.step),
            ]

            def whole(steps: Any = steps, accumulation: int = accumulation) -> None:
                for _ in range(accumulation):
                    for _, function in steps:
                        function()

            row = {
                "parameters": parameters,
                "modules": modules,
                "owners": owners,
                "elements": sum(p.numel() for p in model.parameters()),
            }
            if accumulation == 1:
                row["seconds"] = _phases(bench, steps, repeats=2 if bench.quick else 12)
            row["whole"] = bench.time(whole, warm=3)
            out[key] = row
            with contextlib.suppress(Exception):
                engine.destroy()
            del engine, model, steps, whole
            gc.collect()
