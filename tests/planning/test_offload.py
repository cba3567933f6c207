import pytest
from plan_jobs import plan_of

from toolkit.config.job import Offload
from toolkit.errors import SpecError
from toolkit.planning.offload import PROFILES, offload_keys, offload_section, parameter_buffer_size


def section(name, **changes):
    given = {
        "zero_stage": 3,
        "ratio": 0.5,
        "nvme_path": "/local",
        "pin_memory": True,
        "swap_buffer_size": 10,
        **changes,
    }
    return offload_keys(PROFILES[name], **given)


def test_every_name_of_the_job_file_has_a_profile():
    assert set(PROFILES) == set(Offload.__args__)
    assert all(name == profile.name for name, profile in PROFILES.items())


def test_what_moves_nothing_adds_no_key():
    assert section("none") == {}
    assert section("activations-cpu") == {}


def test_cpu_profiles():
    cpu = {"device": "cpu", "pin_memory": True}
    assert section("optimizer-cpu") == {"offload_optimizer": cpu}
    assert section("full-cpu") == {"offload_optimizer": cpu, "offload_param": cpu}
    assert section("optimizer-cpu-partial")["offload_optimizer"] == {**cpu, "ratio": 0.5}
    assert section("optimizer-cpu-partial", zero_stage=2)["offload_optimizer"] == cpu, "a step of the toolkit's own"


def test_nvme_profiles_name_their_folder_and_their_buffers():
    optimizer = {"device": "nvme", "pin_memory": True, "nvme_path": "/local", "buffer_count": 4}
    assert section("optimizer-nvme") == {"offload_optimizer": optimizer}
    parameters = section("full-nvme")["offload_param"]
    assert parameters == {
        "device": "nvme", "pin_memory": True, "nvme_path": "/local", "buffer_count": 5, "buffer_size": 10,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("largest", "model", "ranks", "size"),
    [
        (128_256 * 4096, 8_000_000_000, 4, 128_256 * 1024),  # a rank's share of the embedding
        (1_000_000, 8_000_000_000, 4, 100_000_000),  # DeepSpeed's default
        (1_000_000, 3_000_001, 2, 1_500_001),  # the rank's share of all of a small model
        (1_000_000, None, 2, 100_000_000),
    ],
)
def test_a_swap_buffer_holds_any_parameter(largest, model, ranks, size):
    found = parameter_buffer_size(largest_parameter=largest, num_parameters=model, dp_size=ranks)
    assert found == size


def test_experts_of_a_layer_are_one_parameter():
    plan = plan_of(
        model="mixtral-8x7b", ranks=4, nvme_path="/local", parallel={"offload": "full-nvme", "zero_stage": 3}
    )
    zero = plan.deepspeed_config()["zero_optimization"]
    assert zero["offload_param"]["buffer_size"] == 8 * 2 * 14336 * 4096 // 4
    assert zero["sub_group_size"] == 100_000_000


def test_no_pinned_memory_where_nothing_crosses_pcie():
    plan = plan_of(gpu="cpu", parallel={"zero_stage": 3, "offload": "full-cpu"}, train={"optimizer": "adamw_torch"})
    zero = plan.deepspeed_config()["zero_optimization"]
    assert zero["offload_optimizer"] == {"device": "cpu", "pin_memory": False}
    assert zero["offload_param"] == {"device": "cpu", "pin_memory": False}


@pytest.mark.parametrize("name", sorted(PROFILES))
def test_every_profile_is_explained_and_carried_by_its_lowest_stage(name):
    profile = PROFILES[name]
    assert len(profile.explanation) > 20
    plan = plan_of(
        parallel={"offload": name, "zero_stage": profile.min_zero_stage},
        train={"gradient_checkpointing": True},
        **({"nvme_path": "/local"} if profile.needs_nvme else {}),
    )
    assert profile.explanation in plan.explain()
    zero = plan.deepspeed_config()["zero_optimization"]
    assert ("offload_optimizer" in zero) == (profile.optimizer is not None)
    assert ("offload_param" in zero) == (profile.parameters is not None)


@pytest.mark.parametrize("name", [name for name, profile in PROFILES.items() if not profile.activations])
def test_a_script_of_ones_own_gets_the_keys_of_a_plan(name):
    profile = PROFILES[name]
    given = {"nvme_path": "/local"} if profile.needs_nvme else {}
    ours = offload_section(name, zero_stage=3, **given)
    cluster = {"nvme_path": "/local", "host_memory_gib": 2000} if profile.needs_nvme else {"host_memory_gib": 2000}
    planned = plan_of(ranks=8, **cluster, parallel={"offload": name, "zero_stage": 3})
    theirs = planned.deepspeed_config()["zero_optimization"]
    for key in ("offload_optimizer", "offload_param"):
        expected = theirs.get(key)
        if expected is not None:
            expected = {inner: value for inner, value in expected.items() if inner != "buffer_size"}  # by the model
        found = ours.get(key)
        assert (found and {k: v for k, v in found.items() if k != "buffer_size"}) == expected


@pytest.mark.parametrize(
    ("profile", "given", "key", "says"),
    [
        ("activations-cpu", {}, "profile", "the model moves"),
        ("full-cpu", {"zero_stage": 2}, "zero_stage", "it needs ZeRO-3"),
        ("optimizer-cpu", {"zero_stage": 0}, "zero_stage", "a ZeRO stage from 1 to 3"),
        ("full-nvme", {}, "nvme_path", "without nvme_path"),
        ("full-cpu", {"nvme_path": "/local"}, "nvme_path", "which writes no files"),
        ("full-cpu", {"offload_ratio": 0.5}, "offload_ratio", "all of the optimizer state or none"),
        ("optimizer-cpu-partial", {"offload_ratio": 1.5}, "offload_ratio", "offload_ratio=1.5"),
    ],
)
def test_a_section_that_cannot_be_is_refused(profile, given, key, says):
    with pytest.raises(SpecError, match=says) as refused:
        offload_section(profile, **given)
    assert [(problem.code, problem.key) for problem in refused.value.problems] == [("OFFLOAD_PROFILE", key)]
