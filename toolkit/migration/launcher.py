"""The options of torchrun and of DeepSpeed's launcher, variables, hostfiles and directives of SLURM: how many processes there are.

Source: torch distributed/run.py; deepspeed launcher/runner.py; `man sbatch`.
"""

from __future__ import annotations

from typing import Any

from toolkit.migration.reading import Reading, as_list, as_mapping
from toolkit.migration.table import Subject, Table, carried, not_carried, not_needed
from toolkit.migration.values import positive
from toolkit.units import whole_number

_NODES = ("nnodes", "num_nodes", "NNODES", "nodes")
_OF_NODE = ("nproc_per_node", "num_gpus", "NPROC_PER_NODE", "num_proc", "gpus_per_node", "gres", "ntasks_per_node")


def started(r: Reading) -> None:
    """Read how many processes a launcher starts on each machine; SLURM's directives where the launcher's options do not say it."""
    hosts = as_mapping(r.value("hosts"))
    nodes = next((r.value(key) for key in _NODES if r.given(key)), len(hosts) or None)
    first, _, most = str(nodes).replace("-", ":").partition(":")
    if (count_of_nodes := whole_number(first)) and (not most or most == first):
        r.carry("cluster.nodes", count_of_nodes, *_NODES, "hosts")
    r.refuse("a run has one number of nodes", *_NODES, fix="Set cluster.nodes")
    counts = [(key, _count(r.value(key))) for key in _OF_NODE if r.given(key)]
    count = next((number for _, number in counts if number), 0)
    visible = as_list(r.value("CUDA_VISIBLE_DEVICES"))
    if count:
        r.carry("cluster.gpus_per_node", count, *(key for key, number in counts if number == count))
        r.unneeded("the number of processes is given", "CUDA_VISIBLE_DEVICES")
    elif len(set(hosts.values())) == 1:
        r.carry("cluster.gpus_per_node", next(iter(hosts.values())), "hosts")
    elif visible:
        r.carry("cluster.gpus_per_node", len(visible), "CUDA_VISIBLE_DEVICES")
    r.unneeded("the number of processes is given", *(key for key, _ in counts if count))
    r.refuse("only the machine knows its number", *_OF_NODE, fix="Set cluster.gpus_per_node")
    r.refuse("the nodes have different numbers of cards", "hosts", fix="Set cluster.gpus_per_node")
    unknown = [key for key in r.leaves if key.isupper() and key not in LAUNCHER.keys]
    r.refuse("a job sets no environment variables", *unknown, fix="Export it before `toolkit train`")


def _count(value: Any) -> int:
    """Return the cards that an option names: 8, gpu:8 or gpu:h100:8; 0 for no number."""
    last = str(value).rpartition(":")[2].partition("(")[0]
    return whole_number(last) or 0


_LAUNCHER = (
    "rdzv_backend rdzv_endpoint rdzv_id rdzv_conf standalone max_restarts monitor_interval start_method role module no_python run_path log_dir "
    "redirects tee local_ranks_filter node_rank master_addr local_addr logs_specs numa_binding event_log_handler signals_to_handle include exclude "
    "launcher launcher_args no_local_rank no_ssh no_ssh_check force_multi save_pid enable_each_rank_log bind_cores_to_rank bind_core_list ssh_port "
    "venv_script duplicate_stdout_filters duplicate_stderr_filters shutdown_timeout virtual_local_rank processes_per_node m NODE_RANK MASTER_ADDR RANK WORLD_SIZE LOCAL_RANK FORCE_TORCHRUN OMP_NUM_THREADS TOKENIZERS_PARALLELISM ACCELERATE_LOG_LEVEL"
)
_SLURM = (
    "job_name time partition output error account qos cpus_per_task mem mem_per_cpu mem_per_gpu exclusive constraint signal requeue no_requeue "
    "mail_type mail_user chdir array dependency export gpus gpus_per_task ntasks tasks_per_node nodelist distribution open_mode reservation "
    "hint threads_per_core comment get_user_env wait_all_nodes overcommit licenses"
)
LAUNCHER = Table(
    tool="the launcher",
    rows=(
        carried("master_port", "cluster.master_port", convert=positive),
        carried("MASTER_PORT", "cluster.master_port", convert=positive),
        *not_needed("the toolkit, or any launcher, starts the processes", _LAUNCHER),
        *not_needed("it stays in the batch script", _SLURM),
        *not_carried("the number of ranks of a run stays the same", "elastic_training min_elastic_nodes max_elastic_nodes", off=(None, False, -1, "-1")),
        *not_carried("hosts are not in a job", "hostfile", fix="Set cluster.nodes, and name the hosts to the launcher"),
        *not_carried("DeepSpeed's autotuning is not offered", "autotuning", fix="`toolkit plan JOB` searches settings"),
    ),
    subjects=(
        Subject(
            keys=(*_NODES, *_OF_NODE, "CUDA_VISIBLE_DEVICES", "hosts"),
            to=("cluster.nodes", "cluster.gpus_per_node"),
            says="Processes of a machine, and machines, by options of torchrun and deepspeed, by variables, a hostfile, or directives of SLURM.",
            run=started,
        ),
    ),
    source="torchrun, deepspeed, hostfiles and sbatch",
)  # fmt: skip
