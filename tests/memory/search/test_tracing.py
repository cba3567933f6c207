"""Traces that another process makes are those of this one, errors too, and this one makes them where the other ends."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from train_jobs import hears_interrupts
from transformers.models.llama import modeling_llama

from toolkit.config.job import Job
from toolkit.errors import PlanError
from toolkit.memory.scenario import Scenario
from toolkit.memory.search.estimator import Estimator
from toolkit.memory.search.trace_process import TraceProcess
from toolkit.memory.search.tracing import LocalTracing, TracingElsewhere, answer_questions, is_plain

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks are used on Linux alone")

CHANGES = {"keeps_inputs": False}
PIPELINE = {"parallel.pipeline": 2, "parallel.zero_stage": 1}


def case_of(**changes: Any) -> Scenario:
    job = {
        "model": "quickstart-llama",
        "cluster": {"gpu": "h100-sxm-80gb", "gpus_per_node": 4},
        "train": {"sequence_length": 64, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2},
        "parallel": {"zero_stage": 2},
    }
    return Scenario.of(Job.model_validate(job)).changed(changes)


@pytest.fixture
def elsewhere() -> Iterator[TracingElsewhere]:
    made = TracingElsewhere(TraceProcess(answer_questions))
    yield made
    made.close()


def children() -> set[int]:
    """Return the processes that this one has forked and not reaped."""
    return set(map(int, Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()))


@pytest.mark.parametrize(
    "changes", [{}, pytest.param({"train.method": "lora"}, marks=pytest.mark.full), PIPELINE], ids=str
)
def test_another_process_finds_what_this_one_finds(elsewhere: TracingElsewhere, changes: dict[str, Any]) -> None:
    plan, lines = case_of(**changes).plan(), []
    found = elsewhere.ranks(plan, CHANGES, notify=lambda: lines.append("tracing"))
    assert found == LocalTracing().ranks(plan, CHANGES)
    assert (elsewhere.num_traces, lines) == (1, ["tracing"])
    if plan.grid.pp > 1:
        part, local = plan.stage(1), LocalTracing(processes=2)
        assert elsewhere.layout(plan, CHANGES) == local.layout(plan, CHANGES)
        assert elsewhere.stage(plan, CHANGES, part) == local.stage(plan, CHANGES, part) == found[1]
        assert local.ranks(plan, CHANGES) == found


def test_reports_are_the_same_and_what_is_traced_ahead_is_not_traced_again(elsewhere: TracingElsewhere) -> None:
    cases = [case_of(), case_of(**{"train.method": "lora"}), case_of(**{"train.sequence_length": 32})]
    estimator = Estimator(tracing=elsewhere)
    estimator.trace_ahead([case.plan() for case in cases])
    assert estimator.num_traces == 0
    assert len(children() & {process._child for process in elsewhere._processes.values()}) == 2, (
        "plain, and with adapters"
    )
    assert [estimator.estimate(case) for case in cases] == [Estimator().estimate(case) for case in cases]
    assert estimator.num_traces == 3


def test_a_plan_is_plain_without_adapters_the_compiler_and_code_of_its_own() -> None:
    changes = ({"train.method": "lora"}, {"train.torch_compile": True}, {"model.trust_remote_code": True})
    assert is_plain(case_of().plan())
    assert is_plain(case_of(**PIPELINE).plan())
    assert not any(is_plain(case_of(**each).plan()) for each in changes)


@pytest.mark.parametrize("changes", [{}, pytest.param(PIPELINE, marks=pytest.mark.full)], ids=str)
def test_a_trace_that_fails_elsewhere_fails_as_here(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]) -> None:
    monkeypatch.setattr(modeling_llama.LlamaMLP, "forward", lambda self, hidden: hidden[hidden.sum(-1) > 0])
    elsewhere, case = TracingElsewhere(TraceProcess(answer_questions)), case_of(**changes)
    try:
        errors = []
        for tracing in (elsewhere, elsewhere, LocalTracing()):
            with pytest.raises(PlanError, match="TRACE_FAILED") as caught:
                Estimator(tracing=tracing).estimate(case)
            errors.append((str(caught.value), caught.value.problems))
        assert errors[0] == errors[1] == errors[2]
        assert pickle.loads(pickle.dumps(caught.value)).problems == caught.value.problems
    finally:
        elsewhere.close()


def test_where_the_other_process_is_killed_this_one_finds_the_same(elsewhere: TracingElsewhere) -> None:
    estimator, wanted = Estimator(tracing=elsewhere), Estimator()
    case, other = case_of(), case_of(**{"train.sequence_length": 32})
    assert estimator.estimate(case) == wanted.estimate(case)
    (process,) = elsewhere._processes.values()
    os.kill(process._child, signal.SIGKILL)
    assert estimator.estimate(other) == wanted.estimate(other)
    assert estimator.estimate(case_of(**PIPELINE)) == wanted.estimate(case_of(**PIPELINE))


def test_after_closing_this_process_makes_traces_and_forks_no_other() -> None:
    before = children()
    elsewhere = TracingElsewhere(TraceProcess(answer_questions))
    elsewhere.close()
    assert elsewhere.ranks(case_of().plan(), CHANGES) == LocalTracing().ranks(case_of().plan(), CHANGES)
    assert children() == before


COMMAND = """
import os, sys
from toolkit.cli.app import main

sys.argv = ["toolkit", "estimate", *sys.argv[1:], "--json"]
try:
    main()
finally:
    children = open(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read()
    print(f"left: {children!r}, torch: {'torch' in sys.modules}", file=sys.stderr)
"""


def test_a_command_leaves_no_process_and_imports_no_torch_itself(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text("model: quickstart-llama\ncluster: {gpu: h100-sxm-80gb}\ntrain: {sequence_length: 64}\n")
    run = subprocess.run(
        [sys.executable, "-c", COMMAND, str(job)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
    )
    assert run.stderr.splitlines()[-1] == f"left: '', torch: {len(os.sched_getaffinity(0)) == 1}"


@pytest.mark.parametrize("whom", ["all", pytest.param("the command alone", marks=pytest.mark.full)])
def test_ctrl_c_leaves_no_process(tmp_path: Path, whom: str) -> None:
    if len(os.sched_getaffinity(0)) == 1:
        pytest.skip("the command makes its traces itself")
    job = tmp_path / "job.yaml"
    job.write_text("model: llama-3.2-1b\ncluster: {gpu: h100-sxm-80gb}\ntrain: {sequence_length: 64}\n")
    command = [sys.executable, "-m", "toolkit", "estimate", str(job), "--no-cache"]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, start_new_session=True, preexec_fn=hears_interrupts
    ) as run:
        listed = Path(f"/proc/{run.pid}/task/{run.pid}/children")
        wait_until(lambda: bool(listed.read_text()))
        child = Path(f"/proc/{listed.read_text().split()[0]}")
        wait_until(lambda: "libtorch" in (child / "maps").read_text())
        (os.killpg if whom == "all" else os.kill)(run.pid, signal.SIGINT)
        assert run.stderr is not None
        said = run.stderr.read()  # to the end of all that could write there
    assert (run.returncode, "Traceback" in said) == (130, False), said
    wait_until(lambda: not child.exists() or " Z " in (child / "stat").read_text())


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)
