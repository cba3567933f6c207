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
import gc
import itertools
import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils._python_dispatch import TorchDispatchMode

MIB = 2**20


class OutOfTimeError(Exception):
    """A part has used its seconds; what it has measured is kept."""


class Bench:
    """Times functions on a device, and stops a part that takes too long.

    Args:
        device: Device of the tensors.
        quick: Whether sizes are tiny and repetitions few, to try the logic on a CPU.
    """

    def __init__(self, device: torch.device, *, quick: bool) -> None:
        self.device, self.quick = device, quick
        self.cuda = device.type == "cuda"
        self.seconds_each = 0.004 if quick else 0.12
        self.deadline = float("inf")

    def sync(self) -> None:
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def check_time(self) -> None:
        if time.perf_counter() > self.deadline:
            raise OutOfTimeError

    def time(self, function: Callable[[], Any], *, warm: int = 2, share: float = 1.0) -> float:
        """Return the seconds of one call among many in a row, the device's work included."""
        self.check_time()
        for _ in range(warm):
            function()
        self.sync()
        start = time.perf_counter()
        function()
        self.sync()
        once = max(time.perf_counter() - start, 1e-6)
        count = max(3, min(400, int(self.seconds_each * share / once)))
        start = time.perf_counter()
        for _ in range(count):
            function()
        self.sync()
        return (time.perf_counter() - start) / count

    def device_time(self, function: Callable[[], Any], *, share: float = 1.0) -> float:
        """Return the seconds of one call on the device alone: small kernels are replayed as a CUDA graph."""
        if not self.cuda:
            return self.time(function, share=share)
        self.check_time()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                function()
        torch.cuda.current_stream().wait_stream(side)
        graph, repeats = torch.cuda.CUDAGraph(), 20
        with torch.cuda.graph(graph):
            for _ in range(repeats):
                function()
        return self.time(graph.replay, warm=1, share=share) / repeats

    def random(self, *shape: int, dtype: torch.dtype = torch.bfloat16, grad: bool = False) -> torch.Tensor:
        """Return a normal tensor: a card's power, and so its clock, depends on the values."""
        made = torch.empty(shape, device=self.device, dtype=dtype).normal_()
        return made.requires_grad_(grad)

    def sizes(self, full: Sequence[Any], tiny: Sequence[Any]) -> Sequence[Any]:
        return tiny if self.quick else full


PARTS: dict[str, tuple[float, Callable[[Bench, dict[str, Any]], None]]] = {}


def part(seconds: float) -> Callable[[Callable[[Bench, dict[str, Any]], None]], None]:
    """Register a part of the measurement with the seconds that it may take."""

    def register(function: Callable[[Bench, dict[str, Any]], None]) -> None:
        PARTS[function.__name__] = (seconds, function)

    return register


@contextlib.contextmanager
def noted(into: dict[str, Any], key: str) -> Iterator[None]:
    """Record a failure under a key and go on; the end of the part's time goes through."""
    try:
        yield
    except OutOfTimeError:
        raise
    except Exception as error:
        into[key] = f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"
        if torch.cuda.is_available():
            with contextlib.suppress(Exception):
                torch.cuda.empty_cache()


# ------------------------------------------------------------------------------------------------------- products
def _heat(bench: Bench) -> None:
    """Run the card hot: the clock under sustained load is what training sees."""
    size = 256 if bench.quick else 8192
    left, right = bench.random(size, size), bench.random(size, size)
    until = time.perf_counter() + (0.01 if bench.quick else 2.0)
    while time.perf_counter() < until:
        for _ in range(10):
            torch.mm(left, right)
        bench.sync()


