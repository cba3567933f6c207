"""A job to be estimated, its variants, and the outcome. Imports no torch, so that bad input is reported at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from toolkit.catalog.gpus import Gpu, find_gpu
from toolkit.catalog.models import ModelSpec, resolve_model
from toolkit.config.job import Dtype, Job
from toolkit.errors import Problem, SpecError
from toolkit.planning.plan import Plan
from toolkit.planning.resolve import resolve_with

if TYPE_CHECKING:
    from toolkit.memory.deepspeed_file import DeepSpeedFile
    from toolkit.memory.report.report import MemoryReport

# Cards of the largest common machine; beyond them one adds machines.
COMMON_GPUS_PER_NODE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A job to be estimated, optionally under a user's own DeepSpeed file.

    Args:
        job: Job as written, or changed.
        model: Model that the job names, read once.
        gpu: Card that the job names.
        file: The user's DeepSpeed file, in place of our configuration.
        zero_init: Whether a stage-3 model is built under `zero.Init`.
        load_dtype: Data type in which each rank loads a model without it; by default that of its files.
    """

    job: Job
    model: ModelSpec
    gpu: Gpu
    file: DeepSpeedFile | None = None
    zero_init: bool = True
    load_dtype: Dtype | None = None

    @classmethod
    def of(
        cls, job: Job, *, model: ModelSpec | None = None, gpu: Gpu | None = None, file: DeepSpeedFile | None = None
    ) -> Scenario:
        """Read the model and the card that a job names, unless they are given; a given card of another name is ignored.

        Raises:
            SpecError: The model or the card cannot be found.
        """
        card = gpu if gpu is not None and gpu.name == job.cluster.gpu else find_gpu(job.cluster.gpu)
        # The model last: it may be read from the hub.
        return cls(job=job, model=resolve_model(job.model) if model is None else model, gpu=card, file=file)

    def changed(self, values: Mapping[str, Any]) -> Scenario:
        """Return the case with changed values by dotted key of the job; None leaves a key open.

        Raises:
            SpecError: A key or a value is not valid in a job.
        """
        file = self.file
        if file is not None:
            file, values = file.changed(values, nvme_path=self.job.cluster.nvme_path)
        job = self.job.with_(values)
        gpu = self.gpu if job.cluster.gpu == self.job.cluster.gpu else find_gpu(job.cluster.gpu)
        return replace(self, job=job, gpu=gpu, file=file)

    def plan(self) -> Plan:
        """Resolve the job; a host that is too small is left to the estimate to report.

        Raises:
            PlanError: Every problem at once.
        """
        job = self.job if self.file is None else self.file.fit(self.job)
        plan = resolve_with(job, model=self.model, gpu=self.gpu, to_run=False)
        if self.file is not None:
            self.file.check(plan)
        return plan


def check_zero_init(plan: Plan, *, zero_init: bool, load_dtype: Dtype | None = None) -> None:
    """Refuse `zero_init` false where the plan has no zero.Init, and a load dtype where nothing is loaded.

    Raises:
        SpecError: ZERO_INIT_STAGE, LOAD_DTYPE.
    """
    stage = plan.settings.zero_stage
    if not zero_init and stage != 3:
        raise SpecError.of(
            code="ZERO_INIT_STAGE",
            key="--without-zero-init",
            message=f"zero_init=False (--without-zero-init) with zero_stage={stage}: only stage 3 has a zero.Init",
            fix="Leave it out, or set zero_stage to 3",
        )
    if zero_init and load_dtype is not None:
        raise SpecError.of(
            code="LOAD_DTYPE",
            key="--load-dtype",
            message=f"load_dtype={load_dtype} (--load-dtype) without zero_init=False (--without-zero-init): a model that is "
            "built under zero.Init is loaded in parts, in the training precision",
            fix="Add --without-zero-init if each rank of your script calls from_pretrained, or leave --load-dtype out",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Outcome of one case.

    Args:
        plan: Plan of the job; None if the job does not resolve.
        report: Estimate; None if there is none.
        problems: Reasons for which there is no estimate.
    """

    plan: Plan | None = None
    report: MemoryReport | None = None
    problems: tuple[Problem, ...] = ()

    @property
    def fits(self) -> bool:
        """True if there is an estimate, and card and host have enough memory."""
        return self.report is not None and self.report.fits

    @property
    def is_tight(self) -> bool:
        """True if it fits with little of the card left."""
        return self.report is not None and self.report.tight

    def to_dict(self) -> dict[str, Any]:
        """Return the figures of the case as a JSON object."""
        report, plan = self.report, self.plan
        return {
            "fits": self.fits,
            "tight": self.is_tight,
            "required_bytes": None if report is None else report.required_bytes,
            "peak_allocated_bytes": None if report is None else report.peak_allocated_bytes,
            "gpu_capacity_bytes": None if report is None else report.gpu_capacity_bytes,
            "host_bytes_per_node": None if report is None else report.host.bytes_per_node,
            "host_capacity_bytes": None if report is None else report.host.capacity_bytes,
            "limiting_phase": None if report is None else report.limiting_phase,
            "zero_stage": None if plan is None else plan.settings.zero_stage,
            "problems": [problem.as_dict() for problem in self.problems],
        }


def value_text(value: Any) -> str:
    """Return a value of the job as the user writes it."""
    if isinstance(value, list | tuple):
        return f"[{','.join(map(value_text, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)
