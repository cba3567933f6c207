"""Files as people have brought them: every problem at once, with its level, key, line, rule and correction."""

from __future__ import annotations

import json

import pytest
import yaml

from toolkit.user_files.check import check_files

TRIPLE = {"train_batch_size": 256, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 8}
ZERO_2 = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}
CLUSTER = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "DEEPSPEED",
    "num_processes": 8,
    "num_machines": 1,
}
SBATCH = "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --gres=gpu:8\n#SBATCH --ntasks-per-node={}\n#SBATCH --cpus-per-task=64\n{}\n"
RUN = "torchrun --nnodes {} --nproc_per_node 8 --rdzv_endpoint $HOST:29500 train.py"


@pytest.fixture
def check(tmp_path, monkeypatch):
    """Writes files, by name, and checks them together; a key that is no file's name is a command line."""
    monkeypatch.chdir(tmp_path)

    def checked(**files):
        names = []
        for name, content in files.items():
            path = name.replace("__", ".")
            text = (
                content
                if isinstance(content, str)
                else (yaml.safe_dump if path.endswith("yaml") else json.dumps)(content)
            )
            if path == "command":
                names.append(text)
            else:
                (tmp_path / path).write_text(text)
                names.append(path)
        return check_files(names)

    return checked


def said(report, level):
    return [(each.code, each.key) for each in report.found if each.level == level]


def the(report, code):
    (found,) = (each for each in report.found if each.code == code)
    return found


def test_a_sound_file_says_how_many_ranks_it_needs(check):
    report = check(ds__json=TRIPLE | ZERO_2)
    assert report.found == ()
    assert report.facts == ("ds.json: 256 = 4 micro × 8 accumulation × 8 ranks",)


def test_a_number_in_quotes_is_named_with_its_type(check):  # row 1
    found = the(check(ds__json={"train_batch_size": 8, "gradient_accumulation_steps": "8"} | ZERO_2), "DEEPSPEED_VALUE")
    assert str(found).startswith("ds.json, line 1: gradient_accumulation_steps='8' (str) is not valid (deepspeed ")
    assert found.fix == "Write 8"


def test_the_equation_is_shown_with_the_ranks_of_the_run(check):  # row 3
    report = check(ds__json=TRIPLE | ZERO_2, command="python train.py --deepspeed_config ds.json")
    found = the(report, "BATCH_EQUATION")
    assert "the run has 1 rank: 4 × 8 × 1 = 32" in found.message
    assert "4 × 64 × 1" in found.fix


def test_accumulation_never_becomes_zero(check):  # row 4
    sizes = {"train_batch_size": 1, "train_micro_batch_size_per_gpu": 2}
    found = the(check(ds__json=sizes | ZERO_2), "BATCH_EQUATION")
    assert found.message.endswith("the accumulation would be 0")
    assert "train_batch_size=1 with micro × accumulation × ranks one of 1 × 1 × 1" in found.fix


