"""An Accelerate configuration given for a DeepSpeed file: read as Accelerate hands it to DeepSpeed."""

from __future__ import annotations

import json

import pytest
import yaml

from toolkit.deepspeed_spec.user_file import read_user_config
from toolkit.errors import SpecError

# What training tools publish for `accelerate launch --config_file`.
PUBLISHED = {
    "compute_environment": "LOCAL_MACHINE",
    "debug": False,
    "deepspeed_config": {
        "deepspeed_multinode_launcher": "standard",
        "offload_optimizer_device": "none",
        "offload_param_device": "none",
        "zero3_init_flag": True,
        "zero3_save_16bit_model": True,
        "zero_stage": 3,
    },
    "distributed_type": "DEEPSPEED",
    "downcast_bf16": "no",
    "machine_rank": 0,
    "main_training_function": "main",
    "mixed_precision": "bf16",
    "num_machines": 1,
    "num_processes": 8,
    "rdzv_backend": "static",
    "same_network": True,
    "tpu_env": [],
    "use_cpu": False,
}


def file_of(folder, document, *, section=None):
    path = folder / "accelerate.yaml"
    path.write_text(
        yaml.safe_dump({**document, "deepspeed_config": {**document["deepspeed_config"], **(section or {})}})
    )
    return path


@pytest.mark.parametrize(
    ("section", "precision"),
    [
        ({}, "bf16"),
        ({"zero_stage": 2, "gradient_accumulation_steps": 4}, "fp16"),
        ({"zero_stage": 1, "gradient_clipping": 0.5}, "no"),
        ({"offload_optimizer_device": "cpu", "offload_param_device": "cpu"}, "bf16"),
        ({"offload_optimizer_device": "nvme", "offload_optimizer_nvme_path": "/local"}, "bf16"),
    ],
)
def test_it_is_what_accelerate_makes_of_it(tmp_path, monkeypatch, section, precision):
    from accelerate.utils import DeepSpeedPlugin

    path = file_of(tmp_path, PUBLISHED | {"mixed_precision": precision}, section=section)
    # What `accelerate launch` exports of the section (accelerate utils/launch.py prepare_deepspeed_cmd_env).
    stated = PUBLISHED["deepspeed_config"] | section
    for key, value in stated.items():
        monkeypatch.setenv(
            f"ACCELERATE_{'DEEPSPEED_' if key[:8] not in ('gradient', 'deepspee') else ''}{key.upper()}", str(value)
        )
    plugin = DeepSpeedPlugin()
    plugin.set_mixed_precision(precision)
    theirs = {key: value for key, value in plugin.deepspeed_config.items() if key != "steps_per_print"}
    theirs["fp16"].pop("auto_cast", None)
    assert read_user_config(path).config == read_user_config(theirs).config


def test_what_it_says_of_processes_is_the_jobs(tmp_path):
    path = file_of(tmp_path, PUBLISHED, section={"zero3_init_flag": False, "zero_stagee": 2})
    notes = read_user_config(path).notes
    assert notes == (
        "accelerate.yaml is a configuration of Accelerate: what DeepSpeed is given of it is estimated; cards and nodes are the job's",
        "accelerate.yaml: zero3_init_flag=false, which --without-zero-init estimates",
        "accelerate.yaml: Accelerate does not read deepspeed_config.zero_stagee",
    )


def test_a_deepspeed_file_that_it_names_is_read(tmp_path):
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 1}}))
    named = {"deepspeed_config_file": str(tmp_path / "ds.json"), "zero3_init_flag": False}
    path = tmp_path / "accelerate.yaml"
    path.write_text(yaml.safe_dump({"distributed_type": "DEEPSPEED", "deepspeed_config": named}))
    assert read_user_config(path).config == {"zero_optimization": {"stage": 1}}
    path.write_text(
        yaml.safe_dump({"distributed_type": "DEEPSPEED", "deepspeed_config": {"deepspeed_config_file": "missing.json"}})
    )
    with pytest.raises(SpecError, match=r"missing\.json does not exist"):
        read_user_config(path)


@pytest.mark.parametrize(
    ("change", "code", "said"),
    [
        ({"distributed_type": "FSDP"}, "ACCELERATE_FILE", "without DeepSpeed: distributed_type=FSDP"),
        ({"deepspeed_config": None}, "ACCELERATE_FILE", r"deepspeed_config=None\. Write its section deepspeed_config"),
        ({"deepspeed_config": {"zero_stage": 7}}, "DEEPSPEED_VALUE", "zero_optimization.stage=7"),
        ({"deepspeed_config": {"offload_param_device": None}}, "DEEPSPEED_VALUE", "offload_param.device=None"),
        (
            {"parallelism_config": {"parallelism_config_cp_size": 2}},
            "ESTIMATE_UNSUPPORTED",
            "parallelism_config_cp_size=2",
        ),
    ],
)
def test_what_it_asks_for_in_vain(tmp_path, change, code, said):
    path = tmp_path / "accelerate.yaml"
    path.write_text(yaml.safe_dump(PUBLISHED | change))
    with pytest.raises(SpecError, match=said) as caught:
        read_user_config(path)
    assert caught.value.codes == (code,)


@pytest.mark.parametrize(
    "text", ["model: gpt2\ntrain: {precision: bf16}\n", "zero_optimization: {stage: 2}\n", "- 1\n", "a: ["]
)
def test_another_yaml_file_is_no_configuration(tmp_path, text):
    path = tmp_path / "ds.yaml"
    path.write_text(text)
    with pytest.raises(SpecError, match=r"ds\.yaml") as caught:
        read_user_config(path)
    assert caught.value.codes in (("DEEPSPEED_SYNTAX",), ("YAML_NOT_MAPPING",), ("YAML_SYNTAX",))
