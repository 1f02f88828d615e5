"""The clients of the documents that started the project, run as they are written.

The snippets lie in tests/fixtures/seeds_clients, to the letter. Filled in before they are run:

- `localhost:8000` becomes the address of the mesh;
- 000: `[[...]]` stands for the reader's own numbers; `np` is imported, which the document forgets;
- 004: `<xx>` becomes the length of the body, and two mistakes of its JSON are mended: the comma that is missing after
  "parameters" and the one too many after "output0".
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import tritonclient.http as httpclient

from executor.engine.pytorch.signature import script_deprecation_ignored
from tests.markdown_pages import ROOT, blocks_of
from tests.mesh.raw_http import Response, post, send
from tests.mesh.running_mesh import RunningMesh

SNIPPETS = Path(__file__).resolve().parents[1] / "fixtures" / "seeds_clients"
SESSION = "inference-session-id"


def snippet(name: str, mesh: RunningMesh) -> str:
    """A document's snippet, addressed to the mesh."""
    return (SNIPPETS / f"{name}.txt").read_text().replace("localhost:8000", mesh.http())


def seed_model(mesh: RunningMesh, name: str) -> Any:
    """The very model that the mesh serves, in this process: the oracle."""
    with script_deprecation_ignored():
        return cast("Any", torch.jit).load(str(mesh.directory.parent / "seeds" / name / "1" / "model.pt"))


# -- 000: tritonclient, no START, no END -------------------------------------------------------------------------------


def run_python(text: str, numbers: list[list[float]]) -> dict[str, Any]:
    """Runs the Python of document 000 with these numbers in it; returns its variables."""
    variables: dict[str, Any] = {"np": np}
    exec(compile(text.replace("[[...]]", repr(numbers)), "document 000", "exec"), variables)
    return variables


def end_sequence(mesh: RunningMesh, sequence: int) -> None:
    """Ends the sequence that a snippet leaves open, so that the next one begins with a blank state."""
    with httpclient.InferenceServerClient(mesh.http()) as client:
        last = httpclient.InferInput("INPUT__0", [1, 128], "FP32")
        last.set_data_from_numpy(np.zeros((1, 128), np.float32))
        client.infer("my_lstm_model", [last], sequence_id=sequence, sequence_end=True)


def lstm_outputs(mesh: RunningMesh, numbers: list[list[float]], steps: int) -> list[Any]:
    """What so many equal steps of a new sequence give."""
    model = seed_model(mesh, "my_lstm_model")
    state = torch.zeros(1, 2, 1024)
    outputs: list[Any] = []
    with torch.inference_mode():
        for _ in range(steps):
            answer = model(torch.tensor(numbers), state)
            state = answer["lstm_state"]
            outputs.append(answer["OUTPUT__0"].numpy())
    return outputs


