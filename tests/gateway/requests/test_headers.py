"""Headers that go to a model as parameters."""

from __future__ import annotations

import re

import pytest

from gateway.grpc.codec import RARE_PARAMETERS
from gateway.requests.headers import forwarded
from gateway.rest.request import MESH_PARAMETERS
from shared.contract.errors import RequestError


@pytest.mark.parametrize("name", sorted({*MESH_PARAMETERS, *RARE_PARAMETERS}))
def test_what_means_something_as_a_parameter_of_a_request_is_no_header(name: str) -> None:
    with pytest.raises(RequestError, match=f"^Header '{name}' is reserved for Triton usage and cannot be forwarded"):
        forwarded([(name, "1")], re.compile(""))
