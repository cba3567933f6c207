"""The plan: every decision about a run, frozen, serialisable and explained."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from toolkit.arguments import checks_arguments, shown
from toolkit.catalog.gpus import Gpu
from toolkit.catalog.models import ModelSpec
from toolkit.config.job import Job
from toolkit.errors import PlanError, RunError, ToolkitError, one_line
from toolkit.io import MAX_TEXT_BYTES, json_text, make_folder, parse_json, read_json_object, write_text
from toolkit.pipeline_schedule import Schedule, StageSpec, build_schedule, stage_of_rank
from toolkit.planning.accelerate_config import accelerate_config
from toolkit.planning.deepspeed_config import Consumer, deepspeed_config
from toolkit.planning.settings import Choice, Settings, disagreements, read_choices
from toolkit.planning.stage_parts import describe_pipeline, describe_tensor
from toolkit.planning.trainer_config import training_arguments
from toolkit.planning.unchecked_plan import UncheckedPlan
from toolkit.topology.grid import Grid

SCHEMA_VERSION = 1

_FP8 = "precision fp8: the products of the decoder layers' linear modules run in float8; everything else as in bf16"
_EMULATED = "; on CPU they are emulated: rounded to float8, multiplied in fp32"
# Llama-3.2-1B on one H100, sequence 2048, micro batch 4: 0.54 of bf16 without, 1.12 of compiled bf16 with torch_compile.
_UNFUSED = "; without torch_compile each matrix is rounded in several passes, and fp8 is about half as fast as bf16"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(UncheckedPlan):
    """A checked description of a run, with every value decided.

    Args:
        choices: One entry per value that is not the schema's own default, with its reason.
    """

    choices: tuple[Choice, ...]

    def __post_init__(self) -> None:
        """Refuse parts of the wrong type and impossible settings, however the plan was made.

        Raises:
            PlanError: PLAN_UNREADABLE.
        """
        for name, kind in _PARTS.items():
            if not isinstance(part := getattr(self, name), kind):
                raise _unsound(f"{name}={shown(part)} is not a {kind.__name__}")
        with _read("settings", _unsound):
            self.settings.check()

    @property
    def grid(self) -> Grid:
        """The pp × dp × tp grid of ranks."""
        return Grid.of(self.job)

    @property
    def schedule(self) -> Schedule:
        """The pipeline schedule of a step."""
        settings = self.settings
        return build_schedule(
            settings.pipeline_schedule,
            pp=self.grid.pp,
            micro_batches=settings.batch.accumulation,
            virtual_stages=settings.virtual_stages,
        )

    def stage(self, pp_rank: int) -> StageSpec:
        """Return the layers of a pipeline rank, and whether it owns the modules before and after them."""
        return stage_of_rank(self.settings.partition, pp_rank, pp=self.grid.pp)

    @property
    def allocator(self) -> Literal["expandable", "native"]:
        """CUDA allocator of runs that the toolkit launches; other scripts run with torch's default."""
        return "native" if self.on_cpu else "expandable"

    @property
    def output_dir(self) -> Path:
        """Folder of metrics, checkpoints and the export."""
        return self.job.train.output_dir

    @checks_arguments
    def deepspeed_config(self, consumer: Consumer = "toolkit") -> dict[str, Any]:
        """Return DeepSpeed's JSON.

        Args:
            consumer: What reads it: `toolkit` is our engine; `trainer` is `transformers.Trainer`; `accelerate` is a plain
                Accelerate script.

        Raises:
            PlanError: The consumer cannot run this plan, with every reason.
        """
        return deepspeed_config(self, consumer)

    @checks_arguments
    def accelerate_config(
        self,
        *,
        deepspeed_config_file: str | Path = "deepspeed-accelerate.json",
        main_process_ip: str | None = None,
    ) -> dict[str, Any]:
        """Return the YAML of `accelerate launch --config_file`, as a mapping; several nodes need `main_process_ip`."""
        return accelerate_config(
            self, deepspeed_config_file=str(deepspeed_config_file), main_process_ip=main_process_ip
        )

    def training_arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of `transformers.TrainingArguments`, DeepSpeed's configuration included."""
        return training_arguments(self)

    def warmup_steps(self, num_steps: int) -> int:
        """Return the length of the learning rate's warm-up in a run of `num_steps` optimizer steps."""
        if self.settings.warmup_steps is not None:
            return self.settings.warmup_steps
        return math.ceil((self.settings.warmup_ratio or 0.0) * num_steps)

    def __str__(self) -> str:
        return self.explain()

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{html.escape(choice.key)}</td><td>{html.escape(json.dumps(choice.value))}</td>"
            f"<td>{html.escape(choice.source)}: {html.escape(choice.reason)}</td></tr>"
            for choice in self.choices
        )
        head = "".join(f"<p>{html.escape(line)}</p>" for line in self._summary())
        return f"<div>{head}<table><tr><th>key</th><th>value</th><th>why</th></tr>{rows}</table></div>"

    def explain(self) -> str:
        """Return in plain text what was decided, where each value came from, and why."""
        lines = [*self._summary(), ""]
        width = max((len(choice.key) for choice in self.choices), default=0)
        for choice in self.choices:
            value = json.dumps(choice.value)
            lines.append(one_line(f"{choice.key:<{width}}  {value:<12}  {choice.source}: {choice.reason}"))
        return "\n".join(lines)

    def _summary(self) -> list[str]:
        return [
            f"{self.model.name} on {self.job.cluster.num_ranks} × {self.gpu.name}",
            f"batch: {self.settings.batch}",
            *([f"pipeline: {describe_pipeline(self)}"] if self.grid.pp > 1 else []),
            *([f"tensor: {describe_tensor(self)}"] if self.grid.tp > 1 else []),
            f"offload {self.profile.name}: {self.offload_meaning}",
            *([self._float8()] if self.settings.precision == "fp8" else []),
        ]

    def _float8(self) -> str:
        if self.on_cpu:
            return _FP8 + _EMULATED
        return _FP8 + ("" if self.job.train.torch_compile else _UNFUSED)

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON object, from which `from_dict` makes an equal plan."""
        return {
            "schema_version": SCHEMA_VERSION,
            "job": self.job.model_dump(mode="json", exclude_unset=True, warnings=False),
            "model": self.model.to_dict(),
            "gpu": self.gpu.model_dump(mode="json", warnings=False),
            "settings": self.settings.to_dict(),
            "allocator": self.allocator,
            "choices": [asdict(choice) for choice in self.choices],
        }

    def to_json(self) -> str:
        """Return the text of plan.json, after reading it back into an equal plan.

        Raises:
            SpecError: The job has a value that no job file could have.
            PlanError: PLAN_UNREADABLE where a part was replaced by one that contradicts the others.
        """
        self.job.checked()
        with _read("plan", _unsound):
            text = json_text(self.to_dict())
            read = Plan._made_of(parse_json(text), _unsound)
        if read != self:
            raise _unsound("it differs from what its own values resolve to")
        return text

    def checked(self) -> Plan:
        """Return an equal plan, read back from what `to_json` writes; raises as it does."""
        return Plan.from_dict(parse_json(self.to_json()))

    @classmethod
    @checks_arguments
    def from_dict(cls, value: Mapping[str, Any]) -> Plan:
        """Read what `to_dict` wrote.

        Raises:
            PlanError: PLAN_UNREADABLE when a key is missing or unknown, or the schema version is another.
        """
        return cls._made_of(value, _unreadable)

    @classmethod
    def _made_of(cls, value: Mapping[str, Any], refusal: Callable[[str], PlanError]) -> Plan:
        version = value.get("schema_version")
        if type(version) is not int or version != SCHEMA_VERSION:
            raise refusal(f"schema_version={version!r}, this version reads {SCHEMA_VERSION}")
        keys = {"schema_version", "job", "model", "gpu", "settings", "allocator", "choices"}
        if wrong := sorted(keys ^ value.keys()):
            raise refusal(f"{', '.join(wrong)} {'is' if len(wrong) == 1 else 'are'} missing or unknown")
        with _read("", refusal):
            # Values that are not JSON, such as NaN, or not text, such as a lone surrogate, could not be written again.
            json.dumps({**value}, allow_nan=False, ensure_ascii=False).encode()
            plan = cls(
                job=Job.model_validate(value["job"]),
                model=ModelSpec.from_dict(value["model"]),
                gpu=Gpu.model_validate(value["gpu"]),
                settings=Settings.from_dict(value["settings"]),
                choices=read_choices(value["choices"]),
            )
        if edited := disagreements(plan.job, plan.settings, plan.choices):
            raise refusal("; ".join(edited))
        if value["allocator"] != plan.allocator:
            raise refusal(f"allocator={value['allocator']!r} is not that of gpu={plan.gpu.name}")
        return plan

    @checks_arguments
    def save(self, path: str | Path) -> None:
        """Write `plan.json` atomically, after reading it back.

        Raises:
            SpecError, PlanError: As `to_json`.
            RunError: EMIT_UNWRITABLE.
        """
        save_text(Path(path), self.to_json())

    @classmethod
    @checks_arguments
    def load(cls, path: str | Path) -> Plan:
        """Read `plan.json`.

        Raises:
            PlanError: PLAN_UNREADABLE.
        """
        try:
            value = read_json_object(Path(path), max_bytes=MAX_TEXT_BYTES)
        except (OSError, ValueError) as error:
            raise _unreadable(f"{path}: {error}") from None
        return cls.from_dict(value)


_PARTS: dict[str, type] = {"job": Job, "model": ModelSpec, "gpu": Gpu, "settings": Settings, "choices": tuple}


@contextmanager
def _read(part: str, refusal: Callable[[str], PlanError]) -> Iterator[None]:
    """Convert any error of reading a malformed part into one refusal."""
    try:
        yield
    except PlanError:
        raise
    except ValidationError as error:
        raise refusal("; ".join(_found(detail, part or error.title) for detail in error.errors())) from error
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError, ToolkitError) as error:
        raise refusal(f"{part}: {error}" if part else str(error)) from error


def _found(detail: Any, part: str) -> str:
    """Return what is wrong with one value of a plan."""
    key = ".".join(map(str, (part, *detail["loc"])))
    return f"{key}={detail['input']!r:.80} is not valid ({detail['msg']})"


def _unreadable(what: str) -> PlanError:
    return _refused(f"the plan cannot be read: {what}")


def _unsound(what: str) -> PlanError:
    return _refused(f"the plan was edited and is no longer consistent: {what}")


def _refused(message: str) -> PlanError:
    return PlanError.of(
        code="PLAN_UNREADABLE",
        key="plan.json",
        message=message,
        fix="Write it again with `toolkit emit JOB.yaml --out DIR`; to change a value, change the job (--set, in "
        "Python job.with_(...)) and resolve it again",
    )


def save_text(path: Path, text: str) -> None:
    """Write a text file and its folder.

    Raises:
        RunError: EMIT_UNWRITABLE.
    """
    try:
        make_folder(path.parent)
        write_text(path, text)
    except OSError as error:
        raise RunError.of(
            code="EMIT_UNWRITABLE",
            key=str(path),
            message=f"{path} cannot be written: {getattr(error, 'strerror', None) or error}",
            fix="Name a file that you may write, on a disk with room",
        ) from error
