"""Builds of DeepSpeed's extensions in a process of their own, for what itself imports no torch: `toolkit doctor --build`, emitted commands."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from toolkit.launch.build_tools import built_with, settings_of
from toolkit.launch.environment import python_module
from toolkit.launch.extensions import Extension, Machine

# DeepSpeed's slowest extension compiles in about two minutes, async_io in seven on two cores.
BUILD_SECONDS = 1200.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """What came of one build: how long it took, and why it failed; None if it did not."""

    extension: Extension
    seconds: float
    error: str | None


def build_all(
    extensions: Sequence[Extension], machine: Machine, *, capability: str | None, seconds: float = BUILD_SECONDS
) -> Iterator[Built]:
    """Compile and load extensions as a run would, and yield what came of each.

    Args:
        extensions: Those to build; their tools are there.
        machine: This machine.
        capability: Compute capability of its cards, if it is known.
        seconds: How long all of them may take.

    Raises:
        subprocess.TimeoutExpired: They took longer; compilers are ended.
    """
    command = [*python_module("toolkit.distributed.extension_build"), *(extension.name for extension in extensions)]
    with built_with(settings_of(extensions, machine, capability=capability)):
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
    try:
        written, errors = process.communicate(timeout=seconds)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # its compilers, too
            process.wait()
    results = [json.loads(line) for line in written.splitlines() if line.startswith("{")]
    told = {result["name"]: result for result in results}
    last = (errors.strip().splitlines() or ["no message"])[-1]
    for extension in extensions:
        result = told.get(extension.name, {"seconds": 0.0, "error": f"the process that builds it ended: {last}"})
        yield Built(extension=extension, seconds=result["seconds"], error=result["error"])
