import pytest
from pydantic import ValidationError

from toolkit.spec.job import Cluster, Job, Parallel, Train


def test_a_model_name_alone_is_a_model():
    job = Job(model="org/name", cluster=Cluster(gpu="cpu"))
    assert job.model.name == "org/name"
    assert job == Job.model_validate({"model": {"name": "org/name"}, "cluster": {"gpu": "cpu"}})


def test_num_ranks_is_one_process_a_card():
    assert Cluster(gpu="cpu", gpus_per_node=4, nodes=3).num_ranks == 12


def test_a_job_is_frozen():
    job = Job(model="m", cluster=Cluster(gpu="cpu"))
    with pytest.raises(ValidationError):
        job.train.seed = 1
    with pytest.raises(ValidationError):
        job.deepspeed = {}


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
        (Cluster, {"gpu": "cpu", "gpus_per_node": 0}),
        (Cluster, {"gpu": "cpu", "master_port": 80}),
    ],
)
def test_refuses(section, values):
    with pytest.raises(ValidationError):
        section(**values)


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
