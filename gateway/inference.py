"""The one way into the mesh for an inference request, whatever protocol brought it.

`submit` is synchronous up to the place in the queue: two calls made one after the other are accepted in that order,
which is what keeps a stream's steps in order. Everything that can go wrong is the future's exception.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field

from gateway.admission import Admitted, InferCall, Parameter, admit, check_version_text, wants_integer_id
from gateway.catalog import Catalog
from gateway.dispatch import Dispatch
from gateway.replies import Waiting
from shared.errors import MeshError
from shared.messages import ModelRecord, ReplyMessage


@dataclass(frozen=True, slots=True)
class Answer:
    """A successful inference.

    message        the executor's reply; its outputs are the ones asked for, in the order of the configuration
    model          the record that the request was checked against
    version        the version that ran
    request_id     as the caller gave it, "" for none
    session_id     what to put into `Inference-Session-Id`: the caller's, or the one that was made; None for neither
    sequence_step  the step's number since START; 0 for a stateless model
    parameters     the response's parameters: the model's own, and `sequence_id` of a sequence that the server named,
                   `sequence_step` where the request numbered its steps
    """

    message: ReplyMessage
    model: ModelRecord
    version: str
    request_id: str
    session_id: str | None
    sequence_step: int
    parameters: Mapping[str, Parameter] = field(default_factory=dict[str, Parameter])


class Inference:
    """Admits requests, sends them on and gives a future for each.

    submit(call) -> asyncio.Future[Answer]
        Never raises: every failure is the future's MeshError. Cancelling the future means that the caller has left:
        its entry goes at once, the step itself stays accepted.
    """

    def __init__(self, catalog: Catalog, dispatch: Dispatch) -> None:
        self._catalog = catalog
        self._dispatch = dispatch

    def submit(self, call: InferCall) -> asyncio.Future[Answer]:
        """Puts a request in the queue of the next round trip; the order of calls is the order of acceptance."""
        raise NotImplementedError
