"""The built page in the package is the one that its sources give, and takes nothing from elsewhere."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

from deploy.console.app import STATIC, page_files

WEB = STATIC.with_name("web")
LEFT_OUT = frozenset(("node_modules", "seal.json"))


def digest(folder: Path) -> str:
    """SHA-256 over the paths and contents of a folder's files, by path: what `web/seal.mjs` writes, without node."""
    paths = sorted(
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and LEFT_OUT.isdisjoint(path.relative_to(folder).parts)
    )
    whole = hashlib.sha256()
    for path in paths:
        whole.update(f"{path} {hashlib.sha256((folder / path).read_bytes()).hexdigest()}\n".encode())
    return whole.hexdigest()


def test_the_built_page_belongs_to_its_sources() -> None:
    seal = json.loads((STATIC / "seal.json").read_text())

    assert seal == {"sources": digest(WEB), "built": digest(STATIC)}, "`make console` builds the page anew"


def test_the_page_loads_nothing_from_another_host_and_nothing_inline() -> None:
    files = page_files()
    page = files["index.html"].decode()

    named = re.findall(r'(?:src|href)="([^"]+)"', page)

    assert len(files) == 4
    assert all(name.startswith("/assets/") and name[1:] in files for name in named)
    assert [] == re.findall(r"<style|<script(?![^>]*src=)|\son\w+=", page)
    assert b"url(http" not in b"".join(files.values())


def test_the_page_goes_with_the_licence_of_all_that_is_built_into_it() -> None:
    licences = (STATIC / "licenses.md").read_text()

    for name, version in json.loads((WEB / "package.json").read_text())["dependencies"].items():
        assert f"## {name} - {version} " in licences