@part(26)
def products(bench: Bench, out: dict[str, Any]) -> None:
    """bf16 products of linear layers by tokens, outputs and inputs: forward, gradient of inputs, of weights."""
    _heat(bench)
    weights = bench.sizes(
        [(4096, 4096), (14336, 4096), (4096, 14336), (1024, 4096), (3072, 3072), (8192, 3072), (3072, 8192),
         (2048, 2048), (8192, 2048), (2048, 8192), (896, 896), (4864, 896), (128256, 2048), (128256, 4096), (16, 4096), (4096, 16),
         (64, 2048), (5120, 5120)],
        [(64, 32), (16, 64)],
    )  # fmt: skip
    rows = out["rows"] = []
    for tokens in bench.sizes([4096, 16384, 1024, 8192, 2048, 512], [64]):
        for outputs, inputs in weights:
            if tokens in (512, 2048, 8192) and (outputs, inputs) not in weights[:7]:
                continue
            with noted(out, f"{tokens}x{outputs}x{inputs}"):
                x, w, g = bench.random(tokens, inputs), bench.random(outputs, inputs), bench.random(tokens, outputs)
                for way, function in (
                    ("forward", lambda x=x, w=w: x @ w.t()),
                    ("inputs", lambda g=g, w=w: g @ w),
                    ("weights", lambda g=g, x=x: g.t() @ x),
                ):
                    seconds = bench.time(function, share=0.5)
                    flops = 2 * tokens * outputs * inputs
                    rows.append(
                        {
                            "tokens": tokens,
                            "outputs": outputs,
                            "inputs": inputs,
                            "way": way,
                            "seconds": seconds,
                            "tflops": flops / seconds / 1e12,
                        }
                    )
    sustained = out["sustained"] = {}
    for m, n, k in bench.sizes([(16384, 8192, 8192), (8192, 8192, 8192)], [(64, 64, 64)]):
        with noted(sustained, f"{m}x{n}x{k}"):
            a, b = bench.random(m, k), bench.random(n, k)
            sustained[f"{m}x{n}x{k}"] = 2 * m * n * k / bench.time(lambda a=a, b=b: a @ b.t(), share=8) / 1e12


