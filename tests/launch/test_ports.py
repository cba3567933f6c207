from __future__ import annotations

import os
import re
import socket

import pytest

from toolkit.errors import RunError
from toolkit.launch.ports import check_port, free_port


def listener(port: int = 0, *, address: str = "127.0.0.1") -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    held = socket.socket(family, socket.SOCK_STREAM)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind((address, port))
    held.listen()
    return held


def test_a_free_port_can_be_listened_on():
    port = free_port()
    check_port(port)
    with listener(port) as held:
        assert held.getsockname()[1] == port


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0", "::1"])
def test_a_port_in_use_names_its_holder_and_a_free_one(address):
    try:
        held = listener(address=address)
    except OSError:
        pytest.skip(f"this machine has no {address}")
    with held:
        port = held.getsockname()[1]
        with pytest.raises(RunError) as caught:
            check_port(port)
    (problem,) = caught.value.problems
    assert (problem.code, problem.key) == ("PORT_IN_USE", "cluster.master_port")
    assert f"master_port={port}" in problem.message
    assert f"(process {os.getpid()})" in problem.message
    named = int(re.findall(r"\d+", problem.fix)[-1])
    assert named != port
    check_port(named)


def test_a_connection_that_lingers_does_not_take_the_port():
    with listener() as held:
        port = held.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):
            accepted, _ = held.accept()
            accepted.close()  # the side that closes first goes to TIME_WAIT
    check_port(port)
