"""Every check of a job that needs neither torch nor network, at once."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from toolkit.catalog.gpus import find_gpu
from toolkit.catalog.models import ModelSpec, resolve_model
from toolkit.catalog.tasks import task_of
from toolkit.catalog.tokenizer import TokenizerFacts, read_tokenizer_facts
from toolkit.cli.options import collect
from toolkit.config.job import Job
from toolkit.config.paths import path_kind, shown
from toolkit.config.user_code import unfound
from toolkit.dataset_inspection.chat_template import NO_CHAT_TEMPLATE_FIX, ChatTemplate
from toolkit.dataset_inspection.formats import Format, formats_without_images
from toolkit.dataset_inspection.inspect import DatasetFacts, peek
from toolkit.dataset_inspection.labels import data_of_task
from toolkit.errors import Problem, SpecError
from toolkit.launch.packages import tracker_problems
from toolkit.planning.plan import Plan
from toolkit.planning.plan_warnings import plan_warnings
from toolkit.planning.refusals import refusals
from toolkit.planning.resolve import resolve, resolve_with
from toolkit.planning.rules.integrations import consumer_problems
from toolkit.planning.trainable import task_problems, training_problems
from toolkit.planning.unchecked_plan import labels_of
from toolkit.topology.placement import place_job

_CONSUMERS = {"trainer": "transformers.Trainer", "accelerate": "Accelerate scripts"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Result of checking a job.

    Args:
        job: Job; None if some of its keys cannot be read.
        plan: Plan; None if there are problems.
        data: Data; None without a data section.
        problems: Everything that stops the job.
        warnings: What the user should know and may intend, one sentence each.
        untrainable: What a job needs to be trained and not to be planned, and lacks; one of the warnings has them all.
    """

    job: Job | None
    plan: Plan | None
    data: DatasetFacts | None
    problems: tuple[Problem, ...]
    warnings: tuple[str, ...]
    untrainable: tuple[Problem, ...] = ()


def check(job: Job, *, rules: bool = True, decided: Plan | None = None) -> Verdict:
    """Check model, card, plan, placement, data files and tokenizer; report every error, not the first alone.

    Args:
        job: Job to check.
        rules: Whether to check plan and placement; else only what each key names.
        decided: Resolved plan of the job, if there is one: it is what will run, and what is checked.
    """
    problems: list[Problem] = []
    model = collect(problems, lambda: resolve_model(job.model))
    gpu = collect(problems, lambda: find_gpu(job.cluster.gpu))
    plan = None
    if model is not None and gpu is not None and rules:
        decide = partial(resolve_with, job, model=model, gpu=gpu) if decided is None else partial(resolve, decided)
        plan = collect(problems, decide)
    if rules:
        collect(problems, lambda: place_job(job))
    unread = len(problems)
    tokenizer = collect(problems, lambda: _tokenizer_folder(job, model))
    facts = None if tokenizer is None else collect(problems, lambda: read_tokenizer_facts(tokenizer))
    readable = tokenizer is not None and len(problems) == unread
    data = None
    if job.data is not None:
        config = {} if model is None else model.config
        task = task_of(job.model, config)
        reads_images = task == "image-text-to-text"
        labels = None if model is None else labels_of(job.model, config, task)
        asked = data_of_task(job.data, task)
        data, found = peek(
            asked,
            template=_chat_template(facts, images=reads_images),
            runs_code=True,
            labels=labels,
            images=reads_images,
        )
        if any(task_problems(task)):  # nothing reads them
            data = None
        else:
            problems += found
            if reads_images:
                problems += formats_without_images(data.formats)
    problems += output_problems(job.train.output_dir)
    problems += user_code_problems(job)
    if readable and tokenizer is not None and (data is not None or job.model.tokenizer is not None):
        for format_ in data.formats if data is not None and data.formats else (None,):
            problems += _tokenizer_problems(tokenizer, facts, job, format_)
    kept = tuple(dict.fromkeys(problems))
    untrainable = () if model is None else (*training_problems(job, model), *tracker_problems(job.train.report_to))
    return Verdict(
        job=job,
        plan=None if kept else plan,
        data=data,
        problems=kept,
        warnings=(
            *_refused(untrainable),
            *_warnings(job, model, plan, facts),
            *(data.warnings if data is not None else ()),
        ),
        untrainable=untrainable,
    )


def _refused(untrainable: Sequence[Problem]) -> Iterator[str]:
    """Yield one line of all that `toolkit train` needs, and a job lacks."""
    if len(untrainable) > 1:
        listed = " ".join(f"({number}) {problem}" for number, problem in enumerate(untrainable, start=1))
        yield f"`toolkit train` would refuse it until {len(untrainable)} things are filled in: {listed}"
    elif untrainable:
        yield f"`toolkit train` would refuse it: {untrainable[0]}"


