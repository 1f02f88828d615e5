"""Stateless requests of a decoupled model under random calls, beside the sequences of the fuzz (`script_fuzz`):
executors that are late, repeat themselves, or are lost, and callers that leave.

Whoever waited hears 1, 2, 3, ... and one last answer, each once and in their order. Only who holds a request answers
it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from shared.contract.batch_shape import Queueing
from shared.contract.ids import ExecutorId, GatewayId
from shared.contract.limits import LOST_EXECUTORS_MAX
from shared.statistics.tally import ModelLoad
from shared.store.work_scripts import (
    TOO_LATE,
    Front,
    RequestId,
    Take,
    Taken,
    WorkDone,
    WorkHeld,
    WorkItem,
    WorkScripts,
    request_id,
)
from tests.simulation.script_bench import Bench, pairs
from tests.simulation.script_truth import SHARD

LOAD = ModelLoad("say", "1", "0")
EXECUTORS = (ExecutorId("w1"), ExecutorId("w2"), ExecutorId("w3"))
GATEWAYS = (GatewayId("g1"), GatewayId("g2"))
ANSWERS_MAX = 4
GIVEN_UP, WITHDRAWN, UNLOADED = b"given up", b"withdrawn", b"unloaded"
UNHEARD = b"its caller has gone"
"""Nobody gets it."""


@dataclass
class Request:
    """A request. size: how many answers it has before the last one; written: so many of them were written

    holder  the executor that runs it; left: its caller has gone; reply: the last answer
    late_us  when it has waited for too long, Redis clock; 0: never, or no more, as it was taken once
    """

    id: RequestId
    item: WorkItem
    size: int
    written: int = 0
    holder: ExecutorId | None = None
    lost: int = 0
    left: bool = False
    late_us: int = 0
    reply: bytes | None = None

    def answer(self, number: int) -> bytes:
        return f"{self.id} {number}".encode()


@dataclass
class Hand:
    """What an executor thinks that it holds, and how many answers of each it has written. tag: of its latest take; got:
    the tag with which it got something
    """

    held: dict[RequestId, int] = field(default_factory=dict[RequestId, int])
    tag: int = 0
    got: int = -1


class WorkFuzz:
    """The stateless requests of one run."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._chance = bench.chance
        self._scripts = WorkScripts(bench.keys)
        self._requests: dict[RequestId, Request] = {}
        self._hands = {name: Hand() for name in EXECUTORS}

    def move(self) -> None:
        """Somebody does something."""
        self._chance.choice(
            [self.ask] * 3
            + [self.pull, self.pull, self.choose]
            + [self.write] * 6
            + [self.finish] * 2
            + [self.lose, self.leave]
            + [self.rare]
        )()

    def rare(self) -> None:
        """What happens seldom."""
        self._chance.choice([self.refuse, self.refuse_late, self.refuse_late, self.wake])()

    @property
    def waiting(self) -> list[Request]:
        """What is in the queue."""
        return [one for one in self._requests.values() if one.reply is None and one.holder is None]

    def apply_timeouts(self) -> None:
        """A look at the queue answers what has waited for too long, or puts it behind the others."""
        for one in self.waiting:
            if 0 < one.late_us <= self._bench.now_us:
                one.late_us, one.reply = 0, None if one.item.queueing.delays else TOO_LATE

    # -- callers ------------------------------------------------------------------------------------------------------

    def ask(self) -> None:
        """A request comes; or the newest is sent again, by a gateway that does not know what became of it."""
        newest = list(self._requests.values())[-1:]
        if newest and newest[0].reply is None and self._chance.random() < 0.2:
            one = newest[0]
        else:
            gateway, token = self._chance.choice(GATEWAYS), f"w{len(self._requests) + 1:x}"
            timeout_us, delays = self._chance.choice((0, 0, 0, 20_000)), self._chance.random() < 0.5
            queueing = Queueing(self._chance.randint(0, 1), timeout_us=timeout_us, delays=delays, shape="s")
            item = WorkItem(LOAD.model, LOAD.version, gateway, token, b"m", queueing)
            one = Request(request_id(gateway, token), item, self._chance.randint(0, ANSWERS_MAX))
            one.late_us = timeout_us and self._bench.now_us + timeout_us
            self._requests[one.id] = one
        (accepted,) = self._bench.run(self._scripts.enqueue([one.item], bound=0))
        self._bench.tell(f"{one.id} comes: {accepted}")

    def leave(self) -> None:
        """A caller leaves."""
        if not self._requests:
            return
        one = self._chance.choice(list(self._requests.values())[-4:])
        call = self._scripts.withdraw(LOAD, GatewayId(one.item.gateway), [one.item.token], reply=WITHDRAWN)
        (withdrawn,) = self._bench.run(call)
        self._bench.tell(f"the caller of {one.id} leaves: {withdrawn}")
        self._expect(withdrawn, one.reply is None and one.holder is None, f"{one.id} is withdrawn")
        if withdrawn:
            one.reply = WITHDRAWN
        one.left |= one.reply is None

    # -- executors ----------------------------------------------------------------------------------------------------

    def pull(self) -> None:
        """An executor takes work; perhaps it asks once more for what it took last."""
        name = self._chance.choice(EXECUTORS)
        if isinstance(pulled := self._pulled(name, Take.WHEN_PLAIN), Taken):
            self._taken(name, self._hands[name].tag, pulled.requests)

    def _pulled(self, name: ExecutorId, take: int) -> Taken | Front:
        hand = self._hands[name]
        hand.tag += self._chance.random() < 0.8
        if hand.got != hand.tag:
            self.apply_timeouts()
        limits = {"requests_max": 2, "rows_max": 2, "delay_us": 0, "take": take}
        return self._bench.run(self._scripts.pull(LOAD, name, f"t{hand.tag}", **limits))

    def choose(self) -> None:
        """An executor decides itself what it takes, while others do something."""
        name = self._chance.choice(EXECUTORS)
        front = self._pulled(name, Take.NEVER)
        tag = self._hands[name].tag
        if isinstance(front, Taken):
            self._expect(self._hands[name].got == tag, right=True, what=f"{name} takes what it has only looked at")
            return
        ids = [seen.id for seen in front.front]
        read = self._bench.run(self._scripts.read(LOAD, ids)) if ids else ()
        if [id for id, _ in read] != ids or not {*ids} <= {one.id for one in self.waiting}:
            self._bench.truth.violate(f"{name} sees {ids} and reads {read}")
        if self._chance.random() < 0.3:
            self._chance.choice([self.pull, self.leave, self.lose])()
        if not ids:
            return
        waits = {*ids} <= {one.id for one in self.waiting}
        taken = self._bench.run(self._scripts.take(LOAD, name, f"t{tag}", ids))
        self._expect(bool(taken), waits or self._hands[name].got == tag, f"{name} takes {ids}")
        self._taken(name, tag, taken)

    def _taken(self, name: ExecutorId, tag: int, requests: Sequence[tuple[RequestId, bytes]]) -> None:
        hand = self._hands[name]
        hand.got = tag if requests else hand.got
        for id, message in requests:
            one = self._requests[id]
            self._bench.tell(f"{name} takes {id}")
            # A take that is sent again gives the same again, also what was answered meanwhile.
            if one.holder is None and one.reply is None:
                one.holder, one.late_us = name, 0
            self._expect(bool(message), one.reply is None, f"{id} has a message")
            self._expect(one.holder in (name, None), right=True, what=f"{id} is taken, which {one.holder} holds")
            if message:
                hand.held.setdefault(id, 0)

    def write(self) -> None:
        """An executor writes answers of some requests; some of them once more."""
        name = self._chance.choice(EXECUTORS)
        held = self._hands[name].held
        calls: list[tuple[RequestId, list[tuple[int, bytes]]]] = []
        for id, written in list(held.items()):
            one = self._requests[id]
            first = self._chance.randint(0, written) if self._chance.random() < 0.2 else written
            # Without answers it only asks what became of the request.
            held[id] = self._chance.randint(written, one.size)
            calls.append((id, [(n, one.answer(n)) for n in range(first + 1, held[id] + 1)]))
        for _ in range(self._chance.choice((1, 1, 2)) if calls else 0):
            outcomes = self._bench.run(self._scripts.answers(LOAD, name, calls))
            for (id, answers), outcome in zip(calls, outcomes, strict=True):
                one = self._requests[id]
                self._bench.tell(f"{name} answers {id} with {[number for number, _ in answers]}: {outcome.name}")
                self._expect(outcome is not WorkHeld.GONE, one.holder == name, f"{name} answers {id}")
                self._expect(outcome is WorkHeld.CANCELLED, one.holder == name and one.left, f"{id} is cancelled")
                if outcome is WorkHeld.GONE:
                    held.pop(id, None)
                elif answers:
                    one.written = max(one.written, answers[-1][0])

    def finish(self) -> None:
        """An executor gives last answers, perhaps twice."""
        name = self._chance.choice(EXECUTORS)
        held = self._hands[name].held
        done = [self._requests[id] for id, written in held.items() if written == self._requests[id].size]
        for _ in range(self._chance.choice((1, 1, 2)) if done else 0):
            given = [WorkDone(one.id, one.answer(one.size + 1)) for one in done]
            finished = self._bench.run(self._scripts.finish(LOAD, name, given))
            for one, answered in zip(done, finished.answered, strict=True):
                self._bench.tell(f"{name} finishes {one.id}: {answered}")
                self._expect(answered, one.holder == name, f"{name} finishes {one.id}")
                if answered:
                    one.reply, one.holder = one.answer(one.size + 1), None
                held.pop(one.id, None)

    def lose(self) -> None:
        """An executor leaves, or its lease has ended, of which it may not have heard."""
        name, dies = self._chance.choice(EXECUTORS), self._chance.random() < 0.7
        count = self._bench.run(self._scripts.requeue(LOAD, name, given_up=GIVEN_UP if dies else b""))
        self._bench.tell(f"{name} {'is lost' if dies else 'leaves'}: {count}")
        mine = [one for one in self._requests.values() if one.holder == name]
        if count != len(mine):
            self._bench.truth.violate(f"{name} held {count} requests, not {len(mine)}")
        self._hands[name].got = -1
        for one in mine:
            one.holder = None
            one.lost += dies
            if one.lost >= LOST_EXECUTORS_MAX:
                one.reply = GIVEN_UP
            elif one.left:
                one.reply = UNHEARD
        if not dies:
            self._hands[name] = Hand(tag=self._hands[name].tag)

    # -- others -------------------------------------------------------------------------------------------------------

    def refuse(self) -> None:
        """No executor serves the model any more."""
        waiting = self.waiting
        count = self._bench.run(self._scripts.refuse(LOAD, UNLOADED))
        self._bench.tell(f"{count} requests are refused")
        self._expect(count == len(waiting), right=True, what=f"{count} of {len(waiting)} were refused")
        for one in waiting:
            one.reply = UNLOADED

    def refuse_late(self) -> None:
        """A gateway finds that a request has waited for too long, perhaps too early."""
        if not self._requests:
            return
        one = self._chance.choice(list(self._requests.values())[-4:])
        (refused,) = self._bench.run(self._scripts.refuse_late(LOAD, GatewayId(one.item.gateway), [one.item.token]))
        self._bench.tell(f"{one.id} is too late: {refused}")
        self._expect(refused, one in self.waiting and one.late_us > 0, f"{one.id} is refused")
        if refused:
            one.reply = TOO_LATE

    def wake(self) -> None:
        """An executor that was woken has become busy, and wakes another one."""
        self._bench.run(self._scripts.wake(LOAD))
        tokens = self._bench.do("LLEN", self._bench.keys.work_queue(LOAD.model, LOAD.version).wake)
        self._expect(tokens == bool(self.waiting), right=True, what=f"{tokens} are woken for {len(self.waiting)}")

    # -- the end ------------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """All that was asked is answered."""
        for _ in range(200):
            if all(one.reply is not None for one in self._requests.values()):
                break
            self.pull()
            self.write()
            self.finish()
        heard: dict[RequestId, list[bytes]] = defaultdict(list)
        for gateway in GATEWAYS:
            for _, flat in self._bench.do("XRANGE", self._bench.keys.replies(SHARD, gateway), "-", "+"):
                for token, reply in pairs(flat):
                    heard[request_id(gateway, token.decode())].append(reply)
        for one in self._requests.values():
            expected = [*(one.answer(number) for number in range(1, one.written + 1)), one.reply]
            if [answer for answer in expected if answer is not UNHEARD] != heard[one.id]:
                self._bench.truth.violate(f"{one.id} heard {heard[one.id]}, not {expected}")
        queue = self._bench.keys.work_queue(LOAD.model, LOAD.version)
        left = [key for key in (queue.meta, queue.messages, queue.held, queue.queue) if self._bench.do("EXISTS", key)]
        if left:
            self._bench.truth.violate(f"all is answered, and {left} are left")

    def _expect(self, found: bool, right: bool, what: str) -> None:
        if found is not right:
            self._bench.truth.violate(f"{what}: {found}")
