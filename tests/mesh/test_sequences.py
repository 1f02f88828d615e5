"""Sequences as an operator sees them, over HTTP and with `seqmesh seq`: listed, shown, ended."""

from __future__ import annotations

import asyncio
import json
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import msgspec
import pytest
from click.shell_completion import ShellComplete

from deploy import cli
from shared.contract.ids import sequence_id
from shared.store.exported import from_file, to_file
from tests.mesh.raw_http import answer, get, infer_document, posted, send
from tests.mesh.running_mesh import RunningMesh, eventually, seqmesh

MODEL = "running_sum"
SEQUENCES = f"/v2/models/{MODEL}/sequences"
INFER = f"/v2/models/{MODEL}/infer"


async def step(mesh: RunningMesh, sequence: int | str, value: int, **flags: bool) -> int:
    return answer(await posted(mesh.http(), INFER, infer_document(value, sequence_id=sequence, **flags)))


async def refused(mesh: RunningMesh, sequence: int | str) -> tuple[int, str, int]:
    """Status, reason and last step of a step that is not accepted."""
    response = await posted(mesh.http(1), INFER, infer_document(1, sequence_id=sequence))
    return response.status, response.document["reason"], response.document["last_step"]


async def test_what_clients_hold_open_is_listed_and_shown(mesh: RunningMesh) -> None:
    await step(mesh, 7001, 1, sequence_start=True)
    await step(mesh, 7001, 2)
    await step(mesh, "listed/ä b", 3, sequence_start=True)
    record = mesh.record(sequence_id(MODEL, "", 7001))

    listed = get(mesh.http(1), f"{SEQUENCES}?state=live&sort=-steps&prefix=700").document
    shown = get(mesh.http(), f"{SEQUENCES}/7001").document
    text = get(mesh.http(), f"{SEQUENCES}/{quote('listed/ä b', safe='')}").document

    (only,) = listed["sequences"]
    assert (7001, "live", 2, 0, record["ow"]) == tuple(
        only[name] for name in ("id", "state", "last_step", "open_steps", "executor")
    )
    assert 1 == listed["total"]
    assert only.items() >= {"model": MODEL, "version": "1", "recoverable": True, "closed": False}.items()
    assert shown["id"] == 7001
    assert sum(shown["state_bytes"].values()) > 0
    assert ("listed/ä b", 1) == (text["id"], text["last_step"])
    assert HTTPStatus.NOT_FOUND == get(mesh.http(), f"{SEQUENCES}/7001?type=string").status
    for sequence in (7001, "listed/ä b"):
        await step(mesh, sequence, 0, sequence_end=True)
    assert "ended" == get(mesh.http(), f"{SEQUENCES}/7001").document["state"]


async def test_an_operators_list_reads_well(mesh: RunningMesh) -> None:
    for number in range(7011, 7014):
        await step(mesh, number, 1, sequence_start=True)

    table = await seqmesh(mesh, "seq", "ls", MODEL, "--prefix", "701", "--limit", "2")
    lines = table.splitlines()
    as_json = await seqmesh(mesh, "seq", "ls", MODEL, "--prefix", "701", "--json")
    shown = await seqmesh(mesh, "seq", "show", MODEL, "7011")

    assert ["ID", "STATE", "EXECUTOR"] == lines[0].split()[:3]
    assert [["7011", "live"], ["7012", "live"]] == [line.split()[:2] for line in lines[1:3]]
    assert "3 sequences, 1 of them not shown: --limit 3 shows them" == lines[3]
    assert [7011, 7012, 7013] == [json.loads(line)["id"] for line in as_json.splitlines()]
    assert "steps       1 since START, 0 of them open" in shown
    assert "state kept  by the mesh" in shown
    ended = await seqmesh(mesh, "seq", "end", MODEL, "7011", "7012", "7013")
    assert "7011: ends now\n7012: ends now\n7013: ends now\n" == ended
    await eventually(lambda: not get(mesh.http(), f"{SEQUENCES}?prefix=701").document["total"], "they are over")
    assert "cancelled" in await seqmesh(mesh, "seq", "show", MODEL, "7011")
    assert "7011: was over already (cancelled)\n" == await seqmesh(mesh, "seq", "end", MODEL, "7011")
    assert "no such sequence" in await seqmesh(mesh, "seq", "end", MODEL, "7019", code=1)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("ls nobody", 1),
        ("show nobody 1", 1),
        ("move nobody 1", 1),
        ("pause nobody 1", 1),
        ("resume nobody 1", 1),
        ("end nobody 1", 1),
        ("fork nobody 1 2", 1),
        ("export nobody 1 file", 1),
        ("replay nobody 1", 2),
    ],
)
async def test_a_model_that_is_not_there_is_named_with_those_that_are(mesh: RunningMesh, words: str, code: int) -> None:
    said = await seqmesh(mesh, "seq", *words.split(), code=code)

    assert "no model 'nobody' in this mesh; there are: " in said
    assert MODEL in said


