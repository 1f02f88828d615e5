"""Sessions of the real `tritonclient`, over HTTP, gRPC and gRPC streams. Each carries the steps of one sequence.

A session sends steps in order and gives a future for each answer. tritonclient's errors leave out the reason and the
last step, so they are read from the library's own response objects.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
import numpy as np
import tritonclient.grpc.aio as grpc_aio
import tritonclient.http.aio as http_aio
from tritonclient.utils import InferenceServerException

from deploy.chaos.fold import FoldState
from deploy.chaos.scripts import ProtocolName, Script

HTTP_CONNECTIONS_MAX = 256
CHANNELS = 4
"""gRPC connections to each gateway, shared by the sessions. With a single one, every cut would hit all sessions."""
CHANNEL_OPTIONS = [
    # Without this bound gRPC's back-off grows to minutes, in which a restarted gateway would not be found.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.use_local_subchannel_pool", 1),
]
OF_TRANSPORT = (
    "failed to connect",
    "Socket closed",
    "onnection reset",
    "Stream removed",
    "Broken pipe",
    "GOAWAY",
    "shutting down",
)
"""Words in which grpc itself tells of a lost connection; every other UNAVAILABLE was said by the mesh."""
NOT_WRITTEN = "Internal error from Core"
"""What grpc.aio says, as INTERNAL, when it cannot write a stream's message because the connection is lost."""
CUT_OFF = "Received RST_STREAM"
"""How begins what grpc says, as INTERNAL, of a call that the other side has ended without a status."""
GOODBYE_S = 5.0


class RefusedError(Exception):
    """The mesh answered with an error.

    last_step  -1 if the error does not say it
    code       the error's kind, of the mesh or of gRPC, or HTTP's status; "" if nothing says it
    """

    def __init__(self, text: str, reason: str = "", last_step: int = -1, code: str = "") -> None:
        super().__init__(text)
        self.text = text
        self.reason = reason
        self.last_step = last_step
        self.code = code


class BrokenError(Exception):
    """The connection was lost or refused."""


@dataclass(frozen=True, slots=True)
class GatewayAddresses:
    """host:port of a gateway's two protocols, as the clients reach it; grpc may be ""."""

    http: str
    grpc: str


class Session(Protocol):
    """A connection that carries one sequence's steps."""

    def send(self, script: Script, step: int) -> asyncio.Future[FoldState]:
        """Sends a step (from 1). The future raises `RefusedError` or `BrokenError`."""
        ...

    async def close(self) -> None:
        """Closes the session in order, once every step is answered."""
        ...

    async def hang_up(self) -> None:
        """Breaks the session off. Open futures are cancelled."""
        ...


class HttpClient(http_aio.InferenceServerClient):  # pyright: ignore[reportUntypedBaseClass]
    """tritonclient's HTTP client. It drops the reason of an error, so this class reads the whole body."""

    async def _post(self, *args: Any, **kwargs: Any) -> Any:
        response = await super()._post(*args, **kwargs)
        if response.status != 200:
            raise http_refusal(response.status, await response.read())
        return response


def http_refusal(status: int, body: bytes) -> RefusedError:
    """The error in a response's body. A body that is not the mesh's JSON is quoted."""
    try:
        told = json.loads(body)
        return RefusedError(str(told["error"]), told.get("reason", ""), told.get("last_step", -1), str(status))
    except (ValueError, KeyError, TypeError):
        return RefusedError(f"HTTP {status}: {body[:200]!r}", code=str(status))


class Gateway:
    """The clients of one gateway; sessions share them."""

    def __init__(self, addresses: GatewayAddresses) -> None:
        self._http = HttpClient(addresses.http, conn_limit=HTTP_CONNECTIONS_MAX) if addresses.http else None
        self._grpc: Sequence[Any] = [
            grpc_aio.InferenceServerClient(addresses.grpc, channel_args=CHANNEL_OPTIONS) if addresses.grpc else None
            for _ in range(CHANNELS)
        ]
        self._made = 0

    def session(self, protocol: ProtocolName) -> Session:
        self._made += 1
        client = self._grpc[self._made % CHANNELS]
        match protocol:
            case "http":
                return UnarySession(self._http, http_aio.InferInput)
            case "grpc":
                return UnarySession(client, grpc_aio.InferInput)
            case "client" | "stream":
                return StreamSession(client)

    async def unserved(self, models: Iterable[str]) -> list[str]:
        """Those models that the gateway has nobody for. Raises InferenceServerException if it does not answer."""
        client: Any = self._http or self._grpc[0]
        return [model for model in models if not await client.is_model_ready(model)]

    async def close(self) -> None:
        for client in (self._http, *self._grpc):
            if client is not None:
                await client.close()


