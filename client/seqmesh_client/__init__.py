"""A client that never loses its place in a sequence.

    async with AsyncClient(["localhost:8001", "localhost:8011"]) as client, client.sequence("running_sum") as sequence:
        for value in values:
            answer = await sequence.step(value)

It numbers the steps, sends them again through any gateway until they are answered, and goes on from a token after its
own restart. `Client` is the same without asyncio. Needs numpy and gRPC, neither torch nor Redis.
"""

from seqmesh_client.aio import AsyncClient, AsyncSequence
from seqmesh_client.delivery import Patience
from seqmesh_client.errors import (
    REASONS,
    AnswerDropped,
    BacklogFull,
    NeverSeen,
    NoAnswer,
    NotDescribed,
    NotEnded,
    NotNumbered,
    OutcomeUnknown,
    OverQuota,
    SeqmeshError,
    SequenceBusy,
    SequenceCancelled,
    SequenceEnded,
    SequenceExists,
    SequenceExpired,
    SequenceFailed,
    SequenceGone,
    SequenceLost,
    StepLate,
    StepMismatch,
    StepRefused,
    TryLater,
    WaitTooLong,
    WrongAnswer,
    WrongStep,
    WrongToken,
)
from seqmesh_client.sync import BlockingSequence, Client
from seqmesh_client.wire import StepOutputs

__all__ = [
    "REASONS",
    "AnswerDropped",
    "AsyncClient",
    "AsyncSequence",
    "BacklogFull",
    "BlockingSequence",
    "Client",
    "NeverSeen",
    "NoAnswer",
    "NotDescribed",
    "NotEnded",
    "NotNumbered",
    "OutcomeUnknown",
    "OverQuota",
    "Patience",
    "SeqmeshError",
    "SequenceBusy",
    "SequenceCancelled",
    "SequenceEnded",
    "SequenceExists",
    "SequenceExpired",
    "SequenceFailed",
    "SequenceGone",
    "SequenceLost",
    "StepLate",
    "StepMismatch",
    "StepOutputs",
    "StepRefused",
    "TryLater",
    "WaitTooLong",
    "WrongAnswer",
    "WrongStep",
    "WrongToken",
]
