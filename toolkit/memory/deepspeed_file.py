"""A user's own DeepSpeed file in place of our configuration, with "auto" filled in as `transformers.Trainer` does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from toolkit.config.job import Job
from toolkit.deepspeed_spec.facts import EngineFacts
from toolkit.deepspeed_spec.nested import auto_paths, with_value, without
from toolkit.deepspeed_spec.schema import DeepSpeedConfig
from toolkit.deepspeed_spec.user_file import UserConfig, notes_of_run, read_user_config
from toolkit.errors import PlanError, Problem, raise_all
from toolkit.planning.deepspeed_config import merge
from toolkit.planning.offload import PROFILES
from toolkit.planning.plan import Plan

# Keys of the batch: the file's name, and the job's.
_BATCH = {
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "train_batch_size": "train_batch_size",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepSpeedFile:
    """A user's own DeepSpeed configuration, with its "auto" values, that replaces a job's.

    Args:
        user: Configuration as it was read and checked.
    """

    user: UserConfig

    @classmethod
    def read(cls, source: Mapping[str, Any] | str | Path) -> DeepSpeedFile:
        """Read and check a file; arguments and errors are those of `read_user_config`."""
        return cls(user=read_user_config(source))

    @property
    def name(self) -> str:
        """Name of the file, for messages."""
        return self.user.name

    @property
    def config(self) -> dict[str, Any]:
        """Keys that DeepSpeed reads, "auto" where Trainer fills it in."""
        return self.user.config

    @property
    def zero_stage(self) -> int:
        """ZeRO stage of the file; DeepSpeed's default is 0."""
        return int(self._zero.get("stage", 0))

    @property
    def _zero(self) -> dict[str, Any]:
        section: dict[str, Any] = self.config.get("zero_optimization") or {}
        return section

    @property
    def _accumulation_dtype(self) -> str | None:
        dtype: str | None = (self.config.get("data_types") or {}).get("grad_accum_dtype")
        return dtype

    @property
    def _optimizer(self) -> dict[str, Any] | None:
        """Section of the optimizer that DeepSpeed builds; None where the file names none."""
        section: dict[str, Any] = self.config.get("optimizer") or {}
        return section if section.get("type") is not None else None

    def fit(self, job: Job) -> Job:
        """Return the job that runs under this file, with the file's values where the job leaves them open.

        Raises:
            PlanError: DEEPSPEED_CONTRADICTS for each number that differs between the two; DEEPSPEED_CONFLICT if the job has a
                `deepspeed` section.
        """
        raise_all(PlanError, self._contradictions(job))
        values = self._stated(job)
        if "train_batch_size" in values and not {"per_device_train_batch_size", "gradient_accumulation_steps"} & (
            values.keys() | job.train.model_fields_set
        ):
            values["gradient_accumulation_steps"] = 1  # runtime/config.py _set_batch_related_parameters
        values["gradient_accumulation_dtype"] = self._accumulation_dtype
        # The file sets the offload, except that of checkpointed inputs, which is not DeepSpeed's.
        offload = job.parallel.offload if PROFILES[job.parallel.offload].activations else "none"
        parallel = {"zero_stage": self.zero_stage, "offload": offload, "offload_ratio": None}
        return job.model_copy(
            update={
                "train": job.train.model_copy(update=values),
                "parallel": job.parallel.model_copy(update=parallel),
            }
        )

    def resolved(self, plan: Plan) -> dict[str, Any]:
        """Return the configuration without "auto", as Trainer hands it to DeepSpeed.

        Source:
            transformers integrations/deepspeed.py trainer_config_process, trainer_config_finalize; accelerate
            utils/dataclasses.py DeepSpeedPlugin.set_mixed_precision.
        """
        settings, width = plan.settings, plan.model.hidden_size
        ours = plan.deepspeed_config()
        optimizer = self._optimizer
        filled: dict[str, Any] = {
            **{key: ours[key] for key in _BATCH},
            "bf16": {"enabled": settings.dtype == "bf16"},
            "fp16": {"enabled": settings.dtype == "fp16"},
            # Without an optimizer section, Trainer builds the optimizer of its arguments.
            "optimizer": ours["optimizer"] if optimizer is None else {"params": _shared(optimizer, ours["optimizer"])},
        }
        autos = auto_paths(self.config)
        hidden = {"reduce_bucket_size": width * width}
        if self.zero_stage == 3:
            hidden |= {
                "stage3_prefetch_bucket_size": int(0.9 * width * width),
                "stage3_param_persistence_threshold": 10 * width,
            }
        zero = {key: value for key, value in hidden.items() if f"zero_optimization.{key}" in autos}
        return merge(without(self.config, autos), filled | ({"zero_optimization": zero} if zero else {}))

    def changed(self, values: Mapping[str, Any], *, nvme_path: Path | None) -> tuple[DeepSpeedFile, dict[str, Any]]:
        """Apply the changes of a job's keys that this file sets.

        Args:
            values: New values by dotted key of the job.
            nvme_path: Folder of the job for an offload to NVMe.

        Returns:
            The changed file, and the changes that are left for the job.
        """
        config, left = self.config, dict(values)
        for key, value in values.items():
            section, _, name = key.partition(".")
            theirs = next((their for their, our in _BATCH.items() if section == "train" and our == name), None)
            if theirs is not None:
                config = without(config, {theirs})
            elif key == "parallel.zero_stage":
                config = merge(config, {"zero_optimization": {"stage": value}})
                del left[key]
            elif key == "parallel.offload" and not PROFILES[value].activations:
                config = merge(without(config, _OFFLOADS), {"zero_optimization": _offload(value, nvme_path)})
                del left[key]
            elif section == "deepspeed":
                config = with_value(config, name, value)
                del left[key]
        return DeepSpeedFile(user=replace(self.user, config=config)), left

    def spell(self, key: str, value: Any) -> str | None:
        """Return a change of a job's key in the words of this file; None for a key that the file does not set."""
        section, _, name = key.partition(".")
        if section == "deepspeed":
            return f"{name}={value} in {self.name}"
        if key == "parallel.zero_stage":
            return f"zero_optimization.stage={value} in {self.name}"
        if key == "parallel.offload" and not PROFILES[value].activations:
            devices = (f"{part}.device={inner['device']}" for part, inner in _offload(value, None).items())
            return f"zero_optimization.{' and '.join(devices)} in {self.name}"
        return None

    def check(self, plan: Plan) -> tuple[str, ...]:
        """Return the values that DeepSpeed ignores or reads otherwise in this plan's run, one sentence each.

        Raises:
            PlanError: Every key that DeepSpeed or its engine refuses in this run.
        """

        def facts(keys: DeepSpeedConfig) -> EngineFacts:
            return replace(
                EngineFacts.of_config(keys, dtype=plan.settings.dtype),
                num_ranks=plan.job.cluster.num_ranks,
                dp_size=plan.grid.dp,
                on_cpu=plan.on_cpu,
                split=plan.split,
            )

        return notes_of_run(self.user, self.resolved(plan), facts=facts)

    def notes(self, plan: Plan, job: Job) -> tuple[str, ...]:
        """Return the job's values that the file replaces, and its own that DeepSpeed ignores or reads otherwise.

        Args:
            plan: Plan of the job under this file.
            job: Job as the user wrote it.
        """
        found = [f"{self.name} instead of the toolkit's configuration, in a script with torch's default allocator"]
        stage, offload = job.parallel.zero_stage, job.parallel.offload
        if stage is not None and stage != self.zero_stage:
            found.append(f"zero_stage={self.zero_stage} of {self.name} instead of the job's {stage}")
        if offload != "none" and not PROFILES[offload].activations:
            found.append(f"the offload of {self.name} instead of the job's {offload}")
        if self._optimizer is None:
            found.append(f"{self.name} has no optimizer: the job's is used, as Trainer builds it")
        if job.train.gradient_accumulation_dtype is not None and self._accumulation_dtype is None:
            found.append(f"{self.name} does not set grad_accum_dtype: gradients accumulate in the training precision")
        return (*found, *self.check(plan))

    def _stated(self, job: Job) -> dict[str, Any]:
        """Return the batch and the precision that the file states without "auto", by the job's names."""
        stated = {ours: self.config.get(theirs) for theirs, ours in _BATCH.items()}
        stated["precision"] = self._precision(job)
        return {key: value for key, value in stated.items() if value is not None and value != "auto"}

    def _precision(self, job: Job) -> str | None:
        """Return the precision that the file turns on; fp32 where it turns off what the job would use."""
        enabled = {name: (self.config.get(name) or {}).get("enabled") for name in ("bf16", "fp16")}
        on = next((name for name, value in enabled.items() if value is True), None)
        if on is not None:
            return on
        wanted = job.train.precision or "bf16"
        # A section without `enabled` is off (precision_config.py); an absent one is added by Trainer.
        off = wanted in self.config and enabled[wanted] in (False, None) if wanted in enabled else False
        return "fp32" if off else None

    def _contradictions(self, job: Job) -> Iterator[Problem]:
        if job.deepspeed:
            yield Problem(
                code="DEEPSPEED_CONFLICT",
                key="deepspeed",
                message=f"the job has a deepspeed section, and {self.name} replaces the whole configuration",
                fix="Put its keys into the file, or leave one of the two out",
            )
        if job.parallel.strategy != "zero":
            yield Problem(
                code="DEEPSPEED_CONTRADICTS",
                key="parallel.strategy",
                message=f"{self.name} is for DeepSpeed, but the job's strategy={job.parallel.strategy}",
                fix="Set parallel.strategy to zero, or leave the file out",
            )
        if job.train.precision == "fp8":
            yield Problem(
                code="DEEPSPEED_CONTRADICTS",
                key="train.precision",
                message=f"{self.name} belongs to a script, but the job's precision=fp8 is applied by `toolkit train` "
                "only",
                fix="Set train.precision to bf16 and leave train.fp8 out, or leave the file out",
            )
        names = {ours: theirs for theirs, ours in _BATCH.items()}
        for key, value in self._stated(job).items():
            wanted = getattr(job.train, key)
            if wanted is None or value == wanted or wanted == "fp8":
                continue
            if key != "precision":
                said, auto = f"{names[key]}={value}", names[key]
            else:
                auto = f"{wanted if value == 'fp32' else value}.enabled"
                said = f"{auto}={'false' if value == 'fp32' else 'true'}"
            yield self._contradiction(said, key, wanted, f'Set both to the same, or {auto} to "auto" in the file')
        dtype, wanted = self._accumulation_dtype, job.train.gradient_accumulation_dtype
        if dtype is not None and wanted is not None and dtype != wanted:
            said = f"data_types.grad_accum_dtype={dtype}"
            yield self._contradiction(
                said, "gradient_accumulation_dtype", wanted, "Set both to the same, or leave one out"
            )

    def _contradiction(self, said: str, key: str, wanted: Any, fix: str) -> Problem:
        return Problem(
            code="DEEPSPEED_CONTRADICTS",
            key=f"train.{key}",
            message=f"{self.name}: {said}, but the job's {key}={wanted}",
            fix=fix,
            source="transformers integrations/deepspeed.py trainer_config_finalize",
        )


_OFFLOADS = {"zero_optimization.offload_optimizer", "zero_optimization.offload_param"}


def _offload(profile: str, nvme_path: Path | None) -> dict[str, Any]:
    made = PROFILES[profile]
    devices = {"offload_optimizer": made.optimizer, "offload_param": made.parameters}
    return {
        key: {"device": device} | ({"nvme_path": str(nvme_path)} if device == "nvme" else {})
        for key, device in devices.items()
        if device is not None
    }


def _shared(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Any]:
    """Return our values of the optimizer's parameters that are "auto" in the file."""
    params = theirs.get("params") or {}
    return {key: ours["params"][key] for key, value in params.items() if value == "auto" and key in ours["params"]}