async def test_an_executor_that_is_not_there_is_named_with_those_that_are(mesh: RunningMesh) -> None:
    said = await seqmesh(mesh, "seq", "ls", MODEL, "--executor", "nobody", code=1)

    assert "no executor 'nobody' in this mesh; there are: executor-1" in said
    assert "0 sequences\n" == await seqmesh(mesh, "seq", "ls", MODEL, "--executor", "executor-1", "--prefix", "7099")


async def test_an_id_of_a_client_does_nothing_to_the_operators_terminal(mesh: RunningMesh) -> None:
    hostile = "escape\x1b]0;owned\x07\x1b[2J"
    await step(mesh, hostile, 1, sequence_start=True)

    for told in (
        await seqmesh(mesh, "seq", "ls", MODEL, "--prefix", "escape"),
        await seqmesh(mesh, "seq", "show", MODEL, hostile),
    ):
        assert r"'escape\x1b]0;owned\x07\x1b[2J'" in told
        assert told.replace("\n", "").isprintable()
    await step(mesh, hostile, 0, sequence_end=True)


async def test_a_newline_in_a_path_is_part_of_the_id(mesh: RunningMesh) -> None:
    """What is asked of `7015%0A` does nothing to 7015, and an id with a newline is reached as any other."""
    await step(mesh, 7015, 1, sequence_start=True)
    await step(mesh, "two\nlines", 1, sequence_start=True)

    stranger = await asyncio.to_thread(send, mesh.http(), "DELETE", f"{SEQUENCES}/7015%0A")

    assert HTTPStatus.NOT_FOUND == stranger.status
    assert "two\nlines" == get(mesh.http(), f"{SEQUENCES}/two%0Alines").document["id"]
    assert HTTPStatus.NOT_FOUND == get(mesh.http(), "/v2/health/live%0A").status
    assert 1 == await step(mesh, 7015, 0, sequence_end=True)
    assert 1 == await step(mesh, "two\nlines", 0, sequence_end=True)


async def test_a_copy_gets_an_id_that_a_client_can_name(mesh: RunningMesh, tmp_path: Path) -> None:
    await step(mesh, 7016, 1, sequence_start=True)
    file = tmp_path / "7016.sequence"
    await seqmesh(mesh, "seq", "export", MODEL, "7016", str(file))
    exported = from_file(file.read_bytes())
    for number, unusable in enumerate((0, -1, "", "x" * 129)):
        foreign = tmp_path / f"{number}.sequence"
        foreign.write_bytes(to_file(msgspec.structs.replace(exported, id=unusable)))
        assert "no client could go on" in await seqmesh(mesh, "seq", "import", str(foreign), code=1)
    assert "no client could go on" in await seqmesh(mesh, "seq", "fork", MODEL, "7016", "0", code=1)
    assert 1 == await step(mesh, 7016, 0, sequence_end=True)


