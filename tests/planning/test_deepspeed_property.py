"""Whatever we accept, DeepSpeed, Accelerate and transformers accept and use; whatever we refuse, they refuse or would spoil."""

import json
from typing import Any

import pytest
import test_deepspeed_traps
import yaml
from accelerate.commands.config.config_args import ClusterConfig
from accelerate.utils import DeepSpeedPlugin
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from plan_jobs import job_of, jobs, plan_of, resolved, sections
from ranks import one_rank

from toolkit.deepspeed_spec.job_section import job_keys
from toolkit.deepspeed_spec.old_keys import REMOVED
from toolkit.deepspeed_spec.schema import DeepSpeedConfig as Schema
from toolkit.deepspeed_spec.schema import key_of, section_of
from toolkit.errors import PlanError
from toolkit.planning.deepspeed_config import merge

# Codes about keys that are ours alone: no library sees them.
OWN = {
    "OFFLOAD_ENGINE", "OFFLOAD_PARTIAL_ENGINE", "OFFLOAD_RATIO", "OFFLOAD_PARTIAL_SIZE", "OFFLOAD_ACTIVATIONS", "NUMA_CARD", "LORA_UNUSED", "HUB_UNUSED", "WARMUP_CONFLICT",
    "LEARNING_RATE_SCALING", "EVAL_WITHOUT_DATA", "PACKING_COMPILE", "OFFLOAD_HOST_MEMORY", "LORA_DROPOUT_EXPERTS",
    "OFFLOAD_NVME_FROZEN", "QLORA_STAGE", "OFFLOAD_OPTIMIZER", "LORA_UNSUPPORTED", "LORA_ADAPTER", "WEIGHTS_PATTERN", "WEIGHTS_CHOICE", "STRATEGY_KEY", "STRATEGY_REPLICAS", "COMM_HOOK", "STRATEGY_UNSUPPORTED", "LOSS_CARD", "LOSS_PRECISION", "FP8_UNUSED",
    "TP_HEADS", "TP_EXPERTS", "TP_UNSUPPORTED", "TP_SEQUENCE", "TP_ZERO_STAGE", "CONTEXT_HEADS", "CONTEXT_SEQUENCE", "CONTEXT_UNSUPPORTED", "TILED_MLP",
    "DEEPSPEED_GROUPS", "DEEPSPEED_UNSUPPORTED", "ATTENTION_CLASS", "CHECKPOINTING_LAYERS", "LORA_TARGETS", "FP8_LAYERS",
    "KERNELS_CARD", "KERNELS_MODEL", "KERNELS_COMPILE",
    "BEST_METRIC", "BEST_STEPS", "BEST_UNUSED", "DATA_SOURCES", "GROUP_BY_LENGTH", "LOSS_OPTION", "METRICS_LOGITS",
    "PIPELINE_UNUSED", "PARTITION_STAGES", "PARTITION_LAYERS", "SCHEDULE_VIRTUAL_STAGES", "ZERO_BUBBLE_UNSUPPORTED", "PIPELINE_ZERO_STAGE", "PIPELINE_BLOCKING_OPTION", "PIPELINE_UNSUPPORTED", "SAVE_ONLY_MODEL", "CHECKPOINTING_KEEP",
    "STREAMING", "ADDED_TOKENS", "SAVE_ASYNC", "SCHEDULE_FREE", "LORA_PATTERN", "PROFILE_STEPS",
}  # fmt: skip
# Of `toolkit.topology`, which the rules ask.
PLACEMENT = {"GRID_WORLD", "TP_SPANS_NODES"}
SLOW = (HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large)


class World:
    """The part of an mpu that DeepSpeedConfig asks for."""

    def __init__(self, size: int) -> None:
        self.size = size

    def get_data_parallel_world_size(self) -> int:
        return self.size


class Recorder(dict):
    """A mapping that remembers which of its keys were read, at every level."""

    def __init__(self, value: dict[str, Any]) -> None:
        super().__init__({key: Recorder(item) if isinstance(item, dict) else item for key, item in value.items()})
        self.read: set[Any] = set()

    def get(self, key: Any, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)

    def __getitem__(self, key: Any) -> Any:
        self.read.add(key)
        return super().__getitem__(key)

    def __copy__(self) -> "Recorder":
        return self


@pytest.fixture(scope="module", autouse=True)
def group():
    with one_rank():
        yield


def parse(config: dict[str, Any], ranks: int) -> tuple[DeepSpeedConfig, Recorder]:
    recorder = Recorder(config)
    return DeepSpeedConfig(recorder, mpu=World(ranks)), recorder


def known_top_level_keys() -> set[str]:
    return parse({"train_batch_size": 1}, 1)[1].read - set(REMOVED)


