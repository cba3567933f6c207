"""Environment variables that change what libraries do: a table of what each does, with its source."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from toolkit.credentials import masked
from toolkit.doctor.findings import Finding, found, without_variable
from toolkit.doctor.kinds import Level
from toolkit.doctor.malformed import fault_of
from toolkit.errors import RunError
from toolkit.launch.identity import detect_launcher

_NCCL = "NCCL user guide, environment variables"
_CUDA = "CUDA programming guide, CUDA environment variables"
_TORCH_CUDA = "torch docs/source/cuda_environment_variables.rst"
_GROUPS = "torch docs/source/torch_nccl_environment_variables.rst"
_ALLOCATOR = "torch docs/source/notes/cuda.rst, memory management"
_HUB = "huggingface_hub docs, environment variables"
_BUILDER = "deepspeed ops/op_builder/builder.py"
_ACCELERATE = "accelerate utils/launch.py, state.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """What an environment variable does.

    Args:
        name: Its name.
        effect: What it does to a run.
        level: How serious it is that it is set.
        source: Where that is documented.
        only: Values for which this holds; any where it is empty.
    """

    name: str
    effect: str
    level: Level
    source: str
    only: frozenset[str] = frozenset()


def _rows() -> Iterator[Variable]:
    for source, rows in _TABLE.items():
        for written, level, effect in rows:
            name, _, values = written.partition("=")
            only = frozenset(values.split("|")) if values else frozenset()
            yield Variable(name=name, effect=effect, level=level, source=source, only=only)


# `NAME=a|b` is a row for these values alone.
_TABLE: dict[str, tuple[tuple[str, Level, str], ...]] = {
    _NCCL: (
        ("NCCL_P2P_DISABLE=1", "warning", "NCCL copies between the cards of a machine through the host, several times slower"),
        ("NCCL_P2P_LEVEL", "note", "sets how near two cards must be for direct copies"),
        ("NCCL_SHM_DISABLE=1", "warning", "NCCL uses no shared memory: cards without peer access exchange over the network"),
        ("NCCL_IB_DISABLE=1", "warning", "NCCL leaves InfiniBand and RoCE unused: several machines exchange over TCP, many times slower"),
        ("NCCL_NET_GDR_LEVEL", "note", "sets how near a card and a network adapter must be for direct transfers"),
        ("NCCL_NVLS_ENABLE=0", "note", "the switches of NVLink sum nothing, which takes longer on eight cards"),
        ("NCCL_SOCKET_IFNAME", "note", "NCCL meets and exchanges over these interfaces alone"),
        ("NCCL_IB_HCA", "note", "NCCL uses these network adapters alone"),
        ("NCCL_NET", "note", "NCCL uses this network plugin, and ends if it is absent"),
        ("NCCL_NET_PLUGIN", "note", "NCCL loads this network plugin"),
        ("NCCL_ALGO", "warning", "forces algorithms of collectives: NCCL's own choice by size is not made, and operations that lack the algorithm fail"),
        ("NCCL_PROTO", "warning", "forces protocols; LL128 on a machine that is not made for it corrupts data"),
        ("NCCL_MIN_NCHANNELS", "note", "more channels take multiprocessors and memory of the cards"),
        ("NCCL_MAX_NCHANNELS", "note", "fewer channels make collectives slower"),
        ("NCCL_BUFFSIZE", "note", "changes the buffers of each channel, in the cards' memory"),
        ("NCCL_CUMEM_ENABLE", "note", "changes how NCCL allocates; 0 was a workaround for containers"),
        ("NCCL_LAUNCH_MODE", "note", "changes how NCCL starts its kernels; PARALLEL is for several cards in a process"),
        ("NCCL_DEBUG=INFO|TRACE", "note", "prints many lines at each start of the groups"),
        ("NCCL_TOPO_FILE", "note", "NCCL takes the machine's topology from this file, right or wrong"),
    ),
    _GROUPS: (
        ("NCCL_BLOCKING_WAIT=1|Y|YES|T|TRUE", "warning", "the old name of TORCH_NCCL_BLOCKING_WAIT: each wait blocks the host, so that kernels no longer start ahead"),
        ("TORCH_NCCL_BLOCKING_WAIT=1|Y|YES|T|TRUE", "warning", "each wait blocks the host, so that kernels no longer start ahead"),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING=0", "warning", "a collective that fails or hangs ends no process: the run hangs"),
        ("NCCL_ASYNC_ERROR_HANDLING", "note", "the old name of TORCH_NCCL_ASYNC_ERROR_HANDLING"),
        ("TORCH_NCCL_AVOID_RECORD_STREAMS", "note", "changes when memory of collectives is reused; torch's default has been this since 2.7"),
        ("TORCH_NCCL_ENABLE_MONITORING=0", "note", "no watchdog ends a process whose watchdog hangs"),
        ("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "note", "sets when a process whose watchdog hangs is ended"),
        ("TORCH_NCCL_DUMP_ON_TIMEOUT", "note", "writes what each rank did before a timeout"),
        ("TORCH_DISTRIBUTED_DEBUG=DETAIL", "warning", "each collective is checked by others: several times slower"),
        ("TORCH_DISTRIBUTED_DEBUG=INFO", "note", "prints and checks more"),
        ("TORCH_CPP_LOG_LEVEL", "note", "prints what torch's C++ code logs"),
    ),
    _CUDA: (
        ("CUDA_VISIBLE_DEVICES", "note", "processes see these cards alone, in this order; a launcher of the toolkit numbers its ranks by them"),
        ("CUDA_LAUNCH_BLOCKING=1", "warning", "the host waits for every kernel: for finding a fault, several times slower"),
        ("CUDA_DEVICE_ORDER=FASTEST_FIRST", "note", "numbers of cards may differ from those of nvidia-smi"),
        ("CUDA_DEVICE_ORDER=PCI_BUS_ID", "ok", "numbers of cards are those of nvidia-smi"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "note", "sets the hardware queues: with 1, as for Megatron, copies and kernels of different streams wait for each other more"),
        ("CUDA_MODULE_LOADING=EAGER", "note", "all kernels are loaded at the start: slower, and hundreds of MiB of each card"),
        ("CUDA_CACHE_DISABLE=1", "note", "kernels that the driver compiles are compiled at each start"),
        ("CUDA_FORCE_PTX_JIT=1", "warning", "the driver compiles all kernels at each start"),
        ("CUDA_MPS_PIPE_DIRECTORY", "note", "processes share cards through MPS"),
        ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "warning", "a process has this share of a card's multiprocessors alone"),
    ),
    _TORCH_CUDA: (
        ("CUDA_HOME", "note", "extensions are compiled by the nvcc of this folder, if it fits torch's CUDA"),
        ("CUDA_PATH", "note", "extensions are compiled by the nvcc of this folder, where CUDA_HOME is not set"),
        ("TORCH_CUDA_ARCH_LIST", "note", "extensions are compiled for these architectures; what DeepSpeed cannot read is put as it can"),
        ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1", "warning", "fp32 matrix products round to TF32, with 10 bits, whatever a script sets (NVIDIA's images set it)"),
        ("NVIDIA_TF32_OVERRIDE=0", "note", "no library uses TF32"),
        ("NVIDIA_TF32_OVERRIDE=1", "warning", "all libraries round fp32 products to TF32"),
        ("TORCH_CUDNN_V8_API_DISABLED", "note", "changes which convolution kernels are chosen"),
        ("CUBLAS_WORKSPACE_CONFIG", "note", "sets cuBLAS's workspaces: deterministic products, and other memory than the estimate counts"),
        ("CUBLASLT_WORKSPACE_SIZE", "note", "sets cuBLASLt's workspaces: other kernels and memory than the estimate counts"),
        ("PYTORCH_NO_CUDA_MEMORY_CACHING=1", "warning", "every allocation asks the driver: hundreds of times slower"),
        ("PYTORCH_NVML_BASED_CUDA_CHECK", "ok", "torch asks NVML for cards, so that forks stay possible"),
        ("PYTORCH_NVCC", "note", "extensions are compiled by this program"),
        ("MAX_JOBS", "note", "so many compilers run at a time"),
        ("TORCH_EXTENSIONS_DIR", "note", "compiled extensions are kept in this folder"),
        ("TORCHINDUCTOR_CACHE_DIR", "note", "compiled graphs are kept in this folder"),
        ("TORCH_LOGS", "note", "prints what the compiler of graphs does"),
        ("TORCH_COMPILE_DISABLE=1", "warning", "train.torch_compile has no effect"),
        ("TORCHDYNAMO_DISABLE=1", "warning", "train.torch_compile has no effect"),
        ("TORCH_USE_CUDA_DSA", "note", "has an effect on builds of torch with device assertions alone"),
        ("TORCH_SHOW_CPP_STACKTRACES", "note", "errors have the C++ stack"),
        ("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "note", "torch.load runs no code of a file, and refuses what needs it"),
        ("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1", "warning", "torch.load runs code that a file names: checkpoints of others can do anything"),
    ),
    _ALLOCATOR: (
        ("PYTORCH_CUDA_ALLOC_CONF", "note", "replaces the toolkit's own setting of the allocator, which the estimate takes for granted: expandable_segments:True"),
        ("PYTORCH_ALLOC_CONF", "note", "replaces the toolkit's own setting of the allocator, which the estimate takes for granted: expandable_segments:True"),
    ),
    _HUB: (
        ("HF_HUB_OFFLINE=1|ON|YES|TRUE", "note", "nothing is fetched: models and data sets must be in the cache"),
        ("TRANSFORMERS_OFFLINE=1|ON|YES|TRUE", "note", "the old name of HF_HUB_OFFLINE: nothing is fetched"),
        ("HF_DATASETS_OFFLINE=1|ON|YES|TRUE", "note", "no data set is fetched"),
        ("HF_HOME", "note", "models, data sets and tokens of the hub are in this folder"),
        ("HF_HUB_CACHE", "note", "models of the hub are in this folder"),
        ("HUGGINGFACE_HUB_CACHE", "note", "the old name of HF_HUB_CACHE"),
        ("TRANSFORMERS_CACHE", "warning", "is no longer read: transformers 5 takes HF_HOME or HF_HUB_CACHE"),
        ("HF_DATASETS_CACHE", "note", "data sets are in this folder"),
        ("HF_ENDPOINT", "note", "models and data sets come from this server"),
        ("HF_TOKEN", "ok", "what is fetched counts as this user's"),
        ("HUGGING_FACE_HUB_TOKEN", "note", "the old name of HF_TOKEN"),
        ("HF_HUB_ENABLE_HF_TRANSFER=1|ON|YES|TRUE", "note", "is no longer read: the hub's client fetches through hf_xet"),
        ("HF_HUB_DISABLE_XET=1|ON|YES|TRUE", "note", "files are fetched over one plain connection each, more slowly"),
        ("HF_XET_HIGH_PERFORMANCE=1|ON|YES|TRUE", "ok", "files are fetched by as many connections as the network takes"),
        ("HF_HUB_DOWNLOAD_TIMEOUT", "note", "sets when a download counts as dead"),
        ("HF_HUB_DISABLE_SYMLINKS=1|ON|YES|TRUE", "note", "each revision in the cache has copies of its files"),
        ("HF_TRUST_REMOTE_CODE", "warning", "code that a repository of the hub has may run without being asked for"),
        ("TRANSFORMERS_VERBOSITY", "note", "transformers prints more, or less"),
        ("TOKENIZERS_PARALLELISM=true|1", "note", "forks of data loaders warn, and may wait for ever for threads of the tokenizer; the toolkit's ranks set it to false"),
        ("TOKENIZERS_PARALLELISM=false|0", "ok", "the tokenizer has one thread, as the toolkit's ranks set it"),
    ),
    _BUILDER: (
        ("DS_ACCELERATOR", "note", "DeepSpeed uses this kind of device; the toolkit's ranks set it by cluster.gpu"),
        ("DS_SKIP_CUDA_CHECK=1", "warning", "DeepSpeed compiles by an nvcc of another CUDA than torch's, which may fail or crash"),
        ("DS_BUILD_OPS", "note", "has an effect while DeepSpeed is installed alone"),
        ("DS_IGNORE_CUDA_DETECTION", "note", "DeepSpeed's installation takes every extension for possible"),
        ("DS_NVCC_THREADS", "note", "nvcc has so many threads"),
        ("DS_DEBUG_CUDA_BUILD", "note", "compilations print what ptxas says"),
        ("DS_ENV_FILE", "note", "`deepspeed` gives the variables of this file to its ranks"),
        ("DEEPSPEED_TIMEOUT", "note", "sets the timeout of process groups that DeepSpeed makes, in minutes; the toolkit makes them itself"),
        ("DEEPSPEED_LOG_LEVEL", "note", "DeepSpeed prints more, or less"),
        ("CXX", "note", "extensions are compiled by this compiler"),
        ("CC", "note", "extensions are compiled by this compiler of C"),
        ("CFLAGS", "note", "these flags are given to compilers"),
        ("LDFLAGS", "note", "these flags are given to linkers"),
    ),
    _ACCELERATE: (
        ("ACCELERATE_MIXED_PRECISION", "warning", "the process counts as a rank of `accelerate launch`; scripts of Accelerate compute in this precision"),
        ("ACCELERATE_USE_FSDP", "warning", "transformers loads weights on rank 0 alone; the toolkit's ranks drop it"),
        ("ACCELERATE_USE_DEEPSPEED", "warning", "Accelerate wraps models in DeepSpeed; the toolkit's ranks drop it"),
        ("ACCELERATE_TORCH_DEVICE", "warning", "Accelerate puts every rank on this device"),
        ("ACCELERATE_USE_CPU", "warning", "Accelerate leaves the cards unused"),
    ),
    "torch distributed/elastic; deepspeed comm/comm.py init_distributed": (
        ("RANK", "warning", "commands take this process for one rank of a launcher; left over from another session it makes them wait for the others"),
        ("WORLD_SIZE", "warning", "commands take this process for one rank of so many"),
        ("LOCAL_RANK", "warning", "commands take this process for one rank of a launcher"),
        ("MASTER_ADDR", "note", "ranks that a launcher starts meet at this address; those of `toolkit train` on one machine meet at 127.0.0.1"),
        ("MASTER_PORT", "note", "ranks that a launcher starts meet at this port; those of `toolkit train` on one machine take a free one"),
        ("GLOO_SOCKET_IFNAME", "note", "gloo meets over this interface alone"),
        ("TP_SOCKET_IFNAME", "note", "TensorPipe meets over this interface alone"),
    ),
    "OpenMP 5.2, environment variables; Intel MKL developer guide": (
        ("OMP_NUM_THREADS=1", "note", "CPU Adam and the data loader have one thread; without it the toolkit divides the cores among the ranks"),
        ("OMP_NUM_THREADS", "note", "each rank has so many threads of OpenMP; without it the toolkit divides the cores among the ranks"),
        ("MKL_NUM_THREADS", "note", "each rank has so many threads of MKL"),
        ("OMP_PROC_BIND", "warning", "threads stay on cores: those of all ranks on the same, unless each rank is bound to its own"),
        ("OMP_PLACES", "note", "threads run on these cores"),
        ("KMP_AFFINITY", "warning", "threads stay on cores: those of all ranks on the same, unless each rank is bound to its own"),
        ("GOMP_CPU_AFFINITY", "warning", "threads stay on cores: those of all ranks on the same, unless each rank is bound to its own"),
    ),
    "environ(7)": (("TMPDIR", "ok", "temporary files are in this folder"),),
    "ld.so(8); python(1)": (
        ("LD_PRELOAD", "warning", "this library comes before all others, in every process: what it replaces behaves otherwise"),
        ("LD_LIBRARY_PATH", "note", "libraries are looked for here before torch's own: an older NCCL, cuDNN or cuBLAS here replaces them"),
        ("PYTHONPATH", "note", "modules are looked for here before the installed ones"),
        ("PYTHONDONTWRITEBYTECODE", "note", "each start compiles all modules again: seconds"),
        ("PYTHONOPTIMIZE", "warning", "asserts are left out, also those of libraries that check by them"),
        ("PYTHONHASHSEED", "note", "sets are walked in the same order in each process"),
        ("PYTHONUSERBASE", "note", "packages of the user are looked for here"),
    ),
}  # fmt: skip

VARIABLES: tuple[Variable, ...] = tuple(_rows())

# Set by images to say what is in them; nothing reads them.
UNREAD = frozenset(
    {
        *("NCCL_VERSION", "CUDA_VERSION", "CUDA_DRIVER_VERSION", "CUDA_CACHE_PATH", "CUDA_CACHE_MAXSIZE"),
        *("PYTORCH_VERSION", "PYTORCH_BUILD_VERSION", "PYTORCH_BUILD_NUMBER", "PYTORCH_HOME", "PYTORCH_TRITON_VERSION"),
        *("TORCH_HOME", "CUDA_ARCH_LIST", "CUDA_COMPONENT_LIST"),
    }
)  # fmt: skip
_PREFIXES = ("NCCL_", "CUDA_", "TORCH_", "PYTORCH_", "HF_", "TRANSFORMERS_", "DS_", "DEEPSPEED_", "ACCELERATE_", "OMP_", "GLOO_", "TORCHELASTIC_")  # fmt: skip
_OF_LAUNCHERS = frozenset({"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"})
_OF_A_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")
_LONGEST_VALUE = 80


def variable_findings(environment: Mapping[str, str] | None = None) -> Iterator[Finding]:
    """Yield each variable that is set and changes behaviour, with what it will do.

    Args:
        environment: Environment variables of a run; those of this process when left out.
    """
    env = os.environ if environment is None else environment
    count = 0
    # Some variables of Accelerate's alone make a process count as its rank: left over, they are worth a word.
    launcher = detect_launcher(env)
    launched = launcher not in (None, "variables") and (launcher != "accelerate" or "RANK" in env)
    for name in sorted(env):
        if launched and (name in _OF_LAUNCHERS or name.startswith(("ACCELERATE_", "TORCHELASTIC_"))):
            continue
        known = _known(name, env[name])
        fault = fault_of(name, env)
        if not env[name] or (fault is None and (known is None or known.level == "ok")):
            continue
        count += 1
        value = masked(env[name], name=name)
        shown = value if len(value) <= _LONGEST_VALUE else f"{value[:_LONGEST_VALUE]}…"
        if fault is not None:
            yield found("VARIABLE_MALFORMED", f"{name}={shown} {fault.what}", why=fault.effect, repair=fault.repair)
            continue
        assert known is not None
        repair = without_variable(name)
        yield found(
            "VARIABLE", f"{name}={shown}", level=known.level, why=known.effect, source=known.source, repair=repair
        )
    if not count:
        yield found("ENVIRONMENT", "no variable that is set changes how libraries behave")


def launch_finding(error: RunError, environment: Mapping[str, str]) -> Finding:
    """Return the finding of variables by which this process counts as a rank of a launcher, and that do not fit together.

    Args:
        error: What `rank_from_environment` raises for them.
        environment: Those variables.
    """
    seen = "; ".join(problem.message for problem in error.problems)
    names = [name for name in _OF_A_RANK if name in environment]
    by_hand = f"unset {' '.join(names)}, where no launcher has started this shell"
    return found("LAUNCH_VARIABLES", seen, repair=by_hand if names else error.problems[0].fix)


def _known(name: str, value: str) -> Variable | None:
    """Return what the table says of a variable with a value; for one of a library's that it lacks, that."""
    rows = [row for row in VARIABLES if row.name == name]
    for row in rows:
        if value.upper() in {each.upper() for each in row.only}:  # libraries read true, True and TRUE alike
            return row
    for row in rows:
        if not row.only:
            return row
    if rows or name in UNREAD or not name.startswith(_PREFIXES):
        return None
    effect = f"is not in the table of `toolkit doctor`: look it up in the documentation of {name.partition('_')[0]}"
    return Variable(name=name, effect=effect, level="note", source="")
