"""The models of the simulation: `fold`, whose state is a fold over its inputs that no two orders of steps, and no lost
or doubled one, leave the same; in some meshes `fold2`, which does the same; in some `chain`, an ensemble in which
`fold2` has what `fold` gives; and in some `say`, which has no state, and is decoupled where `fold` is. In some meshes
`fold` calls `fold2` in each of its steps, and there may be a `fold3` that one of the two calls (calling.py).

It needs no thread and no tensor library; batching, checkpoints and whatever else the executor does around an engine is
the executor's own code.
"""

from __future__ import annotations

import asyncio
import random
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from executor.engine.base import Answers, BatchResult, LateAnswer, Row, RowError, RowResult, Timings
from executor.models.fingerprints import Fingerprint
from executor.models.repository import ModelRepository
from executor.models.served import LoadedModel, ServedVersion
from executor.models.version_maker import LoadOptions
from executor.reporting.statistics import StatisticsRecorder
from executor.workers.devices import Devices
from executor.workers.worker import EngineWorker, Pace
from shared.contract.errors import Code
from shared.contract.ids import InstanceIndex
from shared.contract.messages import ModelRecord
from shared.contract.model_config import (
    Direct,
    DynamicBatching,
    EnsembleStep,
    InstanceGroup,
    ModelConfig,
    Oldest,
    QueuePolicy,
    SequenceBatching,
    StateSpec,
    TensorSpec,
    TimeoutAction,
)
from shared.contract.tensors import Tensor
from shared.statistics.tally import ModelLoad
from tests.simulation.virtual import crash

NAME, SECOND, THIRD, CHAIN, STATELESS = "fold", "fold2", "fold3", "chain", "say"
INPUT, OUTPUT, STATE_IN, STATE_OUT = "INPUT", "OUTPUT", "STATE_IN", "STATE_OUT"
HEARD = "HEARD"
"""The output of a model that calls another one: the last answer that it heard."""
MODULUS = (1 << 61) - 1
ANSWERS = 5
JOURNAL_STEPS = 12
DEADLY = 500
PASS = 10**9
"""What an input has more for each further pass that an iterative model makes over it."""
COMPUTED = 10**12
"""Inputs from here on are what another model gives: by chance none is less. They mean one pass, and nothing else."""
FAILURE = "the model was told to fail"
Calls = Mapping[str, tuple[str, ...]]
"""Which models a model calls in each of its steps."""
SILENCE_S = 0.08
"""Between two answers of a decoupled model, on the average."""
LATE_S = 0.01, 0.08, 2.0
"""Between a batch and an answer that comes behind it, on the average: longer than a registration takes, too."""


def fold(state: int, value: int) -> int:
    """The state after one more input, and all passes over it; it is the output, too."""
    for _ in range(passes_of(value)):
        state = folded(state, value)
    return state


def folded(state: int, value: int) -> int:
    """The state after one pass."""
    return (state * 1_000_003 + value + 1) % MODULUS


def passes_of(value: int) -> int:
    """How many passes the model makes over this input."""
    return 1 + abs(value) // PASS if abs(value) < COMPUTED else 1


def kept(terms: tuple[int, ...], value: int) -> tuple[int, ...]:
    """A state that grows is a sum. These of its terms stay with this input: the last one or two may give way."""
    return terms[: len(terms) - (0, 0, 1, 2)[value % 4]]


def number(name: str, value: int, shape: tuple[int, ...] = (1, 1)) -> Tensor:
    """A tensor of one number."""
    return numbers(name, (value,), shape)


