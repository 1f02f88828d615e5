"""Checks the versions that clients request. Pure. Source of the error texts: triton-spec 5.2."""

from __future__ import annotations

import re

from shared.contract.errors import RequestError
from shared.contract.parameters import INT64_MAX

VERSION_TEXT = re.compile(r"-?[0-9]{1,20}")


def check_version_text(version: str) -> str:
    """A requested version in its plain form ("" stays ""). Raises RequestError for what is no integer from 0 on."""
    if not version:
        return ""
    number = int(version) if VERSION_TEXT.fullmatch(version) else None
    if number is None or number > INT64_MAX:
        # Triton's text names the C++ function that failed to parse the number.
        raise RequestError(
            f"failed to get model version from specified version string '{version}' (details: stol), version should be "
            "an integral value > 0"
        )
    if number < 0:
        raise RequestError(f"invalid model version specified '{version}' , version should be an integral value > 0")
    return str(number)
