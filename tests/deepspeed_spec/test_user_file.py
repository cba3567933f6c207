"""A user's own DeepSpeed file or dict: what DeepSpeed takes is taken, what it refuses is refused, what it ignores is said."""

from __future__ import annotations

import copy
import json

import pytest
from published_files import ACCEPTED, REFUSED

from toolkit.deepspeed_spec.job_section import check_section
from toolkit.deepspeed_spec.user_file import read_user_config
from toolkit.errors import SpecError, ToolkitError


def zero(**keys):
    return {"zero_optimization": keys}


def codes(config):
    with pytest.raises(SpecError) as caught:
        read_user_config(config)
    return list(caught.value.codes)


def note(config):
    """The only note on a configuration."""
    (said,) = read_user_config(config).notes
    return said.removeprefix("deepspeed_config: ")


@pytest.fixture(scope="module")
def deepspeed_config():
    import logging

    from deepspeed.runtime.config import DeepSpeedConfig

    logging.disable(logging.CRITICAL)
    yield DeepSpeedConfig
    logging.disable(logging.NOTSET)


def filled(config):
    """What is left of a file once Trainer has filled in its "auto"."""
    made = copy.deepcopy(config) | {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 1,
    }
    made["bf16"], made["fp16"] = {"enabled": True}, {**made.get("fp16", {}), "enabled": False}
    return made | {"gradient_clipping": 1.0}


@pytest.mark.parametrize("name", [*ACCEPTED, *REFUSED])
def test_published_files_are_taken_as_deepspeed_takes_them(name, deepspeed_config):
    config = {**ACCEPTED, **REFUSED}[name]
    if name in ACCEPTED:
        deepspeed_config(filled(config))
        assert read_user_config(config).config["zero_optimization"]["stage"] == config["zero_optimization"]["stage"]
        return
    with pytest.raises(ValueError, match="Extra inputs are not permitted"):
        deepspeed_config(filled(config))
    with pytest.raises(SpecError) as caught:
        read_user_config(config)
    assert [(problem.code, problem.key) for problem in caught.value.problems] == [
        ("DEEPSPEED_UNKNOWN", "compile.disable"),
        ("DEEPSPEED_UNKNOWN", "compile.backend"),
    ]


def test_auto_under_the_shorter_name_is_deepspeeds_default():
    config = ACCEPTED["zero3_bf16"]
    user = read_user_config(config)
    assert "stage3_prefetch_bucket_size" not in user.config["zero_optimization"]
    assert user.config["zero_optimization"]["stage3_max_live_parameters"] == 0
    assert [said for said in user.notes if 'prefetch_bucket_size="auto", which is not filled in there' in said]
    assert read_user_config(ACCEPTED["zero3"]).config["zero_optimization"]["stage3_prefetch_bucket_size"] == "auto"


def test_spellings_that_deepspeed_takes_too():
    user = read_user_config(zero(stage="3", cpu_offload=True, max_live_parameters=5e8, offload_param=None))
    assert user.config == zero(stage=3, offload_optimizer={"device": "cpu"}, stage3_max_live_parameters=500_000_000)
    assert read_user_config({"zero_optimization": True}).config == zero(stage=1)
    old = read_user_config(
        {"zero_optimization": True, "allgather_size": 6, "bfloat16": {"enabled": True}, "bf16": None}
    )
    assert old.config == {**zero(stage=1, allgather_bucket_size=6), "bf16": {"enabled": True}}
    assert read_user_config({"data_types": {"grad_accum_dtype": "torch.float32"}}).config["data_types"] == {
        "grad_accum_dtype": "fp32"
    }
    assert not old.notes


