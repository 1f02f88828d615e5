"""A real gRPC server with a twin of `Inference` behind it, for real clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import pytest

from gateway.bounds.byte_budget import ByteBudget
from gateway.bounds.memory import MemoryBound
from gateway.bounds.unread_answers import UNLIMITED, UnreadAnswers
from gateway.grpc.server import GrpcServer, serve_grpc
from gateway.grpc.servicer import InferenceServicer
from gateway.models.catalog import Catalog
from gateway.models.repository import RepositoryControl
from gateway.models.runtime_settings import RuntimeSettings
from gateway.models.statistics import Statistics
from gateway.requests.infer_call import InferCall
from gateway.requests.inference import Inference, OnOpen
from gateway.requests.orphans import ConnectionSequences
from gateway.requests.waiting import Answer
from gateway.settings import GatewaySettings
from shared.contract.errors import Code, LoadError, MeshError, RequestError
from shared.contract.messages import ModelRecord, ReplyMessage, RepositoryEntry
from shared.contract.model_config import ModelConfig, TensorSpec
from shared.contract.tensors import Tensor
from shared.process.log_settings import LogSettings
from shared.statistics.tally import DURATIONS, BatchStatistics, Duration, ModelStatistics
from tests.gateway.stubs import stub_at

RECORD = ModelRecord(
    ModelConfig("sum", "python", "", 8, (TensorSpec("INPUT", "INT32", (1,)),), (TensorSpec("OUTPUT", "INT32", (1,)),)),
    "{}",
    ("1",),
)


class InferenceTwin(Inference):
    """`Inference` in memory: keeps the calls in their order, answers by a function.

    respond  gives the answer or the error; None leaves the future for the test to finish
    """

    def __init__(self) -> None:
        self.budget = ByteBudget(UNLIMITED)
        self.calls: list[InferCall] = []
        self.futures: list[asyncio.Future[Answer]] = []
        self.respond: Callable[[InferCall], Answer | MeshError | None] = self.answer
        self._arrived = asyncio.Event()

    def connection(self) -> ConnectionSequences:
        return ConnectionSequences(lambda _: None)

    def submit(
        self,
        call: InferCall,
        connection: ConnectionSequences | None = None,
        on_open: OnOpen | None = None,
        *,
        client: str = "",
    ) -> asyncio.Future[Answer]:
        del on_open, client
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self.calls.append(call)
        self.futures.append(future)
        self._arrived.set()
        match self.respond(call):
            case None:
                pass
            case MeshError() as error:
                future.set_exception(error)
            case answer:
                future.set_result(answer)
        return future

    def answer(self, call: InferCall) -> Answer:
        """An answer that carries the call's inputs back, as OUTPUT0, OUTPUT1, ..."""
        outputs = tuple(Tensor(f"OUTPUT{n}", t.datatype, t.shape, t.raw) for n, t in enumerate(call.inputs))
        return Answer(ReplyMessage("1", outputs, step=1), RECORD, "1", call.request_id, call.session_id)

    def finish(self, number: int) -> None:
        """Answers the call of that number, from 0."""
        self.futures[number].set_result(self.answer(self.calls[number]))

    def fail(self, error: MeshError) -> None:
        """From now on every call fails with this."""
        self.respond = lambda _: error

    def hold(self, call: InferCall) -> None:
        """For `respond`: leaves the answer to the test."""

    async def wait_for_calls(self, count: int) -> None:
        """Returns once that many calls have come."""
        async with asyncio.timeout(60):
            while len(self.calls) < count:
                self._arrived.clear()
                await self._arrived.wait()
        assert len(self.calls) == count


@pytest.fixture
def twin() -> InferenceTwin:
    return InferenceTwin()