async def test_a_foreign_file_does_nothing_to_the_operators_terminal(mesh: RunningMesh, tmp_path: Path) -> None:
    await step(mesh, 7017, 1, sequence_start=True)
    file = tmp_path / "7017.sequence"
    await seqmesh(mesh, "seq", "export", MODEL, "7017", str(file))
    exported = from_file(file.read_bytes())

    hostile = msgspec.structs.replace(exported, id="\x1b[2Jcleared")
    file.write_bytes(to_file(hostile))
    assert "'\\x1b[2Jcleared' goes on behind step 1\n" == await seqmesh(mesh, "seq", "import", str(file))
    file.write_bytes(to_file(msgspec.structs.replace(exported, model="\x1b[2Jcleared")))
    assert r"of model '\x1b[2Jcleared'" in await seqmesh(mesh, "seq", "import", str(file), code=1)
    for sequence in (7017, hostile.id):
        assert 1 == await step(mesh, sequence, 0, sequence_end=True)


async def test_a_shell_is_offered_ids_that_name_the_sequence_and_are_no_commands(mesh: RunningMesh) -> None:
    sequences = (7018, "7018", "$(id)", "a b", "--version", "two\nlines", "talk-é/7018")
    for sequence in sequences:
        await step(mesh, sequence, 1, sequence_start=True)

    def offered(*options: str) -> list[str]:
        """Of these sequences: another test's may be about to end."""
        words = ["seq", "show", f"--redis-url={mesh.state.redis_url}", *options, MODEL]
        completion = ShellComplete(cli.main, {}, "seqmesh", "_SEQMESH_COMPLETE")
        found = {one.value for one in completion.get_completions(words, "")}
        return sorted(found & set(map(str, sequences)))

    assert ["7018", "talk-é/7018"] == await asyncio.to_thread(offered)
    assert ["7018", "talk-é/7018"] == await asyncio.to_thread(offered, "--string")
    for sequence in sequences:
        await step(mesh, sequence, 0, sequence_end=True)


async def test_one_that_is_ended_frees_its_slot_and_its_client_hears_why(mesh: RunningMesh) -> None:
    await step(mesh, 7021, 5, sequence_start=True)
    assert 7 == await step(mesh, 7021, 2)

    response = await asyncio.to_thread(send, mesh.http(), "DELETE", f"{SEQUENCES}/7021")

    assert HTTPStatus.ACCEPTED == response.status
    assert {"state": "closed"} == response.document
    assert (HTTPStatus.BAD_REQUEST, "cancelled", 2) == await refused(mesh, 7021)
    await eventually(
        lambda: "cancelled" == get(mesh.http(), f"{SEQUENCES}/7021").document["state"], "the leader has ended it"
    )
    assert (HTTPStatus.BAD_REQUEST, "cancelled", 2) == await refused(mesh, 7021)
    assert HTTPStatus.NOT_FOUND == (await asyncio.to_thread(send, mesh.http(), "DELETE", f"{SEQUENCES}/7021")).status
    assert 1 == await step(mesh, 7021, 1, sequence_start=True)
    assert 2 == await step(mesh, 7021, 1, sequence_end=True)


async def test_one_whose_steps_are_not_answered_is_given_up(mesh: RunningMesh) -> None:
    """Something else has changed a number of its record to another possible one."""
    await step(mesh, 7025, 5, sequence_start=True)
    mesh.redis.hset(mesh.keys.sequence(sequence_id(MODEL, "", 7025)).record, "nx", 50)
    waiting = asyncio.create_task(posted(mesh.http(), INFER, infer_document(1, sequence_id=7025)))
    await eventually(lambda: get(mesh.http(), f"{SEQUENCES}/7025").document["last_step"] == 51, "it is accepted")

    assert "7025: ends behind its open steps\n" == await seqmesh(mesh, "seq", "end", MODEL, "7025")
    assert not waiting.done()
    assert "7025: given up\n" == await seqmesh(mesh, "seq", "end", MODEL, "7025", "--lost")

    told = await waiting
    assert (HTTPStatus.BAD_REQUEST, "lost") == (told.status, told.document["reason"])
    assert 1 == await step(mesh, 7025, 1, sequence_start=True)
    assert 2 == await step(mesh, 7025, 1, sequence_end=True)


