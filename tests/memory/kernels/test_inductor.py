"""The private names of torch's compiler are there, and it writes code for a card that is not."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from toolkit.memory.kernels import inductor
from toolkit.memory.kernels.device import Device
from toolkit.memory.kernels.inductor import OutOfTime, compile_graph, lower_graph, missing_names, properties, time_limit


def test_this_torch_has_every_name_that_is_replaced_or_used():
    assert missing_names() == []


def test_a_name_that_torch_no_longer_has_is_told(monkeypatch):
    monkeypatch.setattr(inductor, "USED", (("torch._inductor.graph:GraphLowering", "gone"),))
    assert missing_names() == ["torch._inductor.graph:GraphLowering.gone"]


def test_a_card_has_what_inductor_reads():
    card = properties(Device(capability=8.6, num_multiprocessors=84))
    assert (card.major, card.minor, card.multi_processor_count, card.max_threads_per_multi_processor) == (
        8,
        6,
        84,
        1536,
    )
    assert properties(Device(capability=9.0)).max_threads_per_multi_processor == 2048


def lowered(device=None, **limit):
    """Returns the code for silu(x)·y, with the names that were replaced as they are afterwards."""
    made = []

    def lower(graph, inputs, **options):
        made.append(lower_graph(graph, inputs, device=device or Device(capability=9.0), **options))
        return lambda arguments: [torch.empty(8, 16)]

    class Gate(torch.nn.Module):
        def forward(self, x, y):
            return (torch.nn.functional.silu(x) * y,)

    with FakeTensorMode():
        inputs = [torch.empty(8, 16), torch.empty(8, 16)]
        with time_limit(limit.get("seconds", 60)):
            graph = torch.fx.symbolic_trace(Gate())
            with torch.no_grad():
                compile_graph(graph, inputs, lower=lower)
    return made


def test_the_code_is_a_card_s_and_torch_is_as_before():
    places = [(inductor._find(place), name) for place, name in (*inductor.REPLACED, *inductor.TIMED)]
    before = [vars(where).get(name) for where, name in places]
    [code] = lowered()
    assert "empty_strided_cuda((8, 16), (16, 1), torch.float32)" in code
    assert "async_compile.triton('triton_" in code
    assert [vars(where).get(name) for where, name in places] == before
    assert torch.cuda.is_available() == (torch.cuda.device_count() > 0)


def test_a_lowering_has_a_limit_of_time():
    with pytest.raises(OutOfTime):
        lowered(seconds=0.0)
