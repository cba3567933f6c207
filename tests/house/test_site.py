"""The documentation is a site that builds without a warning; its references name all that there is."""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import toolkit as tk
from toolkit.cli.keys import describe_keys

ROOT = Path(__file__).parents[2]
PACKAGES = ("mkdocs", "material", "mkdocstrings_handlers")
MISSING = [name for name in PACKAGES if importlib.util.find_spec(name) is None]

needs_mkdocs = pytest.mark.skipif(bool(MISSING), reason=f"{', '.join(MISSING)} not installed: pip install -e '.[docs]'")


def load_hooks():
    spec = importlib.util.spec_from_file_location("docs_hooks", ROOT / "docs" / "hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build(folder: Path, site: Path) -> subprocess.CompletedProcess[str]:
    # Not --quiet: warnings that are not logged do not count as failures.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)


def pages_of(nav) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    return [page for entry in (nav.values() if isinstance(nav, dict) else nav) for page in pages_of(entry)]


@needs_mkdocs
def test_the_site_builds_without_a_warning(tmp_path):
    result = build(ROOT, tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    api = (tmp_path / "api.html").read_text(encoding="utf-8")
    first_words = re.split(r"[`<>&'\"]", inspect.getdoc(tk.estimate).splitlines()[0])[0].strip()
    assert first_words in api, "docstrings are there, not only headings"
    assert "train.max_steps" in (tmp_path / "job-reference.html").read_text(encoding="utf-8")
    assert "LICENSE" in (tmp_path / "index.html").read_text(encoding="utf-8")


@needs_mkdocs
def test_a_link_to_no_page_fails_the_build(tmp_path):
    for name in ("mkdocs.yml", "README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("__pycache__"))
    configuration = yaml.safe_load((tmp_path / "mkdocs.yml").read_text(encoding="utf-8"))
    (tmp_path / "docs" / "api.md").write_text("# Python API\n\n[lost](no-such-page.md)\n", encoding="utf-8")
    (tmp_path / "mkdocs.yml").write_text(yaml.safe_dump(configuration | {"plugins": []}), encoding="utf-8")
    result = build(tmp_path, tmp_path / "site")
    assert result.returncode != 0
    assert "no-such-page.md" in result.stdout + result.stderr


def test_every_page_is_in_the_navigation():
    hooks = load_hooks()
    configuration = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    written = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    listed = pages_of(configuration["nav"])
    assert len(listed) == len(set(listed))
    assert set(listed) == written | set(hooks.PAGES.values()) | {hooks.REFERENCE}
    assert configuration["strict"] is True


def test_the_api_page_has_every_public_name():
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    shown = re.findall(r"^::: (\S+)\.(\w+)$", text, re.MULTILINE)
    places = {name: module for module, name in shown}
    public = {name: getattr(tk, name) for name in tk.__all__ if name != "__version__"}
    callables = {name for name, value in public.items() if callable(value)}
    assert callables <= set(places)
    for name in callables:
        assert places[name] == tk._HOMES[name], name
    for name in set(public) - callables:
        assert f"`tk.{name}`" in text, name
    assert len(shown) == len(places)


def test_the_job_reference_has_every_key():
    text = load_hooks().job_reference()
    rows = re.findall(r"^\| `([\w.]+)` \|", text, re.MULTILINE)
    assert sorted(rows) == sorted(key.path for key in describe_keys())


@pytest.mark.parametrize(
    ("text", "folder", "wanted"),
    [
        ("[docs/job.md](docs/job.md#loss)", ".", "[job.md](job.md#loss)"),
        ("[the licence](LICENSE)", ".", "`LICENSE`"),
        ("[how](../CONTRIBUTING.md)", "docs", "[how](contributing.md)"),
        ("[an example](../README.md#a-job)", "docs", "[an example](index.md#a-job)"),
        ("[data](data.md)", "docs", "[data](data.md)"),
        ("[paper](https://arxiv.org/abs/2401.10241)", "docs", "[paper](https://arxiv.org/abs/2401.10241)"),
        ("[nothing](nothing.md)", "docs", "[nothing](nothing.md)"),
    ],
)
def test_links_are_rewritten_for_the_site(text, folder, wanted):
    assert load_hooks().rewrite_links(text, folder=ROOT / folder) == wanted
