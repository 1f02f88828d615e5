"""A stateless request whose model nobody serves any more is answered, and leaves its queue."""

from __future__ import annotations

import asyncio
import weakref
from itertools import count
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import msgspec
import pytest

from gateway.parts import GatewayParts
from gateway.requests import unserved
from gateway.requests.infer_call import InferCall
from gateway.requests.unserved import fail_if_gone
from gateway.requests.waiting import PendingRequest
from shared.contract.errors import RequestError, UnavailableError
from shared.contract.messages import RepositoryEntry
from shared.contract.tensors import Tensor
from tests.gateway.cycles import nothing_stays
from tests.gateway.fake_executor import FakeExecutor
from tests.gateway.requests.portless import step, total
from tests.gateway.requests.test_waiting import pending

CALL = InferCall("echo", inputs=(Tensor("INPUT0", "FP32", (1, 1), b"\0\0\0\0"),))


async def test_a_request_whose_model_nobody_serves_any_more_is_refused(
    parts: GatewayParts, executor: FakeExecutor, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("gateway.requests.unserved.PATIENCE_S", 1)
    await executor.pause()
    late = parts.inference.submit(CALL)
    other = parts.inference.submit(step(1, start=True, end=True))
    queue = executor.keys.work_queue("echo", "1")
    async with asyncio.timeout(30):
        while not await executor.commands.hlen(queue.meta):
            await asyncio.sleep(0.005)

    lines = [
        RepositoryEntry("echo", "1", "UNAVAILABLE", "unloaded") if line.model == "echo" else line
        for line in executor.registration.repository
    ]
    models = tuple(model for model in executor.registration.models if model.model != "echo")
    unloaded = msgspec.structs.replace(executor.registration, repository=tuple(lines), models=models)
    await executor.membership.update(unloaded)

    with pytest.raises(UnavailableError, match="Request for unknown model: 'echo' version 1 is not at ready state"):
        await asyncio.wait_for(late, timeout=60)
    async with asyncio.timeout(30):
        while await executor.commands.hlen(queue.meta):
            await asyncio.sleep(0.005)
    executor.paused.clear()
    assert 1 == total(await other)
    assert "echo" not in {message.model for message in executor.received}


async def test_a_request_that_is_given_up_stays_in_no_cycle() -> None:
    """Its inputs may be large, and there may be thousands."""

    def found(model: str, _version: str) -> None:
        raise RequestError(f"no {model}")

    catalog = cast(Any, SimpleNamespace(find=found))
    async with nothing_stays(PendingRequest):
        waiting = [pending(sequence=None)]
        fail_if_gone(waiting[0], {("model", "1")}, catalog, lambda _: None)
        assert "no model" == str(waiting.pop().future.exception())


async def test_a_look_keeps_no_request_that_it_has_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions that were unloaded are looked for over minutes, and the last request may be large."""
    monkeypatch.setattr(unserved, "LOOK_S", 0)
    waiting = [pending(sequence=None)]
    passed, looks = weakref.ref(waiting[0]), count()

    def one_look() -> list[PendingRequest]:
        next(looks)
        return [waiting.pop()] if waiting else []

    catalog = cast(Any, SimpleNamespace(unserved_for=Mock(return_value={("another", "1")})))
    looking = asyncio.create_task(unserved.look_for_unserved(catalog, one_look, lambda _: None))
    async with asyncio.timeout(60):
        while next(looks) < 8:
            await asyncio.sleep(0)
    looking.cancel()
    is_kept = passed() is not None
    await asyncio.wait([looking])

    assert not is_kept
