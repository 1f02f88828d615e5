"""What pages do to the mesh: what the operators' commands do, by their own functions, a bounded number at once.

A page shows what was a second ago, and two people may press at once. So each action may be repeated: what is done
already is told and not done again. Actions on the same sequence or executor come one after the other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from weakref import WeakValueDictionary

import click

from deploy.console.reader import MeshReader
from deploy.operate import drain
from deploy.operate.operating import OperatedMesh
from deploy.operate.pause import pause_one, resume_one
from deploy.operate.sequences import end_one
from shared.contract.errors import Code, RequestError, UnavailableError
from shared.contract.ids import SequenceId
from shared.contract.limits import PAUSE_MS_MAX
from shared.store.connections.redis_py import LOST_OR_REFUSED

AT_ONCE_MAX = 16
"""Actions that run or wait for their turn."""
ANSWER_S = 20.0
"""How long a page waits for an action. A move whose model has no leader takes longer, and its wish is taken back."""

Act = Callable[[OperatedMesh], Awaitable[str]]


class Actions:
    """The actions of all pages. Each returns a sentence about what it did.

    They raise RequestError for what cannot be done, and UnavailableError for what cannot be done now.
    """

    def __init__(self, reader: MeshReader) -> None:
        self._reader = reader
        self._count = 0
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def end(self, sequence: SequenceId) -> str:
        """Ends a sequence, as `seqmesh seq end`."""
        if said := await self._carry_out(sequence, lambda mesh: end_one(mesh, sequence)):
            return said
        raise RequestError("the mesh knows no such sequence: it may have ended meanwhile", Code.NOT_FOUND)

    async def pause(self, sequence: SequenceId, seconds: int) -> str:
        """Pauses a sequence, or gives its pause a new end, as `seqmesh seq pause`."""
        if not 0 < seconds <= PAUSE_MS_MAX // 1000:
            raise RequestError(f"a pause takes 1 to {PAUSE_MS_MAX // 1000} s")
        return await self._carry_out(sequence, lambda mesh: pause_one(mesh, sequence, seconds))

    async def resume(self, sequence: SequenceId) -> str:
        """Resumes a sequence, as `seqmesh seq resume`."""
        return await self._carry_out(sequence, lambda mesh: resume_one(mesh, sequence))

    async def move(self, sequence: SequenceId, to: str, leaving: str) -> str:
        """Moves a sequence away from an executor, as `seqmesh seq move`. leaving: the id of where the page saw it"""
        if not leaving:
            raise RequestError("'leaving' names the executor that the sequence is to leave, by its id")
        return await self._carry_out(sequence, lambda mesh: mesh.sequences.move(sequence, to, leaving=leaving))

    async def drain(self, executor: str) -> str:
        """Has an executor hand over its sequences, as `seqmesh drain`. Does not wait until it is empty."""

        async def act(mesh: OperatedMesh) -> str:
            _, bound = await drain.ask(mesh, [executor])
            return "; ".join(["hands over its sequences, and takes none", *bound])

        return await self._carry_out(executor, act)

    async def serve_again(self, executor: str) -> str:
        """Takes a drain back, as `seqmesh drain --undo`."""
        if said := await self._carry_out(executor, lambda mesh: drain.serve_again(mesh, executor)):
            return said
        raise RequestError("the mesh knows no such executor: it may have ended meanwhile", Code.NOT_FOUND)

    async def _carry_out(self, subject: str, act: Act) -> str:
        if self._count >= AT_ONCE_MAX:
            raise UnavailableError("too many actions at once: try again in a moment")
        turn = self._turns.setdefault(subject, asyncio.Lock())
        self._count += 1
        try:
            async with asyncio.timeout(ANSWER_S), turn:
                return await act(await self._reader.operated())
        except click.ClickException as refusal:
            raise RequestError(refusal.message) from refusal
        except TimeoutError as late:
            raise UnavailableError(
                f"not done after {ANSWER_S:.0f} s, and it may still be: this page shows what becomes of it"
            ) from late
        except LOST_OR_REFUSED as failure:
            raise UnavailableError(f"Redis does not do it: {failure}") from failure
        finally:
            self._count -= 1
