import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from plan_jobs import CPU, job_of, jobs, plan_of, resolved

from toolkit.errors import PlanError, RunError, SpecError
from toolkit.planning.plan import SCHEMA_VERSION, Plan


@pytest.fixture(scope="module")
def plan():
    return plan_of(
        nodes=2,
        nvme_path="/local",
        train={
            "method": "lora",
            "lora": {"r": 4, "target_modules": ["q_proj"]},
            "report_to": ["tensorboard"],
            "seed": 2**32 - 1,
        },
        data={"train": ["a.jsonl"], "validation_fraction": 0.1},
        parallel={"offload": "full-nvme"},
        deepspeed={"zero_optimization": {"sub_group_size": 1000}, "aio": {"queue_depth": 4}},
    )


def reread(plan):
    return Plan.from_dict(json.loads(json.dumps(plan.to_dict(), allow_nan=False)))


def unreadable(value):
    with pytest.raises(PlanError) as caught:
        Plan.from_dict(value)
    assert caught.value.codes == ("PLAN_UNREADABLE",)
    return caught.value.problems[0].message


def test_a_plan_reads_back_equal(plan):
    assert reread(plan) == plan
    assert reread(plan).to_dict() == plan.to_dict()
    assert reread(plan).explain() == plan.explain()
    assert reread(plan).job.train.model_fields_set == plan.job.train.model_fields_set


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(job=jobs())
def test_any_plan_reads_back_equal_with_the_same_configs(job):
    try:
        plan = resolved(job)
    except PlanError:
        return
    again = reread(plan)
    assert again == plan
    assert again.deepspeed_config() == plan.deepspeed_config()
    assert again.to_dict() == plan.to_dict()


def test_a_plan_file_is_written_whole_and_read(plan, tmp_path):
    path = tmp_path / "new" / "plan.json"
    plan.save(path)
    plan.save(path)
    assert Plan.load(path) == plan
    assert [entry.name for entry in path.parent.iterdir()] == ["plan.json"]


def test_writers_of_one_process_id_do_not_meet(plan, tmp_path):
    """As ranks of two machines on a shared disk; here they are threads."""
    path = tmp_path / "plan.json"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: plan.save(path), range(80)))
    assert Plan.load(path) == plan
    assert [entry.name for entry in tmp_path.iterdir()] == ["plan.json"]


@pytest.mark.parametrize("key", ["schema_version", "job", "model", "gpu", "settings", "allocator", "choices"])
def test_a_missing_key(plan, key):
    value = plan.to_dict()
    del value[key]
    assert key in unreadable(value)


def test_foreign_keys_and_versions(plan):
    assert "extra" in unreadable({**plan.to_dict(), "extra": 1})
    assert f"this version reads {SCHEMA_VERSION}" in unreadable(
        {**plan.to_dict(), "schema_version": SCHEMA_VERSION + 1}
    )
    assert "schema_version=None" in unreadable({})
    assert "allocator" in unreadable({**plan.to_dict(), "allocator": "native"})


@pytest.mark.parametrize("section", ["job", "model", "gpu", "settings"])
def test_foreign_missing_and_mistyped_parts(plan, section):
    whole = plan.to_dict()
    unreadable({**whole, section: {**whole[section], "foreign": 1}})
    unreadable({**whole, section: {}})
    unreadable({**whole, section: None})
    unreadable({**whole, section: 3})


def test_mistyped_choices_and_batch(plan):
    whole = plan.to_dict()
    unreadable({**whole, "choices": [{"key": "a"}]})
    unreadable({**whole, "choices": 3})
    unreadable({**whole, "settings": {**whole["settings"], "batch": {"micro": 1}}})


@pytest.mark.parametrize("content", [b"", b"[1]", b"{", b"\xff", b"3"])
def test_a_file_that_is_no_plan(tmp_path, content):
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    with pytest.raises(PlanError) as caught:
        Plan.load(path)
    assert caught.value.codes == ("PLAN_UNREADABLE",)
    assert str(path) in caught.value.problems[0].message
    with pytest.raises(PlanError):
        Plan.load(tmp_path / "none.json")


