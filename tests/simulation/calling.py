"""Models whose steps call sequences of other models, through gateways, and whatever goes wrong in between.

In each of its steps `fold` sends its new state to `fold2`, some steps twice, and answers with what it hears. Its
instance waits meanwhile; in some meshes it makes all calls of a step before it waits. Some models that are called are
decoupled: their callers read a stream of answers. Naming, sending and repeating of calls are the executor's own code,
and admission and errors the gateway's own servicer; between the two lies a network that breaks and delays. An executor
that is cut off from the store still reaches gateways: its steps run elsewhere already, and their calls come twice,
late, or both at once.

Some have a chain of three models, a model that calls two others, or an ensemble that begins with a model that calls. In
half of the meshes calls are impatient, so that steps fail for what passes; a step that is replayed must not. A quarter
of the meshes has a store that loses its newest data, and a quarter one that refuses for a while.

The ledger judges the sequences that are called as any others, and clients know what every step must give.

`python -m tests.simulation --calls --seeds 1000`
"""

from __future__ import annotations

import asyncio
import contextvars
import random
from collections import defaultdict, deque
from collections.abc import Callable, Coroutine, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock, Mock, patch

import greenlet
import grpc
import numpy as np
from msgspec.structs import replace as with_fields
from tritonclient.grpc import service_pb2

from executor.calls.client import PATIENCE_S, CallClient
from executor.calls.gateways import CallGateway
from executor.engine.base import BatchResult, Row, RowError, RowResult
from executor.engine.python import calls
from executor.engine.python.calls import Execution, RequestTrace
from executor.engine.python.model_calls import prepared, response_of
from executor.engine.python.triton_python_backend_utils import InferenceRequest, Tensor
from gateway.grpc.errors import status_of
from gateway.grpc.servicer import InferenceServicer
from gateway.parts import GatewayParts
from gateway.settings import GatewaySettings
from shared.contract.errors import MeshError
from shared.contract.messages import END, START
from tests.simulation.beside import TwoModels
from tests.simulation.chaining import spread
from tests.simulation.clients import Habit, LostError, Style
from tests.simulation.ledger import Ledger
from tests.simulation.losing import LosingWorld, play_losing
from tests.simulation.model import (
    CHAIN,
    HEARD,
    INPUT,
    NAME,
    SECOND,
    THIRD,
    Calls,
    FoldEngine,
    Shape,
    before_last,
    called_with,
    number,
    value_of,
)
from tests.simulation.network import Network
from tests.simulation.refusing import RefusingWorld
from tests.simulation.story import Story
from tests.simulation.virtual import RUNNING, SimulatedProcess, VirtualLoop, VirtualThread
from tests.simulation.world import LEASE_MS, Life, Member, Plan, Result, WayBack, plan_of, play

pb: Any = service_pb2
CALLED_IDLE_S = 40.0
"""As much longer than its caller a called sequence may be idle: a step that has to run again may take that long."""

CALLS: tuple[Calls, ...] = (
    {NAME: (SECOND,)},
    {NAME: (SECOND,)},
    {NAME: (SECOND,), SECOND: (THIRD,)},
    {NAME: (SECOND, THIRD)},
)
CHAINED = 0.25
"""The share of those meshes whose second model calls nobody: it follows the first one in an ensemble, too."""

AT_ONCE, MANY_ANSWERS = 0.3, 0.4
"""The shares of meshes in which a model makes all calls of a step at once, and in which one that is called, and calls
nobody, is decoupled.
"""

CUTS = 0.2
"""In impatient meshes, the share of faults that cut executors off from gateways."""
IMPATIENT_S = 1.0
"""How long calls look for a gateway in half of the meshes: what goes wrong lasts longer. Steps fail, and no replay."""

THINKS, THINKS_S = 0.15, 4 * LEASE_MS / 1000
"""How often the model does something else before it calls, and for how long: its executor may be lost meanwhile."""


