"""What is used of torch's compiler and is private to it: lowering a graph for a card that is not there, to wrapper code.

Inductor's scheduler, fusion, memory planning and wrapper code are the real ones; only what they ask of a card is answered
here, and no kernel is compiled. Neither a wheel of torch with CUDA nor Triton is needed. Tried with torch 2.11, 2.13, 2.14.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._pytree import tree_map

from toolkit.memory.kernels.device import Device

# Private names that are replaced while a graph is lowered: module, or module and class, and name.
REPLACED = (
    ("torch._dynamo.device_interface:CudaInterface", "get_compute_capability"),
    ("torch._dynamo.device_interface:CudaInterface", "get_device_properties"),
    ("torch._dynamo.device_interface:CudaInterface", "get_raw_stream"),
    ("torch._dynamo.device_interface:CudaInterface", "is_available"),
    ("torch._dynamo.device_interface:CudaInterface.Worker", "current_device"),
    ("torch._dynamo.device_interface:CudaInterface.Worker", "get_device_properties"),
    ("torch._inductor.compile_fx", "has_triton"),
    ("torch._inductor.fx_passes.reinplace", "_inplace_generalized_scatter"),
    ("torch._inductor.graph:GraphLowering", "compile_to_module"),
    ("torch._inductor.inductor_prims:lookup_seed", "prim_meta_impl"),
    ("torch._inductor.scheduler", "has_triton"),
    ("torch._subclasses.fake_tensor", "init_gpu_context"),
    ("torch.cuda", "_exchange_device"),
    ("torch.cuda", "_lazy_init"),
    ("torch.cuda", "_maybe_exchange_device"),
    ("torch.utils._triton", "triton_hash_with_backend"),
)
# Where a limit of time is asked for: at each operation of a trace, each node of a graph, each pair that could be fused.
TIMED = (
    ("torch._inductor.graph:GraphLowering", "run_node"),
    ("torch._inductor.scheduler:Scheduler", "can_fuse"),
    ("torch._subclasses.fake_tensor:FakeTensorMode", "dispatch"),
)
# Names that are used as they are.
USED = (
    ("torch._functorch.config", "enable_autograd_cache"),
    # The backward half would otherwise be lowered in the first backward pass.
    ("torch._functorch.config", "force_non_lazy_backward_lowering"),
    ("torch._guards", "detect_fake_mode"),
    ("torch._inductor.compile_fx", "compile_fx"),
    ("torch._inductor.compile_fx", "compile_fx_inner"),
    ("torch._inductor.config", "compile_threads"),
    ("torch._inductor.config", "fx_graph_cache"),
    ("torch._inductor.config", "_config"),
    ("torch._inductor.config", "_is_default"),
    ("torch.compiler", "set_stance"),
    ("torch._inductor.graph:GraphLowering", "codegen"),
    ("torch._inductor.runtime.hints:DeviceProperties", "create"),
    ("torch.utils._python_dispatch", "_disable_current_modes"),
)
# Settings of inductor under which it runs kernels or a compiler of CUDA.
NEEDING_A_CARD = (
    "coordinate_descent_tuning",
    "cpp_wrapper",
    "max_autotune",
    "max_autotune_gemm",
    "max_autotune_pointwise",
)
# Functions that remember what a card has answered, where a version of torch has them.
_REMEMBERING = (
    ("torch._inductor.runtime.hints:DeviceProperties", "create"),
    ("torch._inductor.utils", "get_gpu_type"),
    ("torch._inductor.utils", "get_max_num_sms"),
    ("torch._inductor.utils", "is_big_gpu"),
    ("torch._inductor.utils", "using_b200"),
    ("torch.utils._triton", "has_triton"),
)
# CUDA C++ Programming Guide, technical specifications by compute capability: resident threads of a multiprocessor, where they
# are not 2048; bytes of shared memory of a multiprocessor.
_FEWER_THREADS = {7.5: 1024, 8.6: 1536, 8.7: 1536, 8.9: 1536, 12.0: 1536, 12.1: 1536}
_SHARED_KIB = {7.0: 96, 7.5: 64, 8.0: 164, 8.6: 100, 8.9: 100, 9.0: 228, 10.0: 228, 12.0: 100}


class OutOfTime(BaseException):
    """A graph is not lowered within its limit; no handler of the compiler catches it."""


class _Lowered(BaseException):
    """Ends a lowering once its code is there."""

    def __init__(self, code: str) -> None:
        self.code = code


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Have the compiler raise `OutOfTime` inside a `with` block once it has worked for so long.

    Args:
        seconds: Processor time of this process, which does not depend on what else the machine does.
    """
    end = time.process_time() + seconds

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            if time.process_time() > end:
                raise OutOfTime
            return function(*args, **kwargs)

        return run

    with _replaced({(place, name): timed(getattr(_find(place), name)) for place, name in TIMED}):
        yield


