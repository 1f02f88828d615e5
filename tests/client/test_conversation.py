"""A caller gets each step's answer once and right, whatever breaks between it and the mesh."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqmesh_client import (
    BacklogFull,
    NoAnswer,
    NotDescribed,
    NotEnded,
    NotNumbered,
    OutcomeUnknown,
    OverQuota,
    Patience,
    SequenceBusy,
    SequenceEnded,
    StepLate,
    StepRefused,
    WaitTooLong,
    WrongAnswer,
    WrongStep,
)
from seqmesh_client.conversation import UNANSWERED_S, Ask, Conversation, Mesh, Wish, as_array
from seqmesh_client.delivery import EARLY_S, Delivery, Listen, Quiet
from seqmesh_client.token import Place
from seqmesh_client.wire import LinkBroken, StepRequest, told_by
from tests.client.mesh_in_memory import ANSWERS, LONG_SUFFERING, BrittleShell, SumMesh, answer, refusal, request

PLACE = Place("sum", "", "s", 0)
VALUES = st.lists(st.integers(0, 1000), min_size=1, max_size=12)


def played(shell: BrittleShell, conversation: Conversation, values: Sequence[int], ahead: int) -> list[int]:
    """The sums, as `steps` takes them: at most `ahead` without an answer."""
    source, sums = iter(values), list[int]()
    with conversation.turn():
        while True:
            while conversation.delivery.open < ahead and (value := next(source, None)) is not None:
                conversation.add(request(value), None)
            if not conversation.delivery.open:
                return sums
            sums.append(shell.run(conversation.outcome()).single.item())


@given(VALUES, st.integers(1, 8), st.integers(0, 1 << 32))
def test_every_step_runs_once_and_is_answered_in_order_whatever_breaks(
    values: list[int], ahead: int, seed: int
) -> None:
    mesh = SumMesh()
    shell = BrittleShell(mesh, random.Random(seed), mishaps=0.15)

    sums = played(shell, shell.conversation(PLACE), values, ahead)

    assert list(itertools.accumulate(values)) == sums
    assert {("s", number): 1 for number in range(1, len(values) + 1)} == mesh.ran
    assert 0 == shell.left_open


def test_a_mesh_that_runs_repeated_steps_again_is_seen_by_this_test() -> None:
    """The check of the check."""
    shell = BrittleShell(SumMesh(forgetful=True), random.Random(1), mishaps=0.15)
    values = range(30)

    assert list(itertools.accumulate(values)) != played(shell, shell.conversation(PLACE), values, 4)


@given(VALUES, st.integers(0, 1 << 32))
def test_a_client_that_is_killed_anywhere_goes_on_by_its_token(values: list[int], seed: int) -> None:
    """The application writes down the token with each answer, and is killed while a step is under way."""
    chance = random.Random(seed)
    shell = BrittleShell(SumMesh(), chance, mishaps=0.1)
    conversation, sums = shell.conversation(PLACE), list[int]()
    while len(sums) < len(values):
        token = conversation.token()
        if chance.random() < 0.3:
            conversation.add(request(values[len(sums)]), None)
            program = conversation.outcome()
            wish = next(program)
            for _ in range(chance.randrange(4)):
                # Killed before the connection, before the step is sent, before its answer is read, or after.
                try:
                    wish = program.send(shell.fulfil(wish))
                except (LinkBroken, StopIteration):
                    break
            conversation = shell.conversation(Place.of_token(token))
        assert len(sums) == conversation.delivery.answered
        sums.append(shell.step(conversation, values[len(sums)]))

    assert list(itertools.accumulate(values)) == sums
    assert {1} == set(shell.mesh.ran.values())


@given(st.integers(0, 1 << 32))
def test_each_answer_of_a_decoupled_model_is_given_once(seed: int) -> None:
    shell = BrittleShell(SumMesh(decoupled=True), random.Random(seed), mishaps=0.15)
    conversation = shell.conversation(PLACE)

    for total in (5, 10):
        conversation.add(request(5), None)
        given_out, over = list[int](), False
        while not over:
            content, over = shell.run(conversation.next_answer())
            given_out += [content.single.item()] if content is not None else []
        assert [total + n for n in range(1, ANSWERS + 1)] == given_out

    with pytest.raises(ValueError, match=r"step 3 .* has 3 answers"):
        shell.step(conversation, 1)
    assert 3 == conversation.delivery.answered, "the step ran, and counts"


@pytest.mark.parametrize("decoupled", [False, True])
def test_the_time_that_the_caller_takes_for_an_answer_is_no_silence_of_the_mesh(decoupled: bool) -> None:
    shell = BrittleShell(SumMesh(decoupled=decoupled), random.Random(1), patience=Patience(step_s=60.0))
    conversation = shell.conversation(PLACE)
    with conversation.turn():
        for value in (1, 2, 3):
            conversation.add(request(value), None)
    sums: list[int] = []
    while conversation.delivery.open:
        shell.now += 3600.0
        with conversation.turn():
            content, _ = shell.run(conversation.next_answer())
        sums += [content.single.item()] if content is not None else []

    wanted = [total + n for total in (1, 3, 6) for n in (range(1, ANSWERS + 1) if decoupled else [0])]
    assert wanted == sums
    assert 1 == shell.links


@pytest.mark.parametrize(("reason", "is_sent_again"), [("wrong_step", True), ("never_seen", True), ("ended", False)])
def test_a_step_that_comes_before_an_open_one_is_sent_again_behind_it(reason: str, *, is_sent_again: bool) -> None:
    delivery = Delivery(PLACE, gateways=1, patience=LONG_SUFFERING, chance=random.Random(1))
    for value in (1, 2):
        delivery.add(request(value), 0.0, None)
    delivery.connected(0.0, repeats=True)
    sent = list(delivery.unsent())

    delivery.heard(told_by(refusal(sent[1], reason, 0)), 0.0)

    assert is_sent_again is not delivery.linked
    delivery.connected(1.0, repeats=True)
    assert (sent if is_sent_again else sent[:1]) == list(delivery.unsent())


def test_a_caller_that_leaves_early_gets_the_rest_out_of_the_way_with_its_next_step() -> None:
    mesh = SumMesh()
    shell = BrittleShell(mesh, random.Random(1))
    conversation = shell.conversation(PLACE)
    for value in (1, 2, 3):
        conversation.add(request(value), None)
    assert 1 == shell.run(conversation.outcome()).single.item()

    assert 10 == shell.step(conversation, 4)
    assert 4 == conversation.delivery.answered


@pytest.mark.parametrize("ends", [False, True])
def test_steps_that_a_caller_has_left_are_over_with_their_time_though_no_gateway_takes_them(ends: bool) -> None:
    class Crowded(SumMesh):
        def accept(self, message: Any) -> list[Any]:
            if message.id == "1":
                return super().accept(message)
            return [refusal(message, "quota", 0, code="RESOURCE_EXHAUSTED", retry="same")]

    shell = BrittleShell(Crowded(), random.Random(1), patience=Patience(step_s=20.0))
    conversation = shell.conversation(PLACE)
    shell.step(conversation, 1)
    conversation.add(request(2), None)

    with pytest.raises(OverQuota), conversation.turn():
        shell.run(conversation.end() if ends else conversation.drain())

    assert (1, 0) == (conversation.delivery.answered, conversation.delivery.open)


@pytest.mark.parametrize("ends", [False, True])
def test_a_call_that_every_gateway_refuses_is_over_also_for_steps_that_the_caller_has_left(ends: bool) -> None:
    shell = BrittleShell(SumMesh(), random.Random(1))
    conversation = shell.conversation(PLACE)
    shell.step(conversation, 1)
    conversation.add(request(2), None)
    program = conversation.end() if ends else conversation.drain()
    assert isinstance(next(program), Listen)

    with pytest.raises(StepRefused, match="expired"):
        program.throw(StepRefused("UNAUTHENTICATED: expired"))


def test_a_refused_step_may_be_corrected_and_those_behind_it_are_taken_back() -> None:
    mesh = SumMesh()
    shell = BrittleShell(mesh, random.Random(1))
    conversation = shell.conversation(PLACE)
    with pytest.raises(StepRefused) as told:
        played(shell, conversation, [1, 2, -1, 4, 5], 5)

    assert not told.value.counted
    assert 2 == conversation.delivery.answered
    assert [3, 3 + 3] == [shell.mesh.kept["s"][-1].total, shell.step(conversation, 3)]


def test_a_step_that_the_model_fails_has_its_number() -> None:
    class Failing(SumMesh):
        def accept(self, message: Any) -> list[Any]:
            said = refusal(message, "", 0, code="INTERNAL")
            said.infer_response.model_name = "sum"
            return [said]

    shell = BrittleShell(Failing(), random.Random(1))
    conversation = shell.conversation(PLACE)

    with pytest.raises(StepRefused) as failed:
        shell.step(conversation, 1)
    assert failed.value.counted
    assert ("INTERNAL", -1) == (failed.value.code, failed.value.last_step)
    assert 1 == conversation.delivery.answered


@pytest.mark.parametrize(
    ("reason", "code", "retry", "kind"),
    [
        ("busy", "RESOURCE_EXHAUSTED", "same", SequenceBusy),
        ("backlog_full", "UNAVAILABLE", "same", BacklogFull),
        ("wait_too_long", "UNAVAILABLE", "same", WaitTooLong),
        ("quota", "RESOURCE_EXHAUSTED", "same", OverQuota),
        ("late", "INVALID_ARG", "no", StepLate),
        ("a_word_of_tomorrow", "UNAVAILABLE", "same", StepRefused),
        ("", "UNAVAILABLE", "", StepRefused),
    ],
)
def test_what_asks_for_the_same_step_again_is_repeated_and_told_when_the_time_is_over(
    reason: str, code: str, retry: str, kind: type[Exception]
) -> None:
    class Crowded(SumMesh):
        asked = 0

        def accept(self, message: Any) -> list[Any]:
            self.asked += 1
            return [refusal(message, reason, 0, code=code, retry=retry)]

    mesh = Crowded()
    shell = BrittleShell(mesh, random.Random(1), patience=Patience(step_s=20.0))
    conversation = shell.conversation(PLACE)

    with pytest.raises(kind) as told:
        shell.step(conversation, 1)
    assert isinstance(told.value, StepRefused)
    assert reason == told.value.reason
    assert 10 < mesh.asked < 60, "with pauses that grow, and are bounded"
    assert 1020.0 <= shell.now < 1021.0
    assert 0 == conversation.delivery.answered


def test_the_oldest_step_is_over_in_its_own_time_and_pauses_begin_with_the_shortest() -> None:
    shell = BrittleShell(SumMesh(), random.Random(1), patience=Patience(pause_s=1.0, pause_max_s=64.0))
    delivery = shell.conversation(PLACE).delivery
    delivery.add(request(1), shell.now, 5.0)
    delivery.add(request(2), shell.now, 500.0)
    for number in range(8):
        delivery.broken("away", shell.now)
        wish = delivery.next(shell.now)
        assert isinstance(wish, Quiet)
        assert shell.now < wish.until <= shell.now + min(5.0, 2**number)

    with pytest.raises(NoAnswer, match="step 1 had no answer in time: away"):
        delivery.next(shell.now + 5.0)


def test_news_of_one_step_give_those_behind_it_their_time_anew_and_so_does_the_caller_s_own() -> None:
    shell = BrittleShell(SumMesh(), random.Random(1))
    conversation = shell.conversation(PLACE)
    delivery = conversation.delivery
    with conversation.turn():
        for value in (1, 2):
            conversation.add(request(value), 5.0)
    delivery.connected(shell.now, repeats=True)
    first, _ = delivery.unsent()
    for _ in range(2):
        shell.now += 100.0
        with conversation.turn():
            assert Listen(shell.now + 5.0) == delivery.next(shell.now)
    assert not conversation.has_room(2)

    shell.now += 4.0
    delivery.heard(told_by(answer(first, 1, final=True)), shell.now)
    delivery.take()

    assert Listen(shell.now + 5.0) == delivery.next(shell.now)
    assert conversation.has_room(2)


def test_a_mesh_is_silent_from_its_last_news_on_however_many_steps_are_added() -> None:
    shell = BrittleShell(SumMesh(), random.Random(1))
    delivery = shell.conversation(PLACE).delivery
    delivery.add(request(1), shell.now, None)
    delivery.connected(shell.now, repeats=True)
    (first,) = delivery.unsent()
    delivery.heard(told_by(answer(first, 1, final=True)), shell.now)
    delivery.take()

    shell.now += 100.0
    delivery.add(request(2), shell.now, None)
    delivery.add(request(3), shell.now + 5.0, None)

    assert Listen(shell.now + LONG_SUFFERING.silence_s) == delivery.next(shell.now)


def test_a_client_that_hangs_up_goes_on_over_another_stream() -> None:
    shell = BrittleShell(SumMesh(), random.Random(1))
    conversation = shell.conversation(PLACE)
    shell.step(conversation, 1)

    conversation.hang_up()

    assert 3 == shell.step(conversation, 2)
    assert (2, 0) == (shell.links, shell.left_open)


def test_a_refused_step_is_told_when_those_behind_it_are_refused_and_their_numbers_are_free_then() -> None:
    shell = BrittleShell(SumMesh(), random.Random(1))
    conversation = shell.conversation(PLACE)
    delivery = conversation.delivery
    for value in (-1, 2, 3):
        conversation.add(request(value), None)
    delivery.connected(shell.now, repeats=True)
    for message in delivery.unsent():
        assert not delivery.is_ready(whole=True)
        delivery.heard(told_by(refusal(message, "", 0)), shell.now)

    assert delivery.is_ready(whole=True)
    with pytest.raises(StepRefused):
        delivery.take()
    assert (0, 0) == (delivery.open, delivery.answered)


def test_a_refused_step_stands_though_the_connection_breaks_before_those_behind_it_are_refused() -> None:
    shell = BrittleShell(SumMesh(), random.Random(1))
    conversation = shell.conversation(PLACE)
    delivery = conversation.delivery
    for value in (-1, 2):
        conversation.add(request(value), None)
    delivery.connected(shell.now, repeats=True)
    first, _ = delivery.unsent()
    delivery.heard(told_by(refusal(first, "", 0)), shell.now)
    assert Listen(shell.now + EARLY_S) == delivery.next(shell.now)

    delivery.broken("away", shell.now)

    assert (False, 1) == (delivery.linked, delivery.open)
    with pytest.raises(StepRefused, match="refused"):
        shell.run(conversation.outcome())
    assert 7 == shell.step(conversation, 7)


def test_gateways_take_turns_and_pauses_are_drawn() -> None:
    class Dead(BrittleShell):
        def fulfil(self, wish: Wish) -> Any:
            if isinstance(wish, Ask):
                gateways.append(wish.gateway)
            return super().fulfil(wish)

    gateways: list[int] = []
    shell = Dead(SumMesh(), random.Random(1), mishaps=1.0, patience=Patience(step_s=10.0))
    with pytest.raises(NoAnswer, match=r"step 1 had no answer in time: refused .*same step"):
        shell.step(shell.conversation(PLACE), 1)

    assert len(gateways) > 6
    assert all(a != b for a, b in itertools.pairwise(gateways))


@pytest.mark.parametrize(("step", "waits"), [(1, True), (2, False)])
def test_a_first_step_without_an_answer_is_said_to_wait_perhaps_for_a_slot(step: int, *, waits: bool) -> None:
    shell = BrittleShell(SumMesh(), random.Random(1))
    conversation = shell.conversation(dataclasses.replace(PLACE, answered=step - 1))
    conversation.add(request(1), None)
    conversation.delivery.connected(shell.now, repeats=True)
    assert 1 == len([*conversation.delivery.unsent()])
    with pytest.raises(NoAnswer, match=f"step {step} had no answer in time") as told:
        conversation.delivery.next(shell.now + 1e6)

    assert waits is ("waits for a slot" in str(told.value))


def test_other_inputs_under_the_same_number_are_refused_and_nothing_runs() -> None:
    shell = BrittleShell(SumMesh(), random.Random(1))
    shell.step(shell.conversation(PLACE), 1)

    with pytest.raises(WrongStep) as told:
        shell.step(shell.conversation(PLACE), 2)
    assert 1 == told.value.last_step
    assert "same inputs" in str(told.value)


def test_a_step_has_the_inputs_of_its_call_whatever_is_written_over_them_since() -> None:
    shell = BrittleShell(SumMesh(), random.Random(1))
    conversation = shell.conversation(PLACE)
    buffer = np.zeros((1, 1), np.int64)
    for value in (1, 10, 100):
        buffer[:] = value
        conversation.add(StepRequest({"INPUT": buffer}), None)

    assert [1, 11, 111] == [shell.run(conversation.outcome()).single.item() for _ in range(3)]


@pytest.mark.timeout(20)
def test_a_timeout_that_is_no_number_is_over_at_once() -> None:
    shell = BrittleShell(SumMesh(), random.Random(1))
    conversation = shell.conversation(PLACE)
    conversation.add(request(1), float("nan"))
    with pytest.raises(NoAnswer, match="no answer in time"):
        shell.run(conversation.outcome())


def test_nothing_is_sent_behind_the_last_step() -> None:
    shell = BrittleShell(SumMesh(), random.Random(1))
    conversation = shell.conversation(PLACE)
    shell.step(conversation, 1, last=True)

    with pytest.raises(SequenceEnded, match="has ended with step 1"):
        shell.step(conversation, 1)
    other = shell.conversation(Place.of_token(conversation.token()))
    with pytest.raises(SequenceEnded):
        shell.step(other, 1)
    third = shell.conversation(dataclasses.replace(PLACE, answered=4))
    third.add(request(5, last=True), None)
    with pytest.raises(SequenceEnded, match="has ended with step 5"):
        third.add(request(6), None)


def test_the_log_tells_once_that_no_gateway_has_answered_for_a_while(caplog: pytest.LogCaptureFixture) -> None:
    mesh, told = Mesh(("a:1",), LONG_SUFFERING, strict=True, numbered={}, inputs={}), list[int]()
    for passed_s in (0.0, 0.9 * UNANSWERED_S, UNANSWERED_S, 2 * UNANSWERED_S):
        mesh.failed("refused", 1000.0 + passed_s)
        told.append(len(caplog.records))

    assert [0, 0, 1, 1] == told


# -- the end without a step -------------------------------------------------------------------------------------------


@given(VALUES, st.integers(0, 1 << 32))
def test_the_end_comes_behind_all_open_steps_whatever_breaks(values: list[int], seed: int) -> None:
    mesh = SumMesh()
    shell = BrittleShell(mesh, random.Random(seed), mishaps=0.15)
    conversation = shell.conversation(PLACE)
    assert values[0] == shell.step(conversation, values[0])
    for value in values[1:]:
        conversation.add(request(value), None)

    shell.run(conversation.end())
    shell.run(conversation.end())

    assert list(itertools.accumulate(values)) == [one.total for one in mesh.kept["s"]]
    assert {1} == set(mesh.ran.values())
    assert {"s"} == mesh.closed
    for ended in (conversation, shell.conversation(Place.of_token(conversation.token()))):
        with pytest.raises(SequenceEnded, match=f"has ended with step {len(values)}"):
            shell.step(ended, 1)


def test_the_end_does_not_wait_for_the_rest_of_a_step_that_has_begun_to_answer() -> None:
    shell = BrittleShell(SumMesh(decoupled=True), random.Random(1))
    conversation = shell.conversation(PLACE)
    conversation.add(request(5), None)
    first, _ = shell.run(conversation.next_answer())

    shell.run(conversation.end())

    assert {"s"} == shell.mesh.closed
    rest = [shell.run(conversation.next_answer()) for _ in range(ANSWERS - 1)]
    assert [6, 7, 8] == [one.single.item() for one in (first, *(content for content, _ in rest)) if one is not None]
    assert rest[-1][1]
    with pytest.raises(SequenceEnded):
        conversation.add(request(1), None)


@given(st.integers(0, 1 << 32))
def test_no_end_however_often_it_is_repeated_ends_another_run_under_the_same_id(seed: int) -> None:
    """The sequence was ended, by an operator or by an end whose answer was lost, and another client has begun anew."""
    mesh = SumMesh()
    shell = BrittleShell(mesh, random.Random(seed), mishaps=0.15)
    late, token = shell.conversation(PLACE), ""
    shell.step(late, 1)
    token = late.token()
    mesh.closed.add("s")
    other = shell.conversation(PLACE)
    assert 7 == shell.step(other, 7)

    shell.run(late.end())
    shell.run(shell.conversation(Place.of_token(token)).end())

    assert set() == mesh.closed
    assert 8 == shell.step(other, 1)


def test_a_sequence_whose_run_is_not_known_is_left_to_its_idle_time() -> None:
    shell = BrittleShell(SumMesh(nameless=True), random.Random(1))
    conversation = shell.conversation(PLACE)
    shell.run(conversation.end())
    assert [] == shell.asked, "of a sequence that has not begun nobody needs to know"

    conversation = shell.conversation(PLACE)
    shell.step(conversation, 1)
    with pytest.raises(NotEnded, match="idle time"):
        shell.run(conversation.end())
    shell.run(conversation.leave())

    assert set() == shell.mesh.closed
    assert 3 == shell.step(conversation, 2), "it goes on"


def test_an_end_that_nobody_takes_is_told_in_time_and_only_logged_where_the_context_is_left(
    caplog: pytest.LogCaptureFixture,
) -> None:
    shell = BrittleShell(SumMesh(), random.Random(1), patience=Patience(step_s=10.0))
    conversation = shell.conversation(PLACE)
    shell.step(conversation, 1)
    shell.mishaps = 1.0

    with pytest.raises(NoAnswer, match=r"no gateway has ended sequence s of model 'sum': refused .*an end"):
        shell.run(conversation.end(3.0))
    assert 1003.0 == shell.now
    shell.run(conversation.leave())
    assert 1013.0 == shell.now
    assert ["seqmesh_client"] == [one.name for one in caplog.records]
    shell.mishaps = 0.0
    shell.run(conversation.end())
    assert {"s"} == shell.mesh.closed


def test_two_calls_at_once_are_refused() -> None:
    conversation = BrittleShell(SumMesh(), random.Random(1)).conversation(PLACE)
    with conversation.turn(), pytest.raises(RuntimeError, match="under way"), conversation.turn():
        pass


# -- servers that do not number steps ---------------------------------------------------------------------------------


def test_a_server_that_does_not_number_steps_is_refused() -> None:
    shell = BrittleShell(SumMesh(), random.Random(1), numbered=False)

    with pytest.raises(NotNumbered, match="strict=False"):
        shell.step(shell.conversation(PLACE), 1)
    assert {} == shell.mesh.ran


@given(VALUES, st.integers(0, 1 << 32))
def test_without_strict_no_step_is_sent_to_such_a_server_twice(values: list[int], seed: int) -> None:
    mesh = SumMesh(forgetful=True)
    shell = BrittleShell(mesh, random.Random(seed), mishaps=0.05, numbered=False, strict=False)
    conversation = shell.conversation(PLACE)
    try:
        sums = played(shell, conversation, values, 3)
    except (OutcomeUnknown, StepRefused, NoAnswer):
        sums = []

    assert {1} >= set(mesh.ran.values())
    assert sums in ([], list(itertools.accumulate(values)))


def test_a_break_ends_a_sequence_at_such_a_server_and_what_it_refuses_for_now_is_told_at_once() -> None:
    class Crowded(SumMesh):
        def accept(self, message: Any) -> list[Any]:
            return [refusal(message, "busy", 0, code="RESOURCE_EXHAUSTED", retry="same")]

    crowded = BrittleShell(Crowded(), random.Random(1), numbered=False, strict=False)
    with pytest.raises(SequenceBusy):
        crowded.step(crowded.conversation(PLACE), 1)
    assert (1, 1000.0) == (crowded.links, crowded.now)
    shell = BrittleShell(SumMesh(), random.Random(1), numbered=False, strict=False)
    conversation = shell.conversation(PLACE)
    shell.step(conversation, 1)

    shell.mishaps = 1.0
    with pytest.raises(OutcomeUnknown, match="the connection broke"):
        shell.step(conversation, 2)

    with pytest.raises(SequenceEnded):
        conversation.add(request(3), None)


# -- servers that answer garbage --------------------------------------------------------------------------------------


@pytest.mark.parametrize("garbage", ["nobody", "twice", "short", "shape", "texts", "type"])
def test_what_is_no_answer_is_told_and_not_taken_for_one(garbage: str) -> None:
    class Garbling(SumMesh):
        def accept(self, message: Any) -> list[Any]:
            (said,) = super().accept(message)
            match garbage:
                case "nobody":
                    said.infer_response.id = "999"
                case "twice":
                    return [answer(message, 1, final=False), said, said]
                case "short":
                    said.infer_response.raw_output_contents[0] = b"123"
                case "shape":
                    said.infer_response.outputs[0].shape[0] = -7
                case "texts":
                    said.infer_response.outputs[0].datatype = "BYTES"
                    said.infer_response.raw_output_contents[0] = b"\7\0\0\0cut"
                case _:
                    said.infer_response.outputs[0].datatype = "FP128"
            return [said]

    shell = BrittleShell(Garbling(), random.Random(1))
    conversation = shell.conversation(PLACE)

    with pytest.raises((WrongAnswer, ValueError), match=r"was not asked|cannot be read|has 2 answers"):
        shell.step(conversation, 1)
    assert conversation.delivery.open == 0


def test_an_output_without_elements_is_an_answer() -> None:
    class Empty(SumMesh):
        def accept(self, message: Any) -> list[Any]:
            (said,) = super().accept(message)
            said.infer_response.outputs[0].shape[0] = 0
            said.infer_response.raw_output_contents[0] = b""
            return [said]

    shell = BrittleShell(Empty(), random.Random(1))
    conversation = shell.conversation(PLACE)
    conversation.add(request(1), None)

    assert (0, 1) == shell.run(conversation.outcome()).single.shape


# -- inputs -----------------------------------------------------------------------------------------------------------


def test_an_array_alone_takes_the_name_and_type_of_the_only_input() -> None:
    shell = BrittleShell(SumMesh(), random.Random(1), mishaps=0.0)
    conversation = shell.conversation(PLACE)
    for _ in range(2):
        arrays = shell.run(conversation.arrays([[7]]))
        assert {"INPUT": np.int64} == {name: array.dtype for name, array in arrays.items()}
    same = np.zeros((1, 1), np.float32)
    assert shell.run(conversation.arrays({"INPUT": same}))["INPUT"] is same

    assert ["ModelMetadata"] == shell.asked, "asked once, and not where nothing is missing"
    with pytest.raises(TypeError, match="fractions"):
        shell.run(conversation.arrays([[1.5]]))


LISTS: list[tuple[Any, str, Any]] = [
    (["a", "é\0", b"b\0", b""], "BYTES", np.array(["a", "é\0", b"b\0", b""], np.object_)),
    ([], "BYTES", np.array([], np.object_)),
    ([], "UINT64", np.array([], np.uint64)),
    ([[]], "INT8", np.zeros((1, 0), np.int8)),
    ([(1 << 64) - 1, 1], "UINT64", np.array([(1 << 64) - 1, 1], np.uint64)),
    ([[True], [0]], "BOOL", np.array([[True], [False]])),
    ((1, 2.5), "FP32", np.array([1, 2.5], np.float32)),
    (np.float64(2), "FP16", np.float16(2)),
]


@pytest.mark.parametrize(("values", "datatype", "expected"), LISTS)
def test_lists_become_arrays_of_exactly_what_they_hold(values: Any, datatype: str, expected: Any) -> None:
    made = as_array(values, datatype)

    assert (made.dtype, made.shape) == (expected.dtype, expected.shape)
    assert list(made.flat) == list(expected.flat)


@pytest.mark.parametrize(
    ("values", "datatype", "error"),
    [
        ([1.5], "INT64", TypeError),
        ([0], "BYTES", TypeError),
        ([[1.5], [None]], "FP32", TypeError),
        ([None], "FP64", TypeError),
        ([None], "BOOL", TypeError),
        (["False"], "BOOL", TypeError),
        ([["a"], ["b", "c"]], "BYTES", ValueError),
        ([[1], [2, 3]], "INT32", ValueError),
        ([1 << 64], "UINT64", OverflowError),
        ([-1], "UINT8", OverflowError),
    ],
)
def test_lists_of_something_else_are_refused(values: Any, datatype: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        as_array(values, datatype)


def test_an_array_is_sent_as_it_is_beside_a_list() -> None:
    shell = BrittleShell(SumMesh(), random.Random(1))
    array = np.zeros((1, 1), np.float32)

    arrays = shell.run(shell.conversation(PLACE).arrays({"INPUT": array, "OTHER": [1]}))

    assert arrays["INPUT"] is array


def test_a_value_that_does_not_fit_is_told_with_the_name_of_its_input() -> None:
    shell = BrittleShell(SumMesh(), random.Random(1))
    conversation = shell.conversation(PLACE)

    with pytest.raises(TypeError, match=r"^input 'INPUT' is INT64: .*NoneType"):
        shell.run(conversation.arrays([[None]]))
    with pytest.raises(OverflowError, match=r"^input 'INPUT' is INT64: .*too large"):
        shell.run(conversation.arrays([[1 << 70]]))
    with pytest.raises(ValueError, match=r"^input 'INPUT' is INT64: invalid literal"):
        shell.run(conversation.arrays([["seven"]]))
    with pytest.raises(ValueError, match=r"^input 'OTHER' is unknown to the model: "):
        shell.run(conversation.arrays({"OTHER": [[1], [2, 3]]}))
    with pytest.raises(ValueError, match=r"^input 'INPUT' has a text that is no UTF-8: "):
        conversation.add(StepRequest({"INPUT": np.array(["\ud800"])}), None)


def test_a_model_that_was_loaded_with_other_inputs_is_asked_for_them_when_a_step_has_failed() -> None:
    """Otherwise a client that lives for long would refuse what is right, until its program is started again."""
    shell = BrittleShell(SumMesh(), random.Random(1))
    shell.about.inputs["sum", ""] = {"TEXT": "BYTES"}
    conversation = shell.conversation(PLACE)
    with pytest.raises(TypeError, match="give strings or bytes"), conversation.turn():
        shell.run(conversation.give([[7]], (), None, last=False))

    with conversation.turn():
        shell.run(conversation.give([[7]], (), None, last=False))
        assert 7 == shell.run(conversation.outcome()).single.item()


@pytest.mark.parametrize("timeout", [3.0, float("nan")])
def test_a_step_whose_model_nobody_describes_is_over_in_its_time_and_told_as_not_sent(timeout: float) -> None:
    shell = BrittleShell(SumMesh(), random.Random(1), mishaps=1.0)
    conversation = shell.conversation(PLACE)

    with pytest.raises(NotDescribed, match=r"Look at the address.* Nothing of the step was sent") as told:
        shell.run(conversation.give([[1]], (), timeout, last=False))

    assert isinstance(told.value, NoAnswer)
    assert (3.0 if timeout == 3.0 else 0.0) == shell.now - 1000.0


def test_what_a_gateway_has_said_is_told_though_the_last_attempt_ran_out_of_time() -> None:
    shell = BrittleShell(SumMesh(), random.Random(1))
    asked = shell.conversation(PLACE).give([[1]], (), 3.0, last=False)

    assert isinstance(next(asked), Ask)
    for said in ("UNAVAILABLE: it starts", "UNAVAILABLE: no executor serves it"):
        assert isinstance(asked.throw(LinkBroken(said)), Quiet)
        assert isinstance(asked.send(None), Ask)
    shell.now += 3.0
    with pytest.raises(NotDescribed, match="UNAVAILABLE: no executor serves it"):
        asked.throw(LinkBroken("DEADLINE_EXCEEDED: Deadline Exceeded"))


def test_what_asking_for_the_inputs_took_is_of_the_step_s_time() -> None:
    shell = BrittleShell(SumMesh(), random.Random(1))
    conversation = shell.conversation(PLACE)
    asked = conversation.give([[1]], (), 3.0, last=False)

    wish = next(asked)
    assert isinstance(wish, Ask)
    shell.now += 2.0
    with pytest.raises(StopIteration):
        asked.send(shell.fulfil(wish))
    shell.mishaps = 1.0
    with pytest.raises(NoAnswer, match="step 1 had no answer in time"):
        shell.run(conversation.outcome())

    assert 1003.0 == shell.now


def test_an_answer_that_has_come_and_was_not_taken_does_not_count() -> None:
    """So a caller that is cancelled in that very moment gets it by the same call again."""
    shell = BrittleShell(SumMesh(), random.Random(1))
    conversation = shell.conversation(PLACE)

    def cancelled() -> None:
        with conversation.turn():
            conversation.add(request(3), None)
            shell.run(conversation.arrival(whole=True))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cancelled()
    assert shell.link is not None
    assert shell.link.closed
    assert 0 == conversation.delivery.answered
    assert 3 == shell.step(conversation, 3)
    assert {("s", 1): 1} == shell.mesh.ran
