"""Pictures: what they say can be read back from the SVG, and the page needs nothing from elsewhere."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from toolkit.errors import SpecError
from toolkit.memory.engines.ledger import PHASES
from toolkit.memory.report.figures import MAX_CAUSES, plot_heat_map
from toolkit.memory.report.host import HostReport
from toolkit.memory.report.report import MemoryReport, PhaseReport, RankReport
from toolkit.planning.checkpoint_size import DiskUse
from toolkit.topology.grid import Coordinate
from toolkit.units import GIB


def report_of(*, causes: int = 3, capacity: int | None = 80 * GIB) -> MemoryReport:
    def phase(factor: int) -> PhaseReport:
        sizes = {f"cause <{index}>": (index + 1) * factor * GIB for index in range(causes)}
        return PhaseReport(allocated_bytes=sum(sizes.values()), causes=sizes)

    phases = {name: phase(factor) for name, factor in zip(PHASES, (1, 2, 3, 2, 1), strict=True)}
    return MemoryReport(
        ranks=(RankReport(rank=0, coordinate=Coordinate(pp=0, dp=0, tp=0), phases=phases),),
        allocator="expandable",
        allocator_slack_bytes=GIB,
        context_and_nccl_bytes=2 * GIB,
        gpu_capacity_bytes=capacity,
        host=HostReport(
            bytes_per_rank={"process": GIB}, ranks_per_node=1, capacity_bytes=None, bytes_on_node={"process": GIB}
        ),
        disk=DiskUse(checkpoint_bytes=GIB, num_checkpoints=3, export_bytes=GIB),
        num_traced_layers=3,
        num_layers=9,
        assumptions=(),
    )


def words(svg: str) -> set[str]:
    """Texts are drawn as paths; matplotlib leaves each in a comment."""
    return {text.strip() for text in re.findall(r"<!--(.*?)-->", svg)}


def test_an_svg_holds_phases_causes_and_the_card(tmp_path):
    report = report_of()
    report.plot(tmp_path / "memory.svg")
    found = words((tmp_path / "memory.svg").read_text())
    assert set(PHASES) <= found
    assert "card, 80.0 GiB" in found
    assert "less slack, context and NCCL, 77.0 GiB" in found
    assert {"6.0", "12.0", "18.0"} <= found


def test_many_causes_share_one_bar(tmp_path):
    report_of(causes=MAX_CAUSES + 4, capacity=None).plot(tmp_path / "memory.svg")
    found = words((tmp_path / "memory.svg").read_text())
    assert "all else" in found
    assert not any(word.startswith("card") for word in found)


def test_the_same_report_gives_the_same_picture(tmp_path):
    for name in ("first.svg", "second.svg"):
        report_of().plot(str(tmp_path / name))
    assert (tmp_path / "first.svg").read_bytes() == (tmp_path / "second.svg").read_bytes()


def test_a_png_is_one(tmp_path):
    report_of().plot(tmp_path / "memory.PNG")
    assert (tmp_path / "memory.PNG").read_bytes().startswith(b"\x89PNG")


def test_a_page_holds_all_it_shows(tmp_path):
    report_of().plot(tmp_path / "memory.html")
    page = (tmp_path / "memory.html").read_text()
    assert page.startswith("<!doctype html>")
    assert page.count("<svg") == 1
    assert "<?xml" not in page
    assert "<td>cause &lt;2&gt;</td><td>9.00 GiB</td>" in page
    assert not re.search(r"<(?:script|link|img)\b|url\(http|src=", page)


@pytest.mark.parametrize("name", ["memory.jpg", "memory", "memory.pdf"])
def test_another_format_is_refused(tmp_path, name):
    with pytest.raises(SpecError) as caught:
        report_of().plot(tmp_path / name)
    assert caught.value.codes == ("PLOT_FORMAT",)


def test_a_folder_must_be_there(tmp_path):
    with pytest.raises(SpecError) as caught:
        report_of().plot(tmp_path / "none" / "memory.svg")
    assert caught.value.codes == ("PLOT_FOLDER",)


@pytest.mark.parametrize(
    ("capacity", "fits", "tight"),
    [(20, False, False), (21, True, True), (22, True, True), (23, True, False), (None, True, False)],
)
def test_less_than_a_twentieth_of_the_card_left_is_tight(capacity, fits, tight):
    report = report_of(capacity=None if capacity is None else capacity * GIB)
    assert report.required_bytes == 21 * GIB
    assert (report.fits, report.tight) == (fits, tight)
    assert report.to_dict()["tight"] is tight


@pytest.mark.parametrize("axes", [1, 2])
def test_a_heat_map_says_what_fits(tmp_path, axes):
    names, values = ["batch", "length"][:axes], [(1, 2), ("short", "long")][:axes]
    cells = {(1,): (3.25, True, True), (2,): (99.0, False, False)}
    if axes == 2:
        cells = {
            (1, "short"): (3.25, True, True),
            (1, "long"): (99.0, False, False),
            (2, "short"): (None, False, False),
            (2, "long"): (7.0, True, False),
        }
    plot_heat_map(tmp_path / "map.svg", names=names, values=values, cells=cells, title="model")
    svg = (tmp_path / "map.svg").read_text()
    assert {*names, "3.2", "99.0", "1", "2"} - words(svg) == set()
    assert (svg.count("#f4b6ae"), svg.count("#f6e3a0"), svg.count("#b7e1c0")) == (1, 1, axes - 1)
    assert ("–" in words(svg)) is (axes == 2)


def test_matplotlib_waits_until_something_is_drawn():
    program = (
        "import sys; import toolkit.memory.report.figures, toolkit.cli.estimate; sys.exit('matplotlib' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