def numbers(name: str, values: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
    return Tensor(name, "INT64", shape, struct.pack(f"<{len(values)}q", *values))


def value_of(tensor: Tensor) -> int:
    """The number of such a tensor."""
    return struct.unpack("<q", tensor.raw)[0]


def is_deadly(value: int) -> bool:
    """Whether this input ends every executor that runs it."""
    return abs(value) % 1000 >= DEADLY and abs(value) < COMPUTED


def called_with(state: int, models: Sequence[str]) -> list[tuple[str, int]]:
    """What a model that calls these sends them in a step: each of them once, and in every other step the first one
    twice. state: after the step
    """
    called = [*models, *models[:1]][: len(models) + state % 2]
    return [(model, state + index) for index, model in enumerate(called)]


def answered(states: dict[str, int], calls: Calls, model: str, value: int) -> int:
    """What a step says at last: what the model has heard last, or its state. states: of all models, which move on"""
    heard = states[model] = fold(states.get(model, 0), value)
    for callee, given in called_with(heard, calls.get(model, ())):
        heard = answered(states, calls, callee, given)
    return heard


def before_last(state: int, value: int) -> list[int]:
    """What a decoupled model says before its last answer: the number of each pass but the last, and in that pass
    numbers beyond the state. state: after the input
    """
    return [*range(1, passes_of(value)), *((state + number) % MODULUS for number in range(1, abs(value) % ANSWERS + 1))]


@dataclass(frozen=True, slots=True)
class Shape:
    """How the mesh serves the model in one run.

    rows      of a batch; 0 for as many as slots. With fewer, a batch may be full while another one runs
    declared  the mesh holds its state; otherwise only the engine does
    log_steps  if not: so many steps since START are run again by a new owner; 0: none, and the state is lost
    virtual   its sequences give up their slots while others wait, if the mesh holds their state
    spare     slots of each instance that are kept free for others, if they do
    computes  it does nothing but compute: some of its batches run on the event loop (`ChancePace`)
    decoupled  it has up to ANSWERS answers to each input
    late       it gives some of its answers behind their batches; only if not decoupled
    stateless  the mesh serves a model without a state, too; in any case if decoupled
    cached     equal requests to that one may be answered from the response cache
    iterative  each input is a sequence, and it makes as many passes over the input as that says (`passes_of`)
    grows      its state has another term with most inputs; only if declared
    delay_us   a step waits so long for others, and in_order: answers leave in the order in which steps came
    patience_us  how long a request without a state may wait in its queue; 0: for ever
    journaled  its sequences have journals. Without them nothing has to be judged of most commits (`conclude`)
    second, third  how it serves further such models beside it, if it does
    chained    it serves an ensemble of these models, too, each of which has what the one before it gives
    calls      it calls these models, in sequences of the same id, and says what it heard, too
    at_once    it makes all calls of a step before it waits for an answer
    """

    slots: int = 2
    rows: int = 0
    instances: int = 1
    direct: bool = False
    interval: int = 1
    declared: bool = True
    log_steps: int = 0
    virtual: bool = True
    spare: int = 0
    computes: bool = False
    decoupled: bool = False
    late: bool = False
    stateless: bool = False
    cached: bool = False
    iterative: bool = False
    grows: bool = False
    delay_us: int = 0
    in_order: bool = False
    patience_us: int = 0
    journaled: bool = True
    idle_s: float = 8.0
    second: Shape | None = None
    third: Shape | None = None
    chained: tuple[str, ...] = ()
    calls: tuple[str, ...] = ()
    at_once: bool = False
    parameters: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def survives(self) -> bool:
        """Whether no sequence is lost with its executor. No run of a client has as many steps as a journal. An
        iterative model needs no state from before a step.
        """
        return self.declared or self.log_steps >= JOURNAL_STEPS or self.iterative

    def of(self, name: str) -> Shape:
        """How it serves the model of that name."""
        return {SECOND: self.second, THIRD: self.third}.get(name) or self

    def config(self, name: str = NAME) -> ModelConfig:
        """As a model's configuration says it."""
        direct = Direct(self.delay_us, 1.0 if self.delay_us else 0.0)
        strategy = direct if self.direct else Oldest(self.slots, (), self.delay_us, self.in_order)
        dims = (-1,) if self.grows else (1,)
        state = StateSpec(STATE_IN, STATE_OUT, "INT64", dims, same_buffer=self.grows, growable=self.grows)
        states = (state,) if self.declared else ()
        log = {"sequence_recovery": "replay", "sequence_log_steps": str(self.log_steps)}
        return ModelConfig(
            name,
            "simulated",
            "",
            self.rows or self.slots,
            (TensorSpec(INPUT, "INT64", (1,)),),
            tuple(TensorSpec(output, "INT64", (1,)) for output in ((OUTPUT, HEARD) if self.calls else (OUTPUT,))),
            sequence_batching=SequenceBatching(
                strategy, int(self.idle_s * 1e6), states=states, iterative=self.iterative
            ),
            instance_groups=(InstanceGroup(name, count=self.instances),),
            parameters={
                "checkpoint_interval": str(self.interval),
                "virtual_slots": str(self.virtual).lower(),
                "journal_steps": str(JOURNAL_STEPS * self.journaled),
                **(log if self.log_steps and not self.declared else {}),
                **self.parameters,
            },
            decoupled=self.decoupled,
        )

    @property
    def has_stateless(self) -> bool:
        """Whether the mesh serves a model without a state."""
        return self.decoupled or self.stateless

    def stateless_config(self) -> ModelConfig:
        """The configuration of the model without a state."""
        tensors = (TensorSpec(INPUT, "INT64", (1,)),), (TensorSpec(OUTPUT, "INT64", (1,)),)
        groups = (InstanceGroup(STATELESS, count=self.instances),)
        policy = QueuePolicy(default_timeout_us=self.patience_us)
        # A request of the second level is delayed when it is late.
        policies = {2: QueuePolicy(TimeoutAction.DELAY, self.patience_us)}
        batching = DynamicBatching(
            max_queue_delay_us=self.delay_us,
            preserve_ordering=self.in_order,
            priority_levels=2,
            default_priority_level=1,
            default_queue_policy=policy,
            priority_queue_policies=policies,
        )
        return ModelConfig(
            STATELESS,
            "simulated",
            "",
            self.slots,
            *tensors,
            dynamic_batching=batching if self.stateless or self.patience_us or self.delay_us else None,
            instance_groups=groups,
            decoupled=self.decoupled,
            response_cache=self.cached,
        )

    def chain(self) -> ModelConfig:
        """The configuration of the ensemble."""
        tensors = (TensorSpec(INPUT, "INT64", (1,)),), (TensorSpec(OUTPUT, "INT64", (1,)),)
        names = [INPUT, *(f"BEHIND_{model}" for model in self.chained[:-1]), OUTPUT]
        steps = [
            EnsembleStep(model, "", {INPUT: given}, {HEARD if model == NAME and self.calls else OUTPUT: gives})
            for model, given, gives in zip(self.chained, names, names[1:], strict=False)
        ]
        return ModelConfig(CHAIN, "", "ensemble", 1, *tensors, ensemble=tuple(steps))


class FoldEngine:
    """One instance of it (an `executor.engine.base.Engine`). It fails on negative inputs; its state stays then. A state
    is the sum of its terms.
    """

    def __init__(self, *, only_computes: bool = False, grows: bool = False, late: bool = False) -> None:
        self.only_computes = only_computes
        self._grows = grows
        self._late = late
        self._states: dict[int, tuple[int, ...]] = {}
        self._passes: dict[int | None, int] = {}

    def run(self, rows: Sequence[Row], want_state: Sequence[bool]) -> BatchResult:
        results = [self._run(row, wanted) for row, wanted in zip(rows, want_state, strict=True)]
        return BatchResult(results, Timings(1, 1, 1))

    def _run(self, row: Row, wanted: bool) -> RowResult | RowError | None:
        if row.null:
            return None
        value = value_of(row.inputs[INPUT])
        if is_deadly(value):
            crash()
        terms = () if row.start or row.slot is None else self._states.get(row.slot, ())
        if value >= 0:
            state, terms = folded(sum(terms) % MODULUS, value), kept(terms, value) if self._grows else ()
            terms = (*terms, (state - sum(terms)) % MODULUS)
        state = sum(terms) % MODULUS
        passes = 1 + (0 if row.start else self._passes.get(row.slot, 0))
        self._passes[row.slot] = passes % passes_of(value)
        if passes < passes_of(value) and not (row.answers and row.answers.is_cancelled):
            self._keep(row.slot, terms)
            if row.answers is not None:
                row.answers.send(RowResult((number(OUTPUT, passes),)))
            return RowResult((), again=True)
        states = {STATE_IN: numbers(STATE_IN, terms, (len(terms),))} if wanted else {}
        last = RowError(Code.INTERNAL, FAILURE) if value < 0 else RowResult((number(OUTPUT, state),), states)
        if row.answers is not None:
            self._say(row.slot, row.answers, before_last(state, value)[passes - 1 :], last, terms)
            return RowResult((), open=True)
        if self._late and random.random() < 0.5:
            # It does not ask whether somebody still listens.
            late, silence_s = LateAnswer(), random.expovariate(1 / random.choice(LATE_S))
            keep = partial(self._keep, row.slot, terms)
            asyncio.get_running_loop().call_later(silence_s, late.end, last, keep)
            return RowResult((), open=True, late=late)
        self._keep(row.slot, terms)
        return last

    def _keep(self, slot: int | None, terms: tuple[int, ...]) -> None:
        if slot is not None:
            self._states[slot] = terms

    def _say(
        self,
        slot: int | None,
        answers: Answers,
        before: list[int],
        last: RowResult | RowError,
        terms: tuple[int, ...],
    ) -> None:
        """Gives the answers one by one, the next one after a while. Stops when nobody listens any more."""
        if answers.is_cancelled:
            answers.end(RowError(Code.CANCELLED, "nobody listens"))
        elif before:
            answers.send(RowResult((number(OUTPUT, before[0]),)))
            # As often as not the next answers come at once, and travel together.
            silence_s = random.choice((0.0, 1.0)) * random.expovariate(1 / SILENCE_S)
            loop = asyncio.get_running_loop()
            loop.call_later(silence_s, self._say, slot, answers, before[1:], last, terms)
        else:
            answers.end(last, lambda: self._keep(slot, terms))

    def load_states(self, slots: Sequence[int], states: Sequence[Mapping[str, Tensor]]) -> None:
        for slot, one in zip(slots, states, strict=True):
            self._states[slot] = tuple(value for (value,) in struct.iter_unpack("<q", one[STATE_IN].raw))

    def describe_state(self, slot: int) -> str:
        return str(self._states.get(slot))

    def drop_state(self, slot: int) -> None:
        self._states.pop(slot, None)

    def close(self) -> None:
        self._states.clear()
        self._passes.clear()


class ChancePace(Pace):
    """A pace that changes with every batch."""

    @property
    def is_short(self) -> bool:
        return random.random() < 0.5


class FoldRepository(ModelRepository):
    """A model repository that holds these models alone.

    shape    by the content of a load
    engine   makes an instance
    options  with `reloads` they may be loaded again. Each load is another one; two in a row have the same content, so
             that states of the first are states of the second
    """

    def __init__(
        self, shape: Callable[[str], Shape], engine: Callable[[Shape, str], FoldEngine], options: LoadOptions
    ) -> None:
        super().__init__((), Devices(), options)
        self._shape = shape
        self._engine = engine

    def names(self) -> list[str]:
        shape = self._shape("")
        further = [name for name in (SECOND, THIRD) if shape.of(name) is not shape]
        return [NAME, *further, *[CHAIN] * bool(shape.chained), *[STATELESS] * shape.has_stateless]

    def _load(
        self, name: str, override_json: str | None, files: Mapping[str, bytes] | None, generation: str
    ) -> LoadedModel:
        present = self.loaded.get(name)
        if present is not None and present.record.generation == generation:
            return present
        content = content_of(int(generation))
        shape = self._shape(content).of(name)
        config = (
            shape.stateless_config() if name == STATELESS else shape.chain() if name == CHAIN else shape.config(name)
        )
        load = ModelLoad(name, "1", generation)
        workers = [
            EngineWorker(self._engine(shape, name), name, f"{name}_{index}", InstanceIndex(index))
            for index in range(0 if name == CHAIN else shape.instances)
        ]
        slots = 0 if name in (STATELESS, CHAIN) else shape.slots
        # As `VersionMaker._marked`.
        mark = "" if not self.options.reloads or not slots else content if config.recoverable else f"{random.random()}"
        fingerprint = Fingerprint(content, generation)
        scope = content.replace(" ", "-") if config.response_cache else ""
        recorder = StatisticsRecorder(load)
        served = ServedVersion(config, "1", workers, slots, recorder, fingerprint, cache_scope=scope, mark=mark)
        scopes = {"1": scope} if scope else {}
        model = LoadedModel(ModelRecord(config, "{}", ("1",), generation, cache_scopes=scopes), [served])
        self._replace(name, model)
        return model


def content_of(generation: int) -> str:
    """What the states of a load depend on."""
    return f"content {generation // 2}"
