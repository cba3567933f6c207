"""Launch commands, hostfiles, `.deepspeed_env` and sbatch scripts, each by itself."""

from __future__ import annotations

import re
from collections.abc import Iterator

from toolkit.config.suggestions import nearest
from toolkit.units import whole_number
from toolkit.user_files.arguments import launcher_options
from toolkit.user_files.check_accelerate import PRECISIONS
from toolkit.user_files.commands import Command, Option
from toolkit.user_files.option_values import directive_fault, option_fault
from toolkit.user_files.read import UserFile
from toolkit.user_files.report import Edit, Found, Level, versioned
from toolkit.user_files.shell import unclosed_quote

_SOURCES = {
    "accelerate": "accelerate commands/launch.py launch_command_parser",
    "torchrun": "torch distributed/run.py get_args_parser",
    "deepspeed": "deepspeed launcher/runner.py parse_args",
}
_VALIDATE = "accelerate commands/launch.py _validate_launch_command"
# Options of which `accelerate launch` takes one.
_KINDS = ("multi_gpu", "cpu", "tpu", "use_deepspeed", "use_fsdp")
# Options that hardly any training script declares: behind the script they are misplaced.
_OF_LAUNCHER = {
    "accelerate": (
        *("num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port", "multi_gpu"),
        *("use_deepspeed", "use_fsdp", "gpu_ids"),
    ),
    "torchrun": (
        "nproc_per_node",
        "nnodes",
        "node_rank",
        "master_addr",
        "master_port",
        "rdzv_backend",
        "rdzv_endpoint",
    ),
    "deepspeed": ("num_gpus", "num_nodes", "hostfile", "include", "exclude"),
}


def check_command(file: UserFile, command: Command) -> Iterator[Found]:
    """Yield what a launcher refuses of a command line."""
    if command.launcher not in _SOURCES:
        return
    known = launcher_options(command.launcher)
    has_unknown = False
    for option in command.options:
        if known and option.name not in known and len(option.name) > 1 and not _is_beginning(option, command, known):
            has_unknown = True
            near = nearest(option.name, known)
            fix = f"Did you mean --{near[0]}" if near else f"`{_name(command)} --help` lists its options"
            message = f" is no option of {_name(command)}"
            yield _found(file, option, "error", message, fix, source=_SOURCES[command.launcher], code="LAUNCHER_OPTION")
        elif option.is_known and (fault := option_fault(command.launcher, option.name, option.value)):
            message, fix, source = fault
            yield _found(file, option, "error", message, fix, source=source, code="LAUNCHER_OPTION")
    yield from _behind_the_script(file, command)
    # What stands behind an unknown option may be its value, or the script.
    if not command.script and not has_unknown and not command.option("help"):
        yield _at_line(file, command, f"{_name(command)} has no script to start", "Name it after the options")
    if command.launcher == "accelerate":
        yield from _accelerate(file, command)
    if command.launcher == "deepspeed":
        yield from _deepspeed(file, command)


def _behind_the_script(file: UserFile, command: Command) -> Iterator[Found]:
    """Find options of the launcher that stand behind the script, which gets them in the launcher's place."""
    for option in command.arguments:
        if option.name in _OF_LAUNCHER[command.launcher]:
            message = f" stands behind {command.script}, which gets it as an argument: {_name(command)} does not see it"
            fix = f"Write it before {command.script}"
            yield _found(
                file, option, "warning", message, fix, source=_SOURCES[command.launcher], code="LAUNCHER_OPTION"
            )


