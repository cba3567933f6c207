"""Kernels of state-space layers and linear attention, as far as memory is concerned: saved tensors and temporaries.

Each stands in for a function that transformers takes from an installed package, has the arguments that transformers
passes, allocates what the kernel does and computes nothing. None has been compared with a measurement.
b: sequences, l: tokens, h: heads, p: width of a head, g: groups, n: state, c: chunks, s: tokens of a chunk.

Source:
    mamba-ssm 2.3.2 mamba_ssm/ops/triton/ssd_combined.py, ssd_chunk_state.py, ssd_chunk_scan.py, ssd_state_passing.py,
    ops/selective_scan_interface.py, csrc/selective_scan/selective_scan.cpp; causal-conv1d 1.7
    causal_conv1d/causal_conv1d_interface.py; flash-linear-attention 0.6 fla/ops/gated_delta_rule/chunk.py, ops/kda/chunk.py,
    ops/common/chunk_delta_h.py, chunk_o.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from toolkit.memory.kernels.operations import note, unnoted

# Streaming multiprocessors of an H100 or H200: programs of a reduction over heads are split among them.
NUM_MULTIPROCESSORS = 132
# Chunk of fla's kernels, of both the delta rule and KDA.
FLA_CHUNK = 64
# selective_scan.cpp keeps the state after every this many tokens.
SCAN_STRETCH = 2048

# Returns the result and the saved tensors; other allocations are freed when it returns.
Forward: TypeAlias = Callable[..., tuple[Tensor, Sequence[Tensor]]]
# Returns the temporaries that live with the gradients, from the saved tensors and the gradient of the result.
Backward: TypeAlias = Callable[[Sequence[Tensor], Tensor], Sequence[Tensor]]


class _Kernel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Forward, undo: Backward, *inputs: Any) -> Tensor:
        with unnoted():
            out, saved = run(*inputs)
        note("fused", "recurrence", reads=[each for each in inputs if isinstance(each, Tensor)], writes=[out, *saved])
        ctx.undo = undo
        ctx.like = [(value.shape, value.dtype) if isinstance(value, Tensor) else None for value in inputs]
        ctx.save_for_backward(*saved)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,) = grads
        saved = ctx.saved_tensors  # once: under checkpointing a second look is an error
        with unnoted():
            beside = ctx.undo(saved, grad)
        made = [
            grad.new_empty(like[0], dtype=like[1]) if like is not None and needed else None
            for like, needed in zip(ctx.like, ctx.needs_input_grad[2:], strict=True)
        ]
        note("fused", "recurrence", reads=[grad, *saved], writes=[*beside, *made])
        del beside
        return None, None, *made


def _call(run: Forward, undo: Backward, *inputs: Any) -> Tensor:
    return _Kernel.apply(run, undo, *inputs)  # type: ignore[no-any-return, no-untyped-call]


def causal_conv1d(hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, **_: Any) -> Tensor:
    """Stand in for `causal_conv1d_fn`: the input is saved, the activation recomputed. hidden_states: (b, channels, l)."""

    def run(given: Tensor, weights: Tensor, biases: Tensor | None) -> tuple[Tensor, Sequence[Tensor]]:
        return torch.empty_like(given), _tensors(given, weights, biases)

    return _call(run, lambda saved, grad: (), hidden_states, weight, bias)


def chunk_scan(
    hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int, **options: Any
) -> Tensor:
    """Stand in for `mamba_chunk_scan_combined`. hidden_states: (b, l, h, p), dt: (b, l, h), B and C: (b, l, g, n)."""

    def run(*given: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        x, _, _, own_B, *_ = given
        out, sums = _scan(x, own_B, chunk_size)
        return out, [out, sums, *_tensors(*given)]

    def undo(saved: Sequence[Tensor], grad: Tensor) -> Sequence[Tensor]:
        return _undo_scan(saved[2], saved[5], chunk_size)

    return _call(run, undo, hidden_states, dt, A, B, C, options.get("D"), options.get("dt_bias"))


def split_conv1d_scan(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    chunk_size: int,
    rmsnorm_weight: Tensor | None = None,
    outproj_weight: Tensor | None = None,
    outproj_bias: Tensor | None = None,
    headdim: int | None = None,
    ngroups: int = 1,
    **_: Any,
) -> Tensor:
    """Stand in for `mamba_split_conv1d_scan_combined`, convolution to projection. zxbcdt: (b, l, 2 h p + 2 g n + h)."""
    heads = D.shape[0]
    width = headdim if headdim is not None else D.shape[1]
    inner = heads * width

    def parts(given: Tensor, convolution: Tensor) -> tuple[Tensor, Tensor]:
        """Return views of the convolution's result, of shape (b, l, h p + 2 g n), with the shapes of x and B."""
        batch, length, _ = given.shape
        mixed = given.new_empty((batch, length, convolution.shape[0]))
        state = (convolution.shape[0] - inner) // (2 * ngroups)
        return mixed[..., :inner].view(batch, length, heads, width), mixed[..., inner : inner + ngroups * state].view(
            batch, length, ngroups, state
        )

    def run(given: Tensor, convolution: Tensor, *rest: Tensor | None) -> tuple[Tensor, Sequence[Tensor]]:
        x, own_B = parts(given, convolution)
        scanned, _ = _scan(x, own_B, chunk_size)
        rstd = None
        if rmsnorm_weight is not None:
            rstd = given.new_empty(given.shape[0] * given.shape[1] * ngroups, dtype=torch.float32)
        out = torch.empty_like(scanned.flatten(2))  # gated, in addition to its input
        if outproj_weight is not None:
            out = functional.linear(out, outproj_weight, outproj_bias)
        return out, [scanned, *_tensors(given, convolution, *rest, rstd)]

    def undo(saved: Sequence[Tensor], grad: Tensor) -> Sequence[Tensor]:
        given, convolution = saved[1], saved[2]
        x, own_B = parts(given, convolution)
        inner_like = [given.new_empty((*given.shape[:2], inner)) for _ in range(3)]  # dout twice, the output again
        gradients = given.new_empty((*given.shape[:2], convolution.shape[0]))
        return [x, gradients, *inner_like, *_undo_scan(x, own_B, chunk_size, with_gradients=False)]

    return _call(
        run, undo, zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, rmsnorm_weight, outproj_weight, outproj_bias
    )


