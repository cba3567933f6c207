"""Arguments of Trainer and TRL: names, types, choices, and the combinations that their classes refuse.

Three readers differ. A command line is converted by argparse; TRL's `--config` file gives defaults to argparse, which converts
texts alone; `HfArgumentParser.parse_yaml_file` and `parse_json_file` convert nothing, so a wrong type fails where it is used.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from toolkit.arguments import shown
from toolkit.config.suggestions import nearest
from toolkit.user_files.argument_rules import NotKnownError, refused_combinations
from toolkit.user_files.arguments import TRL_COMMON, Argument, argument_classes, choices_of
from toolkit.user_files.report import Edit, Found, Level, versioned
from toolkit.user_files.setup import Said, Setup

_PARSER = "transformers hf_argparser.py HfArgumentParser"
_POST_INIT = "transformers training_args.py TrainingArguments.__post_init__"

# Enumerations that the class makes of a text (training_args.py __post_init__).
_ENUMERATED: Mapping[str, str] = {
    "lr_scheduler_type": "SchedulerType",
    "optim": "OptimizerNames",
    "logging_strategy": "IntervalStrategy",
    "eval_strategy": "IntervalStrategy",
    "save_strategy": "SaveStrategy",
    "hub_strategy": "HubStrategy",
}
# Names of earlier versions, with what replaced them.
RENAMED: Mapping[str, str] = {
    "evaluation_strategy": "eval_strategy",
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "per_gpu_eval_batch_size": "per_device_eval_batch_size",
    "max_seq_length": "max_length",
    "warmup_ratio": "warmup_steps",
    "no_cuda": "use_cpu",
    "use_mps_device": "use_cpu",
    "fp16_backend": "fp16",
    "half_precision_backend": "fp16",
    "group_by_length": "train_sampling_strategy",
    "tpu_num_cores": "",
    "tpu_metrics_debug": "",
    "jit_mode_eval": "",
    "use_legacy_prediction_loop": "",
    "overwrite_output_dir": "",
    "torchdynamo": "torch_compile_backend",
    "logging_dir": "",
    "push_to_hub_model_id": "hub_model_id",
    "push_to_hub_token": "hub_token",
    "save_safetensors": "",
    "ray_scope": "",
    "torch_dtype": "dtype",
    "fsdp_min_num_params": "fsdp_config",
    "fsdp_transformer_layer_cls_to_wrap": "fsdp_config",
    "mp_parameters": "",
}
# Of these, those whose replacement takes other values, and the fix.
_OTHER_VALUES: Mapping[str, str] = {
    "fsdp_min_num_params": "Write min_num_params in fsdp_config",
    "fsdp_transformer_layer_cls_to_wrap": "Write transformer_layer_cls_to_wrap in fsdp_config",
    "no_cuda": "Use use_cpu",
    "use_mps_device": "Remove it: the device is found",
    "fp16_backend": "Remove it: fp16 uses torch's own",
    "half_precision_backend": "Remove it: fp16 uses torch's own",
    "group_by_length": "Write train_sampling_strategy: group_by_length",
}
# Letters from which two of a name may be wrong.
_LONG = 12
# Keys that a parser itself reads.
_OF_PARSER = frozenset({"config", "env", "local_rank", "local-rank", "deepspeed_config", "help"})
# Whole numbers that torch or Python refuse as 8.0; the others are only compared.
_WHOLE = frozenset(
    {
        *(
            "per_device_train_batch_size",
            "per_device_eval_batch_size",
            "gradient_accumulation_steps",
            "seed",
            "data_seed",
        ),
        *("dataloader_num_workers", "dataloader_prefetch_factor", "torch_empty_cache_steps", "lora_r"),
    }
)
_TRUE, _FALSE = ("yes", "true", "t", "y", "1"), ("no", "false", "f", "n", "0")
_BAD = object()


def check_arguments(setup: Setup) -> Iterator[Found]:
    """Yield what the argument classes refuse, ignore or read otherwise."""
    values: dict[str, Any] = {}
    for name, said in setup.said.items():
        argument = setup.argument(name)
        if argument is None:
            argument = _abbreviated(name, setup) if said.is_text else None
        if argument is None and said.is_text and len(begun := _begun(name, setup)) > 1 and name not in _OF_PARSER:
            yield _ambiguous(name, said, setup, begun)
        elif argument is None:
            yield from _unknown(name, said, setup)
        elif said.is_known:
            value, found = _read(argument, said, is_trl=setup.is_trl)
            yield from found
            if value is not _BAD:
                values[argument.name] = value
    if setup.uses_trainer:
        yield from _combinations(values, setup)


def read_values(setup: Setup) -> dict[str, Any]:
    """Return the values of the arguments that are valid, with the class's defaults for the others."""
    values = {argument.name: argument.default for argument in argument_classes()[setup.owner].values()}
    for name, said in setup.said.items():
        argument = setup.argument(name) or (_abbreviated(name, setup) if said.is_text else None)
        if argument is None or not said.is_known:
            continue
        value, _ = _read(argument, said, is_trl=setup.is_trl)
        if value is not _BAD:
            values[argument.name] = value
    if setup.is_trl and values.get("bf16") is None:  # trl trainer/base_config.py __post_init__
        values["bf16"] = not values.get("fp16")
    return values | dict.fromkeys(_misnamed(setup))


