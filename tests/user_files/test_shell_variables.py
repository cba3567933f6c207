"""A variable is expanded where it can be read what it holds, and stays as it is written everywhere else."""

from __future__ import annotations

import pytest

from toolkit.user_files.check import check_files
from toolkit.user_files.commands import launch_commands

USE = "torchrun --nproc_per_node $N t.py"


def told(text):
    """Return the last value of the option, and whether it is known."""
    *_, command = launch_commands(text)
    option = command.option("nproc_per_node")
    assert option is not None
    return option.value, option.is_known


@pytest.mark.parametrize(
    "text",
    [
        f'if [ -n "$X" ]; then N=8; fi; {USE}',
        f"N=4\nif a\nthen\n  N=8\nelse\n  N=2\nfi\n{USE}",
        f'N=4\n[ -n "$X" ] && N=8\n{USE}',
        f"N=4\na ||\n  N=8\n{USE}",
        f"N=4; case $X in a|b) N=8;; (c) N=2;; esac; {USE}",
        f"N=8; for N in 2 4; do {USE}; done",
        f"N=8; for N in 2 4; do :; done; {USE}",
        f"N=1; while a; do {USE}; N=$((N*2)); done",
        f"N=1; for ((N=1; N<8; N++)); do {USE}; done",
        f"N=8\nread -r N\n{USE}",
        f"N=8; cat x | while read N; do {USE}; done",
        f"N=8\nN+=3\n{USE}",
        f"N=8; ((N *= 2)); {USE}",
        f"N=8; let N=N*2; {USE}",
        f"N=8; unset N; {USE}",
        f"N=(8 4); {USE}",
        f"N=8; f() {{ N=4; }}; f; {USE}",
        f"N=8\nfunction f {{\n  N=4\n}}\nf\n{USE}",
        f"(N=8); {USE}",
        f"if a; then export N=8; fi; {USE}",
        "if a; then N=8; fi; torchrun --nproc_per_node ${N:-4} t.py",
    ],
)  # fmt: skip
def test_what_may_have_been_set_otherwise_is_not_known(text):
    assert told(text)[1] is False
    assert not [each for each in check_files([text]).found if each.level == "error"]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (f"if a; then N=8; {USE}; fi", "8"),
        (f"if a; then N=8; else N=2; {USE}; fi", "2"),
        (f"N=8; if a; then M=1; fi; {USE}", "8"),
        (f"N=8; if a && b; then exit 1; fi; {USE}", "8"),
        (f"N=8; (N=4); {USE}", "8"),
        (f"{{ N=8; }}; {USE}", "8"),
        (f"cd x && N=8 && {USE}", "8"),
        (f"N=8 && {USE}", "8"),
        (f"N=8; for X in 1 2; do {USE}; done", "8"),
        (f"while a; do N=8; {USE}; done", "8"),
        (f"case $X in a) N=8; {USE};; esac", "8"),
        (f"f() {{ M=4; }}; N=8; {USE}", "8"),
        ("N=; torchrun --nproc_per_node ${N:-4} t.py", "4"),
        ('N=""; torchrun --nproc_per_node ${N:-4} t.py', "4"),
        ("torchrun --nproc_per_node ${N:-4} t.py", "4"),
        ("A=--nproc_per_node=; A+='4'; A=--nproc_per_node=4; torchrun $A t.py", "4"),
        ("A=--nproc; A+=_per_node=4; torchrun $A t.py", "4"),
    ],
)
def test_what_the_script_alone_sets_is_known(text, value):
    assert told(text) == (value, True)


def test_exported_variables_are_those_of_the_branch():
    first, second = launch_commands("export N=8\nif a; then export N=4 M=1; python a.py; fi\npython b.py")
    assert {name: (word.text, word.is_known) for name, word in first.environment.items()} == {
        "N": ("4", True),
        "M": ("1", True),
    }
    assert {name: word.is_known for name, word in second.environment.items()} == {"N": False, "M": False}


@pytest.mark.parametrize(
    "text", ["fi; done; esac; }; )", "if a; then", "for", "case x in", "((", "f() {", "a &&", "function"]
)
def test_scripts_that_are_cut_off_are_read_to_their_end(text):
    assert list(launch_commands(f"{text}\n")) == []
