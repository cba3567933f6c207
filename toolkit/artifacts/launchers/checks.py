"""Every reason why a launcher cannot start a plan, found before a file is written."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from toolkit.artifacts.launchers.cards import CARDS
from toolkit.artifacts.launchers.catalogue import KINDS, LauncherName
from toolkit.artifacts.launchers.options import LaunchOptions, option_name
from toolkit.errors import PlanError, Problem, raise_all
from toolkit.planning.plan import Plan

_MIG = re.compile(r"(^|[^a-z])mig([^a-z]|$)|\dg[.-]\d+gb")
_LABEL = r"[a-z0-9](?:[a-z0-9-]*[a-z0-9])?"
# They count devices, of which a slice of a card is none.
_COUNT_DEVICES: tuple[LauncherName, ...] = ("slurm", "pytorchjob", "jobset")
# They carry the working folder to another machine, where only paths relative to it are found.
_UPLOADS: tuple[LauncherName, ...] = ("skypilot", "azureml", "sagemaker", "vastai", "runpod", "modal")
_LONGEST_SECONDS: dict[LauncherName, tuple[int, str]] = {
    "modal": (24 * 3600, "24:00:00"),  # modal.com/docs/guide/timeouts
    "sagemaker": (28 * 24 * 3600, "28-00:00:00"),  # MaxRuntimeInSeconds of CreateTrainingJob
}


def check_launchers(
    plan: Plan,
    folder: Path,
    launchers: Sequence[LauncherName],
    options: LaunchOptions,
    *,
    hosts: Sequence[str] | None,
    untrainable: Sequence[Problem],
) -> None:
    """Check that each launcher can start a plan, and that each option is taken by one of them.

    Raises:
        PlanError: EMIT_LAUNCHER, if a launcher cannot start the plan; EMIT_LAUNCH_OPTION, if an option is missing, or none of
            the launchers takes it.
    """
    found = list(_unused(launchers, options))
    for launcher in launchers:
        found += _of_options(launcher, options)
        found += _of_plan(plan, launcher, hosts, untrainable)
        found += _of_card(plan, launcher)
        found += _of_paths(plan, folder, launcher, options)
    raise_all(PlanError, found)


def _refused(launcher: LauncherName, why: str, fix: str) -> Problem:
    return Problem(code="EMIT_LAUNCHER", key="--launcher", message=f"launcher={launcher} {why}", fix=fix)


def _wrong_option(field: str, message: str, fix: str) -> Problem:
    return Problem(code="EMIT_LAUNCH_OPTION", key=option_name(field), message=message, fix=fix)


def _unused(launchers: Sequence[LauncherName], options: LaunchOptions) -> Iterator[Problem]:
    for field in options.given:
        if any(field in KINDS[launcher].takes for launcher in launchers):
            continue
        takers = [launcher for launcher, kind in KINDS.items() if field in kind.takes]
        named = f"launcher={', '.join(launchers)} does not take it" if launchers else "no launcher is named"
        fix = f"Leave {option_name(field)} out, or name one of --launcher {', '.join(takers)}"
        yield _wrong_option(field, f"{option_name(field)} would be ignored: {named}", fix)


def _of_options(launcher: LauncherName, options: LaunchOptions) -> Iterator[Problem]:
    kind = KINDS[launcher]
    for field in sorted(kind.needs - set(options.given)):
        name = option_name(field)
        yield _wrong_option(field, f"launcher={launcher} needs {name}: {_WHY_NEEDED[field]}", f"Give {name}")
    if launcher == "slurm" and options.container and not options.image:
        yield _wrong_option("container", "--container runs an image, and --image is not given", "Give --image too")
    if launcher == "sagemaker" and options.compute and not options.compute.startswith("ml."):
        what = f"--compute={options.compute} is no instance type of SageMaker"
        yield _wrong_option("compute", what, "Give one such as ml.p5.48xlarge")
    if launcher in ("pytorchjob", "jobset"):
        yield from _of_names(options)
    most = _LONGEST_SECONDS.get(launcher)
    if most and options.seconds and options.seconds > most[0]:
        what = f"--time-limit={options.time_limit} is more than {KINDS[launcher].title} grants"
        yield _wrong_option("time_limit", what, f"Give at most {most[1]}; a run that is started again resumes")


def _of_names(options: LaunchOptions) -> Iterator[Problem]:
    """Yield names that Kubernetes refuses: a namespace is a label of DNS (RFC 1123), a volume claim labels with dots between."""
    for field, form, most, what in (
        ("namespace", _LABEL, 63, "a namespace of Kubernetes"),
        ("volume", rf"{_LABEL}(?:\.{_LABEL})*", 253, "a volume claim of Kubernetes"),
    ):
        name = getattr(options, field)
        if name is not None and not (len(name) <= most and re.fullmatch(form, name)):
            message = f"{option_name(field)}={name:.80} is no name of {what}"
            fix = f"Write lower-case letters, digits and hyphens, a letter or a digit first and last, at most {most} characters"
            yield _wrong_option(field, message, fix)


_WHY_NEEDED = {
    "image": "it runs containers",
    "volume": "what a container writes elsewhere is lost with it",
    "compute": "it names the machines",
}


def _of_plan(
    plan: Plan, launcher: LauncherName, hosts: Sequence[str] | None, untrainable: Sequence[Problem]
) -> Iterator[Problem]:
    kind, nodes = KINDS[launcher], plan.job.cluster.nodes
    if untrainable:
        said = "; ".join(f"{problem.message} [{problem.code}]" for problem in untrainable)
        yield _refused(launcher, f"starts `toolkit train`, which would refuse the plan: {said}", untrainable[0].fix)
    if nodes > 1 and kind.one_node:
        fix = "Set cluster.nodes=1, or name a launcher of several nodes, such as --launcher skypilot"
        yield _refused(launcher, f"starts plans of one node, and the plan has nodes={nodes}: {kind.one_node}", fix)
    if nodes > 1 and kind.hosts and not hosts:
        yield _refused(
            launcher, f"needs the names of the {nodes} nodes", "Give them with --hosts, that of rank 0 first"
        )
    if nodes == 1 and launcher in ("ssh", "pdsh"):
        fix = "Start the plan on its machine by `toolkit train`, or set cluster.nodes"
        yield _refused(launcher, "starts several nodes, and the plan has nodes=1", fix)


def _of_card(plan: Plan, launcher: LauncherName) -> Iterator[Problem]:
    name = plan.gpu.name
    if launcher in _COUNT_DEVICES and _MIG.search(name.lower()):
        fix = "Start slices by --launcher torchrun inside an allocation of your own, or plan for a whole card"
        yield _refused(launcher, f"asks for whole cards, and gpu={name} is a MIG slice of one", fix)
    names = CARDS.get(launcher)
    if names is None or name in names:
        return
    if plan.on_cpu:
        if launcher in ("vastai", "runpod"):
            yield _refused(launcher, "rents cards, and gpu=cpu needs none", "Name a card with cluster.gpu")
        return
    fix = f"Set cluster.gpu to one of {', '.join(sorted(names))}"
    yield _refused(launcher, f"has no name for gpu={name} that is known here", fix)


def _of_paths(plan: Plan, folder: Path, launcher: LauncherName, options: LaunchOptions) -> Iterator[Problem]:
    outside = folder.is_absolute() or os.path.normpath(folder).startswith("..")
    if launcher in _UPLOADS and outside:
        fix = "Give a folder below the working folder, as in --out out"
        yield _refused(launcher, f"runs on another machine, where --out={folder} would not be found", fix)
    if launcher == "skypilot" and options.volume and not plan.output_dir.is_absolute():
        what = f"mounts --volume at train.output_dir={plan.output_dir}, which is not an absolute path"
        yield _refused(launcher, what, "Set train.output_dir to one, such as /mnt/runs/my-job")