def _abbreviated(name: str, setup: Setup) -> Argument | None:
    """Return the argument that argparse takes a beginning for, or the one that `no_` switches off."""
    known = _fields(setup)
    if name.startswith("no_") and name[3:] in known and known[name[3:]].default is True:
        return known[name[3:]]
    begun = _begun(name, setup)
    return known[begun[0]] if len(begun) == 1 else None


def _fields(setup: Setup) -> dict[str, Argument]:
    classes = argument_classes()
    owners = (setup.owner, *TRL_COMMON) if setup.is_trl else (setup.owner,)
    return {key: field for owner in owners for key, field in classes[owner].items()}


def _begun(name: str, setup: Setup) -> list[str]:
    return [key for key in _fields(setup) if key.startswith(name)]


def _ambiguous(name: str, said: Said, setup: Setup, begun: list[str]) -> Found:
    """Return the finding of a beginning of several arguments, at which argparse exits unless the script declares it."""
    by_trl = setup.command is not None and setup.command[1].launcher == "trl"
    is_slip = any(_is_slip(name, key) for key in begun)
    is_sure = by_trl or is_slip or ("_" in name and "output_dir" in setup.said)
    message = f" is the beginning of {len(begun)} arguments: the parser exits{'' if is_sure else ' unless the script declares it itself'}"
    fix = f"Write one of {', '.join(f'--{key}' for key in begun[:8])}{' …' if len(begun) > 8 else ''}"
    return _found("error" if is_sure else "warning", said, message, fix, source=_PARSER, code="ARGUMENT_UNKNOWN")


def _misnamed(setup: Setup) -> set[str]:
    """Return the arguments that an earlier or a misspelt name stands for: their values are not known until it is corrected."""
    meant: set[str] = set()
    fields = _fields(setup)
    for name, said in setup.said.items():
        if name in fields or (said.is_text and _abbreviated(name, setup) is not None):
            continue
        near = nearest(name, list(fields))
        if RENAMED.get(name):
            meant.add(RENAMED[name])
        elif near and _is_slip(name, near[0]):
            meant.add(near[0])
    return meant - setup.said.keys()


def _found(
    level: Level, said: Said, message: str, fix: str, *, code: str, source: str, edits: tuple[Edit, ...] = ()
) -> Found:
    value = " ".join(said.value) if isinstance(said.value, tuple) else said.value
    return Found(
        level=level,
        code=code,
        file=said.file.name,
        line=said.line,
        key=said.key,
        value=str(value),
        message=f"{said.key}{message}",
        fix=fix,
        source=versioned(source),
        edits=() if said.is_text else edits,
    )


