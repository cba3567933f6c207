"""Optional packages: those that a plan needs are checked before anything is read, written or started; none is imported."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec

from packaging.version import Version

from toolkit.errors import Problem
from toolkit.launch.software import software_problems
from toolkit.planning.plan import Plan
from toolkit.version import version_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """An optional package, as `pyproject.toml` lists it.

    Args:
        name: Name of the distribution.
        extra: Extra of the toolkit that installs it.
        least: Oldest version that has every feature in use.
        code: Error code when it is missing.
        key: Job key that requires it.
        wanted: The key and its value, as shown in a message.
        instead: What to set to avoid it.
    """

    name: str
    extra: str
    least: str
    code: str
    key: str
    wanted: str
    instead: str

    def problem(self, reason: str) -> Problem:
        """Return the problem that the package cannot be used, with the reason."""
        return Problem(
            code=self.code,
            key=self.key,
            message=f"{self.wanted} needs the package {self.name}: {reason}",
            fix=f'Install it with `pip install "accelerator-toolkit[{self.extra}]"`, or {self.instead}',
        )


TORCHAO = Package(
    name="torchao",
    extra="fp8",
    least="0.18",
    code="FP8_PACKAGE",
    key="train.precision",
    wanted="precision=fp8",
    instead="set train.precision to bf16",
)
BITSANDBYTES = Package(
    name="bitsandbytes",
    extra="qlora",
    least="0.50",
    code="QLORA_PACKAGE",
    key="train.method",
    wanted="method=qlora",
    instead="set train.method to lora",
)
SCHEDULE_FREE = Package(
    name="schedulefree",
    extra="schedule-free",
    least="1.4",
    code="OPTIMIZER_PACKAGE",
    key="train.optimizer",
    wanted="optimizer=schedule_free_adamw",
    instead="set train.optimizer to adamw",
)
LIGER = Package(
    name="liger-kernel",
    extra="liger",
    least="0.8.5",
    code="LOSS_LIGER_PACKAGE",
    key="train.loss",
    wanted="loss=liger",
    instead="set train.loss to chunked",
)
LIGER_KERNELS = replace(
    LIGER,
    code="KERNELS_PACKAGE",
    key="train.kernels",
    wanted="kernels=liger",
    instead="set train.kernels to eager",
)


def package_of_optimizer(name: str) -> Package:
    """Return what an optimizer that is not torch's or DeepSpeed's needs."""
    if name == SCHEDULE_FREE.wanted.partition("=")[2]:
        return SCHEDULE_FREE
    return replace(
        BITSANDBYTES,
        code="OPTIMIZER_PACKAGE",
        key="train.optimizer",
        wanted=f"optimizer={name}",
        instead="set train.optimizer to adamw",
    )


def package_problems(plan: Plan) -> Iterator[Problem]:
    """Yield what a plan needs and this environment lacks or has in another version: optional packages, and software the job describes."""
    for package in _needed(plan):
        found = version_of(package.name)
        if found is None:
            yield package.problem("it is not installed")
        elif Version(found) < Version(package.least):
            yield package.problem(f"{found} is installed, and {package.least} or newer is needed")
    yield from tracker_problems(plan.job.train.report_to)
    yield from token_problems("train.push_to_hub", plan.job.train.push_to_hub)
    yield from software_problems(plan)


def token_problems(key: str, repo: str | None) -> Iterator[Problem]:
    """Yield HUB_TOKEN if an export is to be pushed to the hub and there is no token."""
    if repo is None:
        return
    from huggingface_hub import get_token

    if get_token() is None:
        yield Problem(
            code="HUB_TOKEN",
            key=key,
            message=f"push_to_hub={repo}: there is no token: HF_TOKEN is not set, and `hf auth login` has stored none",
            fix="Set HF_TOKEN to a token with write access",
        )


def tracker_problems(report_to: Iterable[str]) -> Iterator[Problem]:
    """Yield the trackers of `train.report_to` whose package is not installed; mlflow-skinny has mlflow's module."""
    for name in report_to:
        if find_spec(name) is None:
            yield Problem(
                code="REPORT_PACKAGE",
                key="train.report_to",
                message=f"report_to={name} needs the package {name}: it is not installed",
                fix=f"Install it with `pip install {name}`, or remove it from train.report_to",
                source="accelerate tracking.py",
            )


def _needed(plan: Plan) -> Iterator[Package]:
    if plan.settings.precision == "fp8":
        yield TORCHAO
    if plan.job.train.method == "qlora":
        yield BITSANDBYTES
    optimizer = plan.job.train.optimizer
    if (
        plan.job.train.in_8_bits
        or optimizer == "schedule_free_adamw"
        or (optimizer == "lion" and plan.job.parallel.strategy != "zero")
    ):
        yield package_of_optimizer(optimizer)
    if plan.job.train.loss == "liger":
        yield LIGER
    if plan.settings.kernels == "liger":
        yield LIGER_KERNELS
