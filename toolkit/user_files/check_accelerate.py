"""A configuration of Accelerate: the keys of its file, what `accelerate launch` makes of them, what it drops without a word."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from toolkit.arguments import shown
from toolkit.config.suggestions import nearest
from toolkit.deepspeed_spec.nested import subsection
from toolkit.units import whole_number
from toolkit.user_files.arguments import accelerate_keys
from toolkit.user_files.engine_view import section_config
from toolkit.user_files.read import UserFile
from toolkit.user_files.report import Edit, Found, Level, versioned
from toolkit.user_files.setup import Setup

_FILE = "accelerate commands/config/config_args.py load_config_from_file"
_LAUNCH = "accelerate commands/launch.py _validate_launch_command"
_ENVIRONMENT = "accelerate utils/launch.py prepare_deepspeed_cmd_env"
_PLUGIN = "accelerate utils/dataclasses.py DeepSpeedPlugin._deepspeed_config_checks"

# accelerate utils/dataclasses.py DistributedType.
DISTRIBUTED_TYPES = (
    *("NO", "MULTI_CPU", "MULTI_GPU", "MULTI_NPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA", "MULTI_XPU", "DEEPSPEED"),
    *("FSDP", "XLA", "MEGATRON_LM", "MULTI_HPU", "MULTI_NEURON"),
)
PRECISIONS = ("no", "fp8", "fp16", "bf16")
LAUNCHERS = ("pdsh", "standard", "openmpi", "mvapich", "mpich", "nossh", "slurm")
# Keys of earlier versions that process_config converts.
_CONVERTED = ("fp16", "dynamo_backend")
# Keys of the section deepspeed_config that `accelerate launch` reads, by what the engine file has in their place; "" if nothing.
SECTION: Mapping[str, str] = {
    "zero_stage": "zero_optimization.stage",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
    "offload_optimizer_device": "zero_optimization.offload_optimizer.device",
    "offload_optimizer_nvme_path": "zero_optimization.offload_optimizer.nvme_path",
    "offload_param_device": "zero_optimization.offload_param.device",
    "offload_param_nvme_path": "zero_optimization.offload_param.nvme_path",
    "zero3_save_16bit_model": "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    "zero3_init_flag": "",
    "deepspeed_config_file": "",
    "deepspeed_multinode_launcher": "",
    "deepspeed_hostfile": "",
    "deepspeed_exclusion_filter": "",
    "deepspeed_inclusion_filter": "",
    "deepspeed_moe_layer_cls_names": "",
}
Edits = tuple[Edit, ...]
_BOOLEANS = ("true", "false", "yes", "no", "t", "f", "y", "n", "1", "0", "on", "off")


def check_accelerate(file: UserFile, setup: Setup) -> Iterator[Found]:
    """Yield what is wrong with a configuration of Accelerate by itself; its DeepSpeed values are checked as DeepSpeed's."""
    for rule in (_top_level, _precision, _processes, _unread_sections, _section, _several_machines):
        yield from rule(file, setup)
    for key, line in file.ignored:
        yield _found(
            file, "warning", key, " appears twice; the last one counts", "Keep one", line=line, code="KEY_TWICE"
        )


def is_deepspeed(file: UserFile) -> bool:
    """Return whether a configuration is for DeepSpeed."""
    return file.keys.get("distributed_type") == "DEEPSPEED"


def _found(
    file: UserFile,
    level: Level,
    key: str,
    message: str,
    fix: str,
    *,
    code: str,
    source: str = _FILE,
    edits: tuple[Edit, ...] = (),
    line: int | None = None,
) -> Found:
    node: Any = file.keys
    for part in key.split("."):
        node = node.get(part) if isinstance(node, Mapping) else None
    return Found(
        level=level,
        code=code,
        file=file.name,
        line=line or file.line(key),
        key=key,
        value="" if node is None else str(node),
        message=f"{key}{message}",
        fix=fix,
        source=versioned(source),
        edits=edits,
    )


def _edit(file: UserFile, key: str, action: str, value: Any = None) -> Edit:
    return Edit(file=file.name, path=tuple(key.split(".")), action=action, value=value)  # type: ignore[arg-type]


