"""Rates of torch's own kernels by how they walk through memory, as models call them: strided, broadcast, by index, in fp32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

from toolkit.cost.bench.timing import Bench, noted


def patterns(bench: Bench, out: dict[str, Any]) -> None:
    """Seconds of kernels by access, with the elements that they touch."""
    rows = out["rows"] = []
    for tokens, width in bench.sizes([(8192, 4096), (4096, 1024)], [(16, 32)]):
        x, y = bench.random(tokens, width), bench.random(tokens, width)
        pair, single = bench.random(tokens, 2 * width), bench.random(tokens, width, dtype=torch.float32)
        heads = bench.random(1, tokens, width // 16, 16).transpose(1, 2)
        cosine = bench.random(1, 1, tokens, 16)
        scale, row = bench.random(width), bench.random(tokens, 1, dtype=torch.float32)
        order = torch.randperm(tokens, device=bench.device)
        eight = torch.arange(tokens, device=bench.device).repeat_interleave(8)[
            torch.randperm(8 * tokens, device=bench.device)
        ]
        many = bench.random(8 * tokens, width)
        zeros = torch.zeros_like(x)
        ids = torch.randint(0, 32000, (tokens,), device=bench.device)
        weight = bench.random(32000, width)
        left, right = pair.chunk(2, dim=-1)
        cases: dict[str, tuple[int, Callable[..., Any]]] = {
            "mul halves": (x.numel(), lambda a=left, b=right: a * b),
            "silu half": (x.numel(), lambda a=left: F.silu(a)),
            "cat halves": (pair.numel(), lambda a=x, b=y: torch.cat((a, b), dim=-1)),
            "mul heads": (x.numel(), lambda h=heads, c=cosine: h * c),
            "rotate heads": (x.numel(), lambda h=heads: torch.cat((-h[..., 8:], h[..., :8]), dim=-1)),
            "copy heads": (x.numel(), lambda h=heads: h.contiguous()),
            "copy transposed": (x.numel(), lambda a=x: a.t().contiguous()),
            "mul by row": (x.numel(), lambda a=x, s=scale: a * s),
            "mul by column, fp32": (x.numel(), lambda a=single, s=row: a * s),
            "to fp32": (x.numel(), lambda a=x: a.float()),
            "to fp64": (x.numel(), lambda a=x: a.double()),
            "norm of fp64": (x.numel(), lambda a=x: torch.linalg.vector_norm(a.double())),
            "where": (x.numel(), lambda a=x, b=y: torch.where(a > 0, a, b)),
            "dropout": (x.numel(), lambda a=x: F.dropout(a, 0.1)),
            "take rows": (x.numel(), lambda a=x, i=order: a[i]),
            "take rows, 8 times": (many.numel(), lambda a=x, i=eight: a[i]),
            "sum rows": (x.numel(), lambda z=zeros, a=x, i=order: z.index_put((i,), a, accumulate=True)),
            "sum rows, 8 times": (many.numel(), lambda z=zeros, a=many, i=eight: z.index_put((i,), a, accumulate=True)),
            "add rows in place": (x.numel(), lambda z=zeros, a=x, i=order: z.index_add_(0, i, a)),
            "sum of 8": (many.numel(), lambda m=many, t=tokens: m.view(t, 8, -1).sum(1)),
            "embedding backward": (
                x.numel(),
                lambda a=x, i=ids: torch.ops.aten.embedding_dense_backward(a, i, 32000, -1, False),
            ),
            "sort": (eight.numel(), lambda i=eight: torch.sort(i)),
            "sum over rows": (x.numel(), lambda a=x: a.sum(0)),
            "layer norm": (x.numel(), lambda a=x, w=width: F.layer_norm(a, (w,))),
            "gelu tanh": (x.numel(), lambda a=x: F.gelu(a, approximate="tanh")),
            "embedding": (x.numel(), lambda i=ids, w=weight: F.embedding(i, w)),
        }
        for name, (elements, function) in cases.items():
            with noted(out, f"{name} {tokens}x{width}"):
                seconds = bench.time(function, share=0.2)
                rows.append(
                    {
                        "kernel": name,
                        "tokens": tokens,
                        "width": width,
                        "elements": elements,
                        "seconds": seconds,
                        "elements_per_second": elements / seconds,
                    }
                )


def products_of_fp32(bench: Bench, out: dict[str, Any]) -> None:
    """Products in fp32 without TF32, of linear layers and of attention's scores."""
    rows = out["rows"] = []
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        for batch, m, n, k in bench.sizes(
            [
                (1, 4096, 4096, 4096),
                (1, 8192, 2048, 8192),
                (64, 2048, 2048, 64),
                (64, 2048, 64, 2048),
                (64, 64, 2048, 2048),
            ],
            [(2, 16, 16, 8)],
        ):
            with noted(out, f"{batch}x{m}x{n}x{k}"):
                a, b = bench.random(batch, m, k, dtype=torch.float32), bench.random(batch, k, n, dtype=torch.float32)
                seconds = bench.time(lambda a=a, b=b: torch.bmm(a, b), share=0.5)
                rows.append(
                    {"dims": [batch, m, n, k], "seconds": seconds, "tflops": 2e-12 * batch * m * n * k / seconds}
                )
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed
