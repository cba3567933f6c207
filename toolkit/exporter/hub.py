"""The model card of an export, written from the plan of its run, and the upload of both to the hub."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, ModelCardData
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from toolkit.catalog.architectures import AUTO_CLASSES
from toolkit.catalog.models import ModelSpec
from toolkit.checkpoint.state import State
from toolkit.config.job import DataSource, Task
from toolkit.dataset_inspection.inspect import is_hub_id
from toolkit.errors import RunError, first_line, raise_all
from toolkit.exporter.export import ExportReport
from toolkit.launch.packages import token_problems
from toolkit.planning.plan import Plan
from toolkit.units import format_count, format_seconds

CARD = "README.md"
_METRICS = "metrics.jsonl"


# The hub's names of pipelines, by which it finds models.
PIPELINES: Mapping[Task, str] = {
    "causal-lm": "text-generation",
    "sequence-classification": "text-classification",
    "token-classification": "token-classification",
    "masked-lm": "fill-mask",
    "seq2seq-lm": "text2text-generation",
    "image-text-to-text": "image-text-to-text",
}


def write_card(folder: Path, report: ExportReport, plan: Plan, state: State, metrics: Path) -> None:
    """Write an export's README.md: base model, data, settings, figures and versions. Local paths are shortened to names.

    Args:
        folder: Folder of the export.
        report: What was written.
        plan: Plan of the run.
        state: State of its checkpoint.
        metrics: Folder of the run's metrics.jsonl, whose figures are used if it is there.
    """
    base = base_model(plan.model)
    data = ModelCardData(
        base_model=base if "/" in base and plan.settings.init == "pretrained" else None,
        library_name="peft" if report.kind == "adapter" else "transformers",
        pipeline_tag=PIPELINES[plan.settings.task],
        tags=[PIPELINES[plan.settings.task], plan.job.train.method, plan.job.parallel.strategy],
        datasets=[name for name, _ in _sources(plan) if _is_on_hub(name)] or None,
    )
    title = f"{base.rpartition('/')[2]}, {_method(plan)}"
    begins = "Its weights were drawn at random." if plan.settings.init == "random" else ""
    sections = [
        f"---\n{data.to_yaml()}\n---",
        f"# {title}",
        f"Trained from {base} by version {state.versions.get('toolkit', 'unknown')} of toolkit. {begins}".strip(),
        *_remarks(plan, report),
        "The license is not known here: set `license` in the header of this file.",
        "## Data\n\n" + _table(_data_rows(plan)),
        "## Settings\n\n" + _table(_setting_rows(plan, report)),
        "## Figures\n\n" + _table(_figures(plan, state, metrics / _METRICS)),
        "## Versions\n\n" + _table(sorted(state.versions.items())),
    ]
    (folder / CARD).write_text("\n\n".join(sections) + "\n", encoding="utf-8")


def base_model(model: ModelSpec) -> str:
    """Return the name of a model without local folders: its id on the hub, else the last part of its path."""
    return model.hub_id or Path(model.name).name


def push(folder: Path, repo: str, *, public: bool = False) -> str:
    """Upload an export in one commit, and return the address of the repository.

    Args:
        folder: Folder of the export, which stays as it is.
        repo: `name` of a repository of the token's owner, or `owner/name`; created if it does not exist.
        public: Whether a repository that is created is public. One that exists keeps its visibility.
    Raises:
        RunError: HUB_TOKEN, HUB_REPO, HUB_RIGHTS, HUB_FAILED.
    """
    raise_all(RunError, token_problems("--push-to-hub", repo))
    api = HfApi()
    again = f"the export is whole in {folder}. Push it with `hf upload {repo} {folder}`"
    try:
        made = api.create_repo(repo, private=not public, exist_ok=True)
        api.upload_folder(repo_id=made.repo_id, folder_path=folder, commit_message=f"Upload {folder.name}")
    except HFValidationError as error:
        raise _failed(repo, first_line(error), f"Name it `owner/name`; {again}", code="HUB_REPO") from None
    except HfHubHTTPError as error:
        status = error.response.status_code
        reason = first_line(error.server_message or error)
        if status in (401, 403, 404):
            fix = f"Use a token with write access to it; {again}"
            raise _failed(repo, f"the hub refuses with {status}: {reason}", fix, code="HUB_RIGHTS") from error
        raise _failed(repo, f"the hub answers with {status}: {reason}", again, code="HUB_FAILED") from error
    except Exception as error:  # the network's libraries raise many kinds
        what = f"{type(error).__name__}: {first_line(error)}"
        raise _failed(repo, f"the upload did not finish: {what}", again, code="HUB_FAILED") from error
    return str(made)


def _failed(repo: str, what: str, fix: str, *, code: str) -> RunError:
    return RunError.of(
        code=code, key="push_to_hub", message=f"push_to_hub={repo}: {what}", fix=fix[0].upper() + fix[1:]
    )


def _remarks(plan: Plan, report: ExportReport) -> Iterator[str]:
    """Yield what a user of the export must know to load it."""
    if report.kind == "adapter" and plan.labels is not None:
        yield f"The head for the classes is in the adapter. To load it onto its base:\n\n```python\n{_loading(plan)}\n```"
    if report.kind == "adapter" and plan.job.model.rope_scaling is not None:
        wanted = {key: plan.model.config[key] for key in ("rope_parameters", "max_position_embeddings")}
        keys = "\n".join(f"config.{key} = {value}" for key, value in wanted.items())
        yield f"Load the base model with a configuration of\n\n```python\n{keys}\n```"
    if report.kind == "adapter" and plan.job.model.resizes:
        resize = f"base.resize_token_embeddings({plan.model.vocab_size})"
        yield f"Before the adapter is put on, the base model's embeddings must have as many rows:\n\n```python\n{resize}\n```"


def _loading(plan: Plan) -> str:
    """Return the code that loads a classifier's adapter: the names of its classes are not in the base, and a decoder needs the padding to find ends."""
    assert plan.labels is not None
    auto = AUTO_CLASSES[plan.settings.task]
    kind = "" if plan.labels.problem_type is None else f'\n    problem_type="{plan.labels.problem_type}",'
    return f"""\
from peft import PeftModel
from transformers import {auto}, AutoTokenizer

adapter = "path/of/this/adapter"  # or its repository on the hub
tokenizer = AutoTokenizer.from_pretrained(adapter)
labels = {list(plan.labels.names)!r}
base = {auto}.from_pretrained(
    "{base_model(plan.model)}",
    num_labels=len(labels),
    id2label=dict(enumerate(labels)),
    label2id={{name: number for number, name in enumerate(labels)}},{kind}
    pad_token_id=tokenizer.pad_token_id,
)
model = PeftModel.from_pretrained(base, adapter)"""


