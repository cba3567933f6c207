"""Rates of matrix products and of attention on a card."""

from __future__ import annotations

import itertools
import time
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

from toolkit.cost.bench.timing import Bench, noted


def _heat(bench: Bench) -> None:
    """Run the card hot: the clock under sustained load is what training sees."""
    size = 256 if bench.quick else 8192
    left, right = bench.random(size, size), bench.random(size, size)
    until = time.perf_counter() + (0.01 if bench.quick else 2.0)
    while time.perf_counter() < until:
        for _ in range(10):
            torch.mm(left, right)
        bench.sync()


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


def grouped_products(bench: Bench, out: dict[str, Any]) -> None:
    """Products of stacked experts (torch._grouped_mm), tokens spread evenly, and as a loop over experts."""
    rows = out["rows"] = []
    for experts, tokens, outputs, inputs in bench.sizes(
        [
            (8, 8192, 14336, 4096),
            (64, 32768, 2048, 2048),
            (128, 32768, 1536, 2048),
            (128, 32768, 2048, 768),
            (8, 16384, 7168, 1024),
            (8, 16384, 1024, 3584),
            (64, 32768, 768, 1024),
            (64, 32768, 1024, 384),
            (16, 8192, 2048, 1024),
        ],
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


def masked_attention(bench: Bench, out: dict[str, Any]) -> None:
    """Attention with a mask of its own and with dropout, by the kernel that torch chooses: all scores are counted."""
    rows = out["rows"] = []
    cases = itertools.product(bench.sizes([4096, 2048], [32]), bench.sizes([256, 128, 96, 64], [16]), (0.0, 0.125))
    for length, width, dropout in cases:
        batch, heads = (1, 2) if bench.quick else (max(1, 8192 // length), max(8, 4096 // width))
        with noted(out, f"{width} {length} {dropout}"):
            q, k, v = (
                bench.random(batch, length, heads, width).transpose(1, 2).detach().requires_grad_() for _ in range(3)
            )
            mask = torch.ones(length, length, dtype=torch.bool, device=bench.device).tril().triu(-length // 8)
            options: dict[str, Any] = {"is_causal": True, "dropout_p": dropout} if dropout else {"attn_mask": mask}
            with torch.no_grad():
                seconds = bench.time(
                    lambda q=q, k=k, v=v, o=options: F.scaled_dot_product_attention(q, k, v, **o), share=0.4
                )
            result = F.scaled_dot_product_attention(q, k, v, **options)
            gradient = torch.randn_like(result)
            back = bench.time(
                lambda r=result, g=gradient, q=q, k=k, v=v: torch.autograd.grad(r, (q, k, v), g, retain_graph=True),
                share=0.5,
            )
            flops = (2 if dropout else 4) * batch * heads * length * length * width
            rows.append(
                {"width": width, "length": length, "batch": batch, "heads": heads, "dropout": dropout,
                 "forward_tflops": flops / seconds / 1e12, "backward_tflops": 2.5 * flops / back / 1e12}
            )  # fmt: skip
