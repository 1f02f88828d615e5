"""What a link makes of replies."""

from __future__ import annotations

from shared.store.link import streams_read


def test_a_stream_that_is_named_without_entries_has_no_news() -> None:
    entry = [b"1-0", [b"k", b"v"]]

    assert [(b"b", [entry])] == streams_read([[b"a", []], [b"b", [entry]]])
    assert [] == streams_read([[b"a", []]])
    assert [] == streams_read(None)
