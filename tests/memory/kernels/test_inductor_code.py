"""Inductor's wrapper code, run with kernels that do nothing."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from toolkit.memory.kernels import inductor_code
from toolkit.memory.kernels.inductor_code import load_code
from toolkit.memory.kernels.operations import OperationRecorder, recording

CODE = """
from ctypes import c_void_p
import torch
from torch import device, empty_strided
import triton
import triton.language as tl
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.select_algorithm import extern_kernels
from torch._C import _cuda_getCurrentRawStream as get_raw_stream
aten = torch.ops.aten
empty_strided_cuda = torch._C._dynamo.guards._empty_strided_cuda
reinterpret_tensor = torch._C._dynamo.guards._reinterpret_tensor
async_compile = AsyncCompile()

triton_poi_fused_mul_0 = async_compile.triton('triton_poi_fused_mul_0', \'\'\'
@triton.jit
def triton_poi_fused_mul_0(in_out_ptr0, in_ptr0, out_ptr0, xnumel, XBLOCK : tl.constexpr):
    pass
\'\'\', device_str='cuda')
async_compile.wait(globals())
del async_compile

def call(args):
    arg0_1, arg1_1 = args
    args.clear()
    with torch.cuda._DeviceGuard(0):
        torch.cuda.set_device(0)
        buf0 = empty_strided_cuda((4, 8), (8, 1), torch.bfloat16)
        extern_kernels.mm(arg0_1, arg1_1, out=buf0)
        buf1 = reinterpret_tensor(buf0, (8, 4), (4, 1), 0); del buf0  # reuse
        buf2 = empty_strided_cuda((8, 4), (4, 1), torch.bfloat16)
        stream0 = get_raw_stream(0)
        triton_poi_fused_mul_0.run(buf1, arg1_1, buf2, 32, stream=stream0)
        buf3 = torch.ops.aten._scaled_dot_product_cudnn_attention.default(
            reinterpret_tensor(buf1, (1, 2, 4, 4), (32, 4, 8, 1), 0), arg0_1.view(1, 2, 4, 4), arg0_1.view(1, 2, 4, 4),
            None, True, 0.0, True)
        buf4 = buf3[0]
    return (buf1, buf4, )
"""


def run_code():
    """Returns the results of the code, and what is left of the list of its arguments."""
    arguments = [torch.empty(4, 8, dtype=torch.bfloat16), torch.empty(8, 8, dtype=torch.bfloat16)]
    return load_code(CODE)(arguments), arguments


def test_the_code_allocates_without_a_card():
    with FakeTensorMode():
        (product, attended), arguments = run_code()
    assert arguments == []
    assert (product.shape, attended.shape, product.device.type) == ((8, 4), (1, 2, 4, 4), "cpu")


def test_each_kernel_is_noted_with_the_bytes_that_it_moves():
    recorder = OperationRecorder(owner=lambda: None)
    with FakeTensorMode(), recording(recorder):
        run_code()
    noted = {operation.name: operation for operation in recorder.expanded(lambda owner: 1)}
    assert {name: operation.kind for name, operation in noted.items()} == {
        "mm": "product",
        "triton_poi_fused_mul_0": "fused",
        "cudnn": "attention",
    }
    assert noted["mm"].dims == (1, 4, 8, 8)
    assert (noted["mm"].bytes_read, noted["mm"].bytes_written) == (64 + 128, 64)
    fused = noted["triton_poi_fused_mul_0"]  # one of them in place: read and written
    assert (fused.bytes_read, fused.bytes_written) == (64 + 128, 64 + 64)
    assert noted["cudnn"].dims == (1, 2, 4, 4, 4, 4, 1)


SCHEMAS = {
    name: getattr(torch.ops.aten, f"_scaled_dot_product_{name}").default._schema for name in inductor_code._ATTENTION
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_attention_takes_what_its_operator_does_with_and_without_defaults(name):
    """Inductor leaves out trailing arguments that have their defaults."""
    with FakeTensorMode():
        heads = torch.empty(1, 2, 4, 8, dtype=torch.bfloat16)
        values = {
            "Tensor": heads,
            "float": 0.0,
            "bool": True,
            "int": 4,
            "SymInt": 4,
            "List[bool]": [True] * 4,
            "Optional[Tensor]": None,
        }
        arguments = [each for each in SCHEMAS[name].arguments if not each.kwarg_only]
        for given in (arguments, [each for each in arguments if not each.has_default_value()]):
            results = inductor_code._ATTENTION[name](*(values[str(each.type)] for each in given))
            assert len(results) == len(SCHEMAS[name].returns)
            assert results[0].shape == heads.shape
