"""The catalog: which models and versions the mesh has, and which executors serve them. Read from Redis by polling.

A version is READY when a living executor says so in its repository index. An executor that unloads a version still
finishes the requests that were accepted, but the version is READY no more.

A request may also go to a version whose executors have all died a moment ago. Its sequences are in Redis and go on with
the next executor, so clients see latency instead of an error. This grace ends after `ABSENCE_GRACE_S`, or at once when
a living executor says that the model was unloaded.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from gateway.models.ensembles import EnsembleJudge, any_model, with_decoupled_ensembles
from gateway.models.versions import check_version_text
from shared.contract.errors import Code, NotReadyError, RequestError, UnavailableError
from shared.contract.messages import UNLOADED, ModelRecord, RepositoryEntry
from shared.process import logs
from shared.store.connections.redis_py import LOST_OR_REFUSED
from shared.store.membership import Member, Membership, lines_of

REFRESH_S = 0.5
REFRESH_ASKED_S = 0.1
"""A request for an unknown model causes a refresh, but not more often than this."""
ABSENCE_GRACE_S = 15.0
"""How long requests for a version are accepted after its last executor died. On a small machine the end of its lease,
its restart and the loading of its models take this long."""
UNSERVED_S = 600.0
"""How long it is remembered that a version had executors once: ten times what its requests wait for another one."""
STALE_S = 10.0
"""Without a refresh for this long the gateway says that it is not ready."""

Place = tuple[str, str]
"""Model and version."""
STATE_RANK = {"READY": 4, "LOADING": 3, "UNLOADING": 2, "UNAVAILABLE": 1, "": 0}
"""Where executors report different states of a model version, the state with the highest rank is shown."""


@dataclass(frozen=True, slots=True)
class CatalogView:
    """The mesh as it was at one moment.

    ready       model -> versions that a living executor serves, ascending; each has its record
    repository  every line of the executors' repository indexes, merged
    unready     (model, version) that is served, but whose model says at every living executor that it is not ready
    """

    records: Mapping[str, ModelRecord] = field(default_factory=dict[str, ModelRecord])
    ready: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    members: Sequence[Member] = ()
    repository: Sequence[RepositoryEntry] = ()
    unready: frozenset[Place] = frozenset()


@dataclass(frozen=True, slots=True)
class LiveExecutors:
    """What the living executors say. Made of a line for each model of each of them, so only when one says another."""

    members: Sequence[Member] = ()
    repository: tuple[RepositoryEntry, ...] = ()
    offers: frozenset[Place] = frozenset()
    unready: frozenset[Place] = frozenset()

    @staticmethod
    def of(members: Sequence[Member]) -> LiveExecutors:
        return LiveExecutors(members, merged_index(members), frozenset(offers_of(members)), unready_versions(members))


class Catalog:
    """Looks models up for both protocols; `run` keeps it fresh."""

    def __init__(
        self, membership: Membership, *, strict_readiness: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """strict_readiness: the mesh is ready only while every model is (`is_ready`)."""
        self._membership = membership
        self._strict_readiness = strict_readiness
        self._clock = clock
        self._live = LiveExecutors()
        self.view = CatalogView()
        """The mesh at the last refresh."""
        self.offer: tuple[Mapping[str, ModelRecord], Mapping[str, tuple[str, ...]]] = ({}, {})
        """The records and versions among which `find` looks; another object only when something of it has changed."""
        self._judge_of_open, self._judge_of_ready = EnsembleJudge(), EnsembleJudge()
        self._refused: Mapping[str, str] = {}
        """Ensembles that cannot be served -> why."""
        self._served_until: dict[Place, float] = {}
        self._unserved_since: dict[Place, float] = {}
        self._refreshed_at: float | None = None
        self._knows_since = 0.0
        """When the first refresh was: what was lost before it, this gateway has not seen."""
        self._begun = self._accepted = 0
        """Numbers of refreshes: the latest that has begun, and the latest whose answer was accepted."""
        self._asked = asyncio.Event()
        self._after_refresh: list[Callable[[], None]] = []

    # -- questions --------------------------------------------------------------------------------------------------

    def find(self, model: str, version: str) -> tuple[ModelRecord, str]:
        """The model and the version that will serve a request: the requested one, or else the highest that is served.

        Raises RequestError or UnavailableError with Triton's words.
        """
        record, versions = self._looked_up(model, version, *self.offer)
        return record, versions[-1]

    def record(self, model: str, version: str = "") -> tuple[ModelRecord, tuple[str, ...]]:
        """A loaded model and its READY versions; only the requested version, if there is one. Raises like `find`."""
        return self._looked_up(model, version, self.view.records, self.view.ready)

    def _looked_up(
        self, model: str, version: str, records: Mapping[str, ModelRecord], versions: Mapping[str, tuple[str, ...]]
    ) -> tuple[ModelRecord, tuple[str, ...]]:
        requested = check_version_text(version)
        record, found = records.get(model), versions.get(model, ())
        if record is not None and found and (not requested or requested in found):
            return record, (requested,) if requested else found
        raise self._lookup_error(model, requested)

    def is_model_ready(self, model: str, version: str = "") -> bool:
        """Whether a living executor serves the model, and the model does not say that it is not ready.

        Raises RequestError for a version that is no number.
        """
        requested = check_version_text(version)
        view = self.view
        versions = [one for one in view.ready.get(model, ()) if (model, one) not in view.unready]
        return requested in versions if requested else bool(versions)

    @property
    def is_ready(self) -> bool:
        """Whether the mesh can serve."""
        return not self.obstacle

    @property
    def obstacle(self) -> str:
        """Why the mesh cannot serve; "" if it can: Redis answers, and at least one executor is usable.

        An executor registers when it has loaded its models, but for those that take long. With strict readiness, the
        mesh is also not ready while a model is being loaded or unloaded, or has failed to load.
        """
        if self._refreshed_at is None or self._clock() - self._refreshed_at > STALE_S:
            return "this gateway cannot read the mesh in Redis"
        if self._strict_readiness and any(map(is_missing, self.view.repository)):
            return "a model is being loaded or unloaded, or could not be loaded: the repository index says which"
        return "" if self._is_served else "no executor serves"

    @property
    def _is_served(self) -> bool:
        return any(member.usable for member in self.view.members)

    def unserved_for(self, seconds: float) -> set[Place]:
        """(model, version) of those that had an executor, and have had none for so long, as seen by this gateway."""
        if self._refreshed_at is None:
            return set()
        return {place for place, since in self._unserved_since.items() if self._refreshed_at - since >= seconds}

    @property
    def unserved(self) -> frozenset[str]:
        """Models that have lost their last executor within `UNSERVED_S`. One that was unloaded is listed still."""
        return self.unlisted & {model for model, _ in self._unserved_since}

    @property
    def unlisted(self) -> frozenset[str]:
        """Models that were published, and of which no living executor says anything, not even that it was unloaded."""
        return frozenset(self.view.records.keys() - {line.model for line in self.view.repository})

    def live_members(self) -> list[Member]:
        """Executors whose lease holds."""
        return [member for member in self.view.members if member.alive]

    def _lookup_error(self, model: str, version: str) -> RequestError | UnavailableError:
        if self._refreshed_at is None:
            return UnavailableError("the gateway has not reached Redis yet: try again later")
        about = f"Request for unknown model: '{model}'"
        record = self.view.records.get(model)
        listed = {entry.version for entry in self.view.repository if entry.model == model}
        if record is None and not listed:
            return RequestError(f"{about} is not found", Code.NOT_FOUND)
        if version:
            # Another load of the model may have left the version out; the index lists it still, as unloaded.
            if version in listed or (record is not None and version in record.versions):
                return NotReadyError(f"{about} version {version} is not at ready state")
            return RequestError(f"{about} version {version} is not found", Code.NOT_FOUND)
        may_come_back = model in self.unserved or (not listed and self._refreshed_at - self._knows_since < UNSERVED_S)
        if record is not None and (self.view.ready.get(model) or not self.live_members() or may_come_back):
            # The executors that have it loaded are being drained or have gone, or no executor lives.
            return UnavailableError(f"no executor serves model '{model}' at the moment: try again later")
        return RequestError(f"{about} has no available versions", Code.NOT_FOUND)

    # -- refreshing -------------------------------------------------------------------------------------------------

    def ask(self, then: Callable[[], None]) -> None:
        """Asks for a refresh, soon. `then` is called after it, also if it failed.

        What was read just before does not do: a load that another gateway has answered since must show.
        """
        self._after_refresh.append(then)
        self._asked.set()

    async def run(self) -> None:
        while True:
            # Those who ask from now on may mean what this refresh reads too early.
            callbacks, self._after_refresh = self._after_refresh, []
            self._asked.clear()
            try:
                await self.refresh()
            except LOST_OR_REFUSED as lost:
                logs.warning("catalog not refreshed", error=str(lost))
            for then in callbacks:
                then()
            await asyncio.sleep(REFRESH_ASKED_S)
            # While no executor is usable, poll more often: clients wait for the first one.
            with suppress(TimeoutError):
                async with asyncio.timeout(REFRESH_S - REFRESH_ASKED_S if self._is_served else 0):
                    await self._asked.wait()

    async def refresh(self) -> None:
        """Reads the mesh once; the view is then no older than this call. Raises one of `CONNECTION_LOST`."""
        self._begun = number = self._begun + 1
        # The order matters: an executor publishes its models before it registers, so every member's models are found.
        members = await self._membership.members()
        records = await self._membership.models()
        # Several may read at once: what was read later may have been accepted meanwhile.
        if number > self._accepted:
            self._accepted = number
            self._accept(records, members)

    def _accept(self, records: Mapping[str, ModelRecord], members: Sequence[Member]) -> None:
        now = self._clock()
        records = with_decoupled_ensembles(records)
        before, live = self._live, [member for member in members if member.alive]
        if live != before.members:
            self._live = LiveExecutors.of(live)
        repository = self._live.repository
        self._note_offers(now, members, before.offers)
        failed = _failures(repository)
        offered = _by_model(self._served_until)
        # An ensemble takes requests as long as its steps' models do: also while their executors have just died.
        refused = self._judge_of_open.problems(records, offered, failed)
        self._tell(refused, offered)
        offer = records, _without(offered, refused)
        if offer != self.offer:
            self.offer = offer
        # A record that cannot be read is published again soon; until then its model cannot be served.
        ready = _by_model(
            [(line.model, line.version) for line in repository if line.state == "READY" and line.model in records]
        )
        problems = self._judge_of_ready.problems(records, ready, failed)
        ready = _without(ready, problems)
        repository = tuple(_judged(line, problems) for line in repository)
        unready = self._live.unready
        self.view = CatalogView(
            records, ready, tuple(members), repository, unready | _unready_ensembles(records, unready)
        )
        self._knows_since = now if self._refreshed_at is None else self._knows_since
        self._refreshed_at = now

    def _note_offers(self, now: float, members: Sequence[Member], offered_before: Collection[Place]) -> None:
        """Notes until when requests for each version are accepted, and since when nobody serves it.

        offered_before  the versions that living executors had at the refresh before
        """
        live, repository = self._live.offers, self._live.repository
        was_blind = self._refreshed_at is None or now - self._refreshed_at > STALE_S
        # When executors died is not known then. Count it as now, so that their sequences get the whole grace. A Redis
        # that answered nobody for longer than their leases has them all register anew.
        dead = offers_of([member for member in members if not member.alive])
        self._served_until |= dict.fromkeys(sorted(live | dead if was_blind else live), now + ABSENCE_GRACE_S)
        # A living executor says that these were unloaded: their grace ends at once.
        unloaded = {(line.model, line.version) for line in repository if line.state in ("UNLOADING", "UNAVAILABLE")}
        # Versions that had an executor at any poll, and have none now; each keeps the time of its first such poll.
        unserved = (self._unserved_since.keys() | offered_before | dead) - live
        since = {place: self._unserved_since.get(place, now) for place in unserved}
        # Looked at before: models come and go for years.
        known_s = now if self._refreshed_at is None else self._refreshed_at
        self._unserved_since = {place: at for place, at in since.items() if known_s - at < UNSERVED_S}
        gone = {line.model for line in repository if line.state == "UNAVAILABLE" and not line.version}
        self._served_until = {
            served: until
            for served, until in self._served_until.items()
            if until > now and served not in unloaded and served[0] not in gone
        }

    def _tell(self, refused: Mapping[str, str], offered: Collection[str]) -> None:
        """Logs which ensembles begin, and cease, to be refused: no executor knows of it."""
        before, self._refused = self._refused, refused
        for name, problem in refused.items():
            if before.get(name) != problem:
                logs.warning("ensemble not served", model=name, cause=problem)
        for name in sorted((before.keys() - refused.keys()) & set(offered)):
            logs.notice("ensemble served again", model=name)


def _by_model(versions: Mapping[Place, float] | Sequence[Place]) -> dict[str, tuple[str, ...]]:
    found: dict[str, set[str]] = {}
    for model, version in versions:
        found.setdefault(model, set()).add(version)
    return {model: tuple(sorted(names, key=int)) for model, names in found.items()}


def _without(versions: Mapping[str, tuple[str, ...]], models: Collection[str]) -> dict[str, tuple[str, ...]]:
    return {model: names for model, names in versions.items() if model not in models}


def _failures(index: Sequence[RepositoryEntry]) -> dict[str, str]:
    """Models with a version that could not be loaded -> why, in the words with which a load on request fails."""
    lines = [
        line for line in index if line.version and line.state == "UNAVAILABLE" and line.reason not in ("", UNLOADED)
    ]
    return {line.model: f"version {line.version} is at UNAVAILABLE state: {line.reason};" for line in lines}


def _judged(line: RepositoryEntry, problems: Mapping[str, str]) -> RepositoryEntry:
    """A line of the index; an ensemble that cannot be served is not READY, whatever executors say."""
    if line.state != "READY" or line.model not in problems:
        return line
    return RepositoryEntry(line.model, line.version, "UNAVAILABLE", problems[line.model])


def _unready_ensembles(records: Mapping[str, ModelRecord], unready: Collection[Place]) -> frozenset[Place]:
    """The ensembles that have a step, however deep, whose model says that it is not ready."""
    models = {model for model, _ in unready}
    return frozenset(
        (name, version)
        for name, record in records.items()
        if models and record.config.ensemble and any_model(name, records, lambda config: config.name in models)
        for version in record.versions
    )


def offers_of(members: Sequence[Member]) -> set[Place]:
    """The (model, version) pairs that these executors take requests for, also those that are being unloaded."""
    return {(served.model, served.version) for served in lines_of(one.registration.models for one in members)}


def unready_versions(members: Sequence[Member]) -> frozenset[Place]:
    """The (model, version) pairs that every executor which has them reports as not ready."""
    offers = list(lines_of(member.registration.models for member in members))
    ready = {(served.model, served.version) for served in offers if served.says_ready}
    return frozenset((served.model, served.version) for served in offers) - ready


def is_missing(entry: RepositoryEntry) -> bool:
    """Whether a model is wanted and not there: it is being loaded or unloaded, or could not be loaded."""
    return entry.state in ("LOADING", "UNLOADING") or (entry.state == "UNAVAILABLE" and entry.reason != UNLOADED)


def merged_index(members: Sequence[Member]) -> tuple[RepositoryEntry, ...]:
    """Merges the executors' repository indexes into one, ordered by model and version.

    A line about a model without a version is left out where the model also has lines about versions.
    """
    best: dict[Place, RepositoryEntry] = {}
    for entry in lines_of(member.registration.repository for member in members):
        known = best.get((entry.model, entry.version))
        if known is None or STATE_RANK.get(entry.state, 0) > STATE_RANK.get(known.state, 0):
            best[entry.model, entry.version] = entry
    versioned = {model for model, version in best if version}
    lines = [entry for (model, version), entry in best.items() if version or model not in versioned]
    return tuple(sorted(lines, key=lambda entry: (entry.model, int(entry.version or 0))))
