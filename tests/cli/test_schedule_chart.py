"""`toolkit schedule`: the chart of a step, as text, as JSON and as a picture."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from toolkit.cli.app import main
from toolkit.cli.schedule_chart import chart
from toolkit.cli.schedule_legend import title_of
from toolkit.pipeline_schedule import build_schedule, simulate

JOB = """\
model: quickstart-llama
cluster: {gpu: cpu, gpus_per_node: 4}
train: {gradient_accumulation_steps: 4}
parallel: {pipeline: 4, zero_stage: 1}
"""


@pytest.fixture
def job(tmp_path: Path) -> str:
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    return str(path)


def test_a_row_a_rank(capsys: pytest.CaptureFixture[str], job: str) -> None:
    assert main(["schedule", job]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "1f1b: 4 pipeline ranks, 4 micro-batches, bubble 42.9%"
    rows = [line for line in lines if line.startswith("pipeline rank ")]
    assert rows[3] == "pipeline rank 3          F0-B0----F1-B1----F2-B2----F3-B3----"
    assert rows[0].startswith("pipeline rank 0 F0-F1-F2-F3-   ")
    assert rows[0].endswith("B3----")
    stages = [line.split() for line in lines if line.split()[:1] and line.split()[0].isdigit()]
    assert stages == [[str(s), str(s), str(s), str(4 - s)] for s in range(4)]


def test_topology_schedule_is_the_same(capsys: pytest.CaptureFixture[str], job: str) -> None:
    assert main(["schedule", job]) == 0
    shown = capsys.readouterr()
    assert main(["topology", job, "--schedule"]) == 0
    assert capsys.readouterr() == shown
    assert main(["topology", "--help"]) == 0
    options = capsys.readouterr().out
    assert "--plot" in options
    assert "--schedule" not in options
    assert "--check" not in options


def test_chunks_as_json(capsys: pytest.CaptureFixture[str], job: str) -> None:
    changed = ["pipeline=2", "pipeline_schedule=interleaved", "virtual_stages=2"]
    options = [part for change in changed for part in ("--set", f"parallel.{change}")]
    assert main(["schedule", job, "--json", *options]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["schedule"], found["pp"], found["micro_batches"], found["virtual_stages"]) == ("interleaved", 2, 4, 2)
    assert found["bubble_fraction"] == pytest.approx(1 / 9)
    assert [(stage["pipeline_rank"], stage["chunk"], stage["layers"]) for stage in found["stages"]] == [
        (0, 0, [0, 1]),
        (1, 0, [1, 2]),
        (0, 1, [2, 3]),
        (1, 1, [3, 4]),
    ]
    last = found["ranks"][1]
    assert (last["pipeline_rank"], last["in_flight"]) == (1, 3)
    assert last["passes"][2:4] == [
        {"kind": "forward", "chunk": 1, "micro_batch": 0, "start": 3, "end": 4},
        {"kind": "backward", "chunk": 1, "micro_batch": 0, "start": 4, "end": 6},
    ]


@pytest.mark.parametrize("suffix", [".svg", ".png", ".html"])
def test_a_picture(capsys: pytest.CaptureFixture[str], job: str, tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"step{suffix}"
    assert main(["schedule", job, "--plot", str(file)]) == 0
    assert f"drawn: {file}" in capsys.readouterr().out.replace("\n", " ")
    content = file.read_bytes()
    assert content.startswith(b"\x89PNG") if suffix == ".png" else b"<svg" in content


def test_every_kind_of_pass_is_drawn(tmp_path: Path) -> None:
    from toolkit.cli.schedule_picture import draw

    timeline = simulate(build_schedule("zb-h1", pp=2, micro_batches=3, virtual_stages=2))
    draw(timeline, tmp_path / "step.svg")
    text = (tmp_path / "step.svg").read_text()
    for colour in ("#56b4e9", "#009e73", "#e69f00", "#f0e442"):
        assert f"fill: {colour}" in text
    # matplotlib names each text in a comment before its outlines.
    for shown in (
        "pipeline rank 1",
        "2.1",
        "backward, weights",
        "zb-h1: 2 pipeline ranks of 2 stages, 3 micro-batches",
    ):
        assert f"<!-- {shown}" in text
    draw(timeline, tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_text() == text


def test_a_narrow_terminal_shows_colours_and_what_fits() -> None:
    timeline = simulate(build_schedule("1f1b", pp=4, micro_batches=32))
    wide = chart(timeline, width=None, fill="-")
    narrow = chart(timeline, width=80, fill=" ")
    assert len(wide[0]) > 400
    assert {len(line) for line in narrow[:1]} == {80}
    assert all(len(line) <= 80 for line in narrow)
    assert {str(span.style) for span in narrow[0].spans} == {"black on #56B4E9", "black on #009E73"}
    one = simulate(build_schedule("gpipe", pp=2, micro_batches=1))
    assert title_of(one) == "gpipe: 2 pipeline ranks, 1 micro-batch, bubble 50.0%"


@pytest.mark.parametrize(("pipeline", "accumulation"), [(2, 32), (4, 100)])
def test_a_long_step_without_colours_leaves_its_middle_out(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, job: str, pipeline: int, accumulation: int
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    changed = [f"train.gradient_accumulation_steps={accumulation}", f"parallel.pipeline={pipeline}"]
    assert main(["schedule", job, *(part for change in changed for part in ("--set", change))]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line for line in lines if line.startswith("pipeline rank ")]
    assert len(rows) == pipeline
    assert all(len(row) <= 80 and row.count(" … ") == 1 for row in rows)
    assert len({row.index(" … ") for row in rows}) == 1
    assert rows[0].startswith("pipeline rank 0 F0-")
    assert f"B{accumulation - 1}-" in rows[0].split(" … ")[1]
    assert "The steady state is abbreviated: --plot FILE draws the whole step." in lines


def test_layers_of_a_stage_are_a_run(capsys: pytest.CaptureFixture[str], job: str) -> None:
    assert main(["schedule", job, "--set", "parallel.pipeline=2"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row for row in rows if row[:1] in (["0"], ["1"])] == [["0", "0", "0-2", "2"], ["1", "1", "3", "1"]]


def test_no_heavy_library_is_loaded(job: str) -> None:
    program = (
        "import sys; from toolkit.cli.app import main; code = main(sys.argv[1:]); "
        "sys.exit(code or [name for name in ('torch', 'matplotlib', 'deepspeed') if name in sys.modules] or 0)"
    )
    command = [sys.executable, "-c", program, "schedule", job]
    done = subprocess.run(command, env=dict(os.environ), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("schedule", "JOB", "--set", "parallel.pipeline=1"), "PIPELINE_UNUSED"),
        (("schedule",), "JOB"),
        (("schedule", "JOB", "--plot", "x.gif"), "PLOT_FORMAT"),
        (("topology", "--pp", "2", "--schedule"), "--schedule needs a JOB"),
        (("topology", "JOB", "--schedule", "--check"), "mutually exclusive"),
        (("topology", "JOB", "--schedule", "--plot", "x.gif"), "PLOT_FORMAT"),
        (("topology", "JOB", "--schedule", "--pp", "2"), "would be ignored"),
    ],
)
def test_schedules_that_cannot_be(
    capsys: pytest.CaptureFixture[str], job: str, arguments: tuple[str, ...], part: str
) -> None:
    assert main([*(job if argument == "JOB" else argument for argument in arguments)]) == 2
    assert part in capsys.readouterr().err