def test_what_a_plan_knows(plan):
    assert (plan.grid.pp, plan.grid.dp, plan.grid.tp) == (1, 4, 1)
    assert plan.allocator == "expandable"
    assert str(plan.output_dir) == "runs/job"
    assert plan_of(gpu=CPU).allocator == "native"
    assert not plan.on_cpu
    assert plan.profile.name == "full-nvme"
    with pytest.raises(AttributeError):
        plan.choices = ()


def test_explain_begins_with_what_a_person_asks_first(plan):
    lines = plan.explain().splitlines()
    assert lines[0] == "quickstart-llama on 4 × h100-sxm-80gb"
    assert lines[1] == f"batch: {plan.settings.batch}"
    assert lines[2].startswith("offload full-nvme: ")
    assert len(lines) == 4 + len(plan.choices)


@pytest.mark.parametrize(
    ("sections", "torch_adam", "bf16_optimizer"),
    [
        ({}, False, False),
        ({"train": {"optimizer": "adamw_torch"}}, True, False),
        ({"gpu": CPU}, True, False),
        ({"gpu": CPU, "parallel": {"offload": "optimizer-cpu"}}, False, False),
        ({"gpu": CPU, "train": {"optimizer": "sgd"}}, False, False),
        ({"train": {"gradient_accumulation_dtype": "fp32"}, "parallel": {"zero_stage": 1}}, False, True),
        ({"train": {"gradient_accumulation_dtype": "fp32"}, "parallel": {"zero_stage": 1, "offload": "optimizer-cpu"}}, False, False),
        ({"train": {"gradient_accumulation_dtype": "fp32"}, "parallel": {"zero_stage": 2}}, False, False),
        ({"train": {"precision": "fp32"}, "parallel": {"zero_stage": 1}}, False, False),
    ],
)  # fmt: skip
def test_which_optimizer_classes_run(sections, torch_adam, bf16_optimizer):
    plan = plan_of(**sections)
    assert plan.uses_torch_adam == torch_adam
    assert (plan.optimizer_wrapper == "bf16") == bf16_optimizer


def test_equality_looks_at_every_value(plan):
    other = replace(plan, settings=replace(plan.settings, learning_rate=plan.settings.learning_rate * 2))
    assert other != plan


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("settings.sequence_length", -5, "Settings.sequence_length=-5"),
        ("settings.sequence_length", "128", "Settings.sequence_length='128'"),
        ("settings.zero_stage", 7, "Settings.zero_stage=7"),
        ("settings.precision", "int4", "Settings.precision='int4'"),
        ("settings.batch.micro", 0, "micro=0"),
        ("settings.batch.dp_size", 7, "4 data-parallel ranks, the settings 7"),
        ("settings.batch.micro", 77, "train.per_device_train_batch_size="),
        ("settings.sequence_length", 11, "train.sequence_length="),
        ("job.cluster.gpus_per_node", 8, "16 data-parallel ranks, the settings 4"),
        ("job.train.max_steps", 9, "train.max_steps=9 in the job"),
        ("model.hidden_size", "abc", "ModelSpec.hidden_size='abc'"),
        ("model.hidden_size", -1, "ModelSpec.hidden_size=-1"),
        ("model.origin", "moon", "ModelSpec.origin='moon'"),
        ("model.config", {}, "model_type is missing"),
        ("model.config", None, "None is not valid"),
        ("choices", {}, "is not valid"),
        ("choices", [{"key": 5, "value": 1, "source": "job", "reason": ""}], "key=5"),
        ("schema_version", True, "schema_version=True"),
        ("schema_version", 1.0, "schema_version=1.0"),
    ],
)
def test_an_edited_plan_is_refused(plan, path, value, says):
    edited = json.loads(json.dumps(plan.to_dict()))
    *parents, last = path.split(".")
    part = edited
    for parent in parents:
        part = part[parent]
    part[last] = value
    assert says in unreadable(edited)


def test_a_plan_nested_too_deep(tmp_path):
    (tmp_path / "plan.json").write_text('{"job": ' + "[" * 100_000)
    with pytest.raises(PlanError) as caught:
        Plan.load(tmp_path / "plan.json")
    assert "nested too deep" in caught.value.problems[0].message


