"""Kept reports and traces: read back equal, without torch, and only where all that they depend on is the same."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from toolkit.artifacts.record_cache import RecordCache
from toolkit.catalog.models import read_catalogue_model
from toolkit.cli.app import main
from toolkit.config.job import Job
from toolkit.memory.report.calibration import Calibration
from toolkit.memory.scenario import Scenario
from toolkit.memory.search import stored
from toolkit.memory.search.advice import Saving, find_savings
from toolkit.memory.search.estimator import Estimator
from toolkit.memory.search.stored import StoredEstimates
from toolkit.memory.search.tracing import shared_key

MARKED = {"marks_modules": True, "keeps_inputs": False}


def case_of(**changes: Any) -> Scenario:
    job = Job.model_validate(
        {
            "model": "quickstart-llama",
            "cluster": {"gpu": "h100-sxm-80gb", "gpus_per_node": 4},
            "train": {"sequence_length": 128, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
            "parallel": {"zero_stage": 2},
        }
    )
    return Scenario.of(job).changed(changes)


@pytest.mark.parametrize(
    "changes", [{}, {"parallel.pipeline": 2, "parallel.zero_stage": 1}, {"model.name": "olmoe-1b-7b"}]
)
def test_what_is_kept_is_what_was_made(tmp_path: Path, changes: dict[str, Any]) -> None:
    case, cache = case_of(**changes), RecordCache(tmp_path)
    first = Estimator(cache=cache)
    made = first.estimate(case)
    assert first.num_traces
    again = Estimator(cache=cache)
    assert again.estimate(case) == made
    other = case.changed({"parallel.offload": "optimizer-cpu"})
    assert again.estimate(other) == Estimator().estimate(other), "another engine over the kept trace"
    assert again.num_traces == 0


# Changes, and whether they leave the trace, and the report, as they are.
CHANGES: list[tuple[dict[str, Any], bool, bool]] = [
    ({"parallel.zero_stage": 3}, True, False),
    ({"train.gradient_accumulation_steps": 8}, True, False),
    ({"train.optimizer": "lion"}, True, False),
    ({"train.learning_rate": 0.5}, True, False),
    ({"train.precision": "fp32"}, False, False),
    ({"train.sequence_length": 256}, False, False),
    ({"train.per_device_train_batch_size": 1}, False, False),
    ({"train.gradient_checkpointing": 0.5}, False, False),
    ({"train.attention": "eager"}, False, False),
    ({"train.method": "lora"}, False, False),
    ({"train.loss": "chunked"}, False, False),
    ({"train.kernels": "liger"}, False, False),
    ({"train.torch_compile": True}, False, False),
    ({"parallel.tensor": 2}, False, False),
    ({"parallel.pipeline": 2}, False, False),
    ({"parallel.offload": "activations-cpu"}, False, False),
    ({"cluster.gpu": "a100-sxm-80gb"}, False, False),
    ({"cluster.transformers": "5.10"}, False, False),
    ({"cluster.kernel_packages": ["mamba-ssm"]}, False, False),
    ({"data": {"train": "a/b", "packing": "none"}}, False, False),
]


@pytest.mark.parametrize(("changes", "same_trace", "same_report"), CHANGES, ids=[next(iter(row[0])) for row in CHANGES])
def test_a_key_holds_all_that_a_result_depends_on(
    tmp_path: Path, changes: dict[str, Any], same_trace: bool, same_report: bool
) -> None:
    kept, case, changed = StoredEstimates(RecordCache(tmp_path)), case_of(), case_of(**changes)
    plans = case.plan(), changed.plan()
    traces = [kept.trace_key(plan, MARKED) for plan in plans]
    assert (traces[0] == traces[1]) == same_trace
    if same_trace:
        assert shared_key(plans[0]) == shared_key(plans[1])
    assert kept.trace_key(plans[0], MARKED) != kept.trace_key(plans[0], {**MARKED, "evaluation": True})
    reports = [
        kept.report_key(plan, each, calibration=None, other_allocator=None)
        for plan, each in zip(plans, (case, changed), strict=True)
    ]
    assert (reports[0] == reports[1]) == same_report


def test_a_key_holds_what_the_processor_of_a_folder_makes_of_an_image(tmp_path: Path) -> None:
    vision = {"depth": 2, "hidden_size": 32, "num_heads": 2}
    config = dict(read_catalogue_model("quickstart-llama").config) | {"model_type": "qwen2_5_vl", "image_token_id": 5}
    config |= {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "vision_config": vision}
    (tmp_path / "config.json").write_text(json.dumps(config))
    job = {"model": {"name": str(tmp_path), "init": "random"}, "cluster": {"gpu": "h100-sxm-80gb"}}
    kept, keys = StoredEstimates(RecordCache(tmp_path / "cache")), set()
    for pixels in (28 * 28, 28 * 28 * 9):
        (tmp_path / "preprocessor_config.json").write_text(json.dumps({"min_pixels": 28 * 28, "max_pixels": pixels}))
        case = Scenario.of(Job.model_validate({**job, "train": {"sequence_length": 128}}))
        plan = case.plan()
        keys |= {
            kept.trace_key(plan, MARKED),
            kept.report_key(plan, case, calibration=None, other_allocator=None),
        }
    assert len(keys) == 4


def test_a_report_depends_on_the_machine_and_the_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, case = StoredEstimates(RecordCache(tmp_path)), case_of()

    def key(calibration: Calibration | None = None, other_allocator: str | None = None) -> str | None:
        return kept.report_key(case.plan(), case, calibration=calibration, other_allocator=other_allocator)

    before = key()
    assert before == key()
    assert len({before, key(Calibration(context_bytes=5)), key(other_allocator="backend:native")}) == 3
    monkeypatch.setattr(stored, "versions", lambda: "others")
    assert key() != before


def test_a_model_with_code_of_its_own_is_not_kept(tmp_path: Path) -> None:
    case = case_of(**{"model.trust_remote_code": True})
    kept = StoredEstimates(RecordCache(tmp_path))
    assert kept.trace_key(case.plan(), MARKED) is None
    assert kept.report_key(case.plan(), case, calibration=None, other_allocator=None) is None


def test_a_second_command_needs_no_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = tmp_path / "job.yaml"
    job.write_text("model: quickstart-llama\ncluster: {gpu: h100-sxm-80gb}\ntrain: {sequence_length: 64}\n")
    code = (
        "import sys; from toolkit.cli.app import main; sys.argv = ['toolkit', 'estimate', sys.argv[1]]\n"
        "try:\n    main()\nexcept SystemExit as left:\n    assert not left.code\n"
        "print('with torch' if 'torch' in sys.modules else 'without torch')"
    )
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TOOLKIT_NO_CACHE", "")
    assert main(["estimate", str(job)]) == 0
    first = capsys.readouterr().out.splitlines()
    run = subprocess.run([sys.executable, "-c", code, str(job)], capture_output=True, text=True, check=True)
    *second, last = run.stdout.splitlines()
    assert last == "without torch"
    assert first == second
    (folder,) = (tmp_path / "cache").rglob("traces")
    assert list(folder.iterdir())


@pytest.mark.parametrize(("cached", "switch"), [(False, ""), (True, "1")])
def test_an_option_and_a_variable_turn_the_cache_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cached: bool, switch: str
) -> None:
    from toolkit.cli.estimate_session import EstimateSession

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TOOLKIT_NO_CACHE", switch)
    with EstimateSession(as_json=True, cached=cached) as session, session.estimating() as estimator:
        estimator.estimate(case_of())
    assert not list(tmp_path.iterdir())


def test_savings_are_kept_with_the_report(tmp_path: Path) -> None:
    case, cache = Scenario.of(case_of(**{"model.name": "llama-3.2-1b"}).job), RecordCache(tmp_path)
    plan = case.plan()

    def savings(estimator: Estimator) -> tuple[Saving, ...]:
        return find_savings(estimator, case, plan=plan, report=estimator.estimate_plan(plan, case))

    made, again = savings(Estimator(cache=cache)), Estimator(cache=cache)
    assert made
    files = sorted(tmp_path.iterdir())
    assert savings(again) == made
    assert again.num_traces == 0
    assert sorted(tmp_path.iterdir()) == files