def user_code_problems(job: Job) -> Iterator[Problem]:
    """Yield a problem for each name of the user's Python that is not found, without running its module."""
    for name in job.train.callbacks:
        yield from unfound("train.callbacks", name)
    for key in ("compute_metrics", "compute_loss"):
        if (named := getattr(job.train, key)) is not None:
            yield from unfound(f"train.{key}", named)
    if job.data is not None and job.data.preprocess is not None:
        yield from unfound("data.preprocess", job.data.preprocess)


def output_problems(folder: Path) -> Iterator[Problem]:
    """Yield a problem if output_dir, or a folder above it, is a file."""
    try:
        path_kind(folder, key="train.output_dir")
    except SpecError as error:
        yield from error.problems
        return
    nearest = next((path for path in (folder, *folder.parents) if os.path.lexists(path)), None)
    if nearest is not None and not nearest.is_dir():
        yield Problem(
            code="OUTPUT_PATH",
            key="train.output_dir",
            message=f"output_dir={folder}: {nearest} exists and is not a folder",
            fix="Set train.output_dir to another folder, or move that file",
        )


def _tokenizer_folder(job: Job, model: ModelSpec | None) -> Path | None:
    """Return the local folder that the tokenizer will be read from; None for the hub, or if there is none.

    Raises:
        SpecError: PATH_UNREADABLE; TOKENIZER_NOT_FOUND, for what can only be a folder and is not one.
    """
    name = job.model.tokenizer
    if name is None:
        return model.path if model is not None and model.origin == "folder" else None
    folder = Path(name)
    kind = path_kind(folder, key="model.tokenizer")
    if kind == "folder":
        return folder
    if kind != "absent" or name.startswith((".", "/", "~")):
        raise SpecError.of(
            code="TOKENIZER_NOT_FOUND",
            key="model.tokenizer",
            message=f"tokenizer={shown(name)} is not a folder on this machine",
            fix="Name a folder with tokenizer.json, or a hub id",
        )
    return None


def _chat_template(facts: TokenizerFacts | None, *, images: bool) -> ChatTemplate | None:
    if facts is None or facts.chat_template is None:
        return None
    return ChatTemplate(facts.chat_template, facts.eos_token, lists=images)


def _tokenizer_problems(
    folder: Path, facts: TokenizerFacts | None, job: Job, format_: Format | None
) -> Iterator[Problem]:
    if facts is None:
        yield Problem(
            code="DATA_NO_TOKENIZER",
            key="model.tokenizer",
            message=f"{folder} has no tokenizer, so the data cannot be tokenised",
            fix="Set model.tokenizer to a folder with tokenizer.json, or to a hub id",
        )
        return
    has_template = facts.has_chat_template or (job.data is not None and job.data.chat_template is not None)
    if format_ == "messages" and not has_template:
        yield Problem(
            code="DATA_NO_CHAT_TEMPLATE",
            key="model.tokenizer",
            message=f"the tokenizer in {folder} has no chat template, which data of the format messages needs",
            fix=NO_CHAT_TEMPLATE_FIX,
        )
    if format_ in ("text", "prompt_completion") and facts.eos_token is None:
        yield Problem(
            code="DATA_NO_EOS",
            key="model.tokenizer",
            message=f"the tokenizer in {folder} has no eos_token, so nothing would mark the end of a document",
            fix="Set eos_token in its tokenizer_config.json, or name another tokenizer in model.tokenizer",
        )


def _warnings(job: Job, model: ModelSpec | None, plan: Plan | None, facts: TokenizerFacts | None) -> Iterator[str]:
    if model is not None and model.origin == "hub" and not model.has_weights and job.model.init != "random":
        yield (
            f"model={model.name} has no complete safetensors in the hub's cache, and the hub is offline or "
            "unreachable: to train, go online, or set model.init to random"
        )
    if model is not None and facts is not None and (facts.vocab_size or 0) > model.vocab_size:
        # Not an error: published tokenizers hold tokens that never occur in text (Gemma 3), and training checks ids.
        yield (
            f"the tokenizer has {facts.vocab_size} tokens, the model's embedding {model.vocab_size} rows: training "
            f"stops at a document with a token id above {model.vocab_size - 1}"
        )
    if plan is not None:
        yield from plan_warnings(plan)


def consumer_notes(plan: Plan) -> Iterator[str]:
    """Yield which of Trainer and Accelerate cannot run a plan, and why.

    A time limit of our loop alone is no reason here: whoever writes files for Trainer is told by `toolkit emit`.
    """
    found = {
        name: tuple(
            problem for problem in consumer_problems(plan, consumer) if problem.key != "train.hang_timeout_minutes"
        )
        for consumer, name in _CONSUMERS.items()
    }
    for names, reason in refusals(found):
        yield f"not for {' or '.join(names)}: {reason}"
