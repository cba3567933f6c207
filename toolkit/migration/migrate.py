"""A job from the files of other tools, and what became of each of their keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from toolkit.arguments import Positive, checks_arguments
from toolkit.catalog.gpus import find_gpu
from toolkit.config.job import Job
from toolkit.config.loader import parse_job
from toolkit.errors import Problem, RunError, SpecError, ToolkitError, raise_all
from toolkit.io import write_text
from toolkit.migration.deepspeed import DEEPSPEED
from toolkit.migration.draft import Draft
from toolkit.migration.job_text import job_text
from toolkit.migration.ms_swift import COMMAND
from toolkit.migration.outcomes import Entry, Outcome
from toolkit.migration.reading import Reading, Together
from toolkit.migration.sources import Part, Sources, read_sources
from toolkit.planning.resolve import resolve

# Cards of a node, where only their number over all nodes is known.
_MOST_OF_A_NODE = 8
_KEEPS_ALL = "{tool} keeps every checkpoint where save_total_limit is left out; a job keeps the last two, or as many as train.save_total_limit"
_OUTCOMES: tuple[Outcome, ...] = ("carried", "default", "not needed", "not carried")


@dataclass(frozen=True, slots=True, kw_only=True)
class Migration:
    """A job that says what the files of other tools say.

    Args:
        files: Files that were read, each with its tool.
        document: The job as nested mappings.
        text: The job as YAML, with comments.
        entries: What became of each key.
        notes: Differences that no single key has, one sentence each.
        problems: What the job still lacks, or what `toolkit validate` refuses.
    """

    files: tuple[tuple[str, str], ...]
    document: dict[str, Any]
    text: str
    entries: tuple[Entry, ...]
    notes: tuple[str, ...]
    problems: tuple[Problem, ...]

    @property
    def not_carried(self) -> tuple[Entry, ...]:
        """The keys that the job does not say."""
        return tuple(entry for entry in self.entries if entry.outcome == "not carried")

    @property
    def counts(self) -> dict[str, int]:
        """Number of keys by what became of them."""
        return {outcome: sum(entry.outcome == outcome for entry in self.entries) for outcome in _OUTCOMES}

    def job(self) -> Job:
        """Return the job.

        Raises:
            SpecError: Keys that it still lacks, such as `model`.
        """
        return parse_job(self.document)

    @checks_arguments
    def write(self, path: str | Path, *, overwrite: bool = False) -> None:
        """Write the job file.

        Raises:
            SpecError: EMIT_WOULD_OVERWRITE.
            RunError: EMIT_UNWRITABLE.
        """
        target = Path(path)
        if target.exists() and not overwrite and not target.is_char_device():
            raise SpecError.of(
                code="EMIT_WOULD_OVERWRITE",
                key=str(path),
                message=f"{path} exists and would be overwritten",
                fix="Name another file",
            )
        try:
            write_text(target, self.text)
        except OSError as error:
            raise RunError.of(
                code="EMIT_UNWRITABLE",
                key=str(path),
                message=f"{path} cannot be written: {error.strerror or error}",
                fix="Name a file that you may write, in a folder that exists",
            ) from None


@checks_arguments
def migrate(
    files: str | Path | Sequence[str | Path],
    *,
    gpu: str | None = None,
    gpus_per_node: Positive | None = None,
    nodes: Positive | None = None,
    model: str | None = None,
) -> Migration:
    """Return the job that says what files of DeepSpeed, Accelerate, Trainer, TRL, axolotl, LLaMA-Factory or ms-swift say.

    Args:
        files: Files of one run, or command lines; files that they name are read too.
        gpu: Card, which none of these files says.
        gpus_per_node: Cards of a node, in place of what the files say.
        nodes: Nodes, in place of what the files say.
        model: Model, where a script of yours names it.

    Raises:
        SpecError: GPU_UNKNOWN or ACCELERATOR for `gpu`; a file that cannot be read, is of no tool that is known (MIGRATE_UNKNOWN), trains by preferences
            (MIGRATE_METHOD), or contradicts another one (MIGRATE_CONTRADICTION).
    """
    given = [files] if isinstance(files, str | Path) else list(files)
    if not given:
        raise SpecError.of(
            code="MIGRATE_UNKNOWN", key="files", message="no file is named", fix="Name one file or several"
        )
    if gpu is not None:
        find_gpu(gpu)
    sources = read_sources(given)
    draft = Draft()
    for target, value, option in (
        ("cluster.gpu", gpu, "--gpu"),
        ("cluster.gpus_per_node", gpus_per_node, "--num-gpus"),
        ("cluster.nodes", nodes, "--nodes"),
        ("model.name", model, "--model"),
    ):
        if value is not None:
            draft.fix(target, value, option)
    entries = tuple(entry for part in sources.parts for entry in _read_part(part, sources, draft))
    raise_all(SpecError, dict.fromkeys(draft.problems))
    _infer_ranks(draft)
    if sources.trainer is not None and draft.get("train.save_total_limit") is None:
        draft.notes.append(_KEEPS_ALL.format(tool=sources.trainer.table.tool))
    document = draft.document()
    return Migration(
        files=sources.names,
        document=document,
        text=job_text(draft, entries, files=sources.names),
        entries=entries,
        notes=tuple(dict.fromkeys(draft.notes)),
        problems=remaining_problems(document),
    )


def _read_part(part: Part, sources: Sources, draft: Draft) -> tuple[Entry, ...]:
    deepspeed = None if sources.deepspeed is None else sources.deepspeed.content
    together = Together(
        deepspeed=deepspeed,
        trainer=sources.trainer is not None,
        strategy=sources.accelerate is not None and part.table is not DEEPSPEED,
    )
    reading = Reading(table=part.table, leaves=part.leaves, draft=draft, together=together)
    return (*(entry for entry in reading.run() if entry.leaf.key != COMMAND), *part.replaced)


def _infer_ranks(draft: Draft) -> None:
    """Set the number of cards from the three batch keys, where nothing else says it."""
    if draft.is_said("cluster.gpus_per_node"):
        return
    sizes = [
        draft.get(f"train.{key}")
        for key in ("train_batch_size", "per_device_train_batch_size", "gradient_accumulation_steps")
    ]
    if None in sizes:
        return
    whole, micro, steps = (int(size) for size in sizes)
    nodes, model_ranks = draft.get("cluster.nodes") or 1, draft.get("parallel.tensor") or 1
    replicas, rest = divmod(whole, micro * steps)
    cards, odd = divmod(replicas * model_ranks, nodes)
    if rest or odd or not 0 < cards <= _MOST_OF_A_NODE:
        return
    draft.put("cluster.gpus_per_node", cards, why=f"{whole} = {micro} × {steps} × {replicas} data-parallel ranks")


def remaining_problems(document: dict[str, Any]) -> tuple[Problem, ...]:
    """Return what a job still lacks, or what its plan refuses; the data and the tokenizer are checked by `toolkit validate`."""
    try:
        resolve(parse_job(document))
    except ToolkitError as error:
        return tuple(map(_with_option, error.problems))
    return ()


def _with_option(problem: Problem) -> Problem:
    """Return a problem of a key that no file of the other tools has with the option that gives it."""
    options = {"cluster": "--gpu NAME", "cluster.gpu": "--gpu NAME", "model": "--model NAME"}
    if problem.code != "KEY_MISSING" or problem.key not in options:
        return problem
    return replace(problem, fix=f"Add it, or give {options[problem.key]}")
