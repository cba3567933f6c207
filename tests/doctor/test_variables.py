"""The table of environment variables: what is said of a value, and what is not said."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from toolkit.doctor.kinds import LEVELS
from toolkit.doctor.variables import VARIABLES, variable_findings

# Values of variables that may not have any.
SOUND = {
    **dict.fromkeys(("CUDA_HOME", "CUDA_PATH"), "{cuda}"),
    **dict.fromkeys(
        ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"), "roundup_power2_divisions:[256:1,>:4],backend:native"
    ),
    **dict.fromkeys(("MASTER_PORT", "MAX_JOBS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "HF_HUB_DOWNLOAD_TIMEOUT"), "29"),
    "TMPDIR": "{cuda}",
}


def said(**environment: str) -> dict[str, tuple[str, str]]:
    return {
        finding.seen.partition("=")[0]: (finding.level, finding.why) for finding in variable_findings(environment) if finding.code == "VARIABLE"
    }  # fmt: skip


def test_every_row_is_whole_and_stands_once(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").touch()
    keys = [(row.name, row.only) for row in VARIABLES]
    assert len(keys) == len(set(keys)) > 90
    for row in VARIABLES:
        assert row.effect, row
        assert row.source, row
        assert row.level in LEVELS
        for value in row.only or {SOUND.get(row.name, "anything")}:
            (finding,) = variable_findings({row.name: value.format(cuda=tmp_path)})
            expected = "ENVIRONMENT" if row.level == "ok" else "VARIABLE"
            assert (finding.code, finding.level) == (expected, row.level), (row.name, value)


def test_values_decide() -> None:
    assert said(NCCL_P2P_DISABLE="1")["NCCL_P2P_DISABLE"][0] == "warning"
    assert said(NCCL_P2P_DISABLE="0") == {}
    assert "one thread" in said(OMP_NUM_THREADS="1")["OMP_NUM_THREADS"][1]
    assert "so many threads" in said(OMP_NUM_THREADS="8")["OMP_NUM_THREADS"][1]
    assert said(HF_HUB_OFFLINE="0") == {}
    assert said(TOKENIZERS_PARALLELISM="false") == {}


def test_what_no_table_has_is_named_and_what_images_say_of_themselves_is_not() -> None:
    assert "is not in the table" in said(NCCL_NEWEST_SWITCH="1")["NCCL_NEWEST_SWITCH"][1]
    assert said(NCCL_VERSION="2.28.3", CUDA_VERSION="13.0", PATH="/usr/bin", EDITOR="vi") == {}
    (finding,) = variable_findings({"HOME": "/root"})
    assert finding.code == "ENVIRONMENT"


def test_secrets_are_not_shown_and_long_values_are_cut() -> None:
    (finding,) = variable_findings({"HUGGING_FACE_HUB_TOKEN": "hf_secret"})
    assert "hf_secret" not in finding.seen
    (finding,) = variable_findings({"HF_ENDPOINT": "https://ann:s3cret@hub.example"})
    assert finding.seen == "HF_ENDPOINT=https://ann:********@hub.example"
    (finding,) = variable_findings({"LD_LIBRARY_PATH": "/a:" * 100})
    assert len(finding.seen) < 120


def test_what_a_launcher_sets_is_its_own() -> None:
    of_torchrun = {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    assert said(**of_torchrun) == {}
    assert said(RANK="0")["RANK"][0] == "warning", "left over from another session"


@pytest.mark.parametrize("value", ["true", "True", "yes", "ON", "1"])
def test_what_libraries_take_for_true_is_found(value: str) -> None:
    assert "nothing is fetched" in said(HF_HUB_OFFLINE=value)["HF_HUB_OFFLINE"][1]


@pytest.mark.parametrize(
    ("name", "value", "part"),
    [
        ("MASTER_PORT", "abc", "is not a port"),
        ("MASTER_PORT", "70000", "is not a port"),
        ("MAX_JOBS", "x", "is not a whole number"),
        ("TMPDIR", "/nonexistent", "is not a folder that can be written"),
        ("CUDA_HOME", "/nope", "has no bin/nvcc"),
        ("PYTORCH_CUDA_ALLOC_CONF", "nonsense", "is not of the form key:value"),
        ("OMP_NUM_THREADS", "0", "is not a number of threads"),
        ("HF_HUB_DOWNLOAD_TIMEOUT", "1.5", "is not a whole number of seconds"),
    ],
)
def test_a_value_that_nothing_can_use_is_a_warning(name: str, value: str, part: str) -> None:
    (finding,) = variable_findings({name: value})
    assert (finding.code, finding.level) == ("VARIABLE_MALFORMED", "warning")
    assert finding.seen.startswith(f"{name}={value} {part}")
    assert finding.repair.startswith(f"unset {name}")


def test_the_hub_refuses_what_is_said_that_it_refuses() -> None:
    code = "import os; os.environ['HF_HUB_DOWNLOAD_TIMEOUT'] = '1.5'; import huggingface_hub.constants"
    assert "ValueError" in subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr


def test_no_repair_deletes_a_list_of_folders() -> None:
    for name in ("LD_LIBRARY_PATH", "PYTHONPATH"):
        (finding,) = variable_findings({name: "/a:/b"})
        assert "unset" not in finding.repair
