"""What becomes of one request to an ensemble, without any mesh: events in, actions out."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence

import msgspec
import pytest

from gateway.requests.ensembles.in_order import AnswersInOrder, RunAnswer
from gateway.requests.ensembles.plan import EnsemblePlan, plan_of
from gateway.requests.ensembles.progress import (
    PATIENCE_MS,
    AbandonRun,
    AnswerRequest,
    EndFollowers,
    EnsembleAction,
    EnsembleProgress,
    FailRequest,
    HeldTensor,
    SendAgain,
    SendStep,
    Stand,
    WithdrawStep,
    held_tensors,
)
from shared.contract.errors import Code, MeshError, ModelError, Reason, SequenceError, UnavailableError
from shared.contract.messages import ModelRecord
from shared.contract.model_config import Direct, EnsembleStep, ModelConfig, SequenceBatching, TensorSpec
from shared.contract.tensors import Tensor

STAND = Stand("7-0.1", 3)
STATEFUL = SequenceBatching(strategy=Direct(), idle_us=1)


def model(
    name: str,
    *,
    stateful: bool = False,
    many: bool = False,
    batch: int = 4,
    steps: tuple[EnsembleStep, ...] = (),
    optional: bool = False,
) -> ModelRecord:
    config = ModelConfig(
        name=name,
        backend="",
        platform="",
        max_batch_size=batch,
        inputs=(TensorSpec("I", "INT8", (1,)), *((TensorSpec("J", "INT8", (1,), True),) if optional else ())),
        outputs=(TensorSpec("O", "INT8", (1,)), *((TensorSpec("P", "INT8", (1,)),) if name == "two" else ())),
        sequence_batching=STATEFUL if stateful else None,
        ensemble=steps,
        decoupled=many,
    )
    return ModelRecord(config, "{}", ("1",))


MODELS = {
    "plain": model("plain"),
    "state": model("state", stateful=True),
    "many": model("many", many=True),
    "many state": model("many state", many=True, stateful=True),
    "unbatched": model("unbatched", batch=0),
    "optional": model("optional", optional=True),
}


def step(name: str, given: str, made: str, **more: str) -> EnsembleStep:
    return EnsembleStep(name, "", {"I": given, **more}, {"O": made})


MODELS["inner"] = model("inner", steps=(step("optional", "I", "O", J="J"),), optional=True)


def plan(*steps: EnsembleStep, outputs: Sequence[str] = ("O",), optional: bool = False) -> EnsemblePlan:
    record = model("e", steps=steps, optional=optional)
    config = msgspec.structs.replace(record.config, outputs=tuple(TensorSpec(o, "INT8", (1,)) for o in outputs))
    return plan_of(msgspec.structs.replace(record, config=config), "1", lambda name, _: (MODELS[name], "1"))


def tensor(name: str, value: int = 1, shape: tuple[int, ...] = (1, 1)) -> Tensor:
    return Tensor(name, "INT8", shape, bytes([value]))


def progress(of: EnsemblePlan, *, wanted: Sequence[str] = (), is_named: bool = False) -> EnsembleProgress:
    return EnsembleProgress(of, {"I": HeldTensor(tensor("I"), 1)}, wanted, is_named=is_named)


def sent(actions: Sequence[EnsembleAction]) -> list[int]:
    return [action.index for action in actions if isinstance(action, SendStep)]


def failure(actions: Sequence[EnsembleAction]) -> MeshError:
    (error,) = [action.error for action in actions if isinstance(action, FailRequest)]
    return error


TWO_STATES = plan(step("state", "I", "mid"), step("plain", "mid", "next"), step("state", "next", "O"))
REFUSED = UnavailableError("full: try again later")


class TestGraph:
    def test_steps_run_as_soon_as_their_tensors_are_there(self) -> None:
        diamond = plan(
            step("plain", "I", "left"),
            step("plain", "I", "right"),
            EnsembleStep("optional", "", {"I": "left", "J": "right"}, {"O": "O"}),
        )
        going = progress(diamond)

        assert [0, 1] == sent(going.begin())
        assert [] == going.answered(0, [tensor("O", 5)])
        (last,) = going.answered(1, [tensor("O", 6)])
        assert SendStep(2, (tensor("I", 5), tensor("J", 6)), ("O",), None) == last
        assert [AnswerRequest((tensor("O", 7),))] == going.answered(2, [tensor("O", 7)])

    def test_steps_in_any_order_of_the_configuration(self) -> None:
        backwards = plan(step("plain", "b", "O"), step("plain", "a", "b"), step("plain", "I", "a"))

        assert ["2", "1", "0"] == [planned.place for planned in backwards.steps]

    def test_what_nobody_asks_for_is_not_run_unless_it_has_a_state(self) -> None:
        several = plan(step("plain", "I", "O"), step("plain", "I", "P"), step("state", "I", "Q"), outputs="OPQ")

        assert [0, 2] == sent(progress(several, wanted=["O"]).begin())

    def test_a_tensor_that_was_not_produced_is_left_out(self) -> None:
        """The next model's own check then says what it lacks; an ensemble's output is not in its answer."""
        going = progress(plan(step("plain", "I", "mid"), step("plain", "mid", "O")))
        going.begin()

        assert [SendStep(1, (), ("O",), None)] == going.answered(0, [])
        assert [AnswerRequest(())] == going.answered(1, [])

    def test_an_inner_ensemble_s_optional_input_may_be_left_out_by_the_outer_one(self) -> None:
        (only,) = progress(plan(step("inner", "I", "O"))).begin()

        assert SendStep(0, (tensor("I"),), ("O",), None) == only

    def test_an_optional_input_is_left_out_where_the_request_has_none(self) -> None:
        going = progress(plan(step("optional", "I", "O", J="J"), optional=True))

        (first,) = going.begin()
        assert SendStep(0, (tensor("I"),), ("O",), None) == first

    def test_a_batch_dimension_is_added_or_taken_away_where_only_that_fits(self) -> None:
        going = progress(plan(step("unbatched", "I", "mid"), step("plain", "mid", "O")))
        (first,) = going.begin()
        (second,) = going.answered(0, [tensor("O", shape=(1,))])

        assert isinstance(first, SendStep)
        assert isinstance(second, SendStep)
        assert ((1,), (1, 1)) == (first.inputs[0].shape, second.inputs[0].shape)

    def test_an_ensemble_reshapes_its_inputs_and_outputs_wherever_it_is(self) -> None:
        """Inside the inner ensemble a row is [2, 1], and [1, 2] outside; the outer one has [2] for it."""

        def shaped(
            name: str, dims: tuple[int, ...], shape: tuple[int, ...] | None, *steps: EnsembleStep
        ) -> ModelRecord:
            found = model(name, steps=steps)
            config = msgspec.structs.replace(
                found.config,
                inputs=(TensorSpec("I", "INT8", dims, reshape=shape),),
                outputs=(TensorSpec("O", "INT8", dims, reshape=shape),),
            )
            return msgspec.structs.replace(found, config=config)

        plain = shaped("plain", (-1, 1), None)
        inner = shaped("inner", (1, -1), (-1, 1), step("plain", "I", "x"), step("plain", "x", "O"))
        outer = shaped("outer", (-1,), (1, -1), step("inner", "I", "y"), step("inner", "y", "O"))
        found = plan_of(outer, "1", lambda name, _: ({"plain": plain, "inner": inner}[name], "1"))
        going = EnsembleProgress(found, {"I": HeldTensor(tensor("I", shape=(3, 2)), 3)}, (), is_named=False)

        actions = going.begin()
        for index in range(4):
            assert [SendStep(index, (tensor("I", shape=(3, 2, 1)),), ("O",), None)] == actions
            actions = going.answered(index, [tensor("O", shape=(3, 2, 1))])
        assert [AnswerRequest((tensor("O", shape=(3, 2)),))] == actions

    def test_a_tensor_that_has_not_the_shape_that_would_be_reshaped_stays_as_it_is(self) -> None:
        """It is the step's own check that refuses it."""
        record = model("e", steps=(step("plain", "I", "O"),))
        config = msgspec.structs.replace(record.config, inputs=(TensorSpec("I", "INT8", (1, 1), reshape=(1,)),))
        found = plan_of(ModelRecord(config, "{}", ("1",)), "1", lambda name, _: (MODELS[name], "1"))
        going = EnsembleProgress(found, {"I": HeldTensor(tensor("I", shape=(1, 1)), 1)}, (), is_named=False)

        assert [SendStep(0, (tensor("I", shape=(1, 1)),), ("O",), None)] == going.begin()

    def test_what_an_ensemble_without_batches_has_reshaped_gets_the_batch_dimension_of_its_step(self) -> None:
        record = model("e", batch=0, steps=(step("plain", "I", "O"),))
        config = msgspec.structs.replace(record.config, inputs=(TensorSpec("I", "INT8", (1, 1, 1), reshape=(1,)),))
        found = plan_of(ModelRecord(config, "{}", ("1",)), "1", lambda name, _: (MODELS[name], "1"))
        going = EnsembleProgress(found, {"I": HeldTensor(tensor("I", shape=(1, 1, 1)), 0)}, (), is_named=False)

        assert [SendStep(0, (tensor("I", shape=(1, 1)),), ("O",), None)] == going.begin()

    def test_steps_wait_for_a_tensor_that_another_ensemble_has_reshaped(self) -> None:
        """Also where the configuration names the reader first, and where the writer is decoupled."""
        inner = model("inner", steps=(step("many", "I", "O"),))
        config = msgspec.structs.replace(inner.config, outputs=(TensorSpec("O", "INT8", (1, 1), reshape=(1,)),))
        known = {**MODELS, "inner": ModelRecord(config, "{}", ("1",))}
        outer = model("outer", steps=(step("plain", "x", "O"), step("inner", "I", "x")))
        found = plan_of(outer, "1", lambda name, _: (known[name], "1"))

        assert [["1.0"], ["0"]] == [[one.place for one in stage.steps] for stage in found.stages]

    def test_ensembles_within_an_ensemble_are_one_plan(self) -> None:
        inner = model("inner", steps=(step("plain", "I", "x"), step("state", "x", "O")))
        outer = model("outer", steps=(step("inner", "I", "x"), step("inner", "x", "O")))
        found = plan_of(outer, "1", lambda name, _: ({**MODELS, "inner": inner}[name], "1"))

        assert ["0.0", "0.1", "1.0", "1.1"] == [planned.place for planned in found.steps]
        assert [("I", "\x000.x"), ("\x000.x", "\x00x"), ("\x00x", "\x001.x"), ("\x001.x", "O")] == [
            (planned.inputs[0][1], planned.outputs[0][1]) for planned in found.steps
        ]
        assert ("outer", "inner") == found.steps[0].ensembles
        assert (1, 3) == found.stateful


