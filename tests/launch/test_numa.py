"""NUMA nodes as the system tells them, who has chosen a process's processors already, and a binding that is undone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from toolkit.launch import numa
from toolkit.launch.numa import node_of_card, node_processors, parse_numbers, restriction


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """Makes the /sys of a machine with two sockets of four processors, a card on the second, and memory without processors."""
    files = {
        "devices/system/cpu/online": "0-7",
        "devices/system/node/node0/cpulist": "0-1,4-5",
        "devices/system/node/node1/cpulist": "2-3,6-7",
        "devices/system/node/node2/cpulist": "",
        "devices/system/node/has_cpu": "0-1",
        "bus/pci/devices/0000:17:00.0/numa_node": "1",
        "bus/pci/devices/0001:18:00.0/numa_node": "-1",
        "fs/cgroup/cpuset.cpus.effective": "0-7",
        "fs/cgroup/container/cpuset.cpus.effective": "0-3",
    }
    for name, text in files.items():
        (tmp_path / "sys" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "sys" / name).write_text(f"{text}\n")
    return tmp_path / "sys"


def in_group(folder: Path, line: str) -> Path:
    (folder / "cgroup").write_text(f"{line}\n")
    return folder


@pytest.mark.parametrize(("text", "numbers"), [("", []), ("3\n", [3]), ("0-2,8,10-11", [0, 1, 2, 8, 10, 11])])
def test_lists_of_the_kernel(text: str, numbers: list[int]) -> None:
    assert sorted(parse_numbers(text)) == numbers


def test_nodes_with_processors_and_the_node_of_a_card(machine: Path) -> None:
    assert node_processors(machine) == {0: {0, 1, 4, 5}, 1: {2, 3, 6, 7}}
    assert node_of_card("0000:17:00.0", machine) == 1
    assert node_of_card("00000000:17:00.0", machine) == 1  # as NVML writes it
    assert node_of_card("00000001:18:00.0", machine) is None  # a virtual machine that does not tell
    assert node_of_card("0000:99:00.0", machine) is None
    assert node_processors(machine / "absent") == {}


def test_whoever_has_chosen_processors_is_left_alone(machine: Path, tmp_path: Path) -> None:
    def why(allowed: str, *, line: str = "0::/", **environment: str) -> str | None:
        proc = in_group(tmp_path, line)
        return restriction(environment, allowed=parse_numbers(allowed), sys=machine, proc=proc)

    assert why("0-7") is None
    assert "2 of 8 processors (taskset" in str(why("0-1"))
    assert why("0-3", line="0::/container") is None  # a container's processors are for its processes to share
    assert "1 of 4 processors" in str(why("2", line="0::/container"))
    assert why("0-3", line="0::/container/below/it") is None
    assert "SLURM has given it 4 of 8" in str(why("0-3", line="0::/container", SLURM_JOB_ID="7"))
    assert why("0-7", SLURM_JOB_ID="7") is None  # the whole machine
    old = machine / "fs/cgroup/cpuset/docker"
    old.mkdir(parents=True)
    (old / "cpuset.effective_cpus").write_text("4-7\n")
    assert why("4-7", line="3:cpuset,cpu:/docker") is None


# In a process of its own: whatever fails, the tests' processors stay.
BOUND = """
import os, threading
from toolkit.launch import numa

def of_new_thread():
    found = []
    thread = threading.Thread(target=lambda: found.extend([os.sched_getaffinity(0), numa.memory_policy()]))
    thread.start(); thread.join()
    return found

all_of_them = frozenset(os.sched_getaffinity(0))
go_on, asleep, there = threading.Event(), threading.Event(), []
other = threading.Thread(target=lambda: (asleep.set(), go_on.wait(), there.append(os.sched_getaffinity(0))))
other.start(); asleep.wait()
one = frozenset([max(all_of_them)])
before = numa.restriction({})
binding = numa.bind(0, one)
assert os.sched_getaffinity(0) == one
assert os.sched_getaffinity(other.native_id) == one, "threads that were there"
processors, policy = of_new_thread()
assert processors == one and policy == (1 if binding.prefers_memory else numa.memory_policy())
if before is None and len(all_of_them) > 1:
    assert "1 of" in numa.restriction({}), "what is bound is not bound again"
binding.release()
assert os.sched_getaffinity(0) == all_of_them == os.sched_getaffinity(other.native_id)
assert of_new_thread()[0] == all_of_them and numa.memory_policy() in (0, None)
go_on.set()
"""


def test_a_process_is_bound_with_all_its_threads_and_is_free_again() -> None:
    done = subprocess.run([sys.executable, "-c", BOUND], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_real_system_can_be_read() -> None:
    found = node_processors()
    assert all(node >= 0 and processors for node, processors in found.items())
    if found:
        assert frozenset(os.sched_getaffinity(0)) <= frozenset().union(*found.values())
    assert numa.memory_policy() in (None, 0, 1, 2, 3, 4, 5, 6)
