"""What `toolkit train` needs beyond a valid plan: data, weights and a tokenizer, which a user's own script may supply."""

from __future__ import annotations

from collections.abc import Iterator

from toolkit.catalog.models import ModelSpec
from toolkit.catalog.pretrained import weight_problems
from toolkit.catalog.tasks import task_of
from toolkit.config.job import Job, Task
from toolkit.errors import Problem, SpecError
from toolkit.planning.rules.tasks import TRAINED_TASKS
from toolkit.topology.grid import join


def training_problems(job: Job, model: ModelSpec) -> Iterator[Problem]:
    """Yield the reasons for which `toolkit train` would refuse a job whose plan is valid.

    Args:
        job: Job as the user wrote it.
        model: Model that the job resolved to.

    Returns:
        TRAIN_NO_DATA, MODEL_NO_WEIGHTS, WEIGHTS_BIN, TOKENIZER_NOT_FOUND, or nothing.
    """
    yield from data_section_problems(job)
    yield from task_problems(task_of(job.model, model.config))
    if job.model.init != "random":
        yield from weight_problems(model)
    if job.data is not None:
        try:
            tokenizer_source(job, model)
        except SpecError as error:
            yield from error.problems


def task_problems(task: Task) -> Iterator[Problem]:
    """Yield TASK_UNSUPPORTED for a task whose batches `toolkit train` does not make."""
    if task not in TRAINED_TASKS:
        yield Problem(
            code="TASK_UNSUPPORTED",
            key="model.task",
            message=f"task={task}: `toolkit train` makes no batches for this task, which is estimated, and trained by batches of your own",
            fix="Give `run.step` batches with input_ids and labels in a loop of yours (docs/loop.md), or name a model of "
            f"{join(TRAINED_TASKS)}",
        )


def data_section_problems(job: Job) -> Iterator[Problem]:
    """Yield TRAIN_NO_DATA for a job without a data section."""
    if job.data is None:
        yield Problem(
            code="TRAIN_NO_DATA",
            key="data",
            message="the job has no data section: there is nothing to train on",
            fix="Add `data: {train: FILE}` with a .jsonl, .txt, .csv or .parquet file, or a hub id",
        )


def tokenizer_source(job: Job, model: ModelSpec) -> str:
    """Return the hub id or folder that the tokenizer is read from; needs no transformers.

    Raises:
        SpecError: TOKENIZER_NOT_FOUND when the job names dimensions only.
    """
    if job.model.tokenizer is not None:
        return job.model.tokenizer
    source = str(model.path) if model.path else model.hub_id
    if source is None or model.origin in ("catalogue", "file"):
        raise tokenizer_not_found(f"model={job.model.name} gives dimensions only, and no tokenizer")
    return source


def tokenizer_not_found(what: str) -> SpecError:
    """Return the error of a job whose tokenizer cannot be found, given what is wrong."""
    return SpecError.of(
        code="TOKENIZER_NOT_FOUND",
        key="model.tokenizer",
        message=what,
        fix="Set model.tokenizer to a hub id or a folder with tokenizer.json",
        source="transformers AutoTokenizer",
    )
