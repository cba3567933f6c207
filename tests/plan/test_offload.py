import pytest
from plan_jobs import plan_of

from toolkit.plan.offload import PROFILES, offload_section
from toolkit.spec.job import Offload


def section(name, **changes):
    given = {"ratio": 0.5, "nvme_path": "/local", "pin_memory": True, "largest_parameter": 10, **changes}
    return offload_section(PROFILES[name], **given)


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


def test_nvme_profiles_name_their_folder_and_their_buffers():
    optimizer = {"device": "nvme", "pin_memory": True, "nvme_path": "/local", "buffer_count": 4}
    assert section("optimizer-nvme") == {"offload_optimizer": optimizer}
    parameters = section("full-nvme")["offload_param"]
    assert parameters == {
        "device": "nvme", "pin_memory": True, "nvme_path": "/local", "buffer_count": 5, "buffer_size": 100_000_000,
    }  # fmt: skip


def test_a_buffer_holds_the_largest_parameter():
    assert section("full-nvme", largest_parameter=128_256 * 4096)["offload_param"]["buffer_size"] == 128_256 * 4096
    assert section("full-nvme", largest_parameter=None)["offload_param"]["buffer_size"] == 100_000_000


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