def test_each_key_has_one_home(check):  # row 5
    cluster = CLUSTER | {"mixed_precision": "bf16", "deepspeed_config": {"deepspeed_config_file": "ds.json"}}
    engine = {"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 2}}
    found = the(check(acc__yaml=cluster, ds__json=engine), "ACCELERATE_TWICE")
    assert (found.key, found.fix) == ("mixed_precision", "Move it into ds.json as bf16.enabled")
    assert [(edit.file, edit.path, edit.action) for edit in found.edits] == [
        ("acc.yaml", ("mixed_precision",), "remove"),
        ("ds.json", ("bf16", "enabled"), "set"),
    ]


def test_a_removed_section_names_what_replaces_it(check):  # row 7
    report = check(ds__json={"train_batch_size": 8, "compile": {"disable": False, "backend": "inductor"}} | ZERO_2)
    assert said(report, "error") == [("DEEPSPEED_UNKNOWN", "compile.disable"), ("DEEPSPEED_UNKNOWN", "compile.backend")]
    assert "torch_compile: true" in report.found[0].fix


def test_one_precision_on_both_sides(check):  # row 8
    engine = {"train_micro_batch_size_per_gpu": "auto", "fp16": {"enabled": True}, "zero_optimization": {"stage": 2}}
    report = check(ds__json=engine, args__yaml={"output_dir": "out", "bf16": True, "deepspeed": "ds.json"})
    assert said(report, "error") == [("TRAINER_MISMATCH", "fp16.enabled")]
    assert the(report, "TRAINER_MISMATCH").message == (
        "fp16.enabled=true and fp16=false of Trainer's arguments: Trainer refuses the two"
    )


def test_accumulation_of_accelerate_and_of_trainer(check):  # row 10
    cluster = CLUSTER | {
        "mixed_precision": "bf16",
        "deepspeed_config": {"gradient_accumulation_steps": 32, "zero_stage": 2},
    }
    report = check(
        acc__yaml=cluster, args__yaml={"output_dir": "out", "bf16": True, "gradient_accumulation_steps": 128}
    )
    assert said(report, "error") == [("TRAINER_MISMATCH", "deepspeed_config.gradient_accumulation_steps")]
    assert report.facts[0] == "8 ranks (acc.yaml: num_processes)"


def test_precision_of_accelerate_and_of_trainer(check):
    cluster = CLUSTER | {"mixed_precision": "bf16", "deepspeed_config": {"zero_stage": 2}}
    assert said(check(acc__yaml=cluster, args__yaml={"output_dir": "out"}), "error") == [
        ("TRAINER_MISMATCH", "mixed_precision")
    ]
    report = check(acc__yaml=cluster, args__yaml={"output_dir": "out", "fp16": True})
    assert said(report, "warning") == [("PRECISION_MISMATCH", "mixed_precision")]
    assert said(report, "error") == []


def test_what_is_ignored_is_a_warning_and_what_is_slow_a_note(check):
    zero = {"stage": 2, "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu", "pin_memory": False}}
    keys = {"train_batch_size": 8, "gradient_cliping": 1.0, "wall_clock_breakdown": True, "fp16": {"enabled": False}}
    report = check(ds__json=keys | {"zero_optimization": zero})
    assert said(report, "error") == []
    assert [key for _, key in said(report, "warning")] == ["gradient_cliping", "zero_optimization.offload_param"]
    assert {key for _, key in said(report, "note")} == {
        *("wall_clock_breakdown", "bf16", "zero_optimization.offload_optimizer.pin_memory"),
    }


def test_a_command_line_is_read_with_the_files_that_it_names(check, tmp_path):
    (tmp_path / "ds.json").write_text(json.dumps(TRIPLE | ZERO_2))
    report = check(
        command="torchrun --nproc_per_node 4 train.py --bf16 --deepspeed ds.json --learning_rate 2e-5 --max_step x"
    )
    assert [file.kind for file in report.files] == ["command-line", "deepspeed"]
    assert ("ARGUMENT_VALUE", "--max_step") in said(report, "error")  # argparse takes the beginning of a name
    assert ("TRAINER_MISMATCH", "train_micro_batch_size_per_gpu") in said(report, "error")


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("accelerate launch --num_proceses 8 train.py", "LAUNCHER_OPTION"),
        ("accelerate launch --multi_gpu --use_deepspeed train.py", "LAUNCHER_OPTION"),
        ("accelerate launch --mixed_precision bf1 train.py", "LAUNCHER_OPTION"),
        ("deepspeed --num_gpus 8 --include n0 train.py", "LAUNCHER_OPTION"),
        ("torchrun --nproc_per_node 8", "LAUNCHER_OPTION"),
        ("python train.py --bf16 --fp16", "ARGUMENT_COMBINATION"),
        ("python train.py --evaluation_strategy steps --output_dir x", "ARGUMENT_UNKNOWN"),
        ("accelerate launch --config_file absent.yaml train.py", "FILE_MISSING"),
    ],
)
def test_a_command_that_fails(check, command, code):
    assert [each for each, _ in said(check(command=command), "error")] == [code]


@pytest.mark.parametrize(
    ("values", "code", "level"),
    [
        ({"learning_rate": "2e-5"}, "ARGUMENT_VALUE", "error"),
        ({"eval_strategy": False}, "ARGUMENT_VALUE", "error"),
        ({"lr_scheduler_type": "cosin"}, "ARGUMENT_VALUE", "error"),
        ({"bf16": "false"}, "ARGUMENT_VALUE", "warning"),
        ({"gradient_acumulation_steps": 4}, "ARGUMENT_UNKNOWN", "error"),
        ({"model_of_mine": "x"}, "ARGUMENT_FOREIGN", "warning"),
        ({"gradient_checkpoint": True}, "ARGUMENT_FOREIGN", "warning"),  # more than a slip: perhaps the script's own
        ({"no_cuda": True}, "ARGUMENT_UNKNOWN", "error"),
        ({"load_best_model_at_end": True}, "ARGUMENT_COMBINATION", "error"),
        ({"dataloader_prefetch_factor": 2}, "ARGUMENT_COMBINATION", "error"),
    ],
)
def test_arguments(check, values, code, level):
    report = check(args__yaml={"output_dir": "out", **values})
    assert [(each.code, each.level) for each in report.found] == [(code, level)]