# Values of every kind, the right one among them often enough.
VALUES = st.one_of(
    st.booleans(), st.integers(-1, 100), st.sampled_from([10**6, 5 * 10**8]), st.floats(-1, 100), st.none(),
    st.sampled_from(["auto", "5", "fp16", "fp32", "cpu", "", "5e8"]), st.just({}), st.just([1]),
)  # fmt: skip
RIGHT = {bool: st.booleans(), int: st.integers(1, 64).map(lambda half: 2 * half), float: st.floats(0.5, 64)}
WORDS = {
    "communication_data_type": st.sampled_from(["fp16", "bf16", "fp32"]),
    "log_level": st.sampled_from(["debug", "info", "warning", "error", "critical"]),
    "output_file": st.just("out.txt"),
    "prof_ops": st.just(["all_reduce"]),
    "enabled": st.just(True),
    "use_gds": st.just(False),  # DeepSpeed asks the accelerator of this machine; test_deepspeed_traps shows it
}
IN_A_JOB = frozenset(job_keys())


def right_value(name: str, annotation: Any, prefix: str) -> st.SearchStrategy[Any]:
    """Values of a schema field's own type; sections are drawn key by key."""
    section = section_of(annotation)
    if section is not None:
        return right_section(section, f"{prefix}{name}.")
    return WORDS[name] if name in WORDS else RIGHT[next(kind for kind in RIGHT if kind.__name__ in str(annotation))]


def right_section(model: Any, prefix: str = "") -> st.SearchStrategy[dict[str, Any]]:
    names = {key_of(name, model): field.annotation for name, field in model.model_fields.items()}
    fields = {key: right_value(key, kind, prefix) for key, kind in names.items() if f"{prefix}{key}" in IN_A_JOB}
    return sections(fields, at_most=3, required=("enabled",) if "enabled" in fields else ())


ZERO_KEYS = sorted({field.alias or name for name, field in DeepSpeedZeroConfig.model_fields.items()})
TOP_KEYS = ["gradient_cliping", "zero_optimisation", "foo", *[key for key in REMOVED if "." not in key]]


def wild_sections() -> st.SearchStrategy[dict[str, Any]]:
    """A section with keys that DeepSpeed knows, knew, or never knew, and any values."""
    keys = sorted({*known_top_level_keys(), *TOP_KEYS})
    outer = st.dictionaries(st.sampled_from(keys), VALUES, max_size=2)
    zero = st.dictionaries(st.sampled_from([*ZERO_KEYS, "reduce_bucket_sise", "mics_shard_size"]), VALUES, max_size=2)
    return outer | st.builds(lambda section, inner: {**section, "zero_optimization": inner}, outer, zero)


SOUND_SECTIONS = right_section(Schema)
WILD_SECTIONS = wild_sections()


def assert_used(config: dict[str, Any], ranks: int) -> DeepSpeedConfig:
    """DeepSpeed parses the configuration, reads every key of it and keeps every value."""
    assert json.loads(json.dumps(config, allow_nan=False)) == config
    assert "auto" not in leaves(config)
    assert None not in leaves(config)
    parsed, recorder = parse(config, ranks)
    assert set(config) - recorder.read == set(), "top-level keys that DeepSpeed never reads"
    for name in ("data_types", "flops_profiler", "aio"):
        assert set(config.get(name, {})) - getattr(recorder.get(name), "read", set()) == set(), name
    assert_kept(parsed.zero_config, config["zero_optimization"])
    assert_kept(parsed.float16_config, config["fp16"])
    assert_kept(parsed.bfloat16_config, config["bf16"])
    if "comms_logger" in config:
        for key, value in config["comms_logger"].items():
            assert getattr(parsed.comms_config.comms_logger, key) == value
        assert parsed.comms_config.comms_logger_enabled == config["comms_logger"]["enabled"]
    if "optimizer" in config:
        assert parsed.optimizer_params == config["optimizer"]["params"]
        assert parsed.optimizer_name in ("adamw", "lion", "SGD")
    assert parsed.grad_accum_dtype == config["data_types"]["grad_accum_dtype"]
    batch = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    for key in (*batch, "gradient_clipping", "prescale_gradients", "gradient_predivide_factor", "steps_per_print"):
        assert getattr(parsed, key) == config.get(key, getattr(parsed, key))
    assert parsed.gradient_clipping == config["gradient_clipping"]
    return parsed


def assert_kept(model: Any, section: dict[str, Any]) -> None:
    """Every key of a section is a field of DeepSpeed's model, with the same value."""
    names = {field.alias or name: name for name, field in type(model).model_fields.items()}
    for key, value in section.items():
        kept = getattr(model, names[key])
        if isinstance(value, dict):
            assert_kept(kept, value)
        else:
            assert (str(kept) if key == "nvme_path" else kept) == value, key
            assert isinstance(kept, bool) == isinstance(value, bool), key


def leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in leaves(item)]
    return [leaf for item in value for leaf in leaves(item)] if isinstance(value, list) else [value]


