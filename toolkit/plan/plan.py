"""The plan: frozen, serialisable, explained. Everything before it is arithmetic, everything after it obeys it."""

from __future__ import annotations

import json
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from toolkit.errors import PlanError, ToolkitError
from toolkit.io import parse_json
from toolkit.plan.accelerate_config import accelerate_config
from toolkit.plan.deepspeed_config import Consumer, deepspeed_config
from toolkit.plan.draft import Draft
from toolkit.plan.settings import Choice, Settings, disagreements, read_choices
from toolkit.plan.stage_parts import describe_pipeline, describe_tensor
from toolkit.plan.trainer_config import training_arguments
from toolkit.spec.catalogue import Gpu
from toolkit.spec.job import Job
from toolkit.spec.model import ModelSpec
from toolkit.topology.grid import Grid

SCHEMA_VERSION = 1

_FP8 = (
    "precision fp8: the products of the decoder layers' linear modules run in float8; parameters, gradients, the optimizer "
    "and all else as in bf16"
)
_EMULATED = "; on CPU they are emulated: rounded to float8, multiplied in fp32"
# Llama-3.2-1B on one H100, sequence 2048, micro batch 4: 0.54 of bf16 without, 1.12 of compiled bf16 with torch_compile.
_UNFUSED = "; without torch_compile each matrix is rounded in several passes, and fp8 is about half as fast as bf16"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(Draft):
    """What will run, down to the last value.

    Args:
        choices: One entry a value that is not the schema's own default, with its reason.
    """

    choices: tuple[Choice, ...]

    @property
    def grid(self) -> Grid:
        """The pp × dp × tp grid of ranks."""
        parallel = self.job.parallel
        dp_size = self.job.cluster.num_ranks // (parallel.tensor * parallel.pipeline)
        return Grid(pp=parallel.pipeline, dp=dp_size, tp=parallel.tensor)

    @property
    def allocator(self) -> Literal["expandable", "native"]:
        """CUDA allocator of our own launches; scripts that are not ours run with torch's default."""
        return "native" if self.on_cpu else "expandable"

    @property
    def output_dir(self) -> Path:
        """Where metrics, checkpoints and the export go."""
        return self.job.train.output_dir

    def deepspeed_config(self, consumer: Consumer = "toolkit") -> dict[str, Any]:
        """Gives DeepSpeed's JSON for our engine, for `transformers.Trainer` or for a plain Accelerate script.

        Raises:
            PlanError: The consumer cannot carry this plan; says what stands in the way.
        """
        return deepspeed_config(self, consumer)

    def accelerate_config(
        self, *, deepspeed_config_file: str = "deepspeed-accelerate.json", main_process_ip: str | None = None
    ) -> dict[str, Any]:
        """Gives the YAML of `accelerate launch --config_file`, as a mapping; several nodes need `main_process_ip`."""
        return accelerate_config(self, deepspeed_config_file=deepspeed_config_file, main_process_ip=main_process_ip)

    def training_arguments(self) -> dict[str, Any]:
        """Gives keyword arguments of `transformers.TrainingArguments`, DeepSpeed's configuration included."""
        return training_arguments(self)

    def explain(self) -> str:
        """Says in plain text what was decided, where each value came from, and why."""
        lines = [
            f"{self.model.name} on {self.job.cluster.num_ranks} × {self.gpu.name}",
            f"batch: {self.settings.batch}",
            *([f"pipeline: {describe_pipeline(self)}"] if self.grid.pp > 1 else []),
            *([f"tensor: {describe_tensor(self)}"] if self.grid.tp > 1 else []),
            f"offload {self.profile.name}: {self.profile.explanation}",
            *([self._float8()] if self.settings.precision == "fp8" else []),
            "",
        ]
        width = max((len(choice.key) for choice in self.choices), default=0)
        for choice in self.choices:
            value = json.dumps(choice.value)
            lines.append(f"{choice.key:<{width}}  {value:<12}  {choice.source}: {choice.reason}")
        return "\n".join(lines)

    def _float8(self) -> str:
        if self.on_cpu:
            return _FP8 + _EMULATED
        return _FP8 + ("" if self.job.train.torch_compile else _UNFUSED)

    def to_dict(self) -> dict[str, Any]:
        """Gives a JSON object that `from_dict` reads back into an equal plan."""
        return {
            "schema_version": SCHEMA_VERSION,
            "job": self.job.model_dump(mode="json", exclude_unset=True),
            "model": self.model.to_dict(),
            "gpu": self.gpu.model_dump(mode="json"),
            "settings": self.settings.to_dict(),
            "allocator": self.allocator,
            "choices": [asdict(choice) for choice in self.choices],
        }

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> Plan:
        """Reads what `to_dict` wrote.

        Raises:
            PlanError: PLAN_UNREADABLE when a key is missing, foreign or of another schema version.
        """
        version = value.get("schema_version")
        if type(version) is not int or version != SCHEMA_VERSION:
            raise _unreadable(f"schema_version={version!r}, this version reads {SCHEMA_VERSION}")
        keys = {"schema_version", "job", "model", "gpu", "settings", "allocator", "choices"}
        if wrong := sorted(keys ^ value.keys()):
            raise _unreadable(f"{', '.join(wrong)} {'is' if len(wrong) == 1 else 'are'} missing or unknown")
        try:
            plan = cls(
                job=Job.model_validate(value["job"]),
                model=ModelSpec.from_dict(value["model"]),
                gpu=Gpu.model_validate(value["gpu"]),
                settings=Settings.from_dict(value["settings"]),
                choices=read_choices(value["choices"]),
            )
        except ValidationError as error:
            raise _unreadable("; ".join(_found(detail, error.title) for detail in error.errors())) from error
        except (KeyError, TypeError, ValueError, AttributeError, ToolkitError) as error:
            raise _unreadable(str(error)) from error
        if edited := disagreements(plan.job, plan.settings, plan.choices):
            raise _unreadable("; ".join(edited))
        if value["allocator"] != plan.allocator:
            raise _unreadable(f"allocator={value['allocator']!r} is not that of gpu={plan.gpu.name}")
        return plan

    def save(self, path: Path) -> None:
        """Writes `plan.json` atomically."""
        path.parent.mkdir(parents=True, exist_ok=True)
        # Ranks of several machines may write it at once to one disk, where neither process id nor host name is unique.
        partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        try:
            partial.write_text(json.dumps(self.to_dict(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
            partial.replace(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise

    @classmethod
    def load(cls, path: Path) -> Plan:
        """Reads `plan.json`."""
        try:
            value = parse_json(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise _unreadable(f"{path}: {error}") from None
        if not isinstance(value, dict):
            raise _unreadable(f"{path} holds a {type(value).__name__}, not an object")
        return cls.from_dict(value)


def _found(detail: Any, part: str) -> str:
    """Says what is wrong with one value of a stored plan."""
    key = ".".join(map(str, (part, *detail["loc"])))
    return f"{key}={detail['input']!r:.80} is not valid ({detail['msg']})"


def _unreadable(what: str) -> PlanError:
    return PlanError.of(
        code="PLAN_UNREADABLE",
        key="plan.json",
        message=f"the plan cannot be read: {what}",
        fix="Write it anew with `toolkit emit JOB.yaml --out DIR`; to change a value, change the job or use --set",
    )
