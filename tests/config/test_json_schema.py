import json
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft202012Validator

from toolkit.config.job import EvalSource
from toolkit.config.json_schema import job_json_schema
from toolkit.config.loader import parse_job
from toolkit.config.schema import known_keys
from toolkit.errors import SpecError

ROOT = Path(__file__).parents[2]
SCHEMA = job_json_schema()
VALIDATOR = Draft202012Validator(SCHEMA)
JOBS = sorted((ROOT / "configs" / "jobs").glob("*.yaml"))
SMALL = {"model": "m", "cluster": {"gpu": "cpu"}}


def sections():
    return {"": SCHEMA, **SCHEMA["$defs"]}


def test_the_file_is_what_the_command_prints():
    written = json.loads((ROOT / "configs" / "job.schema.json").read_text("utf-8"))
    assert written == SCHEMA, "toolkit validate --schema > configs/job.schema.json"


def test_it_is_a_schema_in_which_each_key_is_described():
    Draft202012Validator.check_schema(SCHEMA)
    for section in sections().values():
        assert section["additionalProperties"] is False
        for key in section["properties"].values():
            assert key["description"].endswith(".")
            assert "\n" not in key["description"]
    counted = sum(len(section["properties"]) for section in sections().values())
    below_names = len(EvalSource.model_fields)  # of data.eval.NAME, which is no key that can be listed
    assert counted - below_names == len(known_keys())


def test_it_holds_no_null_and_no_title_that_repeats_a_key():
    text = json.dumps(SCHEMA)
    assert "null" not in text
    assert text.count('"title"') == 1


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.stem)
def test_every_job_of_the_repository_fits(path):
    VALIDATOR.validate(yaml.safe_load(path.read_text("utf-8")))


@pytest.mark.parametrize(
    "values",
    [
        {"model": {"name": "m", "init": "random"}},
        {"cluster": {"gpu": {"name": "x", "memory_gib": 40, "compute_capability": 8.9}}},
        {"cluster": {"gpu": {"name": "x", "memory_gib": 40, "compute_capability": "gfx942"}}},
        {"train": {"report_to": "none"}},
        {"train": {"report_to": "tensorboard"}},
        {"train": {"report_to": ["tensorboard"]}},
        {"train": {"gradient_checkpointing": 0.5, "max_steps": 1e3}},
        {"train": {"gradient_checkpointing": True, "lora": {"target_modules": ["q_proj"]}}},
        {"data": {"train": ["a.jsonl", "b.jsonl"], "packing": "padding_free"}},
        {"parallel": {"partition": [16, 16]}},
        {"parallel": {"partition": "uniform"}},
        {"train": {"max_length": 512, "optim": "adamw_torch_fused"}, "parallel": {"tp": 2}},
        {"deepspeed": {"zero_optimization": {"reduce_bucket_size": 5e8}}},
    ],
    ids=str,
)
def test_what_the_reader_takes_fits(values):
    parse_job(SMALL | values)
    VALIDATOR.validate(SMALL | values)


def test_a_required_key_may_have_its_other_name():
    for name in ("model", "model_name_or_path"):
        VALIDATOR.validate({name: "m", "cluster": {"gpu": "cpu"}})
    assert not VALIDATOR.is_valid({"cluster": {"gpu": "cpu"}})


@pytest.mark.parametrize(
    "values",
    [
        {"extra": 1},
        {"model": 3},
        {"max_length": 512},
        {"train": {"max_length": 0}},
        {"train": {"optim": "ademamix"}},
        {"cluster": {}},
        {"cluster": {"gpu": "cpu", "nodes": 0}},
        {"cluster": {"gpu": {"memory_gib": 40}}},
        {"train": {"sequence_lenght": 5}},
        {"train": {"precision": "tf32"}},
        {"train": {"report_to": "comet_ml"}},
        {"train": {"lora": {"r": 0}}},
        {"data": {"train": []}},
        {"parallel": {"zero_stage": 4}},
        {"parallel": {"partition": "even"}},
    ],
    ids=str,
)
def test_what_the_reader_refuses_does_not_fit(values):
    with pytest.raises(SpecError):
        parse_job(SMALL | values)
    assert not VALIDATOR.is_valid(SMALL | values)
