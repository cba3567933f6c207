"""What this machine must have to compile DeepSpeed's extensions, and the environment in which it can."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from toolkit.errors import Problem
from toolkit.launch.architectures import readable_architectures
from toolkit.launch.environment import Setting
from toolkit.launch.extensions import Extension, Installed, extensions_of, installed_libraries, is_built
from toolkit.plan.deepspeed_config import Consumer
from toolkit.plan.plan import Plan

_ARCH_LIST = "TORCH_CUDA_ARCH_LIST"


def tool_problems(
    plan: Plan,
    consumer: Consumer = "toolkit",
    *,
    environment: Mapping[str, str] | None = None,
    installed: Installed | None = None,
) -> Iterator[Problem]:
    """Says what this machine lacks to compile the extensions that a run of a plan loads: BUILD_TOOLS.

    Args:
        plan: What is to run.
        consumer: Whose DeepSpeed configuration it runs with.
        environment: Of the run; this process's own when left out.
        installed: Libraries; those of this interpreter when left out.
    """
    for missing, extensions in unbuildable(plan, consumer, environment=environment, installed=installed).items():
        yield _problem(missing, extensions)


def unbuildable(
    plan: Plan,
    consumer: Consumer = "toolkit",
    *,
    environment: Mapping[str, str] | None = None,
    installed: Installed | None = None,
) -> dict[str, tuple[Extension, ...]]:
    """Gives the extensions of a plan that cannot be compiled here, by what is missing, as a clause; arguments as `tool_problems`."""
    environment = os.environ if environment is None else environment
    installed = installed or installed_libraries()
    lacking: dict[str, tuple[Extension, ...]] = {}
    for extension in extensions_of(plan, consumer):
        if installed.has(extension, plan):
            continue
        missing = "; ".join(missing_tools(extension, environment, installed))
        if missing:
            lacking[missing] = (*lacking.get(missing, ()), extension)
    return lacking


def missing_tools(extension: Extension, environment: Mapping[str, str], installed: Installed) -> Iterator[str]:
    """Says what is missing to load an extension; of one that is compiled already, only what each load asks for.

    Source:
        deepspeed ops/op_builder/builder.py OpBuilder.jit_load, installed_cuda_version, assert_no_cuda_mismatch;
        torch utils/cpp_extension.py verify_ninja_availability, get_cxx_compiler, _find_cuda_home, _write_ninja_file.
    """
    built = is_built(extension, environment, installed)
    if _which("ninja", environment) is None and _packaged_ninja() is None:
        yield "no ninja (`pip install ninja`)"
    compiler = shlex.split(environment.get("CXX", "")) or ["c++"]
    if not built and _which(compiler[0], environment) is None:
        yield f"no C++ compiler: {compiler[0]} is not on PATH"
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not built and not header.is_file():
        yield f"no headers of Python: {header} does not exist"
    if extension.by_nvcc:
        home = cuda_home(environment)
        if home is None:
            yield "no nvcc: CUDA_HOME is not set, nvcc is not on PATH, /usr/local/cuda does not exist"
        elif not built or extension.asks_nvcc:
            yield from _unfit_nvcc(environment.get("PYTORCH_NVCC") or f"{home}/bin/nvcc", environment, installed)
    if extension.needs_libaio and not _links_libaio(environment):
        yield "no libaio to link with (libaio-dev, libaio-devel)"


def cuda_home(environment: Mapping[str, str]) -> str | None:
    """Gives the CUDA toolkit that torch compiles with (torch utils/cpp_extension.py _find_cuda_home)."""
    named = environment.get("CUDA_HOME") or environment.get("CUDA_PATH")
    if named is not None:
        return named
    nvcc = _which("nvcc", environment)
    if nvcc is not None:
        return str(Path(nvcc).parent.parent)
    return "/usr/local/cuda" if Path("/usr/local/cuda").exists() else None


def build_settings(
    plan: Plan, consumer: Consumer = "toolkit", *, environment: Mapping[str, str] | None = None
) -> dict[str, Setting]:
    """Gives what DeepSpeed's builds need otherwise than the environment has it: name → value and reason; mostly nothing.

    Args:
        plan: What is to run.
        consumer: Whose DeepSpeed configuration it runs with.
        environment: Of the run; this process's own when left out.
    """
    environment = os.environ if environment is None else environment
    extensions = [one for one in extensions_of(plan, consumer) if not installed_libraries().has(one, plan)]
    found = {}
    ninja = _packaged_ninja() if extensions and _which("ninja", environment) is None else None
    if ninja is not None:
        path = f"{environment.get('PATH', os.defpath)}{os.pathsep}{ninja.parent}"
        found["PATH"] = Setting(path, f"ninja is not on PATH: DeepSpeed's builds take {ninja}")
    written = environment.get(_ARCH_LIST, "").strip()
    if written and any(extension.by_nvcc for extension in extensions):
        readable = readable_architectures(written, plan.gpu.known_capability)
        if readable != written:
            goal = readable or "the cards of this machine"
            found[_ARCH_LIST] = Setting(
                readable,
                f"{_ARCH_LIST}={written} is not a list that DeepSpeed can build for: its kernels are built for {goal}",
            )
    return found


@contextlib.contextmanager
def built_with(settings: Mapping[str, Setting]) -> Iterator[None]:
    """Sets variables of this process while the block runs."""
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update({name: setting.value for name, setting in settings.items()})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _unfit_nvcc(nvcc: str, environment: Mapping[str, str], installed: Installed) -> Iterator[str]:
    """Says that nvcc cannot be run, or is another CUDA's than torch's.

    Minor versions of one CUDA go together (CUDA's minor version compatibility; torch asks for the same major version).
    """
    try:
        said = subprocess.run([nvcc, "-V"], env=dict(environment), capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        yield f"no nvcc: {nvcc} cannot be run ({getattr(error, 'strerror', None) or error})"
        return
    release = re.search(r"release (\d+)\.(\d+)", said)
    wanted = (installed.cuda or "").split(".")[0]
    if release is not None and wanted and release[1] != wanted and environment.get("DS_SKIP_CUDA_CHECK") != "1":
        yield (
            f"{nvcc} is CUDA {release[1]}.{release[2]}'s, and torch was built with CUDA {installed.cuda}: "
            f"CUDA_HOME must lead to a CUDA {wanted}"
        )


def _links_libaio(environment: Mapping[str, str]) -> bool:
    """Whether a program can be linked with libaio (deepspeed ops/op_builder/async_io.py is_compatible)."""
    compiler = shlex.split(environment.get("CC") or str(sysconfig.get_config_var("CC") or "cc"))
    flags = [*shlex.split(environment.get("CFLAGS", "")), *shlex.split(environment.get("LDFLAGS", ""))]
    program = "void io_submit(void); int main(void) { io_submit(); return 0; }"
    command = [*compiler, "-x", "c", "-", *flags, "-laio", "-o", os.devnull]
    try:
        return (
            subprocess.run(command, env=dict(environment), input=program, text=True, capture_output=True).returncode
            == 0
        )
    except OSError:
        return False


def _which(command: str, environment: Mapping[str, str]) -> str | None:
    return shutil.which(command, path=environment.get("PATH", os.defpath))


def _packaged_ninja() -> Path | None:
    """Gives the ninja that came with its package, on which DeepSpeed depends; an environment that is not activated has it not on PATH."""
    try:
        package = distribution("ninja")
    except PackageNotFoundError:
        return None
    recorded = [str(file) for file in package.files or () if file.name == "ninja"]
    places = (Path(str(package.locate_file(file))) for file in [*recorded, "bin/ninja"])  # the last of `pip --target`
    return next((place.resolve() for place in places if os.access(place, os.X_OK) and place.is_file()), None)


def _problem(missing: str, extensions: Sequence[Extension]) -> Problem:
    first = extensions[0]
    titles = " and ".join(extension.title for extension in extensions)
    instead = ", or ".join(dict.fromkeys(extension.instead for extension in extensions if extension.instead))
    return Problem(
        code="BUILD_TOOLS",
        key=first.key,
        message=f"{first.wanted} loads DeepSpeed's {titles}, compiled at the first use, which cannot be done here: {missing}",
        fix="Install what is missing" + (f", or {instead}" if instead else ""),
        source="deepspeed ops/op_builder/builder.py",
    )
