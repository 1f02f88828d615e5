"""What both clients take as arguments, how far the blocking one reads, and what ends a connection."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import pickle
import queue
import socket
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any, cast

import grpc.aio
import numpy as np
import pytest
from tritonclient.grpc import service_pb2_grpc

from seqmesh_client import AsyncClient, Client, NoAnswer, Patience, StepRefused, conversation
from seqmesh_client.conversation import Ask
from seqmesh_client.delivery import Connect, Listen
from seqmesh_client.shell import SILENT_S
from seqmesh_client.sync import READ_AHEAD, BlockingLink, Leaving, read
from seqmesh_client.token import Place
from seqmesh_client.wire import NUMBERED, LinkBroken, pb
from tests.client.grpc_serving import served
from tests.client.mesh_in_memory import SumMesh

GATEWAYS = ["localhost:1"]


@pytest.mark.parametrize("headers", [{"Seqmesh-Tenant": "acme"}, [("seqmesh-tenant", "acme")]])
def test_headers_are_given_as_to_tritonclient_or_in_pairs_and_sent_as_grpc_takes_them(
    headers: dict[str, str] | list[tuple[str, str]],
) -> None:
    assert (("seqmesh-tenant", "acme"),) == Client(GATEWAYS, headers=headers).headers


@pytest.mark.parametrize(
    "url",
    [
        "http://localhost:1",
        "grpc://localhost:1",
        "https://localhost",
        "localhost:1/",
        " localhost:1",
        "localhost",
        "localhost:",
        "localhost:grpc",
        "[::1]",
        "::1:8001",
        "",
        8001,
        ("a", 1),
    ],
)
def test_what_is_no_address_of_a_gateway_is_refused_before_anything_is_sent(url: Any) -> None:
    with pytest.raises(ValueError, match="give host:port"):
        Client(["localhost:1", url])


@pytest.mark.parametrize("url", ["localhost:65536", "[::1]:74537", "ipv4:127.0.0.1:74537", "dns:///a:74537"])
def test_a_port_that_there_is_not_is_refused_because_grpc_would_take_another(url: str) -> None:
    with pytest.raises(ValueError, match="there are ports up to 65535"):
        Client([url])


@pytest.mark.parametrize(
    ("name", "value"),
    [("patience", 60), ("patience", None), ("credentials", True), ("credentials", "ca.pem")]
    + [("headers", value) for value in (None, "seqmesh-tenant: acme", ("seqmesh-tenant", "acme"))],
)
def test_an_argument_of_a_wrong_type_is_refused_where_it_is_given_with_a_right_one(name: str, value: Any) -> None:
    arguments: dict[str, Any] = {name: value}
    with pytest.raises(TypeError, match=f"{name}(=.* is right, not a value of type| is a dict, or pairs)"):
        Client(GATEWAYS, **arguments)


@pytest.mark.parametrize("urls", ["localhost:1", [], b"localhost:1", 8001])
def test_what_is_no_list_of_gateways_is_refused(urls: Any) -> None:
    with pytest.raises(ValueError, match="urls is a list of gateways"):
        Client(urls)


@pytest.mark.parametrize(
    "url",
    [
        "localhost:1",
        "127.0.0.1:1",
        "[::1]:1",
        "ipv4:127.0.0.1:1",
        "ipv6:[::1]:1",
        "dns:///a:1",
        "unix:/a",
        "unix:/a:70000",
        "vsock:2:70000",
    ],
)
def test_addresses_of_grpc_are_taken(url: str) -> None:
    assert (url,) == Client([url]).mesh.gateways


@pytest.mark.parametrize(
    "header",
    [
        *[("a b", "x"), ("", "x"), (5, "x"), ("a", 5), ("a", None), ("a-bin", "secret")],
        *[("a", "secret\n"), ("a", "secret\u00e4"), ("a", b"secret\n")],
    ],
)
def test_a_header_that_grpc_does_not_send_is_refused_and_its_value_is_not_told(header: tuple[Any, Any]) -> None:
    with pytest.raises((ValueError, TypeError), match="header") as refused:
        Client(GATEWAYS, headers=[header])
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("number", [1 << 64, (1 << 64) + 5, -(1 << 63) - 1])
def test_an_id_that_would_be_sent_as_that_of_another_sequence_is_refused(number: int) -> None:
    with pytest.raises(ValueError, match="64 bits"):
        Client(GATEWAYS).sequence("sum", id=number)


@pytest.mark.parametrize("id", [1.5, b"me", ["me"]])
def test_what_is_no_id_is_refused_as_one(id: Any) -> None:
    with pytest.raises(TypeError, match="a sequence's id is a text or an integer, not a value of type"):
        Client(GATEWAYS).sequence("sum", id=id)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"model": 5}, "a sequence's model is a text, not a value of type int"),
        ({"model": b"sum"}, "a sequence's model is a text, not a value of type bytes"),
        ({"version": 1}, "a sequence's version is a text, not a value of type int"),
        ({"version": None}, "a sequence's version is a text, not a value of type NoneType"),
        ({"after": "3"}, "after is a number of steps, not a value of type str"),
        ({"after": -1}, "after says how many steps have an outcome"),
        ({"after": 1 << 63}, "after says how many steps have an outcome"),
    ],
)
def test_what_names_no_sequence_is_refused_before_anything_is_sent(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises((TypeError, ValueError), match=told):
        Client(GATEWAYS).sequence(**{"model": cast(Any, "sum")} | arguments)


def test_a_time_that_is_no_number_and_outputs_that_are_one_text_are_refused_by_name() -> None:
    sequence = Client(GATEWAYS).sequence("sum")
    timeout: Any = "5"
    for call in (lambda: sequence.step(STEP, timeout=timeout), lambda: sequence.end(timeout=timeout)):
        with pytest.raises(TypeError, match="timeout is a number of seconds, not a value of type str"):
            call()
    with pytest.raises(TypeError, match=r"outputs is a list of names: \['OUTPUT'\]"):
        sequence.step(STEP, outputs="OUTPUT")


@pytest.mark.parametrize("name", ["step_s", "silence_s", "pause_s", "pause_max_s"])
def test_patience_that_is_no_time_is_refused_by_name(name: str) -> None:
    text: dict[str, Any] = {name: "60"}
    with pytest.raises(TypeError, match=f"{name} is a number of seconds, not a value of type str"):
        Patience(**text)
    with pytest.raises(ValueError, match=f"{name} is a number of seconds, 0 or more, not -1"):
        Patience(**{name: -1})


def test_numbers_of_numpy_are_as_good_as_those_of_python() -> None:
    token = Client(GATEWAYS).sequence("sum", id=cast(Any, np.int64(7)), after=cast(Any, np.int64(2))).token

    assert Place("sum", "", 7, 2) == Place.of_token(token)


@pytest.mark.parametrize("ahead", [0, -1])
def test_no_step_ahead_is_refused_and_drops_no_step_silently(ahead: int) -> None:
    async def asynchronous() -> None:
        async for _ in AsyncClient(GATEWAYS).sequence("sum").steps([[1]], ahead=ahead):
            raise AssertionError("nobody answers")

    with pytest.raises(ValueError, match="at least 1"):
        list(Client(GATEWAYS).sequence("sum").steps([[1]], ahead=ahead))
    with pytest.raises(ValueError, match="at least 1"):
        asyncio.run(asynchronous())


async def test_the_connection_to_a_gateway_whose_machine_is_lost_ends() -> None:
    """Otherwise a client with that one address would find no other machine behind it for a quarter of an hour."""
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with AsyncClient([f"127.0.0.1:{port}"]) as client:
        with pytest.raises(StepRefused, match="UNIMPLEMENTED"):
            await client.ask(Ask(0, "ServerLive", pb.ServerLiveRequest(), time.monotonic() + 30))

        assert [SILENT_S * 1000] == list(user_timeouts_ms(to_port=port))
    await server.stop(None)


def user_timeouts_ms(to_port: int) -> Iterator[int]:
    """Of this process's connections: how long what they send may stay unacknowledged."""
    for one in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(one.name))) as connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.getpeername()[1] == to_port:
                yield connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)


