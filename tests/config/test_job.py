from pathlib import Path
from typing import Any

import numpy as np
import pytest

from toolkit.config.job import Cluster, Data, Fp8, Job, Lora, Model, Parallel, Train
from toolkit.errors import SpecError

CPU = Cluster(gpu="cpu")


def test_a_model_name_alone_is_a_model():
    job = Job(model="org/name", cluster=Cluster(gpu="cpu"))
    assert job.model.name == "org/name"
    assert job == Job.model_validate({"model": {"name": "org/name"}, "cluster": {"gpu": "cpu"}})


def test_num_ranks_is_one_process_a_card():
    assert Cluster(gpu="cpu", gpus_per_node=4, nodes=3).num_ranks == 12


@pytest.mark.parametrize(
    ("ranks", "parallel", "sizes"),
    [(8, {}, (1, 8)), (8, {"tensor": 2, "pipeline": 2}, (4, 2)), (2, {"tensor": 4}, (4, 0))],
)
def test_ranks_that_share_a_model_and_its_replicas(ranks, parallel, sizes):
    job = Job.model_validate({"model": "m", "cluster": {"gpu": "cpu", "gpus_per_node": ranks}, "parallel": parallel})
    assert (job.model_ranks, job.dp_size) == sizes


def test_sections_that_a_job_leaves_out_have_their_defaults_and_are_not_written():
    assert (Train().adapters, Train().float8) == (Lora(), Fp8())
    given = Train(lora=Lora(r=4), fp8=Fp8(recipe="rowwise"))
    assert (given.adapters.r, given.float8.recipe) == (4, "rowwise")
    assert Train().model_dump(exclude_unset=True) == {}


def test_a_job_is_frozen():
    job = Job(model="m", cluster=Cluster(gpu="cpu"))
    for section, name, key in ((job.train, "seed", "train.seed"), (job, "deepspeed", "deepspeed"), (job, "new", "new")):
        with pytest.raises(SpecError) as caught:
            setattr(section, name, 1)
        assert [(problem.code, problem.key) for problem in caught.value.problems] == [("JOB_FROZEN", key)]
        assert f'job.with_({{"{key}": ...}})' in str(caught.value)


@pytest.mark.parametrize(
    ("section", "values"),
    [
        (Train, {"sequence_length": 0}),
        (Train, {"sequence_length": True}),
        (Train, {"sequence_length": 8.5}),
        (Train, {"learning_rate": 0}),
        (Train, {"learning_rate": float("inf")}),
        (Train, {"learning_rate": float("nan")}),
        (Train, {"learning_rate": True}),
        (Train, {"gradient_checkpointing": 1.5}),
        (Train, {"gradient_checkpointing": 2}),
        (Train, {"gradient_checkpointing": "yes"}),
        (Train, {"torch_compile": 1}),
        (Train, {"adam_beta1": 1}),
        (Train, {"max_grad_norm": -1}),
        (Train, {"precision": "bfloat16"}),
        (Train, {"optimizer": "AdamW"}),
        (Train, {"method": "dora"}),
        (Train, {"foreign": 1}),
        (Parallel, {"zero_stage": 4}),
        (Parallel, {"zero_stage": False}),
        (Parallel, {"offload": "cpu"}),
        (Parallel, {"offload_ratio": 1}),
        (Cluster, {"gpu": ""}),
        (Cluster, {"gpus_per_node": 0, "gpu": "cpu"}),
        (Cluster, {"master_port": 80, "gpu": "cpu"}),
    ],
)
def test_refuses(section, values):
    with pytest.raises(SpecError) as caught:
        section(**values)
    [problem] = caught.value.problems
    assert problem.key == f"{section.__name__.lower()}.{next(iter(values))}"


@pytest.mark.parametrize(("value", "kind"), [(True, bool), (False, bool), (0.25, float), (1, float), (0, float)])
def test_gradient_checkpointing_is_a_switch_or_a_share(value, kind):
    given = Train(gradient_checkpointing=value).gradient_checkpointing
    assert given == value
    assert isinstance(given, kind)


def test_a_dump_of_what_was_set_reads_back_equal():
    job = Job.model_validate(
        {
            "model": {"name": "m", "init": "random"},
            "cluster": {"gpu": "cpu", "nvme_path": "/local"},
            "train": {"method": "lora", "lora": {"r": 4, "target_modules": ["q_proj"]}, "report_to": ["tensorboard"]},
            "data": {"train": ["a.jsonl", "b.jsonl"], "validation_fraction": 0.1},
            "parallel": {"zero_stage": 1},
            "deepspeed": {"zero_optimization": {"reduce_bucket_size": 5}},
        }
    )
    dump = job.model_dump(mode="json", exclude_unset=True)
    assert Job.model_validate(dump) == job
    assert Job.model_validate(dump).train.model_fields_set == {"method", "lora", "report_to"}


