"""Names of machines: SLURM's bracketed lists, and the hosts and hostfiles of horovodrun, mpirun and DeepSpeed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from toolkit.errors import Problem, RunError, raise_all

_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]*[A-Za-z0-9_])?")
_IPV6 = re.compile(r"\[([0-9A-Fa-f:.]+)\]")
_COUNT = re.compile(r"[0-9]{1,9}")
_MOST_HOSTS = 100_000  # a list that names more is a mistake; SLURM itself expands up to 64,000 (MAX_SLURM_NODES)
_OPEN = "open"  # the number of processes of a host that has none
_FORM = "Write host1:4,host2:4, a name and its number of processes each"
_FILE_FORM = "Write a host and its processes on each line, such as `host1 slots=4`"


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One machine of a run.

    Args:
        name: Name or address by which this machine reaches it, of ssh's form without a port; `user@` may stand before it.
        slots: Number of processes to start there; None where it is not given.
    """

    name: str
    slots: int | None

    @property
    def address(self) -> str:
        """Return the name without the user."""
        return self.name.rpartition("@")[2]


def expand_hostlist(text: str) -> tuple[str, ...]:
    """Expand SLURM's list of nodes, `a[1-3,07],b`, into names in its order: what `scontrol show hostnames` prints.

    Numbers keep the width of the first of their range; a name may have several brackets.

    Raises:
        ValueError: Brackets that do not close, a range that is none or runs backwards, or an empty name.
    """
    names: list[str] = []
    for part in _split(text):
        for name in _expand(part):
            names.append(name)
            if len(names) > _MOST_HOSTS:
                raise ValueError(f"more than {_MOST_HOSTS} names")
    return tuple(names)


def _split(text: str) -> Iterator[str]:
    """Split at the commas that stand outside of brackets."""
    depth, start = 0, 0
    for index, letter in enumerate(text):
        depth += {"[": 1, "]": -1}.get(letter, 0)
        if depth not in (0, 1):
            raise ValueError("brackets inside brackets, or one that was not opened")
        if letter == "," and depth == 0:
            yield text[start:index]
            start = index + 1
    if depth:
        raise ValueError("a bracket that does not close")
    yield text[start:]


def _expand(part: str) -> Iterator[str]:
    before, opened, rest = part.partition("[")
    if not opened:
        if not part:
            raise ValueError("an empty name")
        yield part
        return
    inside, _, after = rest.partition("]")
    for number in _numbers(inside):
        # The last bracket varies fastest, as in SLURM.
        yield from ([f"{before}{number}"] if not after else (f"{before}{number}{end}" for end in _expand(after)))


def _numbers(inside: str) -> Iterator[str]:
    for item in inside.split(","):
        first, dash, last = item.partition("-")
        if not (_COUNT.fullmatch(first) and (_COUNT.fullmatch(last) if dash else True)):
            raise ValueError(f"[{item}] is not a number or a range")
        low, high = int(first), int(last) if dash else int(first)
        if high < low or high - low >= _MOST_HOSTS:
            raise ValueError(f"[{item}] runs backwards, or is too long")
        yield from (str(number).zfill(len(first)) for number in range(low, high + 1))


def tasks_of_node(text: str, node: int) -> int | None:
    """Read SLURM's counts by node, `4(x2),3`: those of the node with this index, or None if the text does not say.

    Source:
        man srun, SLURM_STEP_TASKS_PER_NODE.
    """
    counts: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", item.strip())
        if match is None or int(match[2] or 1) > _MOST_HOSTS:
            return None
        counts += [int(match[1])] * int(match[2] or 1)
    return counts[node] if 0 <= node < len(counts) else None


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Read `--hosts` in horovodrun's syntax, `host1:4,host2:4`; a host may stand without a number.

    Raises:
        RunError: HOSTS, with every part that is wrong.
    """
    return _checked([(part.strip(), *_host_and_slots(part.strip())) for part in text.split(",")], "--hosts", _FORM)


def read_hostfile(path: Path) -> tuple[Host, ...]:
    """Read a hostfile: `host slots=4` a line, as horovodrun, mpirun and DeepSpeed take it, or `host:4` as MPICH does.

    What follows a # is a comment. A host may stand without a number.

    Raises:
        RunError: HOSTS, if it cannot be read, with every line that is wrong.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text in UTF-8"
        raise RunError.of(
            code="HOSTS", key="--hostfile", message=f"hostfile={path} cannot be read: {reason}", fix=_FILE_FORM
        ) from None
    found = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        where = f"{path}, line {number}"
        if len(words) == 1:
            found.append((where, *_host_and_slots(words[0])))
        else:
            slots = [word.partition("=")[2] for word in words[1:] if word.startswith("slots=")]
            # Open MPI has max_slots beside slots, which says no more here.
            others = [word for word in words[1:] if not word.startswith(("slots=", "max_slots=", "max-slots="))]
            found.append((where, words[0], "?" if len(slots) != 1 or others else slots[0]))
    return _checked(found, "--hostfile", _FILE_FORM, empty=f"hostfile={path} names no host")


def _host_and_slots(text: str) -> tuple[str, str]:
    if match := re.fullmatch(r"(.*\])(?::(.*))?", text):  # [fe80::1]:4
        return match[1], _OPEN if match[2] is None else match[2]
    name, colon, slots = text.rpartition(":")
    return (name, slots) if colon else (text, _OPEN)


def _checked(found: Sequence[tuple[str, str, str]], key: str, fix: str, *, empty: str = "") -> tuple[Host, ...]:
    problems = [empty] if not found else []
    names = [name for _, name, _ in found]
    for where, name, slots in found:
        told = where if where != name else f"{key} {where}"
        user, _, host = name.rpartition("@")
        if not (_HOST.fullmatch(host) or _IPV6.fullmatch(host)) or user.startswith("-") or (user and " " in user):
            problems.append(f"{told}: {name!r} is not a host name")
        if slots != _OPEN and not (_COUNT.fullmatch(slots) and 1 <= int(slots) <= 1024):
            problems.append(f"{told}: {slots[:80]!r} is not a number of processes")
    problems += [f"{key} names {name} twice" for name in dict.fromkeys(names) if names.count(name) > 1]
    raise_all(RunError, (Problem(code="HOSTS", key=key, message=message, fix=fix) for message in problems))
    return tuple(
        Host(name=_IPV6.sub(r"\1", name), slots=None if slots == _OPEN else int(slots)) for _, name, slots in found
    )