class CallingEngine(FoldEngine):
    """An instance of a model that calls. shape: how the mesh serves it; whole: and all models; ledger: its story is
    told of what is wrong with the answers to a call
    """

    makes_calls = True

    def __init__(self, name: str, shape: Shape, whole: Shape, ledger: Ledger) -> None:
        super().__init__()
        self._name = name
        self._models = shape.calls
        self._at_once = shape.at_once
        self._whole = whole
        self._ledger = ledger

    def run(self, rows: Sequence[Row], want_state: Sequence[bool]) -> BatchResult:
        execution = Execution(self._name, f"{self._name}/1", "instance", rows)
        before = calls.execution.set(execution)
        try:
            return super().run(rows, want_state)
        finally:
            calls.execution.reset(before)
            execution.over()

    def _run(self, row: Row, wanted: bool) -> RowResult | RowError | None:
        before = self._states.get(row.slot, ()) if row.slot is not None else ()
        result = super()._run(row, wanted)
        if not isinstance(result, RowResult):
            return result
        try:
            heard = self._heard(row, value_of(result.outputs[0]))
        except CallFailedError as failed:
            self._keep(row.slot, before)
            return failed.error
        return with_fields(result, outputs=(*result.outputs, number(HEARD, heard)))

    def _heard(self, row: Row, state: int) -> int:
        """The last answer to a step's calls. state: after the step. Raises CallFailedError."""
        made, heard = called_with(state, self._models), list[int]()
        callees = [callee for callee, _ in made]
        answers = (self._call(row, callees, index, value) for index, (_, value) in enumerate(made))
        # A model that fails while calls of it are open would have them made behind what it is asked next.
        said = [list(answer()) for answer in [*answers]] if self._at_once else (answer() for answer in answers)
        for (callee, value), responses in zip(made, said, strict=True):
            # Only the last response may have nothing to say.
            heard = [self._number(one) for one in responses if one.has_error() or one.output_tensors()]
            expected = before_last(heard[-1], value) if self._whole.of(callee).decoupled else []
            # Calls have no numbers: what is asked again may be another step of a sequence that lacks some.
            if heard[:-1] != expected and not self._ledger.has_lost:
                self._ledger.story.violate(f"{self._name} hears {heard} of {callee} instead of {expected}, {heard[-1]}")
        return heard[-1]

    def _call(self, row: Row, callees: Sequence[str], index: int, value: int) -> Callable[[], Iterable[Any]]:
        """Makes one of a step's calls; what waits for the answers to it."""
        if random.random() < THINKS:
            Awaited(asyncio.sleep(random.uniform(0.0, THINKS_S))).result()
        callee = callees[index]
        request = InferenceRequest(
            model_name=callee,
            inputs=[Tensor(INPUT, np.array([[value]], np.int64))],
            correlation_id=row.correlation_id,
            flags=START * (row.start and callee not in callees[:index])
            | END * (row.end and callee not in callees[index + 1 :]),
            trace=RequestTrace(calls.execution.get(), row.origin),
        )
        if self._whole.of(callee).decoupled:
            return partial(iter, request.exec(decoupled=True))
        call = prepared(request)
        answer = calls.door().start(call)

        def responses() -> Iterable[Any]:
            with calls.waiting_for(call):
                return [response_of(answer.result())]

        return responses

    def _number(self, response: Any) -> int:
        if response.has_error():
            raise CallFailedError(RowError(response.error().code(), response.error().message()))
        return int(response.output_tensors()[-1].as_numpy().item())


class CallFailedError(Exception):
    """A call has an error for an answer."""

    def __init__(self, error: RowError) -> None:
        self.error = error


