"""Values of launchers' options and of sbatch's directives are refused where their own parsers refuse them."""

from __future__ import annotations

import pytest

from toolkit.user_files.option_values import directive_fault, option_fault


@pytest.mark.parametrize(
    ("launcher", "name", "right", "wrong"),
    [
        ("torchrun", "nproc_per_node", ["1", "8", "auto", "gpu"], ["x", "0", "-1", "", "1:2"]),
        ("torchrun", "nnodes", ["1", "1:4", "2:2"], ["3:1", "0", "0:2", "1:2:3", "x", ""]),
        ("torchrun", "master_port", ["0", "29500"], ["99999999", "-1", "http"]),
        ("accelerate", "num_processes", ["1", "8"], ["-2", "0", "x"]),
        ("accelerate", "zero_stage", ["0", "3"], ["4", "-1", "two"]),
        ("deepspeed", "include", ["a", "a@b", "a:0", "a@b:0,2"], ["a@b:c", "a:", "a:1:2", "@a", ""]),
        ("deepspeed", "num_gpus", ["-1", "8"], ["-2", "x"]),
        ("deepspeed", "some_other", ["x", ""], []),
    ],
)
def test_options(launcher, name, right, wrong):
    assert [value for value in right if option_fault(launcher, name, value)] == []
    assert [value for value in wrong if not option_fault(launcher, name, value)] == []


@pytest.mark.parametrize(
    ("key", "right", "wrong"),
    [
        ("nodes", ["2", "1-4", "1k", "1,5-10:2"], ["x", "-1", "", "2-"]),
        ("gpus-per-node", ["8", "h100:8", "a100:4,v100:4", "a100_1g.5gb:2"], ["-3", "h100", "", "h100:"]),
        ("ntasks-per-node", ["1", "8"], ["", "0", "-1", "2x"]),
        (
            "time",
            ["30", "30:00", "24:00:00", "2-0", "2-0:30", "2-0:30:00", "UNLIMITED"],
            ["99:99:99:99", "2h", "", "1:", "-"],
        ),
        ("mem", ["64G", "0", "500mb", "+2t"], ["1.5G", "64GiB", "64 G", "-1", "", "all"]),
        ("mem-per-gpu", ["16G"], ["16P", "x"]),
        ("signal", ["B:USR1@300", "10", "sigterm@0", "R:USR2@65535"], ["USR1@5m", "B:", "@60", "SEGV", "USR1@65536"]),
        ("exclusive", ["", "user"], ["3", "yes"]),
        ("gres", ["gpu:8", "x"], []),
    ],
)
def test_directives(key, right, wrong):
    assert [value for value in right if directive_fault(key, value)] == []
    assert [value for value in wrong if not directive_fault(key, value)] == []
