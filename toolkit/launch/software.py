"""Software of the training machine on which a model's memory depends: transformers, and packages of kernels."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from packaging.version import Version

from toolkit.errors import Problem
from toolkit.planning.plan import Plan
from toolkit.version import version_of

# Packages of kernels for linear attention and state-space layers, by the names under which transformers imports them.
KERNEL_PACKAGES: Mapping[str, str] = {
    "mamba_ssm": "mamba-ssm",
    "causal_conv1d": "causal-conv1d",
    "fla": "flash-linear-attention",
}
# From this version on transformers' own code contracts a chunk of a Mamba-2 layer by matrix products; before, it multiplies the
# factors out to one tensor of chunk × chunk × heads × state for each chunk and sums that.
CONTRACTS_CHUNKS, MULTIPLIES_CHUNKS = "5.18", "5.17"
CHUNK_SCAN = "mamba_chunk_scan_combined"


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """Software of the machine that trains.

    Args:
        transformers: Version of transformers.
        kernel_packages: Names of the distributions among `KERNEL_PACKAGES` that are installed, sorted.
    """

    transformers: str
    kernel_packages: tuple[str, ...] = ()

    @classmethod
    @cache
    def here(cls) -> Software:
        """Read what is installed on this machine."""
        return cls(
            transformers=version("transformers"),
            kernel_packages=tuple(sorted(name for name in KERNEL_PACKAGES.values() if version_of(name) is not None)),
        )

    @classmethod
    def of(cls, plan: Plan) -> Software:
        """Return the software that a job describes, completed by what is installed here."""
        cluster, here = plan.job.cluster, cls.here()
        packages = here.kernel_packages if cluster.kernel_packages is None else cluster.kernel_packages
        return cls(transformers=cluster.transformers or here.transformers, kernel_packages=tuple(sorted(set(packages))))

    @property
    def contracts_chunks(self) -> bool:
        """True if transformers' own code of Mamba-2 layers contracts by matrix products instead of multiplying out and summing."""
        return Version(self.transformers) >= Version(CONTRACTS_CHUNKS)


@cache
def kernels_of(model_type: str) -> Mapping[str, str]:
    """Return the kernels that the installed transformers would take from packages for a type of model: name to distribution.

    The model's file is read as text: importing it would import torch.

    Source:
        transformers integrations/hub_kernels.py use_kernel_func_from_hub_with_fallback.
    """
    spec = find_spec("transformers")
    if spec is None or not spec.submodule_search_locations:
        return {}
    file = Path(spec.submodule_search_locations[0], "models", model_type, f"modeling_{model_type}.py")
    if not file.is_file():
        return {}
    found = re.findall(
        r'use_kernel_func_from_hub_with_fallback\(\s*"(\w+)",\s*"(\w+)"', file.read_text(encoding="utf-8")
    )
    return {name: KERNEL_PACKAGES.get(package, package) for name, package in found}


def software_problems(plan: Plan) -> Iterator[Problem]:
    """Yield the differences between this machine's software and what the job says of it."""
    cluster = plan.job.cluster
    if cluster.kernel_packages is None and cluster.transformers is None:
        return
    here = Software.here()
    missing = [name for name in cluster.kernel_packages or () if name not in here.kernel_packages]
    if missing:
        yield Problem(
            code="CLUSTER_SOFTWARE",
            key="cluster.kernel_packages",
            message=f"kernel_packages={', '.join(cluster.kernel_packages or ())}: {', '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not installed here, and transformers' own code would take more memory",
            fix=f"Install with `pip install {' '.join(missing)}`, or leave it out of cluster.kernel_packages",
        )
    if cluster.transformers is not None and Version(cluster.transformers) != Version(here.transformers):
        yield Problem(
            code="CLUSTER_SOFTWARE",
            key="cluster.transformers",
            message=f"transformers={cluster.transformers}: {here.transformers} is installed here",
            fix=f"Install transformers=={cluster.transformers}, or leave cluster.transformers out",
        )


def missing_kernels(plan: Plan, software: Software) -> dict[str, str]:
    """Return the kernels that a plan's model would use and a machine lacks: name to distribution."""
    kernels = {name: package for kind in _model_types(plan.model.config) for name, package in kernels_of(kind).items()}
    return {name: package for name, package in kernels.items() if package not in software.kernel_packages}


def software_warnings(plan: Plan) -> Iterator[str]:
    """Yield a warning for each package of kernels that a model would use and this machine lacks."""
    here = Software.here()
    kernels = missing_kernels(plan, here)
    missing = sorted(set(kernels.values()))
    if not missing:
        return
    names = " and ".join(missing)
    said = (
        f"{plan.model.name} has layers with kernels in {names}, not installed here: transformers' own PyTorch code "
        "runs instead, slower and with more memory, which `toolkit estimate` includes"
    )
    if CHUNK_SCAN in kernels and not here.contracts_chunks:
        said += f"; that of transformers {here.transformers} needs many times more than {CONTRACTS_CHUNKS} and newer"
    yield f"{said} (pip install {' '.join(missing)})"


def _model_types(config: Mapping[str, Any]) -> Iterator[str]:
    for section in (config, config.get("text_config")):
        if isinstance(section, Mapping) and isinstance(section.get("model_type"), str):
            yield section["model_type"]