@pytest.mark.parametrize(
    ("config", "found"),
    [
        (zero(reduce_bucket=1), ["DEEPSPEED_UNKNOWN"]),
        (zero(offload_optimizer={"buffer_size": 1}), ["DEEPSPEED_UNKNOWN"]),
        (zero(stage=4), ["DEEPSPEED_VALUE"]),
        (zero(reduce_bucket_size=1.5), ["DEEPSPEED_VALUE"]),
        (zero(reduce_bucket_size="5e8"), ["DEEPSPEED_VALUE"]),
        (zero(offload_optimizer={"device": "gpu"}), ["DEEPSPEED_VALUE"]),
        (zero(stage=2, offload_optimizer={"ratio": 0.5}), ["DEEPSPEED_VALUE"]),
        (zero(cpu_offload=True, offload_optimizer={"device": "cpu"}), ["DEEPSPEED_VALUE"]),
        (zero(stage=3, offload_optimizer={"device": "nvme"}), ["DEEPSPEED_VALUE"]),
        ({"optimizer": {"type": "AdamW", "params": {"max_grad_norm": 1.0}}}, ["DEEPSPEED_VALUE"]),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, ["DEEPSPEED_VALUE"]),
        ({"train_batch_size": "8"}, ["DEEPSPEED_VALUE"]),
        ({"train_batch_size": float("inf")}, ["DEEPSPEED_VALUE"]),
        ({"fp16": {"enabled": True, "loss_scale": 10**310}}, ["DEEPSPEED_VALUE"]),
        ({"train_micro_batch_size_per_gpu": 1.5}, ["DEEPSPEED_VALUE"]),
        ({"communication_data_type": "auto"}, ["DEEPSPEED_AUTO"]),
        (zero(stage="auto"), ["DEEPSPEED_AUTO"]),
        ({"elasticity": {"enabled": False}}, ["DEEPSPEED_REMOVED"]),
        (zero(mics_shard_size=2), ["DEEPSPEED_REMOVED"]),
        ({"optimizer": {"type": "OneBitAdam"}}, ["ESTIMATE_UNSUPPORTED"]),
        ({"optimizer": {"type": "sgd"}}, ["ESTIMATE_UNSUPPORTED"]),
        ({"torch_autocast": {"enabled": True}}, ["ESTIMATE_UNSUPPORTED"]),
        ({"tensor_parallel": {"autotp_size": 2}}, ["ESTIMATE_UNSUPPORTED"]),
        ({"sequence_parallel_size": 2}, ["ESTIMATE_UNSUPPORTED"]),
        (zero(zenflow={}), ["ESTIMATE_UNSUPPORTED"]),
        ({"zero_optimisation": {"stage": 3}}, ["DEEPSPEED_UNKNOWN"]),
        ({"stage": 3}, ["DEEPSPEED_UNKNOWN"]),
        ({"gradient_cliping": 1, "amp": {}, "steps_per_print": "auto"}, ["DEEPSPEED_REMOVED", "DEEPSPEED_UNKNOWN", "DEEPSPEED_AUTO"]),
    ],
)  # fmt: skip
def test_what_is_refused(config, found):
    assert codes(config) == found


@pytest.mark.parametrize(
    ("config", "meant"),
    [
        (zero(reduce_buket_size=1), "zero_optimization.reduce_bucket_size"),
        ({"zero_optimisation": {"stage": 3}}, "zero_optimization"),
        ({"overlap_comm": True}, "zero_optimization.overlap_comm"),
        ({"bf16": {"loss_scale": 0}}, "fp16.loss_scale"),
        ({"flops_profiler": {"profile_stpe": 1}}, "flops_profiler.profile_step"),
    ],
)
def test_the_key_that_was_meant_is_shown(config, meant):
    with pytest.raises(SpecError, match=rf"Did you mean {meant}\. \[DEEPSPEED_UNKNOWN\]"):
        read_user_config(config)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"_comment": "ours"}, "_comment is not a key of DeepSpeed, which ignores it"),
        ({"comms_config": {"verbose": False}}, "comms_config is not a key of DeepSpeed, which ignores it"),
        ({"monitor_config": {"enabled": True}}, "monitor_config is not a key of DeepSpeed, which ignores it"),
        ({"checkpoint": {"anything": 1}}, "checkpoint.anything is not a key of DeepSpeed, which ignores it"),
        (zero(sub_group_size="auto"), 'zero_optimization.sub_group_size="auto", which is not filled in there: DeepSpeed uses its default, 1000000000'),
        (zero(stage=2, reduce_bucket_size=True), "zero_optimization.reduce_bucket_size=True (bool), which DeepSpeed reads as 1"),
        ({"dump_state": "false"}, "dump_state='false' (str), which DeepSpeed reads as true"),
        ({"comms_logger": {"enabled": False, "verbose": False}}, "comms_logger.enabled=false has no effect with a section comms_logger, which by itself turns the logger on"),
        (zero(stage=2, offload_param={"device": "cpu"}), "zero_optimization.offload_param has no effect with zero_stage=2: only stage 3 reads it"),
        (zero(stage=0, offload_optimizer={"device": "cpu"}), "zero_optimization.offload_optimizer has no effect with zero_stage=0, where DeepSpeed swaps in its CPU optimizer and moves nothing"),
        (zero(stage=2, stage3_max_live_parameters=1, sub_group_size=5), "zero_optimization.sub_group_size, zero_optimization.stage3_max_live_parameters have no effect with zero_stage=2: only stage 3 reads it"),
        ({"activation_checkpointing": {"cpu_checkpointing": True}}, "activation_checkpointing has no effect with a model that does not call deepspeed.checkpointing.checkpoint, and none of Hugging Face's does"),
        (zero(allgather_partitions=False), "zero_optimization.allgather_partitions has no effect with this DeepSpeed, which never reads it"),
        (zero(stage=2, cpu_offload=True, cpu_offload_use_pin_memory=False), "zero_optimization.cpu_offload_use_pin_memory has no effect with this DeepSpeed, which pins what it offloads"),
        ({"bf16": {"enabled": True}, "bfloat16": {"enabled": False}}, "bfloat16 has no effect with a section bf16, which replaces it"),
        ({"aio": {"queue_depth": 16}}, "aio has no effect with offload_optimizer.device=none and offload_param.device=none"),
        (zero(stage=2, contiguous_gradients=False, offload_optimizer={"device": "cpu"}), "zero_optimization.contiguous_gradients=false has no effect with offload_optimizer.device=cpu and offload_param.device=none, which turns it on"),
        (zero(stage=3, offload_param={"device": "cpu", "max_in_cpu": 5}), "zero_optimization.offload_param.max_in_cpu has no effect with offload_optimizer.device=none and offload_param.device=cpu"),
    ],
)  # fmt: skip
def test_what_deepspeed_goes_on_without_is_a_note(config, said):
    assert note(config) == said


