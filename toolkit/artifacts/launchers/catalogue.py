"""Each launcher of `toolkit emit --launcher`: its files, the options that it takes, and those that it needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

LauncherName = Literal[
    "torchrun",
    "slurm",
    "ssh",
    "pdsh",
    "openmpi",
    "mpich",
    "pytorchjob",
    "jobset",
    "skypilot",
    "azureml",
    "sagemaker",
    "vastai",
    "runpod",
    "modal",
]
LAUNCHERS: tuple[LauncherName, ...] = get_args(LauncherName)
NODE_SCRIPT = "node.sh"  # starts the ranks of one node; the other files call it on each


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherKind:
    """What one launcher needs to know.

    Args:
        title: Name as its makers write it.
        file: File that starts the plan; it has a template of its name.
        meaning: Description of the file.
        takes: Fields of `LaunchOptions` that change its file.
        needs: Those among them without which there is no file.
        with_node_script: Whether it starts node.sh on each node.
        hosts: Whether the names of the nodes are needed, where there are several.
        one_node: Why it starts plans of one node alone; empty if it starts several.
    """

    title: str
    file: str
    meaning: str
    takes: frozenset[str] = frozenset()
    needs: frozenset[str] = frozenset()
    with_node_script: bool = True
    hosts: bool = False
    one_node: str = ""


KINDS: Mapping[LauncherName, LauncherKind] = {
    "torchrun": LauncherKind(
        title="torchrun", file=NODE_SCRIPT, meaning="starts the ranks of one node; called on each with its NODE_RANK"
    ),
    "slurm": LauncherKind(
        title="SLURM",
        file="job.sbatch",
        meaning="SLURM batch script: saves and requeues before its time is up, and resumes",
        takes=frozenset({"image", "container", "time_limit", "partition", "account", "sbatch", "cpus"}),
    ),
    "ssh": LauncherKind(
        title="ssh", file="ssh.sh", meaning="starts each node by ssh, and stops all with a save at Ctrl-C", hosts=True
    ),
    "pdsh": LauncherKind(title="pdsh", file="pdsh.sh", meaning="starts each node by pdsh", hosts=True),
    "openmpi": LauncherKind(
        title="Open MPI",
        file="openmpi.sh",
        meaning="starts each rank by Open MPI's mpirun",
        with_node_script=False,
        hosts=True,
    ),
    "mpich": LauncherKind(
        title="MPICH",
        file="mpich.sh",
        meaning="starts each rank by MPICH's mpiexec (hydra, also that of Intel MPI and MVAPICH)",
        with_node_script=False,
        hosts=True,
    ),
    "pytorchjob": LauncherKind(
        title="PyTorchJob",
        file="pytorchjob.yaml",
        meaning="Kubernetes PyTorchJob of Kubeflow's training operator",
        takes=frozenset({"image", "time_limit", "volume", "namespace", "cpus"}),
        needs=frozenset({"image", "volume"}),
    ),
    "jobset": LauncherKind(
        title="JobSet",
        file="jobset.yaml",
        meaning="Kubernetes JobSet",
        takes=frozenset({"image", "time_limit", "volume", "namespace", "cpus"}),
        needs=frozenset({"image", "volume"}),
    ),
    "skypilot": LauncherKind(
        title="SkyPilot",
        file="skypilot.yaml",
        meaning="SkyPilot task",
        takes=frozenset({"image", "setup", "volume", "cpus"}),
    ),
    "azureml": LauncherKind(
        title="Azure ML",
        file="azureml.yaml",
        meaning="command job of Azure Machine Learning",
        takes=frozenset({"image", "time_limit", "compute"}),
        needs=frozenset({"image", "compute"}),
    ),
    "sagemaker": LauncherKind(
        title="SageMaker",
        file="sagemaker_job.py",
        meaning="starts a SageMaker training job through its Python SDK",
        takes=frozenset({"image", "time_limit", "compute"}),
        needs=frozenset({"image", "compute"}),
    ),
    "vastai": LauncherKind(
        title="vast.ai",
        file="vastai.sh",
        meaning="finds, rents and starts a machine of vast.ai",
        takes=frozenset({"image", "setup"}),
        needs=frozenset({"image"}),
        one_node="its offers are single machines without a network between them",
    ),
    "runpod": LauncherKind(
        title="RunPod",
        file="runpod_pod.py",
        meaning="creates a pod through RunPod's Python SDK",
        takes=frozenset({"image", "setup", "volume"}),
        needs=frozenset({"image"}),
        one_node="a pod is one machine",
    ),
    "modal": LauncherKind(
        title="Modal",
        file="modal_app.py",
        meaning="Modal app",
        takes=frozenset({"image", "setup", "volume", "time_limit", "cpus"}),
        needs=frozenset({"image", "volume"}),
        one_node="a function of Modal runs on one machine",
    ),
}
LAUNCHER_FILES: Mapping[str, str] = {kind.file: kind.meaning for kind in KINDS.values()}
EXECUTABLE_FILES = frozenset(name for name in LAUNCHER_FILES if name.endswith((".sh", ".sbatch", ".py")))
