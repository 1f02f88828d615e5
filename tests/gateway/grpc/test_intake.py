"""What the gRPC port receives is bounded before it is unpacked and decoded."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator, Callable, Hashable
from dataclasses import replace
from typing import Any

import grpc
import pytest
from h2.settings import SettingCodes
from hyperframe.frame import ContinuationFrame, HeadersFrame, SettingsFrame

from gateway.bounds.byte_budget import ByteBudget
from gateway.bounds.memory import MemoryBound
from gateway.bounds.unread_answers import UnreadAnswers
from gateway.grpc import intake, weight
from gateway.grpc.intake import decoded
from gateway.grpc.pb import pb
from gateway.grpc.server import GrpcServer, serve_grpc
from gateway.grpc.servicer import InferenceServicer
from gateway.grpc.wire.messages import prefixed
from gateway.ports.turns import LoopTurns
from gateway.requests.infer_call import InferCall
from gateway.settings import GatewaySettings
from shared.contract.errors import Code, MeshError, RequestError
from shared.contract.messages import RepositoryEntry
from tests.gateway.cycles import nothing_stays
from tests.gateway.grpc.test_stream import request
from tests.gateway.grpc.wire.peer import INFER, STREAM, peer_of
from tests.gateway.hostile import Target, connected

MESSAGE_MAX = 4 << 20
ROOM = 8 << 20
TEXT_BYTES = 1 << 20
Status = grpc.StatusCode
NO_MEMORY = "the gateway has no memory for the messages that are on their way"
SOON_S = 60.0


class ResidentTwin:
    """What the process holds, as the test says."""

    def __init__(self) -> None:
        self.bytes = 0

    def __call__(self) -> int:
        return self.bytes


@pytest.fixture
def resident() -> ResidentTwin:
    return ResidentTwin()


@pytest.fixture
def memory(resident: ResidentTwin) -> MemoryBound:
    return MemoryBound(1000, resident)


@pytest.fixture
def budget(memory: MemoryBound) -> ByteBudget:
    return ByteBudget(ROOM, memory)


@pytest.fixture
def unread() -> UnreadAnswers:
    return UnreadAnswers(ROOM)


@pytest.fixture
async def server(
    make_servicer: Callable[..., InferenceServicer],
    twin: Any,
    grpc_settings: GatewaySettings,
    memory: MemoryBound,
    budget: ByteBudget,
    unread: UnreadAnswers,
) -> AsyncIterator[GrpcServer]:
    settings = replace(grpc_settings, grpc_max_input_size=MESSAGE_MAX)
    twin.budget = budget
    server = await serve_grpc(make_servicer(settings, memory, unread), settings)
    memory.reliefs.append(server.relieve)
    yield server
    await server.stop(0)


@pytest.fixture
async def channel(server: GrpcServer) -> AsyncIterator[Any]:
    options = [("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}", options=options) as channel:
        yield channel


def sized(size: int, number: int = 0) -> bytes:
    made = request(number)
    made.inputs[0].datatype, made.inputs[0].shape[:] = "UINT8", [size]
    made.raw_input_contents[0] = bytes(size)
    return made.SerializeToString()


async def refusal(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call
    return refused.value


# -- turns ----------------------------------------------------------------------------------------------------------


def turns_of_decoding(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of the loop's turn in which each message is decoded, as they come. One may begin in each turn."""
    turns, seen = LoopTurns(), list[int]()

    def noted(raw: bytes, kind: Any) -> Any:
        seen.append(turns.number)
        return decoded(raw, kind)

    monkeypatch.setattr(intake, "decoded", noted)
    monkeypatch.setattr("gateway.ports.turns.ENTERING_MAX", 1)
    return seen