def _top_level(file: UserFile, setup: Setup) -> Iterator[Found]:
    keys, known = file.keys, accelerate_keys()
    if keys.get("compute_environment", "LOCAL_MACHINE") not in ("LOCAL_MACHINE", "AMAZON_SAGEMAKER"):
        message = f"={shown(keys['compute_environment'])} is neither LOCAL_MACHINE nor AMAZON_SAGEMAKER"
        edits: Edits = (_edit(file, "compute_environment", "set", "LOCAL_MACHINE"),)
        yield _found(
            file, "error", "compute_environment", message, "Write LOCAL_MACHINE", edits=edits, code="ACCELERATE_VALUE"
        )
    kind = keys.get("distributed_type")
    if "distributed_type" not in keys:
        message, fix = " is missing: Accelerate refuses the file", f"Write one of {', '.join(DISTRIBUTED_TYPES)}"
        yield _found(file, "error", "distributed_type", message, fix, code="ACCELERATE_VALUE")
    elif not isinstance(kind, str):
        message = f"={shown(kind)} is no text{': NO without quotes is false to YAML' if kind is False else ''}: one process starts"
        edits = (_edit(file, "distributed_type", "set", "NO"),)
        fix = "Write 'NO' in quotes, or another type"
        yield _found(
            file, "warning", "distributed_type", message, fix, source=_LAUNCH, edits=edits, code="ACCELERATE_VALUE"
        )
    elif kind not in DISTRIBUTED_TYPES:
        near = next(iter(nearest(kind.upper(), DISTRIBUTED_TYPES)), None)
        message = f"={shown(kind)} is none of Accelerate's"
        fix = f"Write {near}" if near else f"Write one of {', '.join(DISTRIBUTED_TYPES)}"
        edits = (_edit(file, "distributed_type", "set", near),) if near else ()
        yield _found(file, "error", "distributed_type", message, fix, edits=edits, code="ACCELERATE_VALUE")
    for key in keys:
        if key in known or key in _CONVERTED or keys.get("compute_environment") == "AMAZON_SAGEMAKER":
            continue
        near_keys = [*nearest(key, known), *(f"deepspeed_config.{each}" for each in nearest(key, SECTION))]
        edits = (_edit(file, key, "remove"),)
        if near_keys and near_keys[0].rpartition(".")[2] not in (*keys, *subsection(keys, "deepspeed_config")):
            edits += (_edit(file, near_keys[0], "set", keys[key]),)
        fix = f"Did you mean {near_keys[0]}" if near_keys else "Remove it"
        yield _found(
            file,
            "error",
            key,
            " is no key of Accelerate, which refuses it",
            fix,
            edits=edits,
            code="ACCELERATE_UNKNOWN",
        )

    on_cpu = keys.get("use_cpu")
    if isinstance(on_cpu, Mapping) or ("use_cpu" in keys and kind == "NO" and str(on_cpu).lower() not in _BOOLEANS):
        message = f"={shown(on_cpu)} is neither true nor false"
        yield _found(file, "error", "use_cpu", message, "Write true or false", source=_LAUNCH, code="ACCELERATE_VALUE")


def _precision(file: UserFile, setup: Setup) -> Iterator[Found]:
    value = file.keys.get("mixed_precision")
    if value is None or (isinstance(value, str) and value.lower() in PRECISIONS):
        return
    right = "no" if value is False else next(iter(nearest(str(value), PRECISIONS)), None)
    message = f"={shown(value)} is none of {', '.join(PRECISIONS)}"
    if value is False:
        message = "=no without quotes is false to YAML, and Accelerate fails on it"
    fix = "Write 'no' in quotes" if value is False else f"Write {right}" if right else "Write one of them"
    edits: Edits = (_edit(file, "mixed_precision", "set", right),) if right else ()
    yield _found(
        file, "error", "mixed_precision", message, fix, source=_ENVIRONMENT, edits=edits, code="ACCELERATE_VALUE"
    )


