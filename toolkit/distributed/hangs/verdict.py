"""The decision whether a run hangs, and which rank holds up the others, from what each rank reports; without process groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from toolkit.distributed.hangs.recorder import Operation
from toolkit.distributed.progress import Kind
from toolkit.topology.table import name_ranks

# A message names so many ranks one by one; the files of the ranks have the others.
_NAMED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a rank reports of itself.

    Args:
        rank: Global rank.
        host: Name of its machine.
        pid: Its process.
        started: Time at which the process started, seconds since the epoch: a process id may be taken again.
        beat: Grows with each report.
        doing: What it does, in words.
        kind: Whether that may take any time.
        still_seconds: Time since it last made progress.
        is_still: Whether that is the longest that is allowed.
        pending: Collectives that it has begun and not completed, the oldest first.
        place: Where its Python code is, once it is still.
        unwell: Ranks of its machine whose processes are stopped, have ended or wait for a disk, with words for that.
    """

    rank: int
    host: str
    pid: int
    started: float
    beat: int = 0
    doing: str = "starting"
    kind: Kind = "free"
    still_seconds: float = 0.0
    is_still: bool = False
    pending: tuple[Operation, ...] = ()
    place: str = ""
    unwell: Mapping[int, str]

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON object."""
        return asdict(self)

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Report:
        """Read what `to_dict` returns, also from JSON text."""
        pending = tuple(
            Operation(
                **{
                    **one,
                    "ranks": tuple(one["ranks"]),
                    "sizes": tuple(tuple(size) for size in one["sizes"]),
                }
            )
            for one in value["pending"]
        )
        unwell = {int(rank): state for rank, state in value["unwell"].items()}
        return replace(cls(**{**value, "pending": (), "unwell": {}}), pending=pending, unwell=unwell)

    @property
    def is_busy(self) -> bool:
        """Whether it does something that may take any time, and waits for nobody."""
        return self.kind == "free" and not self.pending


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Which ranks hold up the others.

    Args:
        ranks: These ranks; all of them if none stands out.
        silent: Those of them that report nothing any more.
        message: Who they are, what they do and who waits for them.
        ends: Ranks that will end themselves.
    """

    ranks: tuple[int, ...]
    silent: tuple[int, ...]
    message: str
    ends: tuple[int, ...]


def judge(reports: Mapping[int, Report], *, silent_seconds: Mapping[int, float], size: int) -> Verdict | None:
    """Return which ranks hold up a run in which nobody makes progress; None as long as somebody does or may.

    Args:
        reports: Last report of each rank that has ever made one.
        silent_seconds: Ranks that report nothing any more, with the time since their last report.
        size: Number of ranks.
    """
    silent = sorted({*silent_seconds, *(set(range(size)) - reports.keys())})
    answering = [reports[rank] for rank in sorted(reports) if rank not in silent]
    if not answering or not all(report.is_still for report in answering):
        return None
    if any(report.is_busy for report in answering):
        return None
    ends = tuple(report.rank for report in answering)
    if silent:
        message = "; ".join(_silent(rank, reports, silent_seconds) for rank in silent[:_NAMED])
        return Verdict(ranks=tuple(silent), silent=tuple(silent), message=message + _others(answering), ends=ends)
    stuck = [report for report in answering if not report.pending and report.kind == "bounded"]
    if stuck:
        message = "; ".join(map(_stuck, stuck[:_NAMED])) + _more(len(stuck))
        rest = [report for report in answering if report not in stuck]
        return Verdict(
            ranks=tuple(report.rank for report in stuck), silent=(), message=message + _others(rest), ends=ends
        )
    if not any(report.pending for report in answering):
        return None
    return _mismatch(answering, ends)


def _mismatch(answering: Sequence[Report], ends: tuple[int, ...]) -> Verdict:
    """Compare what the ranks of one group wait in, the group of the operation in which most of them do."""
    waiting = [report for report in answering if report.pending]
    counts = Counter(report.pending[0] for report in waiting)
    most, _ = counts.most_common(1)[0]
    there = tuple(report.rank for report in waiting if report.pending[0] == most)
    absent = [report for report in answering if report.rank in most.ranks and report.rank not in there]
    if not absent:
        message = (
            f"{name_ranks(there)} wait in {most}, and all of the group have begun it: no data moves, so a link or a card between them "
            f"has failed ({_while(waiting[0])})"
        )
        return Verdict(ranks=there, silent=(), message=message, ends=ends)
    apart = "; ".join(f"rank {report.rank} {_place_in(report)}" for report in absent[:_NAMED]) + _more(len(absent))
    verb = "waits" if len(there) == 1 else "wait"
    message = (
        f"the ranks do not call the same collectives: {apart}, while {name_ranks(there)} {verb} in {most} "
        f"({_while(next(report for report in waiting if report.rank in there))})"
    )
    ranks = tuple(report.rank for report in absent)
    # Of two, each may be the one that left out a call.
    return Verdict(
        ranks=ranks if len(there) > len(ranks) else tuple(sorted({*ranks, *there})),
        silent=(),
        message=message,
        ends=ends,
    )


def _place_in(report: Report) -> str:
    if report.pending:
        return f"is in {report.pending[0]} ({_while(report)})"
    return f"is in none of them ({_while(report)})"


def _while(report: Report) -> str:
    return f"{report.doing}{', at ' + report.place if report.place else ''}"


def _silent(rank: int, reports: Mapping[int, Report], seconds: Mapping[int, float]) -> str:
    report = reports.get(rank)
    if report is None:
        return f"rank {rank} has not reported once since the groups were made"
    state = next((other.unwell[rank] for other in reports.values() if rank in other.unwell), None)
    said = (
        f": its process {report.pid} on {report.host} {state}" if state else f" (process {report.pid} on {report.host})"
    )
    where = (
        f", and its Python code is at {report.place}: a library holds Python's lock"
        if report.place and not state
        else ""
    )
    return f"rank {rank} has not responded for at least {seconds[rank]:.0f} s{said}; its last report was of {report.doing}{where}"


def _stuck(report: Report) -> str:
    where = f"; its Python code is at {report.place}" if report.place else ""
    return f"rank {report.rank} has made no progress for {report.still_seconds:.0f} s in {report.doing}, and is in no collective{where}"


def _others(reports: Sequence[Report]) -> str:
    """Return a sentence on where the other ranks wait."""
    waiting = [report for report in reports if report.pending]
    if not waiting:
        return ""
    most, _ = Counter(report.pending[0] for report in waiting).most_common(1)[0]
    there = [report.rank for report in waiting if report.pending[0] == most]
    return f". {name_ranks(there).capitalize()} {'waits' if len(there) == 1 else 'wait'} in {most}"


def _more(count: int) -> str:
    return f"; and {count - _NAMED} more ranks" if count > _NAMED else ""
