"""The tools that this machine needs to compile DeepSpeed's extensions, and the environment for it."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from toolkit.errors import Problem
from toolkit.launch.architectures import readable_architectures
from toolkit.launch.environment import Setting
from toolkit.launch.extensions import Extension, Machine, can_write
from toolkit.planning.deepspeed_config import Consumer
from toolkit.planning.plan import Plan

_ARCH_LIST = "TORCH_CUDA_ARCH_LIST"
# Where NVIDIA's installers put the versions of CUDA.
CUDA_FOLDERS = Path("/usr/local")
# nvcc says its version in milliseconds; from a folder of a dead server never.
_TOOL_SECONDS = 20.0


def tool_problems(plan: Plan, consumer: Consumer = "toolkit", *, machine: Machine | None = None) -> Iterator[Problem]:
    """Yield BUILD_TOOLS problems: what this machine lacks to compile the extensions that a run of a plan loads.

    Args:
        plan: Resolved plan.
        consumer: Which DeepSpeed configuration it runs with.
        machine: Machine to run on; this one when left out.
    """
    for missing, extensions in unbuildable(plan, consumer, machine=machine).items():
        yield tool_problem(missing, extensions)


def unbuildable(
    plan: Plan, consumer: Consumer = "toolkit", *, machine: Machine | None = None
) -> dict[str, tuple[Extension, ...]]:
    """Return the extensions of a plan that cannot be compiled here, keyed by what is missing, as a clause; arguments as of `tool_problems`."""
    machine = machine or Machine()
    lacking: dict[str, tuple[Extension, ...]] = {}
    for extension in machine.compiles(plan, consumer):
        missing = "; ".join(missing_tools(extension, machine))
        if missing:
            lacking[missing] = (*lacking.get(missing, ()), extension)
    return lacking


def missing_tools(extension: Extension, machine: Machine) -> Iterator[str]:
    """Yield what is missing to load an extension; for one that is compiled already, only what each load needs.

    Source:
        deepspeed ops/op_builder/builder.py OpBuilder.jit_load, installed_cuda_version, assert_no_cuda_mismatch;
        torch utils/cpp_extension.py verify_ninja_availability, get_cxx_compiler, _find_cuda_home, _write_ninja_file.
    """
    built, environment = machine.has_built(extension), machine.environment
    if _which("ninja", environment) is None and _packaged_ninja() is None:
        yield "no ninja (`pip install ninja`)"
    compiler = shlex.split(environment.get("CXX", "")) or [_compiler(environment) or "c++"]
    if not built and _which(compiler[0], environment) is None:
        yield f"no C++ compiler: {compiler[0]} is not on PATH"
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not built and not header.is_file():
        yield f"no headers of Python: {header} does not exist"
    if extension.by_nvcc:
        home = other_cuda(machine) or cuda_home(environment)
        if home is None:
            yield "no nvcc: CUDA_HOME is not set, nvcc is not on PATH, /usr/local/cuda does not exist"
        elif not built or extension.asks_nvcc:
            yield from unfit_nvcc(nvcc_of(home, environment), machine)
    if not can_write(machine.folder(extension)):
        yield f"the folder of compiled extensions cannot be written: {machine.cache} (TORCH_EXTENSIONS_DIR names another)"
    if extension.needs_libaio and not _links_libaio(environment):
        yield "no libaio to link with (libaio-dev, libaio-devel)"


def cuda_home(environment: Mapping[str, str]) -> str | None:
    """Return the folder of the CUDA toolkit that torch compiles with (torch utils/cpp_extension.py _find_cuda_home)."""
    named = environment.get("CUDA_HOME") or environment.get("CUDA_PATH")
    if named is not None:
        return named
    nvcc = _which("nvcc", environment)
    if nvcc is not None:
        return str(Path(nvcc).parent.parent)
    return "/usr/local/cuda" if Path("/usr/local/cuda").exists() else None


def nvcc_of(home: str, environment: Mapping[str, str]) -> str:
    """Return the compiler of a CUDA toolkit's folder that torch calls (torch utils/cpp_extension.py _write_ninja_file)."""
    return environment.get("PYTORCH_NVCC") or f"{home}/bin/nvcc"