def _processes(file: UserFile, setup: Setup) -> Iterator[Found]:
    keys = file.keys
    command = None if setup.command is None else setup.command[1]
    elsewhere = command is not None and command.option("num_processes") is not None
    is_single = not isinstance(keys.get("distributed_type"), str) or keys["distributed_type"] == "NO"
    if keys.get("num_processes", -1) in (-1, None) and not is_single and not elsewhere:
        message, fix = " is missing: `accelerate launch` asks for it", "Write it, or pass --num_processes"
        yield _found(file, "error", "num_processes", message, fix, source=_LAUNCH, code="ACCELERATE_VALUE")
    for key in ("num_processes", "num_machines", "machine_rank", "main_process_port"):
        value = keys.get(key)
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        if (
            isinstance(value, int)
            and is_whole
            and value < 1
            and value != -1
            and key.startswith("num_p")
            and not is_single
        ):
            message, fix = f"={value} starts no process", "Write 1 or more"
            yield _found(file, "error", key, message, fix, source=_LAUNCH, code="ACCELERATE_VALUE")
        if is_whole or (value is None and (key not in keys or key != "num_machines")):
            continue
        if key == "num_processes" and value in ("auto", "gpu", "cpu") and not is_single:  # which torchrun counts
            continue
        number = whole_number(value) if isinstance(value, str) else None
        edits: Edits = () if number is None else (_edit(file, key, "set", number),)
        number_of = isinstance(value, float | bool | dict)  # a section has no effect there
        is_one = keys.get("num_machines", 1) in (0, 1)
        fails = {
            # One machine's number passes through a text; several machines divide by it.
            "num_processes": not number_of if is_single else number is None or not is_one or bool(keys.get("use_cpu")),
            "num_machines": not isinstance(value, float | bool) or value > 1,
        }.get(key, False)
        message = " is null" if value is None else f"={shown(value)} is no whole number"
        level: Level = "error" if fails else "warning"
        yield _found(
            file, level, key, message, "Write a whole number", source=_LAUNCH, edits=edits, code="ACCELERATE_VALUE"
        )
    ids = keys.get("gpu_ids")
    if ids is not None and not isinstance(ids, str):
        text = ",".join(map(str, ids)) if isinstance(ids, list) else str(ids)
        message = f"={shown(ids)} is no text: `accelerate launch` splits it at commas and fails"
        edits = (_edit(file, "gpu_ids", "set", text),)
        yield _found(
            file,
            "error",
            "gpu_ids",
            message,
            f"Write '{text}' in quotes",
            source=_LAUNCH,
            edits=edits,
            code="ACCELERATE_VALUE",
        )
    elif _is_one_id(ids) and str(keys.get("distributed_type"))[:5] == "MULTI" and keys.get("num_machines", 1) in (0, 1):
        message = f"={ids} is one GPU for {keys['distributed_type']}"
        yield _found(
            file, "error", "gpu_ids", message, "Write several, or all", source=_LAUNCH, code="ACCELERATE_VALUE"
        )


def _is_one_id(ids: Any) -> bool:
    return isinstance(ids, str) and ids != "all" and "," not in ids


def _unread_sections(file: UserFile, setup: Setup) -> Iterator[Found]:
    """Find sections that another distributed_type reads, and keys that lack their prefix."""
    kind = file.keys.get("distributed_type")
    needs = {"deepspeed_config": "DEEPSPEED", "fsdp_config": "FSDP", "megatron_lm_config": "MEGATRON_LM"}
    for section, wanted in needs.items():
        if subsection(file.keys, section) and kind in DISTRIBUTED_TYPES and kind != wanted:
            message, fix = (
                f" is not read with distributed_type={kind}",
                f"Set distributed_type to {wanted}, or remove it",
            )
            yield _found(file, "warning", section, message, fix, source=_LAUNCH, code="ACCELERATE_IGNORED")
    if kind == "DEEPSPEED" and (subsection(file.keys, "dynamo_config") or "dynamo_backend" in file.keys):
        key = "dynamo_config" if "dynamo_config" in file.keys else "dynamo_backend"
        if str(subsection(file.keys, key).get("dynamo_backend", file.keys.get(key))).upper() != "NO":
            message = " is not passed on with distributed_type=DEEPSPEED: the model is not compiled"
            fix = "Set torch_compile: true in Trainer's arguments, or call engine.compile()"
            edits: Edits = (_edit(file, key, "remove"),)
            yield _found(
                file, "warning", key, message, fix, source=_ENVIRONMENT, edits=edits, code="ACCELERATE_IGNORED"
            )
    for key, value in subsection(file.keys, "parallelism_config").items():
        if not key.startswith("parallelism_config_"):
            path = f"parallelism_config.{key}"
            edits = (
                _edit(file, path, "remove"),
                _edit(file, f"parallelism_config.parallelism_config_{key}", "set", value),
            )
            message, fix = " is not read without its prefix", f"Write parallelism_config_{key}"
            yield _found(file, "warning", path, message, fix, source=_LAUNCH, edits=edits, code="ACCELERATE_IGNORED")


