"""Whether DeepSpeed's extensions can be compiled here; `--build` compiles them."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import suppress

from toolkit.doctor.findings import Finding, found, without_variable
from toolkit.launch.build_locks import stale_locks_of
from toolkit.launch.build_tools import missing_tools, settings_of
from toolkit.launch.extensions import Extension, Machine
from toolkit.launch.trial_builds import build_all

_OFFLOAD, _OPTIMIZER = "parallel.offload", "train.optimizer"


def known_extensions(*, on_card: bool) -> tuple[Extension, ...]:
    """Return the extensions that jobs load, that of most first.

    Args:
        on_card: Whether there is a GPU.
    """
    fused = Extension(
        name="fused_adam", title="FusedAdam", by_nvcc=True, replaceable=True, key=_OPTIMIZER, wanted="optimizer=adamw", instead=""
    )  # fmt: skip
    cpu = Extension(
        name="cpu_adam", title="CPUAdam", replaceable=True, key=_OFFLOAD, wanted="offload=optimizer-cpu", instead=""
    )
    aio = Extension(
        name="async_io", title="async_io", by_nvcc=on_card, asks_nvcc=on_card, needs_libaio=True, key=_OFFLOAD, wanted="offload=optimizer-nvme", instead=""
    )  # fmt: skip
    pin = Extension(name="pin_memory", title="pin_memory", key=_OFFLOAD, wanted="offload=optimizer-nvme", instead="")
    return (*((fused,) if on_card else ()), cpu, aio, pin)


def build_findings(
    extensions: Sequence[Extension], machine: Machine, *, capability: str | None = None
) -> Iterator[Finding]:
    """Yield whether extensions can be compiled, and what runs change for it.

    Args:
        extensions: Those to look at.
        machine: Machine to look at.
        capability: Compute capability of its cards, if there are any.
    """
    for name, setting in settings_of(extensions, machine, capability=capability).items():
        seen = f"{name}={setting.value}: {setting.reason}" if setting.value else f"{name} is left out: {setting.reason}"
        yield found("BUILD_SETTING", seen, repair=_repair_of_setting(name, machine))
    for lock in stale_locks_of(extensions, machine):
        yield found("BUILD_STALE_LOCK", f"{lock} has no owner", path=lock)
    for extension in extensions:
        missing = list(missing_tools(extension, machine))
        if extension.name in machine.installed.prebuilt:
            yield found("BUILD_READY", f"{extension.title} was compiled when DeepSpeed was installed")
        elif not missing:
            how = (
                "is compiled" if machine.has_built(extension) else "can be compiled; the first run does, or --build now"
            )
            yield found("BUILD_READY", f"{extension.title} {how} ({machine.folder(extension)})")
        else:
            code = "BUILD_REPLACED" if extension.name == "fused_adam" else "BUILD_MISSING"
            seen = f"{extension.title}, which {extension.wanted} loads: {'; '.join(missing)}"
            yield found(code, seen, repair=repair_of(missing, machine))


def _repair_of_setting(name: str, machine: Machine) -> str:
    """Return that nothing need be repaired, and what of the user's own leads to the setting."""
    if name == "PATH":
        return "Nothing; with the folder of this Python's programs on PATH, as in an activated environment, nothing is changed"
    if machine.environment.get(name):
        return f"Nothing; after `{without_variable(name)}` the usual value holds"
    return "Nothing"


def repair_of(missing: Sequence[str], machine: Machine) -> str:
    """Return the commands that install what is missing, as `missing_tools` says it."""
    said, commands = " ".join(missing), []
    major = (machine.installed.cuda or "").split(".")[0]
    if "C++ compiler" in said:
        commands.append("apt-get install -y g++")
    if "headers of Python" in said:
        commands.append("apt-get install -y python3-dev")
    if "ninja" in said:
        commands.append("pip install ninja")
    if "nvcc" in said or "CUDA_HOME must" in said:
        minor = (machine.installed.cuda or "").partition(".")[2] or "0"
        install = f"apt-get install -y cuda-nvcc-{major}-{minor} cuda-cudart-dev-{major}-{minor} libcusparse-dev-{major}-{minor}"
        commands.append(
            f"{install} (of NVIDIA's repository), then export CUDA_HOME=/usr/local/cuda-{major}.{minor}"
            if major
            else "install CUDA and a torch built with it"
        )
    if "libaio" in said:
        commands.append("apt-get install -y libaio-dev")
    if "cannot be written" in said:
        commands.append("export TORCH_EXTENSIONS_DIR=FOLDER, one that can be written")
    return "; ".join(commands)


def build_now(
    extensions: Sequence[Extension], machine: Machine, *, seconds: float, capability: str | None
) -> Iterator[Finding]:
    """Compile and load extensions in a process of its own, as a run would, and yield what came of each.

    Args:
        extensions: Those to build; what lacks a tool is left out.
        machine: This machine.
        seconds: How long all of them may take.
        capability: Compute capability of its cards, if there are any.
    """
    able = [extension for extension in extensions if not list(missing_tools(extension, machine))]
    if not able:
        return
    for lock in stale_locks_of(able, machine):
        with suppress(OSError):  # it then waits for it, and is ended in time
            lock.unlink()
    try:
        for built in build_all(able, machine, capability=capability, seconds=seconds):
            title = built.extension.title
            if built.error is None:
                yield found("BUILD_DONE", f"{title} was built and loaded in {built.seconds:.1f} s")
            else:
                yield found("BUILD_BROKEN", f"{title}: {built.error}", repair=_mend(built.error))
    except subprocess.TimeoutExpired:
        yield found(
            "PROBE_TIMEOUT",
            f"the compilation took longer than {seconds:.0f} s",
            hint="toolkit doctor --build again: ninja goes on where it ended",
        )


def _mend(why: str) -> str:
    """Return what usually repairs a failed compilation."""
    if "No space left" in why:
        return "Make room, or export TORCH_EXTENSIONS_DIR=FOLDER on another disk"
    if "cusparse" in why or "cublas" in why or "curand" in why:
        return "Install CUDA's development files: apt-get install -y libcusparse-dev-13-0 libcublas-dev-13-0 libcurand-dev-13-0, of torch's CUDA"
    if "unsupported GNU version" in why or "host_config.h" in why:
        return "Install a g++ that nvcc takes, and export CXX=g++-13 CC=gcc-13"
    return "See the whole output: python -m toolkit.distributed.extension_build --verbose NAME"
