"""What README.md and docs/ show is there: commands, options, files, names; the job is sound and the estimate current."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import pytest
import typer.main
import yaml

import toolkit as tk
from toolkit.catalog.models import model_names, read_catalogue_model
from toolkit.cli.app import build_app, main
from toolkit.cli.job_checks import check
from toolkit.config.loader import parse_job

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]


def read_page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


TEXT = read_page("README.md")


def blocks(language: str, text: str = TEXT) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def commands() -> list[str]:
    found = [block for page in PAGES for block in blocks("bash", page.read_text(encoding="utf-8"))]
    lines = [line.split("#")[0].strip() for block in found for line in block.splitlines()]
    return [line for line in lines if line.startswith("toolkit ")]


def test_readme_is_short():
    assert len(TEXT.splitlines()) <= 200


def test_the_job_is_sound(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (block,) = blocks("yaml")
    document = yaml.safe_load(block)
    (name,) = [known for known in model_names() if read_catalogue_model(known).hub_id == document["model"]]
    assert f"--set model={name}" in TEXT
    assert check(parse_job(document | {"model": name})).problems == ()


def test_every_command_has_the_options_that_are_shown():
    root = typer.main.get_command(build_app())
    assert len(commands()) >= 15
    for line in commands():
        name, *words = shlex.split(line)[1:]
        command = root.commands[name]
        known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
        # The options of a script follow it.
        script = next((at for at, word in enumerate(words) if word.endswith(".py")), len(words))
        assert {word for word in words[:script] if word.startswith("--")} <= known, line


def test_every_page_is_in_the_table_of_pages():
    table = TEXT.split("## Documentation")[1].split("## ")[0]
    pages = {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")}
    assert pages == set(re.findall(r"\]\((docs/[\w-]+\.md)\)", table))


def test_every_command_is_in_the_table():
    named = set(re.findall(r"`(?:toolkit )?([a-z]+)[ `]", "\n".join(re.findall(r"^\| `.*?\|", TEXT, re.MULTILINE))))
    visible = {name for name, command in typer.main.get_command(build_app()).commands.items() if not command.hidden}
    assert visible <= named


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_files_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (page.parent / target).exists(), target
    for path in re.findall(r"`((?:examples|tests|benchmarks|configs|docs)/[\w./-]+)`", text):
        assert (ROOT / path).exists(), path


def test_the_tree_lists_every_package():
    tree = read_page("docs/architecture.md").split("## The tree")[1].split("```")[1]
    packages = {path.parent.name for path in (ROOT / "toolkit").glob("*/__init__.py")}
    assert set(re.findall(r"^  (\w+)/ ", tree, re.MULTILINE)) == packages
    for folder in re.findall(r"^(\w+)/", tree, re.MULTILINE):
        assert (ROOT / folder).is_dir()


def test_the_python_names_exist():
    (block,) = blocks("python")
    tree = ast.parse(block)
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "tk"}
    assert used
    assert used <= set(dir(tk))


def test_the_estimate_is_what_the_command_prints(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("COLUMNS", "100")
    (shown,) = [
        block for block in blocks("text", read_page("docs/estimate.md")) if block.startswith("$ toolkit estimate")
    ]
    command, _, expected = shown.partition("\n")
    assert main(shlex.split(command)[2:]) == 0
    texts, numbers = zip(*(read(text) for text in (capsys.readouterr().out, expected)), strict=True)
    assert texts[0] == texts[1]
    assert numbers[0] == pytest.approx(numbers[1], rel=0.02, abs=1)  # other versions of torch trace a little else


def read(text: str) -> tuple[list[str], list[float]]:
    """A text's lines with # for each number, whatever the spaces between words; and the numbers."""
    words = [" ".join(line.split()) for line in text.splitlines() if line.strip() and "─" not in line]
    number = re.compile(r"\d[\d,]*(?:\.\d+)?")
    return [number.sub("#", line) for line in words], [
        float(found.replace(",", "")) for found in number.findall("\n".join(words))
    ]
