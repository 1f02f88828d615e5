"""What the site needs beyond its configuration: a folder of pages in the navigation.

MkDocs loads this file by the name in mkdocs.yml (`hooks`) and calls the functions that have the names of its events.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast


def on_config(config: Any) -> None:
    """Puts pages in the place of a pattern (`decisions/*.md`) in the navigation."""
    config.nav = expanded(config.nav, Path(config.docs_dir))


def expanded(nav: Any, docs: Path) -> Any:
    """The navigation, with a list of pages for each pattern: the folder's index first, the others by their names.

    A pattern without any page is left out.
    """
    if isinstance(nav, list):
        entries = (expanded(entry, docs) for entry in cast("list[Any]", nav))
        return [entry for entry in entries if entry not in ([], {})]
    if isinstance(nav, dict):
        titled = {title: expanded(entry, docs) for title, entry in cast("dict[str, Any]", nav).items()}
        return {title: entry for title, entry in titled.items() if entry != []}
    if "*" not in nav:
        return nav
    pages = (path.relative_to(docs).as_posix() for path in docs.glob(nav))
    return sorted(pages, key=lambda page: (not page.endswith("index.md"), page))
