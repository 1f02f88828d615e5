"""GRPCInferenceService: every rpc of the v2 protocol that has a meaning in a mesh.

The handlers only decode and encode. What a request means is decided in modules that HTTP uses too
(`gateway.requests.admission`, `gateway.models.catalog`, `gateway.models.repository`, `gateway.models.statistics`).

Source: triton-spec section 6.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from gateway.bounds.fair_lock import FairLock
from gateway.bounds.memory import MemoryBound
from gateway.bounds.unread_answers import UnreadAnswers
from gateway.grpc.codec import encode_answer, is_bulky
from gateway.grpc.decoding import Decode, decoded_call
from gateway.grpc.errors import SHUTTING_DOWN
from gateway.grpc.intake import Intake
from gateway.grpc.metadata import SESSION_KEY, CallMetadata, call_metadata, with_deadline
from gateway.grpc.pb import AnyMessage, InferRequest, InferResponse, pb
from gateway.grpc.repository import load_parameters, unloads_dependents
from gateway.grpc.settings import log_changes, log_response, trace_changes, trace_response
from gateway.grpc.stream import InferStream
from gateway.grpc.wire.messages import DEFLATE, GZIP, IDENTITY
from gateway.grpc.wire.rpc import Rpc
from gateway.models.catalog import Catalog
from gateway.models.metadata import extensions_of, index_line, model_metadata, statistics_document
from gateway.models.repository import RepositoryControl
from gateway.models.runtime_settings import RuntimeSettings
from gateway.models.shared_reads import SharedDocument
from gateway.models.statistics import Statistics
from gateway.requests.infer_call import InferCall
from gateway.requests.inference import Inference
from gateway.requests.regions import NO_REGIONS, Regions, cuda_refusal
from gateway.requests.waiting import Answer, OnOpen
from gateway.settings import GatewaySettings
from shared.configuration.proto import config_proto
from shared.contract.calls import ACCEPTED, ANSWERED_KEY, CALL_KEY, REFUSED
from shared.contract.endpoints import Endpoint
from shared.contract.errors import Code, MeshError, NotReadyError, RequestError, UnavailableError
from shared.statistics.tally import ModelStatistics
from shared.store.release import RELEASE

T = TypeVar("T")

# ruff: noqa: N802  (handlers are named by the protocol)

OUTSTANDING_MAX = 1024
"""Unanswered requests of one stream. More than the sequences that one client may sensibly interleave; 1024 waiting
futures take about a megabyte."""
COMPRESSION = {"none": IDENTITY, "low": GZIP, "medium": DEFLATE, "high": DEFLATE}
"""Levels of Triton's option, as gRPC's own core turns them into algorithms."""


class InferenceServicer:
    """The service of one gateway.

    memory           bounds what is received, beside the budget of `inference`
    regions          shared memory of clients
    unread           counts answers until their client has read them
    outstanding_max  unanswered requests of one stream
    """

    def __init__(
        self,
        inference: Inference,
        catalog: Catalog,
        repository: RepositoryControl,
        statistics: Statistics,
        runtime_settings: RuntimeSettings,
        settings: GatewaySettings,
        *,
        memory: MemoryBound,
        unread: UnreadAnswers,
        regions: Regions = NO_REGIONS,
        outstanding_max: int = OUTSTANDING_MAX,
    ) -> None:
        self._inference = inference
        self._catalog = catalog
        self._repository = repository
        self._statistics = statistics
        self._statistics_message = SharedDocument(statistics_message)
        self._runtime_settings = runtime_settings
        self._server_name = settings.server_id
        self._outstanding_max = outstanding_max
        self._regions = regions
        self._forward = settings.metadata_forward_regex
        self._compression = COMPRESSION[settings.grpc_infer_response_compression_level]
        self.intake = Intake(inference.budget, memory, message_bytes_max=settings.grpc_max_input_size)
        self.unread = unread
        self._encoding = FairLock()
        """Held while a bulky answer is encoded in a thread: one goes at a time, also of clients that have left."""
        self._streams: set[InferStream] = set()
        self._leaving = False
        self._refuses = False

    def is_ready(self) -> bool:
        """Whether the mesh can serve, and this gateway is not stopping."""
        return self._catalog.is_ready and not self._leaving

    def leave(self) -> None:
        """Reports not ready, but still serves calls. Each stream ends as soon as it has no unanswered request."""
        self._leaving = True
        for stream in self._streams:
            stream.leave()

    def stop(self) -> None:
        """Refuses new requests. Open streams end when the requests that they have accepted are answered."""
        self.leave()
        self._refuses = True
        for stream in self._streams:
            stream.stop()

    # -- inference --------------------------------------------------------------------------------------------------

    async def ModelInfer(self, request: InferRequest, rpc: Rpc) -> InferResponse:
        """One request, one answer. When the client leaves, or its deadline passes, this is cancelled, and with it the
        request."""
        if self._refuses:
            raise UnavailableError(SHUTTING_DOWN)
        call, forms = await self._decoder(rpc, self._metadata_of(rpc))(request)
        del request  # its tensors are in `call`: keeping both would double them while the answer is awaited
        try:
            answer = await self._inference.submit(call, client=rpc.client)
        except MeshError as error:
            if call.origin is not None and (error.accepted or isinstance(error, NotReadyError)):
                rpc.trailing = ((ANSWERED_KEY, ACCEPTED if error.accepted else REFUSED),)
            raise
        if answer.session_id is not None:
            rpc.trailing = ((SESSION_KEY, answer.session_id),)
        if forms and is_bulky(answer, forms):
            response = await self._encoding.in_thread(rpc.client, encode_answer, answer, forms)
        else:
            response = encode_answer(answer, forms)
        rpc.compress(self._compression)
        return response

    async def ModelStreamInfer(self, rpc: Rpc) -> None:
        """A stream of requests for any models; see `gateway.grpc.stream`."""
        if self._refuses:
            raise UnavailableError(SHUTTING_DOWN)
        rpc.compress(self._compression)
        metadata = self._metadata_of(rpc)
        connection = self._inference.connection()

        def submit(call: InferCall, on_open: OnOpen) -> asyncio.Future[Answer]:
            return self._inference.submit(call, connection, on_open, client=rpc.client)

        stream = InferStream(
            rpc.write,
            partial(self.intake.next_message, rpc, pb.ModelInferRequest),
            submit,
            metadata,
            self._decoder(rpc, metadata, Endpoint.MODEL_STREAM_INFER),
            unread=self.unread,
            cut=rpc.cut,
            in_thread=partial(self._encoding.in_thread, rpc.client),
            outstanding_max=self._outstanding_max,
        )
        self._streams.add(stream)
        try:
            await stream.run()
        finally:
            self._streams.discard(stream)
            connection.end()

    def _decoder(self, rpc: Rpc, metadata: CallMetadata, endpoint: Endpoint = Endpoint.MODEL_INFER) -> Decode:
        return partial(
            decoded_call,
            metadata=metadata,
            regions=self._regions,
            find=self._catalog.find,
            in_thread=partial(self._in_thread, rpc),
            endpoint=endpoint,
        )

    async def _in_thread(self, rpc: Rpc, decode: Callable[..., T], *given: Any) -> T:
        """What `decode` returns, in a thread, when it is the client's turn. The call's message counts until then.

        raises  UnavailableError when there is no room for it
        """
        budget = self._inference.budget
        with budget.reserve(rpc.client) as reservation:
            reservation.hold(rpc.message_bytes)
            return await budget.decoding.in_thread(rpc.client, decode, *given)

    def _metadata_of(self, rpc: Rpc) -> CallMetadata:
        metadata = call_metadata(rpc.opening.metadata, self._forward)
        if metadata.call is None:
            return metadata
        return with_deadline(metadata, rpc.time_left_s(), time.time_ns())

    # -- server and models ------------------------------------------------------------------------------------------

    async def ServerLive(self, request: AnyMessage, rpc: Rpc) -> AnyMessage:
        """Always live: a process that does not run its event loop cannot answer."""
        return pb.ServerLiveResponse(live=True)

    async def ServerReady(self, request: AnyMessage, rpc: Rpc) -> AnyMessage:
        return pb.ServerReadyResponse(ready=self.is_ready())

    async def ModelReady(self, request: AnyMessage, rpc: Rpc) -> AnyMessage:
        """Whether a model is ready. An unknown model is not ready, which is no error.

        A gateway that leaves calls no model ready, so that clients go elsewhere. A model that asks wants to know of the
        other model, not of the gateway.
        """
        may_say_yes = not self._leaving or CALL_KEY in dict(rpc.opening.metadata)
        ready = may_say_yes and self._catalog.is_model_ready(request.name, request.version)
        return pb.ModelReadyResponse(ready=ready)

    async def ServerMetadata(self, request: AnyMessage, rpc: Rpc) -> AnyMessage:
        extensions = extensions_of(shared_memory=self._regions.is_allowed)
        return pb.ServerMetadataResponse(name=self._server_name, version=RELEASE, extensions=extensions)

    async def ModelMetadata(self, request: AnyMessage, rpc: Rpc) -> AnyMessage:
        return pb.ModelMetadataResponse(**model_metadata(*self._catalog.record(request.name, request.version)))

    async def ModelConfig(self, request: AnyMessage, rpc: Rpc) -> AnyMessage:
        """The configuration as the executor completed it."""
        record, _ = self._catalog.record(request.name, request.version)
        return pb.ModelConfigResponse(config=config_proto(record.config_json))

    async def ModelStatistics(self, request: AnyMessage, rpc: Rpc) -> AnyMessage:
        """Counters of READY versions, summed over the executors."""
        return self._statistics_message.of(await self._statistics.read(request.name, request.version))

    # -- repository -------------------------------------------------------------------------------------------------

    async def RepositoryIndex(self, request: AnyMessage, rpc: Rpc) -> AnyMessage:
        """Every model version that an executor knows of."""
        refuse_repository_name(request)
        entries = self._repository.index(ready_only=request.ready)
        return pb.RepositoryIndexResponse(models=map(index_line, entries))

    async def RepositoryModelLoad(self, request: AnyMessage, rpc: Rpc) -> AnyMessage:
        """Returns when every executor has loaded the model."""
        refuse_repository_name(request)
        model, (config_json, files) = request.model_name, load_parameters(request.parameters)
        del request  # its files are in `files`, and the load may take minutes
        await self._repository.load(model, config_json=config_json, files=files)
        return pb.RepositoryModelLoadResponse()

    async def RepositoryModelUnload(self, request: AnyMessage, rpc: Rpc) -> AnyMessage:
        """Returns when no executor has the model any more."""
        refuse_repository_name(request)
        dependents = unloads_dependents(request.parameters)
        await self._repository.unload(request.model_name, dependents=dependents)
        return pb.RepositoryModelUnloadResponse()

    # -- shared memory ----------------------------------------------------------------------------------------------

    async def SystemSharedMemoryStatus(self, request: AnyMessage, rpc: Rpc) -> AnyMessage:
        response = pb.SystemSharedMemoryStatusResponse()
        for region in self._regions.status(request.name):
            shown = response.regions[region.name]
            shown.name, shown.key = region.name, region.key
            shown.offset, shown.byte_size = region.offset, region.byte_size
        return response

    async def SystemSharedMemoryRegister(self, request: AnyMessage, rpc: Rpc) -> AnyMessage:
        self._regions.register(request.name, request.key, request.offset, request.byte_size)
        return pb.SystemSharedMemoryRegisterResponse()

    async def SystemSharedMemoryUnregister(self, request: AnyMessage, rpc: Rpc) -> AnyMessage:
        """One region, or all of them."""
        self._regions.unregister(request.name)
        return pb.SystemSharedMemoryUnregisterResponse()

    async def CudaSharedMemoryStatus(self, request: AnyMessage, rpc: Rpc) -> AnyMessage:
        """Never a region: a gateway has no GPU."""
        if request.name:
            raise RequestError(f"Unable to find cuda shared memory region: '{request.name}'", Code.NOT_FOUND)
        return pb.CudaSharedMemoryStatusResponse()

    async def CudaSharedMemoryRegister(self, request: AnyMessage, rpc: Rpc) -> AnyMessage:
        raise cuda_refusal(request.name)

    async def CudaSharedMemoryUnregister(self, request: AnyMessage, rpc: Rpc) -> AnyMessage:
        """There is nothing to do."""
        return pb.CudaSharedMemoryUnregisterResponse()

    # -- settings of the whole mesh ---------------------------------------------------------------------------------

    async def TraceSetting(self, request: AnyMessage, rpc: Rpc) -> AnyMessage:
        """Reads, and changes when the request says so, what is traced."""
        by, changes = f"gRPC client {rpc.peer}", trace_changes(request)
        return trace_response(await self._runtime_settings.traces(request.model_name, changes, by, rpc.client))

    async def LogSettings(self, request: AnyMessage, rpc: Rpc) -> AnyMessage:
        """Reads, and changes when the request says so, what is logged."""
        by = f"gRPC client {rpc.peer}"
        return log_response(await self._runtime_settings.logs(log_changes(request), by, rpc.client))


def statistics_message(statistics: Sequence[ModelStatistics]) -> AnyMessage:
    return pb.ModelStatisticsResponse(model_stats=map(statistics_document, statistics))


def refuse_repository_name(request: AnyMessage) -> None:
    """Raises RequestError when the client names a repository: a mesh has only one."""
    if request.repository_name:
        raise RequestError("'repository_name' specification is not supported", Code.UNSUPPORTED)
