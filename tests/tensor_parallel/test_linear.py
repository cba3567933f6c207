"""Columns and rows on real ranks against the dense layer: output and every gradient, for drawn shapes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from drawn_together import TOGETHER
from hypothesis import given, seed
from hypothesis import strategies as st
from ranks import run_distributed
from torch import nn
from transformers.pytorch_utils import Conv1D

from toolkit.distributed.process_groups import split_group
from toolkit.tensor_parallel.layout import Layout, Part
from toolkit.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear, ShardedLinear, share_input

TOLERANCE = 1e-5


def dense_layer(kind: type, num_in: int, num_out: int, *, bias: bool) -> nn.Module:
    layer = Conv1D(num_out, num_in) if kind is Conv1D else nn.Linear(num_in, num_out, bias=bias)
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    return layer


def assert_close(ours: torch.Tensor | None, wanted: torch.Tensor | None, what: str) -> None:
    if wanted is None or ours is None:
        assert ours is None, what
        assert wanted is None, what
        return
    assert ours.shape == wanted.shape, what
    if wanted.numel():
        wanted, ours = wanted.detach(), ours.detach()
        assert float((ours - wanted).abs().max()) <= TOLERANCE * max(1.0, float(wanted.abs().max())), what


def assert_gradients(ours: ShardedLinear, dense: nn.Module, group: dist.ProcessGroup) -> None:
    for name, parameter in ours.named_parameters():
        wanted = dense.get_parameter(name)
        assert parameter.requires_grad == wanted.requires_grad
        shard = ours.shards.get(name)
        if parameter.grad is None:
            assert wanted.grad is None
            continue
        assert_close(
            parameter.grad if shard is None else shard.gather(parameter.grad, tp_group=group), wanted.grad, name
        )


@st.composite
def head_counts(draw: st.DrawFn, num_ranks: int) -> tuple[int, int]:
    """Query and key heads that so many ranks can share."""
    key_value = draw(st.sampled_from([1, 2, num_ranks, 2 * num_ranks]))
    return max(key_value, num_ranks) * draw(st.integers(1, 2)), key_value


def check_attention(group: dist.ProcessGroup, replica_groups: dict[int, Any]) -> None:
    """Fused or separate queries, keys and values, a mixing of them, and a row: as an attention is built."""
    num_ranks = group.size()

    @TOGETHER
    @seed(1)
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        queries, keys = data.draw(head_counts(num_ranks))
        size = data.draw(st.integers(1, 3))
        width = data.draw(st.integers(1, 5))
        kind = data.draw(st.sampled_from([nn.Linear, Conv1D]))
        bias = data.draw(st.booleans())
        way = data.draw(st.sampled_from(["separate", "fused", "interleaved"]))
        torch.manual_seed(data.draw(st.integers(0, 1000)))
        q, kv = Part(num_units=queries, unit_size=size), Part(num_units=keys, unit_size=size)
        one, several = Part(num_units=1, unit_size=size), Part(num_units=queries // keys, unit_size=size)
        parts = {
            "separate": [Layout(parts=(q,)), Layout(parts=(kv,)), Layout(parts=(kv,))],
            "fused": [Layout(parts=(q, kv, kv))],
            "interleaved": [Layout(parts=(several, one, one), num_blocks=keys)],
        }[way]
        dense = [dense_layer(kind, width, layout.length, bias=bias) for layout in parts]
        dense_row = dense_layer(kind, q.length, width, bias=bias)
        frozen = data.draw(st.booleans())
        dense[0].get_parameter("weight").requires_grad_(not frozen)
        replica_group = replica_groups.get(keys)
        ours = [
            ColumnParallelLinear(copy.deepcopy(layer), layout, tp_group=group, replica_group=replica_group)
            for layer, layout in zip(dense, parts, strict=True)
        ]
        share_input(ours)
        row = RowParallelLinear(copy.deepcopy(dense_row), Layout(parts=(q,)), tp_group=group)
        x = torch.randn(2, 3, width, requires_grad=data.draw(st.booleans()) or frozen)
        ours_x = x.detach().clone().requires_grad_(x.requires_grad)
        local = queries // num_ranks, max(1, keys // num_ranks)
        wanted = dense_row(mixed(torch.cat([layer(x) for layer in dense], -1), queries, keys, size, way))
        given_y = row(mixed(torch.cat([layer(ours_x) for layer in ours], -1), *local, size, way))
        assert_close(given_y, wanted, "output")
        weights = torch.randn_like(wanted)
        (wanted * weights).sum().backward()
        (given_y * weights).sum().backward()
        assert_close(ours_x.grad, x.grad, "input")
        for our_layer, layer in zip([*ours, row], [*dense, dense_row], strict=True):
            assert_gradients(our_layer, layer, group)

    check()


def mixed(qkv: torch.Tensor, queries: int, keys: int, size: int, way: str) -> torch.Tensor:
    """Something that is not linear of each query head with its key and value head, which all its queries share."""
    if way == "interleaved":
        blocks = qkv.view(2, 3, keys, queries // keys + 2, size)
        q, k, v = blocks[..., :-2, :], blocks[..., [-2], :], blocks[..., [-1], :]
    else:
        q, k, v = qkv.split([queries * size, keys * size, keys * size], -1)
        q = q.view(2, 3, keys, queries // keys, size)
        k, v = k.view(2, 3, keys, 1, size), v.view(2, 3, keys, 1, size)
    return ((q * k).tanh() + v * q).reshape(2, 3, queries * size)


def check_gated(group: dist.ProcessGroup) -> None:
    """Gate and up, apart or fused, and down: as a feed-forward layer is built."""
    num_ranks = group.size()

    @TOGETHER
    @seed(2)
    @given(
        width=st.integers(1, 5),
        inner=st.integers(1, 4).map(lambda times: times * num_ranks),
        fused=st.booleans(),
        bias=st.booleans(),
        tokens=st.sampled_from([(1,), (0,), (2, 3), (2, 1, 3)]),
        draw=st.integers(0, 1000),
    )
    def check(width: int, inner: int, fused: bool, bias: bool, tokens: tuple[int, ...], draw: int) -> None:
        torch.manual_seed(draw)
        half = Part(num_units=inner)
        parts = [Layout(parts=(half, half))] if fused else [Layout(parts=(half,))] * 2
        dense = [dense_layer(nn.Linear, width, layout.length, bias=bias) for layout in parts]
        down = dense_layer(nn.Linear, inner, width, bias=bias)
        ours = [ColumnParallelLinear(layer, layout, tp_group=group) for layer, layout in zip(dense, parts, strict=True)]
        share_input(ours)
        row = RowParallelLinear(down, Layout(parts=(half,)), tp_group=group)
        x = torch.randn(*tokens, width, requires_grad=True)
        ours_x = x.detach().clone().requires_grad_()
        gate, up = torch.cat([layer(x) for layer in dense], -1).chunk(2, -1)
        our_gate, our_up = torch.cat([layer(ours_x) for layer in ours], -1).chunk(2, -1)
        wanted, given_y = down(gate.sigmoid() * up), row(our_gate.sigmoid() * our_up)
        assert_close(given_y, wanted, "output")
        wanted.pow(2).sum().backward()
        given_y.pow(2).sum().backward()
        assert_close(ours_x.grad, x.grad, "input")
        for our_layer, layer in zip([*ours, row], [*dense, down], strict=True):
            assert_gradients(our_layer, layer, group)

    check()


def shared_input_facts(group: dist.ProcessGroup) -> dict[str, Any]:
    torch.manual_seed(0)
    dense = [nn.Linear(3, 4) for _ in range(3)]
    layout = Layout(parts=(Part(num_units=4),))
    columns = [ColumnParallelLinear(layer, layout, tp_group=group) for layer in dense]
    share_input(columns)
    shared = columns[0]._shared
    x, other = torch.randn(2, 3), torch.randn(2, 3)
    mine = [layout.ranges(group.rank(), group.size())[0]] * 3

    def right(index: int, given_x: torch.Tensor, output: torch.Tensor) -> bool:
        return torch.allclose(output, dense[index](given_x)[:, mine[index].start : mine[index].stop])

    facts = {}
    outputs = [column(x) for column in columns]
    facts["in order"] = all(right(index, x, output) for index, output in enumerate(outputs))
    facts["keeps nothing"] = shared._input is None and not shared._outputs
    first, foreign, again = columns[0](x), columns[1](other), columns[1](x)
    facts["another input between"] = right(0, x, first) and right(1, other, foreign) and right(1, x, again)
    twice = columns[1](x)
    facts["called twice"] = right(1, x, twice)
    columns[0](x)
    x.mul_(2)
    facts["changed in place"] = right(2, x, columns[2](x))
    with torch.inference_mode():
        facts["inference"] = all(right(index, other, column(other)) for index, column in enumerate(columns))
        made_there = other * 1
        facts["inference tensor"] = all(
            right(index, made_there, column(made_there)) for index, column in enumerate(columns)
        )
    leaf = torch.randn(2, 3, requires_grad=True)
    columns[1](leaf).sum().backward()
    columns[0](leaf), columns[2](leaf)
    wanted = torch.autograd.grad(dense[1](leaf).sum(), leaf)[0]
    facts["one output read"] = torch.allclose(leaf.grad, wanted) and columns[0].weight.grad is None
    facts["repr"] = repr(columns[0])
    return facts


def scenes(rank: int) -> dict[str, Any]:
    group = dist.group.WORLD
    size = group.size()
    check_attention(group, {keys: split_group(group, keys) for keys in (1, 2) if keys < size})
    check_gated(group)
    return shared_input_facts(group)


@pytest.mark.gloo
@pytest.mark.parametrize("num_ranks", [pytest.param(2, marks=pytest.mark.full), 4])
def test_layers_are_the_dense_ones_for_any_shape(num_ranks: int) -> None:
    for rank, facts in enumerate(run_distributed(scenes, num_ranks, timeout_seconds=100)):
        shown = facts.pop("repr")
        assert (
            shown
            == f"ColumnParallelLinear(in_features=3, out_features={4 // num_ranks}, bias=True, rank {rank} of {num_ranks})"
        )
        assert {name for name, held in facts.items() if not held} == set()
