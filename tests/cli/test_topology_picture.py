"""Ranks and groups as a picture."""

from __future__ import annotations

from pathlib import Path

from toolkit.cli.topology_picture import draw
from toolkit.pipeline_schedule import stage_of_rank
from toolkit.topology import Grid, place
from toolkit.topology.links import boundaries


def test_a_thousand_ranks_stay_a_page(tmp_path: Path) -> None:
    placement = place(Grid(pp=32, dp=32, tp=4), num_nodes=512, gpus_per_node=8)
    held = [stage_of_rank([4] * 64, rank, pp=32) for rank in range(32)]
    draw(placement, held, boundaries(placement, goes_round=True), tmp_path / "ranks.svg")
    text = (tmp_path / "ranks.svg").read_text()
    for shown in ("pp 13", "17 more", "pp 31", "dp 13", "dp 31", "ranks 0-3", "ranks 4092-4095", "node 511"):
        assert f"<!-- {shown} -->" in text
    assert "<!-- pp 14 -->" not in text
    assert "<!-- dp 30 -->" not in text
    width, height = (float(text.split(f'{name}="')[1].split("pt")[0]) / 72 for name in ("width", "height"))
    assert width < 32
    assert height < 16