def other_cuda(machine: Machine) -> str | None:
    """Return the folder of a CUDA toolkit that fits torch, where the one that torch would take does not; None if that one fits, or none does.

    Looked at are CUDA's own folders, and NVIDIA's packages for pip beside torch.
    """
    installed, environment = machine.installed, machine.environment
    home = cuda_home(environment)
    if installed.cuda is None or environment.get("PYTORCH_NVCC"):
        return None
    if home is not None and not list(unfit_nvcc(f"{home}/bin/nvcc", machine)):
        return None
    major = installed.cuda.split(".")[0]
    packages = [Path(entry, "nvidia", f"cu{major}") for entry in sys.path if entry]
    numbered = sorted(CUDA_FOLDERS.glob(f"cuda-{major}*"), reverse=True)
    for place in (CUDA_FOLDERS / f"cuda-{installed.cuda}", *numbered, CUDA_FOLDERS / "cuda", *packages):
        if (place / "bin" / "nvcc").is_file() and not list(unfit_nvcc(f"{place}/bin/nvcc", machine)):
            return str(place)
    return None


def _compiler(environment: Mapping[str, str]) -> str | None:
    """Return the first C++ compiler on PATH: torch asks for `c++` alone."""
    return next((name for name in ("c++", "g++", "clang++") if _which(name, environment) is not None), None)


def build_settings(plan: Plan, consumer: Consumer = "toolkit", *, machine: Machine | None = None) -> dict[str, Setting]:
    """Return the variables that DeepSpeed's builds need changed: name → value and reason; usually empty.

    Args:
        plan: Resolved plan.
        consumer: Which DeepSpeed configuration it runs with.
        machine: Machine to run on; this one when left out.
    """
    machine = machine or Machine()
    return settings_of(machine.compiles(plan, consumer), machine, capability=plan.gpu.known_capability)


def settings_of(extensions: Sequence[Extension], machine: Machine, *, capability: str | None) -> dict[str, Setting]:
    """Return what `build_settings` does, for extensions and the compute capability of a card, if it is known."""
    environment = machine.environment
    found = {}
    ninja = _packaged_ninja() if extensions and _which("ninja", environment) is None else None
    if ninja is not None:
        path = f"{environment.get('PATH', os.defpath)}{os.pathsep}{ninja.parent}"
        found["PATH"] = Setting(path, f"ninja is not on PATH: DeepSpeed's builds use {ninja}")
    if not extensions:
        return found
    other = machine.other_cache()
    if other is not None:
        found["TORCH_EXTENSIONS_DIR"] = Setting(
            str(other), f"{machine.cache} cannot be written: DeepSpeed's extensions are compiled in {other}"
        )
    compiler = _compiler(environment)
    if not environment.get("CXX") and compiler not in (None, "c++"):
        found["CXX"] = Setting(str(compiler), f"c++ is not on PATH: DeepSpeed's extensions are compiled by {compiler}")
    home = other_cuda(machine) if any(extension.by_nvcc for extension in extensions) else None
    if home is not None:
        reason = f"torch was built with CUDA {machine.installed.cuda}: DeepSpeed's extensions are compiled by {home}"
        found["CUDA_HOME"] = Setting(home, reason)
    written = environment.get(_ARCH_LIST, "").strip()
    if written and any(extension.by_nvcc for extension in extensions):
        readable = readable_architectures(written, capability)
        if readable != written:
            goal = readable or "the cards of this machine"
            found[_ARCH_LIST] = Setting(
                readable,
                f"{_ARCH_LIST}={written} is not a list that DeepSpeed can build for: its kernels are built for {goal}",
            )
    return found