class CatalogTwin(Catalog):
    """One model, `sum`, version 1. serves: whether the mesh is ready."""

    def __init__(self) -> None:
        self.serves = True

    @property
    def is_ready(self) -> bool:
        return self.serves

    def find(self, model: str, version: str) -> tuple[ModelRecord, str]:
        return self.record(model, version)[0], "1"

    def record(self, model: str, version: str = "") -> tuple[ModelRecord, tuple[str, ...]]:
        if self.is_model_ready(model, version):
            return RECORD, ("1",)
        raise RequestError(f"Request for unknown model: '{model}' is not found", Code.NOT_FOUND)

    def is_model_ready(self, model: str, version: str = "") -> bool:
        return model == "sum" and version in ("", "1")


class RepositoryTwin(RepositoryControl):
    """Remembers what it was asked to do."""

    def __init__(self) -> None:
        self.done: list[tuple[object, ...]] = []

    def index(self, *, ready_only: bool = False) -> list[RepositoryEntry]:
        entries = [RepositoryEntry("other", "2", "UNAVAILABLE", "unloaded"), RepositoryEntry("sum", "1", "READY")]
        return entries[1:] if ready_only else entries

    async def load(
        self, model: str, *, config_json: str | None = None, files: Mapping[str, bytes] | None = None
    ) -> None:
        if model == "broken":
            raise LoadError("failed to load 'broken', failed to poll from model repository", Code.INTERNAL)
        self.done.append(("load", model, config_json, dict(files or {})))

    async def unload(self, model: str, *, dependents: bool = False) -> None:
        self.done.append(("unload", model))


class SettingsTwin(RuntimeSettings):
    """No settings; their own tests run a whole mesh."""

    def __init__(self) -> None:
        pass

    async def logs(self, changes: Mapping[str, bool | int | str], by: str, client: str) -> LogSettings:
        raise NotImplementedError

    async def traces(
        self, model: str, changes: Mapping[str, list[str] | None], by: str, client: str
    ) -> dict[str, list[str]]:
        raise NotImplementedError


class StatisticsTwin(Statistics):
    """Counters of `sum`."""

    def __init__(self) -> None:
        pass

    async def read(self, model: str = "", version: str = "") -> list[ModelStatistics]:
        if model not in ("", "sum"):
            raise RequestError(f"requested model '{model}' is not available")
        batch = BatchStatistics(4, Duration(2, 10), Duration(2, 20), Duration(2, 30))
        durations = {**dict.fromkeys(DURATIONS, Duration()), "success": Duration(8, 900)}
        return [ModelStatistics("sum", "1", 1700000000000, 8, 2, durations, [batch])]


@pytest.fixture
def catalog() -> CatalogTwin:
    return CatalogTwin()


@pytest.fixture
def repository() -> RepositoryTwin:
    return RepositoryTwin()


@pytest.fixture
def make_servicer(
    twin: InferenceTwin, catalog: CatalogTwin, repository: RepositoryTwin, grpc_settings: GatewaySettings
) -> Callable[..., InferenceServicer]:
    """Makes a servicer over the twins, with a bound that tests can reach; other bounds are far unless given."""
    parts = twin, catalog, repository, StatisticsTwin(), SettingsTwin()

    def make(
        settings: GatewaySettings = grpc_settings,
        memory: MemoryBound | None = None,
        unread: UnreadAnswers | None = None,
    ) -> InferenceServicer:
        memory, unread = memory or MemoryBound(), unread or UnreadAnswers(UNLIMITED)
        return InferenceServicer(*parts, settings, memory=memory, unread=unread, outstanding_max=8)

    return make


@pytest.fixture
def grpc_settings() -> GatewaySettings:
    """A free port, and bounds as by default."""
    return GatewaySettings(redis_url="", grpc_port=0).bounded()


@pytest.fixture
async def rpc_server(
    make_servicer: Callable[[], InferenceServicer], grpc_settings: GatewaySettings
) -> AsyncIterator[GrpcServer]:
    """A running server on a free port."""
    server = await serve_grpc(make_servicer(), grpc_settings)
    yield server
    await server.stop(0)


@pytest.fixture
async def stub(rpc_server: GrpcServer) -> AsyncIterator[Any]:
    """The protocol's own stub, for what tritonclient hides."""
    async with stub_at(rpc_server.port) as stub:
        yield stub
