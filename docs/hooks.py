"""What mkdocs makes when the site is built: pages from files above this folder, and the reference of the job file.

`mkdocs.yml` names this file as a hook. Links of those pages are rewritten for their place in the site.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.structure.files import Files

ROOT = Path(__file__).parents[1]
# Files of the repository that are pages of the site.
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
REFERENCE = "job-reference.md"

_LINK = re.compile(r"\[([^\]]*)\]\(([^)#:]+)(#[^)]*)?\)")
_REFERENCE_HEAD = """# Job reference

Every key that a job file may have, with the values that it takes and its default. [The job file](job.md) explains the sections.
A key without a default is decided by the rest of the job, or is not used; `toolkit validate JOB --explain` gives the value and its reason.
"""


def on_files(files: Files, config: Any) -> Files:
    """Adds the generated pages."""
    from mkdocs.structure.files import File

    made = {page: (ROOT / source).read_text(encoding="utf-8") for source, page in PAGES.items()}
    made[REFERENCE] = job_reference()
    for name, text in made.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """Rewrites the links of a page for its place in the site."""
    sources = {made: source for source, made in PAGES.items()}
    folder = ROOT if page.file.src_uri in sources else ROOT / "docs"
    return rewrite_links(markdown, folder=folder)


def rewrite_links(markdown: str, *, folder: Path) -> str:
    """Return the text with links between the repository's pages as links of the site.

    A link to a file that is no page of the site, such as LICENSE, becomes the name of the file.

    Args:
        markdown: A page.
        folder: Where the page is, in the repository.
    """

    def rewrite(found: re.Match[str]) -> str:
        text, target, anchor = found[1], found[2], found[3] or ""
        path = (folder / target).resolve()
        if not path.exists():
            return found[0]  # a page that is made here, or a mistake, which mkdocs reports
        inside = path.relative_to(ROOT).as_posix()
        if inside in PAGES:
            return f"[{text}]({PAGES[inside]}{anchor})"
        if inside.startswith("docs/") and inside.endswith(".md"):
            return f"[{text.removeprefix('docs/')}]({inside.removeprefix('docs/')}{anchor})"
        return f"`{inside}`"

    return _LINK.sub(rewrite, markdown)


def job_reference() -> str:
    """Return the reference of the job file: a table for each section, in the order of the schema."""
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    from toolkit.cli.keys import describe_keys

    keys = list(describe_keys())
    sections = {key.path: key.meaning for key in keys if any(other.path.startswith(f"{key.path}.") for other in keys)}
    parts = [_REFERENCE_HEAD, "## Sections\n", *_table(key for key in keys if "." not in key.path)]
    for section, meaning in sections.items():
        inner = [key for key in keys if key.path.rpartition(".")[0] == section]
        parts += [f"\n## `{section}`\n", *([f"{meaning}\n"] if meaning else []), *_table(inner)]
    return "\n".join(parts) + "\n"


def _table(keys: Iterable[Any]) -> list[str]:
    rows = ["| key | values | default | meaning |", "|---|---|---|---|"]
    for key in keys:
        default = f"`{key.default}`" if key.default and key.default != "required" else key.default
        cells = (f"`{key.path}`", key.values, default, key.meaning)
        rows.append("| " + " | ".join(cell.replace("|", r"\|").replace("<", "&lt;") for cell in cells) + " |")
    return rows