@pytest.mark.parametrize("is_packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("path", [INFER, STREAM])
async def test_of_the_messages_that_end_at_one_moment_some_are_decoded_in_a_turn_of_the_loop(
    server: GrpcServer, monkeypatch: pytest.MonkeyPatch, path: str, *, is_packed: bool
) -> None:
    """Large ones, and those that may unpack to large ones: each may take milliseconds."""
    seen = turns_of_decoding(monkeypatch)
    message = prefixed(sized(intake.QUICK_BYTES), "gzip" if is_packed else "identity")
    assert message[0] == is_packed
    async with peer_of(server.port) as peer:
        await peer.until(lambda: peer.h2.outbound_flow_control_window > 20 * len(message))
        calls = [peer.call(path, grpc_encoding="gzip") for _ in range(20 if path == INFER else 1)]
        for number in range(20):
            peer.h2.send_data(calls[number % len(calls)], message, end_stream=number >= 20 - len(calls))
        peer.flush()
        for call in calls:
            assert ("0", "") == await peer.status(call)

    # Two turns, one after the other, may be counted as one.
    assert 20 == len(seen)
    assert len(set(seen)) >= 20 // 2


async def test_of_the_messages_that_a_stream_was_sent_ahead_some_are_decoded_in_a_turn_of_the_loop(
    server: GrpcServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small ones, too: a window may hold a thousand of them."""
    seen = turns_of_decoding(monkeypatch)
    monkeypatch.setattr("gateway.grpc.wire.rpc.AHEAD_MAX", 1)
    async with peer_of(server.port) as peer:
        stream = peer.call(STREAM)
        peer.h2.send_data(stream, 20 * prefixed(sized(4), "identity"), end_stream=True)
        peer.flush()
        assert ("0", "") == await peer.status(stream)

    # Two turns, one after the other, may be counted as one.
    assert 20 == len(seen)
    assert len(set(seen)) >= 20 // 2


# -- packed ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [4, 100_000, 3 << 20])
@pytest.mark.parametrize("algorithm", [grpc.Compression.Gzip, grpc.Compression.Deflate])
async def test_clients_may_compress(server: GrpcServer, twin: Any, algorithm: grpc.Compression, size: int) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}", compression=algorithm) as channel:
        untyped: Any = channel
        await untyped.unary_unary(INFER)(sized(size))
        stream = untyped.stream_stream(STREAM)()
        for number in range(3):
            await stream.write(sized(size, number))
        await stream.done_writing()
        answers = [pb.ModelStreamInferResponse.FromString(answer) async for answer in stream]

    assert ["0", "1", "2"] == [answer.infer_response.id for answer in answers]
    assert 4 * [bytes(size)] == [call.inputs[0].raw for call in twin.calls]


@pytest.mark.parametrize("algorithm", [grpc.Compression.Gzip, grpc.Compression.Deflate])
async def test_a_message_that_unpacks_to_more_than_the_bound_is_refused(
    server: GrpcServer, algorithm: grpc.Compression
) -> None:
    """By the gateway, at the first piece beyond the bound; the transport would have unpacked it without counting."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}", compression=algorithm) as channel:
        untyped: Any = channel
        refused = await refusal(untyped.unary_unary(INFER)(bytes(50 << 20)))

    assert Status.RESOURCE_EXHAUSTED == refused.code()
    seen = MESSAGE_MAX + (1 << 20)
    assert f"Decompressed message larger than max ({seen} vs. {MESSAGE_MAX})" == refused.details()


async def test_what_is_unpacked_takes_its_place_in_the_room(server: GrpcServer, budget: ByteBudget) -> None:
    """Where others have taken most of it, it is refused before it is whole; in a stream by a message."""
    budget.take(ROOM - (2 << 20))
    message = sized(3 << 20)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}", compression=grpc.Compression.Gzip) as packing:
        channel: Any = packing
        refused = await refusal(channel.unary_unary(INFER)(message))
        assert Status.UNAVAILABLE == refused.code()
        stream = channel.stream_stream(STREAM)()
        await stream.write(message)
        assert "bytes in flight" in pb.ModelStreamInferResponse.FromString(await stream.read()).error_message
        assert ROOM - (2 << 20) == budget.taken

        budget.give_back(ROOM - (2 << 20))
        await stream.write(message)
        assert "0" == pb.ModelStreamInferResponse.FromString(await stream.read()).infer_response.id
        stream.cancel()
        assert 0 == budget.taken


def decoded_in_a_thread() -> bytes:
    """A message with one long text."""
    made, text = request(1), bytes(TEXT_BYTES)
    made.inputs[0].datatype, made.raw_input_contents[0] = "BYTES", len(text).to_bytes(4, "little") + text
    return made.SerializeToString()


