"""Which of DeepSpeed's kernels a run will have to compile first."""

from __future__ import annotations

import os
from collections.abc import Mapping

from toolkit.groups.build_locks import extensions_folder
from toolkit.plan.plan import Plan

# Optimizer in the DeepSpeed configuration: its extension on the host, and on the card (deepspeed op_builder).
_EXTENSIONS = {"AdamW": ("cpu_adam", "fused_adam"), "Lion": ("cpu_lion", "fused_lion")}
_NAMES = {"cpu_adam": "CPUAdam", "fused_adam": "FusedAdam", "cpu_lion": "CPULion", "fused_lion": "FusedLion"}


def kernel_to_compile(plan: Plan, environment: Mapping[str, str] | None = None) -> str | None:
    """Names the optimizer kernel that is not there yet; None where nothing is compiled.

    Args:
        plan: What will run.
        environment: Gives TORCH_EXTENSIONS_DIR, or HOME for its default; the process's own when left out.

    Source:
        deepspeed runtime/engine.py _configure_basic_optimizer; op_builder/builder.py OpBuilder.load.
    """
    extension = _extension(plan)
    if extension is None or _is_installed(extension):
        return None
    folder = extensions_folder(os.environ if environment is None else environment)
    return None if any(folder.glob(f"**/{extension}/{extension}.so")) else _NAMES[extension]


def _extension(plan: Plan) -> str | None:
    section = plan.deepspeed_config().get("optimizer", {})
    found = _EXTENSIONS.get(section.get("type"))
    if found is None or section.get("params", {}).get("torch_adam"):
        return None
    return found[0] if plan.profile.optimizer or plan.on_cpu else found[1]


def _is_installed(extension: str) -> bool:
    """Whether DeepSpeed was installed with the extension compiled (DS_BUILD_OPS)."""
    from deepspeed.git_version_info import installed_ops

    return bool(installed_ops.get(extension))
