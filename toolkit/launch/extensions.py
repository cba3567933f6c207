"""DeepSpeed's compiled extensions: which of them a plan loads, and where torch builds them. Nothing here imports torch."""

from __future__ import annotations

import ast
import functools
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from toolkit.launch.user_cache import is_own_folder
from toolkit.planning.deepspeed_config import Consumer
from toolkit.planning.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Extension:
    """One extension that is compiled at its first use on a machine.

    Args:
        name: Name of its folder and file (NAME in deepspeed ops/op_builder).
        title: Name in messages.
        by_nvcc: Whether it is a CUDA extension.
        asks_nvcc: Whether each load runs nvcc, not the compilation alone.
        needs_libaio: Whether it links with libaio.
        replaceable: Whether torch's fused AdamW can take its place.
        key: Job key that requires it.
        wanted: The key and its value, as shown in a message.
        instead: What to set to avoid it; empty if nothing avoids it.
    """

    name: str
    title: str
    by_nvcc: bool = False
    asks_nvcc: bool = False
    needs_libaio: bool = False
    replaceable: bool = False
    key: str
    wanted: str
    instead: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """Versions and build options of the installed libraries.

    Args:
        torch: First two numbers of its version.
        cuda: The CUDA that torch was built with, such as 13.0; None for a build without CUDA.
        hip: The same of ROCm's HIP.
        xpu: The same of Intel's SYCL compiler.
        prebuilt: Extensions compiled when DeepSpeed was installed (DS_BUILD_OPS).
        prebuilt_for: Accelerator that these were built for.
    """

    torch: tuple[int, int]
    cuda: str | None
    hip: str | None = None
    xpu: str | None = None
    prebuilt: frozenset[str] = frozenset()
    prebuilt_for: str = ""


