"""The built page in the package is the one that its sources give, and takes nothing from elsewhere."""

from __future__ import annotations

import json
import re

from deploy.console.app import page_files
from deploy.console.seal import STATIC, WEB, digest


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
