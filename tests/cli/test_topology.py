"""`toolkit topology`: what each rank holds, where it sits, what its stage talks to; as a table, as JSON, as a picture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from toolkit.cli.app import main

JOB = """\
model: llama-3.2-1b
cluster: {gpu: h100-sxm-80gb, gpus_per_node: 4, nodes: 2}
train: {gradient_accumulation_steps: 8}
parallel: {pipeline: 4, partition: [5, 4, 4, 3], zero_stage: 1}
"""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text(JOB)
    return "job.yaml"


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


def test_a_row_says_what_the_rank_holds(capsys: pytest.CaptureFixture[str], job: str) -> None:
    assert main(["topology", job]) == 0
    shown = lines(capsys)
    assert "rank node local pp dp tp tp group dp group pp group holds" in shown
    assert "1 0 1 0 1 0 1 0-1 1,3,5,7 embedding, layers 0-4" in shown
    assert "4 1 0 2 0 0 4 4-5 0,2,4,6 layers 9-12" in shown
    assert "7 1 3 3 1 0 7 6-7 1,3,5,7 layers 13-15, norm, head" in shown
    assert shown[-3:] == [
        "pp 0 → 1: 2 links, inside a node",
        "pp 1 → 2: 2 links, over the network",
        "pp 2 → 3: 2 links, inside a node",
    ]


def test_chunks_as_json(capsys: pytest.CaptureFixture[str], job: str) -> None:
    changed = ["pipeline=2", "virtual_stages=2"]
    options = [part for change in changed for part in ("--set", f"parallel.{change}")]
    assert main(["topology", job, "--json", *options]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ranks"][0]["layers"] == [[0, 5], [9, 13]]
    assert found["ranks"][0]["parts"] == ["embedding"]
    assert found["ranks"][7]["layers"] == [[5, 9], [13, 16]]
    assert found["ranks"][7]["parts"] == ["norm", "head"]
    assert found["links"] == [
        {"start": 0, "stop": 1, "num_links": 4, "over_network": 4},
        {"start": 1, "stop": 0, "num_links": 4, "over_network": 4},
    ]


def test_without_stages_nothing_is_said_of_layers(capsys: pytest.CaptureFixture[str], job: str) -> None:
    options = ["--set", "parallel.pipeline=1", "--set", "parallel={zero_stage: 2}"]
    assert main(["topology", job, *options]) == 0
    shown = "\n".join(lines(capsys))
    assert "holds" not in shown
    assert "→" not in shown
    assert main(["topology", "--pp", "2", "--tp", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "layers" not in found["ranks"][0]
    assert found["links"] == [{"start": 0, "stop": 1, "num_links": 2, "over_network": 0}]


def test_a_job_whose_layers_cannot_be_dealt_out_is_refused(capsys: pytest.CaptureFixture[str], job: str) -> None:
    assert main(["topology", job, "--set", "parallel.partition=[5, 4, 4, 4]"]) == 2
    assert "[PARTITION_LAYERS]" in capsys.readouterr().err


@pytest.mark.parametrize("suffix", [".svg", ".png", ".html"])
def test_a_picture(capsys: pytest.CaptureFixture[str], job: str, suffix: str) -> None:
    assert main(["topology", job, "--plot", f"ranks{suffix}"]) == 0
    assert f"drawn: ranks{suffix}" in lines(capsys)
    content = Path(f"ranks{suffix}").read_bytes()
    if suffix == ".png":
        assert content.startswith(b"\x89PNG")
        return
    # matplotlib names each text in a comment before its outlines.
    for shown in ("pp 0", "embedding, layers 0-4", "layers 13-15, norm, head", "rank 7", "node 1", "dp 1"):
        assert f"<!-- {shown} -->" in content.decode()
    for shown in ("hidden states inside a node", "hidden states over the network", "tp: 8 groups of 1, inside a node"):
        assert f"<!-- {shown} -->" in content.decode()


def test_sizes_are_drawn_too(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "sizes.svg"
    assert main(["topology", "--tp", "4", "--gpus-per-node", "8", "--plot", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["links"] == []
    assert "<!-- ranks 4-7 -->" in file.read_text()
    assert "hidden states" not in file.read_text()


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("job.yaml", "--check", "--plot", "x.svg"), "mutually exclusive"),
        (("job.yaml", "--plot", "x.gif"), "PLOT_FORMAT"),
        (("job.yaml", "--plot", "absent/x.svg"), "PLOT_FOLDER"),
    ],
)
def test_pictures_that_cannot_be(
    capsys: pytest.CaptureFixture[str], job: str, arguments: tuple[str, ...], part: str
) -> None:
    assert main(["topology", *arguments]) == 2
    assert part in capsys.readouterr().err
