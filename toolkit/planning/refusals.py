"""Why a plan has no files for Trainer or Accelerate, in one line per distinct reason."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from toolkit.errors import Problem
from toolkit.planning.rules.integrations import NAMES, OWN


def refusals(found: Mapping[str, Sequence[Problem]]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Group what is refused for the same reasons.

    Args:
        found: Problems of `consumer_problems`, by the user's name of what is refused: a library, or a file.

    Yields:
        The names that are refused, and one line of reasons, fix and codes.
    """
    alike: dict[tuple[str, ...], list[str]] = {}
    for name, problems in found.items():
        if problems:
            alike.setdefault(tuple(_reason(problem, anonymous=True) + problem.fix for problem in problems), []).append(
                name
            )
    for names in alike.values():
        yield tuple(names), _line([found[name] for name in names])


def _line(of_names: Sequence[Sequence[Problem]]) -> str:
    problems = of_names[0]
    raw = [[_reason(problem, anonymous=False) for problem in of_name] for of_name in of_names]
    same = all(reasons == raw[0] for reasons in raw)
    reasons = raw[0] if same else [_reason(problem, anonymous=True) for problem in problems]
    fix = problems[0].fix if len(problems) == 1 else f"{OWN[0].upper()}{OWN[1:]}"
    return f"{'; '.join(reasons)}. {fix}. [{', '.join(problem.code for problem in problems)}]"


def _reason(problem: Problem, *, anonymous: bool) -> str:
    """Return the first clause of a problem, which names what only our engine supports."""
    reason = problem.message.partition(": ")[0]
    for name in NAMES.values() if anonymous else ():
        reason = reason.replace(name, "either")
    return reason