class TestStates:
    def test_a_follower_runs_behind_the_anchor_with_its_number(self) -> None:
        parallel = plan(step("state", "I", "O"), step("state", "I", "P"), outputs="OP")
        going = progress(parallel)

        assert [0] == sent(going.begin())
        (follower,) = going.answered(0, [tensor("O")], STAND)
        assert SendStep(1, (tensor("I"),), ("O",), STAND) == follower

    def test_a_failure_before_the_anchor_changes_nothing(self) -> None:
        going = progress(plan(step("plain", "I", "a"), step("state", "a", "b"), step("state", "b", "O")))
        going.begin()
        actions = going.failed(0, ModelError("no"), now_ms=0)

        assert "in ensemble 'e', no" == failure(actions).message
        assert 1 == len(actions)

    def test_a_cancelled_step_is_told_in_words_though_it_has_no_text_of_its_own(self) -> None:
        going = progress(plan(step("plain", "I", "O")))
        going.begin()

        actions = going.failed(0, MeshError("", Code.CANCELLED), now_ms=0)

        assert "in ensemble 'e', the request was cancelled" == failure(actions).message

    def test_a_models_error_without_a_text_is_no_cancellation(self) -> None:
        going = progress(plan(step("plain", "I", "O")))
        going.begin()

        assert "in ensemble 'e', " == failure(going.failed(0, ModelError(""), now_ms=0)).message

    def test_what_the_anchor_refuses_changes_nothing(self) -> None:
        going = progress(TWO_STATES)
        going.begin()
        refused = SequenceError("over", Reason.ENDED, 5)
        actions = going.failed(0, refused, now_ms=0)

        assert [FailRequest(refused)] == actions

    def test_a_failure_between_two_states_ends_the_run(self) -> None:
        going = progress(TWO_STATES, is_named=True)
        going.begin()
        going.answered(0, [tensor("O")], STAND)
        error = ModelError("no")
        error.accepted = True
        actions = going.failed(1, error, now_ms=0)

        assert AbandonRun(STAND) == actions[0]
        told = failure(actions)
        assert isinstance(told, SequenceError)
        assert {"reason": "failed", "last_step": 2, "retry": "start"} == told.facts
        assert Code.INTERNAL is told.code
        assert "in ensemble 'e', no (the sequence is over" in told.message

    def test_a_failed_anchor_with_followers_ends_the_run_and_one_alone_does_not(self) -> None:
        error = ModelError("no")
        error.accepted = True
        two, one = progress(TWO_STATES), progress(plan(step("state", "I", "O")))
        two.begin()
        one.begin()

        assert AbandonRun(STAND) in two.failed(0, error, now_ms=0, stand=STAND)
        assert [FailRequest(error)] == one.failed(0, error, now_ms=0, stand=STAND)

    @pytest.mark.parametrize("fails", [False, True])
    def test_a_start_that_cuts_off_a_run_ends_its_followers_and_one_state_has_none(self, *, fails: bool) -> None:
        stand = Stand("7-0.4", 1, "7-0.1")
        error = ModelError("no")
        error.accepted = True
        for of, expected in ((TWO_STATES, [EndFollowers("7-0.1")]), (plan(step("state", "I", "O")), [])):
            going = progress(of)
            going.begin()
            if fails:
                actions = going.failed(0, error, now_ms=0, stand=stand)
            else:
                actions = going.answered(0, [tensor("O")], stand)

            assert expected == [action for action in actions if isinstance(action, EndFollowers)]

    def test_a_failure_behind_all_states_leaves_the_run_as_it_is(self) -> None:
        going = progress(plan(step("state", "I", "mid"), step("plain", "mid", "O")))
        going.begin()
        going.answered(0, [tensor("O")], STAND)

        assert 1 == len(going.failed(1, ModelError("no"), now_ms=0))

    def test_the_other_states_do_the_step_though_the_request_has_failed(self) -> None:
        steps = step("state", "I", "a"), step("plain", "a", "O"), step("plain", "a", "b"), step("state", "b", "P")
        both = plan(*steps, outputs="OP")
        going = progress(both)
        going.begin()
        assert [1, 2] == sent(going.answered(0, [tensor("O")], STAND))
        assert [] == going.failed(1, ModelError("no"), now_ms=0)
        assert [3] == sent(going.answered(2, [tensor("O")]))
        actions = going.answered(3, [tensor("O")])

        assert 1 == len(actions)
        assert "in ensemble 'e', no" == failure(actions).message

    def test_what_is_refused_for_the_moment_is_sent_again_for_a_while(self) -> None:
        going = progress(TWO_STATES)
        going.begin()
        going.answered(0, [tensor("O")], STAND)
        now_ms, pauses = 0, list[int]()
        while isinstance((actions := going.failed(1, REFUSED, now_ms=now_ms))[0], SendAgain):
            pause = actions[0].pause_ms
            pauses.append(pause)
            now_ms += pause
            assert 1 == going.again(1).index

        assert pauses == sorted(pauses)
        assert PATIENCE_MS <= now_ms
        assert AbandonRun(STAND) == actions[0]
        assert "in ensemble 'e', full (the sequence is over, " in failure(actions).message
        assert "must specify the START flag" in failure(actions).message

    def test_a_named_step_that_only_came_too_early_is_left_to_its_retry(self) -> None:
        going = progress(TWO_STATES, is_named=True)
        going.begin()
        going.answered(0, [tensor("O")], STAND)
        actions = going.failed(1, UnavailableError("full"), now_ms=0, is_final=True)

        assert 1 == len(actions)
        assert isinstance(failure(actions), UnavailableError)

    @pytest.mark.parametrize("reason", [Reason.ANSWERED, Reason.EXISTS])
    def test_a_retry_whose_answer_a_follower_has_forgotten_leaves_the_run_as_it_is(self, reason: Reason) -> None:
        of = plan(step("state", "I", "a"), step("state", "a", "b"), step("state", "b", "O"))
        going = progress(of, is_named=True)
        going.begin()
        going.answered(0, [tensor("O")], STAND)
        forgotten = SequenceError("its answer is not kept", reason, 9)

        assert [FailRequest(forgotten)] == going.failed(1, forgotten, now_ms=0)

    @pytest.mark.parametrize(
        ("reason", "last", "waits"),
        [
            (Reason.NEVER_SEEN, 0, True),
            (Reason.WRONG_STEP, 1, True),
            (Reason.WRONG_STEP, 2, False),
            (Reason.WRONG_STEP, 3, False),
            (Reason.LATE, 2, True),
        ],
    )
    def test_a_follower_is_asked_again_where_it_may_still_do_the_step(
        self, reason: Reason, last: int, *, waits: bool
    ) -> None:
        going = progress(plan(step("state", "I", "mid"), step("state", "mid", "O")))
        going.begin()
        going.answered(0, [tensor("O")], STAND)
        actions = going.failed(1, SequenceError("wrong", reason, last), now_ms=0)

        assert waits == isinstance(actions[0], SendAgain)
        assert waits != isinstance(actions[0], AbandonRun)


