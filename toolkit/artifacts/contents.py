"""The text of every file of a plan."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from toolkit.artifacts.commands import exports, ways
from toolkit.artifacts.hosts import check_hosts, hostfile, send_environment
from toolkit.artifacts.launchers.catalogue import EXECUTABLE_FILES, LAUNCHER_FILES, LauncherName
from toolkit.artifacts.launchers.checks import check_launchers
from toolkit.artifacts.launchers.options import LaunchOptions
from toolkit.artifacts.provenance import provenance
from toolkit.artifacts.texts import Facts, commands_text, readme_text
from toolkit.errors import PlanError, Problem
from toolkit.io import json_text
from toolkit.planning.deepspeed_config import Consumer
from toolkit.planning.plan import Plan
from toolkit.planning.trainable import training_problems
from toolkit.version import installed_version

WRITTEN_BY = "toolkit emit"
PROVENANCE = "provenance.json"

# Every name that `emit` may write, and a description of the file.
FILES: dict[str, str] = {
    "plan.json": "the plan: what `toolkit train` and tk.Plan.load read",
    "deepspeed.json": "DeepSpeed's configuration for toolkit's own engine",
    "deepspeed-trainer.json": "the same for transformers.Trainer, equal to training_arguments.json",
    "training_arguments.json": "keyword arguments of transformers.TrainingArguments",
    "deepspeed-accelerate.json": "the same for an Accelerate script, which makes its own optimizer",
    "accelerate.yaml": "for accelerate launch --config_file",
    "hostfile": "the nodes, for DeepSpeed's launcher",
    "commands.sh": "every way to start the job, with its environment variables",
    **LAUNCHER_FILES,
    "README.txt": "this overview",
    PROVENANCE: "for each key of each config: value, where it came from, why",
}
EXECUTABLE = EXECUTABLE_FILES | {"commands.sh"}
_OF_CONSUMER: dict[Consumer, tuple[str, str]] = {
    "trainer": ("deepspeed-trainer.json", "training_arguments.json"),
    "accelerate": ("deepspeed-accelerate.json", "accelerate.yaml"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """A plan as texts.

    Args:
        texts: File name → text, in reading order; `provenance.json` last.
        left_out: File name → why this plan does not have it.
        untrainable: Why `toolkit train` would refuse the plan, in which case commands.sh does not start it.
    """

    texts: Mapping[str, str]
    left_out: Mapping[str, tuple[Problem, ...]]
    untrainable: tuple[Problem, ...]


def contents(
    plan: Plan,
    folder: Path,
    *,
    hosts: Sequence[str] | None = None,
    launchers: Sequence[LauncherName] = (),
    options: LaunchOptions | None = None,
) -> Contents:
    """Return the text of every file.

    Args:
        folder: Folder as written in files and commands: relative if the user wrote it so.
        hosts: Names of the nodes, first that of rank 0.
        launchers: What the plan is started by; each has files of its own.
        options: What the files of launchers say besides the plan.

    Raises:
        PlanError: EMIT_HOSTS; EMIT_LAUNCHER; EMIT_LAUNCH_OPTION; PLAN_UNREADABLE for a plan that could not be read back.
    """
    check_hosts(plan, hosts)
    untrainable = tuple(training_problems(plan.job, plan.model))
    options = options or LaunchOptions()
    check_launchers(plan, folder, launchers, options, hosts=hosts, untrainable=untrainable)
    texts = {"plan.json": plan.to_json()}
    configs, left_out = _configs(plan, folder, hosts)
    for name, config in configs.items():
        texts[name] = _yaml(config, folder) if name.endswith(".yaml") else json_text(config)
    if hosts:
        texts["hostfile"] = hostfile(plan, hosts)
    facts = Facts(
        plan=plan,
        script=shlex.quote(str(folder / "commands.sh")),
        hosts=hosts,
        exports=exports(plan),
        functions=send_environment(plan) if hosts else (),
        left_out=left_out,
        untrainable=untrainable,
        ways=ways(
            plan,
            folder,
            hosts=hosts,
            with_training=not untrainable,
            with_trainer="training_arguments.json" in configs,
            with_accelerate="accelerate.yaml" in configs,
        ),
    )
    texts["commands.sh"] = commands_text(facts)
    if launchers:
        # Not at the top: a template engine takes longer to load than the rest.
        from toolkit.artifacts.launchers.render import launcher_texts

        texts |= launcher_texts(plan, folder, launchers, options, hosts=hosts)
    names = [name for name in FILES if name in {*texts, "README.txt", PROVENANCE}]
    texts["README.txt"] = readme_text(facts, {name: _meaning(plan, name) for name in names})
    ordered = {name: texts[name] for name in FILES if name in texts}
    provenance_text = _provenance(plan, configs, ordered, left_out)
    return Contents(texts={**ordered, PROVENANCE: provenance_text}, left_out=left_out, untrainable=untrainable)


def _meaning(plan: Plan, name: str) -> str:
    """Return a file's description, which says if a pipeline makes its numbers differ from the plan's."""
    if name != "deepspeed.json" or plan.grid.pp == 1:
        return FILES[name]
    return (
        f"{FILES[name]}: gradient_accumulation_steps is 1 in this file, since our loop runs the "
        f"{plan.settings.batch.accumulation} micro-batches of a step itself"
    )


def digest(text: str) -> str:
    """Return the SHA-256 of a file's text, by which a later `emit` sees whether it was edited."""
    return hashlib.sha256(text.encode()).hexdigest()


def _configs(
    plan: Plan, folder: Path, hosts: Sequence[str] | None
) -> tuple[dict[str, dict[str, Any]], dict[str, tuple[Problem, ...]]]:
    is_deepspeed = plan.job.parallel.strategy == "zero"
    configs = {"deepspeed.json": plan.deepspeed_config()} if is_deepspeed else {}
    left_out: dict[str, tuple[Problem, ...]] = {}
    for consumer, (file, launched) in _OF_CONSUMER.items():
        path = str(folder / file)
        try:
            deepspeed = {file: plan.deepspeed_config(consumer)} if is_deepspeed else {}
            launcher = (
                plan.training_arguments() | ({"deepspeed": path} if is_deepspeed else {})
                if consumer == "trainer"
                else plan.accelerate_config(deepspeed_config_file=path, main_process_ip=hosts[0] if hosts else None)
            )
        except PlanError as error:
            left_out |= dict.fromkeys((file, launched) if is_deepspeed else (launched,), error.problems)
        else:
            configs |= {**deepspeed, launched: launcher}
    return configs, left_out


def _provenance(
    plan: Plan,
    configs: Mapping[str, Mapping[str, Any]],
    texts: Mapping[str, str],
    left_out: Mapping[str, tuple[Problem, ...]],
) -> str:
    return json_text(
        {
            "written_by": WRITTEN_BY,
            "version": installed_version(),
            "files": {name: {"sha256": digest(text)} for name, text in texts.items()},
            "keys": {name: provenance(plan, name, config) for name, config in configs.items()},
            "left_out": {name: [problem.as_dict() for problem in problems] for name, problems in left_out.items()},
        }
    )


def _yaml(value: Any, folder: Path) -> str:
    more = " --machine_rank RANK_OF_THIS_NODE" if value["num_machines"] > 1 else ""
    if more and "main_process_ip" not in value:
        more += " --main_process_ip ADDRESS_OF_NODE_0"
    head = f"# accelerate launch --config_file {shlex.quote(str(folder / 'accelerate.yaml'))}{more} SCRIPT.py\n"
    return head + yaml.safe_dump(value, allow_unicode=True)