def test_a_stream_is_not_read_beyond_what_its_caller_will_take_soon() -> None:
    """A model may say much more than its caller takes: it waits at the server, not in this process."""
    told, room = [pb.ModelStreamInferResponse() for _ in range(5)], Room(3)
    inbox, outbox = queue.SimpleQueue[Any](), queue.SimpleQueue[Any]()

    read(lambda _: iter(told), queue.SimpleQueue(), inbox, outbox, cast(Any, room))

    assert [type(told[0])] * 4 + [NoRoomError] == [type(inbox.get()) for _ in range(inbox.qsize())]


async def test_the_thread_of_a_stream_that_is_full_ends_with_it_and_no_time_is_too_long_for_it() -> None:
    class Call:
        """Says something for as long as nobody breaks it off."""

        is_over = False

        def cancel(self) -> None:
            self.is_over = True

        def __iter__(self) -> Iterator[Any]:
            while not self.is_over:
                yield pb.ModelStreamInferResponse()

    class Stub:
        def ModelStreamInfer(self, _requests: Any, metadata: Any) -> Call:  # noqa: N802  the call's name
            del metadata
            return Call()

    before = set(threading.enumerate())
    link = BlockingLink(Stub(), (), Leaving())
    (thread,) = (one for one in set(threading.enumerate()) - before if one.name == "seqmesh-client")
    for _ in range(2 * READ_AHEAD):
        link.receive(math.inf)

    link.close()

    await asyncio.to_thread(thread.join, 30)
    assert not thread.is_alive()


