"""Each job in configs/jobs resolves offline, says how to run it, and its files parse in the libraries' own classes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from toolkit.artifacts.files import emit
from toolkit.cli.job_checks import check
from toolkit.config.job import Job
from toolkit.planning.resolve import resolve

ROOT = Path(__file__).parents[2]
JOBS = sorted((ROOT / "configs" / "jobs").glob("*.yaml"))


@pytest.fixture(autouse=True)
def offline_root(monkeypatch):
    """Jobs name their data relative to the repository's root, and need no network to be planned."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(params=JOBS, ids=lambda path: path.stem)
def path(request):
    return request.param


@pytest.fixture
def plan(path):
    return resolve(Job.from_yaml(path))


@pytest.fixture
def folder(plan, tmp_path):
    emit(plan, tmp_path)
    return tmp_path


@pytest.fixture
def shared(plan):
    """A plan that Trainer and Accelerate scripts can carry too."""
    if ours_alone(plan):
        pytest.skip("a job that they cannot run has no files for them, as another test says")
    return plan


def ours_alone(plan):
    """Stages, tensor ranks and tiles of feed-forward layers, which neither Trainer nor Accelerate has."""
    return plan.grid.tp * plan.grid.pp * plan.job.train.mlp_tiles > 1


def test_a_job_that_others_cannot_run_has_files_of_our_own_engine_alone(plan, folder):
    others = {"deepspeed-trainer.json", "training_arguments.json", "deepspeed-accelerate.json", "accelerate.yaml"}
    files = {file.name for file in folder.iterdir()}
    assert {"plan.json", "deepspeed.json", "commands.sh"} <= files
    assert files & others == (set() if ours_alone(plan) else others)


def test_there_are_jobs():
    assert len(JOBS) >= 6


def test_the_job_is_sound(path):
    verdict = check(Job.from_yaml(path))
    assert verdict.problems == ()
    assert verdict.plan is not None


def test_its_header_carries_its_commands(path):
    name = path.relative_to(ROOT)
    header = [line for line in path.read_text().splitlines() if line.startswith("#")]
    commands = [line for line in header if re.match(rf"# toolkit \w+ {re.escape(str(name))}", line)]
    assert len(commands) >= 2
    for key, value in re.findall(r"--set (\S+?)=(\S+)", "\n".join(commands)):
        if key in ("model", "model.name"):
            assert value == resolve(Job.from_yaml(path)).model.hub_id


def test_its_name_tells_the_truth(path, plan):
    words = path.stem.split("-")
    stated = [word for word in words if re.fullmatch(r"\d+x[a-z]\w*", word)]
    for word in stated:
        count, card = word.split("x", 1)
        assert (int(count), plan.gpu.name.startswith(card)) == (plan.job.cluster.num_ranks, True)
    for word in words:
        if word.startswith("zero"):
            assert plan.settings.zero_stage == int(word[4:])
        if word.startswith("tensor"):
            assert plan.grid.tp == int(word[6:])
        if word.startswith("pipeline"):
            assert plan.grid.pp == int(word[8:])
    assert ("lora" in words) == (plan.job.train.method == "lora")


def test_deepspeed_parses_its_files(plan, folder, monkeypatch):
    import deepspeed.comm
    from deepspeed.runtime.config import DeepSpeedConfig

    class Ranks:
        def get_data_parallel_world_size(self):
            return plan.grid.dp

    # DeepSpeed asks the process group for its rank before it asks the grid for its size; no group of 8 runs here.
    monkeypatch.setattr(deepspeed.comm, "get_rank", lambda: 0)
    for name in ("deepspeed.json", "deepspeed-trainer.json", "deepspeed-accelerate.json"):
        if ours_alone(plan) and name != "deepspeed.json":
            continue
        config = DeepSpeedConfig(str(folder / name), mpu=Ranks())
        batch = plan.settings.batch
        passes = batch.accumulation if plan.grid.pp > 1 else 1  # which our loop then runs by itself
        assert (config.train_batch_size * passes, config.train_micro_batch_size_per_gpu) == (batch.train, batch.micro)
        assert config.zero_config.stage == plan.settings.zero_stage
        assert config.gradient_clipping == plan.job.train.max_grad_norm
        assert config.bfloat16_config.enabled == (plan.settings.precision == "bf16")
        offload = config.zero_config.offload_optimizer
        assert (None if offload is None else offload.device) == plan.profile.optimizer


def test_accelerate_parses_its_yaml(shared, plan, folder):
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(folder / "accelerate.yaml"))
    assert config.distributed_type == "DEEPSPEED"
    assert config.num_processes == plan.grid.world_size
    named = json.loads(Path(config.deepspeed_config["deepspeed_config_file"]).read_text())
    assert named == plan.deepspeed_config("accelerate")
    assert config.use_cpu == plan.on_cpu


def test_trainer_finds_its_arguments_and_deepspeeds_equal(shared, plan, folder):
    from transformers import TrainingArguments

    class Arguments(TrainingArguments):
        @property
        def world_size(self):
            return plan.grid.world_size

    values = json.loads((folder / "training_arguments.json").read_text())
    # Trainer compares every shared value with the DeepSpeed file here; this machine has no card, hence use_cpu.
    arguments = Arguments(**(values | {"use_cpu": True, "bf16": values["bf16"]}))
    config = arguments.hf_deepspeed_config
    assert config.mismatches == []
    assert config.config["train_batch_size"] == plan.settings.batch.train
    assert arguments.learning_rate == plan.settings.learning_rate


def test_the_files_are_what_their_suffixes_say(folder):
    for file in folder.glob("*.json"):
        json.loads(file.read_text())
    for file in folder.glob("*.yaml"):
        yaml.safe_load(file.read_text())


@pytest.mark.parametrize("name", ["questions.jsonl", "conversations.jsonl"])
def test_the_example_data_is_small_and_readable(name):
    file = ROOT / "examples" / "data" / name
    records = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert len(records) >= 10
    assert file.stat().st_size < 20_000