def _unknown(name: str, said: Said, setup: Setup) -> Iterator[Found]:
    if name in _OF_PARSER or (said.is_text and name in ("deepspeed", "deepspeed_config")):
        return
    classes = argument_classes()
    known = [key for owner in (setup.owner, *TRL_COMMON) for key in classes.get(owner, ())]
    old, near = RENAMED.get(name), nearest(name, known)
    remove = Edit(file=said.file.name, path=(name,), action="remove")
    if old is not None and (not old or old in known):
        what = f" is no argument any more{f': it is {old} now' if old else ''}"
        edits: tuple[Edit, ...] = (remove,)
        if old:
            edits = () if name in _OTHER_VALUES else (remove, _set(said, old))
        fix = _OTHER_VALUES.get(name, f"Write {old}") if old else "Remove it"
        yield _found("error", said, f"{_equals(said)}{what}", fix, source=_PARSER, edits=edits, code="ARGUMENT_UNKNOWN")
    elif near and near[0] not in setup.said and _is_slip(name, near[0]):
        edits = (remove, _set(said, near[0]))
        yield _found(
            "error",
            said,
            f"{_equals(said)} is no argument of {setup.owner}: its parser refuses it",
            f"Did you mean {near[0]}",
            source=_PARSER,
            edits=edits,
            code="ARGUMENT_UNKNOWN",
        )
    elif setup.command is not None and setup.command[1].launcher == "trl" and not said.is_text:
        yield _found(
            "error",
            said,
            f"{_equals(said)} is no argument of `trl {setup.command[1].script}`",
            "Remove it",
            source="trl scripts/utils.py TrlParser",
            edits=(remove,),
            code="ARGUMENT_UNKNOWN",
        )
    elif not said.is_text and setup.uses_trainer:
        yield _found(
            "warning",
            said,
            f"{_equals(said)} is no argument of {setup.owner}: the parser refuses it unless the script declares it itself",
            "Remove it if the script has no such argument",
            source=_PARSER,
            code="ARGUMENT_FOREIGN",
        )


def _is_slip(name: str, meant: str) -> bool:
    """Return whether a name is another with one wrong, missing or additional letter, or two in a long one.

    What differs more may be an argument of the script's own, such as chat_template beside TRL's chat_template_path.
    """
    changes = difflib.SequenceMatcher(None, name, meant, autojunk=False).get_opcodes()
    wrong = sum(max(i2 - i1, j2 - j1) for tag, i1, i2, j1, j2 in changes if tag != "equal")
    return wrong <= (2 if len(name) >= _LONG else 1)


def _set(said: Said, name: str) -> Edit:
    return Edit(file=said.file.name, path=(name,), action="set", value=said.value)


def _equals(said: Said) -> str:
    return "" if said.value in ((), None) else f"={shown(_plain(said.value))}"


def _plain(value: Any) -> Any:
    return (value[0] if len(value) == 1 else list(value)) if isinstance(value, tuple) else value


def _read(argument: Argument, said: Said, *, is_trl: bool) -> tuple[Any, list[Found]]:
    """Return the value that the class gets, `_BAD` if there is none, and what is wrong with it."""
    if said.is_text:
        if said.key.startswith("--no_") and argument.name == said.key[5:]:
            return False, []
        value, what = _converted_words(argument, said.value)
        source = _PARSER
    elif is_trl and isinstance(said.value, str):
        value, what = _converted(argument, said.value)
        source = "trl scripts/utils.py TrlParser.set_defaults_with_config"
    else:
        return _raw(argument, said)
    if what:
        return _BAD, [
            _found("error", said, f"{_equals(said)} {what}", _form(argument), source=source, code="ARGUMENT_VALUE")
        ]
    return value, []


def _converted_words(argument: Argument, words: tuple[str, ...]) -> tuple[Any, str]:
    if argument.type == "list":
        return list(words), "" if words else "needs at least one value"
    if not words:
        is_switch = argument.type == "bool" and ("None" not in argument.annotation or argument.default is not None)
        return (True, "") if is_switch or argument.takes_none else (_BAD, "needs a value")
    value, what = _converted(argument, words[0])
    # Words that are left belong to the script's own positional arguments, which argument classes do not have.
    return value, what or ("has more than one value" if len(words) > 1 else "")


def _converted(argument: Argument, text: str) -> tuple[Any, str]:
    """Return what argparse makes of a text, and what is wrong with it."""
    kind, choices = argument.type, _choices(argument)
    if choices:
        return text, "" if text in choices else "is none of the choices"
    if kind == "bool":
        low = text.lower()
        return low in _TRUE, "" if low in (*_TRUE, *_FALSE) else "is neither true nor false"
    if kind in ("int", "float"):
        try:
            return (int(text) if kind == "int" else float(text)), ""
        except ValueError:
            return _BAD, "is not a whole number" if kind == "int" else "is not a number"
    if kind == "dict" and text.startswith("{"):
        try:
            return json.loads(text), ""
        except ValueError as error:
            return _BAD, f"is not JSON: {error}"
    return text, ""


