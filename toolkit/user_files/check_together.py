"""What files say together: how many ranks start, on how many machines, in which precision, from which DeepSpeed file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from toolkit.deepspeed_spec.nested import lookup, subsection
from toolkit.units import whole_number
from toolkit.user_files.check_accelerate import is_deepspeed
from toolkit.user_files.check_launch import gpus_per_node, number
from toolkit.user_files.commands import Command
from toolkit.user_files.kinds import KIND_WORDS
from toolkit.user_files.read import UserFile
from toolkit.user_files.report import Edit, Found, Level, versioned
from toolkit.user_files.setup import Setup, located

_RUNNER = "deepspeed launcher/runner.py main"


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """A number that a file states.

    Args:
        value: The number.
        file: Name of the file.
        key: Key or option.
        line: Its line.
    """

    value: int
    file: str
    key: str
    line: int | None

    def __str__(self) -> str:
        return f"{self.key}={self.value}"


def num_ranks(setup: Setup) -> Count | None:
    """Return the number of ranks that the files start; None if they do not say."""
    if setup.command is not None:
        file, command = setup.command
        if command.launcher == "python":
            is_started_often = any(word.text in ("srun", "mpirun", "mpiexec") for word in command.prefix)
            return None if is_started_often else Count(value=1, file=file.name, key="python", line=command.line)
        if command.launcher == "torchrun":
            each, nodes = _option(setup, "nproc_per_node", "nproc"), _option(setup, "nnodes")
            if each is None or (nodes is None and command.option("nnodes") is not None):
                return None
            total = each.value * (1 if nodes is None else nodes.value)
            return Count(value=total, file=file.name, key="nnodes × nproc_per_node", line=each.line)
        if command.launcher == "deepspeed":
            return _of_hostfile(setup, command)
        if (found := _option(setup, "num_processes")) is not None:
            return found
    found = _of_accelerate(setup, "num_processes")
    return found if found is not None or setup.command is not None else _of_hostfile(setup, None)


def num_machines(setup: Setup) -> Count | None:
    """Return the number of machines that the launcher expects; None if the files do not say."""
    name = "nnodes" if setup.command is not None and setup.command[1].launcher == "torchrun" else "num_machines"
    return _option(setup, name) or _of_accelerate(setup, "num_machines")


def check_together(setup: Setup) -> Iterator[Found]:
    """Yield what files that are right by themselves get wrong together."""
    for rule in (_references, _hosts, _slurm, _tasks, _visible, _precision, _two_engines):
        yield from rule(setup)


def _of_accelerate(setup: Setup, key: str) -> Count | None:
    file = setup.accelerate
    value = None if file is None else file.keys.get(key)
    if file is None or not isinstance(value, int) or isinstance(value, bool) or value < 1:
        return None
    return Count(value=value, file=file.name, key=key, line=file.line(key))


def _option(setup: Setup, *names: str) -> Count | None:
    if setup.command is None:
        return None
    file, command = setup.command
    found = command.option(*names)
    if found is None or not found.is_known or (value := whole_number(found.value)) is None:
        return None
    return Count(value=value, file=file.name, key=f"--{found.name}", line=found.line)


def _of_hostfile(setup: Setup, command: Command | None) -> Count | None:
    hosts = setup.hostfile
    if hosts is None or not hosts.keys or (command is not None and command.option("include", "exclude")):
        gpus = _option(setup, "num_gpus")
        return gpus if hosts is None and gpus is not None and _option(setup, "num_nodes") is None else None
    nodes, gpus = _option(setup, "num_nodes"), _option(setup, "num_gpus")
    slots = list(hosts.keys.values())[: None if nodes is None else nodes.value]
    total = sum(slots) if gpus is None else len(slots) * gpus.value
    return Count(value=total, file=hosts.name, key="slots", line=1)


def _found(
    level: Level, count: Count, message: str, fix: str, source: str, *, code: str, edits: tuple[Edit, ...] = ()
) -> Found:
    return Found(
        level=level,
        code=code,
        file=count.file,
        line=count.line,
        key=count.key,
        value=str(count.value),
        message=message,
        fix=fix,
        source=versioned(source),
        edits=edits,
    )


def _references(setup: Setup) -> Iterator[Found]:
    """Find files that others name and that are not there, or are of another kind."""
    for each in setup.references:
        path = located(each)
        read = next((file for file in setup.files if path and file.path and _same(file, path)), None)
        by_name = any(
            file.path is not None and file.path.name == each.target.rpartition("/")[2] for file in setup.files
        )
        if path is None and not by_name:
            level: Level = "error" if each.kind in ("deepspeed", "accelerate", "trainer-arguments") else "warning"
            count = Count(value=0, file=each.file.name, key=each.key, line=each.line)
            message = (
                f"{each.key}={each.target} is not there, seen from the working directory or beside {each.file.name}"
            )
            fix = "Correct the path, or start where it is right"
            source = "deepspeed launcher/runner.py fetch_hostfile" if each.kind == "hostfile" else ""
            yield _found(level, count, message, fix, source, code="FILE_MISSING")
        elif read is not None and read.kind != each.kind and read.kind in KIND_WORDS:
            count = Count(value=0, file=each.file.name, key=each.key, line=each.line)
            message = f"{each.key}={each.target} is {KIND_WORDS[read.kind]}, not {KIND_WORDS[each.kind]}"
            yield _found("error", count, message, "Name the other file", "", code="FILE_KIND")


def _same(file: UserFile, path: Any) -> bool:
    try:
        return file.path is not None and file.path.resolve() == path.resolve()
    except (OSError, RuntimeError):
        return False


def _hosts(setup: Setup) -> Iterator[Found]:
    """Compare a hostfile with the processes and machines of Accelerate's launcher, which passes it to DeepSpeed's."""
    hosts, processes, machines = setup.hostfile, num_ranks(setup), num_machines(setup)
    if (
        hosts is None
        or not hosts.keys
        or processes is None
        or processes.file == hosts.name
        or not _reads_hostfile(setup)
    ):
        return
    count = Count(value=processes.value, file=processes.file, key=processes.key, line=processes.line)
    if machines is None or machines.value < 1:
        return
    if machines.value != len(hosts.keys):
        several = f"{len(hosts.keys)} hosts, all of which" if len(hosts.keys) > 1 else "1 host, the only one that"
        message = f"{machines} and {hosts.name} has {several} DeepSpeed's launcher uses"
        fix = f"Set it to {len(hosts.keys)}, or take hosts out of {hosts.name}"
        yield _found("error", machines, message, fix, _RUNNER, code="HOSTFILE_RANKS")
        return
    each = processes.value // machines.value
    small = {host: slots for host, slots in hosts.keys.items() if slots < each}
    if small:
        host, slots = next(iter(small.items()))
        message = f"{processes} on {machines.value} host{'' if machines.value == 1 else 's'} starts {each} processes on each, and {host} has slots={slots}"
        fix = f"Set {processes.key} to {machines.value * min(hosts.keys.values())}, or correct slots"
        yield _found("error", count, message, fix, _RUNNER, code="HOSTFILE_RANKS")
    elif any(slots > each for slots in hosts.keys.values()):
        total = sum(hosts.keys.values())
        message = f"{processes} leaves {total - each * len(hosts.keys)} of the {total} slots in {hosts.name} unused"
        yield _found("note", count, message, f"Set {processes.key} to {total}", _RUNNER, code="SLOWER")


def _reads_hostfile(setup: Setup) -> bool:
    """Return whether the launcher passes a hostfile on: torchrun, python and Accelerate's standard launcher do not."""
    command = None if setup.command is None else setup.command[1]
    if command is not None and command.launcher != "accelerate":
        return command.launcher == "deepspeed"
    if setup.accelerate is None:
        return command is None or command.option("deepspeed_hostfile") is not None
    return is_deepspeed(setup.accelerate) and _uses_pdsh(setup.accelerate)