async def test_what_waits_to_be_decoded_in_a_thread_takes_its_place_in_the_room(
    channel: Any, budget: ByteBudget
) -> None:
    """One goes at a time: as many as there are calls could wait for it."""
    message = decoded_in_a_thread()
    async with budget.decoding.held("another"), asyncio.timeout(SOON_S):
        calls = [channel.unary_unary(INFER)(message) for _ in range((ROOM - ROOM // 8) // TEXT_BYTES)]
        waiting = [asyncio.ensure_future(call.code()) for call in calls]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        while budget.taken < (len(calls) - 1) * len(message):
            await asyncio.sleep(0)
    codes = await asyncio.gather(*waiting)

    assert [Status.OK] * (len(calls) - 1) + [Status.UNAVAILABLE] == sorted(codes, key=lambda code: code.value[0])
    assert 0 == budget.taken


async def test_messages_of_streams_that_wait_to_be_decoded_take_their_places_too(
    channel: Any, budget: ByteBudget
) -> None:
    message = decoded_in_a_thread()
    async with budget.decoding.held("another"), asyncio.timeout(SOON_S):
        streams = [channel.stream_stream(STREAM)() for _ in range(4)]
        for stream in streams:
            await stream.write(message)
        while budget.taken < len(streams) * len(message):
            await asyncio.sleep(0)
    for stream in streams:
        assert "1" == pb.ModelStreamInferResponse.FromString(await stream.read()).infer_response.id
        stream.cancel()

    assert 0 == budget.taken


# -- decoding -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "field", [b"\x2a\x00", b"\x32\x00", b"\x22\x00", b"\x3a\x00"], ids=["in", "out", "param", "raw"]
)
async def test_a_message_of_many_small_parts_is_not_decoded(channel: Any, field: bytes) -> None:
    refused = await refusal(channel.unary_unary(INFER)(field * 100_000))
    assert Status.INVALID_ARGUMENT == refused.code()
    assert f"may have {weight.FIELDS_MAX} inputs" in str(refused.details())


async def test_contents_that_take_more_room_than_there_is_are_not_decoded(channel: Any) -> None:
    made = request(1)
    del made.raw_input_contents[:]
    made.inputs[0].contents.bytes_contents.extend([b""] * 400_000)
    refused = await refusal(channel.unary_unary(INFER)(made.SerializeToString()))
    assert Status.RESOURCE_EXHAUSTED == refused.code()
    assert "send its tensors as binary data" in str(refused.details())


async def test_other_rpcs_take_no_large_message(channel: Any) -> None:
    refused = await refusal(channel.unary_unary("/inference.GRPCInferenceService/ServerLive")(b"\x7a\x00" * (1 << 20)))
    assert Status.INVALID_ARGUMENT == refused.code()


def test_only_what_is_carried_as_it_is_weighs_nothing_more() -> None:
    raw = sized(1_000_000)
    assert weight.decoding_bytes(raw, "ModelInferRequest") < 100 * weight.EXPANSION
    assert weight.decoding_bytes(raw, "ModelReadyRequest") > 1_000_000 * weight.EXPANSION
    for broken in (raw[:-1], b"\xff" * 1000, b"\x0b" * 1000, b"\x0d", b"\x2a\xff\xff\xff\xff\xff\xff"):
        assert weight.decoding_bytes(broken, "ModelInferRequest") >= 0
    with pytest.raises(RequestError):
        weight.decoding_bytes(b"\x08\x00" * (weight.FIELDS_MAX + 1), "ModelInferRequest")


def test_a_field_that_is_not_whole_carries_nothing() -> None:
    """It might say that it is as long as all that comes before, which protobuf decodes before it refuses it."""
    before = b"\x2a\x06\x2a\x04\x42\x00\x42\x00" * 100
    for size in (b"\x01", b"\xa0\x06", b"\xff\xff\xff\xff\x0f"):
        raw = before + b"\x3a" + size
        assert len(raw) * weight.EXPANSION == weight.decoding_bytes(raw, "ModelInferRequest")


def test_fields_count_behind_a_group_as_well() -> None:
    """Protobuf passes over groups that it does not know."""
    raw = b"\x7b\x08\x01\x7c" + b"\x2a\x00" * weight.FIELDS_MAX
    assert weight.FIELDS_MAX == len(pb.ModelInferRequest.FromString(raw).inputs)
    with pytest.raises(RequestError):
        weight.decoding_bytes(raw, "ModelInferRequest")


@pytest.mark.parametrize("part", [b"\x2a", b"\x32"], ids=["inputs", "outputs"])
def test_inputs_and_outputs_with_very_many_parameters_are_not_decoded(part: bytes) -> None:
    """Of one of them, or of all together."""

    def parts(count: int, parameters: int) -> bytes:
        size = 2 * parameters
        length = bytes((size & 0x7F | 0x80, size >> 7 & 0x7F | 0x80, size >> 14))
        return (part + length + b"\x22\x00" * parameters) * count

    for count in (1, 1000):
        most = parts(count, weight.PART_FIELDS_MAX // count)
        assert len(most) * weight.EXPANSION == weight.decoding_bytes(most, "ModelInferRequest")
        with pytest.raises(RequestError, match="may have 30000 fields together"):
            weight.decoding_bytes(most + parts(1, 1), "ModelInferRequest")


# -- near the bound -------------------------------------------------------------------------------------------------


async def test_while_memory_is_full_requests_are_refused_unread_and_health_answers(
    channel: Any, twin: Any, memory: MemoryBound, resident: ResidentTwin
) -> None:
    stream = channel.stream_stream(STREAM)()
    await stream.write(sized(4, 1))
    await stream.read()
    resident.bytes = 900
    memory.look(0.0)

    refused = await refusal(channel.unary_unary(INFER)(sized(3 << 20)))
    assert Status.UNAVAILABLE == refused.code()
    assert "--memory-max" in str(refused.details())
    await channel.unary_unary("/inference.GRPCInferenceService/ServerLive")(b"")
    await channel.unary_unary("/grpc.health.v1.Health/Check")(b"")
    # The stream had asked for this message before; what follows it waits, and is not lost.
    await stream.write(sized(4, 2))
    assert "2" == pb.ModelStreamInferResponse.FromString(await stream.read()).infer_response.id
    await stream.write(sized(4, 3))
    await channel.unary_unary("/inference.GRPCInferenceService/ServerLive")(b"")
    assert 2 == len(twin.calls)
    resident.bytes = 0
    memory.look(1.0)
    assert "3" == pb.ModelStreamInferResponse.FromString(await stream.read()).infer_response.id
    stream.cancel()


async def test_while_memory_is_tight_who_keeps_most_of_it_loses_the_calls_that_wait_for_messages(
    server: GrpcServer, channel: Any, twin: Any, memory: MemoryBound, resident: ResidentTwin
) -> None:
    """A stream that sends little on another connection goes on, and so does the connection itself."""
    stream = channel.stream_stream(STREAM)()
    await stream.write(sized(4, 1))
    await stream.read()
    async with grpc.aio.insecure_channel(
        f"127.0.0.1:{server.port}", options=[("grpc.use_local_subchannel_pool", 1)]
    ) as other:
        hog: Any = other
        await hog.unary_unary(INFER)(sized(4))
        twin.respond = twin.hold
        served = asyncio.ensure_future(hog.unary_unary(INFER)(sized(3 << 20)))
        await twin.wait_for_calls(3)
        async with connected(Target(server.port, 0)) as unfinished:
            call = await unfinished.call(INFER)
            await unfinished.send(call, struct.pack(">BI", 0, 3 << 20) + bytes(2 << 20))
            resident.bytes = 700
            async with asyncio.timeout(SOON_S):
                while not unfinished.refused:
                    memory.look(0.0)
                    await asyncio.sleep(0.01)
            assert [NO_MEMORY] == unfinished.refused
        twin.finish(2)
        await served
    twin.respond = twin.answer
    await stream.write(sized(4, 2))
    assert "2" == pb.ModelStreamInferResponse.FromString(await stream.read()).infer_response.id
    stream.cancel()


async def test_while_memory_is_tight_many_calls_that_keep_little_each_lose_it_too(
    server: GrpcServer, memory: MemoryBound, resident: ResidentTwin
) -> None:
    async with connected(Target(server.port, 0)) as unfinished:
        for path in 5 * [INFER, STREAM]:
            await unfinished.send(await unfinished.call(path), struct.pack(">BI", 0, 3 << 20) + bytes(100_000))
        resident.bytes = 700
        async with asyncio.timeout(SOON_S):
            while len(unfinished.refused) < 10:
                memory.look(0.0)
                await asyncio.sleep(0.01)

        assert 10 * [NO_MEMORY] == unfinished.refused


async def test_while_memory_is_tight_a_stream_loses_messages_that_nobody_reads(
    server: GrpcServer, memory: MemoryBound, resident: ResidentTwin, twin: Any
) -> None:
    """Tiny ones take many times their bytes. Requests that were accepted before are answered."""
    twin.respond = twin.hold
    async with connected(Target(server.port, 0)) as unfinished:
        call = await unfinished.call(STREAM)
        await unfinished.send(call, 8 * (struct.pack(">BI", 0, len(sized(4))) + sized(4)))
        await twin.wait_for_calls(8)
        await unfinished.send(call, 1000 * struct.pack(">BI", 0, 0))
        resident.bytes = 700
        async with asyncio.timeout(SOON_S):
            while not server.relieve(1):
                await asyncio.sleep(0.01)
        for number in range(8):
            assert [] == unfinished.refused
            twin.finish(number)
        async with asyncio.timeout(SOON_S):
            while not unfinished.refused:
                await asyncio.sleep(0.01)

        assert [NO_MEMORY] == unfinished.refused
        assert 8 == len(twin.calls)


async def test_headers_without_an_end_are_given_up_with_their_connection(server: GrpcServer, channel: Any) -> None:
    """Nobody else notices, nor does a client whose headers come in several frames."""
    connections = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(2)]
    for (_, writer), parts in zip(connections, (20, 1), strict=True):
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + SettingsFrame(0).serialize())
        writer.write(HeadersFrame(1, data=bytes(1000)).serialize())
        writer.write(ContinuationFrame(1, data=bytes(1000)).serialize() * parts)
    async with asyncio.timeout(SOON_S):
        while not server.relieve(1):
            await asyncio.sleep(0.01)
        (reader, _), (other, _) = connections
        with contextlib.suppress(ConnectionResetError):
            await reader.read()
        await channel.unary_unary("/inference.GRPCInferenceService/ServerLive")(b"")

    assert 0 == server.relieve(1 << 30)
    assert not other.at_eof()
    for _, writer in connections:
        writer.close()


# -- what does not come ---------------------------------------------------------------------------------------------


async def test_a_call_whose_message_does_not_come_ends(
    make_servicer: Callable[[], InferenceServicer], grpc_settings: GatewaySettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream may wait for its next message as long as it likes, and its connection serves others."""
    monkeypatch.setattr("gateway.grpc.wire.connection.PATIENCE_S", 0.2)
    monkeypatch.setattr("gateway.ports.serving.CHECK_S", 0.02)
    server = await serve_grpc(make_servicer(), grpc_settings)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        untyped: Any = channel
        stream = untyped.stream_stream(STREAM)()
        await stream.write(sized(4, 1))
        await stream.read()
        late = untyped.stream_unary(INFER)()

        refused = await refusal(late)
        await stream.write(sized(4, 2))

        assert (Status.UNAVAILABLE, "the message does not come: try again") == (refused.code(), refused.details())
        assert "2" == pb.ModelStreamInferResponse.FromString(await stream.read()).infer_response.id
        stream.cancel()
    await server.stop(0)


# -- calls that have ended ------------------------------------------------------------------------------------------


async def test_an_answer_that_is_cut_off_late_harms_nobody(
    channel: Any, unread: UnreadAnswers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The look at the memory may come between the end of a call and the moment in which that is told."""
    cuts: list[Callable[[], None]] = []
    add = unread.add

    def remembered(client: Hashable, size: int, cut: Callable[[], None]) -> None:
        cuts.append(cut)
        add(client, size, cut)

    monkeypatch.setattr(unread, "add", remembered)
    await channel.unary_unary(INFER)(sized(1 << 20))
    await asyncio.sleep(0.1)

    (cut,) = cuts
    cut()

    await channel.unary_unary(INFER)(sized(4))


async def test_answers_of_any_method_count_until_they_are_read(
    server: GrpcServer, unread: UnreadAnswers, repository: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that say something of the mesh: a client may let thousands of them wait."""
    entries = [RepositoryEntry(f"model_{number}", "1", "READY") for number in range(1000)]

    def index(*, ready_only: bool) -> list[RepositoryEntry]:
        return entries if not ready_only else []

    monkeypatch.setattr(repository, "index", index)
    async with peer_of(server.port) as peer:
        peer.h2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 0})
        numbers = [peer.call("/inference.GRPCInferenceService/RepositoryIndex") for _ in range(3)]
        for number in numbers:
            peer.say(number, b"")
        await peer.until(lambda: len(peer.headers) == 3)
        assert 3 * len("model_0") * len(entries) < unread.taken

        peer.h2.reset_stream(numbers.pop())
        peer.h2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 1 << 20})
        peer.flush()
        for number in numbers:
            assert ("0", "") == await peer.status(number)
        assert 0 == unread.taken


# -- what is refused goes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [INFER, STREAM])
async def test_what_is_refused_stays_in_no_cycle(channel: Any, twin: Any, path: str) -> None:
    """Whoever refuses it, and wherever: nothing of it waits for the collector."""
    refusals = [RequestError("wrong"), MeshError("lost", Code.UNAVAILABLE)]
    async with nothing_stays(InferCall, pb.ModelInferRequest, MeshError):
        for error in refusals:
            twin.fail(error)
            if path == INFER:
                await refusal(channel.unary_unary(INFER)(sized(1 << 20)))
            else:
                stream = channel.stream_stream(STREAM)()
                await stream.write(sized(1 << 20))
                await stream.done_writing()
                assert await stream.read()
                await stream.code()
        twin.calls.clear()
        twin.futures.clear()