@contextlib.contextmanager
def as_in_a_new_process() -> Iterator[None]:
    """Compile inside a `with` block as a new process does, whatever this one has set for models of its own.

    Settings by environment variables stay, but for those that need a card: tuning, and kernels called from C++.

    Source:
        torch/compiler/__init__.py set_stance; torch/utils/_config_module.py.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("default"))
        for name in ("torch._dynamo.config", "torch._functorch.config", "torch._inductor.config"):
            config = importlib.import_module(name)
            entries = {key: entry for key, entry in config._config.items() if entry.alias is None}
            changed = {
                key: copy.deepcopy(entry.default) for key, entry in entries.items() if not config._is_default(key)
            }
            changed |= {key: False for key in NEEDING_A_CARD if key in entries}
            stack.enter_context(config.patch(changed))
        yield


@contextlib.contextmanager
def _without_advice() -> Iterator[None]:
    """Keep the compiler from telling, inside a `with` block, that the card in question is too small for a mode nobody asked for.

    Source:
        torch/_inductor/utils.py is_big_gpu.
    """
    logger = logging.getLogger("torch._inductor.utils")

    def is_kept(record: logging.LogRecord) -> bool:
        return "max_autotune_gemm mode" not in record.getMessage()

    logger.addFilter(is_kept)
    try:
        yield
    finally:
        logger.removeFilter(is_kept)


def missing_names() -> list[str]:
    """Return the names of the compiler that this version of torch does not have; nothing can be lowered without them."""
    return [f"{place}.{name}" for place, name in (*REPLACED, *TIMED, *USED) if not hasattr(_find(place), name)]


def compile_graph(
    graph: torch.fx.GraphModule, inputs: Sequence[Any], *, lower: Callable[..., Callable[..., Any]]
) -> Callable[..., Any]:
    """Compile a graph of Dynamo's as inductor does, with another function for each half.

    It stays on fake tensors of the CPU until `lower`: autograd refuses fake CUDA tensors where there is no card.

    Args:
        graph: Graph; it may be changed.
        inputs: Its inputs, fake tensors of the CPU.
        lower: Function that is given the graph of the forward or backward half and its inputs, and returns what runs it.
    """
    from torch._functorch import config as functorch_config
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx

    with (
        _without_advice(),
        config.patch(fx_graph_cache=False, compile_threads=1),
        functorch_config.patch(enable_autograd_cache=False, force_non_lazy_backward_lowering=True),
    ):
        compiled: Callable[..., Any] = compile_fx(graph, list(inputs), inner_compile=lower)
        return compiled


def lower_graph(
    graph: torch.fx.GraphModule, inputs: Sequence[Any], *, device: Device, **options: Any
) -> str | Callable[..., Any]:
    """Return the wrapper code that inductor writes for a graph on a card, or what runs it if it calls nothing.

    Args:
        graph: Graph of a half; it is changed.
        inputs: Its inputs, fake tensors of the CPU.
        device: Card.
        options: Those of inductor's `compile_fx_inner`.
    """
    from torch._inductor.compile_fx import compile_fx_inner

    with _pretended_card(device):
        with torch._guards.detect_fake_mode(inputs) or contextlib.nullcontext():
            moved = [_on_card(each) if isinstance(each, torch.Tensor) else each for each in inputs]
        for node in graph.graph.nodes:  # constructors and random seeds name their device
            node.args, node.kwargs = tree_map(_device_of_card, (node.args, node.kwargs))
        graph.recompile()
        try:
            called: Callable[..., Any] = compile_fx_inner(graph, moved, **options)
            return called
        except _Lowered as done:
            return done.code


def properties(device: Device) -> SimpleNamespace:
    """Return what inductor reads of `torch.cuda.get_device_properties`; the number of multiprocessors splits reductions."""
    major, minor = divmod(round(device.capability * 10), 10)
    shared = _SHARED_KIB.get(device.capability, 100) * 1024
    return SimpleNamespace(
        name="pretended card",
        major=major,
        minor=minor,
        multi_processor_count=device.num_multiprocessors,
        total_memory=80 * 2**30,
        warp_size=32,
        max_threads_per_multi_processor=_FEWER_THREADS.get(device.capability, 2048),
        max_threads_per_block=1024,
        regs_per_multiprocessor=65536,
        shared_memory_per_block=48 * 1024,
        shared_memory_per_block_optin=shared - 1024,
        shared_memory_per_multiprocessor=shared,
        L2_cache_size=50 * 2**20,
        is_integrated=0,
        uuid="0",
        gcnArchName="",
    )


def _find(place: str) -> Any:
    module, _, path = place.partition(":")
    found: Any = importlib.import_module(module)
    for name in filter(None, path.split(".")):
        found = getattr(found, name, None)
    return found


@contextlib.contextmanager
def _pretended_card(device: Device) -> Iterator[None]:
    """Have inductor believe in a card, and stop at the code, inside a `with` block."""
    card = properties(device)

    def answer(value: Any = None) -> Any:
        return staticmethod(lambda *_, **__: value)

    public = {
        "current_device": answer(0),
        "device_count": answer(1),
        "get_device_capability": answer((card.major, card.minor)),
        "get_device_properties": answer(card),
        "get_rng_state": staticmethod(lambda *_, **__: torch.zeros(16, dtype=torch.uint8)),
        "is_available": answer(True),
        "is_bf16_supported": answer(card.major >= 8),
        "is_tf32_supported": answer(card.major >= 8),
        "set_device": answer(),
        "set_rng_state": answer(),
        "synchronize": answer(),
    }
    private = {
        "get_compute_capability": answer(10 * card.major + card.minor),
        "get_device_properties": answer(card),
        "get_raw_stream": answer(0),
        "is_available": answer(True),
        "current_device": answer(0),
        "has_triton": answer(True),
        # It copies, for the shape alone, and a wheel without CUDA has no guard of its devices, which copy_ asks for.
        "_inplace_generalized_scatter": staticmethod(lambda inp, src, view_ops: inp),
        # It indexes, which asks for the same guard.
        "prim_meta_impl": staticmethod(lambda seeds, index: torch.empty((), dtype=seeds.dtype, device=seeds.device)),
        "init_gpu_context": answer(),  # torch 2.11 makes a real tensor there
        "_exchange_device": answer(0),
        "_lazy_init": answer(),
        "_maybe_exchange_device": answer(0),
        "triton_hash_with_backend": answer("none"),
        "compile_to_module": _stop_at_code,
    }
    answers = {("torch.cuda", name): value for name, value in public.items()}
    _forget()
    try:
        with _replaced(answers | {(place, name): private[name] for place, name in REPLACED}):
            yield
    finally:
        _forget()


_INHERITED = object()


@contextlib.contextmanager
def _replaced(values: Mapping[tuple[str, str], Any]) -> Iterator[None]:
    """Give names of modules and classes other values inside a `with` block."""
    kept: list[tuple[Any, str, Any]] = []
    try:
        for (place, name), value in values.items():
            where = _find(place)
            kept.append((where, name, vars(where).get(name, _INHERITED)))
            setattr(where, name, value if isinstance(where, type) else getattr(value, "__func__", value))
        yield
    finally:
        for where, name, value in reversed(kept):
            if value is _INHERITED:
                delattr(where, name)
            else:
                setattr(where, name, value)


def _forget() -> None:
    """Clear what was remembered of a card, pretended or real."""
    for place, name in _REMEMBERING:
        clear = getattr(getattr(_find(place), name, None), "cache_clear", None)
        if clear is not None:
            clear()


def _stop_at_code(graph: Any) -> None:
    raise _Lowered(graph.codegen()[0].value)


def _device_of_card(value: Any) -> Any:
    return torch.device("cuda", 0) if value == torch.device("cpu") else value


def _on_card(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cuda")
