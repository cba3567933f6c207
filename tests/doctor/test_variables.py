"""The table of environment variables: what is said of a value, and what is not said."""

from __future__ import annotations

from toolkit.doctor.kinds import LEVELS
from toolkit.doctor.variables import VARIABLES, variable_findings


def said(**environment: str) -> dict[str, tuple[str, str]]:
    return {
        finding.seen.partition("=")[0]: (finding.level, finding.why) for finding in variable_findings(environment) if finding.code == "VARIABLE"
    }  # fmt: skip


def test_every_row_is_whole_and_stands_once() -> None:
    keys = [(row.name, row.only) for row in VARIABLES]
    assert len(keys) == len(set(keys)) > 90
    for row in VARIABLES:
        assert row.effect, row
        assert row.source, row
        assert row.level in LEVELS
        for value in row.only or {"anything"}:
            (finding,) = variable_findings({row.name: value})
            assert finding.level == row.level, (row.name, value)


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