def _section(file: UserFile, setup: Setup) -> Iterator[Found]:
    """Check the section deepspeed_config: unknown keys, values that cannot be converted, keys beside a DeepSpeed file."""
    if not is_deepspeed(file):
        return
    whole = file.keys.get("deepspeed_config")
    if whole is not None and not isinstance(whole, Mapping):
        message, fix = f"={shown(whole)} is no section", "Write its keys below it"
        yield _found(file, "error", "deepspeed_config", message, fix, source=_LAUNCH, code="ACCELERATE_VALUE")
    section = subsection(file.keys, "deepspeed_config")
    for key in section:
        if key in SECTION:
            continue
        path, near = f"deepspeed_config.{key}", nearest(key, SECTION)
        edits: Edits = (_edit(file, path, "remove"),)
        if near and near[0] not in section and section.get("deepspeed_config_file") in (None, "none"):
            edits += (_edit(file, f"deepspeed_config.{near[0]}", "set", section[key]),)
        message, fix = " is no key that Accelerate reads there", f"Did you mean {near[0]}" if near else "Remove it"
        yield _found(file, "warning", path, message, fix, source=_ENVIRONMENT, edits=edits, code="ACCELERATE_IGNORED")
    yield from _texts(file, section)
    named = section.get("deepspeed_config_file")
    if named is not None and not isinstance(named, str):
        path, message = "deepspeed_config.deepspeed_config_file", f"={shown(named)} is no path"
        source = "accelerate utils/deepspeed.py HfDeepSpeedConfig"
        yield _found(file, "error", path, message, "Write the path of the file", source=source, code="ACCELERATE_VALUE")
    if section.get("deepspeed_config_file") not in (None, "none"):
        yield from _beside_a_file(file, section, setup)


def _texts(file: UserFile, section: Mapping[str, Any]) -> Iterator[Found]:
    """Check values that Accelerate passes on as text and converts again."""
    for key, kind in (("zero_stage", int), ("gradient_clipping", float)):
        value = section.get(key)
        if value is None or (key == "gradient_clipping" and value == "auto"):
            continue
        try:
            kind(str(value).lower())
        except ValueError:
            word = "whole number" if kind is int else "number"
            right = int(value) if kind is int and isinstance(value, float) and value.is_integer() else None
            path = f"deepspeed_config.{key}"
            edits: Edits = () if right is None else (_edit(file, path, "set", right),)
            message, fix = f"={shown(value)} is no {word}", f"Write a {word}"
            yield _found(
                file,
                "error",
                path,
                message,
                fix,
                source=_PLUGIN.partition("._")[0],
                edits=edits,
                code="ACCELERATE_VALUE",
            )
    flag = section.get("zero3_init_flag")
    if flag is not None and str(flag).lower() not in _BOOLEANS:
        path, message = "deepspeed_config.zero3_init_flag", f"={shown(flag)} is neither true nor false"
        source = "accelerate utils/environment.py str_to_bool"
        yield _found(file, "error", path, message, "Write true or false", source=source, code="ACCELERATE_VALUE")
    stage = section_config(section, None)["zero_optimization"]["stage"]
    if flag is True and stage in (0, 1, 2) and section.get("deepspeed_config_file") in (None, "none"):
        path = "deepspeed_config.zero3_init_flag"
        message, fix = f"=true has no effect with zero_stage={stage}", "Set it to false, or zero_stage to 3"
        edits = (_edit(file, path, "set", False),)
        source = "accelerate utils/dataclasses.py DeepSpeedPlugin"
        yield _found(file, "warning", path, message, fix, source=source, edits=edits, code="ACCELERATE_IGNORED")
    for part in ("optimizer", "param"):
        path = f"deepspeed_config.offload_{part}_nvme_path"
        written = section.get(f"offload_{part}_nvme_path") not in (None, "none")
        if written and section.get(f"offload_{part}_device") != "nvme":
            message, fix = (
                f" has no effect without offload_{part}_device=nvme",
                f"Set offload_{part}_device to nvme, or remove it",
            )
            edits = (_edit(file, path, "remove"),)
            source = "accelerate utils/dataclasses.py DeepSpeedPlugin"
            yield _found(file, "warning", path, message, fix, source=source, edits=edits, code="ACCELERATE_IGNORED")


