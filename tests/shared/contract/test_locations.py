"""Where a model repository lies: Triton's URL forms, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.contract.locations import RemoteLocation, parse_location, split_locations


@pytest.mark.parametrize(
    ("text", "expected", "shown"),
    [
        ("s3://bucket/a/b/", ("s3", "", "bucket/a/b"), "s3://bucket/a/b"),
        ("s3://bucket", ("s3", "", "bucket"), "s3://bucket"),
        (
            "s3://10.0.0.1:9000/bucket/a",
            ("s3", "http://10.0.0.1:9000", "bucket/a"),
            "s3://10.0.0.1:9000/bucket/a",
        ),
        ("s3://http://minio:9000/b-1/a", ("s3", "http://minio:9000", "b-1/a"), "s3://minio:9000/b-1/a"),
        ("s3://http://minio/b-1", ("s3", "http://minio", "b-1"), None),
        ("s3://https://s3.example.org/bucket", ("s3", "https://s3.example.org", "bucket"), None),
        ("gs://bucket/models", ("gs", "", "bucket/models"), "gs://bucket/models"),
        ("as://account/container/models", ("as", "account", "container/models"), "as://account/container/models"),
        ("as://account.blob.core.windows.net/container", ("as", "account", "container"), "as://account/container"),
    ],
)
def test_tritons_urls_are_read(text: str, expected: tuple[str, str, str], shown: str | None) -> None:
    location = parse_location(text)

    assert RemoteLocation(*expected) == location
    assert (shown or text) == str(location)
    # What is shown can be given again: the launcher hands it on so.
    assert location == parse_location(str(location))


def test_what_is_no_url_is_a_folder() -> None:
    assert Path("/models/a:b") == parse_location("/models/a:b")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("s3://key:secret@bucket/a", "holds no credentials"),
        ("as://account/container?sig=abc", "holds no credentials"),
        ("http://host/models", "s3://, gs:// or as:// is expected"),
        ("s3://", "is expected"),
        ("", "path is empty"),
        ("s3://host:9000", "names no container"),
        ("as://account", "names no container"),
        ("gs://https://host/bucket", "only s3://"),
        ("s3://bucket/a/../b", r"must not contain '\.' or '\.\.'"),
        ("s3://../b", "names no bucket"),
    ],
)
def test_what_is_neither_is_refused(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why) as refused:
        parse_location(text)

    assert "secret" not in str(refused.value)
    assert "abc" not in str(refused.value)


def test_locations_are_told_apart_in_one_variable() -> None:
    several = [
        "s3://bucket/a",
        "/local",
        "s3://host:9000/bucket/b",
        "s3://https://host/bucket",
        "s3://https://host:1/bucket/c",
        "relative/2",
        "gs://bucket",
        "as://account/container/x",
    ]

    assert several == split_locations(":".join(several))
    assert ["/a", "/b"] == split_locations("/a:/b")
