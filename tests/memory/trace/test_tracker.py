"""Storages of operations: what a kernel holds meanwhile, and reductions in place."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from toolkit.distributed.collectives import all_reduce, start_all_reduce
from toolkit.distributed.fake import fake_group
from toolkit.memory.trace.events import Recorder, Run
from toolkit.memory.trace.fake_ops import inplace_collectives
from toolkit.memory.trace.tracker import StorageTracker


def test_an_operation_shows_what_its_cuda_kernel_holds_within():
    recorder = Recorder()
    tracker = StorageTracker(recorder, cause=lambda: "x", owner=lambda: None)
    with FakeTensorMode(), tracker:
        torch.logsumexp(torch.empty(4, 256), 1)
    [run] = [event for event in recorder.take() if isinstance(event, Run)]
    assert run.peak_bytes == 2 * 4096 + 512


def test_a_reduction_in_place_takes_no_memory_and_waiting_for_one_neither():
    recorder = Recorder()
    tracker = StorageTracker(recorder, cause=lambda: "x", owner=lambda: None, answers=[inplace_collectives])
    with fake_group(4) as group, FakeTensorMode(), tracker:
        x = torch.empty(512)
        reduced = start_all_reduce(x, group=group).wait()
        assert tracker.live_bytes == 2048
        copy = all_reduce(x, group=group)
        assert tracker.live_bytes == 2 * 2048
        del x, reduced
        assert tracker.live_bytes == 2048
        del copy
    assert tracker.live_bytes == 0
