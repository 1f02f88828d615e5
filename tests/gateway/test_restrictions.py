"""Restricted parts of the protocol: what an option's text means."""

from __future__ import annotations

import dataclasses
from typing import Any

import click
import pytest

from gateway.restrictions import Restriction, of_metrics, parse_restrictions
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
        ("health", "the last text must end with"),
        ("health:x", "must have the form"),
        ("health:x=", "must have the form"),
        ("health:=y", "must have the form"),
        ("health:名前=y", "text 1: no client can send its header"),
        ("health:admin key=y", "text 1: no client can send its header"),
        ("health:x=y ", "text 1: no client can send its header"),
        ("wealth:x=y", "text 1: it names an unknown category"),
        (":x=y", "text 1: it names an unknown category"),
        ("health,health:x=y", "restricted twice"),
    ],
)
def test_other_texts_are_refused_before_the_gateway_starts(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_restrictions([text])
    for option in ("restricted_api", "http_restricted_api", "grpc_restricted_protocol"):
        with pytest.raises(click.UsageError, match=f"^--{option.replace('_', '-')}: .*{message}"):
            dataclasses.replace(GatewaySettings(), **{option: (text,)})


@pytest.mark.parametrize("secret", ["s3cret,s3cret", "s3cret,s3cret:s3cret=s3cret", "s3cret ", "s3cret,"])
def test_an_error_shows_nothing_of_a_secret(secret: str) -> None:
    """Also of one with a comma, which cuts a list in the environment."""
    for text in (f"health:key={secret}", f"health:{secret}", f"health={secret}", secret):
        with pytest.raises(ValueError, match="text") as caught:
            parse_restrictions([*text.split(","), "metadata"])
        assert "s3cret" not in str(caught.value)


def test_one_setting_covers_every_port_and_tritons_close_more_of_one() -> None:
    settings = GatewaySettings(
        restricted_api=("trace", "logging:admin-key=s=cret"),
        http_restricted_api=("health:x=y:z",),
        grpc_restricted_protocol=("inference:x=y:z",),
    )

    assert {"trace": ADMIN, "logging": ADMIN} == settings.restrictions
    assert {"trace": ADMIN, "logging": ADMIN, "health": OTHER} == settings.http_restrictions
    assert {"trace": ADMIN, "logging": ADMIN, "inference": OTHER} == settings.grpc_restrictions
    with pytest.raises(click.UsageError, match="--grpc-restricted-protocol: category 'trace' is restricted twice"):
        GatewaySettings(restricted_api=("trace:x=y",), grpc_restricted_protocol=("trace:x=z",))


@pytest.mark.parametrize(
    ("restricted", "opens"),
    [
        ({}, None),
        ({"statistics": ADMIN}, ADMIN),
        ({"statistics": ADMIN, "metrics": OTHER}, OTHER),
        ({"trace": ADMIN}, None),
    ],
)
def test_metrics_are_closed_with_the_statistics_unless_they_have_a_header_of_their_own(
    restricted: dict[str, Restriction], opens: Restriction | None
) -> None:
    assert opens == of_metrics(restricted)


@pytest.mark.parametrize(
    ("given", "is_met"),
    [
        ([], False),
        (["s=cret"], True),
        ([b"s=cret"], True),
        (["guess", "s=cret"], True),
        (["s=cre", b"\xff", "\u00e9"], False),
    ],
)
def test_a_restriction_is_met_by_its_value_whoever_writes_it(given: list[str | bytes], *, is_met: bool) -> None:
    assert is_met == ADMIN.is_met(given)


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