@contextlib.contextmanager
def built_with(settings: Mapping[str, Setting]) -> Iterator[None]:
    """Set environment variables of this process while the block runs.

    Torch reads CUDA_HOME once, when the module that compiles is imported, so the module's own value is set too.
    """
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update({name: setting.value for name, setting in settings.items()})
    compiling: Any = sys.modules.get("torch.utils.cpp_extension")
    home = getattr(compiling, "CUDA_HOME", None)
    if compiling is not None and "CUDA_HOME" in settings:
        compiling.CUDA_HOME = settings["CUDA_HOME"].value
    try:
        yield
    finally:
        if compiling is not None and "CUDA_HOME" in settings:
            compiling.CUDA_HOME = home
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def unfit_nvcc(nvcc: str, machine: Machine) -> Iterator[str]:
    """Yield why nvcc is unusable: it cannot be run, or its CUDA version is not torch's.

    Minor versions of one CUDA major version are compatible (CUDA's minor version compatibility; torch asks for the same major version).
    """
    try:
        said = subprocess.run(
            [nvcc, "-V"],
            env=dict(machine.environment),
            capture_output=True,
            text=True,
            check=True,
            timeout=_TOOL_SECONDS,
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        yield f"no nvcc: {nvcc} cannot be run ({getattr(error, 'strerror', None) or error})"
        return
    release = re.search(r"release (\d+)\.(\d+)", said)
    cuda, asked = machine.installed.cuda or "", machine.environment.get("DS_SKIP_CUDA_CHECK") != "1"
    wanted = cuda.split(".")[0]
    if asked and release is not None and wanted and release[1] != wanted:
        yield (
            f"{nvcc} is CUDA {release[1]}.{release[2]}'s, and torch was built with CUDA {cuda}: CUDA_HOME must point "
            f"to a CUDA {wanted}"
        )


def _links_libaio(environment: Mapping[str, str]) -> bool:
    """Return whether a program can be linked with libaio (deepspeed ops/op_builder/async_io.py is_compatible)."""
    compiler = shlex.split(environment.get("CC") or str(sysconfig.get_config_var("CC") or "cc"))
    flags = [*shlex.split(environment.get("CFLAGS", "")), *shlex.split(environment.get("LDFLAGS", ""))]
    program = "void io_submit(void); int main(void) { io_submit(); return 0; }"
    command = [*compiler, "-x", "c", "-", *flags, "-laio", "-o", os.devnull]
    try:
        done = subprocess.run(
            command, env=dict(environment), input=program, text=True, capture_output=True, timeout=_TOOL_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def _which(command: str, environment: Mapping[str, str]) -> str | None:
    return shutil.which(command, path=environment.get("PATH", os.defpath))


def _packaged_ninja() -> Path | None:
    """Return the ninja of the PyPI package, on which DeepSpeed depends; it is not on PATH unless the environment is activated."""
    try:
        package = distribution("ninja")
    except PackageNotFoundError:
        return None
    recorded = [str(file) for file in package.files or () if file.name == "ninja"]
    places = (Path(str(package.locate_file(file))) for file in [*recorded, "bin/ninja"])  # last: `pip --target`
    return next((place.resolve() for place in places if os.access(place, os.X_OK) and place.is_file()), None)


def tool_problem(missing: str, extensions: Sequence[Extension]) -> Problem:
    """Return the BUILD_TOOLS problem of extensions that lack the same, given as a clause."""
    first = extensions[0]
    titles = " and ".join(extension.title for extension in extensions)
    instead = ", or ".join(dict.fromkeys(extension.instead for extension in extensions if extension.instead))
    return Problem(
        code="BUILD_TOOLS",
        key=first.key,
        message=f"{first.wanted} loads DeepSpeed's {titles}, which is compiled at first use and cannot be compiled "
        f"here: {missing}",
        fix="Install what is missing" + (f", or {instead}" if instead else ""),
        source="deepspeed ops/op_builder/builder.py",
    )
