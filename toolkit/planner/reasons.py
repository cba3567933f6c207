"""Why a row stands in the answer, why it is behind others, and why a kind of card that was named has none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from toolkit.planner.clusters import candidate_clusters
from toolkit.planner.lines import counted, describe_layout, format_hours, format_usd
from toolkit.planner.options import AS_FAST, Found, Option
from toolkit.planner.question import Question
from toolkit.planner.rows import nearly_line
from toolkit.units import format_bytes


def reason_of(question: Question, *, unlike_tight: bool) -> str:
    """Return by what a row is recommended.

    Args:
        question: What was asked.
        unlike_tight: Whether a better one by what is sought is left aside because it is tight.
    """
    if not question.seeks_cluster:
        return f"the least memory within {AS_FAST - 1:.0%} of the fastest"
    if question.deadline_hours is not None:
        reason = f"the cheapest within {counted(question.deadline_hours, 'hour')}"
    elif question.budget_usd is not None:
        reason = f"the fastest within {question.budget_usd:g} USD"
    else:
        reason = "the least hours × USD"
    return f"{reason} that is not tight" if unlike_tight else reason


def why(option: Option, front: Sequence[Option], reason: str, *, seeks_cluster: bool) -> str:
    """Return what speaks for an option, or against it.

    Args:
        option: The option.
        front: The options that no other beats, the cheapest first: rows 1 and on.
        reason: By what it is recommended; "" if it is not.
        seeks_cluster: Whether the cluster was sought.
    """
    said = [reason] if reason else []
    if not any(option is each for each in front):
        said.append(_behind(option, front, seeks_cluster=seeks_cluster))
    elif option is front[0]:
        if len(front) > 1 and not reason.startswith("the cheapest"):
            said.append("the cheapest")
        elif len(front) == 1 and not reason:
            said.append("the fastest")
    else:
        if option is front[-1] and not reason.startswith("the fastest"):
            said.append("the fastest")
        if option.usd and front[0].usd:
            said.append(
                f"{_times(front[0].hours / option.hours)} as fast as row 1 for {option.usd / front[0].usd:.2f} × its price"
            )
    if option.is_default:
        said.append("the fixed defaults")
    if option.report.tight:
        said.append("tight")
    return "; ".join(said)


def _behind(option: Option, front: Sequence[Option], *, seeks_cluster: bool) -> str:
    """Return which row beats an option: the fastest that costs no more."""
    number, best = max(
        (number, each)
        for number, each in enumerate(front, start=1)
        if each.hours <= option.hours and (each.usd or 0.0) <= (option.usd or 0.0)
    )
    said = f"row {number} is {_times(option.hours / best.hours)} as fast"
    if seeks_cluster and best.usd and option.usd:
        return f"{said} for {best.usd / option.usd:.2f} × the price"
    spared = best.report.required_bytes - option.report.required_bytes
    return f"{said}; this needs {format_bytes(spared)} a card less" if spared > 0 else said


def _times(factor: float) -> str:
    return f"{factor:.2f} ×" if factor < 1.1 else f"{factor:.1f} ×"


def absent_kinds(question: Question, found: Found, shown: Sequence[Option]) -> Iterator[str]:
    """Yield why kinds of cards that were named are not among the options that are shown; those without a price are told elsewhere."""
    if not question.names_cards:
        return
    present = {option.cluster.gpu.name for option in shown}
    for gpu in question.gpus:
        if gpu.name not in present and question.prices.of(gpu.name):
            yield f"none with {gpu.name}: {_why_absent(question, found, gpu.name)}"


def _why_absent(question: Question, found: Found, name: str) -> str:
    options = [option for option in found.options if option.cluster.gpu.name == name]
    if options:
        budget = question.budget_usd
        cheap = [each for each in options if budget is None or (each.usd is not None and each.usd <= budget)]
        best = min(cheap or options, key=lambda each: each.hours if cheap else each.usd or 0.0)
        limit = "--deadline-hours" if cheap else "--budget-usd"
        return (
            f"{best.cluster.name} takes {format_hours(best.hours)} hours and {format_usd(best.usd)} USD, beyond {limit}"
        )
    nearly = [option for option in found.nearly if option.cluster.gpu.name == name]
    if nearly:
        return nearly_line(nearly[0])
    foreseen = [each for each in found.best_foreseen if each[0].gpu.name == name]
    if foreseen:
        cluster, setting, least = min(foreseen, key=lambda each: each[2].required_bytes)
        return (
            f"{cluster.name} would need about {format_bytes(least.required_bytes)} of "
            f"{format_bytes(cluster.gpu.memory_bytes or 0)} a card ({describe_layout(cluster, setting)})"
        )
    if name in found.unseen:
        return "the search ended before it, --seconds gives it longer"
    reasons = {what: problems for what, problems in (*found.failures.items(), *found.refused.items()) if name in what}
    for what, problems in reasons.items():
        return f"{what}: {problems[0]}"
    offered = candidate_clusters(
        tuple(gpu for gpu in question.gpus if gpu.name == name),
        question.prices,
        max_gpus=question.max_gpus,
        spot=question.spot,
    )
    if not offered:
        spot = ", as spot" if question.spot else ""
        return f"no machine with at most {counted(question.max_gpus, 'card')} of it is offered{spot}"
    return "no layout keeps the global batch on its clusters"
