"""Plans for the files of launchers, and what the files are written with."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from toolkit.artifacts.launchers.catalogue import KINDS, LAUNCHERS, LauncherName
from toolkit.artifacts.launchers.checks import check_launchers
from toolkit.artifacts.launchers.options import LaunchOptions
from toolkit.artifacts.launchers.render import launcher_texts
from toolkit.config.job import Job
from toolkit.planning.plan import Plan
from toolkit.planning.resolve import resolve

TRAINED = {
    "model": {"name": "quickstart-llama", "init": "random", "tokenizer": "org/name"},
    "data": {"train": "org/data", "format": "text"},
}
HOSTS = ["alpha", "beta"]
VALUES: dict[str, Any] = {
    "image": "registry.example/image:1",
    "time_limit": "12:00:00",
    "partition": "gpu",
    "account": "lab",
    "sbatch": ("constraint=h100", "exclusive"),
    "volume": "runs",
    "namespace": "training",
    "compute": "gpus",
    "setup": "pip install 'accelerator-toolkit'",
}
# A folder and an output folder that shells, YAML and Python would read otherwise.
ODD = "an 'odd' \"$HOME\" `x` $(y) %n {{z}} #"
CASES = ("one-node", "two-nodes", "two-nodes-bare", "one-node-cpu", "odd-names")


@cache
def make_plan(case: str) -> Plan:
    cluster: dict[str, Any] = {"gpu": "h100-sxm-80gb", "gpus_per_node": 8}
    if "cpu" in case:
        cluster = {"gpu": "cpu", "gpus_per_node": 2}
    if case != "one-node" and "cpu" not in case:
        cluster["nodes"] = 2
    output = f"/runs/{ODD}" if case == "odd-names" else "/runs/my-job"
    if "bare" in case or case.startswith("one-node"):
        output = output.removeprefix("/")
    return resolve(Job.model_validate({**TRAINED, "cluster": cluster, "train": {"output_dir": output}}))


def options_of(case: str, launcher: LauncherName) -> LaunchOptions:
    """All options that a launcher takes, or with `bare` those that it needs."""
    kind = KINDS[launcher]
    names = kind.needs if "bare" in case else kind.takes
    values = {name: value for name, value in VALUES.items() if name in names}
    if launcher == "sagemaker":
        values["compute"] = "ml.p5.48xlarge"
    if launcher == "skypilot" and not make_plan(case).output_dir.is_absolute():
        values.pop("volume", None)
    if case == "one-node" and launcher == "slurm":
        values |= {"container": "apptainer", "cpus": 96}
    return LaunchOptions(**values)


def launchers_of(case: str) -> tuple[LauncherName, ...]:
    """Those that can start a case."""
    nodes = make_plan(case).job.cluster.nodes
    return tuple(
        launcher
        for launcher in LAUNCHERS
        if not (nodes > 1 and KINDS[launcher].one_node)
        and not (nodes == 1 and launcher in ("ssh", "pdsh"))
        and not ("cpu" in case and launcher in ("vastai", "runpod"))
    )


def odd_folder(launcher: str) -> str:
    """A folder's name on two lines, which only Python can give."""
    return f"{ODD}\nof {launcher}"


def write_case(case: str, root: Path) -> tuple[Plan, dict[str, Path]]:
    """Writes `root/FOLDER-LAUNCHER` of each launcher; returns the plan, and each launcher's file. Called in `root`.

    As `emit` does, without the files that are the same for all launchers.
    """
    plan = make_plan(case)
    files = {}
    for launcher in launchers_of(case):
        folder = Path(odd_folder(launcher) if case == "odd-names" else f"out-{launcher}")
        hosts = HOSTS if plan.job.cluster.nodes > 1 else None
        options = options_of(case, launcher)
        check_launchers(plan, folder, [launcher], options, hosts=hosts, untrainable=())
        folder.mkdir()
        for name, text in launcher_texts(plan, folder, [launcher], options, hosts=hosts).items():
            (folder / name).write_text(text)
        plan.save(folder / "plan.json")
        files[launcher] = root / folder / KINDS[launcher].file
    return plan, files
