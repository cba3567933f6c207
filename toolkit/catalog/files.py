"""Finds and reads the configurations that are shipped with the package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from toolkit.errors import SpecError

_PACKAGE = Path(__file__).resolve().parents[1]

# libyaml parses about ten times faster; PyYAML may be built without it. Files of users are read by `config.loader`.
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_config(path: Path) -> Any:
    """Read a YAML file of the package.

    Raises:
        OSError, yaml.YAMLError: If the file cannot be read or parsed.
    """
    return yaml.load(path.read_text(encoding="utf-8"), Loader=_LOADER)


def configs_root(package: Path = _PACKAGE) -> Path:
    """Return the folder that contains `hardware/`, `models/` and `jobs/`.

    A wheel has it inside the package as `_configs`; a checkout has it next to the package as `configs`.

    Args:
        package: Folder of the installed `toolkit` package.

    Raises:
        SpecError: CONFIGS_MISSING, if the installation has neither.
    """
    candidates = (package / "_configs", package.parent / "configs")
    for folder in candidates:
        if (folder / "hardware").is_dir():
            return folder
    looked = " and ".join(map(str, candidates))
    raise SpecError.of(
        code="CONFIGS_MISSING",
        key="configs/hardware",
        message=f"the installation has no configurations: looked in {looked}",
        fix="Reinstall the package, or run from a checkout with its configs folder",
    )