@pytest.mark.parametrize(
    ("make", "code", "key", "words"),
    [
        (lambda: Train(bf16=True), "KEY_OTHER_TOOL", "train.bf16", "Here it is train.precision: bf16"),
        (lambda: Train(max_steps="many"), "KEY_VALUE", "train.max_steps", "train.max_steps='many' (str) is not valid"),
        (
            lambda: Parallel(dp_size=2),
            "KEY_OTHER_TOOL",
            "parallel.dp_size",
            "Here it is cluster.gpus_per_node × cluster.nodes",
        ),
        (lambda: Cluster(gpus_per_node=2), "KEY_MISSING", "cluster.gpu", "cluster.gpu is missing"),
        (lambda: Cluster(gpu="cpu", node=2), "KEY_UNKNOWN", "cluster.node", "Did you mean cluster.nodes"),
        (lambda: Train(optimizer="galore_adamw"), "KEY_VALUE", "train.optimizer", "GaLore and APOLLO are not offered"),
        (lambda: Data(train=3), "KEY_VALUE", "data.train", "data.train=3 (int) is not valid"),
        (lambda: Lora(lora_dropout=1), "KEY_VALUE", "train.lora.lora_dropout", "less than 1"),
        (lambda: Fp8(recipe="row"), "KEY_VALUE", "train.fp8.recipe", "rowwise"),
        (lambda: Model(), "KEY_MISSING", "model.name", "model.name is missing"),
        (lambda: Data(eval={"few": {}}), "KEY_MISSING", "data.eval.few.path", "data.eval.few.path is missing"),
        (
            lambda: Data(eval={"few": {"path": "a", "weight": 2}}),
            "KEY_UNKNOWN",
            "data.eval.few.weight",
            "is not a key of a job",
        ),
        (lambda: Data(eval={"a few": "a.jsonl"}), "KEY_VALUE", "data.eval.a few", "is not valid"),
        (lambda: Train(push_to_hub="me/my model"), "KEY_VALUE", "train.push_to_hub", "`name` or `owner/name`"),
        (lambda: Data(eval={}), "KEY_VALUE", "data.eval", "is not valid"),
        (lambda: Job(model="m", cluster="cpu"), "KEY_VALUE", "cluster", "Write cluster as a section"),
        (lambda: Job(model="m", cluster=CPU, train=CPU), "KEY_VALUE", "train", "in Python its own class or a dict"),
        (lambda: Job(model=None, cluster=CPU), "KEY_VALUE", "model", "Write the model's name"),
        (lambda: Job.model_validate("job.yaml"), "KEY_VALUE", "", "the job='job.yaml' (str) is not valid"),
        (lambda: Cluster("h100-sxm-80gb"), "ARGUMENT", "Cluster", "Write Cluster(gpu=...)"),
        (lambda: Job("llama-3.1-8b"), "ARGUMENT", "Job", "Write Job(model=...)"),
    ],
)
def test_a_section_made_in_python_says_what_a_job_file_says(make, code, key, words):
    with pytest.raises(SpecError) as caught:
        make()
    assert [(problem.code, problem.key) for problem in caught.value.problems] == [(code, key)]
    assert words in str(caught.value)


def test_all_faults_of_a_job_made_of_mappings_are_told_at_once():
    with pytest.raises(SpecError) as caught:
        Job(model="m", cluster={"gpu": 3}, train={"bf16": 1, "lora": {"r": 0}}, paralell={})
    assert sorted(problem.key for problem in caught.value.problems) == [
        "cluster.gpu",
        "paralell",
        "train.bf16",
        "train.lora.r",
    ]


def test_a_path_stands_wherever_its_text_may():
    home = Path("models") / "mine"
    job = Job(
        model=home,
        cluster=Cluster(gpu="cpu", nvme_path="/local"),
        train=Train(output_dir="runs"),
        data=Data(train=[home / "a.jsonl", "b.jsonl"], eval=home, chat_template=home),
    )
    assert job.model.name == Model(name=home).name == job.data.eval == job.data.chat_template == "models/mine"
    assert job.data.train == ("models/mine/a.jsonl", "b.jsonl")
    assert Job.model_validate(job.model_dump(mode="json", exclude_unset=True)) == job


