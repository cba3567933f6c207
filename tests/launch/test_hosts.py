"""Lists of machines, as SLURM, horovodrun, mpirun, MPICH and DeepSpeed write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.errors import RunError
from toolkit.launch.hosts import Host, expand_hostlist, parse_hosts, read_hostfile, tasks_of_node


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("node1", ["node1"]),
        ("a,b-2,c.example.org", ["a", "b-2", "c.example.org"]),
        ("gpu[07-10]", ["gpu07", "gpu08", "gpu09", "gpu10"]),
        ("gpu[1,3-4,9],login", ["gpu1", "gpu3", "gpu4", "gpu9", "login"]),
        ("r[1-2]n[08-09]", ["r1n08", "r1n09", "r2n08", "r2n09"]),
        ("n[1-2]-ib", ["n1-ib", "n2-ib"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
    ],
)
def test_lists_are_expanded_in_their_order(text, names):
    assert list(expand_hostlist(text)) == names


@pytest.mark.parametrize(
    "text", ["", "a,,b", "n[1", "n1]", "n[3-1]", "n[a-b]", "n[]", "n[1-]", "n[[1]]", "n[1-999999999]"]
)
def test_lists_that_are_none(text):
    with pytest.raises(ValueError):
        expand_hostlist(text)


PREFIX = st.text("abcxyz-", min_size=1, max_size=4)
RANGES = st.lists(st.tuples(st.integers(0, 200), st.integers(0, 5), st.integers(1, 4)), min_size=1, max_size=4)
SUFFIX = st.one_of(st.just(""), st.sampled_from(["-ib", ".cluster"]))


@given(st.lists(st.tuples(PREFIX, RANGES, SUFFIX), min_size=1, max_size=4))
def test_what_is_written_with_brackets_is_what_is_read(parts):
    """Written here by other code: each range low, more, width."""
    texts, names = [], []
    for prefix, ranges, suffix in parts:
        inside = []
        for low, more, width in ranges:
            numbers = [f"{number:0{width}d}" for number in range(low, low + more + 1)]
            # SLURM keeps the width of the first; a longer number is written in full.
            inside.append(numbers[0] if more == 0 else f"{numbers[0]}-{low + more:0{width}d}")
            names += [f"{prefix}{number:0{len(numbers[0])}d}{suffix}" for number in range(low, low + more + 1)]
        texts.append(f"{prefix}[{','.join(inside)}]{suffix}")
    assert list(expand_hostlist(",".join(texts))) == names


@given(st.text("ab[],-019", max_size=12))
def test_no_text_raises_anything_else(text):
    try:
        names = expand_hostlist(text)
    except ValueError:
        return
    assert names
    assert all(name and "[" not in name and "," not in name for name in names)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 4)), min_size=1, max_size=5))
def test_counts_of_tasks(groups):
    text = ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in groups)
    counts = [count for count, times in groups for _ in range(times)]
    assert [tasks_of_node(text, node) for node in range(len(counts) + 1)] == [*counts, None]


def test_hosts_in_horovodruns_syntax():
    assert parse_hosts("a:4, user@b.example:2,[fe80::1]:3,d") == (
        Host(name="a", slots=4),
        Host(name="user@b.example", slots=2),
        Host(name="fe80::1", slots=3),
        Host(name="d", slots=None),
    )
    assert parse_hosts("user@b:1")[0].address == "b"


def test_everything_wrong_with_hosts_is_told_at_once():
    with pytest.raises(RunError) as caught:
        parse_hosts("a:4,b:none,-oProxyCommand=x:1,a:4,:3")
    assert set(caught.value.codes) == {"HOSTS"}
    told = str(caught.value)
    assert all(
        part in told for part in ("'none' is not a number", "'-oProxyCommand=x'", "names a twice", "'' is not a host")
    )


@pytest.mark.parametrize("slots", ["\u0663", "9" * 5000, "0", "1025"])
def test_slots_are_a_number_of_plain_digits(slots):
    with pytest.raises(RunError, match="is not a number of processes"):
        parse_hosts(f"a:{slots}")


def test_hostfiles_of_four_launchers(tmp_path):
    file = tmp_path / "hostfile"
    file.write_text("# ours\nn1 slots=4\nn2 slots=4 max_slots=8  # Open MPI\n\nn3:4\nn4\n")
    assert [(host.name, host.slots) for host in read_hostfile(file)] == [("n1", 4), ("n2", 4), ("n3", 4), ("n4", None)]
    file.write_text("n1 slots=4\nn2 gpus=4\n")
    with pytest.raises(RunError, match=r"line 2: .* is not a number of processes"):
        read_hostfile(file)
    file.write_text("# none\n")
    with pytest.raises(RunError, match="names no host"):
        read_hostfile(file)
    with pytest.raises(RunError, match="cannot be read: No such file"):
        read_hostfile(tmp_path / "absent")