def test_a_file_of_a_script_of_ones_own(check):
    report = check(args__yaml={"output_dir": "out", "mine": 1}, command="python train.py args.yaml")
    assert said(report, "warning") == [("ARGUMENT_FOREIGN", "mine")]
    report = check(sft__yaml={"output_dir": "out", "mine": 1}, command="trl sft --config sft.yaml")
    assert said(report, "error") == [("ARGUMENT_UNKNOWN", "mine")]


def test_trl_converts_what_trainer_does_not(check):
    words = "model_name_or_path: m\ndataset_name: d\nmax_length: 512\nlearning_rate: 2e-5\n"
    assert check(sft__yaml=words).found == ()


def test_hosts_and_processes(check):
    cluster = CLUSTER | {"num_machines": 2, "num_processes": 16, "deepspeed_config": {"deepspeed_hostfile": "hostfile"}}
    assert said(check(acc__yaml=cluster, hostfile="n0 slots=8\nn1 slots=8\n"), "error") == []
    few = the(check(acc__yaml=cluster, hostfile="n0 slots=8\nn1 slots=4\n"), "HOSTFILE_RANKS")
    assert "starts 8 processes on each, and n1 has slots=4" in few.message
    more = the(check(acc__yaml=cluster, hostfile="n0 slots=8\nn1 slots=8\nn2 slots=8\n"), "HOSTFILE_RANKS")
    assert "num_machines=2 and hostfile has 3 hosts" in more.message


@pytest.mark.parametrize(
    ("tasks", "line", "codes"),
    [
        (1, "srun " + RUN.format(2), []),
        (8, "srun " + RUN.format(2), ["SLURM_TASKS"]),
        (1, RUN.format(2), ["SLURM_TASKS"]),
        (1, "srun " + RUN.format(4), ["SLURM_NODES", "SLURM_GPUS"]),
    ],
)
def test_a_batch_script_and_what_it_starts(check, tasks, line, codes):
    assert [code for code, _ in said(check(train__slurm=SBATCH.format(tasks, line)), "error")] == codes


def test_a_file_that_cannot_be_read_is_a_finding_beside_the_others(check):
    report = check(ds__json='{"a": 1,}', acc__yaml=CLUSTER | {"mixed_precision": False})
    assert [(each.file, each.code) for each in report.found if each.level == "error"] == [
        ("acc.yaml", "ACCELERATE_VALUE"),
        ("ds.json", "DEEPSPEED_SYNTAX"),
    ]


def test_a_file_that_is_wrong_as_a_whole_is_named_once(check):
    for name, text in (("ds__json", "{"), ("ds__json", "[]"), ("e__yaml", ""), ("e__yaml", "a: [")):
        (found,) = check(**{name: text}).found
        assert str(found).count(name.replace("__", ".")) == 1, str(found)


def test_foreign_bytes_end_in_findings(check, tmp_path):
    (tmp_path / "odd.json").write_bytes(b"\xff\xfe{")
    report = check_files(["odd.json", "absent.yaml", "."])
    assert [each.code for each in report.found] == ["FILE_UNREADABLE", "FILE_NOT_FOUND", "FILE_UNREADABLE"]


def codes(report):
    return [(each.level, each.code) for each in report.found]


@pytest.mark.parametrize("option", ["--gradient_checkpointing", "--gradient-checkpointing", "--fsdp"])
def test_a_switch_whose_metadata_allows_it_stands_bare(check, option):
    assert check(command=f"torchrun --nproc-per-node 2 train.py --output_dir o {option} --bf16 true").found == ()


def test_a_value_of_accelerates_section_is_named_by_accelerates_key(check):
    section = {"zero_stage": 2, "offload_param_device": "cpu"}
    found = the(check(acc__yaml=CLUSTER | {"deepspeed_config": section}), "DEEPSPEED_IGNORED")
    assert (found.key, found.fix) == (
        "deepspeed_config.offload_param_device",
        "Set deepspeed_config.zero_stage to 3, or remove it",
    )


@pytest.mark.parametrize("words", ["--fsdp full_shard --deepspeed ds.json", "--deepspeed ds.json --fsdp"])
def test_two_ways_to_shard(check, words):
    engine = {"train_micro_batch_size_per_gpu": "auto", **ZERO_2, "bf16": {"enabled": "auto"}}
    report = check(ds__json=engine, command=f"torchrun --nproc_per_node 2 train.py --bf16 {words}")
    assert said(report, "error") == [("ARGUMENT_COMBINATION", "--fsdp")]
    report = check(
        ds__json=engine, args__json={"output_dir": "o", "bf16": True, "fsdp": "full_shard", "deepspeed": "ds.json"}
    )
    assert said(report, "error") == [("ARGUMENT_COMBINATION", "fsdp")]