def _visible(setup: Setup) -> Iterator[Found]:
    """Compare CUDA_VISIBLE_DEVICES of a command with the processes that it starts on a machine."""
    if setup.command is None or setup.command[1].launcher not in ("torchrun", "accelerate"):
        return
    command = setup.command[1]
    visible = command.environment.get("CUDA_VISIBLE_DEVICES")
    started = _option(setup, "nproc_per_node", "nproc") if command.launcher == "torchrun" else num_ranks(setup)
    if visible is None or not visible.is_known or not visible.text.strip() or started is None:
        return
    machines = num_machines(setup)
    spread = 1 if command.launcher == "torchrun" or machines is None else machines.value
    cards, each = len([part for part in visible.text.split(",") if part.strip()]), started.value // max(1, spread)
    if each > cards:
        message = (
            f"{started} with CUDA_VISIBLE_DEVICES={visible.text}: {each} processes on a machine, which see "
            f"{cards} GPU{'' if cards == 1 else 's'}"
        )
        fix = f"Set {started.key} to {cards * spread}, or name {each} GPUs"
        source = "torch cuda/__init__.py set_device, which raises on the ranks beyond"
        yield _found("error", started, message, fix, source, code="VISIBLE_GPUS")


def _slurm(setup: Setup) -> Iterator[Found]:
    """Compare nodes and GPUs of an sbatch script with what its launcher starts."""
    script = setup.sbatch
    if script is None:
        return
    nodes, gpus = number(script, "nodes"), gpus_per_node(script)
    ranks, machines = num_ranks(setup), num_machines(setup)
    wanted = machines.value if machines is not None else None
    if nodes is not None and machines is not None and wanted != nodes:
        words = (
            "waits for machines that never come" if (wanted or 0) > nodes else f"leaves {nodes - (wanted or 0)} idle"
        )
        level: Level = "error" if (wanted or 0) > nodes else "warning"
        message = f"{machines} and #SBATCH --nodes={nodes}: the run {words}"
        yield _found(level, machines, message, f"Write {nodes} in both", "sbatch --nodes", code="SLURM_NODES")
    if gpus is None or ranks is None or (nodes is None and wanted is None):
        return
    asked = gpus * (nodes or 1)
    if ranks.value > asked:
        message = f"{ranks} and the script asks for {asked} GPUs ({nodes or 1} nodes of {gpus})"
        yield _found(
            "error", ranks, message, f"Write {asked}, or ask for more GPUs", "sbatch --gres", code="SLURM_GPUS"
        )
    elif ranks.value < asked:
        message = f"{ranks} uses {ranks.value} of the {asked} GPUs that the script asks for"
        yield _found("note", ranks, message, f"Write {asked}, or ask for fewer GPUs", "sbatch --gres", code="SLOWER")