class TestStages:
    """An ensemble whose second step is decoupled."""

    DECOUPLED = plan(step("plain", "I", "a"), step("many", "a", "b"), step("plain", "b", "c"), step("plain", "c", "O"))

    def test_a_stage_ends_with_a_decoupled_step(self) -> None:
        first, second = self.DECOUPLED.stages

        assert [["0", "1"], ["2", "3"]] == [[one.place for one in stage.steps] for stage in (first, second)]
        assert [1, None] == [stage.source for stage in (first, second)]
        assert [{}, {"O": "O"}] == [stage.results for stage in (first, second)]

    def test_decoupled_steps_that_follow_each_other(self) -> None:
        found = plan(step("many", "I", "a"), step("many", "a", "O"))

        assert [["0"], ["1"], []] == [[one.place for one in stage.steps] for stage in found.stages]

    def test_a_run_of_a_stage_ends_with_its_decoupled_step(self) -> None:
        going = progress(self.DECOUPLED.stages[0])

        assert [0] == sent(going.begin())
        assert [1] == sent(going.answered(0, [tensor("O")]))
        assert [AnswerRequest(())] == going.answered(1, [])

    def test_a_run_behind_has_the_tensors_of_one_answer(self) -> None:
        first, second = self.DECOUPLED.stages
        going = EnsembleProgress(second, held_tensors(first.steps[1], [tensor("O", 9)]), (), is_named=False)

        assert [SendStep(0, (tensor("I", 9),), ("O",), None)] == going.begin()

    def test_when_its_answers_are_not_wanted_a_stateless_decoupled_step_is_taken_back(self) -> None:
        going = progress(plan(step("state", "I", "a"), step("many", "a", "O")).stages[0], is_named=True)
        going.begin()
        going.answered(0, [tensor("O")], STAND)

        assert [WithdrawStep(1)] == going.unwanted()

    def test_one_that_keeps_state_goes_on(self) -> None:
        """Its state moves on, and so does the sequence: a retry gets its stored answers."""
        going = progress(plan(step("many state", "I", "a"), step("plain", "a", "O")).stages[0], is_named=False)
        going.begin()

        assert [] == going.unwanted()
        assert [WithdrawStep(0)] == going.left()