def test_a_hostfile_counts_for_launchers_that_read_it(check):
    hosts = {"hostfile": "n0 slots=2\nn1 slots=2\n"}
    run = "torchrun --nnodes 4 --nproc_per_node 8 train.py"
    assert check(**hosts, command=run).found == ()
    one = {"num_processes": 8, "deepspeed_config": {"deepspeed_hostfile": "hostfile", "zero_stage": 2}}
    assert (
        "hostfile has 2 hosts, all of which" in the(check(acc__yaml=CLUSTER | one, **hosts), "HOSTFILE_RANKS").message
    )


def test_blanks_around_a_variable_are_taken_off(check):
    assert check(__deepspeed_env="HF_HOME = /data/hf\nA=b c\n").found == ()
    assert codes(check(__deepspeed_env="export X=y\n")) == [("warning", "DEEPSPEED_ENV_LINE")]


def test_auto_without_the_argument_names_both_sides(check):
    engine = {"train_micro_batch_size_per_gpu": "auto", "bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 2}}
    report = check(ds__json=engine, args__yaml={"output_dir": "out", "deepspeed": "ds.json"})
    assert "--bf16" in the(report, "SLOWER").fix
    assert check(ds__json=engine, args__yaml={"output_dir": "out", "bf16": True, "deepspeed": "ds.json"}).found == ()


def test_nothing_is_derived_from_an_argument_under_a_wrong_name(check):
    values = {"output_dir": "out", "evaluation_strategy": "steps", "load_best_model_at_end": True, "save_steps": 500}
    assert codes(check(args__yaml=values)) == [("error", "ARGUMENT_UNKNOWN")]
    engine = {"train_micro_batch_size_per_gpu": 4, **ZERO_2}
    values = {"output_dir": "out", "per_device_train_batchsize": 4, "bf16": True, "deepspeed": "ds.json"}
    assert codes(check(ds__json=engine, args__yaml=values)) == [("error", "ARGUMENT_UNKNOWN")]


@pytest.mark.parametrize(
    ("command", "level", "code"),
    [
        ("accelerate launch train.py --num_processes 4", "warning", "LAUNCHER_OPTION"),
        ("python train.py --output_dir o --lr_scheduler cosine", "error", "ARGUMENT_UNKNOWN"),
        ("python train.py --learning_rate 1e-5 --data mine", "warning", "ARGUMENT_UNKNOWN"),
        ("python train.py --learning_rate 1e-5 --opti adamw_torch", "error", "ARGUMENT_UNKNOWN"),
        (
            "python train.py --load_best_model_at_end --eval_strategy steps --eval_steps 2 --save_step 7",
            "error",
            "ARGUMENT_COMBINATION",
        ),
        ("CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc-per-node=4 train.py", "error", "VISIBLE_GPUS"),
        ("CUDA_VISIBLE_DEVICES=0,1 accelerate launch --num_processes=4 train.py", "error", "VISIBLE_GPUS"),
    ],
)
def test_a_command_that_does_not_do_what_it_says(check, command, level, code):
    assert codes(check(command=command)) == [(level, code)]
    sound = {
        "CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc-per-node=2 train.py",
        "accelerate launch --num_processes 4 train.py",
    }
    assert all(check(command=each).found == () for each in sound)


def test_patterns_of_case_are_no_commands(check):
    script = '#!/bin/bash\ncase "$1" in\n  torchrun)\n    (cd a)\n    torchrun --nproc_per_node 2 train.py\n    ;;\n  deepspeed)\n    ;;\nesac\n'
    report = check(run__sh=script)
    assert report.found == ()
    assert [command.line for command in report.files[0].commands] == [5]


def test_an_unknown_option_is_the_only_error(check):
    assert len(said(check(command="torchrun --bogus t.py"), "error")) == 1


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("torchrun t.py --name 'a b\n", 1),
        ('export A=1\ntorchrun t.py "a\nb\n', 2),
        ("torchrun t.py $'it\\'s' # don't\n", None),
        ("torchrun t.py 'a' \"it's\"\n", None),
        ('torchrun t.py "$(echo ")")"\n', None),
    ],
)
def test_a_quote_without_an_end(check, text, line):
    assert [each.line for each in check(run__sh=text).found if each.code == "SHELL_QUOTE"] == ([line] if line else [])


def test_directives_that_sbatch_refuses(check):
    text = "#!/bin/bash\n#SBATCH --nodes=x\n#SBATCH --ntasks-per-node=\ntorchrun t.py\n"
    assert [each.line for each in check(a__sbatch=text).found if each.code == "SBATCH_VALUE"] == [2, 3]
