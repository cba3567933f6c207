"""A user's own DeepSpeed configuration, a file or a dict, checked as DeepSpeed reads it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from toolkit.arguments import shown
from toolkit.config.accelerate_file import is_accelerate_file
from toolkit.config.yaml_text import parse_yaml, read_named
from toolkit.deepspeed_spec.accelerate_config import made_config
from toolkit.deepspeed_spec.engine_checks import run_findings
from toolkit.deepspeed_spec.facts import EngineFacts
from toolkit.deepspeed_spec.findings import Finding, Place, shortened
from toolkit.deepspeed_spec.json_text import KIND, parse_object
from toolkit.deepspeed_spec.nested import auto_paths, size_fault, with_value, without
from toolkit.deepspeed_spec.priced import unpriced
from toolkit.deepspeed_spec.schema import DeepSpeedConfig
from toolkit.deepspeed_spec.validation import read_config
from toolkit.errors import PlanError, Problem, SpecError, one_line, raise_all

# Name in messages of a configuration that is not a file.
UNNAMED = "deepspeed_config"

# Keys whose "auto" Trainer fills in (transformers integrations/deepspeed.py trainer_config_process, trainer_config_finalize).
TRAINER_AUTO = frozenset(
    {
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
        "fp16.enabled",
        "bf16.enabled",
        "zero_optimization.reduce_bucket_size",
        "zero_optimization.stage3_prefetch_bucket_size",
        "zero_optimization.stage3_param_persistence_threshold",
        *(f"optimizer.params.{name}" for name in ("lr", "betas", "eps", "weight_decay")),
        *(
            f"scheduler.params.{name}"
            for name in ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")
        ),
    }
)
# Keys whose "auto" Accelerate fills in with DeepSpeed's own default (accelerate utils/dataclasses.py DeepSpeedPlugin).
DEFAULT_AUTO = frozenset(
    {
        "zero_optimization.stage3_gather_16bit_weights_on_model_save",
        "zero_optimization.offload_optimizer.device",
        "zero_optimization.offload_param.device",
    }
)
_STAGE = "zero_optimization.stage"


@dataclass(frozen=True, slots=True, kw_only=True)
class UserConfig:
    """A DeepSpeed configuration that DeepSpeed accepts and the estimate supports.

    Args:
        name: Name of the file, for messages.
        config: Keys that DeepSpeed reads, each by one name and with DeepSpeed's type; "auto" where Trainer fills it in.
        reading_notes: Values that DeepSpeed ignores or reads in another way than they are written, one sentence each.
        effect_notes: Values that have no effect together with the rest, one sentence each.
    """

    name: str
    config: dict[str, Any]
    reading_notes: tuple[str, ...] = ()
    effect_notes: tuple[str, ...] = ()

    @property
    def notes(self) -> tuple[str, ...]:
        """Both kinds of notes, one sentence each."""
        return (*self.reading_notes, *self.effect_notes)


def read_user_config(source: Mapping[str, Any] | str | Path) -> UserConfig:
    """Read and check a user's own DeepSpeed configuration.

    Args:
        source: The configuration itself, or the path of its file: plain JSON, as Trainer and Accelerate read it, or an
            Accelerate configuration for DeepSpeed.

    Raises:
        SpecError: FILE_NOT_FOUND, FILE_UNREADABLE, DEEPSPEED_SYNTAX, DEEPSPEED_DUPLICATE or ACCELERATE_FILE; or
            every key at once that DeepSpeed refuses or that is a mistake for another: DEEPSPEED_REMOVED, DEEPSPEED_UNKNOWN,
            DEEPSPEED_VALUE, DEEPSPEED_AUTO and those of its engine; ESTIMATE_UNSUPPORTED for what cannot be estimated.
    """
    name, written, said = _read(source)
    if fault := size_fault(written):
        raise SpecError.of(
            code="DEEPSPEED_UNKNOWN",
            key=name,
            message=f"{name} {fault}, far more than DeepSpeed knows",
            fix="Remove the keys that are not DeepSpeed's",
        )
    place, autos = Place(label=f"{name}: "), auto_paths(written)
    filled = autos & TRAINER_AUTO
    reading = read_config(without(written, filled | (autos & DEFAULT_AUTO)))
    findings = [
        _open_stage(found) if found.path == _STAGE and found.code == "DEEPSPEED_AUTO" else found
        for found in reading.findings
    ]
    effects = run_findings(reading, EngineFacts.of_config(reading.keys, dtype=_dtype(reading.keys, filled)))
    raise_all(SpecError, _problems([*findings, *effects, *unpriced(reading.config)], place))
    config = reading.config
    for path in sorted(filled):
        config = with_value(config, path, "auto")
    return UserConfig(
        name=name,
        config=config,
        reading_notes=(*said, *_notes(findings, place)),
        effect_notes=tuple(_notes(effects, place)),
    )


def notes_of_run(
    user: UserConfig, config: Mapping[str, Any], *, facts: Callable[[DeepSpeedConfig], EngineFacts]
) -> tuple[str, ...]:
    """Return the values that DeepSpeed ignores, or reads in another way than they are written, in a given run.

    Args:
        user: Configuration as it was read.
        config: The same without "auto".
        facts: Function from its keys to facts about the run.

    Raises:
        PlanError: Every key that DeepSpeed or its engine refuses in this run.
    """
    place, reading = Place(label=f"{user.name}: "), read_config(config)
    effects = run_findings(reading, facts(reading.keys))
    raise_all(PlanError, _problems([*reading.findings, *effects], place))
    return (*user.reading_notes, *_notes(effects, place))


def _read(source: object) -> tuple[str, dict[str, Any], tuple[str, ...]]:
    """Return the name of a source, its content, and notes on how it was read."""
    if isinstance(source, str | Path):
        path = Path(source)
        name, text = path.name, read_named(path, kind=KIND)
        if path.suffix in (".yaml", ".yml") and is_accelerate_file(document := parse_yaml(text, name=name)):
            return name, *made_config(document, name=name)
        document = parse_object(text, name=name)
    elif isinstance(source, Mapping):
        name, document = UNNAMED, dict(source)
    else:
        raise SpecError.of(
            code="DEEPSPEED_SYNTAX",
            key=UNNAMED,
            message=f"{UNNAMED}={shown(source)} is a {type(source).__name__}, not a configuration",
            fix="Give a dict, or the path of a JSON file",
        )
    if is_accelerate_file(document):
        return name, *made_config(document, name=name)
    return name, document, ()


def _dtype(keys: DeepSpeedConfig, filled: set[str]) -> str | None:
    enabled = {"bf16": keys.bf16.enabled, "fp16": keys.fp16.enabled}
    if filled & {f"{dtype}.enabled" for dtype in enabled}:
        return None
    return next((dtype for dtype, is_on in enabled.items() if is_on), None)


def _open_stage(finding: Finding) -> Finding:
    """Return the finding of an open stage, for which DeepSpeed and Accelerate have different defaults."""
    return replace(
        finding, message='="auto", which is 0 to DeepSpeed and 2 to Accelerate', fix="Write the stage", outcome="meant"
    )


def _problems(findings: Iterable[Finding], place: Place) -> Iterator[Problem]:
    return (place.problem(finding) for finding in findings if finding.outcome != "other")


def _notes(findings: Iterable[Finding], place: Place) -> Iterator[str]:
    """Yield notes on values that DeepSpeed ignores or reads otherwise; keys ignored for one reason share a sentence."""
    groups: dict[tuple[str, str], list[str]] = {}
    for finding in findings:
        if finding.outcome == "other":
            alone = "" if finding.code == "DEEPSPEED_IGNORED" else finding.path
            groups.setdefault((alone, finding.message), []).append(finding.path)
    for (_, message), (first, *others) in groups.items():
        said = message.replace(" has ", " have ", 1) if others else message
        yield one_line(f"{place.label}{', '.join(map(shortened, (first, *others)))}{said}")
