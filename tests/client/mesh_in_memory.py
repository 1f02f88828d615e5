"""A mesh in memory that keeps the promises which the client relies on, and a shell that breaks everything else.

Its model sums the inputs. Time passes only while the client waits.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from seqmesh_client.conversation import ASK_S, Ask, Conversation, Mesh, Program, Wish
from seqmesh_client.delivery import Connect, Listen, Patience, Quiet
from seqmesh_client.token import Place
from seqmesh_client.wire import NUMBERED, LinkBroken, StepRequest, pb

ResultT = TypeVar("ResultT")
LONG_SUFFERING = Patience(step_s=600.0)
ANSWERS = 3
"""Answers of a step of a decoupled model."""


@dataclass
class Kept:
    """A step that ran. inputs: with its flags"""

    inputs: bytes
    total: int


@dataclass
class SumMesh:
    """Steps by sequence. A forgetful mesh runs repeated steps again; a nameless one tells no runs.

    closed  sequences that were ended without a step: another run may begin
    runs    how many runs have begun before this one
    ran     how often each step ran
    """

    forgetful: bool = False
    decoupled: bool = False
    nameless: bool = False
    kept: dict[str, list[Kept]] = field(default_factory=dict[str, list[Kept]])
    ended: set[str] = field(default_factory=set[str])
    closed: set[str] = field(default_factory=set[str])
    runs: Counter[str] = field(default_factory=Counter[str])
    ran: dict[tuple[str, int], int] = field(default_factory=dict[tuple[str, int], int])

    def accept(self, message: Any) -> list[Any]:
        """The answers to a request."""
        sequence: str = message.parameters["sequence_id"].string_param
        number: int = message.parameters["sequence_step"].int64_param
        if number == 1 and sequence in self.closed:
            self.closed.discard(sequence)
            self.runs[sequence] += 1
            self.kept[sequence] = []
        steps = self.kept.setdefault(sequence, [])
        value = int(np.frombuffer(message.raw_input_contents[0], np.int64).item())
        inputs = message.raw_input_contents[0] + bytes([message.parameters["sequence_end"].bool_param])
        if number <= len(steps) and not self.forgetful:
            if steps[number - 1].inputs != inputs:
                return [refusal(message, "wrong_step", len(steps))]
            return self.answers(message, steps[number - 1].total)
        if sequence in self.ended | self.closed:
            return [refusal(message, "ended" if sequence in self.ended else "cancelled", len(steps))]
        if number > len(steps) + 1:
            return [refusal(message, "wrong_step" if steps else "never_seen", len(steps))]
        if value < 0:
            return [refusal(message, "", 0, code="INVALID_ARG")]
        if message.parameters["sequence_end"].bool_param:
            self.ended.add(sequence)
        steps.append(Kept(inputs, (steps[-1].total if steps else 0) + value))
        self.ran[sequence, number] = self.ran.get((sequence, number), 0) + 1
        return self.answers(message, steps[-1].total)

    def run_of(self, sequence: str) -> str:
        return f"{sequence}.{self.runs[sequence]}"

    def end(self, message: Any) -> None:
        sequence: str = message.parameters["sequence_id"].string_param
        if message.parameters["sequence_close"].string_param == self.run_of(sequence):
            self.closed.add(sequence)

    def answers(self, message: Any, total: int) -> list[Any]:
        said = [answer(message, total, final=True)]
        if self.decoupled:
            first = message.parameters["sequence_answer"].int64_param or 1
            said = [answer(message, total + n, final=n == ANSWERS) for n in range(first, ANSWERS + 1)]
        run = self.run_of(message.parameters["sequence_id"].string_param)
        for one in () if self.nameless else said:
            one.infer_response.parameters["sequence_run"].string_param = run
        return said


def answer(message: Any, total: int, *, final: bool) -> Any:
    said = pb.ModelStreamInferResponse()
    said.infer_response.id = message.id
    said.infer_response.model_name = message.model_name
    said.infer_response.outputs.add(name="OUTPUT", datatype="INT64", shape=[1, 1])
    said.infer_response.raw_output_contents.append(np.int64(total).tobytes())
    said.infer_response.parameters["triton_final_response"].bool_param = final
    return said


def refusal(message: Any, reason: str, last_step: int, *, code: str = "INVALID_ARG", retry: str = "no") -> Any:
    said = pb.ModelStreamInferResponse(error_message=f"refused: {reason}")
    said.infer_response.id = message.id
    said.infer_response.parameters["code"].string_param = code
    if reason:
        said.infer_response.parameters["reason"].string_param = reason
        said.infer_response.parameters["last_step"].int64_param = last_step
        said.infer_response.parameters["retry"].string_param = retry
    return said


class BrittleLink:
    """Loses connections before the mesh has a step and after, refuses steps for the moment, and is silent."""

    def __init__(self, shell: BrittleShell) -> None:
        self.shell = shell
        self.inbox: deque[Any] = deque()
        self.broken = self.silent = self.closed = False

    def send(self, message: Any) -> None:
        assert not self.closed
        self.broken = self.broken or self.shell.mishap()
        if self.broken or self.silent:
            return
        if self.shell.mishap():
            passing = [("busy", "RESOURCE_EXHAUSTED"), ("late", "INVALID_ARG"), ("", "UNAVAILABLE")]
            reason, code = self.shell.chance.choice(passing)
            self.inbox.append(refusal(message, reason, 0, code=code, retry="same" if reason == "busy" else "no"))
            return
        answers = self.shell.mesh.accept(message)
        if self.shell.mishap():
            # After a break some answers may have left, or none.
            answers = answers[: self.shell.chance.randrange(len(answers) + 1)]
            self.broken = True
        self.silent = self.shell.mishap()
        self.inbox.extend(answers if not self.silent else [])

    def close(self) -> None:
        self.closed = True


class BrittleShell:
    """Fulfils wishes at once, or fails. now: virtual seconds"""

    def __init__(
        self,
        mesh: SumMesh,
        chance: random.Random,
        mishaps: float = 0.0,
        *,
        numbered: bool = True,
        strict: bool = True,
        patience: Patience = LONG_SUFFERING,
    ) -> None:
        self.mesh = mesh
        self.chance = chance
        self.mishaps = mishaps
        self.now = 1000.0
        self.numbered = numbered
        self.about = Mesh(("a:1", "b:1"), patience, strict, {}, {})
        self.link: BrittleLink | None = None
        self.links = self.left_open = 0
        self.asked: list[str] = []

    def mishap(self) -> bool:
        return self.chance.random() < self.mishaps

    def conversation(self, place: Place) -> Conversation:
        return Conversation(self.about, place, lambda: self.now)

    def run(self, program: Program[ResultT]) -> ResultT:
        try:
            wish = next(program)
            while True:
                try:
                    result = self.fulfil(wish)
                except LinkBroken as error:
                    wish = program.throw(error)
                else:
                    wish = program.send(result)
        except StopIteration as end:
            return end.value

    def fulfil(self, wish: Wish) -> Any:
        assert isinstance(wish, Ask) or wish.until > self.now, "nobody waits for what is over"
        match wish:
            case Quiet():
                self.now = wish.until
                return None
            case Connect():
                self.left_open += self.link is not None and not self.link.closed
                self.links += 1
                self.link = BrittleLink(self)
                return self.link
            case Ask():
                assert not wish.until < self.now, "nobody asks for what is over"
                assert not wish.until > self.now + ASK_S, "the next gateway has its time too"
                self.asked.append(wish.method)
                if self.mishap():
                    raise LinkBroken("refused")
                if wish.method == "ModelInfer":
                    self.mesh.end(wish.message)
                    if self.mishap():
                        raise LinkBroken("broken")
                    return pb.ModelInferResponse()
                if wish.method == "ModelMetadata":
                    assert ("sum", "") == (wish.message.name, wish.message.version)
                    said = pb.ModelMetadataResponse()
                    said.inputs.add(name="INPUT", datatype="INT64", shape=[1])
                    return said
                return pb.ServerMetadataResponse(extensions=["sequence", *([NUMBERED] if self.numbered else [])])
            case Listen():
                assert self.link is not None
                if self.link.inbox:
                    return self.link.inbox.popleft()
                assert self.link.broken or self.link.silent, "the client waits for what was never sent"
                if not self.link.broken:
                    self.now = max(self.now, wish.until)
                raise LinkBroken("broken" if self.link.broken else "silent")

    def step(self, conversation: Conversation, value: int, *, last: bool = False) -> int:
        """Runs a step as the shells do; returns the sum."""
        with conversation.turn():
            self.run(conversation.drain())
            conversation.add(request(value, last=last), None)
            return self.run(conversation.outcome()).single.item()


def request(value: int, *, last: bool = False) -> StepRequest:
    return StepRequest({"INPUT": np.array([[value]], np.int64)}, (), last)