async def test_a_start_after_the_end_begins_anew_at_once(mesh: RunningMesh) -> None:
    for number in range(20):
        await step(mesh, 7031, 5, sequence_start=True)
        assert HTTPStatus.ACCEPTED == send(mesh.http(number % 2), "DELETE", f"{SEQUENCES}/7031").status
    assert 3 == await step(mesh, 7031, 3, sequence_start=True)
    assert 4 == await step(mesh, 7031, 1)
    assert 5 == await step(mesh, 7031, 1, sequence_end=True)


async def test_a_fork_goes_on_from_the_same_state_and_apart(mesh: RunningMesh) -> None:
    await step(mesh, 7041, 5, sequence_start=True)
    await step(mesh, 7041, 2)

    said = await seqmesh(mesh, "seq", "fork", MODEL, "7041", "forked")

    assert "forked goes on behind step 2 of 7041\n" == said
    assert 17 == await step(mesh, "forked", 10)
    assert 8 == await step(mesh, 7041, 1)
    again = await seqmesh(mesh, "seq", "fork", MODEL, "7041", "forked", code=1)
    assert "'forked' has an open sequence: end it first, or take another id" in again
    assert 18 == await step(mesh, "forked", 1, sequence_end=True)
    assert 9 == await step(mesh, 7041, 1, sequence_end=True)
    assert "there is no such open sequence" in await seqmesh(mesh, "seq", "fork", MODEL, "7041", "late", code=1)


async def test_a_file_outlives_its_sequence(mesh: RunningMesh, tmp_path: Path) -> None:
    """Exported, ended, opened again: the next step builds on the exported state, and a retry gets the stored answer."""
    file = tmp_path / "7051.sequence"
    await step(mesh, 7051, 5, sequence_start=True)
    last = {**infer_document(2, sequence_id=7051), "id": "second"}
    assert 7 == answer(await posted(mesh.http(), INFER, last))

    said = await seqmesh(mesh, "seq", "export", MODEL, "7051", str(file))
    assert f"{file}: 2 steps of 7051" in said
    assert 0o600 == file.stat().st_mode & 0o777
    assert 107 == await step(mesh, 7051, 100, sequence_end=True)

    assert "7051 goes on behind step 2\n" == await seqmesh(mesh, "seq", "import", str(file))
    assert "has an open sequence" in await seqmesh(mesh, "seq", "import", str(file), code=1)
    assert 7 == answer(await posted(mesh.http(1), INFER, last))
    assert 8 == await step(mesh, 7051, 1, sequence_end=True)
    await seqmesh(mesh, "seq", "import", str(file), "--as", "other")
    assert 9 == await step(mesh, "other", 2, sequence_end=True)
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    assert "it is damaged" in await seqmesh(mesh, "seq", "import", str(file), code=1)


@pytest.mark.parametrize(
    ("path", "status", "text"),
    [
        ("/v2/models/nobody/sequences", 404, "Request for unknown model: 'nobody' is not found"),
        (f"/v2/models/{MODEL}/versions/9/sequences", 404, "9"),
        (f"{SEQUENCES}?state=asleep", 400, "unknown state 'asleep': use one of waiting, live, moving, paged"),
        (f"{SEQUENCES}?sort=colour", 400, "unknown sort 'colour': use one of id, begun, used, steps, open"),
        (f"{SEQUENCES}?limit=1001", 400, "'limit' must be a number from 0 to 1000"),
        (f"{SEQUENCES}?offset=-1", 400, "'offset' must be a number from 0 to"),
        (f"{SEQUENCES}?colour=red", 400, "unknown query parameter 'colour'"),
        (f"{SEQUENCES}/never-seen", 404, f"model '{MODEL}' has no open sequence 'never-seen'"),
        (f"{SEQUENCES}/1?type=number", 400, "the query parameter 'type' must be 'string'"),
        (f"{SEQUENCES}/{'9' * 5000}", 404, "has no open sequence"),
    ],
)
def test_what_is_asked_wrongly_is_told(mesh: RunningMesh, path: str, status: int, text: str) -> None:
    response = get(mesh.http(), path)

    assert status == response.status
    assert text in response.error


