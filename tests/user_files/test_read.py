"""Files of other tools are recognised by what they hold, and read as their own tools read them, with lines."""

from __future__ import annotations

import time

import pytest

from toolkit.errors import SpecError
from toolkit.user_files.read import read_file, read_text

SBATCH = """#!/bin/bash
#SBATCH --nodes=2
#SBATCH -c 12 --gres=gpu:8   # all of a node
#SBATCH --ntasks-per-node 1
export NCCL_DEBUG=INFO
GPUS=8
ACCELERATE="--mixed_precision bf16 --use_deepspeed"
srun bash -c "accelerate launch --num_machines $SLURM_NNODES --num_processes $((SLURM_NNODES * GPUS)) $ACCELERATE \\
  --machine_rank \\$SLURM_PROCID train.py --bf16 --deepspeed ds.json"
#SBATCH --time=1:00:00
"""


@pytest.mark.parametrize(
    ("name", "text", "kind"),
    [
        ("ds.json", '{"zero_optimization": {"stage": 2}, "gradient_accumulation_steps": 4}', "deepspeed"),
        ("ds.json", '{"zero_optimisation": {"stage": 2}}', "deepspeed"),
        ("ds.json", '{"bf16": {"enabled": true}}', "deepspeed"),
        ("args.json", '{"bf16": true, "output_dir": "out", "gradient_accumulation_steps": 4}', "trainer-arguments"),
        ("acc.yaml", "distributed_type: DEEPSPEED\nnum_processes: 8\n", "accelerate"),
        ("acc.json", '{"distributed_type": "NO", "compute_environment": "LOCAL_MACHINE"}', "accelerate"),
        ("sft.yaml", "model_name_or_path: x\nlearning_rate: 2.0e-5\npacking: true\n", "trainer-arguments"),
        ("job.yaml", "model: llama-3.1-8b\ncluster: {gpu: cpu}\ntrain: {max_steps: 3}\n", "job"),
        ("hostfile", "node0 slots=8\n", "hostfile"),
        ("nodes.txt", "# two\nnode0 slots=8\nnode1 slots=8\n", "hostfile"),
        (".deepspeed_env", "NCCL_DEBUG=INFO\n", "deepspeed-env"),
        ("my.deepspeed_env", "NCCL_DEBUG=INFO\n\n", "deepspeed-env"),
        ("run.sh", "accelerate launch train.py\n", "command-line"),
        ("run", "#!/bin/sh\ntorchrun train.py\n", "command-line"),
        ("train.slurm", SBATCH, "sbatch"),
    ],
)
def test_a_kind_is_told_by_the_content(name, text, kind):
    assert read_text(text, name=name).kind == kind


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("base_model: x\nmicro_batch_size: 2\nlearning_rate: 1e-5\n", "axolotl"),
        ("stage: sft\nfinetuning_type: lora\nlearning_rate: 1e-5\n", "LLaMA-Factory"),
        ("colour: red\n", "no key that is known"),
    ],
)
def test_a_file_of_no_known_kind_says_whose_it_is(text, word):
    with pytest.raises(SpecError, match=word) as raised:
        read_text(text, name="some.yaml")
    assert raised.value.codes == ("FILE_KIND",)


def test_keys_of_json_have_lines():
    file = read_text(
        '{"bf16": {\n"enabled": true},\n"optimizer": {"params": {"betas": [0.9,\n0.95],\n"lr": 1}}}', name="d.json"
    )
    assert [file.line(key) for key in ("bf16", "bf16.enabled", "optimizer.params.lr", "optimizer.params.eps")] == [
        1,
        2,
        5,
        3,
    ]


def test_yaml_is_read_as_the_libraries_read_it():
    file = read_text("bf16: true\nlearning_rate: 2e-5\nbf16: no\n", name="t.yaml")
    assert file.keys == {"bf16": False, "learning_rate": "2e-5"}
    assert file.ignored == (("bf16", 3),)


def test_a_batch_script_has_directives_and_its_commands():
    file = read_text(SBATCH, name="train.slurm")
    assert file.keys == {"nodes": "2", "cpus-per-task": "12", "gres": "gpu:8", "ntasks-per-node": "1"}
    assert (file.line("gres"), file.ignored) == (3, (("time", 10),))
    (command,) = file.commands
    options = {option.name: option.value for option in command.options}
    assert options == {
        "num_machines": "2",
        "num_processes": "16",
        "mixed_precision": "bf16",
        "use_deepspeed": None,
        "machine_rank": "$SLURM_PROCID",
    }
    assert (command.script, command.line) == ("train.py", 8)
    assert command.environment["NCCL_DEBUG"].text == "INFO"
    assert not next(option for option in command.options if option.name == "machine_rank").is_known


def test_a_command_line_may_be_a_quoted_text():
    (command,) = read_file("accelerate launch --num_processes 8 train.py --bf16 --learning-rate=1e-5").commands
    assert (command.launcher, command.script) == ("accelerate", "train.py")
    assert [(option.name, option.value) for option in command.arguments] == [("bf16", None), ("learning_rate", "1e-5")]


def test_bad_lines_are_found_together():
    hosts = read_text("node0 slots=8\nnode1\nnode0 slots=4\n", name="hostfile")
    assert [(problem.line, problem.code) for problem in hosts.problems] == [(2, "HOSTFILE_LINE"), (3, "HOSTFILE_LINE")]
    variables = read_text("A=1\n\n# a comment\nB=2\n", name=".deepspeed_env")
    assert [problem.line for problem in variables.problems] == [2, 3]
    assert variables.keys == {"A": "1", "B": "2"}


def _bomb(indent=""):
    rows = ["a0: &a0 [x,x,x,x,x,x,x,x,x]"]
    rows += [f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    return "".join(f"{indent}{row}\n" for row in rows)


@pytest.mark.parametrize(
    "text",
    [
        "output_dir: x\nlearning_rate: 0.1\n" + _bomb(),
        "distributed_type: DEEPSPEED\ndeepspeed_config:\n" + _bomb("  "),
        "distributed_type: NO\na: &a {k: 1}\n"
        + "".join(f"a{n}: &a{n} {{<<: [{','.join(['*a' + str(n - 1 or '')] * 9)}]}}\n" for n in range(1, 12)),
        "output_dir: &a [*a]\nlearning_rate: 0.1\n",
    ],
)
def test_aliases_without_measure_are_refused_in_time(text):
    with pytest.raises(SpecError) as raised:
        read_text(text, name="some.yaml")
    assert raised.value.codes == ("YAML_RECURSIVE",)


def test_a_megabyte_on_one_line_is_read_in_time():
    started = time.process_time()
    read_text("torchrun t.py" + " $A <b" * 20_000, name="run.sh")
    read_text("a=1 " * 20_000 + "torchrun t.py", name="run.sh")
    assert time.process_time() - started < 3
