"""Any job file is a sound plan or one clear refusal: no stack trace, no hang, nothing written, nothing accepted that a library refuses."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import ClusterConfig
from fuzzing import (
    FULL_COUNT,
    Case,
    assert_deepspeed_takes,
    assert_finite,
    assert_report_adds_up,
    attempt,
    command,
    is_chosen,
    run_cases,
    tree,
)
from job_grammar import KEYS, bases, draw_file
from mutations import WORDS, Tree, odd_value
from train_jobs import write_inputs

from toolkit.cli.options import read_plan
from toolkit.memory.scenario import Scenario as MemoryCase
from toolkit.memory.search.estimator import Estimator
from toolkit.planning.plan import Plan


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a model, a tokenizer and data, to work in, where no hub is asked."""
    root = tmp_path_factory.mktemp("fuzz-jobs")
    write_inputs(root, num_documents=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        yield root


def _draw_overrides(rng: random.Random) -> list[str]:
    words: list[str] = []
    while rng.random() < 0.15:
        key = rng.choice((*KEYS, *KEYS, *WORDS))
        words += ["--set", f"{key}={odd_value(rng)}" if rng.random() < 0.9 else key]
    return [word for word in words if "\x00" not in word and word.isprintable()]


def _assert_sound(case: Case, job: Path, overrides: list[str]) -> None:
    """What is accepted is one plan, that reads back as itself, whose files the libraries' own parsers take."""
    plan = read_plan(job, overrides[1::2])
    stored = json.loads(json.dumps(plan.to_dict(), allow_nan=False))
    assert Plan.from_dict(stored) == plan
    assert plan.explain()
    for consumer in ("toolkit", "trainer", "accelerate"):
        config, refused = attempt(lambda consumer=consumer: plan.deepspeed_config(consumer))
        if config is None:
            assert refused is not None
            assert consumer != "toolkit"
            assert all(code.startswith("INTEGRATION_") for code in refused.codes), refused.codes
            continue
        assert_finite({key: value for key, value in config.items() if key != "zero_optimization"})
        parsed = assert_deepspeed_takes(config, plan.grid.dp)
        assert parsed.zero_config.stage == config["zero_optimization"]["stage"]
        if consumer == "accelerate":
            mapping = plan.accelerate_config(main_process_ip="node0" if plan.job.cluster.nodes > 1 else None)
            Path("accelerate.yaml").write_text(yaml.safe_dump(mapping), encoding="utf-8")
            assert ClusterConfig.from_yaml_file("accelerate.yaml").num_processes == plan.job.cluster.num_ranks
            Path("accelerate.yaml").unlink()


def _emit(case: Case, words: list[str]) -> Plan | None:
    """What `toolkit emit` writes of a job, read back and taken away again; None where it refuses."""
    code, _, _ = command(case, "emit", "job.yaml", "--out", "emitted", *words)
    if code != 0:
        assert code == 2
        return None
    plan = Plan.load(Path("emitted/plan.json"))
    again, _, _ = command(case, "validate", "emitted/plan.json", "--json")
    assert again == 0
    shutil.rmtree("emitted")
    return plan


def _assert_estimated(case: Case, words: list[str], estimator: Estimator) -> None:
    """The figures of an estimate add up; of small models alone, whose traces are quick."""
    plan = read_plan(Path("job.yaml"), words[1::2])
    if (plan.model.num_parameters or 10**9) > 10**7 or plan.settings.sequence_length > 4096:
        return
    report, refused = attempt(lambda: estimator.estimate(MemoryCase.of(plan.job)))
    case.outcome = "estimated" if refused is None else "sound, not estimated"
    case.note(refused)
    if report is not None:
        assert_report_adds_up(report)


def _job_case(case: Case, root: Path, sound: list[Tree], estimator: Estimator) -> None:
    rng = case.rng
    raw = draw_file(rng, sound)
    (root / "job.yaml").write_bytes(raw)
    words = _draw_overrides(rng)
    case.note(raw.decode("utf-8", errors="backslashreplace")[:1500])
    before = tree(root)
    code, _, _ = command(case, "validate", "job.yaml", "--json", *words)
    case.outcome = "sound" if code == 0 else "refused"
    other = rng.random()
    if code == 0:
        _assert_sound(case, Path("job.yaml"), words)
        if other < 0.15:
            assert _emit(case, words) == read_plan(Path("job.yaml"), words[1::2])
        elif other < 0.25:
            _assert_estimated(case, words, estimator)
        elif other < 0.4:
            command(case, "train", "job.yaml", "--dry-run", *rng.choice(([], ["--json"])), *words)
    else:
        assert code == 2
        if other < 0.1:
            assert _emit(case, words) is None
        elif other < 0.2:
            assert command(case, "train", "job.yaml", "--dry-run", *words)[0] == 2
        elif other < 0.25:
            assert command(case, "topology", "job.yaml", *words)[0] in (0, 2)
    assert tree(root) == before, "a check wrote something"


def _run_jobs(place: Path, count: int) -> dict[str, int]:
    sound, estimator = bases(place), Estimator()
    return run_cases("jobs", count, lambda case: _job_case(case, place, sound, estimator))


def test_job_files(place: Path) -> None:
    outcomes = _run_jobs(place, 50)
    if not is_chosen():
        assert min(outcomes["sound"], outcomes["refused"]) > 5


@pytest.mark.full
def test_job_files_in_full(place: Path) -> None:
    _run_jobs(place, FULL_COUNT)
