"""Every code of `toolkit doctor`: what it is about, its usual level, why it matters and the repair. docs/doctor.md has this table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Level = Literal["error", "warning", "note", "ok"]
# From the most serious.
LEVELS: tuple[Level, ...] = ("error", "warning", "note", "ok")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of finding.

    Args:
        code: Stable name.
        subject: Part of the machine.
        level: Usual level; a finding may have another.
        why: Why it matters.
        repair: Command or step that repairs it; `{…}` are details of a finding. Empty where nothing is wrong.
    """

    code: str
    subject: str
    level: Level
    why: str
    repair: str = ""


def _kinds() -> Iterator[Kind]:
    for subject, rows in _ROWS.items():
        for code, level, why, repair in rows:
            yield Kind(code=code, subject=subject, level=level, why=why, repair=repair)


_ROWS: dict[str, tuple[tuple[str, Level, str, str], ...]] = {
    "doctor": (
        ("PROBE_TIMEOUT", "warning", "What does not answer the doctor does not answer a run either: it hangs there", "{hint}"),
        ("PROBE_FAILED", "note", "The doctor could not look there; a run need not fail", "Look there by hand: {hint}"),
    ),
    "software": (
        ("SOFTWARE", "ok", "The versions are those that the toolkit is tested with", ""),
        ("PACKAGE_MISSING", "error", "The toolkit imports it", "pip install '{requirement}'"),
        ("PACKAGE_RANGE", "warning", "The toolkit uses private names of DeepSpeed and transformers, and is tested with this range alone", "pip install '{requirement}'"),
        ("DRIVER_ABSENT", "note", "There is no NVIDIA driver: jobs run on CPU processes over gloo, and what asks GPUs was left out", "On a machine with GPUs start the container with `--gpus all`, or install the driver; else set cluster.gpu to cpu"),
        ("DRIVER_BROKEN", "error", "NVIDIA's driver is there and does not answer, so that no process can use a GPU", "{hint}"),
        ("DRIVER_OLD", "error", "The driver runs programs of its own major version of CUDA and of older ones", "Install a driver of CUDA {cuda} or newer, or a torch built for the driver: pip install torch --index-url https://download.pytorch.org/whl/cu{older}"),
        ("DRIVER_MINOR", "note", "CUDA's minor version compatibility holds for compiled kernels; those that are compiled at run time as PTX need the newer driver", "Nothing for training; a newer driver for packages that compile PTX"),
        ("TORCH_WITHOUT_CUDA", "error", "This torch cannot use the GPUs of this machine", "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu{driver}"),
        ("CUDA_UNUSABLE", "error", "Torch finds no GPU that it can use, though the driver lists some", "{hint}"),
        ("CARD_UNSUPPORTED", "error", "This torch has no kernels for the architecture of the card", "Install a torch built for it: `python -c 'import torch; print(torch.cuda.get_arch_list())'` lists what this one has"),
    ),
    "builds": (
        ("BUILD_READY", "ok", "DeepSpeed's extension is compiled, or will be in the first run", ""),
        ("BUILD_REPLACED", "warning", "DeepSpeed's FusedAdam cannot be compiled: torch's fused AdamW steps instead, with the same update and memory", "{repair}"),
        ("BUILD_MISSING", "note", "Only jobs that offload need it; they end before their weights load, or step by torch's AdamW", "{repair}"),
        ("BUILD_SETTING", "note", "Runs change this variable while they compile, and say so", "{repair}"),
        ("BUILD_STALE_LOCK", "note", "A killed compilation left it; runs delete it before they load the extension", "rm {path}"),
        ("BUILD_DONE", "ok", "It was compiled and loaded now, so that the first run does not wait for it", ""),
        ("BUILD_BROKEN", "warning", "The tools are there, and the compilation failed: AdamW is replaced by torch's, other extensions end a run before its weights load", "{repair}"),
    ),
    "cards": (
        ("CARD", "ok", "The card is as its kind should be", ""),
        ("CARD_LOST", "error", "The card does not answer the driver: runs that use it fail", "Reset it as root, `nvidia-smi --gpu-reset -i {index}`, or reboot; if that does not help, return the machine"),
        ("CARD_MEMORY_TAKEN", "warning", "A run has only what is left, and the estimate counts a free card", "{repair}"),
        ("CARD_ECC", "warning", "Uncorrectable errors of its memory end processes, or were mapped away and need a reset to take effect", "{repair}"),
        ("CARD_XID", "warning", "The driver has reported a fault of a GPU since the machine started", "Look the number up in NVIDIA's list of XID errors; 48, 63, 64, 74, 79 and 94 to 95 are of the hardware: return the machine"),
        ("CARD_THROTTLED", "warning", "The card runs below its clocks because it is hot or its power is cut, and the others wait for it", "Look at `nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER -i {index}`; it is the host's cooling or power: ask the provider, or return the machine"),
        ("CARD_MIG", "warning", "MIG cuts the card into slices, of which a process sees one, and NCCL joins none", "sudo nvidia-smi -i {index} -mig 0"),
        ("CARD_PERSISTENCE", "note", "Without a process the driver unloads, and each start waits a second or more for it", "sudo nvidia-smi -pm 1"),
        ("CARD_CLOCKS", "note", "Clocks are set below the highest, so that steps take longer than foreseen", "sudo nvidia-smi -i {index} -rac -rgc"),
        ("CARD_POWER", "note", "The power limit is below the card's default, so that steps take longer than foreseen", "sudo nvidia-smi -i {index} -pl {watts}"),
        ("CARD_COMPUTE_MODE", "warning", "The compute mode lets one process, or none, use the card", "sudo nvidia-smi -i {index} -c DEFAULT"),
        ("CARD_PCIE", "warning", "The card has fewer lanes than it could: copies from and to the host, and those between cards without NVLink, are slower by as much", "Often a riser or a slot: return the machine, or use another slot"),
        ("CARD_NUMA", "warning", "Copies between the host and the card cross the link between two sockets, and so does each step of an optimizer on the host", "Start the process on processors of node {node}: numactl --cpunodebind={node}, or another cpuset of the container or the job"),
        ("CARDS_DIFFER", "warning", "A run goes at the pace of its slowest card and has the memory of its smallest", "Choose equal ones: CUDA_VISIBLE_DEVICES={equal}"),
        ("CARDS_HIDDEN", "note", "CUDA_VISIBLE_DEVICES hides cards from runs", "unset CUDA_VISIBLE_DEVICES"),
        ("CARD_UNKNOWN", "note", "The catalogue lacks this card, so that nothing is compared with it; a job describes it", "cluster: {{gpu: {{name: {name}, memory_gib: {gib}}}}}"),
    ),
    "links": (
        ("LINKS", "ok", "The cards reach each other as their kind should", ""),
        ("LINKS_DOWN", "warning", "Collectives between these cards cross PCIe, several times slower", "`nvidia-smi nvlink -s` and `nvidia-smi topo -m` show which; a reset or reboot, then return the machine"),
        ("LINKS_FABRIC", "error", "The NVSwitches are not set up: CUDA ends with `system not yet initialized`", "sudo systemctl restart nvidia-fabricmanager, of exactly the driver's version; in a container it is the host's"),
        ("LINKS_PEERS", "warning", "Without access to each other's memory NCCL copies through the host", "Turn off PCIe's ACS and the IOMMU in the host's firmware; in virtual machines ask for one with peer access. If NCCL hangs: export NCCL_P2P_DISABLE=1"),
    ),
    "speeds": (
        ("SPEED", "ok", "Measured speeds are near the catalogue's", ""),
        ("HOST_COPY_SLOW", "warning", "Offload, checkpoints and batches cross this", "Often fewer PCIe lanes, another NUMA node or a busy neighbour: `nvidia-smi -q -d PCIE`, `nvidia-smi topo -m`; compare with another machine"),
        ("ALL_REDUCE_SLOW", "warning", "Every step waits for its collectives", "`NCCL_DEBUG=INFO toolkit diagnose` shows the transport: it should be P2P/NVLS, not SHM or NET; `nvidia-smi topo -m`"),
        ("ALL_REDUCE_FAILED", "error", "NCCL cannot join the cards of this machine", "{repair}"),
    ),
    "host": (
        ("HOST", "ok", "RAM, limits and shared memory suffice", ""),
        ("MEMORY_LOW", "warning", "Loading, offload and pinned buffers need RAM; the kernel kills a rank without a message", "End what holds it (`ps aux --sort=-rss | head`), or rent more RAM"),
        ("MEMORY_LIMIT", "note", "The container's limit is below the machine's RAM; processes above it are killed", "Set cluster.host_memory_gib to {gib}, so that plans heed it, or start the container with a larger --memory"),
        ("LOCKED_MEMORY", "note", "RDMA registers, and NVMe offload locks, more than this", "ulimit -l unlimited, or start the container with --ulimit memlock=-1"),
        ("OPEN_FILES", "warning", "Ranks, stores, data files and workers each hold files", "ulimit -n 65536, or start the container with --ulimit nofile=65536"),
        ("SHARED_MEMORY", "warning", "NCCL and data loaders exchange through /dev/shm; when it is full a rank dies with SIGBUS", "Start the container with --shm-size=16g or --ipc=host, or: mount -o remount,size=16g /dev/shm"),
        ("CPU_FEW", "note", "Each rank has a thread that starts kernels, and loads data beside", "Rent more cores, at least four for each card"),
        ("CPU_OVERSUBSCRIBED", "warning", "Each rank has so many threads of its own that they displace each other", "unset OMP_NUM_THREADS: the toolkit divides the cores among the ranks"),
    ),
    "disks": (
        ("DISK", "ok", "The folder can be written, has room and is fast enough", ""),
        ("DISK_UNWRITABLE", "error", "Checkpoints, caches or compiled extensions go there", "{repair}"),
        ("DISK_FULL", "error", "A run would end at its first write there", "Delete what is not needed (`du -xh {path} | sort -h | tail`), or name another disk: {repair}"),
        ("DISK_SPACE", "warning", "A checkpoint of an 8B model in training takes about 100 GiB, its weights 15", "Name a larger disk: {repair}"),
        ("DISK_INODES", "error", "The disk has room and no place for another file", "Delete folders of many small files (`du --inodes -x {path} | sort -n | tail`)"),
        ("DISK_SLOW", "warning", "Saving and loading take as long as this disk needs", "Name a local disk: {repair}"),
        ("DISK_NETWORK", "note", "Locks and renames depend on its server; compiled extensions there are shared by machines that may differ", "Name a local disk for caches: {repair}"),
    ),
    "network": (
        ("NETWORK", "ok", "Names resolve and the rendezvous port is free", ""),
        ("HOSTNAME_LOOPBACK", "note", "On several machines gloo and NCCL tell the others the address of the host's name: with a loopback address they hang. One machine does not mind", "In /etc/hosts put the address by which the other nodes reach this one beside {name}, or: export GLOO_SOCKET_IFNAME={interface} NCCL_SOCKET_IFNAME={interface}"),
        ("HOSTNAME_UNRESOLVED", "warning", "gloo looks the host's name up, and waits or fails", "echo \"{address} {name}\" | sudo tee -a /etc/hosts"),
        ("LOCALHOST", "error", "Ranks of one machine meet at 127.0.0.1, and libraries ask for localhost", "echo \"127.0.0.1 localhost\" | sudo tee -a /etc/hosts"),
        ("DNS", "note", "Models and data sets of the hub cannot be fetched; what is cached is used", "Check /etc/resolv.conf and the proxy; offline: export HF_HUB_OFFLINE=1, which spares the waiting"),
        ("PORT_TAKEN", "note", "torchrun and `deepspeed` meet there by default; `toolkit train` takes a free one", "Give another one: torchrun --master-port {free}, or cluster.master_port"),
        ("INTERFACE_UNKNOWN", "error", "The variable names a network interface that this machine lacks: ranks fail or hang as they join", "unset {variable}, or set it to one of {interfaces}"),
        ("CLOCK_UNSYNCED", "note", "Logs of several machines cannot be compared, and certificates may count as not yet valid", "sudo timedatectl set-ntp true"),
        ("CLOCK_SKEW", "warning", "Clocks of the nodes differ: their logs cannot be compared, and locks in shared folders look stale or held", "sudo timedatectl set-ntp true, on each node"),
    ),
    "environment": (
        ("ENVIRONMENT", "ok", "No variable that is set changes how libraries behave", ""),
        ("VARIABLE", "note", "The variable changes what a library does", "{repair}"),
        ("VARIABLE_MALFORMED", "warning", "No library can use the value", "{repair}"),
        ("LAUNCH_VARIABLES", "error", "Commands take this process for a rank of a launcher, and end with LAUNCH_ENV", "{repair}"),
    ),
    "job": (
        ("JOB_RUNS", "ok", "Nothing found here keeps this machine from running the job", ""),
        ("JOB_INVALID", "error", "The job cannot be planned", "toolkit validate {path}"),
        ("JOB_REFUSED", "error", "`toolkit train` would refuse to start here", "{repair}"),
        ("JOB_MEMORY", "error", "The job needs more memory than a card of this machine has left, by arithmetic over its weights, gradients and optimizer state alone", "toolkit estimate {path} shows what would fit; toolkit plan {path} which settings or cards"),
        ("JOB_HOST_MEMORY", "error", "The offloaded state does not fit into this machine's RAM, or its limit", "Choose another parallel.offload, lower parallel.offload_ratio, or rent more RAM; toolkit estimate {path} has the bytes"),
        ("JOB_DISK", "warning", "The disk of the output folder has less room than the run will use", "{repair}"),
        ("JOB_BUILD", "warning", "The job's optimizer is replaced by torch's fused AdamW on this machine, or its start is refused", "{repair}"),
    ),
}  # fmt: skip

KINDS: dict[str, Kind] = {kind.code: kind for kind in _kinds()}


def reference() -> str:
    """Return the tables of docs/doctor.md, in Markdown."""
    parts = []
    for subject, rows in _ROWS.items():
        parts.append(f"### {subject.capitalize()}\n\n| code | level | why it matters | repair |\n|---|---|---|---|")
        for code, level, why, repair in rows:
            shown = repair.replace("{{", "{").replace("}}", "}").replace("|", "\\|") or "–"
            parts[-1] += f"\n| `{code}` | {level} | {why} | {shown} |"
    return "\n\n".join(parts) + "\n"
