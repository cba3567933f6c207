"""A migrated job says the same: what it emits equals the originals, as transformers, Accelerate and DeepSpeed themselves read both."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import yaml
from transformers import TrainingArguments
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

import toolkit as tk
from toolkit.migration.migrate import migrate

FILES = Path(__file__).with_name("files")
# Fields of TrainingArguments by which a run learns; the folder and the like are compared by the golden jobs.
LEARNING = (
    *(
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "learning_rate",
        "lr_scheduler_type",
        "lr_scheduler_kwargs",
    ),
    *(
        "warmup_steps",
        "max_steps",
        "num_train_epochs",
        "weight_decay",
        "adam_beta1",
        "adam_beta2",
        "adam_epsilon",
        "max_grad_norm",
    ),
    *(
        "bf16",
        "fp16",
        "seed",
        "save_steps",
        "save_total_limit",
        "logging_steps",
        "output_dir",
        "gradient_checkpointing",
    ),
)
CARD = {"gpu": "h100-sxm-80gb", "model": "llama-3.2-1b"}


class Ranks:
    """TrainingArguments as each of `size` ranks sees them; on this one machine world_size would be 1."""

    def __init__(self, arguments, size):
        self.__dict__.update(_arguments=arguments, world_size=size)

    def __getattr__(self, name):
        return getattr(self._arguments, name)


def read(given, config, size):
    """Return TrainingArguments, and the DeepSpeed configuration that Trainer makes of a file together with them."""
    arguments = TrainingArguments(**{**given, "bf16": False, "fp16": False, "use_cpu": True})
    arguments.bf16, arguments.fp16 = given.get("bf16", False), given.get("fp16", False)
    processed = HfTrainerDeepSpeedConfig(config)
    processed.trainer_config_process(Ranks(arguments, size))
    return arguments, processed.config


def meaning(arguments, config):
    """Return what a DeepSpeed configuration means for the run, with Trainer's arguments where it leaves them the optimizer."""
    zero = config["zero_optimization"]
    params = config.get("optimizer", {}).get("params", {})
    devices = [zero.get(f"offload_{part}", {}).get("device", "none") for part in ("optimizer", "param")]
    return {
        "batch": [
            config[key] for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
        ],
        "clip": config.get("gradient_clipping", 0.0),
        "precision": [bool(config.get(dtype, {}).get("enabled")) for dtype in ("bf16", "fp16")],
        "stage": zero["stage"],
        "offload": [device or "none" for device in devices],
        "adam": [
            params.get("lr", arguments.learning_rate),
            list(params.get("betas", [arguments.adam_beta1, arguments.adam_beta2])),
            params.get("eps", arguments.adam_epsilon),
            params.get("weight_decay", arguments.weight_decay),
        ],
    }


