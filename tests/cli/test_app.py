"""The entry point: start-up, errors, exit codes."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer

import toolkit
from toolkit.cli import app as application
from toolkit.cli.app import COMMANDS, build_app, main
from toolkit.cli.output import unless_reader_has_gone

HEAVY = ("torch", "deepspeed", "accelerate", "transformers", "datasets", "peft", "tokenizers")
JOB = "model: quickstart-llama\ncluster: {gpu: cpu}\ntrain: {max_steps: 5}\n"
REPORT = """
import sys
from toolkit.cli.app import main
code = main(sys.argv[1:])
print("heavy:", *[name for name in %r if name in sys.modules], file=sys.stderr)
sys.exit(code)
"""
EACH = """
import sys
from toolkit.cli.app import main
for words in %r:
    code = main(list(words))
    print(f"after {' '.join(words)}:", code, *[name for name in %r if name in sys.modules], file=sys.stderr)
"""


@pytest.fixture
def job(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(JOB)
    return "job.yaml"


def test_a_light_command_loads_no_heavy_library(job):
    """One after another in one process: what none of them loads."""
    commands = [
        ("--help",),
        ("--version",),
        ("validate", "job.yaml", "--explain"),
        ("emit", "job.yaml", "--out", "out"),
        ("topology", "job.yaml"),
        ("gpus", "cpu"),
        ("models", "quickstart-llama"),
        ("launch", "--help"),
    ]
    command = [sys.executable, "-c", EACH % (commands, HEAVY)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stderr.splitlines() if line.startswith("after ")]
    assert told == [f"after {' '.join(words)}: 0" for words in commands]


def test_emit_loads_what_it_needs_and_no_more(job):
    """It must answer at once: no other command, nothing that draws or renders."""
    unneeded = ("toolkit.cli.train", "toolkit.cli.quickstart", "toolkit.launch.supervisor", "rich", "jinja2")
    done = subprocess.run(
        [sys.executable, "-c", REPORT % (unneeded,), "emit", job, "--out", "out"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1].strip() == "heavy:"


def test_help_lists_every_command(capsys):
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    for name in COMMANDS:
        assert f" {name} " in shown


def leaf_commands(command, words=()):
    """Return the words of every command that is not a group of others."""
    inner = getattr(command, "commands", None)
    if inner is None:
        return [words]
    return [leaf for name, part in inner.items() for leaf in leaf_commands(part, (*words, name))]


LEAVES = leaf_commands(typer.main.get_command(build_app()))


@pytest.mark.parametrize("words", LEAVES, ids=" ".join)
def test_every_command_has_an_example_and_documents_its_json(words, capsys):
    assert main([*words, "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.count(f"toolkit {' '.join(words)}") >= 2, "once in the usage, once in the example"
    assert "--json" in shown
    assert "JSON keys" in shown


def test_commands_are_quiet_about_packages_that_nobody_can_mend(monkeypatch, capsys):
    """Such as kernels of torchao's for another Python: transformers imports it in commands that never use it."""
    loggers = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree", "bitsandbytes.backends.cpu.ops")]
    for logger in loggers:
        monkeypatch.setattr(logger, "level", logging.NOTSET)
    main(["--version"])
    assert [logger.level for logger in loggers] == [logging.ERROR] * 3
    capsys.readouterr()


def test_the_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"{toolkit.__version__}\n"


def test_python_dash_m(job):
    done = subprocess.run([sys.executable, "-m", "toolkit", "validate", job], capture_output=True, text=True)
    assert done.returncode == 0
    assert "job.yaml is valid" in done.stdout


