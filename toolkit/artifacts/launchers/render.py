"""The text of each launcher's file: one template of its name in `templates/`, filled from the plan.

Each value goes through a filter of the place where it stands: `sh` (a word of a shell), `yaml` (a scalar), `block` (a text of
several lines in YAML), `py` and `py_lines` (literals of Python), `doc` (a word of a docstring), `kube` (an argument in which Kubernetes replaces `$(NAME)`), `azure` (a command
in which Azure ML replaces `${{...}}`), `pyxis` and `apptainer` (an image as they name it), `comment` (one line).
"""

from __future__ import annotations

import json
import os
import posixpath
import re
import shlex
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.artifacts.commands import exports
from toolkit.artifacts.launchers.cards import CARDS
from toolkit.artifacts.launchers.catalogue import KINDS, NODE_SCRIPT, LauncherName
from toolkit.artifacts.launchers.options import LaunchOptions
from toolkit.errors import one_line
from toolkit.launch.ports import DEFAULT_PORT
from toolkit.planning.plan import Plan
from toolkit.units import GIB

if TYPE_CHECKING:
    from jinja2 import Environment

WORK_FOLDER = "/mnt/toolkit"  # working folder of a run in a container
SAVE_SECONDS = 300  # between SLURM's announcement and the end of the time, and between SIGTERM and the kill of a pod
_CPUS_PER_CARD = 8  # for the data loader, tokenization and CPU Adam of one rank
_LONGEST_NAME = 40  # of 63 characters of a DNS label, to which Kubernetes appends those of pods


def launcher_texts(
    plan: Plan,
    folder: Path,
    launchers: Sequence[LauncherName],
    options: LaunchOptions,
    *,
    hosts: Sequence[str] | None,
) -> dict[str, str]:
    """Return file name → text for each launcher, node.sh among them if one of them calls it."""
    values = _values(plan, folder, options, hosts)
    files = dict.fromkeys(KINDS[launcher].file for launcher in launchers)
    if any(KINDS[launcher].with_node_script for launcher in launchers):
        files = dict.fromkeys((NODE_SCRIPT, *files))
    node_script = _environment().get_template(f"{NODE_SCRIPT}.j2").render(values)
    cards = {KINDS[launcher].file: names.get(plan.gpu.name, "") for launcher, names in CARDS.items()}
    return {
        name: node_script
        if name == NODE_SCRIPT
        else _environment().get_template(f"{name}.j2").render(values, card=cards.get(name, ""), node_script=node_script)
        for name in files
    }


def _values(plan: Plan, folder: Path, options: LaunchOptions, hosts: Sequence[str] | None) -> Mapping[str, Any]:
    cluster = plan.job.cluster
    output = str(plan.output_dir)
    values: dict[str, Any] = {
        "options": options,
        "name": job_name(plan),
        "title": f"{plan.model.name} on {cluster.num_ranks} × {plan.gpu.name}",
        "folder": str(folder),
        "script": str(folder / NODE_SCRIPT),
        "plan_file": str(folder / "plan.json"),
        "plan_text": plan.to_json(),
        "upwards": os.path.relpath(os.curdir, folder),
        "nodes": cluster.nodes,
        "per_node": cluster.gpus_per_node,
        "ranks": cluster.num_ranks,
        "on_cpu": plan.on_cpu,
        "vendor": plan.gpu.vendor,
        "memory_gib": (plan.gpu.memory_bytes or 0) // GIB,
        "cpus": options.cpus or cluster.gpus_per_node * (1 if plan.on_cpu else _CPUS_PER_CARD),
        "port": cluster.master_port or DEFAULT_PORT,
        "fixed_port": cluster.master_port,
        "hosts": tuple(hosts or ()),
        "exports": exports(plan),
        "output": output,
        "work": WORK_FOLDER,
        "in_work": lambda path: posixpath.normpath(posixpath.join(WORK_FOLDER, path)),
        "save_seconds": SAVE_SECONDS,
    }
    return values | {"values": values}  # for macros, which see their arguments alone


def job_name(plan: Plan) -> str:
    """Return a name that every scheduler accepts, from the output folder's: a DNS label."""
    slug = re.sub(r"[^a-z0-9]+", "-", plan.output_dir.name.lower()).strip("-")[:_LONGEST_NAME].rstrip("-")
    return slug if slug[:1].isalpha() else f"run-{slug}".rstrip("-")


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=False,  # shell, YAML and Python are no HTML; each value has its filter
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        comment_start_string="{##",  # `{#` is the length of an array in a shell
        comment_end_string="##}",
    )
    environment.filters |= {
        "sh": shlex.quote,
        "yaml": _yaml,
        "block": _block,
        "py": _python,
        "py_lines": _python_lines,
        "doc": lambda text: one_line(text).replace("\\", "\\\\").replace('"', '\\"'),
        "kube": lambda text: text.replace("$", "$$"),
        "azure": lambda text: text.replace("${{", "$''{{"),
        "pyxis": _pyxis_image,
        "apptainer": _apptainer_image,
        "comment": one_line,
    }
    return environment


def _yaml(value: str | int) -> str:
    """Return a scalar of YAML: plain where no reader could take it for anything else."""
    if isinstance(value, int):
        return str(value)
    if re.fullmatch(r"[A-Za-z][\w./-]*", value, re.ASCII) and value.lower() not in _YAML_WORDS:
        return value
    quoted = json.dumps(value, ensure_ascii=False)
    return "".join(char if char.isprintable() else f"\\U{ord(char):08x}" for char in quoted)


_YAML_WORDS = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null"})


def _block(text: str, indent: int) -> str:
    """Return a text as a literal block of YAML, or quoted if it has characters that a block cannot hold."""
    lines = text.split("\n")
    if text.startswith((" ", "\n")) or not text.endswith("\n") or any(not line.isprintable() for line in lines):
        return _yaml(text)
    return "|\n" + "\n".join(" " * indent + line if line else "" for line in lines[:-1])


def _python(value: str) -> str:
    """Return a literal of Python in the quotes that formatters choose."""
    if '"' in value and "'" not in value:
        return repr(value)
    return json.dumps(value, ensure_ascii=not value.isprintable())


def _python_lines(text: str) -> str:
    """Return a text of several lines as a literal of Python, a line on each."""
    return "(\n" + "".join(f"    {_python(line)}\n" for line in text.splitlines(keepends=True)) + ")"


def _pyxis_image(image: str) -> str:
    """Return an image by enroot's rule: a `#` ends the registry (github.com/NVIDIA/pyxis, usage)."""
    registry, slash, name = image.partition("/")
    named = (
        slash
        and registry
        and "#" not in image
        and ("." in registry or ":" in registry)
        and not registry.startswith(".")
    )
    return f"{registry}#{name}" if named else image


def _apptainer_image(image: str) -> str:
    """Return an image by Apptainer's rule: one of a registry has a scheme, a file has none."""
    is_file = image.endswith(".sif") or image.startswith(("/", "./", "../"))
    return image if is_file or "://" in image else f"docker://{image}"