def attempt(job):
    try:
        return resolved(job), ()
    except PlanError as error:
        return None, error.codes


@settings(max_examples=1250, deadline=None, suppress_health_check=SLOW)
@given(job=jobs(deepspeed=st.just({}) | SOUND_SECTIONS))
def test_what_we_accept_deepspeed_accepts_and_uses(job):
    plan, _ = attempt(job)
    event("sound" if plan else "refused")
    if plan is None:
        return
    for consumer in ("toolkit", "trainer", "accelerate"):
        try:
            config = plan.deepspeed_config(consumer)
        except PlanError as error:
            assert consumer != "toolkit"
            assert all(code.startswith("INTEGRATION_") for code in error.codes)  # noqa: PT017
            continue
        assert_used(config, plan.grid.dp)
        assert ("optimizer" in config) == (consumer != "accelerate" and not job.train.in_8_bits)
        assert "scheduler" not in config


@settings(max_examples=380, deadline=None, suppress_health_check=SLOW)  # of two jobs each
@given(job=jobs(deepspeed=WILD_SECTIONS), section=WILD_SECTIONS)
def test_what_we_refuse_deepspeed_refuses_or_it_is_a_trap_that_we_can_show(job, section):
    for candidate in (job, job_of(deepspeed=section)):
        plan, codes = attempt(candidate)
        if plan is not None:
            assert_used(plan.deepspeed_config(), plan.grid.dp)
            continue
        if set(codes) <= set(test_deepspeed_traps.TRAPS) | OWN | PLACEMENT:
            continue
        # What is in neither table is refused by DeepSpeed itself, as it stands on an otherwise sound configuration.
        assert "DEEPSPEED_REMOVED" in codes
        config = merge(plan_of().deepspeed_config(), candidate.deepspeed)
        with pytest.raises(Exception):  # noqa: B017 -- DeepSpeed raises anything from TypeError to its own
            parse(config, candidate.cluster.num_ranks)


def test_the_tables_and_the_rules_name_the_same_codes():
    from test_rules import BROKEN

    ruled = {row[0] for row in BROKEN} | {
        "OFFLOAD_PARTIAL_SIZE",
        "ATTENTION_CLASS",
        "ATTENTION_SOFTCAP",
        "CHECKPOINTING_LAYERS",
    }
    assert set(test_deepspeed_traps.TRAPS) | OWN | {"DEEPSPEED_REMOVED"} == ruled
    assert not set(test_deepspeed_traps.TRAPS) & OWN


@pytest.mark.parametrize("key", sorted(REMOVED))
def test_a_removed_key_is_refused_by_deepspeed_even_when_disabled(key):
    outer, _, inner = key.rpartition(".")
    section = {outer: {inner: False}} if outer else {inner: {"enabled": False}}
    assert attempt(job_of(deepspeed=section))[1] == ("DEEPSPEED_REMOVED",)
    with pytest.raises(Exception, match="removed"):
        parse(merge(plan_of().deepspeed_config(), section), 2)


def test_a_parser_that_ignores_a_key_is_noticed():
    config = plan_of().deepspeed_config()
    with pytest.raises(AssertionError, match="never reads"):
        assert_used({**config, "gradient_cliping": 1.0}, 2)
    with pytest.raises(AssertionError, match="reduce_bucket_size"):
        assert_used(merge(config, {"zero_optimization": {"reduce_bucket_size": True}}), 2)
    with pytest.raises(AssertionError):
        assert_used(config, 3)


@settings(max_examples=200, deadline=None, suppress_health_check=SLOW)
@given(job=jobs())
def test_accelerate_accepts_both_of_its_files(job, tmp_path_factory):
    plan, _ = attempt(job)
    if plan is None:
        return
    try:
        config, mapping = plan.deepspeed_config("accelerate"), plan.accelerate_config(deepspeed_config_file="ds.json")
    except PlanError:
        return
    path = tmp_path_factory.mktemp("accelerate") / "accelerate.yaml"
    path.write_text(yaml.safe_dump(mapping))
    cluster = ClusterConfig.from_yaml_file(str(path))
    assert cluster.num_processes == job.cluster.num_ranks
    assert cluster.num_machines == job.cluster.nodes
    assert cluster.deepspeed_config["deepspeed_config_file"] == "ds.json"
    with pytest.MonkeyPatch.context() as patch:
        # What `accelerate launch` exports: the fields of the YAML's own deepspeed_config (utils/launch.py).
        patch.setenv("ACCELERATE_CONFIG_DS_FIELDS", ",".join(mapping["deepspeed_config"]))
        plugin = DeepSpeedPlugin(hf_ds_config=json.loads(json.dumps(config)))
        plugin._deepspeed_config_checks()
    assert plugin.zero_stage == plan.settings.zero_stage
    assert plugin.deepspeed_config["gradient_clipping"] == plan.job.train.max_grad_norm
