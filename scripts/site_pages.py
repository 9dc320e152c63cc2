"""Adds files from outside ``docs/`` to the documentation site: the changelog, the benchmarks, the chart, the examples.

In the repository, links are paths to files. In the site, a link to one of these files leads to its page, and a link to
any other file of the repository is only its text. MkDocs calls these functions (``hooks`` in ``mkdocs.yml``).
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files

PROJECT = Path(__file__).parents[1]
DOCS = PROJECT / "docs"
PAGES = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security-policy.md",
    "benchmarks/README.md": "benchmarks.md",
    "helm/noetl-dagster/README.md": "reference/chart.md",
    "examples/README.md": "examples/index.md",
}
"""Files of the repository, and the pages that they are in the site."""
IMAGES = {".svg", ".png", ".gif"}

LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!https?:|#|mailto:)([^)#\s]*)(#[^)\s]*)?\)")
FENCE = re.compile(r"^( *)(```|~~~).*?^\1\2", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages, and the images beside them."""
    for source, page in _pages().items():
        if (PROJECT / source).exists():
            files.append(File.generated(config, page, content=(PROJECT / source).read_text(encoding="utf-8")))
            for image in sorted((PROJECT / source).parent.glob("*")):
                if image.suffix in IMAGES:
                    files.append(File.generated(config, _beside(page, image.name), content=image.read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Replaces links to files of the repository."""
    own = page.file.src_uri
    sources = {made: source for source, made in _pages().items()}
    place = PurePosixPath(sources.get(own, f"docs/{own}")).parent

    def replaced(link: re.Match[str]) -> str:
        mark, text, target, anchor = link.groups()
        path = os.path.normpath(place / target)
        made = _pages().get(path) or _pages().get(f"{path}/README.md")
        if made is None and path.startswith("docs/"):
            made = path.removeprefix("docs/")
        if made is None and mark:
            made = _beside(own, PurePosixPath(path).name)
        if made is None:
            return text
        return f"{mark}[{text}]({os.path.relpath(made, PurePosixPath(own).parent)}{anchor or ''})"

    parts, at = [], 0
    for fence in FENCE.finditer(markdown):  # code stays as it is
        parts += [LINK.sub(replaced, markdown[at : fence.start()]), fence.group()]
        at = fence.end()
    return "".join([*parts, LINK.sub(replaced, markdown[at:])])


def _pages() -> dict[str, str]:
    examples = sorted(path.parent.name for path in PROJECT.glob("examples/*/README.md"))
    return PAGES | {f"examples/{name}/README.md": f"examples/{name}.md" for name in examples}


def _beside(page: str, name: str) -> str:
    return str(PurePosixPath(page).parent / name)
