"""Hooks of mkdocs: pages from outside docs/, and links that also work on GitHub.

The pages are written for GitHub first: they link to each other, to sources and to folders by relative paths. On the
site, links within docs/ stay as they are, links to pages that the site takes from outside lead to these pages, and
links to all other files lead to the repository. mkdocs checks links in Markdown; this module checks those in notebooks.
"""

from __future__ import annotations

import logging
import os.path
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
# Name on the site -> file of the repository.
FROM_ELSEWHERE = {
    "overview.md": "README.md",
    "recipes.md": "recipes/README.md",
    "evaluation.md": "eval/README.md",
    "changes.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
}
# A warning ends a strict build.
logger = logging.getLogger("mkdocs.hooks.site")
LINK = re.compile(r"(?<=\]\()([^)\s]+)(?=\))")
HREF = re.compile(r'(?<=href=")(?!#)([^"]+\.(?:md|ipynb))(#[^"]*)?(?=")')
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    from pymdownx.slugs import slugify

    config.mdx_configs.setdefault("toc", {})["slugify"] = slugify(case="lower")
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    from mkdocs.structure.files import File

    for name, path in FROM_ELSEWHERE.items():
        files.append(File.generated(config, name, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    here = FROM_ELSEWHERE.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def on_site(match: re.Match[str]) -> str:
        return site_link(match[1], here, page.file.src_uri, str(config.repo_url).rstrip("/"))

    return outside_fences(markdown, lambda text: LINK.sub(on_site, text))


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    if not page.file.src_uri.endswith(".ipynb"):
        return html

    def on_site(match: re.Match[str]) -> str:
        link = site_link(match[1], f"docs/{page.file.src_uri}", page.file.src_uri, str(config.repo_url).rstrip("/"))
        if "://" in link:
            return link
        target = files.get_file_from_path(os.path.normpath(os.path.join(os.path.dirname(page.file.src_uri), link)))
        if target is None:
            logger.warning("Notebook '%s' has a link '%s' that leads to no page.", page.file.src_uri, match[1])
            return link
        return target.url_relative_to(page.file) + (match[2] or "")

    return HREF.sub(on_site, html)


def outside_fences(markdown: str, change: Callable[[str], str]) -> str:
    """Applies `change` to the text outside code blocks."""
    parts, end = [], 0
    for fence in FENCE.finditer(markdown):
        parts += [change(markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, change(markdown[end:])])


def site_link(link: str, here: str, page: str, repository: str) -> str:
    """Rewrites a link of the repository's file `here` for the site's page `page`."""
    path, hash_sign, anchor = link.partition("#")
    if not path or "://" in link or link.startswith("mailto:"):
        return link
    target = os.path.normpath(os.path.join(os.path.dirname(here), path))
    for name, source in FROM_ELSEWHERE.items():
        if target in (source, os.path.dirname(source) or source):
            target = f"docs/{name}"
    if (ROOT / target).is_dir() and (ROOT / target / "README.md").is_file():
        target += "/README.md"
    if not target.startswith("docs/") or f"{target}/".startswith("docs/log/"):
        if not (ROOT / target).exists():
            logger.warning("'%s' has a link '%s' that leads to no file of the repository.", here, link)
        kind = "tree" if (ROOT / target).is_dir() else "blob"
        return f"{repository}/{kind}/main/{target}{hash_sign}{anchor}"
    return os.path.relpath(target.removeprefix("docs/"), os.path.dirname(page) or ".") + hash_sign + anchor
