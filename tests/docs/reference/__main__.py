"""`make reference`: writes docs/reference from the code."""

from __future__ import annotations

from tests.docs.reference.pages import FOLDER, PAGES

for name, made in PAGES.items():
    (FOLDER / name).write_text(made())
