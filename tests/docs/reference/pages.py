"""The pages of docs/reference that are made from the code: by `make reference`, and by the test that compares."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from tests.docs.reference.commands import commands
from tests.docs.reference.errors import errors
from tests.docs.reference.http import http
from tests.docs.reference.metrics import metrics
from tests.docs.reference.model_parameters import model_parameters
from tests.docs.reference.settings import settings

FOLDER = Path(__file__).resolve().parents[3] / "docs" / "reference"
PAGES: Mapping[str, Callable[[], str]] = {
    "settings.md": settings,
    "commands.md": commands,
    "errors.md": errors,
    "http.md": http,
    "metrics.md": metrics,
    "model-parameters.md": model_parameters,
}