@functools.cache
def installed_libraries() -> Installed:
    """Read the build options of torch and DeepSpeed from their files, which is a second faster than importing them."""
    torch, deepspeed = _constants("torch", "version.py"), _constants("deepspeed", "git_version_info_installed.py")
    major, minor = str(torch.get("__version__", "0.0")).split(".")[:2]
    built = deepspeed.get("installed_ops", {})
    return Installed(
        torch=(int(major), int(minor)),
        cuda=torch.get("cuda"),
        hip=torch.get("hip"),
        xpu=torch.get("xpu"),
        prebuilt=frozenset(name for name, is_there in built.items() if is_there),
        prebuilt_for=deepspeed.get("accelerator_name", ""),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The machine on which extensions are compiled; defaults to this process's environment and libraries.

    Args:
        environment: Environment variables of the run.
        installed: Installed libraries.
    """

    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    installed: Installed = field(default_factory=lambda: installed_libraries())

    def compiles(self, plan: Plan, consumer: Consumer = "toolkit") -> tuple[Extension, ...]:
        """Return the extensions of a plan that were not compiled when DeepSpeed was installed (op_builder/builder.py OpBuilder.load)."""
        is_own = self.installed.prebuilt_for == ("cpu" if plan.on_cpu else "cuda")
        return tuple(
            one for one in extensions_of(plan, consumer) if not (is_own and one.name in self.installed.prebuilt)
        )

    def folder(self, extension: Extension) -> Path:
        """Return the folder in which torch builds an extension.

        Source:
            torch utils/cpp_extension.py _get_build_directory, _appdirs.py user_cache_dir.
        """
        return (self.other_cache() or self.cache) / extension.name

    @property
    def cache(self) -> Path:
        """Folder in which torch builds extensions, each in a folder of its own, if nothing is changed."""
        root = self.environment.get("TORCH_EXTENSIONS_DIR")
        if root is not None:
            return Path(root)
        cache = self.environment.get("XDG_CACHE_HOME") or Path(self.environment.get("HOME", "/")) / ".cache"
        return Path(cache) / "torch_extensions" / self._build

    @property
    def _build(self) -> str:
        """Name of the Python and the CUDA that extensions are built for, as torch writes it."""
        cuda = self.installed.cuda
        device = "cpu" if cuda is None else f"cu{cuda.replace('.', '')}"
        return f"py{sys.version_info.major}{sys.version_info.minor}{sys.abiflags}_{device}"

    def other_cache(self) -> Path | None:
        """Return the folder of temporary files to build in where the cache cannot be written; None where it can, or where neither can.

        Torch writes a lock and ninja's file at each load, also of what is built already.
        """
        if can_write(self.cache):
            return None
        other = Path(self.environment.get("TMPDIR", "/tmp"), f"torch_extensions_{os.getuid()}", self._build)
        # Torch makes the folder, with the group's rights where the user's umask says so.
        is_own = is_own_folder(other.parent, alone=False) or not os.path.lexists(other.parent)
        return other if is_own and can_write(other) else None

    def has_built(self, extension: Extension) -> bool:
        """Return whether an earlier run on this machine has compiled the extension."""
        return (self.folder(extension) / f"{extension.name}.so").is_file()


def can_write(folder: Path) -> bool:
    """Return whether files can be made in a folder, which need not exist: in the nearest of its parents that does."""
    while not os.path.lexists(folder) and folder != folder.parent:
        folder = folder.parent
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)


def extensions_of(plan: Plan, consumer: Consumer = "toolkit") -> tuple[Extension, ...]:
    """Return the extensions that a run of a plan loads, in loading order.

    Args:
        plan: Resolved plan.
        consumer: Which DeepSpeed configuration it runs with: our engine's, Trainer's or an Accelerate script's.

    Source:
        deepspeed comm/torch.py build_shm_op, runtime/engine.py _configure_basic_optimizer, runtime/swap_tensor,
        runtime/zero/partition_parameters.py CUDAQuantizer; accelerate utils/deepspeed.py map_pytorch_optim_to_deepspeed.
    """
    return tuple(_extensions(plan, consumer)) if plan.job.parallel.strategy == "zero" else ()


def _extensions(plan: Plan, consumer: Consumer) -> Iterator[Extension]:
    config = plan.deepspeed_config(consumer)
    zero = config["zero_optimization"]
    on_host = plan.profile.optimizer is not None
    if plan.on_cpu and consumer != "toolkit":  # ours skips it (deepspeed_private.py)
        yield Extension(
            name="deepspeed_shm_comm",
            title="shared-memory collectives",
            key="cluster.gpu",
            wanted="gpu=cpu",
            instead="",
        )
    quantized = [key for key in ("zero_quantized_weights", "zero_quantized_gradients") if zero.get(key)]
    if quantized and not plan.on_cpu:
        key = f"deepspeed.zero_optimization.{quantized[0]}"
        yield Extension(
            name="quantizer",
            title="quantizer",
            by_nvcc=True,
            asks_nvcc=True,
            key=key,
            wanted=f"{quantized[0]}=true",
            instead=f"leave {key} out",
        )
    if plan.profile.needs_nvme:
        offload = plan.profile.name
        other = "full-cpu" if plan.profile.parameters else "optimizer-cpu"
        pin_memory = Extension(
            name="pin_memory",
            title="pin_memory",
            key="parallel.offload",
            wanted=f"offload={offload}",
            instead=f"set parallel.offload to {other}",
        )
        on_card = not plan.on_cpu
        yield pin_memory
        yield replace(
            pin_memory, name="async_io", title="async_io", by_nvcc=on_card, asks_nvcc=on_card, needs_libaio=True
        )
    brought = consumer == "accelerate" and not (on_host and plan.job.train.optimizer == "adamw")  # by its script
    if not brought and not plan.job.train.in_8_bits:
        yield from _optimizer(plan, config, consumer, on_host=on_host)


def _optimizer(plan: Plan, config: Mapping[str, Any], consumer: Consumer, *, on_host: bool) -> Iterator[Extension]:
    if plan.offload_engine == "overlapped" and consumer == "toolkit":  # a kernel of the toolkit's own, or torch's
        return
    section = config.get("optimizer", {"type": "AdamW"})
    kind = {"AdamW": "adam", "Lion": "lion"}.get(section.get("type"))
    if kind is None or section.get("params", {}).get("torch_adam"):
        return
    place = "cpu" if on_host or plan.on_cpu else "fused"
    instead = "set train.optimizer to adamw_torch_fused"
    if plan.twin_flow:  # stage3.py supports DeepSpeedCPUAdam alone there
        instead = "set parallel.offload to another profile and train.optimizer to adamw_torch_fused"
    yield Extension(
        name=f"{place}_{kind}",
        replaceable=kind == "adam" and not plan.twin_flow,
        title=f"{'CPU' if place == 'cpu' else 'Fused'}{kind.title()}",
        by_nvcc=place == "fused",
        key="train.optimizer",
        wanted=f"optimizer={plan.job.train.optimizer}",
        instead=instead,
    )


def _constants(package: str, file: str) -> dict[str, Any]:
    """Read the constants that a file of a package assigns, without importing the package; empty if there is no such file."""
    spec = find_spec(package)
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    path = next((path for folder in folders if (path := Path(folder) / file).is_file()), None)
    found: dict[str, Any] = {}
    for node in [] if path is None else ast.parse(path.read_text(encoding="utf-8")).body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            try:
                value = ast.literal_eval(node.value)
            except ValueError:
                continue
            found |= {target.id: value for target in targets if isinstance(target, ast.Name)}
    return found