def test_files_of_the_working_directory_do_not_stand_in_for_the_standard_library(tmp_path):
    for name in ("queue", "random", "inspect"):
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('{name}.py')")
    command = [sys.executable, "-m", "toolkit", "gpus", "cpu"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "arguments", [("nonsense",), ("gpus", "--nonsense"), ("emit", "job.yaml"), ("topology", "--tp", "x")]
)
def test_bad_usage_is_2(arguments, capsys):
    assert main(arguments) == 2
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("arguments", "key", "says"),
    [
        (("nonsense",), "toolkit", "No such command 'nonsense'"),
        (("validate",), "JOB", "name a job file"),
        (("validate", "--nonsense", "job.yaml"), "toolkit validate", "No such option: --nonsense"),
        (("emit", "job.yaml"), "--out", "Missing option"),
        (("topology", "--tp", "0"), "--tp", "--tp=0: "),
        (("topology", "--tp=x"), "--tp", "--tp=x: "),
        (("topology", "--nodes", "3", "--tp", "2"), "--nodes", "3 nodes do not divide"),
        (("launch", "job.yaml", "absent.py"), "SCRIPT", "absent.py is not a file"),
        (("checkpoint", "list"), "output_dir", "Missing argument"),
    ],
)
def test_bad_usage_is_a_problem_with_a_code(job, arguments, key, says, capsys):
    assert main([*arguments, "--json"] if arguments[0] != "launch" else ["launch", "--json", *arguments[1:]]) == 2
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert (problem["code"], problem["key"]) == ("USAGE", key)
    assert says in problem["message"]
    assert "--help` shows what it takes" in problem["fix"]
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.endswith("[USAGE]\n")


@pytest.mark.parametrize("arguments", [(), ("checkpoint",)])
def test_no_command_shows_the_help(arguments, capsys):
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert "Usage: toolkit" in captured.out
    assert captured.err == ""


def test_a_grid_too_large_to_list(capsys):
    for sizes in (("--tp", "9" * 20), ("--nodes", "125000", "--gpus-per-node", "8"), ("--dp", "16385")):
        assert main(["topology", *sizes, "--json"]) == 2
        assert json.loads(capsys.readouterr().out)["problems"][0]["code"] == "GRID_SIZE"
    assert main(["topology", "--tp", "8", "--dp", "128", "--nodes", "128", "--gpus-per-node", "8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["world_size"] == 1024


def shell(line, **environment):
    command = f"{sys.executable} -m toolkit {line}"
    return subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, env={**os.environ, **environment}, timeout=240
    )


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("gpus >&-", 0),
        pytest.param("gpus --json >&-", 0, marks=pytest.mark.full),
        pytest.param("validate absent.yaml 2>&-", 2, marks=pytest.mark.full),
        ("validate absent.yaml >&- 2>&-", 2),
        ("gpus >/dev/full", 3),
        pytest.param("gpus --json >/dev/full", 3, marks=pytest.mark.full),
        ("gpus nonsense --json >/dev/full", 2),
        pytest.param("validate absent.yaml 2>/dev/full", 2, marks=pytest.mark.full),
        ("validate absent.yaml --json >/dev/full 2>/dev/full", 2),
    ],
)
def test_streams_that_take_nothing(job, line, code):
    done = shell(line)
    assert done.returncode == code
    assert "Traceback" not in done.stderr
    if "2>" not in line and code:
        assert done.stderr.endswith("]\n")


@pytest.mark.parametrize("encoding", ["ascii", pytest.param("latin-1", marks=pytest.mark.full)])
def test_a_terminal_of_another_encoding(job, encoding):
    done = shell("gpus", PYTHONIOENCODING=encoding)
    assert (done.returncode, done.stderr) == (0, "")
    done = shell("validate job.yaml --set model=ünï --json", PYTHONIOENCODING=encoding)
    assert done.returncode == 2
    assert json.loads(done.stdout)["problems"][0]["message"].startswith("model=ünï ")


def test_names_that_are_not_utf8(job):
    done = shell("validate $'\\xff.yaml' --json")
    assert done.returncode == 2
    assert json.loads(done.stdout)["problems"][0]["code"] == "FILE_NOT_FOUND"


def test_a_working_directory_that_has_gone(job):
    line = "--version >/dev/null; mkdir gone; cd gone; rmdir ../gone; "
    line += f"{sys.executable} -m toolkit validate ../{job} --set data.train=a.jsonl"
    done = shell(
        line.replace("../job.yaml", str(Path(job).resolve())), PYTHONPATH=str(Path(toolkit.__file__).parents[1])
    )
    assert done.returncode == 3
    assert "no longer exists" in done.stderr


