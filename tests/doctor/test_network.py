"""Names, ports and interfaces, with faults that are made for real: a port that is taken, a hosts file of its own."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys

import pytest

from toolkit.doctor.network import clock_findings, hub_findings, interface_findings, port_findings, skew_finding


def test_a_port_that_is_taken() -> None:
    with socket.socket() as held:
        held.bind(("", 0))
        held.listen()
        port = held.getsockname()[1]
        (finding,) = port_findings(port)
        assert (finding.code, finding.level) == ("PORT_TAKEN", "error")
        assert f"port {port} is in use by" in finding.seen
    assert list(port_findings(port)) == []


def test_interfaces_that_are_absent() -> None:
    def found(**environment: str) -> list[str]:
        return [finding.seen.partition(",")[0] for finding in interface_findings(environment)]

    assert found(NCCL_SOCKET_IFNAME="l", GLOO_SOCKET_IFNAME="lo") == [], "NCCL takes the start of a name"
    assert found(GLOO_SOCKET_IFNAME="l") == ["GLOO_SOCKET_IFNAME=l"]
    assert found(NCCL_SOCKET_IFNAME="=absent0") == ["NCCL_SOCKET_IFNAME==absent0"]
    assert found(NCCL_SOCKET_IFNAME="^docker0") == [], "what it leaves out need not exist"


def test_no_hub_is_asked_for_offline() -> None:
    assert list(hub_findings({"HF_HUB_OFFLINE": "1"})) == []
    (finding,) = hub_findings({"HF_ENDPOINT": "https://hub.invalid/models"})
    assert (finding.code, finding.seen) == ("DNS", "hub.invalid does not resolve")


def test_clocks() -> None:
    assert {finding.code for finding in clock_findings()} <= {"CLOCK_UNSYNCED"}
    assert skew_finding(0.02, 2) is None
    assert skew_finding(90.0, 2).seen == "the clocks of 2 machines differ by 90.0 s"


@pytest.mark.skipif(
    shutil.which("unshare") is None or subprocess.run(["unshare", "-mu", "true"], capture_output=True).returncode != 0,
    reason="no namespaces here",
)
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("127.0.1.1 trainer", "HOSTNAME_LOOPBACK:warning"),
        ("10.1.2.3 trainer", "NETWORK:ok"),
        ("", "HOSTNAME_UNRESOLVED:warning"),
    ],
)
def test_the_hosts_own_name(tmp_path, line: str, expected: str) -> None:
    (tmp_path / "hosts").write_text(f"127.0.0.1 localhost\n{line}\n")
    look = (
        "from toolkit.doctor.network import name_findings as f;"
        "print(*(each.code + ':' + each.level for each in f(nodes=2)))"
    )
    script = f'mount --bind {tmp_path}/hosts /etc/hosts && hostname trainer && exec {sys.executable} -c "{look}"'
    done = subprocess.run(["unshare", "-mu", "sh", "-c", script], capture_output=True, text=True)
    assert done.stdout.split()[0] == expected, done.stderr
