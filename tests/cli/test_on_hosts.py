"""`--hosts` and `--hostfile`: what they refuse before anything starts, and what the nodes are told."""

from __future__ import annotations

import pytest

from toolkit.cli.app import main
from toolkit.cli.on_hosts import _filled, without_options
from toolkit.launch.hosts import Host

JOB = "model: quickstart-llama\ncluster: {gpu: cpu, gpus_per_node: 2}\ntrain: {output_dir: runs}\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "script.py").write_text("raise SystemExit('started')")
    (tmp_path / "hostfile").write_text("a slots=2\nb slots=4\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_hosts_are_filled_in_their_order():
    hosts = tuple(Host(name=name, slots=2) for name in "abc")
    filled = [_filled(hosts, count) for count in (1, 2, 4, 6)]
    assert filled == [(hosts[:1], 1), (hosts[:1], 2), (hosts[:2], 2), (hosts, 2)]
    hosts = tuple(Host(name=name, slots=None) for name in "ab")
    assert _filled(hosts, 4) == (hosts, 2)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("launch", "--hosts", "a:2,a:2", "job.yaml", "script.py"), 3, ["names a twice", "[HOSTS]"]),
        (("launch", "--hostfile", "hostfile", "job.yaml", "script.py"), 3, ["hosts=a:2, b:4 have different numbers"]),
        (("train", "job.yaml", "--hosts", "a:2,b"), 3, ["hosts=a:2, b:? have different numbers"]),
        (("train", "job.yaml", "--hostfile", "absent"), 3, ["hostfile=absent cannot be read", "[HOSTS]"]),
        (("train", "job.yaml", "--hosts", "a", "--hostfile", "hostfile"), 2, ["--hosts"]),
        (("train", "job.yaml", "--hosts", "a", "--json"), 2, ["--json"]),
        (("launch", "--hosts", "a:2,b:2", "-np", "3", "script.py"), 3, ["num_proc=3 is not", "2 hosts with 2 each, 4"]),
        (("launch", "--hosts", "a:2,b:2", "-np", "5", "script.py"), 3, ["num_proc=5 is not", "to one of 2, 4"]),
        (("launch", "--hosts", "a,b", "-np", "3", "script.py"), 3, ["num_proc=3 is not", "2 hosts with 1 each, 2"]),
        (("launch", "--hosts", "a:2", "job.yaml", "absent.py"), 2, ["absent.py is not a file"]),
        (
            ("train", "job.yaml", "--hosts", "a:2,b:2", "--elastic"),
            2,
            ["--hosts starts 2 nodes", "--nnodes 1:2", "[ELASTIC]"],
        ),
        (("train", "job.yaml", "--hosts", "a:2,b:2", "--set", "parallel.tensor=3"), 2, ["tensor=3"]),
    ],
)
def test_what_is_refused(folder, capsys, arguments, code, words):
    with pytest.raises(SystemExit) as ended:
        raise SystemExit(main(list(arguments)))
    shown = "".join(capsys.readouterr())
    assert ended.value.code == code, shown
    assert all(word in shown for word in words), shown
    assert not (folder / "runs").exists()


def test_a_rank_does_not_start_all_nodes(folder, capsys, monkeypatch):
    for name, value in {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "a",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        raise SystemExit(main(["train", "job.yaml", "--hosts", "a:2,b:2"]))
    assert "--hosts starts the ranks of all nodes, and this process is rank 1 of 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["--hosts", "a:1", "job.yaml", "--resume", "auto"],
        ["job.yaml", "--hosts=a:1", "--resume", "auto"],
        ["job.yaml", "-Ha:1", "--resume", "auto", "--hostfile", "x"],
    ],
)
def test_the_nodes_get_the_command_without_the_hosts(words):
    assert without_options(words, ("--hosts", "-H", "--hostfile")) == ["job.yaml", "--resume", "auto"]


def test_a_master_port_that_is_set_wins(folder, capsys, monkeypatch):
    """As MASTER_ADDR does; what is no port is told before anything starts."""
    monkeypatch.setenv("PATH", str(folder))  # where there is no ssh
    monkeypatch.setenv("MASTER_ADDR", "a.example")
    monkeypatch.setenv("MASTER_PORT", "4711")
    assert main(["train", "job.yaml", "--hosts", "a,b", "--set", "cluster.master_port=5000"]) == 3
    assert "starting 4 ranks on a:2, b:2; rendezvous at a.example:4711 ..." in capsys.readouterr().err
    monkeypatch.delenv("MASTER_PORT")
    assert main(["train", "job.yaml", "--hosts", "a,b", "--set", "cluster.master_port=5000"]) == 3
    assert "rendezvous at a.example:5000 ..." in capsys.readouterr().err
    monkeypatch.setenv("MASTER_PORT", "http")
    assert main(["train", "job.yaml", "--hosts", "a,b"]) == 3
    shown = capsys.readouterr().err
    assert "MASTER_PORT='http' is not a port" in shown
    assert "starting" not in shown
