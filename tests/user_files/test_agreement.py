"""What we refuse is what the libraries refuse: DeepSpeed's parser and engine, Accelerate's launcher, the argument parsers."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import library_verdicts as libraries
import pytest
import yaml
from mutated import Case, cases, hostfiles
from ranks import one_rank

from toolkit.user_files.check import check_files
from toolkit.user_files.report import Report

# Of every group, so many cases of the default run.
SAMPLE = 4


@pytest.fixture(scope="module", autouse=True)
def group():
    with libraries.quiet(), one_rank():
        yield


def words_of(arguments):
    """A command line that says the same as a mapping."""
    for key, value in arguments.items():
        yield f"--{key}"
        if value is not None:
            yield from map(
                str, value if isinstance(value, list) else [json.dumps(value) if isinstance(value, dict) else value]
            )


def ours(case: Case, folder: Path) -> Report:
    """Write a case as a user has it, and check it."""
    main = folder / "main.json"
    main.write_text(json.dumps(case.config))
    (folder / "ds.json").write_text(json.dumps({"train_batch_size": 8, "zero_optimization": {"stage": 2}}))
    if case.group == "deepspeed":
        return check_files([main, f"deepspeed --num_gpus 1 train.py --deepspeed_config {main}"])
    if case.group in ("trainer", "together"):
        (folder / "args.json").write_text(json.dumps({**case.arguments, "deepspeed": str(main), "output_dir": "out"}))
        return check_files([main, f"python train.py {folder / 'args.json'}"])
    file = folder / "main.yaml"
    file.write_text(yaml.safe_dump(case.config, sort_keys=False))
    if case.group == "launched":
        (folder / "args.json").write_text(json.dumps({**case.arguments, "output_dir": "out"}))
        return check_files([file, folder / "args.json"])
    if case.group == "command":
        quoted = " ".join(f"'{word}'" for word in words_of(case.config))
        return check_files([f"python train.py {quoted}"])
    return check_files([main if case.group == "arguments" and len(case.name) % 2 else file])


def theirs(case: Case, folder: Path, *, runs: bool) -> str | None:
    """Ask the libraries; with `runs` by running an engine or a Trainer."""
    main, file = folder / "main.json", folder / "main.yaml"
    if case.group == "deepspeed":
        return libraries.deepspeed_refusal(case.config, runs=runs)
    if case.group in ("trainer", "together"):
        return libraries.trainer_refusal(str(main), case.arguments, folder, runs=runs)
    if case.group == "accelerate":
        return libraries.accelerate_refusal(file, folder, runs=runs)
    if case.group == "launched":
        return libraries.accelerate_refusal(file, folder, arguments=case.arguments, runs=runs)
    if case.group == "command":
        return libraries.command_refusal(list(words_of(case.config)))
    if case.group == "trl":
        return libraries.trl_refusal(file, uses=runs)
    return libraries.arguments_refusal(main if len(case.name) % 2 else file, uses=runs)


def disagreement(case: Case, folder: Path) -> str | None:
    """Return how the two verdicts differ; None if they are the same."""
    report = ours(case, folder)
    errors = [str(each) for each in report.found if each.level == "error"]
    reason = theirs(case, folder, runs=False)
    if errors and reason is None:  # the parser accepts: what fails later is found by running it
        reason = theirs(case, folder, runs=True)
    if bool(errors) == (reason is not None):
        return None
    return f"{case.group}, {case.name}: we {'refuse' if errors else 'accept'} {errors}, the library says {reason}"


def sample():
    seen: Counter[str] = Counter()
    for case in cases():
        if case.group == "trl":  # whose import takes 2 s
            continue
        seen[case.group] += 1
        if "=" in case.name or "removed" in case.name:
            if seen[f"mutated {case.group}"] < SAMPLE:
                seen[f"mutated {case.group}"] += 1
                yield case
        elif seen[case.group] <= 1:
            yield case


@pytest.mark.parametrize("case", list(sample()), ids=lambda case: f"{case.group}, {case.name}"[:80])
def test_a_sample_is_refused_exactly_where_the_library_refuses_it(case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert disagreement(case, tmp_path) is None


@pytest.mark.parametrize("text", list(hostfiles()))
def test_a_hostfile_is_refused_where_the_launcher_refuses_it(text, tmp_path):
    (tmp_path / "hostfile").write_text(text)
    assert bool(check_files([tmp_path / "hostfile"]).count("error")) == bool(libraries.hostfile_refusal(text))


@pytest.mark.full
@pytest.mark.parametrize("seed", [18, 921, 922, 923])
def test_all_are_refused_exactly_where_the_library_refuses_them(tmp_path, monkeypatch, seed):
    monkeypatch.chdir(tmp_path)
    found, total = [], Counter()
    for number, case in enumerate(cases(seed)):
        folder = tmp_path / str(number)
        folder.mkdir()
        total[case.group] += 1
        if (said := disagreement(case, folder)) is not None:
            found.append(said)
    print(f"{sum(total.values()) - len(found)} of {sum(total.values())} agree; {dict(total)}")
    assert found == []