def _beside_a_file(file: UserFile, section: Mapping[str, Any], setup: Setup) -> Iterator[Found]:
    """Find keys that belong in the DeepSpeed file that the configuration names: Accelerate refuses them."""
    engine = setup.deepspeed
    homes = {f"deepspeed_config.{key}": home for key, home in SECTION.items() if home and key in section}
    if file.keys.get("mixed_precision") is not None and not _is_on_command_line(setup, "mixed_precision"):
        precision = str(file.keys["mixed_precision"])
        homes["mixed_precision"] = f"{precision}.enabled" if precision in ("bf16", "fp16") else ""
    for path, home in homes.items():
        edits = [_edit(file, path, "remove")]
        value = True if path == "mixed_precision" else section.get(path.rpartition(".")[2])
        if engine is not None and home and value not in (None, "none"):
            root = engine.keys.get(home.partition(".")[0])
            if not _has(engine.keys, home) and (root is None or isinstance(root, Mapping)):
                edits.append(Edit(file=engine.name, path=tuple(home.split(".")), action="set", value=value))
        where = f" as {home}" if home else ""
        name = section["deepspeed_config_file"]
        message = f" beside deepspeed_config_file={name}: Accelerate refuses it, since the DeepSpeed file has it{where}"
        fix = f"Move it into {name}{where}" if home else f"Remove it, and set the precision in {name}"
        yield _found(file, "error", path, message, fix, source=_PLUGIN, edits=tuple(edits), code="ACCELERATE_TWICE")


def _has(keys: Mapping[str, Any], path: str) -> bool:
    *parents, leaf = path.split(".")
    return leaf in subsection(keys, ".".join(parents)) if parents else leaf in keys


def _is_on_command_line(setup: Setup, name: str) -> bool:
    return setup.command is not None and setup.command[1].option(name) is not None


def _several_machines(file: UserFile, setup: Setup) -> Iterator[Found]:
    keys, section = file.keys, subsection(file.keys, "deepspeed_config")
    machines, processes = keys.get("num_machines", 1), keys.get("num_processes")
    if not isinstance(machines, int) or isinstance(machines, bool) or machines <= 1:
        return
    if isinstance(processes, int) and processes % machines:
        started = processes // machines * machines
        message = f"={processes} is no multiple of num_machines={machines}: {started} processes start"
        fix = f"Write {started} or {started + machines}"
        source = _ENVIRONMENT if is_deepspeed(file) else "accelerate utils/launch.py prepare_multi_gpu_env"
        yield _found(file, "warning", "num_processes", message, fix, source=source, code="RANKS_CHANGED")
    launcher = section.get("deepspeed_multinode_launcher") or "pdsh"
    path = "deepspeed_config.deepspeed_multinode_launcher"
    if is_deepspeed(file) and launcher not in LAUNCHERS:
        near = nearest(str(launcher), LAUNCHERS)
        fix = f"Write {near[0]}" if near else f"Write one of {', '.join(LAUNCHERS)}"
        edits: Edits = (_edit(file, path, "set", near[0]),) if near else ()
        source = "deepspeed launcher/runner.py main"
        yield _found(
            file,
            "error",
            path,
            f"={shown(launcher)} is no launcher",
            fix,
            source=source,
            edits=edits,
            code="ACCELERATE_VALUE",
        )
    on_line = _is_on_command_line(setup, "main_process_ip")
    if is_deepspeed(file) and launcher != "standard":
        if section.get("deepspeed_hostfile") is None and launcher != "slurm":
            key = "deepspeed_config.deepspeed_hostfile"
            message = (
                f" is missing with num_machines={machines} and the launcher {launcher}: DeepSpeed finds no hostfile and trains "
                "on this machine alone"
            )
            fix = "Name a hostfile, or set deepspeed_multinode_launcher to standard"
            edits = (_edit(file, path, "set", "standard"),) if keys.get("main_process_ip") else ()
            if setup.hostfile is not None:
                fix = f"Write deepspeed_hostfile: {setup.hostfile.name}"
                edits = (_edit(file, key, "set", setup.hostfile.name),)
            yield _found(file, "warning", key, message, fix, source=_ENVIRONMENT, edits=edits, code="RANKS_CHANGED")
    elif keys.get("main_process_ip") is None and not on_line:
        message = f" is missing with num_machines={machines}: the processes would look for the host None"
        fix = "Write the address of the first machine, or pass --main_process_ip"
        yield _found(file, "error", "main_process_ip", message, fix, source=_ENVIRONMENT, code="ACCELERATE_VALUE")