SMALL = Job(model="m", cluster=CPU, train=Train(max_steps=5, seed=1), deepspeed={"a": {"b": 1, "c": 2}})


@pytest.mark.parametrize(
    ("changes", "sections"),
    [
        (("train.max_steps=8", "parallel.zero_stage=3"), {}),
        (({"train.max_steps": 8, "parallel.zero_stage": 3},), {}),
        (({"train": {"max_steps": 8}}, "parallel.zero_stage=3"), {}),
        ((), {"train": {"max_steps": 8}, "parallel": Parallel(zero_stage=3)}),
        ((), {"train": Train(max_steps=8, seed=1), "parallel": {"zero_stage": 3}}),
    ],
)
def test_a_job_with_other_values_is_another_job(changes, sections):
    before = SMALL.model_dump()
    made = SMALL.with_(*changes, **sections)
    assert made == Job(**SMALL.written() | {"train": {"max_steps": 8, "seed": 1}, "parallel": {"zero_stage": 3}})
    assert SMALL.model_dump() == before


def test_none_leaves_a_key_open_and_a_mapping_keeps_what_it_does_not_name():
    made = SMALL.with_({"train.seed": None, "model.init": "random"}, deepspeed={"a": {"b": None, "d": 3}}, data=None)
    assert made.train.model_fields_set == {"max_steps"}
    assert (made.model.name, made.model.init) == ("m", "random")
    assert made.deepspeed == {"a": {"c": 2, "d": 3}}
    assert SMALL.deepspeed == {"a": {"b": 1, "c": 2}}
    assert SMALL.with_(model="other").model == Model(name="other")
    assert SMALL.with_() == SMALL


CYCLE: dict[str, Any] = {}
CYCLE["again"] = CYCLE


@pytest.mark.parametrize(
    ("changes", "sections", "code", "key"),
    [
        ((), {"paralell": {"zero_stage": 3}}, "KEY_UNKNOWN", "paralell"),
        (({"train.bf16": True},), {}, "KEY_OTHER_TOOL", "train.bf16"),
        (("train.max_steps=many",), {}, "KEY_VALUE", "train.max_steps"),
        ((), {"train": 3}, "KEY_VALUE", "train"),
        ((), {"train": Data(train="x")}, "KEY_VALUE", "train"),
        (({"cluster.gpu.name": 3},), {}, "KEY_VALUE", "cluster.gpu.name"),
        (({"cluster.gpu.name.x": 3},), {}, "SET_SYNTAX", "cluster.gpu.name.x"),
        (("train.max_steps",), {}, "SET_SYNTAX", "train.max_steps"),
        (({"train..seed": 3},), {}, "SET_SYNTAX", "train..seed"),
        ((".".join("a" * 900) + "=1",), {}, "SET_SYNTAX", ".".join("a" * 100) + "."),
        ((), {"deepspeed": CYCLE}, "SET_SYNTAX", "again"),
        ((3,), {}, "ARGUMENT", "changes"),
    ],
)
def test_a_change_that_cannot_be_is_told_as_in_a_job_file(changes, sections, code, key):
    with pytest.raises(SpecError) as caught:
        SMALL.with_(*changes, **sections)
    assert [(problem.code, problem.key) for problem in caught.value.problems] == [(code, key)]


def test_what_came_into_a_job_past_its_checks_is_found_by_a_second_look():
    train = SMALL.train.model_copy(update={"max_steps": "many"})
    changed = SMALL.model_copy(update={"paralell": Parallel(), "train": train})
    with pytest.raises(SpecError) as caught:
        changed.checked()
    assert {problem.key for problem in caught.value.problems} == {"paralell", "train.max_steps"}
    assert SMALL.checked() == SMALL
    assert SMALL.checked().train.model_fields_set == SMALL.train.model_fields_set


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(np.array([1, 2]), id="array"),
        pytest.param(np.array(2), id="scalar"),
        pytest.param(iter([]), id="empty-iterator"),
        pytest.param(iter([1]), id="iterator"),
        pytest.param({1, 2}, id="set"),
    ],
)
def test_values_that_no_file_can_hold_are_problems_too(wrong: Any) -> None:
    with pytest.raises(SpecError) as caught:
        Data(train="a.jsonl", eval=wrong)
    assert set(caught.value.codes) == {"KEY_VALUE"}
