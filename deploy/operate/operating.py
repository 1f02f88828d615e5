"""Shared by the operators' commands: finds the running mesh, reads which sequences its executors own, and names a
sequence as its client does."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Generator, Iterable, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

import click

from deploy.local.data_directory import LauncherError, has_state, read_state
from deploy.operate.settings import OperatorSettings
from shared.contract.errors import Code, NotDoneError
from shared.contract.ids import SequenceId, ShardId, correlation_id_from, sequence_id
from shared.contract.messages import ExecutorRegistration
from shared.store.agreement import keys_of_mesh, refusal
from shared.store.commands import Redis
from shared.store.connections.fitness import UnfitRedisError
from shared.store.connections.homes import out_of_reach
from shared.store.connections.redis_client import RETRIES, connect
from shared.store.connections.redis_py import NOT_SERVING, REDIS_LOST, REFUSED
from shared.store.connections.redis_url import url_without_password
from shared.store.keyspace import DEFAULT_PREFIX, Keyspace
from shared.store.membership import Member, Membership
from shared.store.owned import owned_counts
from shared.store.reading import text_of
from shared.store.sequences import Sequences, kept_by


class NotServingError(click.ClickException):
    """Redis answers, and says that it cannot serve now."""

    def format_message(self) -> str:
        return f"{self.message}: `seqmesh doctor` says more"


class RedisRefusesError(click.ClickException):
    """Redis refuses the user, or a command of it."""


@dataclass(frozen=True, slots=True)
class OperatedMesh:
    redis: Redis
    keys: Keyspace
    membership: Membership

    @property
    def sequences(self) -> Sequences:
        return Sequences(self.redis, self.keys, self.membership)


@dataclass(frozen=True, slots=True)
class ExecutorHolding:
    """An executor and the number of sequences that it owns, by model; models without any are left out."""

    member: Member
    sequences: Mapping[str, int]

    @property
    def registration(self) -> ExecutorRegistration:
        return self.member.registration

    @property
    def names(self) -> set[str]:
        """Its name and its id: an operator may drain it by either."""
        return {self.registration.name, self.registration.executor}

    @property
    def total(self) -> int:
        return sum(self.sequences.values())

    @property
    def state(self) -> str:
        if self.registration.leaving:
            return "leaving"
        if not self.member.alive:
            return "dead"
        return "closing" if any(served.closing for served in self.registration.models) else "serving"


@asynccontextmanager
async def found_mesh(settings: OperatorSettings, model: str | None = None) -> AsyncGenerator[OperatedMesh]:
    """Connects to the mesh of the settings. Raises click.ClickException with the remedy if there is none.

    model  must be known to the mesh, if it is given, and no ensemble
    """
    url, prefix = located(settings)
    local = f"; does `seqmesh up` still run in {settings.data_dir}?"
    hint = "; start it, or give another --redis-url" if settings.redis_url else local
    async with connected(url, retries=0, hint=hint) as redis:
        keys = await keys_of_mesh(redis, prefix)
        if keys is None:
            raise click.ClickException(
                f"no mesh '{prefix}' in {url_without_password(url)}: give its --redis-url and --key-prefix"
            )
        membership = Membership(redis, keys)
        if model is not None:
            await _check_keeps_sequences(membership, model)
        yield OperatedMesh(redis, keys, membership)


async def _check_keeps_sequences(membership: Membership, model: str) -> None:
    record = await membership.model(model)
    if record is None:
        # Not those of the records, which stay when a model is not served any more.
        served = {one.model for member in await membership.members() for one in member.registration.models}
        raise click.ClickException(f"no model '{model}' in this mesh; there are: {', '.join(sorted(served)) or 'none'}")
    if keepers := kept_by(record.config):
        raise click.ClickException(f"{keepers}; `seqmesh seq ls` of such a model shows them, with their --version")


@asynccontextmanager
async def connected(url: str, *, retries: int = RETRIES, hint: str = "") -> AsyncGenerator[Redis]:
    """A client for the block. Raises click.ClickException if Redis is lost or unfit, RedisRefusesError if it refuses
    the user or is full, and NotServingError if it says that it cannot serve now.

    retries  see `connect`
    hint     ends the message when Redis is lost
    """
    redis = connect(url, retries=retries)
    try:
        yield redis
    except REFUSED as error:
        raise RedisRefusesError(refusal(url, error).message) from error
    except NOT_SERVING as error:
        raise NotServingError(f"Redis at {url_without_password(url)} does not serve now ({error})") from error
    except REDIS_LOST as error:  # an OSError is of something else in the block, such as what it prints
        raise click.ClickException(f"Redis at {url_without_password(url)} cannot be reached ({error}){hint}") from error
    except UnfitRedisError as error:
        raise click.ClickException(error.message) from error
    finally:
        await redis.aclose()


def located(settings: OperatorSettings) -> tuple[str, str]:
    """The URL of Redis and the prefix of the keys. Settings count more than the mesh.json of a local mesh."""
    if settings.redis_url:
        return settings.redis_url, settings.key_prefix or DEFAULT_PREFIX
    try:
        state = read_state(settings.data_dir)
    except LauncherError as error:
        if has_state(settings.data_dir):
            raise click.ClickException(error.message) from error
        raise click.ClickException(
            f"no mesh runs in {settings.data_dir}: give the --data-dir of its `seqmesh up`, or its --redis-url"
        ) from error
    return state.redis_url, settings.key_prefix or state.key_prefix


@asynccontextmanager
async def whole_or_told(mesh: OperatedMesh) -> AsyncGenerator[Collection[ShardId]]:
    """The shards that cannot be looked at within the block, as their node of a Cluster is away. If there are some, the
    block's end says so and ends the command with code 1.
    """
    lost = await out_of_reach(mesh.redis, mesh.keys)
    yield lost.keys()
    if lost:
        causes = "; ".join(dict.fromkeys(map(str, lost.values())))
        click.echo(f"Error: what lies on a node that is away is left out: {causes}", err=True)
        raise click.exceptions.Exit(1)


async def holdings(
    mesh: OperatedMesh, whose: Collection[str] = (), *, without: Collection[ShardId] = ()
) -> list[ExecutorHolding]:
    """Every registered executor, by name and id; only those of these names or ids, if any are given.

    without  shards whose sequences are not counted
    """
    members = await mesh.membership.members()
    if whose:
        members = [one for one in members if any(map(one.registration.is_called, whose))]
    # Their names alone: the records of hundreds of models are megabytes.
    models = sorted(map(text_of, await mesh.redis.hkeys(mesh.keys.models)))
    shards = [shard for shard in mesh.keys.shards if shard not in without]
    found: list[ExecutorHolding] = []
    for member in members:
        owned = await owned_counts(mesh.redis, mesh.keys, member.registration.executor, models, shards)
        found.append(
            ExecutorHolding(member, {model: count for model, count in zip(models, owned, strict=True) if count})
        )
    return sorted(found, key=lambda one: (one.registration.name, one.registration.executor))


NAMING = (
    click.Option(["--version"], default="", help="The version that the client names in its requests, if any."),
    click.Option(["--string"], is_flag=True, help='ID is a text even if it looks like a number: 42 and "42" differ.'),
)
"""Options of a command that takes the id of a sequence, for `named`."""
WHICH = (
    "`seqmesh seq ls MODEL` lists those that are open; an ID that is a text but looks like a number needs --string, "
    "and where the client names a version, --version"
)
"""What to check when there is no such sequence."""


def named(model: str, correlation_id: str, *, version: str, string: bool) -> SequenceId:
    """The sequence that a client calls by this id."""
    return sequence_id(model, version, correlation_id_from(correlation_id, string=string))


def unknown_executor(who: str, members: Iterable[Member]) -> click.ClickException:
    """The error of a command that names an executor which is not among these."""
    names = ", ".join(sorted({member.registration.name for member in members})) or "none"
    return click.ClickException(f"no executor '{who}' in this mesh; there are: {names} (seqmesh drain --list)")


def complaint(what: object, error: NotDoneError) -> str:
    """Why something cannot be done with a sequence, and what to check if there is none. what: it begins with this"""
    return f"{what}: {error}{f': {WHICH}' if error.code is Code.NOT_FOUND else ''}"


@contextmanager
def told(what: object) -> Generator[None]:
    """Raises click.ClickException in the place of a NotDoneError. what: its message begins with this"""
    try:
        yield
    except NotDoneError as error:
        raise click.ClickException(complaint(what, error)) from error


def matching(who: str, known: list[ExecutorHolding]) -> list[ExecutorHolding]:
    return [one for one in known if one.registration.is_called(who)]
