"""The nodes of a plan by name: DeepSpeed's hostfile, and the environment that its launcher sends them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from toolkit.artifacts.commands import SEND_ENVIRONMENT, exports
from toolkit.errors import PlanError, Problem, raise_all
from toolkit.launch.environment import PLAN_VARIABLE
from toolkit.planning.plan import Plan

_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")


def check_hosts(plan: Plan, hosts: Sequence[str] | None) -> None:
    """Check host names against the plan's nodes.

    Raises:
        PlanError: EMIT_HOSTS, for names on one node, a number of names other than of nodes, a duplicate or an invalid name.
    """
    if hosts is None:
        return
    nodes, fix = plan.job.cluster.nodes, "Give one name for each node, such as --hosts node0,node1, or leave hosts out"
    found = []
    if nodes == 1:
        found.append(("hosts are for several nodes: nodes=1 starts on this machine", "Leave hosts out"))
    elif len(hosts) != nodes:
        found.append((f"{len(hosts)} hosts for nodes={nodes}: {', '.join(hosts) or 'none'}", fix))
    found += [(f"host {host!r} is not a host name", fix) for host in hosts if not _HOST.fullmatch(host)]
    found += [(f"host {host} is named twice", fix) for host in sorted(set(hosts)) if list(hosts).count(host) > 1]
    raise_all(
        PlanError,
        (Problem(code="EMIT_HOSTS", key="cluster.nodes", message=message, fix=fix) for message, fix in found),
    )


def hostfile(plan: Plan, hosts: Sequence[str]) -> str:
    """Return DeepSpeed's hostfile; the first host has rank 0 (deepspeed launcher/runner.py fetch_hostfile)."""
    return "".join(f"{host} slots={plan.job.cluster.gpus_per_node}\n" for host in hosts)


def send_environment(plan: Plan) -> tuple[str, ...]:
    """Return the shell function that writes the variables DeepSpeed's launcher sends to nodes besides NCCL's and Python's.

    The launcher reads one file name, in the home folder and then in the working directory, and a later line wins. PYTHONPATH is
    written because the launcher puts the working directory first there, before the standard library.

    Source:
        deepspeed 0.19.8 launcher/runner.py main.
    """
    ours = exports(plan)
    first = " ".join(export.name for export in ours if export.yields)
    last = " ".join([*(export.name for export in ours if not export.yields), "PYTHONSAFEPATH", PLAN_VARIABLE])
    each = 'for name in {}; do [ -z "${{!name+set}}" ] || printf "%s=%s\\n" "$name" "${{!name}}"; done'
    return (
        "# What DeepSpeed sends to the nodes: our variables, then your .deepspeed_env, which takes precedence unless it",
        "# contradicts the job.",
        f"{SEND_ENVIRONMENT}() {{",
        '  local yours="${DS_ENV_FILE:-.deepspeed_env}" files name file',
        '  case "$yours" in /*) files=("$yours") ;; *) files=("${HOME-}/$yours" "./$yours") ;; esac',
        '  DS_ENV_FILE="$(mktemp)"',
        "  export DS_ENV_FILE",
        "  trap 'rm -f \"$DS_ENV_FILE\"' EXIT",
        "  {",
        f"    {each.format(first)}",
        '    printf "PYTHONPATH=%s\\n" "${PYTHONPATH-}"',
        '    for file in "${files[@]}"; do [ ! -f "$file" ] || grep -E \'^[^#]*=\' "$file" || true; done',
        f"    {each.format(last)}",
        '  } > "$DS_ENV_FILE"',
        "}",
    )