def test_document_000_a_client_with_the_batcher_sends_no_state_and_no_start(mesh: RunningMesh) -> None:
    numbers = [[index / 128 for index in range(128)]]
    expected = lstm_outputs(mesh, numbers, 2)

    client = run_python(snippet("000_with_batcher", mesh), numbers)

    np.testing.assert_allclose(expected[0], client["output_data_1"], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(expected[1], client["output_data_2"], rtol=1e-4, atol=1e-5)
    assert not np.allclose(expected[0], expected[1], atol=1e-4)
    client["client"].close()
    end_sequence(mesh, client["sequence_id"])


def test_document_000_the_client_before_the_batcher_works_too(mesh: RunningMesh) -> None:
    numbers = [[-0.5] * 128]

    client = run_python(snippet("000_without_batcher", mesh), numbers)

    (expected,) = lstm_outputs(mesh, numbers, 1)
    np.testing.assert_allclose(expected, client["output_data_1"], rtol=1e-4, atol=1e-5)
    client["client"].close()
    end_sequence(mesh, client["sequence_id"])


# -- 003: curl, sessions by header -------------------------------------------------------------------------------------


def run_curl(text: str) -> list[Any]:
    """Runs the curl commands of document 003 in a shell; where there is no curl, sends what it would send."""
    commands = [command for command in re.split(r"^(?=curl )", text, flags=re.MULTILINE) if command.startswith("curl")]
    if shutil.which("curl"):
        ran = [subprocess.run(["sh", "-c", command], capture_output=True, check=True) for command in commands]
        return [json.loads(each.stdout) for each in ran]
    return [like_curl(command).document for command in commands]


def like_curl(command: str) -> Response:
    """The request that `curl -X POST URL -H ... -d ...` makes."""
    words = shlex.split(command.replace("\\\n", " "), comments=True)
    address, _, path = words[words.index("POST") + 1].partition("/")
    headers = dict(words[index + 1].split(": ", 1) for index, word in enumerate(words) if word == "-H")
    headers.setdefault("Content-Type", "application/x-www-form-urlencoded")
    return send(address, "POST", f"/{path}", words[words.index("-d") + 1], headers)


def test_document_003_a_stateless_model_answers_8(mesh: RunningMesh) -> None:
    (document,) = run_curl(snippet("003_stateless", mesh))

    (output,) = document["outputs"]
    assert [8] == output["data"]


def test_document_003_without_curl_the_same_bytes_are_sent(mesh: RunningMesh) -> None:
    response = like_curl(snippet("003_stateless", mesh))

    assert [8] == response.document["outputs"][0]["data"]


def rnn_outputs(mesh: RunningMesh, *numbers: list[int]) -> list[float]:
    """What the steps of one sequence give."""
    model = seed_model(mesh, "rnn_model")
    state = torch.zeros(1, 16)
    outputs: list[float] = []
    with torch.inference_mode():
        for piece in numbers:
            answer = model(torch.tensor([piece], dtype=torch.int32), state)
            state = answer["hidden_state"]
            outputs.append(float(answer["output"].item()))
    return outputs


def test_document_003_a_session_header_carries_the_state_from_one_request_to_the_next(mesh: RunningMesh) -> None:
    documents = run_curl(snippet("003_session", mesh))

    expected = rnn_outputs(mesh, list(range(1, 11)), list(range(11, 16)))
    assert expected == pytest.approx([document["outputs"][0]["data"][0] for document in documents], abs=1e-5)
    end_session(mesh, "session_abc")


def test_document_003_a_request_without_session_is_given_one_and_can_go_on_with_it(mesh: RunningMesh) -> None:
    path = "/v2/models/rnn_model/versions/1/infer"
    begun = post(mesh.http(0), path, rnn_document([3, 4]))
    session = begun.headers[SESSION]
    other = post(mesh.http(0), path, rnn_document([3, 4]))
    continued = post(mesh.http(1), path, rnn_document([5]), {SESSION: session})

    first, second = rnn_outputs(mesh, [3, 4], [5])
    assert session == begun.document["parameters"]["sequence_id"]
    assert session != other.headers[SESSION]
    assert first == pytest.approx(begun.document["outputs"][0]["data"][0], abs=1e-5)
    assert first == pytest.approx(other.document["outputs"][0]["data"][0], abs=1e-5)
    assert second == pytest.approx(continued.document["outputs"][0]["data"][0], abs=1e-5)
    assert session == continued.headers[SESSION]
    end_session(mesh, session)
    end_session(mesh, other.headers[SESSION])


def rnn_document(numbers: list[int], **parameters: Any) -> dict[str, Any]:
    """An inference request as the document writes it."""
    data = {"name": "sequence", "shape": [1, len(numbers)], "datatype": "INT32", "data": numbers}
    return {"inputs": [data], **({"parameters": parameters} if parameters else {})}


def end_session(mesh: RunningMesh, session: str) -> None:
    """Ends a session; the document leaves that to time."""
    ended = post(mesh.http(), "/v2/models/rnn_model/infer", rnn_document([0], sequence_id=session, sequence_end=True))
    assert 200 == ended.status


def test_the_sessions_of_the_dialects_page_add_up(mesh: RunningMesh, capsys: pytest.CaptureFixture[str]) -> None:
    """The program in docs/triton/dialect.md prints what stands below it."""
    blocks = [block for block in blocks_of(ROOT / "docs" / "triton" / "dialect.md") if block.heading == "Sessions"]
    program, printed = (block.text for block in blocks)
    variables: dict[str, Any] = {}

    exec(compile(program.replace("localhost:8000", mesh.http()), "dialect.md", "exec"), variables)
    variables["client"].close()

    assert printed == capsys.readouterr().out


# -- 004: the sequence extension's request bodies ----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["004_integer_id", "004_uuid_id"])
def test_document_004_a_request_in_the_middle_of_a_sequence_is_summed(mesh: RunningMesh, name: str) -> None:
    head, _, body = snippet(name, mesh).partition("\n{")
    request_line, *header_lines = head.splitlines()
    method, path, _ = request_line.split()
    mended = re.sub(r'(^"parameters" : .*\})$', r"\1,", "{" + body, flags=re.MULTILINE).replace(
        '"output0",', '"output0"'
    )
    headers = dict(line.split(": ", 1) for line in header_lines)
    headers["Content-Length"] = str(len(mended))
    # The document's request is neither the first nor the last of its sequence: those two are ours.
    first, last = json.loads(mended), json.loads(mended)
    first["parameters"]["sequence_start"] = True
    last["parameters"]["sequence_end"] = True

    responses = [
        send(mesh.http(), method, path, json.dumps(first)),
        send(mesh.http(), method, path, mended, headers),
        send(mesh.http(), method, path, json.dumps(last)),
    ]

    outputs = [response.document["outputs"][0] for response in responses]
    assert [[1, 2, 3, 4], [2, 4, 6, 8], [3, 6, 9, 12]] == [output["data"] for output in outputs]
    assert {("output0", "UINT32", (2, 2))} == {
        (output["name"], output["datatype"], tuple(output["shape"])) for output in outputs
    }


def test_document_004_the_server_reports_the_sequence_extension(mesh: RunningMesh) -> None:
    document = send(mesh.http(), "GET", "/v2").document

    assert "sequence" in document["extensions"]
    assert "sequence(string_id)" in document["extensions"]
