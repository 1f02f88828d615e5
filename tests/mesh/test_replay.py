"""Journals of a running mesh, and `seqmesh seq replay`: the same steps once more, on another version."""

from __future__ import annotations

import json
from http import HTTPStatus
from pathlib import Path

import msgspec

from shared.contract.ids import sequence_id
from shared.store.exported import from_file, to_file
from tests.mesh.model_repository import JOURNAL_STEPS
from tests.mesh.raw_http import answer, get, infer_document, posted
from tests.mesh.running_mesh import RunningMesh, seqmesh

MODEL = "journaled_sum"
INFER = f"/v2/models/{MODEL}/versions/1/infer"
ON_1, ON_2 = ("--version", "1", "--to-version", "1"), ("--version", "1", "--to-version", "2")


async def step(mesh: RunningMesh, sequence: int | str, value: int, **flags: bool) -> int:
    return answer(await posted(mesh.http(), INFER, infer_document(value, sequence_id=sequence, **flags)))


async def run(mesh: RunningMesh, sequence: int | str, *values: int, is_ended: bool = True) -> None:
    for n, value in enumerate(values):
        await step(mesh, sequence, value, sequence_start=n == 0, sequence_end=is_ended and n == len(values) - 1)


def open_sequences(mesh: RunningMesh) -> int:
    return get(mesh.http(), f"/v2/models/{MODEL}/sequences").document["total"]


async def test_the_same_version_gives_the_same_and_another_one_is_told_from_it(mesh: RunningMesh) -> None:
    await run(mesh, 9001, 60, 30, 20, 1)

    same = await seqmesh(mesh, "seq", "replay", MODEL, "9001", *ON_1)
    other = await seqmesh(mesh, "seq", "replay", MODEL, "9001", *ON_2, code=1)
    as_json = json.loads(await seqmesh(mesh, "seq", "replay", MODEL, "9001", *ON_2, "--json", code=1))

    assert "4 steps, model journaled_sum version 1 and model journaled_sum version 1: the same\n" in same
    assert ["OUTPUT", "INT32", "4", "2", "3", "1"] == other.splitlines()[1].split()
    assert other.endswith("version 2: different from step 3 on\n")
    (output,) = as_json["outputs"]
    assert (4, 3, 2, 1.0) == (as_json["steps"], as_json["first"], output["different"], output["greatest"])
    assert 0 == open_sequences(mesh)


async def test_an_open_sequence_is_replayed_beside_itself_and_goes_on(mesh: RunningMesh) -> None:
    await run(mesh, "open one", 5, 6, is_ended=False)

    assert "2 steps" in await seqmesh(mesh, "seq", "replay", MODEL, "open one", *ON_1)

    # Its replay is over at once, though its journal has no END.
    assert 1 == open_sequences(mesh)
    assert 18 == await step(mesh, "open one", 7, sequence_end=True)
    assert "3 steps" in await seqmesh(mesh, "seq", "replay", MODEL, "open one", *ON_1)


async def test_a_step_that_failed_fails_again_and_one_that_fails_alone_ends_the_comparison(mesh: RunningMesh) -> None:
    await run(mesh, 9021, 6, is_ended=False)
    too_much = infer_document(2**31 - 1, sequence_id=9021)
    assert HTTPStatus.OK != (await posted(mesh.http(), INFER, too_much)).status
    assert 7 == await step(mesh, 9021, 1, sequence_end=True)
    await run(mesh, 9022, 600, 66, 1)

    both = await seqmesh(mesh, "seq", "replay", MODEL, "9021", *ON_2)
    alone = await seqmesh(mesh, "seq", "replay", MODEL, "9022", *ON_2, "--atol", "1", code=1)

    assert "3 steps" in both
    assert "step 2 fails now (not this one); later steps were not compared" in alone
    assert 0 == open_sequences(mesh)