def test_problems_go_to_stderr_one_a_line(job, capsys):
    code = main(["emit", job, "--out", "out", "--set", "train.warmup_steps=9", "--set", "parallel.offload_ratio=0.5"])
    captured = capsys.readouterr()
    assert (code, captured.out) == (2, "")
    lines = captured.err.splitlines()
    errors = [line for line in lines[:-1] if line.startswith("error: ")]
    assert [line.rpartition("[")[2] for line in errors] == ["OFFLOAD_RATIO]", "WARMUP_LENGTH]"]
    assert lines[-1] == "2 problems"
    assert errors[0].startswith("error: parallel.offload_ratio: ")


def test_problems_as_json_go_to_stdout(job, capsys):
    assert main(["emit", job, "--out", "out", "--json", "--set", "train.warmup_steps=9"]) == 2
    captured = capsys.readouterr()
    assert captured.err == ""
    (problem,) = json.loads(captured.out)["problems"]
    assert problem["code"] == "WARMUP_LENGTH"
    assert set(problem) == {"code", "key", "message", "fix", "source", "line"}


def test_a_missing_file_names_its_neighbour(job, capsys):
    assert main(["validate", "jobb.yaml"]) == 2
    assert "Did you mean job.yaml" in capsys.readouterr().err


def app_of(body):
    app = typer.Typer()
    app.callback()(lambda: None)
    app.command("boom")(body)
    return app


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (KeyboardInterrupt(), 130),
        (PermissionError(13, "Permission denied", "/somewhere"), 3),
        (BrokenPipeError(32, "Broken pipe"), 1),
    ],
    ids=["interrupt", "permission", "pipe"],
)
def test_what_the_system_does(monkeypatch, capsys, error, code):
    def boom() -> None:
        raise error

    monkeypatch.setattr(application, "build_app", lambda commands: app_of(boom))
    assert main(["boom"]) == code
    shown = capsys.readouterr().err
    assert "Traceback" not in shown
    if code == 130:
        assert shown == "Interrupted.\n"
    if code == 3:
        assert shown == (
            "error: the system refused: Permission denied (/somewhere). Check that the path exists, that you may use "
            "it and that the disk has room. [SYSTEM]\n"
        )


def test_a_bug_keeps_its_traceback(monkeypatch):
    def boom() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(application, "build_app", lambda commands: app_of(boom))
    with pytest.raises(ZeroDivisionError):
        main(["boom"])


def test_a_reader_that_leaves_is_no_error(job):
    """As `toolkit gpus --json | head -1`."""
    reader, writer = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-m", "toolkit", "gpus", "--json"], stdout=writer, stderr=subprocess.PIPE, text=True
    )
    os.close(writer)
    os.close(reader)
    _, shown = process.communicate(timeout=240)
    assert (shown, process.returncode) == ("", 0)


@pytest.mark.parametrize("write_through", [False, True])
def test_what_is_written_after_the_reader_has_gone_is_dropped(write_through):
    reader, writer = os.pipe()
    with os.fdopen(writer, "w", encoding="ascii", errors="backslashreplace") as pipe:
        pipe.reconfigure(write_through=write_through)
        stream = unless_reader_has_gone(pipe)
        stream.write("ä")
        stream.flush()
        assert os.read(reader, 100) == b"\\xe4"
        os.close(reader)
        for _ in range(3):
            stream.write("x" * 100_000)
            stream.flush()
    with Path(os.devnull).open("w") as file:
        assert unless_reader_has_gone(file) is file


def test_on_a_terminal_the_mark_is_coloured(job, monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert main(["validate", "absent.yaml"]) == 2
    shown = capsys.readouterr().err
    assert "\x1b[1;31merror: \x1b[0m" in shown
    assert "[FILE_NOT_FOUND]" in shown
