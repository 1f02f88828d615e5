"""Triton's own sequence clients, run again and again: the same correlation ids, and the same request ids, which are
`<sequence>_<count>`."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import tritonclient.grpc as grpc_sync
import tritonclient.http as http_sync

from tests.mesh.running_mesh import RunningMesh
from tests.mesh.traffic import Plan, Step, sum_of, tensor

MODEL = "running_sum"
SEQUENCES = (1007, "1007", 1008)
RUNS = {
    "ended": (True, [(11, 7, 5, 3), (11, 7, 5, 3), (11, 7, 2, 3)]),
    "crashed": (False, [(11, 7, 5, 3), (11, 7, 5, 3), (4, 7, 5, 3)]),
    "crashed after the first step": (False, [(11,), (11, 7, 5), (4, 7, 5)]),
    "one request": (True, [(11,), (11,), (4,)]),
}


def steps_of(run: Sequence[Plan], *, end: bool) -> Iterator[tuple[Step, dict[str, Any]]]:
    """The sequences' steps by turns, as Triton's example sends them."""
    for steps in zip(*(plan.steps for plan in run), strict=True):
        for step in steps:
            yield (
                step,
                {
                    "request_id": f"{step.id}_{step.number}",
                    "sequence_id": step.id,
                    "sequence_start": step.start,
                    "sequence_end": step.end and end,
                },
            )


def over_stream(mesh: RunningMesh, run: Sequence[Plan], *, end: bool) -> list[int]:
    """Everything at once on one stream of tritonclient.grpc; the answers in the order of the requests."""
    answers: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
    count = 0

    def arrived(result: Any, error: Any) -> None:
        answers.put((result, error))

    with grpc_sync.InferenceServerClient(mesh.grpc()) as client:
        client.start_stream(callback=arrived)
        for step, sequence in steps_of(run, end=end):
            client.async_stream_infer(MODEL, [tensor(grpc_sync.InferInput, step.value)], **sequence)
            count += 1
        told = [answers.get(timeout=60) for _ in range(count)]
        client.stop_stream()
    assert [None] * count == [error for _, error in told]
    return [sum_of(result) for result, _ in told]


def over_http(mesh: RunningMesh, run: Sequence[Plan], *, end: bool) -> list[int]:
    """One request after the other, by tritonclient.http."""
    with http_sync.InferenceServerClient(mesh.http()) as client:
        return [
            sum_of(client.infer(MODEL, [tensor(http_sync.InferInput, step.value)], **sequence))
            for step, sequence in steps_of(run, end=end)
        ]


@pytest.mark.parametrize("play", [over_stream, over_http])
@pytest.mark.parametrize("kind", RUNS)
def test_each_run_of_a_client_hears_its_own_answers(
    mesh: RunningMesh, kind: str, play: Callable[..., list[int]]
) -> None:
    end, runs = RUNS[kind]
    for values in runs:
        run = [Plan(id, tuple(value * factor for value in values)) for factor, id in enumerate(SEQUENCES, 1)]

        answers = play(mesh, run, end=end)

        assert [total for sums in zip(*(plan.sums for plan in run), strict=True) for total in sums] == answers
    # Nothing stays open in a mesh that other tests use.
    assert [9] * len(SEQUENCES) == play(mesh, [Plan(id, (9,)) for id in SEQUENCES], end=True)
