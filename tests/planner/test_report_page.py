"""The report: one page without network, whose commands can be copied, on a phone and a desk, light and dark."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from browser import find_browser, open_page

from toolkit.config.loader import parse_job
from toolkit.config.yaml_text import load_yaml
from toolkit.planner.report_page import report_html
from toolkit.version import INSTALL

needs_browser = pytest.mark.skipif(find_browser() is None, reason="no Chromium on this machine")


@pytest.fixture(scope="module")
def page(answer, tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "report.html"
    answer.write_report(path)
    return path


class Texts(HTMLParser):
    def __init__(self):
        super().__init__()
        self.links, self.texts = [], []

    def handle_starttag(self, tag, attributes):
        self.links += [value for name, value in attributes if name in ("src", "href", "action")]

    def handle_data(self, data):
        self.texts.append(data)


def test_the_page_holds_all_and_asks_for_nothing(answer, page):
    text = page.read_text()
    read = Texts()
    read.feed(text)
    assert read.links == []
    assert "@import" not in text
    assert "url(" not in text
    shown = "".join(read.texts)
    row = answer.recommended
    for word in (
        row.option.cluster.name,
        row.option.cluster.offer.provider,
        "toolkit train planned.yaml",
        "2026-11-01",
        "1 card;" if row.option.cluster.num_gpus == 1 else " cards",
    ):
        assert word in shown
    for each in answer.rows:
        assert each.option.cluster.name in shown
    assert text.count('class="dot') == len(answer.rows)


def test_the_job_on_the_page_is_the_planned_one(answer, page, tmp_path):
    (tmp_path / "planned.yaml").write_text(re.search(r'<pre id="file-2">(.*?)</pre>', page.read_text(), re.DOTALL)[1])
    assert parse_job(load_yaml(tmp_path / "planned.yaml")).cluster == answer.job.cluster


def test_the_page_installs_as_the_readme_says(page):
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    assert f"\n{INSTALL} && toolkit quickstart\n" in readme
    assert f">{INSTALL}  # in a checkout" in page.read_text()


def test_names_of_strangers_are_text(answer):
    from dataclasses import replace

    evil = "<script>alert(1)</script>"
    question = replace(answer.question, assumptions=(evil,))
    text = report_html(replace(answer, question=question), answer.recommended)
    assert evil not in text
    assert "&lt;script&gt;alert(1)" in text


@needs_browser
@pytest.mark.parametrize(
    ("width", "dark"),
    [(390, False), pytest.param(1280, True, marks=pytest.mark.full)],
    ids=["phone, light", "desk, dark"],
)
def test_the_page_in_a_browser(page, tmp_path, width, dark):
    with open_page(page, tmp_path, width=width, dark=dark) as shown:
        assert shown.run("document.documentElement.scrollWidth") <= width
        back = shown.run("getComputedStyle(document.body).backgroundColor")
        brightness = sum(int(value) for value in re.findall(r"\d+", back)[:3]) / 3
        assert (brightness < 128) == dark
        command = shown.run("document.getElementById('file-1').textContent")
        assert "toolkit train planned.yaml" in command
        shown.call("Page.bringToFront")
        shown.run("document.querySelector('button[data-copy=file-1]').click()")
        said = shown.run(
            "new Promise(done => setTimeout(() => done(document.querySelector('button[data-copy]').textContent), 300))"
        )
        assert said == "Copied"
        assert shown.run("navigator.clipboard.readText()") == command
        faults = [event for event in shown.events if event["method"] in ("Runtime.exceptionThrown", "Log.entryAdded")]
        asked = [
            event["params"]["request"]["url"]
            for event in shown.events
            if event["method"] == "Network.requestWillBeSent"
        ]
    assert faults == []
    assert [url for url in asked if not url.startswith("file:")] == []
