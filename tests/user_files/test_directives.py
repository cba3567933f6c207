"""Directives are read, refused and ignored as sbatch does it."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from toolkit.user_files.check import check_read
from toolkit.user_files.directives import OPTIONS, SHORT, read_directives
from toolkit.user_files.read import read_text

# What sbatch reads, and what it stops at.
RIGHT = (
    *(
        "--nodes=2",
        "--nodes 2",
        "-N2",
        "-N 2",
        "-HN 2",
        "--part=gpu",
        "--exclusive",
        "--tasks-per-node=4",
        "-p gpu -N 2",
    ),
    *(
        "--mem=16G # all of it",
        "--comment='a#b' --nodes=2",
        "--job-name='a b'",
        "--signal=B:USR1@300",
        "-W",
        "--array=",
    ),
    *("", "  # nothing", "--time=1-", "--mem-per-cpu=4GB", "--output=%x-%j.out", "hetjob"),
)
WRONG = (
    *("--nodes=x", "--gpus-per-nodes=2", "--node=2", "-Z 3", "--NODES=2", "--cpus_per_task=4", "nodes=2", "—nodes=2"),
    *(
        "-N=2",
        "-N",
        "--nodes",
        "--requeue=1",
        "--exclusive user",
        "--mem=16 G",
        "--mem=1.5G",
        "--time=24h",
        "--job-name=a b",
    ),
    *('--comment="a --nodes=2', "-nodes=2", "-- --nodes=2", "--time=1:2:3:4", "--pty"),
)


def script(directive: str) -> str:
    return f"#!/bin/bash\n#SBATCH {directive}\necho\n"


def errors(text: str) -> list[str]:
    return [str(each) for each in check_read([read_text(text, name="a.sbatch")]).found if each.level == "error"]


def test_each_directive_is_refused_where_sbatch_refuses_it():
    assert [directive for directive in RIGHT if errors(script(directive))] == []
    assert [directive for directive in WRONG if not errors(script(directive))] == []


@pytest.mark.skipif(shutil.which("sbatch") is None, reason="SLURM's client is not installed")
def test_sbatch_itself_says_so(tmp_path):
    """It reads its options before it looks for a controller, of which there is none here."""
    (tmp_path / "slurm.conf").write_text(
        "ClusterName=none\nSlurmctldHost=localhost(127.0.0.1)\nSlurmctldPort=1\nAuthType=auth/none\nSelectType=select/cons_tres\n"
        "NodeName=localhost CPUs=1\nPartitionName=p Nodes=localhost\nMessageTimeout=1\n"
    )

    def is_refused(directive: str) -> bool:
        (tmp_path / "a.sh").write_text(script(directive))
        command, environment = (
            ["sbatch", str(tmp_path / "a.sh")],
            {"PATH": "/usr/bin:/bin", "SLURM_CONF": str(tmp_path / "slurm.conf")},
        )
        said = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=20).stderr
        return "contact slurm controller" not in said

    assert [directive for directive in RIGHT if is_refused(directive)] == []
    assert [directive for directive in WRONG if not is_refused(directive)] == []


@pytest.mark.parametrize(
    ("directive", "words"),
    [
        ("--gpus-per-nodes=2", "line 2: --gpus-per-nodes is no option of sbatch, which refuses the script (sbatch). Did you mean --gpus-per-node"),
        ("--frobnicate", "`sbatch --help` lists its options, and those that plugins of a cluster add"),
        ("--node=2", "--node is the beginning of 3 options: sbatch refuses the script (sbatch). Write one of --nodefile, --nodelist, --nodes"),
        ("-N=2", "Write --nodes=2, or -N 2"),
        ("-nodes=2", "--ntasks=odes=2 is not a whole number"),
        ("-gpus=2", "-g in `-gpus=2` is no option of sbatch, which refuses the script (sbatch). Write --gpus=2"),
        ("--time", "--time has no value"),
        ("--hold=1", "--hold=1 is a switch, which takes no value"),
    ],
)  # fmt: skip
def test_an_error_says_what_to_write(directive, words):
    (error,) = errors(script(directive))
    assert words in error


def test_all_directives_of_a_line_and_all_lines_are_reported():
    text = "#!/bin/bash\n#SBATCH --foo\n#SBATCH --mem=x --time=y\n\n# A comment.\n#SBATCH --bar=1\nsrun x\n"
    assert [int(error.partition(", line ")[2].partition(":")[0]) for error in errors(text)] == [2, 3, 3, 6]


def test_what_sbatch_does_not_read_is_a_warning():
    text = "#!/bin/bash\n #SBATCH --nodes=2\n#SBATCH --time=1\n# SBATCH --foo\n##SBATCH --foo\nmodule load cuda\n#SBATCH --gpus=x\n#SBATCH --foo\n"
    found = check_read([read_text(text, name="a.sbatch")]).found
    assert [(each.level, each.code, each.line, each.key) for each in found] == [
        ("warning", "SBATCH_IGNORED", 2, "nodes"),
        ("warning", "SBATCH_IGNORED", 7, "gpus"),
        ("warning", "SBATCH_IGNORED", 8, "foo"),
    ]
    assert "begins with a blank" in found[0].message
    assert found[0].fix == "Begin the line with #SBATCH"


def test_the_first_component_of_a_job_of_several_counts():
    read = read_directives("#SBATCH -N 2 -t 5\n#SBATCH hetjob\n#SBATCH -N 3\n#SBATCH --foo\n", name="a")
    text = "#SBATCH --cpus-per-task=x -c 4\n#SBATCH hetjob\n#SBATCH -N x\n"
    assert [problem.message[:19] for problem in read_directives(text, name="a").problems] == [
        "--cpus-per-task=x i",
        "--nodes=x is not a ",
    ]
    assert (read.keys, [problem.key for problem in read.problems]) == ({"nodes": "2", "time": "5"}, ["--foo"])


def test_options_of_plugins_and_later_releases_are_known():
    rows = "--container-image=nvcr.io#x --no-container-mount-home\n#SBATCH --segment=16 --tres-per-task=gpu:1 --oom-kill-step"
    assert errors(script(rows)) == []
    assert set(SHORT.values()) <= set(OPTIONS)
