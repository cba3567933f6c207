"""What a launcher cannot start is refused before a file is written."""

from __future__ import annotations

from pathlib import Path

import pytest
from launcher_plans import HOSTS, TRAINED, make_plan, options_of

from toolkit.artifacts.files import emit
from toolkit.artifacts.launchers.options import LaunchOptions
from toolkit.cli.app import main
from toolkit.config.job import Job
from toolkit.errors import PlanError, SpecError
from toolkit.planning.resolve import resolve


def refused(plan, launchers, *, out="out", hosts=None, **values):
    with pytest.raises(PlanError) as caught:
        emit(plan, out, hosts=hosts, launchers=launchers, options=LaunchOptions(**values))
    assert not Path(out).exists()
    return [(problem.code, problem.message) for problem in caught.value.problems]


@pytest.fixture(autouse=True)
def working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def card(name):
    gpu = name if isinstance(name, str) else {"memory_gib": 10, "compute_capability": "9.0", "bf16_tflops": 100, **name}
    return resolve(Job.model_validate({**TRAINED, "cluster": {"gpu": gpu}}))


@pytest.mark.parametrize("launcher", ["vastai", "runpod", "modal"])
def test_one_machine_starts_no_plan_of_two(launcher):
    ((code, message),) = refused(
        make_plan("two-nodes"), [launcher], image="x", **({"volume": "v"} if launcher == "modal" else {})
    )
    assert code == "EMIT_LAUNCHER"
    assert f"launcher={launcher} starts plans of one node, and the plan has nodes=2" in message


@pytest.mark.parametrize("launcher", ["ssh", "pdsh"])
def test_ssh_starts_several_nodes_whose_names_are_known(launcher):
    assert "nodes=1" in refused(make_plan("one-node"), [launcher])[0][1]
    assert "needs the names of the 2 nodes" in refused(make_plan("two-nodes"), [launcher])[0][1]


def test_every_problem_is_named_at_once():
    found = refused(make_plan("two-nodes"), ["jobset", "runpod", "openmpi"], partition="gpu", time_limit="1:00:00")
    assert [code for code, _ in found] == [
        *("EMIT_LAUNCH_OPTION", "EMIT_LAUNCH_OPTION", "EMIT_LAUNCH_OPTION", "EMIT_LAUNCH_OPTION"),
        *("EMIT_LAUNCHER", "EMIT_LAUNCHER"),
    ]
    said = " ".join(message for _, message in found)
    for part in (
        "--partition would be ignored",
        "jobset needs --image",
        "jobset needs --volume",
        "runpod needs --image",
    ):
        assert part in said


def test_an_option_without_a_launcher_is_not_ignored():
    assert refused(make_plan("one-node"), [], image="x")[0][1] == "--image would be ignored: no launcher is named"


def test_a_runtime_needs_an_image():
    assert "--image is not given" in refused(make_plan("one-node"), ["slurm"], container="pyxis")[0][1]


def test_cards_that_a_provider_has_not():
    assert "has no name for gpu=mi250x-64gb" in refused(card("mi250x-64gb"), ["modal"], image="x", volume="v")[0][1]
    assert "gpu=cpu needs none" in refused(make_plan("one-node-cpu"), ["vastai"], image="x")[0][1]


@pytest.mark.parametrize("name", ["h100-mig-1g.10gb", "a100-3g.40gb", "H100 MIG"])
def test_a_slice_of_a_card_is_no_card(name):
    assert "MIG slice" in refused(card({"name": name}), ["slurm"])[0][1]


def test_folders_that_another_machine_would_not_find(tmp_path):
    for out in (str(tmp_path / "there"), "../there"):
        options = {"image": "x", "compute": "gpus"}
        assert "runs on another machine" in refused(make_plan("one-node"), ["azureml"], out=out, **options)[0][1]
    found = refused(make_plan("one-node"), ["skypilot"], volume="v")
    assert "train.output_dir=runs/my-job, which is not an absolute path" in found[0][1]


def test_limits_of_providers():
    plan = make_plan("one-node")
    assert "more than Modal grants" in refused(plan, ["modal"], image="x", volume="v", time_limit="1-00:00:01")[0][1]
    assert "no instance type" in refused(plan, ["sagemaker"], image="x", compute="p5.48xlarge")[0][1]