class TestOrder:
    def test_answers_leave_in_the_order_of_the_runs(self) -> None:
        """Random runs: whichever answers first, the answers leave in order, and only the very last one says so."""
        for seed in range(50):
            chance = random.Random(seed)
            given: list[RunAnswer] = []
            line = AnswersInOrder(given.append, lambda _: None)
            runs = [
                (line.add(), deque((tensor(f"{run}.{n}"),) for n in range(chance.randrange(4)))) for run in range(6)
            ]
            expected = [answer for _, answers in runs for answer in answers]
            concludes_at = chance.randrange(40)
            turn = 0
            while runs:
                if turn == concludes_at:
                    line.conclude()
                turn += 1
                give, answers = one = chance.choice(runs)
                if len(answers) > 1:
                    give(RunAnswer(answers.popleft(), is_last=False))
                else:
                    give(RunAnswer(answers.popleft() if answers else None, is_last=True))
                    runs.remove(one)
            if turn <= concludes_at:
                line.conclude()

            assert expected == [answer.outcome for answer in given if answer.outcome is not None]
            assert [*[False] * (len(given) - 1), True] == [answer.is_last for answer in given]


class TestLeaving:
    def test_what_changes_no_state_is_taken_back(self) -> None:
        going = progress(plan(step("plain", "I", "mid"), step("plain", "mid", "O")))
        going.begin()

        assert [WithdrawStep(0)] == going.left()
        assert Code.CANCELLED is failure(going.failed(0, MeshError("", Code.CANCELLED), now_ms=0)).code

    def test_a_step_that_the_anchor_has_done_is_brought_to_its_end(self) -> None:
        going = progress(TWO_STATES)
        going.begin()
        going.answered(0, [tensor("O")], STAND)

        assert [] == going.left()
        assert [2] == sent(going.answered(1, [tensor("O")]))
        assert [] == [action for action in going.answered(2, [tensor("O")]) if isinstance(action, AbandonRun)]

    def test_a_step_that_ran_before_it_could_be_taken_back_is_brought_to_its_end(self) -> None:
        going = progress(TWO_STATES)
        going.begin()

        assert [WithdrawStep(0)] == going.left()
        assert [1] == sent(going.answered(0, [tensor("O")], STAND))

    def test_a_named_step_goes_on(self) -> None:
        going = progress(TWO_STATES, is_named=True)
        going.begin()

        assert [] == going.left()
        assert [1] == sent(going.answered(0, [tensor("O")], STAND))