def _tasks(setup: Setup) -> Iterator[Found]:
    """Find launchers that SLURM starts several times on a node, or on the first node alone."""
    script = setup.sbatch
    if script is None or setup.command is None or setup.command[0] is not script:
        return
    command = setup.command[1]
    if command.launcher not in ("accelerate", "torchrun", "deepspeed"):
        return
    nodes, tasks = number(script, "nodes") or 1, number(script, "ntasks")
    each = number(script, "ntasks-per-node") or (None if tasks is None else -(-tasks // nodes))
    by_srun = any(word.text == "srun" for word in command.prefix)
    key = "ntasks-per-node" if "ntasks-per-node" in script.keys else "ntasks"
    place = Count(value=each or 0, file=script.name, key=key, line=script.line(key))
    if by_srun and each is not None and each > 1 and not _srun_sets_tasks(command):
        message = f"#SBATCH --{key}={script.keys[key]} starts {command.launcher} {each} times on a node, and each starts all its processes"
        fix = "Write #SBATCH --ntasks-per-node=1: the launcher starts the processes of a node"
        yield _found("error", place, message, fix, "srun, one launcher for each task", code="SLURM_TASKS")
    machines = num_machines(setup)
    several = machines is not None and machines.value > 1 and command.launcher != "deepspeed"
    over_ssh = setup.accelerate is not None and is_deepspeed(setup.accelerate) and _uses_pdsh(setup.accelerate)
    if several and not by_srun and nodes > 1 and not over_ssh:
        line = Count(value=nodes, file=script.name, key=command.launcher, line=command.line)
        message = f"{command.launcher} is started without srun, so on the first of {nodes} nodes alone: it waits for the others"
        fix = "Write srun before it, with one task on each node"
        yield _found("error", line, message, fix, "sbatch, which runs its script on the first node", code="SLURM_TASKS")


def _srun_sets_tasks(command: Command) -> bool:
    return any(word.text.startswith(("--ntasks", "-n")) for word in command.prefix)


def _uses_pdsh(file: UserFile) -> bool:
    section = subsection(file.keys, "deepspeed_config")
    return section.get("deepspeed_multinode_launcher") in (None, "pdsh", "openmpi", "mvapich", "mpich")


def _precision(setup: Setup) -> Iterator[Found]:
    """Compare Accelerate's precision with Trainer's arguments and with the DeepSpeed file."""
    file = setup.accelerate
    option = None if setup.command is None else setup.command[1].option("mixed_precision")
    wanted = file.keys.get("mixed_precision") if file is not None else None
    place = Count(value=0, file="" if file is None else file.name, key="mixed_precision", line=None)
    if file is not None:
        place = Count(value=0, file=file.name, key="mixed_precision", line=file.line("mixed_precision"))
    if option is not None and option.is_known and setup.command is not None:
        wanted = option.value
        place = Count(value=0, file=setup.command[0].name, key="--mixed_precision", line=option.line)
    if wanted not in ("bf16", "fp16"):
        return
    other = {"bf16": "fp16", "fp16": "bf16"}[wanted]
    engine = setup.deepspeed
    if engine is not None and lookup(engine.keys, f"{other}.enabled") is True and not setup.uses_trainer:
        message = f"{place.key}={wanted} and {other}.enabled=true in {engine.name}: Accelerate refuses the two"
        source = "accelerate utils/dataclasses.py DeepSpeedPlugin.set_mixed_precision"
        yield _found("error", place, message, "Write one precision in both", source, code="PRECISION_MISMATCH")
    said = _switched_on(setup.said, other)
    if said is not None:
        message = f"{place.key}={wanted} and the argument {other}: Trainer takes {other}"
        source = "transformers training_args.py TrainingArguments.__post_init__"
        yield _found("warning", place, message, f"Write {other} in both", source, code="PRECISION_MISMATCH")


def _switched_on(said: Mapping[str, Any], name: str) -> Any:
    found = said.get(name)
    if found is None:
        return None
    value = found.value
    is_on = (
        value is True
        or value == ()
        or (isinstance(value, tuple) and value[0].lower() in ("true", "1", "yes", "t", "y"))
    )
    return found if is_on else None


def _two_engines(setup: Setup) -> Iterator[Found]:
    """Find a DeepSpeed file among Trainer's arguments beside DeepSpeed values of Accelerate."""
    file, said = setup.accelerate, setup.said.get("deepspeed")
    if file is None or said is None or not is_deepspeed(file) or not setup.uses_trainer:
        return
    section = subsection(file.keys, "deepspeed_config")
    twice = [key for key in section if key in _REFUSED_TWICE]
    twice += ["mixed_precision"] if file.keys.get("mixed_precision") is not None else []
    for key in twice if section.get("deepspeed_config_file") in (None, "none") else ():
        path = key if key == "mixed_precision" else f"deepspeed_config.{key}"
        place = Count(value=0, file=file.name, key=path, line=file.line(path))
        message = f"{path} beside the argument deepspeed of {said.file.name}: Accelerate refuses the two"
        fix = "Remove it here: the DeepSpeed file has it"
        edits = (Edit(file=file.name, path=tuple(path.split(".")), action="remove"),)
        source = "accelerate utils/dataclasses.py DeepSpeedPlugin._deepspeed_config_checks"
        yield _found("error", place, message, fix, source, edits=edits, code="ACCELERATE_TWICE")


_REFUSED_TWICE = (
    *("gradient_accumulation_steps", "gradient_clipping", "zero_stage", "offload_optimizer_device"),
    *("offload_param_device", "offload_param_nvme_path", "offload_optimizer_nvme_path", "zero3_save_16bit_model"),
)