class WaitingThread(VirtualThread):
    """An engine's thread whose calls may wait for what the event loop does (`Awaited`). Those behind them wait, too."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._calls = deque[tuple[asyncio.Future[Any], Callable[[], Any]]]()

    def start(self, call: Callable[..., Any], *arguments: Any, **named: Any) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        future.add_done_callback(self._ended)
        self._open += 1
        self._calls.append((future, partial(call, *arguments, **named)))
        if len(self._calls) == 1:
            self._begin()
        return future

    def _begin(self) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        loop.call_later(loop.compute_s(), self._run_first)

    def _run_first(self) -> None:
        thread = greenlet.greenlet(self._make)
        thread.gr_context = contextvars.copy_context()
        thread.switch()

    def _make(self) -> None:
        future, call = self._calls[0]
        if not future.cancelled():
            try:
                result = call()
            except BaseException as error:  # noqa: BLE001 - as a thread hands on whatever was raised
                if not future.done():
                    future.set_exception(error)
            else:
                if not future.done():
                    future.set_result(result)
        self._calls.popleft()
        if self._calls:
            self._begin()


class Awaited:
    """What a `concurrent.futures.Future` is to a model's thread: its `result` waits."""

    def __init__(self, work: Coroutine[Any, Any, Any]) -> None:
        self._task = asyncio.ensure_future(work)

    def result(self) -> Any:
        thread = greenlet.getcurrent()
        assert thread.parent is not None, "a model runs on a thread of its own"
        self._task.add_done_callback(lambda _: thread.switch())
        thread.parent.switch()
        return self._task.result()


class CallNetwork(Network):
    """The connections between executors and gateways besides. Whoever dies leaves his calls."""

    def __init__(self, world: CallingWorld, chance: random.Random) -> None:
        super().__init__(world._servers(), chance)
        self.calls: dict[SimulatedProcess, list[Rpc]] = defaultdict(list)

    def abandon(self, process: SimulatedProcess) -> None:
        super().abandon(process)
        for rpc in self.calls.pop(process, ()):
            rpc.leave()


