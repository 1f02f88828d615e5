"""From queued steps to rows of an engine: a sequence's inputs, flags and control tensors (triton-spec 1.2, 1.4)."""

from __future__ import annotations

from executor.core.actions import BatchMember
from executor.core.controls import ControlTensors
from executor.engine.base import Origin, Row, RowError
from shared.contract.errors import Code
from shared.contract.messages import END, START, UNREADABLE, InboxStep, InferMessage
from shared.contract.model_config import ModelConfig


class RowMaker:
    """Makes the rows of one sequence model's batches. makes_calls: whether they say where they come from"""

    def __init__(self, config: ModelConfig, *, makes_calls: bool) -> None:
        self._controls = ControlTensors(config)
        self._makes_calls = makes_calls
        self.null = Row(inputs={}, controls=self._controls.null_row, null=True)
        """Row of a slot without a step in this batch: READY is false, no correlation id; the engine fills its inputs.
        """

    def problem(self, step: InboxStep, message: InferMessage) -> RowError | None:
        """Why no row can be made of a step; None if one can. A gateway refuses a wrong correlation id already, unless
        it knows an older configuration of the model than the one that is loaded here.
        """
        if step.unreadable:
            return RowError(Code.INTERNAL, UNREADABLE)
        problem = self._controls.problem(message.correlation_id)
        return RowError(Code.INVALID_ARG, problem) if problem else None

    def of(self, member: BatchMember) -> Row:
        """The row of a step.

        The model gets a step's flags with its first pass. It does not get the end of a request's own sequence.
        """
        owned, step, message = member.owned, member.queued.step, member.queued.message
        flags = 0 if owned.passes else step.flags
        start, end = bool(flags & START), bool(flags & END) and not message.own_sequence
        return Row(
            inputs={tensor.name: tensor for tensor in message.inputs},
            controls=self._controls.of(start=start, end=end, correlation_id=message.correlation_id),
            slot=owned.slot,
            start=start,
            end=end,
            correlation_id=message.correlation_id,
            request_id=message.request_id,
            outputs=message.outputs,
            timeout_us=message.timeout_us,
            priority=message.priority,
            parameters=message.parameters,
            origin=self._origin(member) if self._makes_calls else None,
        )

    def _origin(self, member: BatchMember) -> Origin:
        owned, queued = member.owned, member.queued
        name, step, replayed_in = queued.step.sequence, queued.step.step, owned.epoch if owned.replays else 0
        return Origin.of(queued.message, name, queued.queued_us, step, owned.passes, replayed_in)