def _raw(argument: Argument, said: Said) -> tuple[Any, list[Found]]:
    """Check a value that the class gets as the file has it."""
    value, kind = said.value, argument.type
    choices = _choices(argument)

    def wrong(level: Level, what: str, *, right: Any = _BAD, source: str = _POST_INIT) -> list[Found]:
        edits = () if right is _BAD else (Edit(file=said.file.name, path=(argument.name,), action="set", value=right),)
        fix = _form(argument) if right is _BAD else f"Write {json.dumps(right)}"
        return [_found(level, said, f"{_equals(said)} {what}", fix, source=source, edits=edits, code="ARGUMENT_VALUE")]

    if argument.name in _ENUMERATED and choices and value not in choices:
        if argument.name.endswith("_strategy") and value is False:
            return _BAD, wrong("error", "is false to YAML, not the text no", right="no")
        near = nearest(str(value), choices)
        return _BAD, wrong("error", "is none of the choices", right=near[0] if near else _BAD)
    if value is None:
        if "None" in argument.annotation or kind not in ("int", "float"):
            return value, []
        return _BAD, wrong("error", "is null where a number is needed")
    if kind in ("int", "float") and isinstance(value, list | dict):
        return _BAD, wrong("error", f"is a {type(value).__name__} where a number is needed")
    if argument.name in ("output_dir", "metric_for_best_model") and not isinstance(value, str):
        return _BAD, wrong("error", "is no text", right=str(value))
    if kind in ("int", "float") and isinstance(value, str) and "str" not in argument.annotation:
        number, what = _converted(argument, value)
        right = _BAD if what else number
        because = ": PyYAML takes a number such as 2e-5 for a text" if kind == "float" and not what else ""
        return _BAD, wrong(
            "error", f"is a text where a number is needed{because}", right=right, source=_use_of(argument)
        )
    if kind == "int" and isinstance(value, float):
        right = int(value) if value.is_integer() else _BAD
        fails = argument.name in _WHOLE and (value != 0 or not argument.name.startswith("dataloader"))
        found = wrong("error" if fails else "warning", "is no whole number", right=right, source=_use_of(argument))
        return (_BAD if fails else value), found
    if kind == "bool" and isinstance(value, str) and "str" not in argument.annotation:
        low = value.lower()
        right = low in _TRUE if low in (*_TRUE, *_FALSE) else _BAD
        return bool(value), wrong("warning", f"is a text, which counts as {str(bool(value)).lower()}", right=right)
    return value, []


def _use_of(argument: Argument) -> str:
    return f"{argument.package} {argument.file} {argument.owner}, which does not convert it; it fails where it is used"


def _choices(argument: Argument) -> tuple[str, ...]:
    return choices_of(_ENUMERATED[argument.name]) if argument.name in _ENUMERATED else argument.choices


def _form(argument: Argument) -> str:
    choices = _choices(argument)
    if choices:
        return f"Write one of {', '.join(choices[:30])}{' …' if len(choices) > 30 else ''}"
    forms = {"int": "Write a whole number", "float": "Write a number", "bool": "Write true or false"}
    return forms.get(argument.type, f"Write a value of the type {argument.annotation}")


def _combinations(values: Mapping[str, Any], setup: Setup) -> Iterator[Found]:
    """Yield combinations of valid values that the class or Trainer refuses."""
    own, misnamed = argument_classes()[setup.owner], _misnamed(setup)

    def get(name: str) -> Any:
        if name in misnamed:
            raise NotKnownError
        return values.get(name, own[name].default if name in own else None)

    def place(*names: str) -> Said | None:
        return next((setup.said[name] for name in names if name in setup.said), None)

    for names, level, message, fix, source in refused_combinations(get):
        said = place(*names)
        if said is not None:
            yield _found(level, said, f"{_equals(said)}: {message}", fix, source=source, code="ARGUMENT_COMBINATION")
