"""A checkpoint as Redis holds it."""

from executor.engine.base import RowResult
from executor.sequences.checkpoints import begins_anew, checkpoint_fields
from shared.contract.state_fields import checkpointed_states
from shared.contract.tensors import Tensor


class Kept:
    """What the checkpoints of one sequence have left in Redis."""

    def __init__(self) -> None:
        self.fields: dict[bytes, bytes] = {}

    def write(self, result: RowResult) -> int:
        """Takes the checkpoint of a step; returns how many bytes of states were written."""
        if begins_anew(result):
            self.fields.clear()
        written = checkpoint_fields(result, "")
        self.fields.update((name.encode(), value) for name, value in written)
        return sum(len(value) for name, value in written if name.startswith("g:"))

    @property
    def states(self) -> dict[str, Tensor]:
        return checkpointed_states(self.fields)