def _method(plan: Plan) -> str:
    return {"full": "fine-tuned", "lora": "LoRA", "qlora": "QLoRA"}[plan.job.train.method]


def _sources(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield the name and a remark of each training source; files by their names alone."""
    data = plan.job.data
    for _, source in () if data is None else data.sources_of("train"):
        remarks = {"revision": source.revision, "split": source.split if _is_on_hub(source.path) else None}
        if isinstance(source, DataSource) and source.weight != 1:
            remarks["weight"] = f"{source.weight:g}"
        said = ", ".join(f"{name} {value}" for name, value in remarks.items() if value is not None)
        yield source.path if _is_on_hub(source.path) else Path(source.path).name, said


def _is_on_hub(name: str) -> bool:
    return "/" in name and is_hub_id(name) and not Path(name).exists()


def _data_rows(plan: Plan) -> list[tuple[str, str]]:
    data = plan.job.data
    if data is None:
        return [("source", "a script of the user's")]
    learned = data.loss_on if isinstance(data.loss_on, str) else ", ".join(data.loss_on)
    rows = [("source", f"{name} ({said})" if said else name) for name, said in _sources(plan)]
    if plan.labels is not None:
        kind = f" ({plan.labels.problem_type})" if plan.labels.problem_type else ""
        return [*rows, ("labels", ", ".join(plan.labels.names) + kind)]
    return [*rows, ("packing", plan.packing), ("loss on", learned)]


def _setting_rows(plan: Plan, report: ExportReport) -> list[tuple[str, str]]:
    train, settings, batch = plan.job.train, plan.settings, plan.settings.batch
    rows = [
        ("method", train.method),
        ("written", f"{report.kind}, {report.dtype}"),
        ("strategy", plan.strategy_name),
        ("precision", settings.precision),
        ("sequence length", f"{settings.sequence_length}"),
        (
            "batch",
            f"{batch.train} = {batch.micro} × {batch.accumulation} accumulated × {batch.dp_size} data-parallel ranks",
        ),
        ("optimizer", train.optimizer),
        ("learning rate", f"{settings.learning_rate:g}, {train.lr_scheduler_type}"),
        ("weight decay", f"{train.weight_decay:g}"),
        ("gradient clipping", f"{train.max_grad_norm:g}"),
        ("seed", f"{train.seed}"),
    ]
    if train.method != "full":
        rows.insert(1, ("adapters", f"rank {train.adapters.r}, alpha {train.adapters.lora_alpha:g}"))
    return rows


def _figures(plan: Plan, state: State, metrics: Path) -> list[tuple[str, str]]:
    """Return the run's length and, where its metrics are there, the last losses, tokens and time up to the checkpoint."""
    rows = [("steps", f"{state.step:,}" + (f" of {state.num_steps:,}" if state.num_steps else ""))]
    if plan.model.num_parameters is not None:
        rows.append(("parameters", format_count(plan.model.num_parameters)))
    loss: float | None = None
    evaluated: dict[str, float] = {}
    sets = {f"eval_{metric}": f"last validation {metric}" for metric in plan.settings.metrics}
    named = () if plan.job.data is None else plan.job.data.eval_sets
    sets |= {
        f"eval_{name}_{metric}": f"last validation {metric} of {name}"
        for name in named
        for metric in plan.settings.metrics
    }
    tokens = seconds = 0.0
    before = 0
    for record in _records(metrics, state.step, sets):
        evaluated |= {key: record[key] for key in sets if key in record}
        if "loss" not in record:
            continue
        loss = record["loss"]
        took = record["step_seconds"] * (record["step"] - before)
        tokens, seconds, before = tokens + record["tokens_per_second"] * took, seconds + took, record["step"]
    if loss is not None:
        rows.append(("last training loss", f"{loss:.4f}"))
    rows += [(told, f"{evaluated[key]:.4f}") for key, told in sets.items() if key in evaluated]
    if seconds:
        rows.append(("tokens, with padding", f"{tokens:,.0f}"))
        devices = f"{plan.grid.world_size} × {plan.gpu.name}"
        rows.append(("time", f"{format_seconds(seconds)} of steps on {devices}"))
    return rows


def _records(metrics: Path, step: int, sets: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yield the records of a run up to a step; what is not whole is skipped, as of any file that a user may edit."""
    try:
        lines = metrics.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return
    for line in lines:
        try:
            record = json.loads(line)
            numbers = {name: record[name] for name in ("step", "loss", "step_seconds", "tokens_per_second", *sets) if record.get(name) is not None}  # fmt: skip
            if not all(isinstance(value, int | float) for value in numbers.values()) or numbers["step"] > step:
                continue
        except (ValueError, LookupError, AttributeError, TypeError):
            continue
        if "loss" in numbers and not {"step_seconds", "tokens_per_second"} <= set(numbers):
            continue
        yield numbers


def _table(rows: list[tuple[str, str]]) -> str:
    cells = ((name, " ".join(value.split()).replace("|", "\\|")) for name, value in rows)
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in cells)])
