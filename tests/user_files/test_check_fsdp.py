"""The section fsdp_config: each verdict is that of Accelerate's own plugin."""

from __future__ import annotations

import os

import pytest
import yaml

from toolkit.user_files.check import check_files

# Section, levels of the findings, and whether the plugin raises. Truth values are texts, as the launcher passes them on.
SECTIONS = [
    ({"fsdp_version": 1, "fsdp_sharding_strategy": "hybrid_shard"}, [], False),
    ({"fsdp_version": 1, "fsdp_sharding_strategy": 5, "fsdp_state_dict_type": "1"}, [], False),
    ({"fsdp_version": 1, "fsdp_sharding_strategy": "FULL_SHRD"}, ["error"], True),
    ({"fsdp_version": 1, "fsdp_state_dict_type": "SHARDED"}, ["error"], True),
    ({"fsdp_version": 1, "fsdp_offload_params": "yess"}, ["error"], True),
    ({"fsdp_version": 1, "fsdp_auto_wrap_policy": "TRANSFORMER"}, ["error"], True),
    ({"fsdp_version": 1, "fsdp_backward_prefetch": "BACKWARD"}, ["error"], True),
    ({"fsdp_version": 1, "fsdp_reshard_after_forward": "maybe"}, ["warning"], False),
    ({"fsdp_version": 1, "fsdp_auto_wrap_polcy": "NO_WRAP"}, ["warning"], False),
    ({"fsdp_version": 1, "fsdp_activation_checkpointing": "true", "fsdp_activation_checkpointing_offload": "true"}, ["error"], True),
    ({"fsdp_version": 2, "fsdp_reshard_after_forward": "true", "fsdp_state_dict_type": "SHARDED_STATE_DICT"}, [], False),
    ({"fsdp_version": 2, "fsdp_reshard_after_forward": "FULL_SHARD"}, ["error"], True),
    ({"fsdp_version": 2, "fsdp_sharding_strategy": "FULL_SHRD"}, ["warning"], False),
    ({"fsdp_version": 2, "fsdp_state_dict_type": "LOCAL_STATE_DICT"}, ["error"], True),
    ({"fsdp_version": 2, "fsdp_activation_checkpointing_offload": "true"}, ["error"], True),
    ({"fsdp_version": 2, "auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": "many"}, ["error"], True),
]  # fmt: skip


@pytest.mark.parametrize(("section", "levels", "raises"), SECTIONS)
def test_the_verdict_is_the_plugins(tmp_path, monkeypatch, section, levels, raises):
    from accelerate.utils import FullyShardedDataParallelPlugin

    cluster = {"distributed_type": "FSDP", "num_processes": 8, "num_machines": 1, "fsdp_config": section}
    (tmp_path / "acc.yaml").write_text(yaml.safe_dump(cluster))
    assert [each.level for each in check_files([tmp_path / "acc.yaml"]).found] == levels
    for name in [name for name in os.environ if name.startswith(("FSDP_", "ACCELERATE_"))]:  # of a plugin made before
        monkeypatch.delenv(name)
    monkeypatch.setenv("FSDP_SYNC_MODULE_STATES", "false")  # which asks for a card
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")
    for key, value in section.items():
        monkeypatch.setenv(f"FSDP_{key.removeprefix('fsdp_').upper()}", str(value))
    try:
        FullyShardedDataParallelPlugin()
    except (ValueError, KeyError):
        assert raises
    else:
        assert not raises


def test_loading_on_one_rank_needs_the_states_to_be_shared(tmp_path):
    section = {"fsdp_version": 1, "fsdp_sync_module_states": False}
    cluster = {"distributed_type": "FSDP", "num_processes": 8, "num_machines": 1, "fsdp_config": section}
    (tmp_path / "acc.yaml").write_text(yaml.safe_dump(cluster))
    (found,) = check_files([tmp_path / "acc.yaml"]).found
    assert (found.level, found.key) == ("error", "fsdp_config.fsdp_sync_module_states")
