"""The site builds without a network and no link of it leads nowhere; files that pages and code name exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.markdown_pages import DOCS, ROOT, anchors_of, code_spans, name_of, pages, tokens_of

FOLDERS = "benchmarks|deploy|docs|examples|executor|gateway|scheduler|shared|tests"
PAGES = pytest.mark.parametrize("page", pages(), ids=name_of)


@cache
def built(site: Path) -> Path:
    """The site, built as `make docs` builds it."""
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(site)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    finished = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr + finished.stdout
    return site


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("site"))


def test_the_site_has_every_page(site: Path) -> None:
    """Links between pages, and to headings of pages, are checked by the build: it fails for any that leads nowhere."""
    expected = {page.relative_to(DOCS).with_suffix(".html") for page in DOCS.rglob("*.md")}

    assert expected <= {page.relative_to(site) for page in site.rglob("*.html")}


def test_the_site_fetches_nothing_from_elsewhere(site: Path) -> None:
    """Neither scripts nor styles, fonts or pictures; links that people follow may lead anywhere."""
    fetched = [
        f"{page.name}: {found}"
        for page in site.rglob("*.html")
        for found in re.findall(
            r"<(?:script|link|img|iframe)\b[^>]*(?:src|href)=\"?(?:https?:)?//[^>]*>", page.read_text()
        )
        if 'rel="canonical"' not in found
    ]
    styles = [
        path.name for path in site.rglob("*.css") if re.search(r"(?:@import|url\()\s*\"?https?:", path.read_text())
    ]

    assert [] == fetched
    assert [] == styles


def test_the_search_works_without_a_server(site: Path) -> None:
    assert (site / "search" / "search_index.js").exists()
    assert "assets/iframe-worker.js" in (site / "index.html").read_text()


@pytest.mark.parametrize("page", [page for page in pages() if DOCS not in page.parents], ids=name_of)
def test_links_of_pages_beside_the_site_lead_somewhere(page: Path) -> None:
    for target in links_of(page):
        name, _, heading = target.partition("#")
        leads_to = (page.parent / name) if name else page
        assert leads_to.exists(), target
        assert not heading or heading in anchors_of(leads_to), target


def test_the_readme_is_short() -> None:
    """It is the door of the house: what, for whom, an example, and where to read on."""
    assert 150 >= len((ROOT / "README.md").read_text().splitlines())


def links_of(page: Path) -> list[str]:
    """Where links and pictures of a page lead to, but for other sites."""
    found = [
        str(child.attrs.get("href", child.attrs.get("src", "")))
        for token in tokens_of(page)
        for child in token.children or ()
        if child.type in ("link_open", "image")
    ]
    return [target for target in found if not re.match(r"\w+:", target)]


@PAGES
def test_files_that_a_page_names_exist(page: Path) -> None:
    named = {
        found[1]
        for span in code_spans(page)
        if (found := re.fullmatch(rf"((?:{FOLDERS})(?:/[\w.-]+)+/?|[\w-]+\.(?:md|lock|yaml))(?:::?\w+)*", span))
    }

    missing = [name for name in sorted(named) if not (ROOT / name).exists() and name not in ELSEWHERE]
    assert [] == missing


ELSEWHERE = {"report.md"}
"""Files that programs write."""


def test_pages_that_code_names_exist() -> None:
    """Help texts, errors, comments and tests point at pages by their paths."""
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    sources = [ROOT / name for name in tracked if not name.endswith((".md", ".lock", ".svg", ".png", ".pt", ".bin"))]
    named = {
        (path.relative_to(ROOT).as_posix(), page)
        for path in sources
        if path.is_file()
        for page in re.findall(r"\bdocs/[\w/-]+\.md\b", path.read_text(errors="replace"))
    }

    assert [] == [one for one in sorted(named) if not (ROOT / one[1]).exists()]
