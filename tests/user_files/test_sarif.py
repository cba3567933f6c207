"""The log is SARIF 2.1.0: another program reads it, and it has each finding once, in its place."""

from __future__ import annotations

import json

import pytest
from sarif.loader import load_sarif_file

from toolkit.user_files.check import check_files
from toolkit.user_files.sarif import sarif


def test_another_program_reads_each_finding_in_its_place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my ds.json").write_text(
        '{\n"train_batch_size": "8",\n"gradient_cliping": 1.0,\n"wall_clock_breakdown": true}'
    )
    report = check_files(["my ds.json", "accelerate launch --num_proceses 2 train.py"])
    (tmp_path / "log.sarif").write_text(json.dumps(sarif(report)))
    log = load_sarif_file("log.sarif")
    records = log.get_records()
    assert [(row["Code"], row["Severity"]) for row in records] == [(each.code, each.level) for each in report.found]
    assert {row["Location"] for row in records} >= {"my%20ds.json"}
    assert log.get_distinct_tool_names() == ["toolkit validate"]
    assert {row["Line"] for row in records} >= {2, 3, 4}


def test_a_run_without_findings_is_a_log_too():
    log = sarif(check_files([]))
    assert (log["version"], log["runs"][0]["results"]) == ("2.1.0", [])


@pytest.mark.parametrize("code", ["DEEPSPEED_VALUE"])
def test_rules_are_the_codes(tmp_path, code):
    (tmp_path / "ds.json").write_text('{"train_batch_size": "8"}')
    run = sarif(check_files([tmp_path / "ds.json"]))["runs"][0]
    ids = [rule["id"] for rule in run["tool"]["driver"]["rules"]]
    assert code in ids
    assert all(ids[result["ruleIndex"]] == result["ruleId"] for result in run["results"])


@pytest.mark.parametrize(
    "line",
    [
        "export HF_TOKEN=s3cret",
        'MY_PASSWORD="s3cret b"',
        "HF_TOKEN s3cret",
        'URL="http://ann:s3cret@host b"',
        'X="--token s3cret"',
    ],
)
def test_no_report_repeats_a_credential(tmp_path, line):
    (tmp_path / ".deepspeed_env").write_text(f"{line}\n")
    report = check_files([tmp_path / ".deepspeed_env"])
    (found,) = report.found
    assert found.code == "DEEPSPEED_ENV_LINE"
    for shown in (str(found), str(found.as_dict()), json.dumps(sarif(report))):
        assert "s3cret" not in shown


def test_rules_have_the_texts_of_the_page(tmp_path):
    (tmp_path / "ds.json").write_text('{"train_batch_size": "8", "gradient_cliping": 1.0}')
    rules = sarif(check_files([tmp_path / "ds.json"]))["runs"][0]["tool"]["driver"]["rules"]
    assert {rule["id"] for rule in rules} >= {"DEEPSPEED_VALUE", "DEEPSPEED_UNKNOWN"}
    assert all(rule["fullDescription"]["text"] in rule["help"]["text"] for rule in rules)
