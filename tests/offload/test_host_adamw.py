"""AdamW on the host is torch's, by its kernel and without a compiler."""

from __future__ import annotations

import logging
import os
import tempfile
import threading
from pathlib import Path

import pytest
import torch
from ranks import preloaded
from torch import Tensor

from toolkit.launch import numa
from toolkit.launch.user_cache import NO_CACHE_SWITCH
from toolkit.offload import host_adamw
from toolkit.offload.host_adamw import HostAdamW, StepFactors, accumulate, step

NUM = 70_003  # more than a group of blocks, and no multiple of anything


@pytest.fixture(params=["kernel", "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "torch":
        monkeypatch.setattr(host_adamw, "kernel", lambda: None)
    elif host_adamw.kernel() is None:
        pytest.skip("no C++ compiler here")
    return str(request.param)


def states(seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weights, first, gradients = (torch.randn(NUM, generator=generator) for _ in range(3))
    return weights, 0.1 * first, torch.rand(NUM, generator=generator), gradients


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_step_is_that_of_torch(way: str, dtype: torch.dtype) -> None:
    weights, first, second, gradients = states()
    gradients = gradients.to(dtype)
    expected = torch.nn.Parameter(weights.clone())
    plain = torch.optim.AdamW([expected], lr=1e-2, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)
    plain.state[expected] = {"step": torch.tensor(4.0), "exp_avg": first.clone(), "exp_avg_sq": second.clone()}
    expected.grad = gradients.float() * 0.5
    plain.step()
    sent = torch.empty(NUM, dtype=dtype)
    factors = StepFactors(rate=1e-2, betas=(0.8, 0.95), epsilon=1e-6, weight_decay=0.1, step=5, gradient=0.5)
    step(weights, (first, second), gradients, sent, factors, threads=2)
    state = plain.state[expected]
    for found, wanted in ((weights, expected.data), (first, state["exp_avg"]), (second, state["exp_avg_sq"])):
        torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-7)
    assert torch.equal(sent, weights.to(dtype))


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan, 70000.0, 65504.0, 1e-7, 6e-8, 3e-5, -0.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_any_weight_is_rounded_as_torch_does(way: str, dtype: torch.dtype, value: float) -> None:
    weights, zeros = torch.full((9,), value), torch.zeros(9)
    sent = torch.empty(9, dtype=dtype)
    factors = StepFactors(rate=0.0, betas=(0.9, 0.99), epsilon=1.0, weight_decay=0.0, step=1)
    step(weights, (zeros, zeros.clone()), zeros.to(dtype), sent, factors, threads=1)
    torch.testing.assert_close(sent, torch.full((9,), value).to(dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_micro_batches_are_added_up_in_fp32(way: str, dtype: torch.dtype) -> None:
    one, other = states(1)[3].to(dtype), states(2)[3].to(dtype)
    sums = torch.full((NUM,), torch.nan)
    accumulate(sums, one, begins=True, threads=2)
    squares = accumulate(sums, other, begins=False, threads=2)
    assert torch.equal(sums, one.float() + other.float())
    assert squares == pytest.approx(float(sums.double().square().sum()), rel=1e-6)


def test_without_a_compiler_torch_steps_after_one_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "/absent/compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    host_adamw.kernel.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            assert host_adamw.kernel() is None
            assert host_adamw.kernel() is None
    finally:
        host_adamw.kernel.cache_clear()
    (record,) = caplog.records
    assert "/absent/compiler" in record.message


def test_plain_code_and_that_for_this_processor_agree(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    if host_adamw.kernel() is None:
        pytest.skip("no C++ compiler here")
    found = []
    for processors in (host_adamw._PROCESSORS, ((),)):
        monkeypatch.setattr(host_adamw, "_PROCESSORS", processors)
        monkeypatch.setenv("XDG_CACHE_HOME", f"{tmp_path}/{len(processors)}")
        host_adamw.kernel.cache_clear()
        weights, first, second, gradients = states()
        sent = torch.empty(NUM, dtype=torch.float16)
        factors = StepFactors(rate=1e-2, betas=(0.9, 0.95), epsilon=1e-8, weight_decay=0.1, step=3)
        step(weights, (first, second), gradients.half(), sent, factors, threads=1)
        found.append((weights, first, second, sent))
    host_adamw.kernel.cache_clear()
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def test_the_kernel_is_kept_for_a_processor_and_has_no_instructions_that_it_lacks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if host_adamw.kernel() is None:
        pytest.skip("no C++ compiler here")
    compiler, said = tmp_path / "compiler", tmp_path / "said"
    # One that does not know the processor it runs on, as some do not.
    compiler.write_text(
        f'#!/bin/sh\ncase "$*" in *native*) exit 1;; esac\necho "$*" >> {said}\nfor last; do :; done\ntouch "$last"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.delenv(NO_CACHE_SWITCH, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    built = set()
    for flags in ("sse2", "sse2 avx2 fma f16c", "sse2 avx2"):
        monkeypatch.setattr(host_adamw, "_processor", lambda flags=flags: f"flags : {flags}")
        with host_adamw._folder() as folder:
            built.add(host_adamw._built(folder))
    assert len(built) == 3
    assert all(path.is_relative_to(tmp_path) for path in built)
    assert ["-mavx2" in line for line in said.read_text().splitlines()] == [False, True, False]


def test_a_library_that_another_user_could_have_put_there_is_not_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As after another user has made the folder: what can be written by all may hold anything by the kernel's name."""
    if host_adamw.kernel() is None:
        pytest.skip("no C++ compiler here")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setenv(NO_CACHE_SWITCH, "1")
    with host_adamw._folder() as folder:
        planted = host_adamw._built(folder)
    assert planted.is_relative_to(temporary), "the next process need not compile"
    planted.write_bytes(b"no library")
    folder.parent.chmod(0o777)
    host_adamw.kernel.cache_clear()
    try:
        assert host_adamw.kernel() is not None
    finally:
        host_adamw.kernel.cache_clear()
    assert planted.read_bytes() == b"no library"
    assert [path.name for path in temporary.iterdir()] == [folder.parent.name], "the process's own folder is gone"


def test_steps_are_counted_as_the_optimizer_does_whose_place_it_takes() -> None:
    for in_tensors in (True, False):
        weight = torch.nn.Parameter(torch.ones(4))
        optimizer = HostAdamW(
            [weight], rate=0.1, betas=(0.9, 0.99), epsilon=1e-8, weight_decay=0.0, counts_in_tensors=in_tensors
        )
        weight.grad = torch.ones(4)
        optimizer.step()
        assert isinstance(optimizer.state[weight]["step"], torch.Tensor if in_tensors else int)
        torch.testing.assert_close(weight.data, torch.full((4,), 0.9))


def _bound_steps() -> None:
    """Bind a process, and step in a thread of its own: the kernel's threads must be where the process is bound."""
    one = frozenset({max(os.sched_getaffinity(0))})
    free = frozenset(os.sched_getaffinity(0))
    binding = numa.bind(0, one)
    weights, first, second, gradients = states()
    factors = StepFactors(rate=1e-2, betas=(0.9, 0.95), epsilon=1e-8, weight_decay=0.1, step=3)
    before = len(list(Path("/proc/self/task").iterdir()))
    stepping = threading.Event()

    def work() -> None:
        step(weights, (first, second), gradients, weights, factors, threads=3)
        stepping.set()
        over.wait()

    over = threading.Event()
    thread = threading.Thread(target=work)
    thread.start()
    stepping.wait()
    threads = [int(each.name) for each in Path("/proc/self/task").iterdir()]
    assert len(threads) >= before + 3, "the thread and two of the kernel's"
    assert all(os.sched_getaffinity(each) == one for each in threads)
    binding.release()
    assert all(os.sched_getaffinity(each) == free for each in threads)
    over.set()


def test_threads_of_the_kernel_are_where_their_rank_is_bound() -> None:
    if host_adamw.kernel() is None:
        pytest.skip("no C++ compiler here")
    process = preloaded().Process(target=_bound_steps)
    process.start()
    process.join()
    assert process.exitcode == 0
