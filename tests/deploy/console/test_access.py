"""Who may read and who may act."""

from __future__ import annotations

import pytest

from deploy.console.access import Access
from shared.contract.errors import RequestError
from shared.origins import Origins

TOKEN = "a-token-of-some-length"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"authorization": f"Bearer {TOKEN}"}, True),
        ({"authorization": f"bearer {TOKEN}"}, True),
        ({"authorization": TOKEN}, False),
        ({"authorization": "Bearer "}, False),
        ({"authorization": f"Bearer {TOKEN}x"}, False),
        ({"authorization": "Bearer \u00fc"}, False),
        ({"cookie": f"token={TOKEN}"}, False),
        ({}, False),
    ],
)
def test_only_the_whole_token_signs_in(given: dict[str, str], *, expected: bool) -> None:
    access = Access(TOKEN, Origins(is_loopback=True), is_loopback=True)

    assert expected == access.is_signed_in(given)


def test_beyond_loopback_reading_needs_the_token_too() -> None:
    near, far = (Access(TOKEN, Origins(is_loopback=here), is_loopback=here) for here in (True, False))

    near.check_reader({})
    far.check_reader({"authorization": f"Bearer {TOKEN}"})
    with pytest.raises(RequestError, match="sign in"):
        far.check_reader({})
    with pytest.raises(RequestError, match="sign in"):
        near.check_actor({})
