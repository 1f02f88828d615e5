"""What an object store lists, read as models."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from executor.remote.listing import Listing, changed_ns, listings
from shared.contract.errors import LoadError

WHEN = datetime(2026, 11, 1, tzinfo=UTC)


def found(*names: str, tag: str = "e") -> dict[str, dict[str, Any]]:
    return {
        name: {"type": "directory" if name.endswith("/d") else "file", "size": 1, "ETag": tag, "LastModified": WHEN}
        for name in names
    }


def test_models_are_the_folders_below_the_root() -> None:
    listed = listings(
        "b/root",
        found(
            "b/root/", "b/root/README", "b/root/m/config.pbtxt", "b/root/m/1/model.py", "b/root/.git/x", "b/root/e/1/"
        ),
    )

    assert {"m", "e"} == listed.keys()
    assert ["1/model.py", "config.pbtxt"] == [file.path for file in listed["m"].files]
    # An ensemble's version is a folder without a file; stores mark it by an object whose name ends in '/'.
    assert ((), ("1",)) == (listed["e"].files, listed["e"].folders)


@pytest.mark.parametrize("name", ["../x", "1/../../x", "1//x", "./x", "1/a\\b", "1/a\nb", "1/" + "x" * 300])
def test_a_name_that_leads_out_of_the_folder_refuses_its_model_and_no_other(name: str) -> None:
    listed = listings("b", found(f"b/bad/{name}", "b/bad/config.pbtxt", "b/good/config.pbtxt"))

    with pytest.raises(LoadError, match="leads out of the folder of model 'bad'"):
        listed["bad"].check()
    listed["good"].check()


@pytest.mark.parametrize("name", ["../x", "./config.pbtxt", "/config.pbtxt", "a\\b/config.pbtxt"])
def test_what_can_be_no_models_name_is_none(name: str) -> None:
    assert {} == listings("b", found(f"b/{name}"))


def test_digests_follow_content_and_names_alone() -> None:
    def digest(**changes: str) -> str:
        return listings("b", found("b/m/config.pbtxt", "b/m/1/model.py", **changes))["m"].digest

    assert digest() == digest()
    assert digest() != digest(tag="other")
    assert listings("b", found("b/m/1/a"))["m"].digest != listings("b", found("b/m/1/a", "b/m/2/"))["m"].digest
    assert Listing("m", ()).digest == Listing("other", ()).digest


def test_each_stores_fields_are_read() -> None:
    seconds = int(WHEN.timestamp())
    for info in (
        {"LastModified": WHEN, "ETag": '"1"'},
        {"last_modified": WHEN, "etag": "0x8D"},
        {"updated": "2026-11-01T00:00:00.000Z", "etag": "CJ=", "generation": "1"},
        {"mtime": WHEN.timestamp()},
    ):
        assert seconds == changed_ns(info) // 10**9
    assert changed_ns({"updated": WHEN, "etag": "a"}) != changed_ns({"updated": WHEN, "etag": "b"})