def random_plan(chance: random.Random) -> EnsemblePlan:
    """Up to eight steps, each made of one tensor before it; what no other step needs is an output."""
    steps: list[EnsembleStep] = []
    tensors = ["I"]
    for index in range(chance.randint(1, 8)):
        tensors.append(f"t{index}")
        steps.append(step(chance.choice(["plain", "state"]), chance.choice(tensors[:-1]), tensors[-1]))
    outputs = [name for name in tensors[1:] if not any(name in one.inputs.values() for one in steps)]
    return plan(*steps, outputs=outputs)


@pytest.mark.parametrize("seed", range(200))
def test_every_request_ends_once_and_states_are_equal_or_abandoned(seed: int) -> None:
    """Answers, failures, refusals and leaving in any order: no step is sent twice without a refusal, each request ends,
    and the stateful steps have all done it, or none has, or the run is abandoned, or the client can repeat it."""
    chance = random.Random(seed)
    of, is_named = random_plan(chance), chance.random() < 0.5
    going = progress(of, is_named=is_named)
    queue = list(going.begin())
    open_steps, done, ends, abandoned, for_now = set[int](), set[int](), list[EnsembleAction](), False, False
    spent, now_ms = False, 0
    while queue or open_steps:
        while queue:
            match queue.pop(0):
                case SendStep(index):
                    assert index not in open_steps | done
                    open_steps.add(index)
                case SendAgain(index, pause):
                    now_ms += pause * 20
                    queue.append(going.again(index))
                case AbandonRun():
                    abandoned = True
                case WithdrawStep(index):
                    assert index in open_steps
                case end:
                    ends.append(end)
        if not open_steps:
            break
        index = chance.choice(sorted(open_steps))
        open_steps.remove(index)
        drawn = chance.random()
        if drawn < 0.7:
            done.add(index)
            queue += going.answered(index, [tensor("O")], STAND if index == of.anchor else None)
        elif drawn < 0.85:
            error = ModelError("no")
            error.accepted = True
            spent |= index == of.anchor
            queue += going.failed(index, error, now_ms=now_ms, stand=STAND if index == of.anchor else None)
        else:
            for_now = True
            queue += going.failed(index, UnavailableError("full"), now_ms=now_ms)
        if (
            chance.random() < 0.05
            and not ends
            and not any(isinstance(one, FailRequest | AnswerRequest) for one in queue)
        ):
            queue += going.left()

    assert 1 == len(ends)
    stateful = set(of.stateful)
    if len(stateful) > 1 and (spent or 0 < len(stateful & done) < len(stateful)):
        assert abandoned or (is_named and for_now)
    else:
        assert not abandoned