@part(8)
def grouped_products(bench: Bench, out: dict[str, Any]) -> None:
    """Products of stacked experts (torch._grouped_mm), tokens spread evenly, and as a loop over experts."""
    rows = out["rows"] = []
    for experts, tokens, outputs, inputs in bench.sizes(
        [(8, 8192, 14336, 4096), (64, 32768, 2048, 2048), (128, 32768, 1536, 2048), (128, 32768, 2048, 768)],
        [(2, 32, 16, 16)],
    ):
        with noted(out, f"{experts}x{tokens}x{outputs}x{inputs}"):
            x, w = bench.random(tokens, inputs), bench.random(experts, inputs, outputs)
            ends = torch.arange(1, experts + 1, device=bench.device, dtype=torch.int32) * (tokens // experts)
            g, flops = bench.random(tokens, outputs), 2 * tokens * outputs * inputs
            grouped = getattr(F, "grouped_mm", None) or torch._grouped_mm
            for way, function in (
                ("forward", lambda x=x, w=w, e=ends, grouped=grouped: grouped(x, w, offs=e)),
                ("inputs", lambda g=g, w=w, e=ends, grouped=grouped: grouped(g, w.transpose(-2, -1), offs=e)),
                ("weights", lambda g=g, x=x, e=ends, grouped=grouped: grouped(x.t(), g, offs=e)),
            ):
                with noted(out, f"{experts}x{tokens}x{outputs}x{inputs} {way}"):
                    seconds = bench.time(function, share=0.5)
                    rows.append(
                        {"experts": experts, "tokens": tokens, "outputs": outputs, "inputs": inputs, "way": way,
                         "seconds": seconds, "tflops": flops / seconds / 1e12}
                    )  # fmt: skip


@part(10)
def fp8_products(bench: Bench, out: dict[str, Any]) -> None:
    """float8 products with one scale a tensor and one a row, and the casts of their inputs, eager."""
    rows = out["rows"] = []
    for tokens, outputs, inputs in bench.sizes(
        [(4096, 4096, 4096), (16384, 14336, 4096), (16384, 4096, 14336), (4096, 8192, 3072), (16384, 3072, 8192), (16384, 3072, 3072), (4096, 1024, 4096)],
        [(64, 64, 64)],
    ):  # fmt: skip
        x, w = bench.random(tokens, inputs), bench.random(outputs, inputs)
        with noted(out, f"{tokens}x{outputs}x{inputs}"):
            x8, w8 = x.to(torch.float8_e4m3fn), w.to(torch.float8_e4m3fn)
            for recipe, scales in (
                ("tensor", (torch.ones((), device=bench.device), torch.ones((), device=bench.device))),
                ("row", (torch.ones(tokens, 1, device=bench.device), torch.ones(1, outputs, device=bench.device))),
            ):
                for fast in (True, False):
                    with noted(out, f"{tokens}x{outputs}x{inputs} {recipe}"):
                        seconds = bench.time(
                            lambda x8=x8, w8=w8, s=scales, fast=fast: torch._scaled_mm(
                                x8, w8.t(), scale_a=s[0], scale_b=s[1], out_dtype=torch.bfloat16, use_fast_accum=fast
                            ),
                            share=0.5,
                        )
                        rows.append(
                            {"tokens": tokens, "outputs": outputs, "inputs": inputs, "recipe": recipe, "fast": fast,
                             "tflops": 2 * tokens * outputs * inputs / seconds / 1e12}
                        )  # fmt: skip
        with noted(out, f"cast {tokens}x{inputs}"):

            def cast(x: torch.Tensor = x) -> torch.Tensor:
                scale = 448.0 / x.abs().amax().float().clamp(min=1e-12)
                return (x * scale).to(torch.float8_e4m3fn)

            rows.append({"cast_elements": x.numel(), "seconds": bench.time(cast, share=0.4)})


# ------------------------------------------------------------------------------------------------------ attention
@part(25)
def attention(bench: Bench, out: dict[str, Any]) -> None:
    """Causal attention by kernel, head width and length: forward, and forward with backward."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    kernels = {
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "flash": SDPBackend.FLASH_ATTENTION,
        "efficient": SDPBackend.EFFICIENT_ATTENTION,
    }
    if bench.quick:
        kernels["math"] = SDPBackend.MATH
    rows = out["rows"] = []
    cases = itertools.product(
        bench.sizes([4096, 1024, 16384, 2048], [32]), bench.sizes([128, 64, 256, 96], [16]), kernels
    )
    for length, width, name in cases:
        if (length == 2048 or width == 96) and (name != "cudnn" or width == 256):
            continue
        batch, heads = (1, 2) if bench.quick else (max(1, 8192 // length), max(8, 4096 // width))
        if name == "efficient" and length == 16384:
            heads //= 2
        with noted(out, f"{name} {width} {length}"), sdpa_kernel([kernels[name]]):
            q, k, v = (
                bench.random(batch, length, heads, width).transpose(1, 2).detach().requires_grad_() for _ in range(3)
            )
            with torch.no_grad():
                seconds = bench.time(
                    lambda q=q, k=k, v=v: F.scaled_dot_product_attention(q, k, v, is_causal=True), share=0.6
                )
            result = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            gradient = torch.randn_like(result)
            back = bench.time(
                lambda r=result, g=gradient, q=q, k=k, v=v: torch.autograd.grad(r, (q, k, v), g, retain_graph=True),
                share=0.8,
            )
            flops = 2 * batch * heads * length * length * width  # causal: half of 4 · B · H · S² · D
            rows.append(
                {"kernel": name, "width": width, "length": length, "batch": batch, "heads": heads, "forward_tflops": flops / seconds / 1e12,
                 "backward_tflops": 2.5 * flops / back / 1e12, "forward_seconds": seconds, "backward_seconds": back}
            )  # fmt: skip


# ---------------------------------------------------------------------------------------------------- bytes moved
@part(14)
def elementwise(bench: Bench, out: dict[str, Any]) -> None:
    """Eager kernels that move bytes: bytes a second (what is read and written) by size of the first input."""
    rows = out["rows"] = []
    for size in bench.sizes([512 * MIB, 64 * MIB, 16 * MIB, 4 * MIB, MIB, 65536], [65536]):
        n = size // 2
        width = min(4096, n)
        x, y = bench.random(n // width, width), bench.random(n // width, width)
        single, scale = x.float(), bench.random(width)
        index = torch.randint(0, n // width, (n // width,), device=bench.device)
        cases: dict[str, tuple[int, Callable[[], Any]]] = {
            "copy": (2 * size, lambda x=x, y=y: y.copy_(x)),
            "add": (3 * size, lambda x=x, y=y: x + y),
            "add_": (3 * size, lambda x=x, y=y: y.add_(x, alpha=0.0)),
            "mul": (3 * size, lambda x=x, y=y: x * y),
            "mul_row": (2 * size, lambda x=x, s=scale: x * s),
            "silu": (2 * size, lambda x=x: F.silu(x)),
            "neg": (2 * size, lambda x=x: -x),
            "to_float": (3 * size, lambda x=x: x.float()),
            "from_float": (3 * size, lambda s=single: s.to(torch.bfloat16)),
            "pow": (4 * size, lambda s=single: s.pow(2)),
            "mean": (2 * size, lambda s=single: s.mean(-1, keepdim=True)),
            "sum": (size, lambda x=x: x.sum()),
            "sum_rows": (size, lambda x=x: x.sum(0)),
            "norm": (size, lambda x=x: torch.linalg.vector_norm(x)),
            "norm_float": (2 * size, lambda s=single: torch.linalg.vector_norm(s)),
            "cat": (2 * size, lambda x=x, w=width: torch.cat((-x[:, w // 2 :], x[:, : w // 2]), dim=-1)),
            "transposed": (
                2 * size,
                lambda x=x, n=n, w=width: x.view(-1, w // 128 or 1, min(w, 128)).transpose(0, 1).contiguous(),
            ),
            "gather_rows": (2 * size, lambda x=x, i=index: F.embedding(i, x)),
            "zero": (size, lambda x=x: torch.zeros_like(x)),
            "softmax": (2 * size, lambda x=x: torch.softmax(x, -1)),
        }
        for name, (moved, function) in cases.items():
            with noted(out, f"{name} {size}"):
                seconds = (bench.device_time if size <= 4 * MIB else bench.time)(function, share=0.25)
                rows.append(
                    {
                        "kernel": name,
                        "size": size,
                        "bytes": moved,
                        "seconds": seconds,
                        "bytes_per_second": moved / seconds,
                    }
                )


class _Norm(nn.Module):
    """Llama's RMSNorm, as transformers writes it."""

    def __init__(self, width: int, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, device=device, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


class _Gated(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up


def _passes(bench: Bench, function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> dict[str, float]:
    """Return seconds of a forward and of its backward pass."""
    with torch.no_grad():
        forward = bench.time(lambda: function(x), share=0.4)
    result = function(x)
    gradient = torch.randn_like(result)
    wanted = [x, *(function.parameters() if isinstance(function, nn.Module) else ())]
    backward = bench.time(lambda: torch.autograd.grad(result, wanted, gradient, retain_graph=True), share=0.4)
    return {"forward": forward, "backward": backward}


@part(34)
def fused(bench: Bench, out: dict[str, Any]) -> None:
    """RMSNorm and a gated activation, eager, compiled and by Liger's kernels; element counts beside the seconds."""
    for tokens, width in bench.sizes([(16384, 4096), (4096, 4096), (1024, 2048)], [(64, 64)]):
        for name, module, columns in (("rms_norm", _Norm(width, bench.device), width), ("swiglu", _Gated(), 2 * width)):
            x = bench.random(tokens, columns, grad=True)
            into = out.setdefault(f"{name} {tokens}x{width}", {"elements": tokens * width})
            with noted(into, "eager"):
                into["eager"] = _passes(bench, module, x)
            if tokens == 4096 or bench.quick:
                with noted(into, "compiled"):
                    torch._dynamo.reset()
                    start = time.perf_counter()
                    into["compiled"] = _passes(bench, torch.compile(module, dynamic=False), x)
                    into["compile_seconds"] = time.perf_counter() - start
            with noted(into, "liger"):
                from liger_kernel.ops.rms_norm import LigerRMSNormFunction
                from liger_kernel.ops.swiglu import LigerSiLUMulFunction

                if name == "rms_norm":
                    weight = module.weight
                    into["liger"] = _passes(bench, lambda x, w=weight: LigerRMSNormFunction.apply(x, w, 1e-6), x)
                else:
                    into["liger"] = _passes(bench, lambda x, w=width: LigerSiLUMulFunction.apply(x[:, :w], x[:, w:]), x)


@part(16)
def losses(bench: Bench, out: dict[str, Any]) -> None:
    """Cross entropy of logits, as transformers computes it (in fp32), and Liger's fused head and loss."""
    for tokens, vocabulary, width in bench.sizes(
        [(4096, 128256, 4096), (8192, 151936, 2048), (4096, 32000, 2048)], [(16, 128, 32)]
    ):
        into = out[f"{tokens}x{vocabulary}x{width}"] = {}
        labels = torch.randint(0, vocabulary, (tokens,), device=bench.device)
        with noted(into, "eager"):
            logits = bench.random(tokens, vocabulary, grad=True)

            def passes(logits: torch.Tensor = logits, labels: torch.Tensor = labels) -> None:
                loss = F.cross_entropy(logits.float(), labels)
                torch.autograd.grad(loss, logits)

            into["eager"] = bench.time(passes, share=0.6)
            del logits
        with noted(into, "linear"):
            hidden, weight = bench.random(tokens, width, grad=True), bench.random(vocabulary, width, grad=True)

            def head(h: torch.Tensor = hidden, w: torch.Tensor = weight, labels: torch.Tensor = labels) -> None:
                torch.autograd.grad(F.cross_entropy(F.linear(h, w).float(), labels), (h, w))

            into["linear"] = bench.time(head, share=0.6)
        with noted(into, "liger"):
            from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as Fused

            def together(h: torch.Tensor = hidden, w: torch.Tensor = weight, labels: torch.Tensor = labels) -> None:
                loss = Fused.apply(h, w, labels)
                torch.autograd.grad(loss[0] if isinstance(loss, tuple) else loss, (h, w))

            into["liger"] = bench.time(together, share=0.6)
        bench.sync()


# ------------------------------------------------------------------------------------------------------ optimizers
@part(16)
def optimizers(bench: Bench, out: dict[str, Any]) -> None:
    """AdamW on flat fp32 parameters: seconds, with 28 bytes an element (16 read, 12 written)."""
    count = 4096 if bench.quick else 2**29
    for name in ("deepspeed", "torch_fused", "torch_foreach"):
        with noted(out, name):
            parameter = nn.Parameter(torch.zeros(count, device=bench.device))
            parameter.grad = torch.full_like(parameter, 1e-3)
            if name == "deepspeed":
                if not bench.cuda:
                    raise RuntimeError("no card")
                from deepspeed.ops.adam import FusedAdam

                optimizer: Any = FusedAdam([parameter], lr=1e-5)
            else:
                how = {"fused": True} if name == "torch_fused" else {"foreach": True}
                optimizer = torch.optim.AdamW([parameter], lr=1e-5, **how)
            seconds = bench.time(optimizer.step, share=1.5)
            out[name] = {"elements": count, "seconds": seconds, "bytes_per_second": 28 * count / seconds}
        optimizer = parameter = None
        gc.collect()
    with noted(out, "many"):  # a list of parameters, as stage 0 has it
        parameters = [nn.Parameter(torch.zeros(count // 256, device=bench.device)) for _ in range(256)]
        for each in parameters:
            each.grad = torch.full_like(each, 1e-3)
        many = torch.optim.AdamW(parameters, lr=1e-5, fused=True)
        seconds = bench.time(many.step)
        out["many"] = {"elements": count, "tensors": 256, "seconds": seconds, "bytes_per_second": 28 * count / seconds}


@part(24)
def host_adam(bench: Bench, out: dict[str, Any]) -> None:
    """AdamW on the host: DeepSpeed's kernel and torch's; the host's memory as a copy sees it."""
    out["threads"], out["cpus"] = torch.get_num_threads(), os.cpu_count()
    count = 4096 if bench.quick else 2**27
    with noted(out, "copy"):
        source, target = torch.zeros(count), torch.ones(count)
        out["copy"] = {"bytes_per_second": 8 * count / bench.time(lambda: target.copy_(source), share=3)}
    with noted(out, "cast"):
        half = torch.ones(count, dtype=torch.bfloat16)
        out["cast"] = {"bytes_per_second": 6 * count / bench.time(lambda: target.copy_(half), share=3)}
    for name in ("deepspeed", "torch_fused"):
        with noted(out, name):
            parameter = nn.Parameter(torch.zeros(count))
            parameter.grad = torch.full_like(parameter, 1e-3)
            if name == "deepspeed":
                if not bench.cuda:
                    raise RuntimeError("not compiled without a card")
                from deepspeed.ops.adam import DeepSpeedCPUAdam

                optimizer: Any = DeepSpeedCPUAdam([parameter], lr=1e-5)
            else:
                optimizer = torch.optim.AdamW([parameter], lr=1e-5, fused=True)
            seconds = bench.time(optimizer.step, warm=1, share=4)
            out[name] = {"elements": count, "seconds": seconds, "bytes_per_second": 28 * count / seconds}


@part(8)
def pcie(bench: Bench, out: dict[str, Any]) -> None:
    """Bytes a second between the card and the host: pinned each way, both at once (each way), pageable."""
    if not bench.cuda:
        out["skipped"] = "no card"
        return
    size = 512 * MIB
    host_in, host_out = (torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2))
    card_in, card_out = (torch.empty(size, dtype=torch.uint8, device=bench.device) for _ in range(2))
    one, two = torch.cuda.Stream(), torch.cuda.Stream()

    def both() -> None:
        with torch.cuda.stream(one):
            card_in.copy_(host_in, non_blocking=True)
        with torch.cuda.stream(two):
            host_out.copy_(card_out, non_blocking=True)

    out["to_card"] = size / bench.time(lambda: card_in.copy_(host_in, non_blocking=True), share=2)
    out["to_host"] = size / bench.time(lambda: host_out.copy_(card_out, non_blocking=True), share=2)
    out["both_each"] = size / bench.time(both, share=2)
    pageable = torch.empty(size // 4, dtype=torch.uint8)
    out["pageable_to_host"] = size / 4 / bench.time(lambda: pageable.copy_(card_out[: size // 4]), share=2)
    pageable.fill_(1)
    out["pageable_to_card"] = size / 4 / bench.time(lambda: card_in[: size // 4].copy_(pageable), share=2)


# ------------------------------------------------------------------------------------------------------ the host
class _Counter(TorchDispatchMode):
    """Counts operations: those that start a kernel, and views."""

    def __init__(self) -> None:
        super().__init__()
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


def _phases(bench: Bench, steps: Sequence[tuple[str, Callable[[], Any]]], *, repeats: int) -> dict[str, float]:
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


@part(14)
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

                def both(f: Callable[[], Any] = forward, b: Callable[[], Any] = backward) -> None:
                    f()
                    b()

                seconds["pass"] = bench.time(both)
                out[key] = {"seconds": seconds, "counts": counts, "parameters": sum(1 for _ in model.parameters())}


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


@part(48)
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
    for name, stage, options in (
        ("zero2", 2, {}),
        ("zero3", 3, {}),
        ("zero1", 1, {}),
        ("zero3 leaf", 3, {"leaf": True}),
        ("zero0", 0, {}),
        ("zero3 checkpointed", 3, {"checkpointing": True}),
        ("zero2 overlap", 2, {"overlap_comm": True}),
        ("zero3 overlap", 3, {"overlap_comm": True}),
        ("zero2 accumulated", 2, {"accumulation": 4}),
        ("zero1 accumulated", 1, {"accumulation": 4}),
        ("zero3 accumulated", 3, {"accumulation": 4}),
        ("zero2 checkpointed", 2, {"checkpointing": True}),
    ):
        cases += [(name, stage, layers, options) for layers in (shallow, deep)]
    for name, stage, layers, options in cases:
        key = f"{name} {layers}"
        with noted(out, key):
            options = dict(options)
            model = _tiny_model(bench, layers, checkpointing=options.pop("checkpointing", False))
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
            steps = [
                ("forward", lambda e=engine, h=held: h.update(loss=e(input_ids=ids, labels=ids).loss)),
                ("backward", lambda e=engine, h=held: e.backward(h.pop("loss"))),
                ("step", lambda e=engine: e.step()),
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
            engine = model = None
            gc.collect()


# --------------------------------------------------------------------------------------------------------- NCCL
@part(40)
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
        cases: dict[str, Callable[[], Any]] = {
            "all_reduce": lambda w=whole: dist.all_reduce(w),
            "all_gather": lambda w=whole, s=shard: dist.all_gather_into_tensor(w, s),
            "reduce_scatter": lambda w=whole, s=shard: dist.reduce_scatter_tensor(s, w),
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
            side, whole = torch.cuda.Stream(), bench.random(200 * MIB)
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


def describe(bench: Bench) -> dict[str, Any]:
    """Return what was measured on: card, driver's clocks as far as they can be asked, host, versions."""
    about: dict[str, Any] = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": platform.processor(),
    }
    with noted(about, "cpu"), Path("/proc/cpuinfo").open(encoding="utf-8") as lines:
        about["cpu"] = next(
            (line.split(":")[1].strip() for line in lines if line.startswith("model name")), about["cpu"]
        )
    about["cpus"] = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    for package in ("deepspeed", "transformers", "liger_kernel", "triton"):
        with noted(about, package):
            from importlib.metadata import version

            about[package] = version(package.replace("_", "-"))
    if bench.cuda:
        properties = torch.cuda.get_device_properties(bench.device)
        about |= {
            "card": properties.name,
            "memory_bytes": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
            "capability": ".".join(map(str, torch.cuda.get_device_capability(bench.device))),
            "cuda": torch.version.cuda,
        }
    return about


ORDER = (
    "products", "attention", "elementwise", "host", "zero", "optimizers", "losses", "fp8_products", "pcie", "host_adam",
    "grouped_products", "fused", "nccl",
)  # fmt: skip


def measure(
    bench: Bench, names: Sequence[str], *, budget: float, keep: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Run the parts one after the other; `keep` is given the result after each."""
    start = time.perf_counter()
    result: dict[str, Any] = {"about": describe(bench), "parts": {}}
    for name in names:
        seconds, function = PARTS[name]
        into: dict[str, Any] = {}
        began = time.perf_counter()
        bench.deadline = min(began + seconds, start + budget)
        try:
            function(bench, into)
        except OutOfTimeError:
            into["out_of_time"] = True
        except Exception as error:
            into["error"] = f"{type(error).__name__}: {error}"[:400]
            into["traceback"] = traceback.format_exc()[-1500:]
        into["took_seconds"] = round(time.perf_counter() - began, 2)
        print(
            f"{name}: {into['took_seconds']} s{' (out of time)' if 'out_of_time' in into else ''}",
            file=sys.stderr,
            flush=True,
        )
        result["parts"][name] = into
        keep(result)
        gc.collect()
        if bench.cuda:
            with contextlib.suppress(Exception):
                torch.cuda.empty_cache()
    result["took_seconds"] = round(time.perf_counter() - start, 1)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to try the parts on a CPU")
    parser.add_argument("--only", nargs="+", choices=ORDER, help="these parts alone")
    parser.add_argument("--budget", type=float, default=175.0, help="seconds for all parts")
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
    names = options.only or (["nccl"] if world > 1 else list(ORDER))

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
