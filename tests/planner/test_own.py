"""What `toolkit train` chooses for the cards at hand."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from toolkit.artifacts.record_cache import RecordCache
from toolkit.config.job import Job
from toolkit.memory.search.estimator import Estimator
from toolkit.planner import own
from toolkit.planner.make import ask
from toolkit.planner.own import builds_kernels, choose, follow, with_choices
from toolkit.planning.plan import Plan
from toolkit.planning.resolve import resolve


def job_of(**train):
    values = {"sequence_length": 1024, "train_batch_size": 16, "max_steps": 10, **train}
    return Job.model_validate(
        {"model": {"name": "smollm2-135m", "init": "random"}, "cluster": {"gpu": "l4-24gb"}, "train": values}
    )


@pytest.fixture(scope="module")
def chosen(tmp_path_factory, sharing_fake_runs):
    folder = tmp_path_factory.mktemp("plans")
    with sharing_fake_runs():
        return choose(resolve(job_of()), estimator=Estimator(), folder=folder), folder


def test_open_values_are_chosen_and_recorded(chosen):
    made, _ = chosen
    assert made.values
    assert made.plan.settings.batch.train == 16
    by_key = {choice.key: choice for choice in made.plan.choices}
    for key in made.values:
        if key != "train.train_batch_size":
            assert by_key[key].source == "planner"
            assert "fixed defaults" in by_key[key].reason
    assert "\n" not in made.line
    assert "--as-is" in made.line
    assert "foreseen" in made.line
    assert Plan.from_dict(json.loads(made.plan.to_json())) == made.plan


def test_a_choice_is_remembered(chosen, monkeypatch):
    made, folder = chosen
    monkeypatch.setattr("toolkit.planner.own.search", None)  # a second search would fail
    again = choose(resolve(job_of()), folder=folder)
    assert (again.plan, again.line) == (made.plan, made.line)
    assert choose(resolve(job_of(max_steps=99)), folder=folder).values == made.values  # the length changes nothing


@pytest.mark.parametrize("values", [None, "", "[]", '{"model": 1}'])
def test_a_damaged_memory_is_searched_again(chosen, tmp_path, monkeypatch, values):
    made, folder = chosen
    (file,) = folder.iterdir()
    found = own._FOUND.loads(file.read_text().partition("\n")[2])
    cache, key, searched = RecordCache(tmp_path), own._key(resolve(job_of())), []
    cache.put(key, replace(found, values=values or ""), own._FOUND)
    if values is None:
        (tmp_path / file.name).write_text("{")
    monkeypatch.setattr("toolkit.planner.own._search", lambda *given: searched.append(given) or found)
    assert choose(resolve(job_of()), folder=tmp_path).values == made.values
    assert len(searched) == 1
    assert cache.get(key, own._FOUND) == found


def test_what_the_job_says_is_never_changed(tmp_path):
    said = job_of(
        gradient_checkpointing=True, per_device_train_batch_size=2, loss="full", torch_compile=False, kernels="eager"
    )
    made = choose(resolve(said.with_({"parallel.zero_stage": 2, "parallel.offload": "none"})), folder=tmp_path)
    assert made.values == {}
    assert made.plan.settings.gradient_checkpointing == 1.0
    assert "fixed defaults are taken" in made.line


def test_a_resumed_run_keeps_the_settings_of_its_checkpoint(chosen):
    made, _ = chosen
    assert follow(resolve(job_of()), made.plan).settings == made.plan.settings
    other = resolve(job_of().with_({"cluster.gpus_per_node": 2}))
    assert follow(other, made.plan) is other
    pinned = resolve(job_of(gradient_checkpointing=1.0))
    assert follow(pinned, made.plan).settings.gradient_checkpointing == 1.0


def test_a_job_that_fits_nowhere_keeps_its_defaults(tmp_path):
    plan = resolve(Job.model_validate({"model": "llama-3.1-8b", "cluster": {"gpu": "l4-24gb", "host_memory_gib": 16}}))
    made = choose(plan, folder=tmp_path)
    assert made.plan is plan
    assert "no settings are foreseen to fit" in made.line


def test_choices_must_be_valid_together():
    from toolkit.errors import PlanError

    with pytest.raises(PlanError):
        with_choices(resolve(job_of()), {"train.torch_compile": True, "parallel.zero_stage": 3}, "why")


def test_kernels_that_this_machine_cannot_build_are_not_chosen(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(
        "toolkit.planner.own.ask", lambda job, liger: asked.append((job, liger)) or ask(job, liger=liger)
    )
    for builds in (True, False):
        monkeypatch.setattr("toolkit.planner.own.builds_kernels", lambda builds=builds: builds)
        monkeypatch.setattr("toolkit.planner.own.search", lambda question, estimator: 1 / 0)
        made = choose(resolve(job_of()), folder=tmp_path / str(builds))
        assert not made.values
        assert made.line == "the fixed defaults are taken: the search failed with ZeroDivisionError: division by zero"
        assert not (tmp_path / str(builds)).exists()  # it is tried again
    (free, any_kernels), (pinned, no_kernels) = asked
    assert "torch_compile" not in free.train.model_fields_set
    assert any_kernels is None
    assert "torch_compile" in pinned.train.model_fields_set
    assert pinned.train.torch_compile is False
    assert no_kernels is False


def test_ctrl_c_ends_a_search_and_nothing_is_remembered(tmp_path, monkeypatch):
    def interrupted(question, estimator):
        raise KeyboardInterrupt

    monkeypatch.setattr("toolkit.planner.own.search", interrupted)
    with pytest.raises(KeyboardInterrupt):
        choose(resolve(job_of()), folder=tmp_path / "plans")
    assert not (tmp_path / "plans").exists()


def test_a_memory_that_cannot_be_read_or_written_costs_a_search_alone(chosen, tmp_path):
    made, folder = chosen
    (file,) = folder.iterdir()
    (tmp_path / "folder" / file.name).mkdir(parents=True)  # in place of the file
    (tmp_path / "file").write_text("in place of the folder")
    known = own._Found(line=made.line, values=json.dumps(dict(made.values)), reason="why")
    for place in ("folder", "file"):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(own, "_search", lambda plan, estimator: known)
            assert choose(resolve(job_of()), folder=tmp_path / place).values == made.values


def test_a_compiler_and_triton_build_kernels(monkeypatch):
    for triton, compiler in ((True, True), (True, False), (False, True)):
        monkeypatch.setattr("toolkit.planner.own.find_spec", lambda name, found=triton: found or None)
        monkeypatch.setattr(
            "toolkit.planner.own.shutil.which", lambda name, found=compiler: "/bin/cc" if found else None
        )
        assert builds_kernels() == (triton and compiler)
