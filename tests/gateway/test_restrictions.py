"""Restricted parts of the protocol: what an option's text means."""

from __future__ import annotations

from typing import Any

import click
import pytest

from gateway.restrictions import Restriction, parse_restrictions
from gateway.settings import GatewaySettings

ADMIN, OTHER = Restriction("admin-key", "s=cret"), Restriction("x", "y:z")


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        ([], {}),
        (["model-repository:Admin-Key=s=cret"], {"model-repository": ADMIN}),
        (["health, metadata:admin-key=s=cret"], {"health": ADMIN, "metadata": ADMIN}),
        (["health:admin-key=s=cret", "trace:x=y:z"], {"health": ADMIN, "trace": OTHER}),
        # As a list in the environment is cut.
        (["health", "metadata:admin-key=s=cret", "trace:x=y:z"], {"health": ADMIN, "metadata": ADMIN, "trace": OTHER}),
    ],
)
def test_categories_and_the_header_that_opens_them(texts: list[str], expected: dict[str, Restriction]) -> None:
    assert expected == parse_restrictions(texts)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("health", "must be followed by"),
        ("health:x", "must have the form"),
        ("health:x=", "must have the form"),
        ("health:=y", "must have the form"),
        ("wealth:x=y", "unknown category 'wealth'"),
        (":x=y", "unknown category ''"),
        ("health,health:x=y", "restricted twice"),
    ],
)
def test_other_texts_are_refused_before_the_gateway_starts(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_restrictions([text])
    with pytest.raises(click.UsageError, match=message):
        GatewaySettings(http_restricted_api=(text,))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"http_header_forward_pattern": "("}, "http-header-forward-pattern"),
        ({"http_server_cert": "a"}, "go together"),
        ({"http_server_key": "a"}, "go together"),
        ({"http_root_cert": "a"}, "needs both"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(click.UsageError, match=message):
        GatewaySettings(**settings)