async def test_a_file_is_replayed_without_the_mesh_that_wrote_it(mesh: RunningMesh, tmp_path: Path) -> None:
    file = tmp_path / "9031.sequence"
    await run(mesh, 9031, 1, 2, is_ended=False)
    await seqmesh(mesh, "seq", "export", MODEL, "9031", str(file), "--version", "1")
    await step(mesh, 9031, 0, sequence_end=True)
    gateway = mesh.grpc()

    # The Redis of the last argument is not asked.
    told = await seqmesh(mesh, "seq", "replay", "--file", str(file), "--gateway", gateway, "--to-version", "1")
    assert "2 steps" in told

    # A sequence that was opened from the file has its journal, and goes on with it.
    await seqmesh(mesh, "seq", "import", str(file), "--as", "9032", "--version", "1")
    assert 13 == await step(mesh, 9032, 10, sequence_end=True)
    assert "3 steps" in await seqmesh(mesh, "seq", "replay", MODEL, "9032", *ON_1)

    exported = from_file(file.read_bytes())
    bad = tmp_path / "bad.sequence"
    bad.write_bytes(to_file(msgspec.structs.replace(exported, journal={})))
    assert "journal_steps" in await seqmesh(mesh, "seq", "replay", "--file", str(bad), code=2)
    # Opened from a file without a journal, it has none up to its next START.
    await seqmesh(mesh, "seq", "import", str(bad), "--as", "9034", "--version", "1")
    assert 4 == await step(mesh, 9034, 1)
    assert 0 == mesh.redis.exists(mesh.keys.journal(sequence_id(MODEL, "1", 9034)))
    assert 5 == await step(mesh, 9034, 1, sequence_end=True)
    for wrong in (
        {**exported.journal, "i:1": b"\x00"},
        {name: value for name, value in exported.journal.items() if name != "o:1"},
        {**exported.journal, "x": b"1"},
        {**exported.journal, "n": b"9" * 30},
    ):
        bad.write_bytes(to_file(msgspec.structs.replace(exported, journal=wrong)))
        assert f"{bad}: its journal " in await seqmesh(mesh, "seq", "replay", "--file", str(bad), code=2)
        assert f"{bad}: its journal " in await seqmesh(mesh, "seq", "import", str(bad), "--as", "9033", code=1)


async def test_what_cannot_be_compared_says_why(mesh: RunningMesh) -> None:
    await run(mesh, 9041, *range(JOURNAL_STEPS + 2))
    assert 1 == answer(
        await posted(
            mesh.http(), "/v2/models/running_sum/infer", infer_document(1, sequence_id=9042, sequence_start=True)
        )
    )

    cut = await seqmesh(mesh, "seq", "replay", MODEL, "9041", *ON_1, code=2)
    assert f"the journal holds the first {JOURNAL_STEPS} of {JOURNAL_STEPS + 2} answered steps" in cut
    assert f"{JOURNAL_STEPS} steps" in await seqmesh(
        mesh, "seq", "replay", MODEL, "9041", *ON_1, "--steps", str(JOURNAL_STEPS)
    )
    assert "give its model the parameter journal_steps" in await seqmesh(
        mesh, "seq", "replay", "running_sum", "9042", code=2
    )
    assert "no such sequence" in await seqmesh(mesh, "seq", "replay", MODEL, "9043", code=2)
    assert "name a sequence by MODEL and ID" in await seqmesh(mesh, "seq", "replay", MODEL, code=2)
    nobody = await seqmesh(
        mesh, "seq", "replay", MODEL, "9041", *ON_2[:2], "--to-model", "nobody", "--steps", "1", code=2
    )
    assert "step 1 is not taken (NOT_FOUND): " in nobody
    one_step = (MODEL, "9041", *ON_1, "--steps", "1")
    header = await seqmesh(mesh, "seq", "replay", *one_step, "--header", "a b=1", code=2)
    assert "--header: 'a b' is no name of a header" in header
    shapes = await seqmesh(
        mesh, "seq", "replay", MODEL, "9041", *ON_2[:2], "--to-model", "row_norms", "--steps", "1", code=1
    )
    assert "step 1 fails now (" in shapes
    assert 1 == answer(
        await posted(
            mesh.http(),
            "/v2/models/running_sum/infer",
            infer_document(0, sequence_id=9042, sequence_end=True),
        )
    )


async def test_a_sequence_that_begins_anew_has_a_new_journal(mesh: RunningMesh) -> None:
    await run(mesh, 9051, 1, 2, 3, is_ended=False)
    await run(mesh, 9051, 4, 5)

    assert "2 steps" in await seqmesh(mesh, "seq", "replay", MODEL, "9051", *ON_1)
    key = mesh.keys.journal(sequence_id(MODEL, "1", 9051))
    assert 0 < mesh.redis.pttl(key) <= 600_000
