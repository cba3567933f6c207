"""Whole files of each tool as jobs: the text of each is kept in `jobs`, and what matters most is said here once more."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from toolkit.config.yaml_text import parse_yaml
from toolkit.errors import RunError, SpecError
from toolkit.migration.migrate import migrate

FILES, JOBS = Path(__file__).with_name("files"), Path(__file__).with_name("jobs")
CARD = {"gpu": "h100-sxm-80gb"}

# Files of one run, and options of the command, by the name of the golden job.
CASES = {
    "axolotl-qlora": (["axolotl-qlora.yaml"], {**CARD, "gpus_per_node": 2}),
    "axolotl-chat-zero3": (["axolotl-chat-zero3.yaml"], {**CARD, "gpus_per_node": 8}),
    "axolotl-fsdp2": (["axolotl-fsdp2.yaml"], {**CARD, "gpus_per_node": 4, "nodes": 2}),
    "llama-factory-lora": (["llama-factory-lora.yaml"], CARD),
    "llama-factory-full-zero3": (["llama-factory-full-zero3.yaml"], CARD),
    "llama-factory-pretrain-qlora": (["llama-factory-pretrain-qlora.yaml"], CARD),
    "swift-lora": (["swift-lora.sh"], CARD),
    "swift-full": (["swift-full.yaml"], {**CARD, "gpus_per_node": 8}),
    "swift-qlora-pt": (["swift-qlora-pt.sh"], CARD),
    "trl-sft": (["trl-sft.yaml"], CARD),
    "trl-lora": (["trl-lora.sh"], CARD),
    "trl-mixture": (["trl-mixture.yaml"], CARD),
    "trainer-accelerate": (["trainer-arguments.json", "accelerate-deepspeed.yaml"], {**CARD, "model": "llama-3.2-1b"}),
    "deepspeed-zero3": (["zero3.json"], {**CARD, "model": "llama-3.2-1b"}),
    "deepspeed-auto": (
        ["zero3-auto.json", "trainer-arguments.json"],
        {**CARD, "model": "llama-3.2-1b", "gpus_per_node": 8},
    ),
    "accelerate-ddp": (["accelerate-ddp.yaml"], {**CARD, "model": "llama-3.2-1b"}),
    "accelerate-fsdp": (["accelerate-fsdp.yaml"], {**CARD, "model": "llama-3.2-1b"}),
}

# What matters most of each, written by hand from the tools' documentation.
SAID = {
    "axolotl-qlora": {
        "train": {"method": "qlora", "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "optimizer": "adamw_8bit", "evals_per_epoch": 4},
        "data": {"format": "prompt_completion", "loss_on": "completion", "packing": "separated", "long_rows": "drop", "validation_fraction": 0.1},
        "parallel": {"strategy": "ddp"},
    },
    "axolotl-chat-zero3": {
        # batch_size is that of a card: 8 = 1 × 8
        "train": {"gradient_accumulation_steps": 8, "lr_scheduler_type": "cosine_with_min_lr", "min_learning_rate_ratio": 0.1, "loss": "liger", "kernels": "liger"},
        "data": {"loss_on": "assistant", "chat_template": "chatml", "packing": "separated", "long_rows": "truncate"},
        "parallel": {"zero_stage": 3},
    },
    "axolotl-fsdp2": {
        "train": {"precision": "fp16", "max_steps": 300, "optimizer": "adamw_8bit", "gradient_checkpointing": True, "warmup_steps": 20},
        "data": {"format": "text", "packing": "none"},
        "parallel": {"strategy": "fsdp2"},
    },
    "llama-factory-lora": {
        "train": {"method": "lora", "learning_rate": 1e-4, "warmup_ratio": 0.1, "num_train_epochs": 3, "gradient_checkpointing": True},
        "data": {"loss_on": "assistant", "packing": "none", "validation_fraction": 0.1},
    },
    "llama-factory-full-zero3": {
        "train": {"lr_scheduler_type": "cosine_with_min_lr", "min_learning_rate_ratio": 0.1, "warmup_steps": 50, "attention": "flash_attention_2", "evals_per_epoch": 1},
        "data": {"loss_on": "last_assistant", "packing": "separated"},
        "parallel": {"zero_stage": 3},
    },
    "llama-factory-pretrain-qlora": {
        "train": {"method": "qlora", "precision": "fp16", "max_steps": 1000, "optimizer": "adamw_8bit"},
        "data": {"format": "text", "name": "en", "train": "org/wiki"},
    },
    "swift-lora": {
        "cluster": {"gpus_per_node": 2},
        "train": {"weight_decay": 0.1, "adam_beta2": 0.95, "gradient_accumulation_steps": 16, "eval_steps": 50, "precision": "bf16"},
        "data": {"loss_on": "assistant", "packing": "none", "long_rows": "drop", "validation_fraction": 0.01},
        "parallel": {"zero_stage": 2},
    },
    "swift-full": {
        "train": {"gradient_accumulation_steps": 2, "report_to": ["wandb"], "saves_per_epoch": 1},  # 16 = 1 × 2 × 8
        "data": {"loss_on": "last_assistant", "packing": "separated", "long_rows": "truncate"},
        "parallel": {"zero_stage": 3, "offload": "full-cpu"},
    },
    "swift-qlora-pt": {
        "cluster": {"gpus_per_node": 4},
        "train": {"method": "qlora", "min_learning_rate_ratio": 0.1, "max_steps": 2000},
        "data": {"format": "text", "streaming": True},
    },
    "trl-sft": {
        "train": {"warmup_ratio": 0.1, "loss": "liger", "saves_per_epoch": 1, "report_to": ["tensorboard"]},
        "data": {"loss_on": "assistant", "packing": "separated"},
        "parallel": {"zero_stage": 2, "offload": "optimizer-cpu"},
    },
    "trl-lora": {
        "cluster": {"gpus_per_node": 4},  # the command's --num_processes wins over the file's 8
        "train": {"method": "qlora", "max_steps": 500, "learning_rate": 2e-4, "precision": "bf16"},
        "data": {"loss_on": "completion"},
        "parallel": {"strategy": "fsdp2"},
    },
    "trl-mixture": {
        "train": {"precision": "fp16", "optimizer": "adamw_torch", "torch_compile": True, "eval_steps": 50, "max_grad_norm": 0.3},
        "data": {"validation_fraction": 0.05, "loss_on": "completion"},
        "parallel": {"strategy": "fsdp2", "fsdp2": {"cpu_offload": True}},
    },
    "trainer-accelerate": {
        "cluster": {"gpus_per_node": 4, "nodes": 2, "master_port": 29501},
        "train": {"precision": "bf16", "warmup_steps": 100, "save_total_limit": 3},
        "parallel": {"zero_stage": 2, "offload": "optimizer-cpu"},
    },
    "deepspeed-zero3": {
        "cluster": {"gpus_per_node": 8},  # 128 = 4 × 4 × 8
        "train": {"train_batch_size": 128, "learning_rate": 3e-5, "lr_scheduler_type": "constant_with_warmup", "warmup_steps": 100},
        "parallel": {"zero_stage": 3},
    },
    "deepspeed-auto": {"train": {"gradient_accumulation_steps": 4, "learning_rate": 3e-5}, "parallel": {"zero_stage": 3, "offload": "full-cpu"}},
    "accelerate-ddp": {"cluster": {"gpus_per_node": 4}, "train": {"precision": "fp32"}, "parallel": {"strategy": "ddp"}},
    "accelerate-fsdp": {"cluster": {"gpus_per_node": 8}, "train": {"precision": "bf16"}, "parallel": {"strategy": "fsdp2"}},
}  # fmt: skip
# Keys that no job says, of each.
LOST = {
    "axolotl-qlora": {"wandb_name", "loss_watchdog_threshold", "loss_watchdog_patience"},
    "axolotl-chat-zero3": {"sequence_parallel_degree"},
    "axolotl-fsdp2": {"rope_scaling", "xformers_attention", "save_strategy"},
    "llama-factory-lora": {"template"},
    "llama-factory-full-zero3": {"template"},
    "llama-factory-pretrain-qlora": {"shift_attn"},
    "swift-lora": {"model_author"},
    "swift-full": {"agent_template", "freeze_vit"},
    "swift-qlora-pt": {"sequence_parallel_size"},
    "trl-sft": {"run_name"},
    "trl-lora": {"resume_from_checkpoint"},
    "trl-mixture": {"lr_scheduler_type", "chat_template_path"},
    "trainer-accelerate": set(),
    "deepspeed-zero3": {"hybrid_engine.enabled"},
    "deepspeed-auto": set(),
    "accelerate-ddp": {"parallelism_config.parallelism_config_cp_size"},
    "accelerate-fsdp": set(),
}
# fp16 under FSDP2, which scales no gradients.
TOLD = {"trl-mixture": {"STRATEGY_UNSUPPORTED"}}


@pytest.fixture(autouse=True)
def beside_the_files(monkeypatch):
    monkeypatch.chdir(FILES)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.mark.parametrize("name", CASES)
def test_a_golden_job(name):
    files, options = CASES[name]
    found = migrate(files, **options)
    golden = JOBS / f"{name}.yaml"
    assert found.text == golden.read_text(), f"if it is meant: write the new text to {golden}"
    assert parse_yaml(found.text, name=name) == found.document
    for section, keys in SAID[name].items():
        assert {key: found.document[section][key] for key in keys} == keys
    assert {entry.leaf.path for entry in found.not_carried} == LOST[name]
    assert all(entry.reason for entry in found.not_carried)
    # Nothing is wrong with it but what this machine lacks: the model of the hub; or what no job can be.
    assert {problem.code for problem in found.problems} <= {"MODEL_OFFLINE", "MODEL_NOT_FOUND", *TOLD.get(name, ())}


def test_every_golden_job_is_of_a_case():
    assert {path.stem for path in JOBS.iterdir()} == set(CASES) == set(SAID) == set(LOST)


@pytest.mark.parametrize(
    "name", ["trainer-accelerate", "deepspeed-zero3", "deepspeed-auto", "accelerate-ddp", "accelerate-fsdp", "trl-sft"]
)
def test_jobs_of_known_models_resolve(name):
    files, options = CASES[name]
    assert migrate(files, **options).problems == ()


def write(folder, **files):
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


BROKEN = {
    "MIGRATE_UNKNOWN": {"a__yaml": "colour: red\nshape: round\n"},
    "YAML_SYNTAX": {"a__yaml": "output_dir: [1\nlearning_rate: 2\n"},
    "YAML_NOT_MAPPING": {"a__yaml": "- 1\n- 2\n"},
    "DEEPSPEED_SYNTAX": {"a__json": '{"zero_optimization": }'},
    "FILE_NOT_FOUND": {"a__yaml": "output_dir: x\nlearning_rate: 1e-5\ndeepspeed: nowhere.json\n"},
    "YAML_RECURSIVE": {"a__yaml": "output_dir: &a [b, *a]\nlearning_rate: 1e-5\n"},
    "YAML_DUPLICATE": {"a__yaml": "output_dir: x\nlearning_rate: 1e-5\nlearning_rate: 2e-5\n"},
}


@pytest.mark.parametrize("code", BROKEN)
def test_a_bad_file_is_one_error(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, **BROKEN[code])
    with pytest.raises(SpecError) as caught:
        migrate([str(path) for path in tmp_path.iterdir()])
    assert caught.value.codes == (code,)


@pytest.mark.parametrize(
    ("text", "method"),
    [
        ("base_model: a\nrl: dpo\ndatasets: [{path: b}]\n", "dpo"),
        ("model_name_or_path: a\nstage: ppo\nfinetuning_type: lora\n", "PPO"),
        ("model_name_or_path: a\ndataset_name: b\nbeta: 0.1\n", "DPO"),
        ("model: a\nrlhf_type: kto\ntuner_type: lora\n", "kto"),
    ],
)
def test_training_by_preferences_is_refused(text, method, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, a__yaml=text)
    with pytest.raises(SpecError, match=method) as caught:
        migrate("a.yaml")
    assert caught.value.codes == ("MIGRATE_METHOD",)


@pytest.mark.parametrize(
    "command", ["trl dpo --model_name_or_path a", "swift rlhf --model a", "axolotl train --rl dpo --base_model a"]
)
def test_commands_that_train_otherwise_are_refused(command):
    with pytest.raises(SpecError) as caught:
        migrate(command)
    assert caught.value.codes == ("MIGRATE_METHOD",)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (
            {"a__yaml": "output_dir: x\nlearning_rate: 1e-5\n", "b__json": '{"optimizer": {"type": "AdamW", "params": {"lr": 2e-5}}, "train_batch_size": 8}'},
            "learning_rate",
        ),
        (
            {"a__yaml": "output_dir: x\ngradient_accumulation_steps: 2\nbf16: true\n", "b__json": '{"gradient_accumulation_steps": 4, "zero_optimization": {"stage": 1}}'},
            "gradient_accumulation_steps",
        ),
        ({"a__yaml": "output_dir: x\nseed: 1\nbf16: true\n", "b__yaml": "output_dir: y\nseed: 1\nbf16: true\n"}, "output_dir"),
        ({"a__yaml": "base_model: a\nsequence_len: 8\n", "b__yaml": "model_name_or_path: a\ncutoff_len: 8\nstage: sft\n"}, "cannot be of one run"),
        ({"a__json": '{"zero_optimization": {"stage": 1}}', "b__json": '{"zero_optimization": {"stage": 1}}'}, "cannot be of one run"),
    ],
)  # fmt: skip
def test_files_that_contradict_each_other(files, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, **files)
    with pytest.raises(SpecError, match=words) as caught:
        migrate(sorted(str(path.name) for path in tmp_path.iterdir()))
    assert set(caught.value.codes) == {"MIGRATE_CONTRADICTION"}
    assert len(caught.value.problems) == 1


def test_a_character_that_yaml_does_not_allow(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, a__yaml="output_dir: \0\nlearning_rate: 1e-5\n")
    with pytest.raises(SpecError) as caught:
        migrate("a.yaml")
    assert caught.value.codes == ("YAML_SYNTAX",)


def test_all_bad_files_are_told_at_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, a__yaml="colour: red\nshape: round\n", b__yaml="- 1\n")
    with pytest.raises(SpecError) as caught:
        migrate(["a.yaml", "b.yaml", "c.yaml"])
    assert caught.value.codes == ("MIGRATE_UNKNOWN", "YAML_NOT_MAPPING", "FILE_NOT_FOUND")


def test_a_quoted_command_line_and_the_file_that_it_names():
    found = migrate(
        "accelerate launch --config_file accelerate-deepspeed.yaml --num_processes 4 train.py --learning_rate 1e-5 --output_dir out"
    )
    assert found.document["cluster"] == {"gpus_per_node": 2, "nodes": 2, "master_port": 29501}
    assert found.document["train"]["learning_rate"] == 1e-5
    assert [tool for _, tool in found.files] == ["Trainer", "Accelerate"]


def test_commands_that_train_nothing_are_left_out(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = "python prepare.py --in a --out b\naxolotl preprocess a.yaml\naxolotl train a.yaml --learning-rate 3e-5\nllamafactory-cli export x.yaml\n"
    write(tmp_path, run__sh=text, a__yaml="base_model: m\nsequence_len: 64\nlearning_rate: 1e-5\n")
    assert migrate("run.sh").document["train"]["learning_rate"] == 3e-5
    with pytest.raises(SpecError) as caught:
        migrate("llamafactory-cli export x.yaml")
    assert caught.value.codes == ("MIGRATE_UNKNOWN",)


def test_a_script_of_two_runs_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(
        tmp_path,
        run__sh="trl sft --model_name_or_path a --dataset_name b\ntrl sft --model_name_or_path c --dataset_name d\n",
    )
    with pytest.raises(SpecError, match="2 commands that start training") as caught:
        migrate("run.sh")
    assert caught.value.codes == ("MIGRATE_CONTRADICTION",)


def test_a_variable_that_only_the_shell_knows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(
        tmp_path,
        run__sh="export HF_HOME=/data\nLR=1e-5\ntrl sft --model_name_or_path $MODEL --learning_rate $LR --output_dir out\n",
    )
    found = migrate("run.sh")
    assert found.document["train"]["learning_rate"] == 1e-5
    said = {entry.leaf.key: entry.reason for entry in found.not_carried}
    assert said == {
        "model_name_or_path": "only the shell knows its value",
        "HF_HOME": "a job sets no environment variables",
    }


def test_a_batch_script_of_slurm(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (
        "#!/bin/bash\n#SBATCH --job-name=sft\n#SBATCH --nodes=4\n#SBATCH --gres=gpu:h100:8\n#SBATCH --ntasks-per-node=1\n"
        "srun torchrun --nnodes $SLURM_NNODES --nproc_per_node 8 --rdzv_backend c10d train.py --output_dir out --bf16 True --deepspeed zero2.json\n"
    )
    write(tmp_path, run__sbatch=text, zero2__json='{"zero_optimization": {"stage": 2}, "gradient_clipping": "auto"}')
    found = migrate("run.sbatch")
    assert found.document["cluster"] == {"nodes": 4, "gpus_per_node": 8}
    assert (found.document["train"]["precision"], found.document["parallel"]) == ("bf16", {"zero_stage": 2})
    assert {entry.leaf.key for entry in found.not_carried} == set()


def test_a_hostfile(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(
        tmp_path,
        hostfile="a slots=8\nb slots=8\n",
        ds__json='{"zero_optimization": {"stage": 2}, "train_batch_size": 64}',
    )
    assert migrate(["hostfile", "ds.json"]).document["cluster"] == {"nodes": 2, "gpus_per_node": 8}


def test_configurations_that_trl_ships():
    found = migrate(
        "trl sft --model_name_or_path a --dataset_name b --output_dir c --accelerate_config zero3 --num_processes 4"
    )
    assert found.document["cluster"] == {"gpus_per_node": 4}
    assert found.document["parallel"]["zero_stage"] == 3


def test_an_argument_of_the_command_wins_over_its_file():
    found = migrate("trl sft --config trl-sft.yaml --learning_rate 7e-5 --seed 5", gpu="h100-sxm-80gb")
    assert (found.document["train"]["learning_rate"], found.document["train"]["seed"]) == (7e-5, 5)
    replaced = [entry for entry in found.entries if entry.leaf.file == "trl-sft.yaml" and "wins" in entry.reason]
    assert {entry.leaf.key for entry in replaced} == {"learning_rate", "seed"}


def test_an_option_wins_over_every_file():
    found = migrate("accelerate-deepspeed.yaml", gpu="a100-sxm-80gb", gpus_per_node=3, nodes=1)
    assert found.document["cluster"] | {"master_port": 0} == {
        "gpu": "a100-sxm-80gb",
        "gpus_per_node": 3,
        "master_port": 0,
    }
    said = {entry.leaf.key: entry.reason for entry in found.entries}
    assert said["num_processes"] == "the option --num-gpus says it"


def test_an_inline_deepspeed_section(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(
        tmp_path,
        a__yaml="output_dir: x\nlearning_rate: 1e-5\ndeepspeed:\n  zero_optimization:\n    stage: 3\n  gradient_clipping: 0.5\n",
    )
    found = migrate("a.yaml")
    assert found.document["parallel"]["zero_stage"] == 3
    assert found.document["train"]["max_grad_norm"] == 0.5
    places = {entry.leaf.path: entry.leaf.line for entry in found.entries}
    assert places["deepspeed.zero_optimization.stage"] == 5


def test_what_is_missing_is_told_with_its_option():
    problems = {problem.key: problem.fix for problem in migrate("zero2.json").problems}
    assert problems == {"model": "Add it, or give --model NAME", "cluster": "Add it, or give --gpu NAME"}


def test_a_job_is_written_once(tmp_path):
    found = migrate("trl-sft.yaml", gpu="h100-sxm-80gb")
    found.write(tmp_path / "job.yaml")
    assert (tmp_path / "job.yaml").read_text() == found.text
    with pytest.raises(SpecError) as caught:
        found.write(tmp_path / "job.yaml")
    assert caught.value.codes == ("EMIT_WOULD_OVERWRITE",)
    with pytest.raises(RunError):
        found.write(tmp_path / "nowhere" / "job.yaml")


def test_a_card_that_no_catalogue_has_is_refused_as_in_a_job():
    with pytest.raises(SpecError) as caught:
        migrate(FILES / "trl-sft.yaml", gpu="nope")
    assert caught.value.codes == ("GPU_UNKNOWN",)


def test_a_number_without_measure_and_keys_without_number_are_told_in_time(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(f'{{"train_batch_size": {"9" * 400}, "train_micro_batch_size_per_gpu": 1}}')
    assert [entry.leaf.key for entry in migrate(path).not_carried] == ["train_batch_size"]
    path.write_text(json.dumps({f"k{number}": number for number in range(15_000)}))
    with pytest.raises(SpecError) as caught:
        migrate(path)
    assert caught.value.codes == ("MIGRATE_UNKNOWN",)


def test_a_misspelt_key_is_told_with_the_right_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = json.dumps({"train_batch_size": 8, "gradient_cliping": 1.0, "zero_optimization": {"stge": 2, "mine": 1}})
    Path("ds.json").write_text(text)
    found = {entry.leaf.key: entry.fix for entry in migrate(["ds.json"], **CARD).not_carried}
    assert found == {
        "gradient_cliping": "Did you mean gradient_clipping",
        "zero_optimization.stge": "Did you mean zero_optimization.stage",
        "zero_optimization.mine": "",
    }