async def test_steps_of_a_paused_sequence_wait_and_are_answered_in_their_order(mesh: RunningMesh) -> None:
    await step(mesh, 7061, 5, sequence_start=True)

    assert "7061: paused for 3600 s at most\n" == await seqmesh(mesh, "seq", "pause", MODEL, "7061")
    waiting = [asyncio.create_task(step(mesh, 7061, 2)), asyncio.create_task(step(mesh, 7062, 1, sequence_start=True))]
    await eventually(lambda: 1 == get(mesh.http(), f"{SEQUENCES}/7061").document["open_steps"], "it was accepted")
    await waiting[1]
    shown = get(mesh.http(1), f"{SEQUENCES}/7061").document
    table = await seqmesh(mesh, "seq", "ls", MODEL, "--prefix", "7061", "--state", "paused")
    moved = await seqmesh(mesh, "seq", "move", MODEL, "7061", code=1)
    again = await asyncio.to_thread(send, mesh.http(), "POST", f"{SEQUENCES}/7061?action=pause&seconds=60")

    assert not waiting[0].done()
    assert ("paused", 2) == (shown["state"], shown["last_step"])
    assert not {"executor", "slot", "idle_left_ms"} & shown.keys(), "it holds no slot, and its idle time stands still"
    assert "paused" in table
    assert "resume it first" in moved
    assert (HTTPStatus.OK, "paused") == (again.status, again.document["state"])
    assert again.document["paused_until_ms"] < shown["paused_until_ms"]
    assert "resumed     in" in await seqmesh(mesh, "seq", "show", MODEL, "7061")

    for _ in range(2):
        assert "7061: goes on\n" == await seqmesh(mesh, "seq", "resume", MODEL, "7061")
    assert 7 == await waiting[0]
    assert 8 == await step(mesh, 7061, 1, sequence_end=True)
    await step(mesh, 7062, 0, sequence_end=True)
    for verb in ("pause", "resume"):
        assert "there is no such open sequence" in await seqmesh(mesh, "seq", verb, MODEL, "7061", code=1)
        response = await asyncio.to_thread(send, mesh.http(), "POST", f"{SEQUENCES}/7061?action={verb}")
        assert HTTPStatus.NOT_FOUND == response.status


async def test_a_pause_under_pipelined_steps_loses_and_doubles_none(mesh: RunningMesh) -> None:
    """Pauses fall before, into and behind batches that run; each answer is the sum of exactly the steps before it."""
    await step(mesh, 7071, 1, sequence_start=True)
    for _ in range(6):
        burst = [asyncio.create_task(step(mesh, 7071, 1)) for _ in range(8)]
        paused, *_ = await asyncio.gather(
            asyncio.to_thread(send, mesh.http(1), "POST", f"{SEQUENCES}/7071?action=pause"), asyncio.sleep(0)
        )
        assert HTTPStatus.OK == paused.status
        resumed = await asyncio.to_thread(send, mesh.http(), "POST", f"{SEQUENCES}/7071?action=resume")
        assert HTTPStatus.OK == resumed.status
        sums = sorted(await asyncio.gather(*burst))
        assert list(range(sums[0], sums[0] + 8)) == sums
    assert 1 + 6 * 8 == await step(mesh, 7071, 0, sequence_end=True)


async def test_one_that_is_ended_while_paused_answers_what_it_has_accepted(mesh: RunningMesh) -> None:
    await step(mesh, 7081, 5, sequence_start=True)
    assert HTTPStatus.OK == send(mesh.http(), "POST", f"{SEQUENCES}/7081?action=pause").status
    waiting = asyncio.create_task(step(mesh, 7081, 2))
    await eventually(lambda: 1 == get(mesh.http(), f"{SEQUENCES}/7081").document["open_steps"], "it was accepted")

    assert HTTPStatus.ACCEPTED == (await asyncio.to_thread(send, mesh.http(), "DELETE", f"{SEQUENCES}/7081")).status

    assert 7 == await waiting
    assert (HTTPStatus.BAD_REQUEST, "cancelled", 2) == await refused(mesh, 7081)