def request(kind: Any, script: Script, step: int) -> dict[str, Any]:
    """The arguments of a step's `infer`; kind: `InferInput` of either library."""
    value = kind("INPUT", [1, 1], "INT64")
    value.set_data_from_numpy(np.array([[script.values[step - 1]]], np.int64))
    return {
        "model_name": script.model,
        "inputs": [value],
        "sequence_id": script.correlation_id,
        "sequence_start": step == 1,
        "sequence_end": script.ends and step == len(script.values),
        "request_id": "" if script.numbered else f"{script.index}.{step}",
        # START is always numbered. A stalled connection may deliver it late, when the client has repeated it elsewhere
        # and gone on. Without a number the mesh would take it for the beginning of a new sequence with the same id.
        "parameters": {"sequence_step": step} if script.numbered or step == 1 else None,
    }


def state_of(result: Any) -> FoldState:
    fold, length = result.as_numpy("OUTPUT").reshape(-1).tolist()
    return FoldState(fold, length)


class UnarySession:
    """Sends each step as a call of its own, over HTTP or gRPC."""

    def __init__(self, client: Any, kind: Any) -> None:
        self._client = client
        self._kind = kind
        self._calls: set[asyncio.Task[FoldState]] = set()

    def send(self, script: Script, step: int) -> asyncio.Future[FoldState]:
        call = asyncio.create_task(self._call(request(self._kind, script, step)))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        return call

    async def _call(self, arguments: dict[str, Any]) -> FoldState:
        try:
            return state_of(await self._client.infer(**arguments))
        except InferenceServerException as error:
            raise told_by_grpc(error.__context__ or error) from None
        except Exception as error:
            # aiohttp's connection errors are OSErrors, except one.
            if isinstance(error, OSError) or type(error).__module__.startswith("aiohttp"):
                raise BrokenError(f"{type(error).__name__}: {error}") from None
            raise

    async def close(self) -> None:
        await self.hang_up()

    async def hang_up(self) -> None:
        calls = list(self._calls)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)


def told_by_grpc(error: BaseException) -> RefusedError | BrokenError:
    """Tells the mesh's errors from broken connections: the mesh's carry metadata, or a code that gRPC itself does not
    use."""
    if not isinstance(error, grpc.aio.AioRpcError):
        return RefusedError(str(error))
    text = f"{error.code().name}: {error.details()}"
    told = {str(name): str(value) for name, value in error.trailing_metadata() or ()}
    if "seqmesh-reason" in told:
        return RefusedError(text, told["seqmesh-reason"], int(told.get("seqmesh-last-step", -1)), error.code().name)
    lost = error.code() is grpc.StatusCode.UNAVAILABLE and any(words in text for words in OF_TRANSPORT)
    if lost or error.code() is grpc.StatusCode.CANCELLED or (error.details() or "").startswith((NOT_WRITTEN, CUT_OFF)):
        return BrokenError(text)
    return RefusedError(text, code=error.code().name)


class StreamSession:
    """One ModelStreamInfer call. Answers come in the order of the steps."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._steps: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self._waiting: deque[asyncio.Future[FoldState]] = deque()
        self._call: Any = None
        self._reader: asyncio.Task[None] | None = None
        self._broken: BrokenError | None = None

    def send(self, script: Script, step: int) -> asyncio.Future[FoldState]:
        answer = asyncio.get_running_loop().create_future()
        if self._broken is not None:
            answer.set_exception(self._broken)
            return answer
        self._waiting.append(answer)
        self._steps.put_nowait(request(grpc_aio.InferInput, script, step))
        if self._reader is None:
            # The gRPC call inside tritonclient's iterator: the iterator itself drops the parameters of an error.
            self._call = self._client.stream_infer(self._requests())._grpc_call  # noqa: SLF001
            self._reader = asyncio.create_task(self._read())
        return answer

    async def _requests(self) -> AsyncIterator[dict[str, Any]]:
        while (step := await self._steps.get()) is not None:
            yield step

    async def _read(self) -> None:
        text = "the server ended the stream"
        try:
            async for message in self._call:
                self._settle(message)
        except grpc.aio.AioRpcError as error:
            text = f"{error.code().name}: {error.details()}"
        self._broken = BrokenError(text)
        while self._waiting:
            self._resolve(self._broken)

    def _settle(self, message: Any) -> None:
        if message.error_message:
            told = message.infer_response.parameters
            last_step = told["last_step"].int64_param if "last_step" in told else -1
            reason, code = (told[name].string_param if name in told else "" for name in ("reason", "code"))
            self._resolve(RefusedError(message.error_message, reason, last_step, code))
        else:
            self._resolve(state_of(grpc_aio.InferResult(message.infer_response)))

    def _resolve(self, outcome: FoldState | Exception) -> None:
        if not self._waiting:
            return
        answer = self._waiting.popleft()
        if answer.done():
            return
        if isinstance(outcome, Exception):
            answer.set_exception(outcome)
        else:
            answer.set_result(outcome)

    async def close(self) -> None:
        self._steps.put_nowait(None)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GOODBYE_S):
                if self._reader is not None:
                    await asyncio.shield(self._reader)
        await self.hang_up()

    async def hang_up(self) -> None:
        for answer in self._waiting:
            answer.cancel()
        self._waiting.clear()
        if self._call is not None:
            self._call.cancel()
        self._steps.put_nowait(None)
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