@pytest.mark.parametrize("config", ["zero2.json", "zero3-auto.json", "zero3.json"])
def test_trainer_with_deepspeed(config, tmp_path, monkeypatch):
    shutil.copytree(FILES, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    given = json.loads(Path("trainer-arguments.json").read_text())
    file = json.loads(Path(config).read_text())
    if "scheduler" in file:  # a file's schedule wins over Trainer's: both say the same here
        given["lr_scheduler_type"] = "constant_with_warmup"
        Path("trainer-arguments.json").write_text(json.dumps(given))
    found = migrate(["trainer-arguments.json", config], gpus_per_node=8, **CARD)
    assert not found.problems
    plan = tk.resolve(found.job())
    ours = plan.training_arguments()
    our_config = ours.pop("deepspeed")
    theirs, their_config = read(given, file, 8)
    mine, my_config = read(ours, our_config, 8)
    assert {key: getattr(mine, key) for key in LEARNING} == {key: getattr(theirs, key) for key in LEARNING}
    assert meaning(mine, my_config) == meaning(theirs, their_config)
    for key in ("overlap_comm", "sub_group_size", "reduce_bucket_size", "contiguous_gradients"):
        if isinstance(value := file["zero_optimization"].get(key), int | float):
            assert my_config["zero_optimization"][key] == value, key


def test_trainer_with_accelerate(tmp_path, monkeypatch):
    from accelerate.commands.config.config_args import load_config_from_file

    shutil.copytree(FILES, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    found = migrate(["trainer-arguments.json", "accelerate-deepspeed.yaml"], **CARD)
    assert not found.problems
    plan = tk.resolve(found.job())
    emitted = plan.accelerate_config(deepspeed_config_file="ds.json")
    Path("emitted.yaml").write_text(yaml.safe_dump(emitted))
    theirs, mine = load_config_from_file("accelerate-deepspeed.yaml"), load_config_from_file("emitted.yaml")
    for key in ("num_machines", "num_processes", "distributed_type", "main_process_port"):
        assert getattr(theirs, key) == getattr(mine, key), key
    said, config = theirs.deepspeed_config, plan.deepspeed_config("accelerate")
    zero = config["zero_optimization"]
    assert zero["stage"] == said["zero_stage"]
    assert zero["offload_optimizer"]["device"] == said["offload_optimizer_device"]
    assert "offload_param" not in zero
    assert said["offload_param_device"] == "none"
    assert config["gradient_accumulation_steps"] == said["gradient_accumulation_steps"]
    assert config["gradient_clipping"] == said["gradient_clipping"]
    assert config["bf16"]["enabled"]
    assert theirs.mixed_precision == "bf16"


def test_trainer_with_fsdp_of_accelerate(tmp_path, monkeypatch):
    from accelerate.commands.config.config_args import load_config_from_file

    shutil.copytree(FILES, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    found = migrate(["trainer-arguments.json", "accelerate-fsdp.yaml"], **CARD)
    assert not found.problems
    plan = tk.resolve(found.job())
    Path("emitted.yaml").write_text(yaml.safe_dump(plan.accelerate_config(deepspeed_config_file="unused")))
    theirs, mine = load_config_from_file("accelerate-fsdp.yaml"), load_config_from_file("emitted.yaml")
    for key in ("num_machines", "num_processes", "distributed_type", "mixed_precision"):
        assert getattr(theirs, key) == getattr(mine, key), key
    for key in (
        "fsdp_version",
        "fsdp_reshard_after_forward",
        "fsdp_offload_params",
        "fsdp_auto_wrap_policy",
        "fsdp_cpu_ram_efficient_loading",
    ):
        assert theirs.fsdp_config[key] == mine.fsdp_config[key], key


def test_a_deepspeed_file_alone(tmp_path, monkeypatch):
    from deepspeed.runtime.config import DeepSpeedConfig
    from ranks import one_rank

    shutil.copytree(FILES, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    found = migrate("zero3.json", **CARD)
    assert not found.problems
    plan = tk.resolve(found.job())
    config = plan.deepspeed_config("toolkit")

    class Eight:
        get_data_parallel_world_size = staticmethod(lambda: 8)

    original = json.loads(Path("zero3.json").read_text())
    del original["elasticity"]  # which this DeepSpeed refuses, even when it is disabled
    with one_rank():
        theirs, mine = DeepSpeedConfig(original, mpu=Eight), DeepSpeedConfig(config, mpu=Eight)
    for key in (
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
        "zero_optimization_stage",
    ):
        assert getattr(theirs, key) == getattr(mine, key), key
    assert theirs.bfloat16_config.enabled == mine.bfloat16_config.enabled
    for key in (
        "overlap_comm",
        "sub_group_size",
        "reduce_bucket_size",
        "prefetch_bucket_size",
        "param_persistence_threshold",
    ):
        assert getattr(theirs.zero_config, key) == getattr(mine.zero_config, key), key
    params = {key: value for key, value in mine.optimizer_params.items() if key != "torch_adam"}
    assert params == theirs.optimizer_params
    assert (mine.optimizer_name, plan.job.train.lr_scheduler_type) == (theirs.optimizer_name, "constant_with_warmup")


@pytest.fixture
def unresolved_types():
    """Restores the types of the argument classes' fields, which a parser replaces by the classes that they name."""
    from trl import ModelConfig, ScriptArguments, SFTConfig

    fields = [
        field
        for kind in (ModelConfig, ScriptArguments, SFTConfig, TrainingArguments)
        for field in dataclasses.fields(kind)
    ]
    before = [field.type for field in fields]
    yield
    for field, kind in zip(fields, before, strict=True):
        field.type = kind


@pytest.mark.usefixtures("unresolved_types")
def test_trl_reads_the_same_file(tmp_path, monkeypatch):
    """TRL's own parser and this one agree on the keys of a file, the defaults of what it leaves out included."""
    from trl import ModelConfig, ScriptArguments, SFTConfig, TrlParser

    shutil.copytree(FILES, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    given = yaml.safe_load(Path("trl-sft.yaml").read_text())
    on_cpu = {
        key: value
        for key, value in given.items()
        if key not in ("deepspeed", "bf16", "use_liger_kernel", "report_to", "warmup_ratio")
    }
    arguments = TrlParser((ScriptArguments, SFTConfig, ModelConfig)).parse_dict(
        {**on_cpu, "bf16": False, "use_cpu": True}
    )
    script, training, model = arguments
    job = migrate("trl-sft.yaml", gpu="h100-sxm-80gb").job()
    assert (job.model.name, job.data.train, job.data.split) == (
        model.model_name_or_path,
        script.dataset_name,
        script.dataset_train_split,
    )
    assert (job.train.sequence_length, job.train.seed, job.train.logging_steps) == (
        training.max_length,
        training.seed,
        training.logging_steps,
    )
    assert (job.train.learning_rate, job.train.gradient_checkpointing) == (
        training.learning_rate,
        training.gradient_checkpointing,
    )
    assert (job.data.packing, training.packing, training.packing_strategy) == ("separated", True, "bfd_split")
    assert (job.data.loss_on, training.assistant_only_loss) == ("assistant", True)
    assert job.train.per_device_train_batch_size == training.per_device_train_batch_size