class SilentMesh(cast("Any", service_pb2_grpc).GRPCInferenceServiceServicer):
    """Takes steps and answers none. asked: a step has come; streams: how many there were"""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.streams = 0

    def ServerMetadata(self, request: Any, context: Any) -> Any:  # noqa: N802
        return pb.ServerMetadataResponse(name="seqmesh", extensions=[NUMBERED])

    def ModelStreamInfer(self, requests: Iterator[Any], context: Any) -> Iterator[Any]:  # noqa: N802
        self.streams += 1
        for _ in requests:
            self.asked.set()
        yield from ()


@pytest.fixture
def silent_mesh() -> Iterator[tuple[SilentMesh, str]]:
    service = SilentMesh()
    with served(service) as url:
        yield service, url


STEP = {"INPUT": np.array([7], np.int32)}


def test_a_client_that_another_thread_closes_opens_no_other_connection(silent_mesh: tuple[SilentMesh, str]) -> None:
    """The step would go on for as long as the client's patience lasts, over a connection that nobody closes."""
    service, url = silent_mesh
    client = Client([url])
    sequence = client.sequence("sum")
    with futures.ThreadPoolExecutor(1) as other:
        step = other.submit(sequence.step, STEP)
        assert service.asked.wait(60)
        client.close()
        with pytest.raises(RuntimeError, match="the client was closed"):
            step.result(60)
    with pytest.raises(RuntimeError, match="the client was closed"):
        sequence.step(STEP)

    assert (1, {}) == (service.streams, client.channels)
    assert 0 == sequence.answered


async def test_an_asynchronous_client_that_is_closed_opens_no_other_connection(
    silent_mesh: tuple[SilentMesh, str],
) -> None:
    service, url = silent_mesh
    client = AsyncClient([url])
    step = asyncio.create_task(client.sequence("sum").step(STEP))
    assert await asyncio.to_thread(service.asked.wait, 60)
    await client.close()

    with pytest.raises(RuntimeError, match="the client was closed"):
        await step
    assert (1, {}) == (service.streams, client.channels)