class Rpc:
    """One call of an executor on its way through a gateway; what the servicer takes of an RPC, too."""

    def __init__(self, world: CallingWorld, gateway: Life, metadata: Any, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        self.opening = SimpleNamespace(metadata=metadata)
        self.client = "executor"
        self.trailing: Any = ()
        self.message_bytes = 0
        self.answer: asyncio.Future[Any] = loop.create_future()
        self._until = loop.time() + timeout_s
        self._world = world
        self._gateway = gateway
        self._way_back = WayBack(world.network.delay_s)
        self._serving: asyncio.Task[Any] | None = None

    def time_left_s(self) -> float:
        return self._until - asyncio.get_running_loop().time()

    def compress(self, _: object) -> None:
        """Nothing is."""

    def send(self, request: bytes) -> None:
        """In the executor."""
        network, loop = self._world.network, asyncio.get_running_loop()
        self._gateway.open.append(self.answer)
        if network.chance.random() < network.trouble.request_lost:
            loop.call_later(network.delay_s(), self._break, context=contextvars.Context())
        else:
            loop.call_later(network.delay_s(), self._serve, request, context=self._gateway.process.context)

    def leave(self) -> None:
        """Nobody waits any more; the gateway hears of it."""
        if self._serving is not None:
            delay_s = self._world.network.delay_s()
            asyncio.get_running_loop().call_later(delay_s, self._serving.cancel, context=self._gateway.process.context)

    def _serve(self, request: bytes) -> None:
        servicer = self._world.servicers.get(self._gateway.process)
        if servicer is None:
            self._way_back.send(self._break)
            return
        self._serving = asyncio.ensure_future(self._asked(servicer, request))
        self._serving.add_done_callback(self._served)

    def _served(self, serving: asyncio.Task[Any]) -> None:
        network = self._world.network
        if serving.cancelled() or network.chance.random() < network.trouble.reply_lost:
            self._way_back.send(self._break)
        elif error := serving.exception():
            assert isinstance(error, MeshError), error
            self._way_back.send(self._end, rpc_error(*status_of(error), self.trailing))
        else:
            self._way_back.send(self._end, serving.result())

    async def _asked(self, servicer: InferenceServicer, request: bytes) -> Any:
        response = await servicer.ModelInfer(pb.ModelInferRequest.FromString(request), cast("Any", self))
        return pb.ModelInferResponse.FromString(response.SerializeToString())

    def _break(self) -> None:
        self._end(LostError())

    def _end(self, outcome: Any) -> None:
        if self.answer.done():
            return
        if isinstance(outcome, BaseException):
            self.answer.set_exception(outcome)
        else:
            self.answer.set_result(outcome)


class StreamRpc(Rpc):
    """One with any number of answers. came: what has reached the executor, and None behind the last one"""

    def __init__(self, world: CallingWorld, gateway: Life, metadata: Any, timeout_s: float) -> None:
        super().__init__(world, gateway, metadata, timeout_s)
        self.came = asyncio.Queue[bytes | None]()
        self.answer.add_done_callback(lambda _: self.came.put_nowait(None))
        self._requests: list[bytes] = []

    async def read(self) -> bytes | None:
        """In the gateway, as `write`."""
        return self._requests.pop() if self._requests else None

    async def write(self, message: bytes) -> None:
        network = self._world.network
        # A stream has few messages, and is to break in the midst of them.
        if network.chance.random() < 10 * network.trouble.reply_lost:
            self._way_back.send(self._break)
        else:
            self._way_back.send(self.came.put_nowait, message)

    def cut(self) -> None:
        """The executor is read from as fast as answers come."""

    async def _asked(self, servicer: InferenceServicer, request: bytes) -> None:
        self._requests.append(request)
        await servicer.ModelStreamInfer(cast("Any", self))


class StreamCall:
    """What an executor has of it, as `grpc.aio` has it."""

    def __init__(self, world: CallingWorld, gateway: Member, *, timeout: float, metadata: Any) -> None:
        self._world = world
        self._gateway = gateway
        self._timeout_s = timeout
        self._metadata = metadata
        self._rpc: StreamRpc | None = None

    async def write(self, request: bytes) -> None:
        life, under_way = await self._world.reached(self._gateway), self._world.network.calls[_running()]
        self._rpc = rpc = StreamRpc(self._world, life, self._metadata, self._timeout_s)
        under_way.append(rpc)
        rpc.answer.add_done_callback(lambda _: under_way.remove(rpc))
        rpc.send(request)

    async def done_writing(self) -> None:
        """The request is the only one."""

    async def read(self) -> Any:
        assert self._rpc is not None, "its request was written"
        try:
            async with asyncio.timeout(self._rpc.time_left_s()):
                message = await self._rpc.came.get()
        except TimeoutError:
            raise rpc_error(DEADLINE_EXCEEDED, "Deadline Exceeded") from None
        if message is not None:
            return pb.ModelStreamInferResponse.FromString(message)
        try:
            await self._rpc.answer
        except LostError:
            raise rpc_error(UNAVAILABLE, "connection reset by peer") from None
        return None

    def cancel(self) -> None:
        if self._rpc is not None:
            self._rpc.answer.cancel()
            self._rpc.leave()


def rpc_error(code: int, text: str, metadata: Any = (), trailing: Any = ()) -> grpc.aio.AioRpcError:
    status = next(status for status in grpc.StatusCode if status.value[0] == code)
    return grpc.aio.AioRpcError(status, grpc.aio.Metadata(), grpc.aio.Metadata(*metadata, *trailing), text)


UNAVAILABLE: int = grpc.StatusCode.UNAVAILABLE.value[0]
DEADLINE_EXCEEDED: int = grpc.StatusCode.DEADLINE_EXCEEDED.value[0]


class CallingWorld(TwoModels):
    """A mesh whose models call each other."""

    def __init__(self, seed: int, story: Story, plan: Plan) -> None:
        super().__init__(seed, story, plan)
        # The second model's sequences do give up their slots.
        self.ledger._paged = True
        self.ledger.calls = True
        self.network: CallNetwork = CallNetwork(self, random.Random(f"network {seed}"))
        self.servicers: dict[SimulatedProcess, InferenceServicer] = {}
        self._doors: dict[SimulatedProcess, CallClient] = {}
        self._patience_s = random.Random(f"how patient {seed}").choice((PATIENCE_S, IMPATIENT_S))
        self.ledger.impatient = self._patience_s == IMPATIENT_S
        self._cuts, self._cut_until = random.Random(f"cuts {seed}"), 0.0

    async def run(self) -> None:
        places = {
            "executor.workers.worker.EngineThread": WaitingThread,
            "executor.service.install": self._install,
            "executor.engine.python.calls.open_door": lambda: self._doors[_running()],
            "executor.calls.watch.waits": self._waits,
            "executor.calls.client.PATIENCE_S": self._patience_s,
            "executor.calls.client.CallClient.submit": Mock(side_effect=Awaited),
            "executor.calls.gateways.Gateways._connected": Mock(side_effect=self._connected),
        }
        for place, twin in places.items():
            self.patches.enter_context(patch(place, twin))
        await super().run()

    def _fault(self) -> None:
        """Among others, no executor reaches any gateway for a while, in which the sequences of one are taken over."""
        if not self.ledger.impatient or self._cuts.random() > CUTS:
            super()._fault()
            return
        seconds, executor = self._cuts.uniform(1.0, 3.0) * LEASE_MS / 1000, self._cuts.choice(self.executors)
        self.story.tell(f"fault: executors reach no gateway for {seconds:.2f} s")
        self._cut_until = asyncio.get_running_loop().time() + seconds
        if executor.life is not None:
            self._kill(executor, executor.life)

    def _dispensable(self) -> list[Member]:
        """A step whose client has left calls all the same."""
        return [member for member in super()._dispensable() if member is not self.gateways[0]]

    def engine(self, shape: Shape, name: str) -> FoldEngine:
        whole = self.plan.shape
        return CallingEngine(name, shape, whole, self.ledger) if shape.calls else super().engine(shape, name)

    @contextmanager
    def _install(self, client: CallClient) -> Generator[None]:
        self._doors[_running()] = client
        yield

    def _waits(self) -> list[calls.InstanceWait]:
        own = self._doors[_running()]._tasks
        return [wait for wait in calls.waits() if wait.number in own]

    async def serve_ports(self, settings: GatewaySettings, parts: GatewayParts, *others: object) -> None:
        process = _running()
        self.servicers[process] = InferenceServicer(
            parts.inference,
            parts.catalog,
            parts.repository,
            parts.statistics,
            parts.settings,
            settings,
            memory=parts.memory,
            unread=parts.unread,
        )
        parts.company.takes_calls(f"grpc://{process.name}")
        await super().serve_ports(settings, parts, *others)

    def _connected(self, address: str) -> CallGateway:
        (gateway,) = [member for member in self.gateways if address == f"grpc://{member.name}"]
        stream = partial(StreamCall, self, gateway)
        return CallGateway(address, Mock(close=AsyncMock()), partial(self._infer, gateway), None, stream)

    async def reached(self, gateway: Member) -> Life:
        """Raises grpc.aio.AioRpcError."""
        if gateway.life is None or asyncio.get_running_loop().time() < self._cut_until:
            await asyncio.sleep(self.network.delay_s())
            raise rpc_error(UNAVAILABLE, "connection refused")
        return gateway.life

    async def _infer(self, gateway: Member, request: bytes, *, timeout: float, metadata: Any) -> Any:
        """In the executor. Raises grpc.aio.AioRpcError."""
        life, under_way = await self.reached(gateway), self.network.calls[_running()]
        rpc = Rpc(self, life, metadata, timeout)
        under_way.append(rpc)
        rpc.send(request)
        try:
            async with asyncio.timeout(timeout):
                return await rpc.answer
        except LostError:
            raise rpc_error(UNAVAILABLE, "connection reset by peer") from None
        except TimeoutError:
            raise rpc_error(DEADLINE_EXCEEDED, "Deadline Exceeded") from None
        finally:
            under_way.remove(rpc)
            rpc.leave()


def _running() -> SimulatedProcess:
    process = RUNNING.get()
    assert process is not None, "a process runs"
    return process


def calling(plan: Plan, seed: int) -> Plan:
    """The plan with a first model that calls others. No input fails: what a step has called would stay."""
    chance = random.Random(f"calls {seed}")
    plan = replace(plan, executors=max(2, plan.executors), fault_pause_s=min(1.0, plan.fault_pause_s))
    shape = replace(plan.shape, decoupled=False, computes=False, iterative=False)
    second = _called(shape, chance)
    models = [NAME, NAME, SECOND, NAME, NAME, SECOND, NAME]
    # Drawn by itself, so that a seed goes on to mean what it meant in everything else.
    calls = (further := random.Random(f"chains {seed}")).choice(CALLS)
    if SECOND not in calls and further.random() < CHAINED:
        shape, models = replace(shape, chained=(NAME, SECOND)), [CHAIN, NAME, SECOND, CHAIN, CHAIN, SECOND, NAME]
    if not shape.declared:
        # A replay from START makes all calls again.
        shape = replace(shape, log_steps=1000, rows=0)
        second = replace(second, parameters={"retry_replies": "64"})
    # Not as long again: at the end everything is waited for by the idle time of the first one.
    third = replace(_called(second, further), idle_s=second.idle_s + CALLED_IDLE_S / 4)
    third = third if THIRD in (*calls[NAME], *calls.get(SECOND, ())) else None
    # As above.
    streams = random.Random(f"streams {seed}")
    at_once, are_many, is_many = (streams.random() < share for share in (AT_ONCE, MANY_ANSWERS, MANY_ANSWERS))
    second = replace(second, calls=calls.get(SECOND, ()), decoupled=is_many and SECOND not in calls)
    third = third and replace(third, decoupled=are_many)
    shape = replace(shape, calls=calls[NAME], at_once=at_once, second=second, third=third)
    habits = [
        replace(_calling(habit, model, calls, chance), fails=0.0)
        for habit, model in zip(plan.habits, models, strict=False)
    ]
    return replace(plan, shape=shape, gateways=chance.randint(1, 3), habits=habits)


def _called(shape: Shape, chance: random.Random) -> Shape:
    """How a model is served that one of this shape calls."""
    return replace(
        shape,
        # Whoever waits for a slot of it holds up an instance of its caller, and that one's sequences.
        declared=True,
        virtual=True,
        direct=chance.random() < 0.3,
        slots=chance.randint(1, 3),
        instances=chance.choice((1, 2)),
        interval=chance.choice((1, 3)),
        rows=0,
        grows=False,
        idle_s=shape.idle_s + CALLED_IDLE_S,
    )


def _calling(habit: Habit, model: str, calls: Calls, chance: random.Random) -> Habit:
    """Who asks elsewhere after a while, and has no number, may begin a sequence again (docs/guides/promises.md)."""
    patience_s = None if habit.style is Style.NAMED else habit.patience_s
    calls = calls if model in (*calls, CHAIN) else {}
    habit = replace(habit, model=model, calls=calls, bold=chance.random() < 0.3, patience_s=patience_s)
    return habit if habit.bold else spread(habit, chance)


class LosingCalls(LosingWorld, CallingWorld):
    """A mesh whose store loses its newest data: those of both models, up to the same moment."""


class RefusingCalls(RefusingWorld, CallingWorld):
    """A mesh whose store does not serve for a while. A step that is replayed waits for room to make its calls."""

    def _is_open(self, record: object) -> bool:
        return False


def called(seed: int) -> Result:
    """Runs one seed of such a mesh."""
    plan = calling(plan_of(seed), seed)
    if seed % 4 == 1:
        return play_losing(seed, plan, LosingCalls)
    return play(seed, plan, RefusingCalls if seed % 4 == 2 else CallingWorld)
