"""What runs teach of a card, and what is kept of it."""

import json

import pytest

from toolkit.cli.app import main
from toolkit.errors import SpecError
from toolkit.memory.report.calibration import (
    Calibration,
    load_calibrations,
    read_run,
    save_calibrations,
)
from toolkit.units import GIB

PHASES = {"init": 10, "forward": 40, "backward": 50, "step": 30}


def record(*, num_ranks=1, outside=2.0, measured=None):
    return {
        "gpu": "h100-sxm-80gb",
        "num_ranks": num_ranks,
        "predicted": {**PHASES, "save": 20},
        "measured": measured or PHASES,
        "context_and_nccl_bytes": 3 * GIB,
        "reserved_bytes": 60 * GIB,
        "device_used_bytes": int((60 + outside) * GIB),
    }


def write(path, *records):
    lines = [{"step": 1, "loss": 2.0}, *({"step": 2, "memory": item} for item in records)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_calibrations_are_read_back(tmp_path):
    path = tmp_path / "a" / "calibration.json"
    assert load_calibrations(path) == {}
    save_calibrations(path, {"l4-24gb": Calibration(context_bytes=7)})
    assert load_calibrations(path) == {"l4-24gb": Calibration(context_bytes=7)}
    assert [item.name for item in path.parent.iterdir()] == ["calibration.json"]


@pytest.mark.parametrize("text", ["", "[]", '{"h100": {"context_bytes": -1}}', '{"h100": {"slack": 1}}', "{"])
def test_a_damaged_calibration_is_named(tmp_path, text):
    path = tmp_path / "calibration.json"
    path.write_text(text)
    with pytest.raises(SpecError) as caught:
        load_calibrations(path)
    assert caught.value.problems[0].code == "CALIBRATION_UNREADABLE"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("{", "METRICS_UNREADABLE"),
        ("[" * 100_000, "METRICS_UNREADABLE"),
        ('{"step": 1, "loss": 2}\n', "METRICS_NO_MEMORY"),
        ('{"step": 1, "memory": {"gpu": 3}}\n', "METRICS_UNREADABLE"),
    ],
)
def test_metrics_without_a_comparison_are_named(tmp_path, text, code):
    path = tmp_path / "metrics.jsonl"
    path.write_text(text)
    with pytest.raises(SpecError) as caught:
        read_run(path)
    assert caught.value.problems[0].code == code


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"measured": {"init": 0}}, "measured"),
        ({"measured": {"evaluation": 10}}, "evaluation"),
        ({"device_used_bytes": 1}, "device_used_bytes"),
        ({"device_used_bytes": 10**30}, "device_used_bytes"),
        ({"predicted": {**PHASES, "save": -1}}, "predicted.save"),
        ({"num_ranks": 0}, "num_ranks"),
        ({"reserved_bytes": 1.5}, "reserved_bytes"),
        ({"gpu": [[[]]]}, "gpu"),
    ],
)
def test_a_comparison_of_impossible_numbers_is_named(tmp_path, values, named):
    with pytest.raises(SpecError, match=named) as caught:
        read_run(write(tmp_path / "metrics.jsonl", {**record(), **values}))
    assert caught.value.codes == ("METRICS_UNREADABLE",)


def test_the_command_shows_errors_and_saves(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    exact = write(tmp_path / "a.jsonl", record())
    high = write(tmp_path / "b.jsonl", record(num_ranks=2, outside=2.5, measured={**PHASES, "backward": 40}))
    assert main(["calibrate", str(exact), str(high), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [run["errors"]["peak"] for run in printed["runs"]] == [0.0, 0.25]
    assert printed["median_error"] == 0.125
    assert printed["worst_error"] == 0.25
    saved = tmp_path / "config" / "toolkit" / "calibration.json"
    assert printed["saved_to"] == str(saved)
    assert load_calibrations(saved)["h100-sxm-80gb"].communicator_bytes == GIB // 2
    saved.unlink()
    assert main(["calibrate", str(exact), "--dry-run"]) == 0
    assert "worst 0.00%" in capsys.readouterr().out
    assert not saved.exists()
