"""Values of environment variables that no library can use: what is wrong with each, what happens, and the repair."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from toolkit.units import whole_number


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What is wrong with a value.

    Args:
        what: Which rule it breaks, to stand after `NAME=value`.
        effect: What happens with it.
        repair: What repairs it.
    """

    what: str
    effect: str
    repair: str


def fault_of(name: str, env: Mapping[str, str]) -> Fault | None:
    """Return what is wrong with a variable that is set; None if nothing is, or if it may have any value."""
    if name not in _CHECKS or not env.get(name):
        return None
    is_sound, what, effect, repair = _CHECKS[name]
    return None if is_sound(env[name]) else Fault(what=what, effect=effect, repair=repair.format(name=name))


def _is_port(text: str) -> bool:
    return 1 <= (whole_number(text) or 0) <= 65535


def _is_count(text: str) -> bool:
    return bool(whole_number(text))


def _are_counts(text: str) -> bool:
    return all(_is_count(part.strip()) for part in text.split(","))


def _is_whole(text: str) -> bool:
    return whole_number(text.strip()) is not None


def _is_writable_folder(text: str) -> bool:
    return Path(text).is_dir() and os.access(text, os.W_OK | os.X_OK)


def _has_nvcc(text: str) -> bool:
    return (Path(text) / "bin" / "nvcc").is_file()


def _are_settings(text: str) -> bool:
    """Return whether a text is `key:value,key:value`, in which a value may be a list in brackets with its own commas and colons."""
    setting = r"\s*\w+\s*:\s*(\[[^\[\]]*\]|[^,:\[\]]+)"
    return re.fullmatch(rf"{setting}(,{setting})*,?\s*", text) is not None


_THREADS = (
    "is not a number of threads",
    "The library warns or ignores it, and each rank may start a thread for every core",
    "unset {name}: the toolkit divides the cores among the ranks; or set it to a whole number of at least 1",
)
_CUDA_FOLDER = (
    "has no bin/nvcc",
    "torch compiles by the nvcc of this folder: runs look for another CUDA that fits, and scripts of your own fail as they compile",
    "unset {name}, or set it to the folder of CUDA's toolkit, such as /usr/local/cuda",
)
_ALLOCATOR = (
    "is not of the form key:value,key:value",
    "torch ends with an error when it first reads it, at the latest with the first tensor on a card",
    "unset {name}, or set it to such as expandable_segments:True",
)

# Sources: torch utils/cpp_extension.py _get_num_workers, _find_cuda_home; torch c10/core/AllocatorConfig.cpp; python tempfile.py
# _get_default_tempdir; OpenMP 5.2, OMP_NUM_THREADS; huggingface_hub constants.py _as_int.
_CHECKS: Final[dict[str, tuple[Callable[[str], bool], str, str, str]]] = {
    "MASTER_PORT": (
        _is_port,
        "is not a port, 1 to 65535",
        "Ranks that a launcher starts end with LAUNCH_ENV; `toolkit train` on one machine takes a free port instead",
        "unset {name}, or set it to a number from 1024 to 65535",
    ),
    "MAX_JOBS": (
        str.isdigit,
        "is not a whole number",
        "torch ignores it: as many compilers run at a time as ninja chooses by the cores",
        "unset {name}, or set it to a number of compilers such as 4",
    ),
    "TMPDIR": (
        _is_writable_folder,
        "is not a folder that can be written",
        "Python takes /tmp instead without a word, and other programs fail",
        "unset {name}, make the folder, or name another one",
    ),
    "CUDA_HOME": (_has_nvcc, *_CUDA_FOLDER),
    "CUDA_PATH": (_has_nvcc, *_CUDA_FOLDER),
    "PYTORCH_CUDA_ALLOC_CONF": (_are_settings, *_ALLOCATOR),
    "PYTORCH_ALLOC_CONF": (_are_settings, *_ALLOCATOR),
    "OMP_NUM_THREADS": (_are_counts, *_THREADS),
    "MKL_NUM_THREADS": (_is_count, *_THREADS),
    "HF_HUB_DOWNLOAD_TIMEOUT": (
        _is_whole,
        "is not a whole number of seconds",
        "huggingface_hub ends with an error as it is imported",
        "unset {name}, or set it to a number of seconds such as 10",
    ),
}