def check_lines(file: UserFile) -> Iterator[Found]:
    """Yield the lines of a hostfile or of `.deepspeed_env` that the launcher cannot read, and variables that it reads oddly."""
    for problem in file.problems:
        edits: tuple[Edit, ...] = ()
        is_alone = problem.code == "DEEPSPEED_ENV_LINE" and (
            not problem.key or problem.key.startswith(("#", file.name))
        )
        if problem.line is not None and is_alone:
            edits = (Edit(file=file.name, path=(str(problem.line),), action="line"),)
        yield Found.of_problem(problem, file=file.name, edits=edits)
    if file.kind == "hostfile":
        for host, slots in file.keys.items():
            if slots == 0:
                message, fix = (
                    f"{host} slots=0: no process starts there",
                    "Write the number of its GPUs, or remove the line",
                )
                yield _line(file, host, "warning", message, fix, "deepspeed launcher/runner.py", code="RANKS_CHANGED")
    if file.kind != "deepspeed-env":
        return
    for name, value in file.keys.items():
        if name.startswith("export "):
            message = f"`{name}` is the whole name to the launcher: shells that pdsh starts accept that, launchers over MPI do not"
            fix = f"Write {name.removeprefix('export ').strip()}=…"
            yield _line(
                file, name, "warning", message, fix, "deepspeed launcher/multinode_runner.py", code="DEEPSPEED_ENV_LINE"
            )
        elif re.search(r"\s", value) and '"' in value:
            message = f"{name}={value} has blanks in quotes, and the launcher adds quotes of its own: the remote shell divides it"
            fix = "Write the value without quotes"
            yield _line(
                file, name, "warning", message, fix, "deepspeed launcher/multinode_runner.py", code="DEEPSPEED_ENV_LINE"
            )


def check_quotes(file: UserFile) -> Iterator[Found]:
    """Yield a quote that nothing ends: the shell refuses all that follows."""
    if (unclosed := unclosed_quote(file.text)) is not None:
        line, sign = unclosed
        yield Found(
            level="error",
            code="SHELL_QUOTE",
            file=file.name,
            line=line,
            key=sign,
            message=f"a quote {sign} begins and does not end",
            fix=f"Write {sign} where it ends, or a backslash before a {sign} that is meant as itself",
            source="the shell",
        )


def check_sbatch(file: UserFile) -> Iterator[Found]:
    """Yield directives that sbatch refuses or ignores, and commands that it starts once where several are needed."""
    for problem in file.problems:
        yield Found.of_problem(problem, file=file.name)
    for key, value in file.keys.items():
        if (fault := directive_fault(key, value)) is not None:
            message, fix, source = fault
            yield _line(file, key, "error", f"--{key}{message}", fix, source, code="SBATCH_VALUE")
    lines = file.text.splitlines()
    for key, line in file.ignored:
        is_indented = not lines[line - 1].startswith("#")
        where = "begins with a blank" if is_indented else "stands below the first command"
        message = f"#SBATCH --{key} {where}, and sbatch reads none there"
        yield Found(
            level="warning",
            code="SBATCH_IGNORED",
            file=file.name,
            line=line,
            key=key,
            message=message,
            fix="Begin the line with #SBATCH" if is_indented else "Move it above the first command",
            source="sbatch, which stops at the first line that is neither a comment nor empty",
        )
    launches = any(command.launcher in _SOURCES for command in file.commands)
    if launches and not {"cpus-per-task", "cpus-per-gpu", "exclusive", "mem-per-cpu"}.intersection(file.keys):
        gpus = gpus_per_node(file)
        if gpus is not None and gpus > 1 and file.keys.get("ntasks-per-node", "1") == "1":
            message = (
                f"no --cpus-per-task: SLURM gives a task one CPU, which {gpus} processes and their data workers share"
            )
            fix = f"Add a line such as #SBATCH --cpus-per-task={gpus * 8}"
            yield _line(file, "cpus-per-task", "note", message, fix, "sbatch --cpus-per-task", line=1, code="SLOWER")


def gpus_per_node(file: UserFile) -> int | None:
    """Return the GPUs of a node that an sbatch script asks for; None if it does not say."""
    keys = file.keys
    for key in ("gpus-per-node", "gres"):
        found = re.search(r"(?:^|gpu:|:)(\d+)\s*(?:\(|,|$)", keys[key]) if key in keys else None
        if found and (key != "gres" or "gpu" in keys[key]):
            return int(found.group(1))
    if keys.get("gres") == "gpu":
        return 1
    nodes, tasks = number(file, "nodes"), number(file, "ntasks-per-node")
    each = re.search(r"(\d+)$", keys.get("gpus-per-task", ""))
    if each and tasks:
        return int(each.group(1)) * tasks
    total = re.search(r"(\d+)$", keys.get("gpus", ""))
    if total and nodes and int(total.group(1)) % nodes == 0:
        return int(total.group(1)) // nodes
    return None