@pytest.mark.parametrize(
    ("query", "text"),
    [
        ("", "unknown action ''"),
        ("?action=stop", "unknown action 'stop': use one of pause, resume"),
        ("?action=pause&seconds=0", "'seconds' must be a number from 1 to 604800"),
        ("?action=pause&seconds=604801", "'seconds' must be a number from 1 to 604800"),
    ],
)
def test_an_action_that_is_none_is_told(mesh: RunningMesh, query: str, text: str) -> None:
    response = send(mesh.http(), "POST", f"{SEQUENCES}/never{query}")

    assert HTTPStatus.BAD_REQUEST == response.status
    assert text in response.error


async def acted(mesh: RunningMesh, sequence: str, query: str) -> tuple[int, dict[str, Any]]:
    """Status and document of an action."""
    response = await asyncio.to_thread(send, mesh.http(1), "POST", f"{SEQUENCES}/{sequence}?{query}")
    return response.status, response.document


async def test_over_http_it_is_moved_and_forked_as_on_the_command_line(mesh: RunningMesh) -> None:
    await step(mesh, 7201, 5, sequence_start=True)
    owner = get(mesh.http(), f"{SEQUENCES}/7201").document["executor"]

    status, moved = await acted(mesh, "7201", "action=move")
    assert HTTPStatus.OK == status, moved
    assert moved["executor"] not in ("", owner)
    assert (HTTPStatus.OK, owner) == (
        (back := await acted(mesh, "7201", f"action=move&to={owner}"))[0],
        back[1].get("executor"),
    )
    assert "already" in (await acted(mesh, "7201", f"action=move&to={owner}"))[1]["error"]
    assert "no executor 'nobody'" in (await acted(mesh, "7201", "action=move&to=nobody"))[1]["error"]
    assert HTTPStatus.NOT_FOUND == (await acted(mesh, "7299", "action=move"))[0]

    status, copy = await acted(mesh, "7201", "action=fork&as=7202")
    assert (HTTPStatus.OK, 7202, 1) == (status, copy["id"], copy["last_step"])
    assert HTTPStatus.BAD_REQUEST == (await acted(mesh, "7201", "action=fork&as=7202"))[0]
    assert "'as'" in (await acted(mesh, "7201", "action=fork"))[1]["error"]
    assert 15 == await step(mesh, 7202, 10, sequence_end=True)
    assert 6 == await step(mesh, 7201, 1, sequence_end=True)


async def test_a_file_goes_out_and_comes_back_over_http(mesh: RunningMesh, tmp_path: Path) -> None:
    await step(mesh, 7211, 5, sequence_start=True)
    await step(mesh, 7211, 6)

    async with aiohttp.ClientSession(f"http://{mesh.http()}") as http:
        async with http.post(f"{SEQUENCES}/7211?action=export") as response:
            assert (HTTPStatus.OK, "application/octet-stream") == (response.status, response.content_type)
            file = await response.read()

        async def opened(query: str, data: bytes, where: str = SEQUENCES) -> tuple[int, dict[str, Any]]:
            async with http.post(f"{where}{query}", data=data) as response:
                return response.status, await response.json()

        status, document = await opened("?as=by+http&type=string", file)
        assert (HTTPStatus.OK, "by http", 2) == (status, document["id"], document["last_step"])
        for query, data, why in (
            ("", file, "has an open sequence"),
            ("?as=7212", file[:-1], "damaged"),
            ("?as=7212", b"", "no exported sequence"),
            ("?as=7212&x=1", file, "unknown query parameter"),
        ):
            status, document = await opened(query, data)
            assert HTTPStatus.BAD_REQUEST == status
            assert why in document["error"]
        status, document = await opened("", file, "/v2/models/narrow_sum/sequences")
        assert (HTTPStatus.BAD_REQUEST, True) == (status, "of model 'running_sum'" in document["error"])
    # The command reads what the route wrote.
    (tmp_path / "file").write_bytes(file)
    await seqmesh(mesh, "seq", "import", str(tmp_path / "file"), "--as", "7213")
    assert 12 == await step(mesh, "by http", 1, sequence_end=True)
    assert 12 == await step(mesh, 7213, 1, sequence_end=True)
    assert 11 == await step(mesh, 7211, 0, sequence_end=True)
