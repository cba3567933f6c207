"""The forms of the values that launchers and sbatch take, each as its own parser reads them."""

from __future__ import annotations

import re
from collections.abc import Mapping

# What is wrong, how to write it, and whose rule it is.
Fault = tuple[str, str, str]

_PARSERS = {
    "accelerate": "accelerate commands/launch.py launch_command_parser",
    "torchrun": "torch distributed/run.py get_args_parser",
    "deepspeed": "deepspeed launcher/runner.py parse_args",
}
_PORT = (0, 65535)
# Whole numbers: the least and the largest value. DeepSpeed's own defaults are -1, "not given".
_NUMBERS: Mapping[str, Mapping[str, tuple[int, int | None]]] = {
    "accelerate": {
        "num_processes": (1, None),
        "num_machines": (1, None),
        "machine_rank": (0, None),
        "main_process_port": _PORT,
        "zero_stage": (0, 3),
    },
    "torchrun": {"node_rank": (0, None), "master_port": _PORT, "max_restarts": (0, None)},
    "deepspeed": {"num_nodes": (-1, None), "num_gpus": (-1, None), "node_rank": (-1, None), "master_port": _PORT},
}
# Words that torchrun takes for a count of processes; the last ones are devices whose PyTorch plug-in gives the name.
_DEVICES = ("auto", "cpu", "gpu", "xpu", "npu", "hpu", "mlu", "musa")

_GPUS = r"(?:[\w.-]+:)?\d+(?:,(?:[\w.-]+:)?\d+)*"
_COUNT = (r"\+?0*[1-9]\d*", "a whole number of 1 or more")
_NODES = r"\d+[kKmM]?(?:-\d+[kKmM]?(?::\d+)?)?"
_MEMORY = (
    r"(?i:\+?\d{1,18}(?:[kmgt]b?)?)",
    "a whole number with K, M, G or T behind it, such as 64G; M where none stands there",
)
_TIME = (
    r"\d+(?::\d+){0,2}|\d+-\d+(?::\d+){0,2}|\d+-|-\d+|(?i:infinite|unlimited)",
    "minutes, minutes:seconds, hours:minutes:seconds, or days-hours with :minutes and :seconds behind",
)
_SIGNALS = "HUP|INT|QUIT|ABRT|KILL|ALRM|TERM|USR1|USR2|URG|CONT|STOP|TSTP|TTIN|TTOU|XCPU"
_SECONDS = r"(?:\d{1,4}|[1-5]\d{4}|6[0-4]\d{3}|65[0-4]\d\d|655[0-2]\d|6553[0-5])"  # 0 to 65535
_COUNTS = (
    *("ntasks", "ntasks-per-node", "ntasks-per-core", "ntasks-per-gpu", "ntasks-per-socket", "cpus-per-task"),
    *("cpus-per-gpu", "mincpus", "threads-per-core", "cores-per-socket", "sockets-per-node"),
)
# Forms of directives (`man sbatch`), each with its words. SLURM takes k and m behind counts of nodes.
_DIRECTIVES: Mapping[str, tuple[str, str]] = {
    "nodes": (rf"\+?{_NODES}(?:,{_NODES})*", "a number or a range, such as 2 or 2-4"),
    **dict.fromkeys(_COUNTS, _COUNT),
    "gpus": (_GPUS, "a number, or TYPE:NUMBER"),
    "gpus-per-node": (_GPUS, "a number, or TYPE:NUMBER"),
    "gpus-per-socket": (_GPUS, "a number, or TYPE:NUMBER"),
    "gpus-per-task": (_GPUS, "a number, or TYPE:NUMBER"),
    **dict.fromkeys(("mem", "mem-per-cpu", "mem-per-gpu", "tmp"), _MEMORY),
    **dict.fromkeys(("time", "time-min"), _TIME),
    "signal": (
        rf"(?i:(?:[RB]{{1,2}}:)?(?:-?[1-9]\d*|(?:SIG)?(?:{_SIGNALS}))(?:@{_SECONDS}?)?)",
        "a signal, such as USR1, with B: before it for the batch script and @SECONDS, up to 65535, behind it",
    ),
    "exclusive": (r"(?i:|user|mcs|topo)", "--exclusive alone, or with user, mcs or topo"),
    "no-kill": (r"(?i:|off)", "--no-kill alone, or with off"),
    "open-mode": (r"(?i:[at].*)", "append or truncate"),
    "kill-on-invalid-dep": (r"(?i:y|yes|n|no)", "yes or no"),
}


def option_fault(launcher: str, name: str, value: str | None) -> Fault | None:
    """Return what is wrong with the value of a launcher's option; None if nothing is, or its form is not known here."""
    if launcher == "torchrun" and name == "nproc_per_node":
        return _processes(value or "")
    if launcher == "torchrun" and name == "nnodes":
        return _nodes(value or "")
    if launcher == "deepspeed" and name in ("include", "exclude"):
        return _hosts(value or "")
    if name not in _NUMBERS.get(launcher, {}):
        return None
    least, most = _NUMBERS[launcher][name]
    if not value or re.fullmatch(r"-?\d{1,18}", value) is None:
        return f"={value or ''} is no whole number", "Write one", _PARSERS[launcher]
    if int(value) >= least and (most is None or int(value) <= most):
        return None
    rule = f"of {least} or more" if most is None else f"of {least} to {most}"
    return f"={value} is no number {rule}", f"Write one {rule}", _PARSERS[launcher]


def directive_fault(key: str, value: str) -> Fault | None:
    """Return what is wrong with the value of a directive of sbatch; None if nothing is, or its form is not known here."""
    if key not in _DIRECTIVES:
        return None
    form, words = _DIRECTIVES[key]
    if re.fullmatch(form, value, re.ASCII):
        return None
    return f"={value} is not {words}: sbatch refuses the script", f"Write {words}", f"sbatch --{key}"


def _processes(value: str) -> Fault | None:
    if value in _DEVICES or re.fullmatch(r"0*[1-9]\d*", value):
        return None
    fix = f"Write a number, or one of {', '.join(_DEVICES[:4])}"
    return f"={value} is no number of 1 or more", fix, "torch distributed/run.py determine_local_world_size"


def _nodes(value: str) -> Fault | None:
    found = re.fullmatch(r"(\d{1,18})(?::(\d{1,18}))?", value)
    if found and 0 < int(found[1]) <= int(found[2] or found[1]):
        return None
    what = f"={value} is no number of nodes of 1 or more, and no range of them"
    return what, "Write such as 2, or 2:4 for 2 to 4 nodes", "torch distributed/run.py parse_min_max_nnodes"


def _hosts(value: str) -> Fault | None:
    if all(re.fullmatch(r"[^:@\s]+(?::\d+(?:,\d+)*)?", node) for node in value.split("@")):
        return None
    fix = "Write such as worker-0@worker-1:0,2: hosts with @ between, behind a colon the numbers of their GPUs"
    return (
        f"={value} names no hosts and GPUs in DeepSpeed's form",
        fix,
        "deepspeed launcher/runner.py parse_node_config",
    )
