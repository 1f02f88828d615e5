"""Stateless requests under random calls, beside the sequences of the fuzz (`script_fuzz`): executors that are late,
repeat themselves, or are lost, and callers that leave.

Whoever waited hears 1, 2, 3, ... and one last answer, each once and in their order. Only who holds a request answers
it, and each request that a model has answered counts once. In some runs

    order   answers leave in the order of arrival, and none waits for longer than those before it
    cache   a request that equals an earlier one may have its answer at once: the one that was stored last
    bounds  a queue, and each level of it, refuses what it has no room for, and nothing else
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shared.contract.batch_shape import Queueing
from shared.contract.ids import ExecutorId, GatewayId
from shared.contract.limits import LOST_EXECUTORS_MAX
from shared.statistics.tally import ModelLoad, Timings, packed, success
from shared.store.keyspace import WorkKeys
from shared.store.work_scripts import (
    TOO_LATE,
    Front,
    Lookup,
    RequestId,
    Stored,
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
ANSWERED = packed(success(rows=1, total_ns=1, queue_ns=1, compute=Timings(1, 1, 1)))
NAMES = ("a", "b", "c")
"""Under which the answers of equal requests are stored."""
CACHE_BYTES = 1_000_000, 20
"""What the cache may hold: everything, or two answers."""
PLAIN = 0.4
"""The share of the runs without a decoupled model in which there are stateless requests, each with one answer."""
MOVES, PLAIN_MOVES = 16, 60
"""Of all that is done: with a decoupled model, and without."""


@dataclass
class Request:
    """A request. size: how many answers it has before the last one; written: so many of them were written

    holder  the executor that runs it; left: its caller has gone; reply: the last answer
    late_us  when it has waited for too long, Redis clock; 0: never, or no more, as it was taken once
    is_told  its answer came from the cache at once, not through the stream; is_given_up: its answer waited for no other
    """

    id: RequestId
    item: WorkItem
    size: int
    written: int = 0
    holder: ExecutorId | None = None
    lost: int = 0
    left: bool = False
    late_us: int = 0
    is_told: bool = False
    is_given_up: bool = False
    reply: bytes | None = None

    @property
    def name(self) -> str:
        """In the cache."""
        return self.item.lookup.name if self.item.lookup is not None else ""

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

    def __init__(self, bench: Bench, seed: int) -> None:
        self._bench = bench
        # Drawn by itself, so that a seed goes on to mean what it meant in everything else. A decoupled model's answers
        # have no order among requests, and no cache.
        habits, decoupled = random.Random(f"work {seed}"), bench.decoupled
        self.moves = MOVES if decoupled else PLAIN_MOVES * (habits.random() < PLAIN)
        self._decoupled = decoupled
        self._ordered = not decoupled and habits.random() < 0.6
        self._cache_bytes = 0 if decoupled else habits.choice((0, *CACHE_BYTES))
        self._bound, self._level_bound = (0, 0) if decoupled else habits.choice(((0, 0), (0, 0), (3, 0), (0, 2)))
        self._deaths = 1 if decoupled else habits.choice((1, 1, 4))
        self._asked = self._counted = 0
        self._line: list[Request] = []
        """Where answers leave in order: the requests whose answers have not left."""
        self._stored: dict[str, bytes] = {}
        self._chance = bench.chance
        self._scripts = WorkScripts(bench.keys)
        self._requests: dict[RequestId, Request] = {}
        self._hands = {name: Hand() for name in EXECUTORS}

    def move(self) -> None:
        """Somebody does something."""
        self._chance.choice(
            [self.ask] * 3
            + [self.pull, self.pull, self.choose]
            + [self.write] * (6 if self._decoupled else 1)
            + [self.finish] * 2
            + [self.lose] * self._deaths
            + [self.leave, self.rare]
        )()
        held_back = self._bench.do("HLEN", self._queue.early)
        self._expect(held_back == len(self._held_back), right=True, what=f"{held_back} answers are held back")
        self._check_cache()

    def rare(self) -> None:
        """What happens seldom."""
        self._chance.choice([self.refuse, self.refuse_late, self.refuse_late, self.wake])()

    @property
    def _queue(self) -> WorkKeys:
        return self._bench.keys.work_queue(LOAD.model, LOAD.version)

    @property
    def _held_back(self) -> list[Request]:
        """Those whose answers wait for others."""
        return [one for one in self._line if one.reply is not None]

    def _cached(self) -> dict[str, bytes]:
        flat = self._bench.do("HGETALL", self._bench.keys.cache(SHARD).entries)
        return {name.decode(): reply for name, reply in pairs(flat)}

    def _check_cache(self) -> None:
        """It has the answers that were stored last: all of them, or as many as fit."""
        cached, size = self._cached(), self._bench.do("HGET", self._bench.keys.cache(SHARD).about, "bytes")
        is_right = cached.items() <= self._stored.items() and (len(cached) == len(self._stored) or not self._keeps_all)
        fits = int(size or 0) == sum(len(name) + len(reply) for name, reply in cached.items()) <= self._cache_bytes
        self._expect(is_right and fits, right=True, what=f"the cache has {cached} of {self._stored}, {size} bytes")

    @property
    def _keeps_all(self) -> bool:
        """Whether nothing leaves the cache."""
        return self._cache_bytes == max(CACHE_BYTES) and not self._bench.steps_ahead

    @property
    def waiting(self) -> list[Request]:
        """What is in the queue."""
        return [one for one in self._requests.values() if one.reply is None and one.holder is None]

    def apply_timeouts(self) -> None:
        """A look at the queue answers what has waited for too long, or puts it behind the others."""
        for one in self.waiting:
            if 0 < one.late_us <= self._bench.now_us:
                one.late_us = 0
                if not one.item.queueing.delays:
                    self._give_up(one, TOO_LATE)

    def _answer(self, one: Request, reply: bytes) -> None:
        """It has its last answer, which may wait for those before it."""
        one.reply, one.holder = reply, None
        while self._line and self._line[0].reply is not None:
            del self._line[0]

    def _give_up(self, one: Request, reply: bytes) -> None:
        """It has an answer that waits for nobody."""
        one.is_given_up = True
        self._line = [other for other in self._line if other is not one]
        self._answer(one, reply)

    # -- callers ------------------------------------------------------------------------------------------------------

    def ask(self) -> None:
        """Requests come; or the newest is sent again, by a gateway that does not know what became of it."""
        newest = list(self._requests.values())[-1:]
        is_open = bool(newest) and (newest[0].reply is None or newest[0] in self._line)
        if is_open and self._chance.random() < 0.2:
            asked = newest
        else:
            asked = [self._new() for _ in range(1 if self._decoupled else self._chance.choice((1, 1, 2)))]
        cached, size = self._cached(), len(self.waiting) + len(self._held_back)
        accepted = self._bench.run(self._scripts.enqueue([one.item for one in asked], bound=self._bound))
        for one, outcome in zip(asked, accepted, strict=True):
            self._bench.tell(f"{one.id} comes: {outcome}")
            expected = True if one.id in self._requests else self._outcome(one, cached, size)
            self._expect(outcome == expected, right=True, what=f"{one.id} comes: {outcome}, not {expected}")
            if one.id not in self._requests and outcome is not False:
                self._came(one, cached)
                size += not one.is_told

    def _new(self) -> Request:
        """A request that has not come yet."""
        self._asked += 1
        gateway, token = self._chance.choice(GATEWAYS), f"w{self._asked:x}"
        timeout_us, delays = self._chance.choice((0, 0, 0, 20_000)), self._chance.random() < 0.5
        level = self._chance.randint(0, 1)
        queueing = Queueing(level, self._level_bound, timeout_us, delays, shape="s", ordered=self._ordered)
        lookup = Lookup(self._chance.choice(NAMES), LOAD.generation, 0) if self._cache_bytes else None
        item = WorkItem(LOAD.model, LOAD.version, gateway, token, b"m", queueing, lookup)
        one = Request(request_id(gateway, token), item, self._chance.randint(0, ANSWERS_MAX if self._decoupled else 0))
        one.late_us = timeout_us and self._bench.now_us + timeout_us
        return one

    def _outcome(self, one: Request, cached: Mapping[str, bytes], size: int) -> bool | bytes:
        """What a new request is to hear. size: of the queue, with the answers that it holds back"""
        answer, level = cached.get(one.name), one.item.queueing.level
        if answer is not None and not self._ordered:
            return answer
        in_level = sum(other.item.queueing.level == level for other in self.waiting)
        is_level_full = answer is None and 0 < self._level_bound <= in_level
        return not (0 < self._bound <= size or is_level_full)

    def _came(self, one: Request, cached: Mapping[str, bytes]) -> None:
        """A new request was accepted, or its answer was found in the cache."""
        self._requests[one.id] = one
        if self._ordered:
            self._line.append(one)
        if (answer := cached.get(one.name)) is not None:
            one.is_told = not self._ordered
            self._counted += 1
            self._answer(one, answer)

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
            self._give_up(one, WITHDRAWN)
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
            given = [WorkDone(one.id, one.answer(one.size + 1), ANSWERED, self._place_of(one)) for one in done]
            finished = self._bench.run(self._scripts.finish(LOAD, name, given))
            for one, answered in zip(done, finished.answered, strict=True):
                self._bench.tell(f"{name} finishes {one.id}: {answered}")
                self._expect(answered, one.holder == name, f"{name} finishes {one.id}")
                if answered:
                    self._counted += 1
                    self._answer(one, one.answer(one.size + 1))
                    if one.name:
                        self._stored[one.name] = one.answer(one.size + 1)
                held.pop(one.id, None)

    def _place_of(self, one: Request) -> Stored | None:
        return Stored(one.name, self._cache_bytes) if one.name else None

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
                self._give_up(one, GIVEN_UP)
            elif one.left:
                self._give_up(one, UNHEARD)
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
            self._give_up(one, UNLOADED)

    def refuse_late(self) -> None:
        """A gateway finds that a request has waited for too long, perhaps too early."""
        if not self._requests:
            return
        one = self._chance.choice(list(self._requests.values())[-4:])
        (refused,) = self._bench.run(self._scripts.refuse_late(LOAD, GatewayId(one.item.gateway), [one.item.token]))
        self._bench.tell(f"{one.id} is too late: {refused}")
        self._expect(refused, one in self.waiting and one.late_us > 0, f"{one.id} is refused")
        if refused:
            self._give_up(one, TOO_LATE)

    def wake(self) -> None:
        """An executor that was woken has become busy, and wakes another one."""
        self._bench.run(self._scripts.wake(LOAD))
        tokens = self._bench.do("LLEN", self._queue.wake)
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
            self._check_order(gateway, self._heard(gateway, heard))
        for one in self._requests.values():
            expected = [*(one.answer(number) for number in range(1, one.written + 1)), one.reply]
            if [answer for answer in expected if answer is not UNHEARD and not one.is_told] != heard[one.id]:
                self._bench.truth.violate(f"{one.id} heard {heard[one.id]}, not {expected}")
        keys = self._queue
        left = [key for key in (*keys[:4], keys.deadlines, keys.order, keys.early) if self._bench.do("EXISTS", key)]
        if left:
            self._bench.truth.violate(f"all is answered, and {left} are left")
        sums = self._bench.run(self._bench.scripts.total([LOAD], shard=SHARD, at_most=100_000)).sums[0]
        if not self._bench.steps_ahead and (counted := sums.get("success_count", 0)) != self._counted:
            self._bench.truth.violate(f"{counted} requests counted, not {self._counted}")

    def _heard(self, gateway: GatewayId, heard: dict[RequestId, list[bytes]]) -> list[RequestId]:
        """Adds what a gateway has heard of its requests; of which ones, in this order."""
        order: list[RequestId] = []
        for _, flat in self._bench.do("XRANGE", self._bench.keys.replies(SHARD, gateway), "-", "+"):
            for token, reply in pairs(flat):
                order.append(request_id(gateway, token.decode()))
                heard[order[-1]].append(reply)
        return order

    def _check_order(self, gateway: GatewayId, order: Sequence[RequestId]) -> None:
        came = [id for id, one in self._requests.items() if one.item.gateway == gateway and not one.is_given_up]
        left = [id for id in order if id in self._requests and not self._requests[id].is_given_up]
        if self._ordered and left != came:
            self._bench.truth.violate(f"{came} came to {gateway} in this order, and {left} were answered")

    def _expect(self, found: bool, right: bool, what: str) -> None:
        if found is not right:
            self._bench.truth.violate(f"{what}: {found}")