@pytest.mark.parametrize(("value", "says"), [(float("nan"), "not JSON"), ("\ud800", "surrogates")])
def test_a_plan_with_what_cannot_be_written_again(plan, tmp_path, value, says):
    stored = plan.to_dict()
    stored["choices"][0]["value"] = value
    (tmp_path / "plan.json").write_text(json.dumps(stored))
    with pytest.raises(PlanError, match=says) as caught:
        Plan.load(tmp_path / "plan.json")
    assert caught.value.codes == ("PLAN_UNREADABLE",)


@pytest.mark.parametrize("name", [".", "/".join("a" * 1500)])
def test_a_place_where_no_file_can_be_written(plan, tmp_path, monkeypatch, pythons_recursion_limit, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RunError) as caught:
        plan.save(name)
    assert caught.value.codes == ("EMIT_UNWRITABLE",)
    assert not any(tmp_path.iterdir())


def test_a_failed_write_leaves_nothing(plan, tmp_path):
    (tmp_path / "plan.json").mkdir()
    with pytest.raises(RunError, match=r"plan\.json cannot be written") as caught:
        plan.save(str(tmp_path / "plan.json"))
    assert caught.value.codes == ("EMIT_UNWRITABLE",)
    assert [entry.name for entry in tmp_path.iterdir()] == ["plan.json"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda plan: replace(plan, job="no job"), "job='no job' is not a Job"),
        (lambda plan: replace(plan, settings=None), "settings=None is not a Settings"),
        (lambda plan: with_settings(plan, max_steps="many"), "settings.max_steps='many' is not valid"),
        (lambda plan: with_settings(plan, learning_rate=float("nan")), "settings.learning_rate=nan"),
        (lambda plan: with_settings(plan, batch=None), "settings"),
        (lambda plan: with_settings(plan, kernels=object()), "settings"),
    ],
)
def test_a_plan_of_parts_that_are_none_is_refused_when_it_is_made(plan, change, words):
    with pytest.raises(PlanError) as caught:
        change(plan)
    assert caught.value.codes == ("PLAN_UNREADABLE",)
    assert f"the plan was edited and is no longer consistent: {words}" in str(caught.value)
    assert "job.with_(" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda plan: with_settings(plan, zero_stage=1), "parallel.zero_stage=3 in the choices, 1 in the settings"),
        (lambda plan: replace(plan, choices=(3,)), "asdict"),
        (lambda plan: replace(plan, gpu=plan.gpu.model_copy(update={"memory_bytes": "x"})), "Gpu.memory_bytes='x'"),
        (lambda plan: replace(plan, model=replace(plan.model, hidden_size="x")), "ModelSpec.hidden_size='x'"),
        (lambda plan: replace(plan, job=job_of(ranks=8)), "data-parallel ranks"),
        # A line of commands.sh, if it were written.
        (lambda plan: replace(plan, model=replace(plan.model, name="a\nrm x")), "remove the control character"),
    ],
)
def test_a_plan_whose_parts_do_not_go_together_is_not_written(plan, change, words, tmp_path):
    with pytest.raises(PlanError) as caught:
        change(plan).save(tmp_path / "plan.json")
    assert caught.value.codes == ("PLAN_UNREADABLE",)
    assert words in str(caught.value)
    assert not any(tmp_path.iterdir())


def test_a_plan_with_a_job_that_was_changed_past_its_checks_is_not_written(plan, tmp_path):
    train = plan.job.train.model_copy(update={"max_steps": "many"})
    job = plan.job.model_copy(update={"paralell": {}, "train": train})
    with pytest.raises(SpecError) as caught:
        replace(plan, job=job).save(tmp_path / "plan.json")
    assert {(problem.code, problem.key) for problem in caught.value.problems} == {
        ("KEY_UNKNOWN", "paralell"),
        ("KEY_VALUE", "train.max_steps"),
    }


def with_settings(plan, **values):
    return replace(plan, settings=replace(plan.settings, **values))