@pytest.mark.parametrize(
    "config",
    [
        zero(stage=3, offload_optimizer={"device": "cpu", "buffer_count": 4, "fast_init": False, "pin_memory": True}),
        zero(stage=2, offload_param={"device": "none"}, stage3_max_live_parameters=1_000_000_000),
        {"fp16": {"enabled": False, "loss_scale": 0, "hysteresis": 2}, "bf16": {"enabled": True}},
        zero(stage=3, stage3_gather_16bit_weights_on_model_save="auto", offload_optimizer={"device": "auto"}),
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto"}}, "tensorboard": {"enabled": True}},
        {"sequence_parallel_size": 1, "tensor_parallel": {"autotp_size": 1}},
        {
            **zero(allgather_partitions=True),
            "activation_checkpointing": {"partition_activations": False, "number_checkpoints": None},
        },
    ],
)
def test_what_says_only_what_happens_anyway_needs_no_note(config):
    assert read_user_config(config).notes == ()


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("{", "DEEPSPEED_SYNTAX"),
        ("[]", "DEEPSPEED_SYNTAX"),
        ("", "DEEPSPEED_SYNTAX"),
        ('{"train_batch_size": 8, // a comment\n}', "DEEPSPEED_SYNTAX"),
        ('{"train_batch_size": NaN}', "DEEPSPEED_SYNTAX"),
        ('{"train_batch_size": ' + "1" * 5000 + "}", "DEEPSPEED_SYNTAX"),
        ('{"a":' * 10_000 + "1" + "}" * 10_000, "DEEPSPEED_SYNTAX"),
        ('{"bf16": {"enabled": true, "enabled": false}}', "DEEPSPEED_DUPLICATE"),
        (b"\xff\xfe", "FILE_UNREADABLE"),
        (None, "FILE_NOT_FOUND"),
    ],
)
def test_a_file_is_read_strictly(tmp_path, text, code):
    path = tmp_path / "ds.json"
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    for source in (path, str(path)):
        with pytest.raises(SpecError) as caught:
            read_user_config(source)
        assert caught.value.codes == (code,)


def test_a_file_that_never_ends_is_not_read_to_its_end():
    with pytest.raises(SpecError) as caught:
        read_user_config("/dev/zero")
    assert caught.value.codes == ("FILE_UNREADABLE",)


def test_comments_are_named_as_what_only_deepspeed_takes(tmp_path):
    (tmp_path / "ds.json").write_text("{ # hjson\n}")
    with pytest.raises(SpecError, match="only DeepSpeed alone accepts hjson"):
        read_user_config(tmp_path / "ds.json")


@pytest.mark.parametrize("source", [None, 3, ["ds.json"]])
def test_what_is_no_configuration_names_the_argument(source):
    with pytest.raises(SpecError, match="deepspeed_config=") as caught:
        read_user_config(source)
    assert caught.value.codes == ("DEEPSPEED_SYNTAX",)


def test_a_configuration_is_not_changed_by_reading_it():
    config = {**zero(stage=3, cpu_offload=True), "bfloat16": {"enabled": True}}
    before = copy.deepcopy(config)
    read_user_config(config)
    assert config == before


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({f"key_{number}": 1 for number in range(1001)}, "has more than 1,000 keys, far more than DeepSpeed knows"),
        (zero(**{f"key_{number}": "auto" for number in range(300_000)}), "has more than 1,000 keys"),
        ({"optimizer": {"params": {f"key_{number}": 1 for number in range(1001)}}}, "has more than 1,000 keys"),
        (json.loads('{"zero_optimization":' * 900 + "1" + "}" * 900), "is nested deeper than 32 levels"),
        ({"comms_logger": {"prof_ops": json.loads("[" * 900 + "]" * 900)}}, "is nested deeper than 32 levels"),
    ],
    ids=["many", "very many", "inside", "deep", "lists"],
)
def test_far_more_than_deepspeed_has_is_one_error_at_once(config, said):
    for read in (read_user_config, of_job):
        with pytest.raises(ToolkitError, match=said) as caught:
            read(config)
        assert caught.value.codes == ("DEEPSPEED_UNKNOWN",)


def of_job(section):
    _, problems = check_section(section)
    raise SpecError(*problems)


def test_a_key_of_a_megabyte_is_told_at_once_and_not_printed_whole():
    key = "stage" * 200_000
    with pytest.raises(SpecError) as caught:
        read_user_config(zero(**{key: 1}))
    assert caught.value.codes == ("DEEPSPEED_UNKNOWN",)
    assert len(str(caught.value)) < 1000
    assert len(note({key: 1})) < 1000