def selective_scan(hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, **options: Any) -> Tensor:
    """Stand in for `selective_scan_fn` (Mamba-1). hidden_states, dt: (b, channels, l), A: (channels, n), B and C: (b, n, l)."""
    gate = options.get("z")

    def run(u: Tensor, delta: Tensor, own_A: Tensor, *rest: Tensor | None) -> tuple[Tensor, Sequence[Tensor]]:
        out = torch.empty_like(delta)
        states = _scan_states(u, own_A)
        gated = out if gate is None else torch.empty_like(gate)
        return gated, _tensors(u, delta, own_A, *rest, states, None if gate is None else out)

    def undo(saved: Sequence[Tensor], grad: Tensor) -> Sequence[Tensor]:
        return [value.new_empty(value.shape, dtype=torch.float32) for value in saved[3:5]]  # dB and dC, summed in fp32

    return _call(run, undo, hidden_states, dt, A, B, C, options.get("D"), gate, options.get("delta_bias"))


def mamba_inner(
    xz: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    x_proj_weight: Tensor,
    delta_proj_weight: Tensor,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    A: Tensor,
    *rest: Tensor | None,
    **_: Any,
) -> Tensor:
    """Stand in for `mamba_inner_fn`, Mamba-1 between its projections; convolution and delta are recomputed. xz: (b, 2 d, l)."""
    rank, state = delta_proj_weight.shape[1], A.shape[-1]

    def convolved(given: Tensor) -> Tensor:
        return given.new_empty((given.shape[0], given.shape[1] // 2, given.shape[2]))

    def run(given: Tensor, *weights: Tensor | None) -> tuple[Tensor, Sequence[Tensor]]:
        batch, _, length = given.shape
        hidden, delta = convolved(given), convolved(given)
        projected = given.new_empty((batch * length, x_proj_weight.shape[0]))
        own_B, own_C = (given.new_empty((batch, 1, state, length)) for _ in range(2))
        out, states = torch.empty_like(delta), _scan_states(hidden, A)
        gated = torch.empty_like(out)
        result = functional.linear(gated.transpose(1, 2), out_proj_weight, out_proj_bias)
        return result, _tensors(given, *weights, projected, own_B, own_C, states, out)

    def undo(saved: Sequence[Tensor], grad: Tensor) -> Sequence[Tensor]:
        given = saved[0]
        batch, _, length = given.shape
        # The convolution and delta once more, dout_y, their gradients and the gated output; dB and dC in fp32.
        whole = [convolved(given) for _ in range(6)]
        small = [given.new_empty((batch, 1, state, length), dtype=torch.float32) for _ in range(2)]
        return [*whole, *small, given.new_empty((batch * length, rank + 2 * state))]

    return _call(
        run, undo, xz, conv1d_weight, conv1d_bias, x_proj_weight, delta_proj_weight, out_proj_weight, out_proj_bias, A
    )


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Tensor, None]:
    """Stand in for `chunk_gated_delta_rule`, and `chunk_kda` (g per channel). query, key: (b, l, h, p), value: (b, l, h, v)."""

    def states(k: Tensor, v: Tensor) -> Tensor:
        """Return one state per chunk: (b, c, h, p, v)."""
        batch, length, heads, width = v.shape
        return k.new_empty((batch, math.ceil(length / FLA_CHUNK), heads, k.shape[-1], width))

    def like_keys(k: Tensor, v: Tensor) -> Tensor:
        return k.new_empty((*v.shape[:3], k.shape[-1]))

    def run(q: Tensor, k: Tensor, v: Tensor, gate: Tensor, write: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        norms: list[Tensor] = []
        if use_qk_l2norm_in_kernel:
            norms = [value.new_empty(value.shape[:-1], dtype=torch.float32) for value in (q, k)]
            q, k = torch.empty_like(q), torch.empty_like(k)
        sums = gate.new_empty(gate.shape, dtype=torch.float32)
        scores = [k.new_empty((*v.shape[:3], FLA_CHUNK)) for _ in range(2 if gate.ndim == 4 else 1)]
        w, u = like_keys(k, v), torch.empty_like(v)
        h, new = states(k, v), torch.empty_like(u)
        out = torch.empty_like(v)
        del w, u, h, new
        return out, [q, k, v, gate, write, sums, *scores, *norms]

    def undo(saved: Sequence[Tensor], grad: Tensor) -> Sequence[Tensor]:
        _, k, v, *_ = saved
        values = [torch.empty_like(v) for _ in range(4)]  # u, its new values, and dv twice
        keys = [like_keys(k, v) for _ in range(4)]  # w and dw, dk twice
        sums = [torch.empty_like(saved[5]) for _ in range(2)]
        return [*values, *keys, *sums, states(k, v), states(k, v)]

    return _call(run, undo, query, key, value, g, beta), None


# Stand-ins by the name of the function in its package.
STAND_INS: Mapping[str, Callable[..., Any]] = {
    "causal_conv1d_fn": causal_conv1d,
    "mamba_chunk_scan_combined": chunk_scan,
    "mamba_split_conv1d_scan_combined": split_conv1d_scan,
    "selective_scan_fn": selective_scan,
    "mamba_inner_fn": mamba_inner,
    "chunk_gated_delta_rule": gated_delta_rule,
    "chunk_kda": gated_delta_rule,
}


def _tensors(*values: Tensor | None) -> list[Tensor]:
    return [value for value in values if value is not None]


def _scan_states(u: Tensor, A: Tensor) -> Tensor:
    batch, channels, length = u.shape
    shape = (batch, channels, math.ceil(length / SCAN_STRETCH), 2 * A.shape[-1])
    return u.new_empty(shape, dtype=torch.float32)


def _shapes(x: Tensor, B: Tensor, chunk_size: int) -> dict[str, tuple[int, ...]]:
    batch, length, heads, width = x.shape
    groups, state = B.shape[2:]
    chunks = math.ceil(length / chunk_size)
    a_program = max(min(math.ceil(batch * chunks * heads / NUM_MULTIPROCESSORS), heads // groups), 1)
    splits = math.ceil(heads // groups / a_program)
    return {
        "tokens": (batch, heads, chunks, chunk_size),
        "states": (batch, chunks, heads, width, state),
        "scores": (batch, chunks, groups, chunk_size, chunk_size),
        "split scores": (batch, chunks, splits, groups, chunk_size, chunk_size),
        "split B": (batch, length, splits, groups, state),
    }


def _scan(x: Tensor, B: Tensor, chunk_size: int) -> tuple[Tensor, Tensor]:
    """Return the output and the sums of dA, as _mamba_chunk_scan_combined_fwd does."""
    shapes = _shapes(x, B, chunk_size)
    sums, steps = (x.new_empty(shapes["tokens"], dtype=torch.float32) for _ in range(2))
    states = x.new_empty(shapes["states"], dtype=torch.float32)
    passed = x.new_empty(shapes["states"])
    del states
    scores = x.new_empty(shapes["scores"], dtype=torch.float32)
    out = x.new_empty(x.shape)
    del steps, passed, scores
    return out, sums


def _undo_scan(x: Tensor, B: Tensor, chunk_size: int, *, with_gradients: bool = True) -> list[Tensor]:
    """Return the temporaries of _mamba_chunk_scan_combined_bwd at its peak, when the gradient of the scores is made."""
    shapes = _shapes(x, B, chunk_size)
    tokens = [x.new_empty(shapes["tokens"], dtype=torch.float32) for _ in range(4)]  # dA's sums, dt, ddt, ddA
    # The states and their gradients, then both once more.
    both = [x.new_empty(shapes["states"], dtype=torch.float32) for _ in range(2)]
    halves = [x.new_empty(shapes["states"]) for _ in range(2)]
    del both
    scores = [x.new_empty(shapes[name], dtype=torch.float32) for name in ("scores", "split scores")]
    partial = [x.new_empty(shapes["split B"], dtype=torch.float32) for _ in range(2)]
    given = [torch.empty_like(B) for _ in range(2)] if with_gradients else []
    return [*tokens, *halves, *scores, *partial, *given]