@pytest.mark.parametrize("call", ["connect", "ask"])
def test_a_client_that_is_closed_between_a_stub_and_its_call_says_so(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = Client(GATEWAYS)
    stub = client._stub(0)

    def then_closed(_gateway: int) -> Any:
        client.close()
        return stub

    monkeypatch.setattr(client, "_stub", then_closed)
    until = time.monotonic() + 60
    wishes = {
        "connect": (Connect(0, until), Listen(until)),
        "ask": (Ask(0, "ServerLive", pb.ServerLiveRequest(), until),),
    }
    *before, last = wishes[call]
    sequence = client.sequence("sum")
    for wish in before:
        sequence._conversation._link = sequence._fulfil(wish)

    with pytest.raises(RuntimeError, match="the client was closed"):
        sequence._fulfil(last)


def test_the_thread_of_a_caller_opens_and_breaks_off_no_call() -> None:
    """Ctrl-C within gRPC's Python code leaves a lock taken for ever: the process then hung, whatever it was told."""
    threads: list[str] = []

    class Call:
        def cancel(self) -> None:
            threads.append(threading.current_thread().name)

        def __iter__(self) -> Iterator[Any]:
            yield from ()

    class Stub:
        def ModelStreamInfer(self, _requests: Any, metadata: Any) -> Call:  # noqa: N802  the call's name
            del metadata
            threads.append(threading.current_thread().name)
            return Call()

    def stub_of(gateway: int) -> Any:
        del gateway
        return Stub()

    before = set(threading.enumerate())
    with Client(GATEWAYS) as client:
        client._stub = stub_of
        link = client.connect(0)
        with pytest.raises(LinkBroken):
            link.receive(math.inf)
        link.close()
        started = set(threading.enumerate()) - before
    for one in started:
        one.join(60)

    assert ["seqmesh-client", "seqmesh-client-left"] == threads


@pytest.mark.parametrize("inputs", [[[3]], np.array([[3]], np.int32)])
def test_who_waits_for_a_first_answer_is_told_once_why_none_comes(
    inputs: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversation, "UNANSWERED_S", 0.0)
    with Client([f"localhost:{1}"], patience=Patience(step_s=0.5, pause_s=0.01)) as client:
        for _ in range(2):
            with pytest.raises(NoAnswer):
                client.sequence("sum").step(inputs)

    (told,) = [one.getMessage() for one in caplog.records]
    assert told.startswith("no gateway has answered yet, trying again: UNAVAILABLE: ")


def test_a_sequence_that_is_left_behind_its_client_stays_until_its_idle_time_is_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    client = Client(GATEWAYS)
    with client.resume(Place("sum", "", 7, 1, run="1-0.1").token()):
        client.close()

    assert "sequence 7 ends when its idle time is over: the client was closed" in caplog.text


class SumServer(SilentMesh):
    """Answers each step at once."""

    def __init__(self, *, decoupled: bool = False) -> None:
        super().__init__()
        self.mesh = SumMesh(decoupled=decoupled)

    def ModelStreamInfer(self, requests: Iterator[Any], context: Any) -> Iterator[Any]:  # noqa: N802
        for one in requests:
            answers = self.mesh.accept(one)
            if self.mesh.decoupled:
                # As most decoupled models end: with an answer that says only that.
                answers[-1].infer_response.parameters["triton_final_response"].bool_param = False
                answers.append(pb.ModelStreamInferResponse())
                answers[-1].infer_response.id = one.id
                answers[-1].infer_response.parameters["triton_final_response"].bool_param = True
            yield from answers

    def ModelInfer(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.mesh.end(request)
        return pb.ModelInferResponse()


@pytest.fixture
def sum_mesh() -> Iterator[tuple[SumMesh, str]]:
    service = SumServer()
    with served(service) as url:
        yield service.mesh, url


@pytest.fixture
def sums(sum_mesh: tuple[SumMesh, str]) -> str:
    """Where a mesh answers."""
    return sum_mesh[1]


ONES = [{"INPUT": np.array([[1]], np.int64)}] * 6


async def test_answers_that_another_call_has_taken_are_not_left_out_in_silence(sums: str) -> None:
    """A step between those of `steps` waits for the open ones first, and nobody would get their answers."""
    async with AsyncClient([sums]) as client:
        sequence = client.sequence("sum", id="me")
        answers = sequence.steps(ONES, ahead=3)
        await anext(answers)
        await sequence.step(ONES[0])

        with pytest.raises(RuntimeError, match="came in between"):
            await anext(answers)
        assert 4 == sequence.answered


def test_answers_that_another_call_has_taken_are_not_left_out_by_the_blocking_client(sums: str) -> None:
    with Client([sums]) as client:
        sequence = client.sequence("sum", id="me")
        with pytest.raises(RuntimeError, match="came in between"):
            list(zip(sequence.steps(ONES, ahead=3), sequence.steps(ONES, ahead=3), strict=True))

        assert 4 == sequence.answered


def test_a_call_that_takes_no_answer_of_others_may_come_between_them(sums: str) -> None:
    with Client([sums]) as client:
        sequence = client.sequence("sum", id="me")
        answers = [(one.single.item(), sequence.step(ONES[0]).single.item()) for one in sequence.steps(ONES, ahead=1)]

    assert [(1, 2), (3, 4), (5, 6), (7, 8), (9, 10), (11, 12)] == answers


async def test_what_an_asynchronous_caller_has_left_is_out_of_the_way_before_its_next_step(sums: str) -> None:
    async with AsyncClient([sums]) as client:
        sequence = client.sequence("sum", id="me")
        answers = cast("Any", sequence.steps(ONES, ahead=3))
        await anext(answers)
        await answers.aclose()

        assert 4 <= (await sequence.step(ONES[0])).single.item() == sequence.answered


def test_what_a_blocking_caller_has_left_is_out_of_the_way_before_its_next_step(sums: str) -> None:
    with Client([sums]) as client:
        sequence = client.sequence("sum", id="me")
        answers = cast("Any", sequence.steps(ONES, ahead=3))
        next(answers)
        answers.close()

        assert 4 <= sequence.step(ONES[0]).single.item() == sequence.answered


async def test_answers_that_a_caller_has_left_are_none_of_its_next_step() -> None:
    """Of a decoupled model: three answers a step, each one more than the one before."""
    with served(SumServer(decoupled=True)) as url:
        async with AsyncClient([url]) as client:
            sequence = client.sequence("sum", id="me")
            left = cast("Any", sequence.answers(ONES[0]))
            assert 2 == (await anext(left)).single.item()
            await left.aclose()
            assert [3, 4, 5] == [one.single.item() async for one in sequence.answers(ONES[0])]
        with Client([url]) as client:
            sequence = client.sequence("sum", id="you")
            left = cast("Any", sequence.answers(ONES[0]))
            assert 2 == next(left).single.item()
            left.close()
            assert [3, 4, 5] == [one.single.item() for one in sequence.answers(ONES[0])]


async def test_steps_of_a_decoupled_model_are_told_as_such() -> None:
    with served(SumServer(decoupled=True)) as url:
        async with AsyncClient([url]) as client:
            with pytest.raises(ValueError, match=r"step 1 .* has 3 answers: ask a decoupled model by answers\(\)"):
                await anext(client.sequence("sum", id="me").steps(ONES, ahead=3))
        with Client([url]) as client, pytest.raises(ValueError, match="ask a decoupled model by answers"):
            next(client.sequence("sum", id="you").steps(ONES, ahead=3))


def test_an_asynchronous_client_says_in_another_event_loop_that_it_belongs_to_the_first(sums: str) -> None:
    client = AsyncClient([sums])
    sequence = client.sequence("sum", id="me")
    assert 1 == asyncio.run(sequence.step(ONES[0])).single.item()

    for one in (sequence, client.sequence("sum", id="you")):
        with pytest.raises(RuntimeError, match="event loop, that used it first: make another one here"):
            asyncio.run(one.step(ONES[0]))


def test_a_client_that_was_used_before_a_fork_says_so_behind_it(sums: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC's threads are not in the forked process: it would wait for an answer until its time is over."""
    with Client([sums]) as client:
        sequence = client.sequence("sum", id="me")
        assert 1 == sequence.step(ONES[0]).single.item()
        with monkeypatch.context() as forked:
            forked.setattr(os, "getpid", lambda: -1)
            for one in (sequence, client.sequence("sum", id="you")):
                with pytest.raises(RuntimeError, match="belongs to the process"):
                    one.step(ONES[0])

        assert 2 == sequence.step(ONES[0]).single.item()


async def test_a_fork_that_leaves_the_blocks_of_its_parent_ends_no_sequence_and_closes_no_connection(
    sum_mesh: tuple[SumMesh, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parent's sequence was over, and the forked process waited for ever for a thread that gRPC has elsewhere."""
    mesh, url = sum_mesh
    client, other = Client([url]), AsyncClient([url])
    with monkeypatch.context() as forked:
        with client, client.sequence("sum", id="me") as sequence:
            await asyncio.to_thread(sequence.step, ONES[0])
            forked.setattr(os, "getpid", lambda: -1)
        forked.undo()
        async with other, other.sequence("sum", id="you") as sequence:
            await sequence.step(ONES[0])
            forked.setattr(os, "getpid", lambda: -1)

    assert (set(), [0], [0]) == (mesh.closed, list(client.channels), list(other.channels))
    client.close()
    await other.close()


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_a_client_that_was_not_used_can_be_handed_to_another_process(kind: type[Client | AsyncClient]) -> None:
    assert tuple(GATEWAYS) == pickle.loads(pickle.dumps(kind(GATEWAYS))).mesh.gateways


class NoRoomError(Exception):
    """In a test: instead of waiting."""


class Room:
    def __init__(self, free: int) -> None:
        self._free = free

    def get(self) -> None:
        self._free -= 1
        if self._free < 0:
            raise NoRoomError