def number(file: UserFile, key: str) -> int | None:
    """Return a directive that is a plain number."""
    return whole_number(str(file.keys.get(key, "")))


def _accelerate(file: UserFile, command: Command) -> Iterator[Found]:
    kinds = [option for option in command.options if option.name in _KINDS]
    if len({option.name for option in kinds}) > 1:
        names = " and ".join(f"--{option.name}" for option in kinds)
        message = f": {names} exclude each other"
        yield _found(file, kinds[1], "error", message, "Keep one of them", source=_VALIDATE, code="LAUNCHER_OPTION")
    processes = command.option("num_processes")
    if command.option("multi_gpu") and processes is not None and processes.value == "1":
        message = "=1 with --multi_gpu, which needs two or more"
        yield _found(
            file, processes, "error", message, "Leave --multi_gpu out", source=_VALIDATE, code="LAUNCHER_OPTION"
        )
    precision = command.option("mixed_precision")
    if precision is not None and precision.is_known and precision.value not in PRECISIONS:
        message, fix = f"={precision.value} is none of {', '.join(PRECISIONS)}", "Write one of them"
        yield _found(file, precision, "error", message, fix, source=_SOURCES["accelerate"], code="LAUNCHER_OPTION")
    machines = command.option("num_machines")
    rank = command.option("machine_rank")
    if machines is None or rank is None or not _is_number(machines.value) or not _is_number(rank.value):
        return
    last = int(machines.value or 1) - 1
    if int(rank.value or 0) > last:
        message = f"={rank.value} with --num_machines={machines.value}"
        yield _found(file, rank, "error", message, f"Write 0 to {last}", source=_VALIDATE, code="LAUNCHER_OPTION")


def _deepspeed(file: UserFile, command: Command) -> Iterator[Found]:
    counts, filters = command.option("num_nodes", "num_gpus"), command.option("include", "exclude")
    if counts is not None and filters is not None:
        message = f": --{counts.name} and --{filters.name} exclude each other"
        source = "deepspeed launcher/runner.py main"
        yield _found(file, counts, "error", message, "Keep one of them", source=source, code="LAUNCHER_OPTION")
    if command.option("no_ssh") and not command.option("node_rank"):
        option = command.option("no_ssh")
        assert option is not None
        message, fix = " needs --node_rank on each node", "Add --node_rank"
        yield _found(
            file, option, "error", message, fix, source="deepspeed launcher/runner.py main", code="LAUNCHER_OPTION"
        )


def _is_beginning(option: Option, command: Command, known: frozenset[str]) -> bool:
    """Return whether a parser takes the beginning of an option for it; that of Accelerate does not."""
    return command.launcher != "accelerate" and sum(name.startswith(option.name) for name in known) == 1


def _is_number(value: str | None) -> bool:
    return value is not None and re.fullmatch(r"-?\d+", value) is not None


def _name(command: Command) -> str:
    return "accelerate launch" if command.launcher == "accelerate" else command.launcher


def _found(file: UserFile, option: Option, level: Level, message: str, fix: str, *, code: str, source: str) -> Found:
    return Found(
        level=level,
        code=code,
        file=file.name,
        line=option.line,
        key=f"--{option.name}",
        value=option.value or "",
        message=f"--{option.name}{message}",
        fix=fix,
        source=versioned(source),
    )


def _at_line(file: UserFile, command: Command, message: str, fix: str) -> Found:
    return Found(
        level="error",
        code="LAUNCHER_OPTION",
        file=file.name,
        line=command.line,
        key=command.launcher,
        message=message,
        fix=fix,
        source=versioned(_SOURCES[command.launcher]),
    )


def _line(
    file: UserFile, key: str, level: Level, message: str, fix: str, source: str, *, code: str, line: int | None = None
) -> Found:
    return Found(
        level=level,
        code=code,
        file=file.name,
        line=line or file.lines.get((key,)),
        key=key,
        value=str(file.keys.get(key, "")),
        message=message,
        fix=fix,
        source=versioned(source),
    )
