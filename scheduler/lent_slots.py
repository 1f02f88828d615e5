"""To which shard of a Cluster each slot was lent last. It is noted beside the leases, before the slot is given there.

A leader reads in Redis which sequences hold which slots. Of a shard whose node cannot be reached it cannot. Then the
notes still tell which slots the shard's sequences may hold (`LeaderState.withheld`), whoever led before: a slot that
was lent to another shard since then is none of these. With one server nothing is noted: without it nobody leads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from scheduler.core.slots import SlotAddress
from scheduler.core.state import LeaderState, Lent
from scheduler.mesh import MeshAccess
from shared.contract.ids import ExecutorId, InstanceIndex, ShardId, SlotIndex, Term, shard_of
from shared.store.connections.homes import MESH_TAG
from shared.store.reading import text_of, value_of

TERM, SINCE = "t", "s"
"""Fields beside the slots: the newest term, if all leaders until then noted what they gave (each next one is noted by
`lead.lua`, as it is given); and the run of the server
(`shared.store.connections.server_run`) and the mesh's shards, since which nothing that was noted was lost or has
changed its meaning."""
NOTES_PER_CALL = 4_096
"""Notes of one script call: a script blocks Redis for half a us for each."""


class LentSlots:
    """The notes about one model, as its leader of one term reads and writes them.

    counts  whether they tell of every slot that a sequence may hold: all leaders before have noted what they gave
    """

    def __init__(self, mesh: MeshAccess, model: str, term: Term) -> None:
        self._mesh = mesh
        self._key = mesh.keys.lent(model)
        self._model = model
        self._term = term
        self._noted: dict[str, str] = {}
        self.counts = False

    async def begin(self) -> None:
        """Reads what is noted. No older leader notes anything any more. Raises one of CONNECTION_LOST, or ResponseError
        FENCED.
        """
        if not self._mesh.is_of_servers:
            return
        (found,) = await self._mesh.links.ask([("HGETALL", self._key)])
        noted = dict(zip(map(text_of, found[::2]), map(text_of, found[1::2]), strict=True))
        last, since = noted.pop(TERM, ""), noted.pop(SINCE, "")
        self._noted = noted
        # A leader of a release that noted nothing has led if a term is missing.
        is_noted, is_same = last == str(self._term), since == self._since
        self.counts = is_noted and is_same and None not in map(self._read, noted.items())
        if last and not self.counts:
            # Nor may they count for the next leader, until one has noted what this one gives, too.
            await self._write({TERM: ""})

    def of(self, shards: Iterable[ShardId]) -> Lent:
        """The slots that were lent to these shards."""
        lent: dict[ShardId, set[SlotAddress]] = {shard: set() for shard in shards}
        for place, shard in filter(None, map(self._read, self._noted.items())):
            if shard in lent:
                lent[shard].add(place)
        return {shard: frozenset(places) for shard, places in lent.items()}

    async def lend(self, slots: Iterable[tuple[SlotAddress, ShardId]]) -> None:
        """Notes slots that are to be given to sequences of these shards, where that is new. Raises as `begin`."""
        if self._mesh.is_of_servers:
            lent = {str(place): str(shard) for place, shard in slots}
            await self._note({place: shard for place, shard in lent.items() if self._noted.get(place) != shard})

    async def complete(self, state: LeaderState) -> None:
        """Notes what was found when all shards were read, and removes notes about executors that are gone. From now on
        the notes count.
        """
        if not self._mesh.is_of_servers:
            return
        read = {note[0]: self._read(note) for note in self._noted.items()}
        await self._note({name: "" for name, at in read.items() if at is None or at[0].executor not in state.executors})
        tables = [table for ring in state.rings.values() for table in ring.tables.values()]
        held = [(place, shard_of(holder, state.policy.shards)) for table in tables for place, holder in table.holders()]
        await self.lend(held)
        await self._write({TERM: str(self._term), SINCE: self._since})
        self.counts = True

    async def forget(self, executor: ExecutorId) -> None:
        """An executor is gone for good, and its slots with it."""
        await self._note({place: "" for place in self._noted if place.startswith(f"{executor}/")})

    async def _note(self, notes: Mapping[str, str]) -> None:
        left = list(notes.items())
        for begin in range(0, len(left), NOTES_PER_CALL):
            await self._write(dict(left[begin : begin + NOTES_PER_CALL]))
        self._noted |= notes
        for place in (place for place, shard in notes.items() if not shard):
            del self._noted[place]

    async def _write(self, notes: Mapping[str, str]) -> None:
        async with self._mesh.links.connected() as link:
            call = self._mesh.scripts.lend(notes, model=self._model, term=self._term)
            await self._mesh.scripts.run_together([call], link)

    @property
    def _since(self) -> str:
        return " ".join([self._mesh.run.bound.get(MESH_TAG, ""), *map(str, self._mesh.keys.shards)])

    def _read(self, note: tuple[str, str]) -> tuple[SlotAddress, ShardId] | None:
        return value_of(self._key, note, _slot, field=note[0])


def _slot(note: tuple[str, str]) -> tuple[SlotAddress, ShardId]:
    place, shard = note
    executor, version, instance, slot = place.rsplit("/", 3)
    return (
        SlotAddress(ExecutorId(executor), version, InstanceIndex(int(instance)), SlotIndex(int(slot))),
        ShardId(int(shard)),
    )