def test_a_plan_that_train_would_refuse_has_nothing_to_start():
    plan = resolve(Job(model="llama-3.1-8b", cluster={"gpu": "h100-sxm-80gb"}, data=TRAINED["data"]))
    ((code, message),) = refused(plan, ["slurm"])
    assert code == "EMIT_LAUNCHER"
    assert "[MODEL_NO_WEIGHTS]" in message
    assert "[TOKENIZER_NOT_FOUND]" in message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("time_limit", "12h"),
        ("time_limit", "00:00:00"),
        ("time_limit", "1:60:00"),
        ("partition", "a b"),
        ("account", "x\n#SBATCH --time=1"),
        ("sbatch", ["nodes=3"]),
        ("sbatch", ["--constraint=h100"]),
        ("sbatch", ["constraint=a b"]),
        ("image", "x\ny"),
        ("setup", " "),
        ("container", "docker"),
        ("cpus", 0),
        ("cpus", True),
        ("nonsense", 3),
    ],
)
def test_malformed_options(name, value):
    with pytest.raises(SpecError) as caught:
        LaunchOptions(**{name: value})
    assert caught.value.codes == ("EMIT_LAUNCH_OPTION",)
    assert f"--{name.replace('_', '-')}=" in str(caught.value)


def test_a_time_limit_in_seconds():
    assert LaunchOptions(time_limit="2-03:00:05").seconds == 51 * 3600 + 5
    assert LaunchOptions().seconds is None


def test_the_users_own_file_of_a_launchers_name_is_left_alone():
    """Unless it would be overwritten: emit without launchers knows no job.sbatch."""
    plan, out = make_plan("two-nodes"), Path("out")
    out.mkdir()
    (out / "job.sbatch").write_text("mine")
    emit(plan, out)
    assert (out / "job.sbatch").read_text() == "mine"
    with pytest.raises(PlanError) as caught:
        emit(plan, out, launchers=["slurm"], options=options_of("two-nodes-bare", "slurm"))
    assert caught.value.codes == ("EMIT_WOULD_OVERWRITE",)
    (out / "job.sbatch").unlink()
    emit(plan, out, launchers=["slurm"])
    assert os_executable(out / "job.sbatch")
    emit(plan, out)
    assert not (out / "job.sbatch").exists(), "one of ours goes with its launcher"


def os_executable(path):
    return path.stat().st_mode & 0o111


def test_the_command(capsys):
    Path("job.yaml").write_text(
        "model: {name: quickstart-llama, init: random, tokenizer: org/name}\n"
        "cluster: {gpu: h100-sxm-80gb, gpus_per_node: 8, nodes: 2}\ndata: {train: org/data, format: text}\n"
    )
    asked = ["emit", "job.yaml", "--out", "out"]
    words = ["--launcher", "slurm", "--launcher", "ssh", "--hosts", ",".join(HOSTS), "--time-limit", "2:00:00"]
    assert main([*asked, *words, "--sbatch", "constraint=h100", "--sbatch", "exclusive", "--cpus", "96"]) == 0
    shown = capsys.readouterr().out
    for name in ("node.sh", "job.sbatch", "ssh.sh"):
        assert f"new        out/{name}\n" in shown
    text = Path("out/job.sbatch").read_text()
    for line in ("--time=2:00:00", "--constraint=h100", "--exclusive", "--cpus-per-task=96"):
        assert f"#SBATCH {line}\n" in text
    assert "node.sh                    starts the ranks of one node" in Path("out/README.txt").read_text()
    assert main([*asked, "--launcher", "nonsense"]) == 2
    assert "name one of torchrun, slurm" in capsys.readouterr().err
    assert main([*asked, "--time-limit", "soon"]) == 2
    assert "--time-limit=soon" in capsys.readouterr().err


@pytest.mark.parametrize("launcher", ["pytorchjob", "jobset"])
@pytest.mark.parametrize(
    ("name", "value", "is_right"),
    [
        *(("volume", value, True) for value in ("runs", "runs.of-me", "0")),
        *(("volume", value, False) for value in ("EOF", "a_b", "a-", "a.", "a" * 254)),
        *(("namespace", value, True) for value in ("ml", "ml-2")),
        *(("namespace", value, False) for value in ("My_NS", "a.b", "a-", "a" * 64)),
    ],
)
def test_names_of_kubernetes(launcher, name, value, is_right):
    options = {"image": "i", "volume": "v"} | {name: value}
    plan = make_plan("one-node")
    if is_right:
        emit(plan, "out", launchers=[launcher], options=LaunchOptions(**options))
        return
    ((code, message),) = refused(plan, [launcher], **options)
    assert (code, message.startswith(f"--{name}={value[:80]} ")) == ("EMIT_LAUNCH_OPTION", True)
