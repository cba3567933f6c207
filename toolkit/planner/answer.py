"""The answer of the planner: rows to choose from, the one that is recommended, what almost fits, and what was assumed."""

from __future__ import annotations

import datetime
import html
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.catalog.tasks import task_of
from toolkit.errors import PlanError, SpecError
from toolkit.planner.lines import describe_layout, enough_usd, format_hours, format_usd
from toolkit.planner.options import Found, Option, pareto_front, raise_if_invalid, recommend, within_limits
from toolkit.planner.question import Question
from toolkit.planner.rates import scaling_rules
from toolkit.planner.reasons import absent_kinds, reason_of, why
from toolkit.planner.rows import COLUMNS, RIGHT, Row, html_table, nearly_dict, nearly_line
from toolkit.planner.search import DEAREST
from toolkit.units import format_bytes

if TYPE_CHECKING:
    from toolkit.config.job import Job
    from toolkit.planning.plan import Plan

# Rows beside the front that a table shows, and clusters that almost fit.
_MOST_OTHERS, _MOST_NEARLY = 6, 4


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Answer:
    """What to rent and what to run on it; `print` shows the table, and so does a notebook.

    Args:
        question: What was asked.
        rows: The front of hours and price, the cheapest first, then other plans that were estimated.
        recommended: The row to take where nothing else is known.
        nearly: Clusters that almost hold the job, with exact figures of what they lack.
        found: How the search went.
        today: Day on which the ages of prices are counted.
        also: What other methods of training that the user allows would take, or why they cannot.
    """

    question: Question
    rows: tuple[Row, ...]
    recommended: Row
    nearly: tuple[Option, ...]
    found: Found
    today: datetime.date
    also: tuple[str, ...] = ()

    @property
    def front(self) -> tuple[Row, ...]:
        """The rows that no other beats in both hours and price."""
        return tuple(row for row in self.rows if row.on_front)

    def row(self, number: int) -> Row:
        """Return a row by its number.

        Raises:
            SpecError: PLAN_ROW.
        """
        for row in self.rows:
            if row.number == number:
                return row
        raise SpecError.of(
            code="PLAN_ROW",
            key="--row",
            message=f"row={number} is not in the table",
            fix=f"Name a row from 1 to {len(self.rows)}",
        )

    @property
    def job(self) -> Job:
        """The completed job of the recommended row."""
        return self.recommended.job

    @property
    def plan(self) -> Plan:
        """The plan of the recommended row."""
        return self.recommended.plan

    @property
    def headline(self) -> str:
        """What was planned, in one line."""
        question = self.question
        passes = "" if question.epochs == 1 else f" × {question.epochs:g} epochs"
        return f"{question.model.name}, {question.job.train.method}, {question.tokens:,.0f} tokens{passes}"

    @property
    def recommendation(self) -> str:
        """The recommended row in one line."""
        return self.recommended.line

    def notes(self) -> list[str]:
        """Return what a reader should know of the table, one line each."""
        question, found = self.question, self.found
        shown = [row.option.cluster for row in self.rows]
        offers = [cluster.offer for cluster in shown if cluster.offer is not None]
        notes = [f"`toolkit train` would refuse the job: {problem}" for problem in question.refused]
        notes += [*self.also, *(f"assumed: {assumption}" for assumption in question.assumptions)]
        if question.draws:
            notes.append(f"compiled layers are not chosen: they would draw other random numbers for {question.draws}")
        unlisted = dict.fromkeys(f"{cluster.offer.provider} {cluster.offer.offer.instance}" for cluster in shown
                                 if cluster.offer is not None and cluster.assumes_memory)  # fmt: skip
        if unlisted:
            notes.append(
                f"assumed: the RAM of {', '.join(unlisted)}, which the provider does not list, is an even share of that of "
                "the card's typical machine"
            )
        if offers:
            notes.append(f"prices: {question.prices.dated}; without storage, traffic and taxes")
            notes += question.prices.notes(self.today, offers)
        unpriced = [gpu.name for gpu in question.gpus if question.seeks_cluster and not question.prices.of(gpu.name)]
        if unpriced:
            notes.append(f"no price is known of {', '.join(unpriced)}: --prices FILE_OR_URL takes a list with them")
        notes += absent_kinds(question, found, [row.option for row in self.rows])
        if found.cut_short:
            notes.append(
                f"the search ended after {found.seconds:.0f} s; arithmetic left {found.cut_short} clusters that might be as "
                "good: --seconds gives it longer"
            )
        if not found.compiled and question.said("train.torch_compile") is None:
            clusters = "1 cluster" if found.uncompiled == 1 else f"{found.uncompiled} clusters"
            counted = f", which might make {clusters} better" if found.uncompiled else ""
            notes.append(
                f"compiled layers (train.torch_compile) were not tried{counted}: --compiled tries them, and so do --write, --emit and "
                "--report without --row"
            )
        elif found.uncompiled:
            notes.append(
                f"compiled layers were not tried on {found.uncompiled} clusters that they might make better: --seconds gives the search longer"
            )
        if question.seeks_cluster and question.deadline_hours is None:
            notes.append(
                f"clusters over {DEAREST:g} times the lowest price are not looked at: --deadline-hours asks for faster ones"
            )
        if any(row.option.setting.loss == "liger" or row.option.setting.kernels == "liger" for row in self.rows):
            notes.append(
                "liger loss and kernels need `pip install liger-kernel` on the cluster; --no-liger plans without"
            )
        whole = [str(row.number) for row in self.rows if row.option.setting.experts == "whole"]
        if whole and question.said("parallel.experts") is None:
            notes.append(
                f"whole experts (row {', '.join(whole)}): tensor ranks compute the rows of their own experts alone, assumed to be equally many; "
                "--set parallel.experts=sliced plans without"
            )
        notes += [f"{what}: {problems[0]}" for what, problems in list(found.failures.items())[:3] if problems]
        hosts = [str(row.number) for row in self.rows if row.option.step is not None and row.option.step.host_bound]
        if hosts:
            notes.append(f"bound by the host, with a wider range of hours: row {', '.join(hosts)}")
        if (
            any(row.option.cluster.gpu.supports("fp8") for row in self.rows)
            and question.said("train.precision") is None
            and task_of(question.job.model, question.model.config) != "image-text-to-text"  # which refuses it
        ):
            notes.append(
                "not chosen because it changes the arithmetic: train.precision=fp8 (--set), faster on cards with fp8"
            )
        return notes

    def to_dict(self) -> dict[str, Any]:
        """Return the answer as a JSON object, in the words of `toolkit plan --json`."""
        found = self.found
        return {
            "question": self.question.to_dict(),
            "recommended": self.recommended.number,
            "rows": [row.to_dict() for row in self.rows],
            "nearly": [nearly_dict(option) for option in self.nearly],
            "failures": [
                {"what": what, "problems": [problem.as_dict() for problem in problems]}
                for what, problems in found.failures.items()
            ],
            "search": {
                "clusters": found.num_clusters,
                "foreseen_to_fit": found.num_foreseen,
                "estimates": found.num_estimates,
                "seconds": found.seconds,
                "cut_short": found.cut_short,
                "uncompiled": found.uncompiled,
            },
            "learning_rate_rules": [rule.to_dict() for rule in self.learning_rate_rules],
            "other_methods": list(self.also),
            "notes": self.notes(),
        }

    @property
    def learning_rate_rules(self) -> tuple[Any, ...]:
        """Rules for the learning rate where the user changes the global batch; none is applied."""
        settings = self.recommended.plan.settings
        return scaling_rules(settings.batch.train, settings.learning_rate)

    def __str__(self) -> str:
        from toolkit.planner.lines import text_table

        lines = [self.headline, "", *text_table(COLUMNS, [row.cells() for row in self.rows], right=RIGHT), ""]
        lines.append(f"recommended: row {self.recommended.number}, {self.recommendation}")
        lines += [f"almost fits: {nearly_line(option)}" for option in self.nearly]
        lines += [str(rule) for rule in self.learning_rate_rules]
        return "\n".join([*lines, *self.notes()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        said = [f"recommended: row {self.recommended.number}, {self.recommendation}"]
        said += [f"almost fits: {nearly_line(option)}" for option in self.nearly]
        said += [*map(str, self.learning_rate_rules), *self.notes()]
        below = "".join(f"<li>{html.escape(line)}</li>" for line in said)
        return (
            f"<div><p>{html.escape(self.headline)}</p>{html_table(self.rows, bold=self.recommended)}"
            f"<ul style='font-size:smaller'>{below}</ul></div>"
        )

    def write_job(self, path: str | Path, row: int | None = None) -> None:
        """Write the completed job of a row as YAML.

        Raises:
            RunError: EMIT_UNWRITABLE.
            SpecError: PLAN_ROW.
        """
        from toolkit.planner.files import write_job

        write_job(self.recommended if row is None else self.row(row), Path(path), question=self.question)

    def write_report(self, path: str | Path, row: int | None = None) -> None:
        """Write one page of HTML that needs no network: recommendation, memory, front, topology, files and commands.

        Raises:
            RunError: EMIT_UNWRITABLE.
            SpecError: PLAN_ROW.
        """
        from toolkit.planner.report_page import write_report

        write_report(self, self.recommended if row is None else self.row(row), Path(path))


def answer_of(question: Question, found: Found, *, today: datetime.date | None = None) -> Answer:
    """Choose the rows among what a search found.

    Raises:
        PlanError: PLAN_NONE_FITS, PLAN_BUDGET, PLAN_DEADLINE; and if no plan is valid at all what the rules say.
    """
    raise_if_invalid(found)
    if not found.options:
        raise _none_fits(question, found)
    within = within_limits(question, found.options)
    if not within:
        raise _beyond_limits(question, found)
    known = _one_of_each_cluster(_affordable(question, within)) if question.seeks_cluster else within
    front = pareto_front(known)
    chosen = recommend(question, known)
    shown = [*front, *_others(question, known, front, chosen)]
    reason = reason_of(question, unlike_tight=chosen is not recommend(question, known, even_tight=True))
    rows = tuple(
        Row(
            number=number,
            option=option,
            on_front=number <= len(front),
            why=why(option, front, reason if option is chosen else "", seeks_cluster=question.seeks_cluster),
        )
        for number, option in enumerate(shown, start=1)
    )
    return Answer(
        question=question,
        rows=rows,
        recommended=next(row for row in rows if row.option is chosen),
        nearly=tuple(_one_of_each_cluster(found.nearly)[:_MOST_NEARLY]),
        found=found,
        today=today or datetime.datetime.now().astimezone().date(),
    )


def _others(question: Question, known: list[Option], front: list[Option], chosen: Option) -> list[Option]:
    """Return the rows beside the front: the cheapest, the one that is recommended, and one of each kind of card that was named."""
    behind = [option for option in known if not any(option is each for each in front)]
    behind.sort(key=lambda each: each.usd or each.hours)
    kept = behind[:_MOST_OTHERS]
    kinds = {option.cluster.gpu.name for option in (*front, *kept)}
    for option in behind[_MOST_OTHERS:]:
        if option is chosen or (question.names_cards and option.cluster.gpu.name not in kinds):
            kinds.add(option.cluster.gpu.name)
            kept.append(option)
    return kept


def _affordable(question: Question, options: list[Option]) -> list[Option]:
    """Return the options without those that are too dear to be looked at, which were estimated before a cheaper one was known.

    Of a kind of card that was named the cheapest stays.
    """
    prices = [option.usd for option in options if option.usd is not None]
    if not prices or question.deadline_hours is not None:
        return options
    kept: list[Option] = []
    for option in sorted(options, key=lambda each: each.usd or 0.0):
        is_first = not any(each.cluster.gpu is option.cluster.gpu for each in kept)
        if (option.usd or 0.0) <= DEAREST * min(prices) or (question.names_cards and is_first):
            kept.append(option)
    return kept


def _one_of_each_cluster(options: list[Option]) -> list[Option]:
    """Return the cheapest option of each cluster of the same machines."""
    kept: dict[tuple[str, int, int], Option] = {}
    for option in sorted(options, key=lambda each: (each.step is not None and each.usd) or 0.0):
        cluster = option.cluster
        kept.setdefault((cluster.gpu.name, cluster.gpus_per_node, cluster.nodes), option)
    return list(kept.values())


def _none_fits(question: Question, found: Found) -> PlanError:
    """Return the error of a job that no cluster holds: what comes nearest, and what to change."""
    method = question.job.train.method
    changes = []
    if question.seeks_cluster:
        changes += [f"allow more cards than --max-gpus {question.max_gpus}", "name other cards with --gpus"]
    else:
        changes.append("use more cards, or leave the cluster out to see which hold it")
    changes += ["shorten train.sequence_length"] + (["train by --method lora"] if method == "full" else [])
    pinned = [key for key in ("train.gradient_checkpointing", "parallel.zero_stage", "parallel.offload", "train.loss",
                              "train.per_device_train_batch_size") if question.said(key) is not None]  # fmt: skip
    if pinned:
        changes.append(f"leave {', '.join(pinned)} open")
    if found.nearly:
        nearest = f"nearest is {nearly_line(found.nearly[0])}"
    elif found.best_foreseen:
        cluster, setting, foreseen = min(
            found.best_foreseen, key=lambda each: each[2].required_bytes / (each[0].gpu.memory_bytes or 1)
        )
        needed = format_bytes(foreseen.required_bytes)
        nearest = (
            f"nearest is {cluster.name}, which would need about {needed} a card ({describe_layout(cluster, setting)})"
        )
    elif not found.num_clusters:
        nearest = "no cluster of these cards has a price"
    else:
        nearest = "no layout keeps the global batch on any of them"
    fix = "; or ".join(changes)
    return PlanError.of(
        code="PLAN_NONE_FITS",
        key="cluster",
        message=f"no plan fits {question.model.name} on any of {found.num_clusters} clusters: {nearest}",
        fix=fix[0].upper() + fix[1:],
    )


def _beyond_limits(question: Question, found: Found) -> PlanError:
    """Return the error of limits that no plan keeps, with the cheapest and the fastest, and why named kinds of cards have no plan."""
    options = found.options
    cheapest = min(options, key=lambda each: each.usd if each.usd is not None else float("inf"))
    fastest = min(options, key=lambda each: each.hours)
    budget, deadline = question.budget_usd, question.deadline_hours
    facts = (
        f"the cheapest plan is {cheapest.cluster.name}, {format_usd(cheapest.usd)} USD in {format_hours(cheapest.hours)} hours; "
        f"the fastest {fastest.cluster.name}, {format_hours(fastest.hours)} hours for {format_usd(fastest.usd)} USD"
    )
    facts = "; ".join([facts, *absent_kinds(question, found, options)])
    affordable = [option for option in options if budget is None or (option.usd is not None and option.usd <= budget)]
    if budget is not None and not affordable:
        return PlanError.of(
            code="PLAN_BUDGET",
            key="--budget-usd",
            message=f"budget_usd={budget:g} is below any plan for {question.total_tokens:,.0f} tokens: {facts}",
            fix=f"Raise it to {enough_usd(cheapest.usd)}, train on fewer tokens, or rent spot machines with --spot",
        )
    what = f"deadline_hours={deadline:g}" + ("" if budget is None else f" with budget_usd={budget:g}")
    return PlanError.of(
        code="PLAN_DEADLINE",
        key="--deadline-hours",
        message=f"{what} is shorter than any plan for {question.total_tokens:,.0f} tokens: {facts}",
        fix="Give it longer, allow more cards with --max-gpus, or train on fewer tokens"
        + ("" if budget is None else ", or raise --budget-usd"),
    )
