"""A job that is to be estimated, changed a little each time, and what came of it. Imports no torch: bad input is told at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from toolkit.catalog.gpus import Gpu, find_gpu
from toolkit.catalog.models import ModelSpec, resolve_model
from toolkit.config.job import Dtype, Job
from toolkit.errors import PlanError, Problem, SpecError
from toolkit.memory.deepspeed_file import DeepSpeedFile
from toolkit.planning.plan import Plan
from toolkit.planning.resolve import resolve_with

if TYPE_CHECKING:
    from toolkit.memory.report.report import MemoryReport

# Cards of the largest common machine; past them one adds machines.
COMMON_GPUS_PER_NODE = 8

# RAM with which a job resolves whatever it offloads, GiB: the estimate itself says whether the real host holds it.
_AMPLE_HOST_GIB = 1_000_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A job that is to be estimated, perhaps under a user's own DeepSpeed file.

    Args:
        job: As written, or changed.
        model: Read once.
        gpu: Read once for each card.
        file: The user's DeepSpeed file, in place of our configuration.
        zero_init: Whether a stage-3 model is built under `zero.Init`.
        load_dtype: In which a model that is not is loaded by each rank; that of its files when left out.
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
        """Reads the model and the card that a job names, unless they are given and still those that it names.

        Raises:
            SpecError: The model or the card cannot be found.
        """
        card = gpu if gpu is not None and gpu.name == job.cluster.gpu else find_gpu(job.cluster.gpu)
        # The model last: it may ask the hub.
        return cls(job=job, model=resolve_model(job.model) if model is None else model, gpu=card, file=file)

    def changed(self, values: Mapping[str, Any]) -> Scenario:
        """Return the case with other values under dotted keys of the job; None leaves a key open.

        Raises:
            SpecError: A key or a value is not one of a job.
        """
        file = self.file
        if file is not None:
            file, values = file.changed(values, nvme_path=self.job.cluster.nvme_path)
        job = self.job.with_(values)
        gpu = self.gpu if job.cluster.gpu == self.job.cluster.gpu else find_gpu(job.cluster.gpu)
        return replace(self, job=job, gpu=gpu, file=file)

    def plan(self) -> Plan:
        """Resolves the job; a host that is too small is left to the estimate to report.

        Raises:
            PlanError: With every problem at once.
        """
        if self.file is None:
            return self._resolve(self.job)
        plan = self._resolve(self.file.fit(self.job))
        self.file.check(plan)
        return plan

    def _resolve(self, job: Job) -> Plan:
        try:
            return resolve_with(job, model=self.model, gpu=self.gpu, to_run=False)
        except PlanError as error:
            if set(error.codes) != {"OFFLOAD_HOST_MEMORY"}:
                raise
        ample = job.cluster.model_copy(update={"host_memory_gib": _AMPLE_HOST_GIB})
        roomy = resolve_with(job.model_copy(update={"cluster": ample}), model=self.model, gpu=self.gpu, to_run=False)
        return replace(roomy, job=job)


def check_zero_init(plan: Plan, *, zero_init: bool, load_dtype: Dtype | None = None) -> None:
    """Refuses a model that is said to be built without zero.Init where there is none, and a dtype in which nothing is loaded.

    Raises:
        SpecError: ZERO_INIT_STAGE, LOAD_DTYPE.
    """
    stage = plan.settings.zero_stage
    if not zero_init and stage != 3:
        raise SpecError.of(
            code="ZERO_INIT_STAGE",
            key="--no-zero-init",
            message=f"zero_init=False (--no-zero-init) with zero_stage={stage}: only stage 3 has a zero.Init",
            fix="Leave it out, or set zero_stage to 3",
        )
    if zero_init and load_dtype is not None:
        raise SpecError.of(
            code="LOAD_DTYPE",
            key="--load-dtype",
            message=f"load_dtype={load_dtype} (--load-dtype) without zero_init=False (--no-zero-init): a model that is "
            "built under zero.Init is loaded in parts, in the training precision",
            fix="Add --no-zero-init if each rank of your script calls from_pretrained, or leave --load-dtype out",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of one case.

    Args:
        plan: None if the job does not resolve.
        report: None if there is no estimate.
        problems: Why there is none.
    """

    plan: Plan | None = None
    report: MemoryReport | None = None
    problems: tuple[Problem, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether there is an estimate, and card and host hold it."""
        return self.report is not None and self.report.fits

    @property
    def is_tight(self) -> bool:
        """Whether it fits with little of the card left."""
        return self.report is not None and self.report.tight

    def to_dict(self) -> dict[str, Any]:
        """Return the figures of a row as a JSON object."""
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
    """Return a value of the job as a user writes it."""
    if isinstance(value, list | tuple):
        return f"[{','.join(map(value_text, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)
