"""`make bench`: requests are what the protocol says, figures are what was counted, and a small run works."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from google.protobuf import text_format
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import model_config_pb2 as untyped_model_config_pb2
from tritonclient.grpc import service_pb2 as untyped_service_pb2

from benchmarks import command, dial, dial_figures, paging, takeover, takeover_figures
from benchmarks.clients import PROTOCOLS, Addresses, RequestBytes, StepError, output_of, parse_head, varint
from benchmarks.command import MeasurementPlan, bench
from benchmarks.load import Tally
from benchmarks.plot import cpu_concurrency, draw
from benchmarks.results import Cell, Result, comparison, markdown, middle, result_of, summary, table
from benchmarks.servers import BenchmarkMesh, Executions, mesh_of
from benchmarks.triton import TritonError, interpreter_of, wheel_at, without_states
from benchmarks.usage import Meter, Reading, cpu_us_per_step, other_cores, redis_cost
from benchmarks.workloads import LstmScripts, RunningSums, TensorForm
from deploy.local.data_directory import ChildState, MeshState
from executor.models.repository import ModelRepository
from executor.models.slots import slots_within
from executor.workers.devices import Devices

service_pb2: Any = untyped_service_pb2
model_config_pb2: Any = untyped_model_config_pb2
FORM = TensorForm("INT32", (1, 1), 4)
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def result(
    server: str = "seqmesh",
    rate: float = 100.0,
    *,
    round_number: int = 1,
    other: float = 0.0,
    steps: int = 10,
    errors: int = 0,
) -> Result:
    return Result(
        Cell(server, "accumulate", "grpc", 32), round_number, steps, rate, 1.0, 2.0, 3.0,
        {"gateway": 50.0, "executor": 30.0, "client": 20.0}, None, other, errors=errors,
    )  # fmt: skip


# -- workloads --------------------------------------------------------------------------------------------------------


def test_a_running_sum_is_right_only_exactly() -> None:
    track = RunningSums().begin()
    sent = [int.from_bytes(track.next_input(), "little") for _ in range(3)]

    assert track.is_right(sum(sent).to_bytes(4, "little"))
    assert not track.is_right((sum(sent) + 1).to_bytes(4, "little"))
    assert not track.is_right(b"")


def test_an_lstm_answer_may_differ_from_the_probe_in_its_last_bits_only() -> None:
    scripts = LstmScripts()
    scripts.expected = [[np.full(10, 0.5, np.float32)] * scripts.steps_max for _ in scripts.inputs]
    track = scripts.begin()
    track.next_input()

    assert track.is_right(np.full(10, 0.50001, np.float32).tobytes())
    assert not track.is_right(np.full(10, 0.501, np.float32).tobytes())
    assert not track.is_right(np.full(9, 0.5, np.float32).tobytes())
    assert not track.is_right(np.full(10, np.nan, np.float32).tobytes())


def test_no_sequence_is_longer_than_the_scripts() -> None:
    scripts = LstmScripts()

    assert scripts.steps_max >= max(scripts.steps() for _ in range(1000))


def test_a_probe_of_a_server_without_memory_is_noticed() -> None:
    scripts = LstmScripts()
    once, again = np.zeros(10, np.float32), np.ones(10, np.float32)

    assert all(script[0] == script[1] != script[2] for script in scripts.inputs)
    scripts.expected = [[once, once, again]]
    assert not scripts.remembers()
    scripts.expected = [[once, again, again]]
    assert scripts.remembers()


# -- clients ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", [False, True])
@pytest.mark.parametrize("end", [False, True])
def test_a_request_put_together_from_bytes_is_the_message_the_protocol_means(start: bool, end: bool) -> None:
    parts = RequestBytes("accumulate", FORM)

    message = service_pb2.ModelInferRequest.FromString(
        parts.request(parts.sequence(1 << 60), b"\x01\x02\x03\x04", start=start, end=end)
    )

    assert ("accumulate", ["INPUT"], ["OUTPUT"]) == (
        message.model_name,
        [tensor.name for tensor in message.inputs],
        [tensor.name for tensor in message.outputs],
    )
    assert ("INT32", [1, 1], [b"\x01\x02\x03\x04"]) == (
        message.inputs[0].datatype,
        list(message.inputs[0].shape),
        list(message.raw_input_contents),
    )
    assert (1 << 60, start, end) == (
        message.parameters["sequence_id"].int64_param,
        message.parameters["sequence_start"].bool_param,
        message.parameters["sequence_end"].bool_param,
    )


@given(st.binary(max_size=300))
def test_lengths_are_written_as_protobuf_writes_them(data: bytes) -> None:
    assert service_pb2.ModelInferRequest(raw_input_contents=[data]).SerializeToString() == (
        b"\x3a" + varint(len(data)) + data
    )


def test_an_answer_without_its_one_output_is_an_error() -> None:
    with pytest.raises(StepError, match="0 raw outputs"):
        output_of(service_pb2.ModelInferResponse())


def test_an_answers_head_gives_status_and_lengths_whatever_the_case() -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-LENGTH: 120\r\ninference-header-content-length: 116"

    assert (200, 120, 116) == parse_head(head)


def test_an_answer_without_binary_part_is_all_document() -> None:
    assert (400, 33, 33) == parse_head(b"HTTP/1.1 400 \r\ncontent-length: 33")


# -- figures ----------------------------------------------------------------------------------------------------------


def reading(at_s: float, executor_s: float, busy_s: float, **redis: float) -> Reading:
    return Reading(at_s, {"executor": executor_s, "client": 0.0}, busy_s, redis)


def test_cpu_time_is_divided_by_the_steps_of_the_window() -> None:
    before, after = reading(0, 1.0, 0), reading(2, 1.5, 0)

    assert {"executor": 500.0, "client": 0.0} == cpu_us_per_step(before, after, steps=1000)


def test_what_others_used_is_what_the_machine_was_busy_beside_us() -> None:
    assert 0.25 == other_cores(reading(0, 1.0, 10.0), reading(2, 2.0, 11.5))
    assert 0.0 == other_cores(reading(0, 1.0, 10.0), reading(2, 2.0, 10.9))


def test_redis_costs_are_the_differences_per_step() -> None:
    counters = {"bytes_in": 100.0, "bytes_out": 50.0, "file_bytes": 10.0}
    before = reading(0, 0, 0, **{"calls:xadd": 5.0, **counters})
    after = reading(1, 0, 0, **{"calls:xadd": 25.0, "calls:fcall": 5.0, **{k: 2 * v for k, v in counters.items()}})

    cost = redis_cost(before, after, steps=10)

    assert cost is not None
    assert (2.5, 0.5, 10.0, 5.0, 1.0) == (cost.commands, cost.scripts, cost.bytes_in, cost.bytes_out, cost.file_bytes)
    assert [("xadd", 2.0), ("fcall", 0.5)] == list(cost.by_command.items())


def test_a_server_without_redis_has_no_such_costs() -> None:
    assert redis_cost(reading(0, 0, 0), reading(1, 0, 0), steps=1) is None


def test_the_mean_batch_is_of_the_runs_between_two_readings() -> None:
    assert 4.0 == Executions(500, 200).mean_batch_since(Executions(100, 100))
    assert Executions(500, 200).mean_batch_since(Executions(500, 200)) is None


def test_a_cell_without_answers_tells_why() -> None:
    tally = Tally()
    tally.fail(StepError("UNAVAILABLE: no server"))
    meter = Meter({}, None)

    failed = result_of(result().cell, 1, tally, meter, None)

    assert (0, 1, {"UNAVAILABLE: no server": 1}) == (failed.steps, failed.errors, failed.examples)


def test_the_meter_reads_the_time_that_a_process_has_used() -> None:
    meter = Meter({}, None)
    meter.read()
    spent = sum(number * number for number in range(300_000))
    meter.read()
    before, after = meter.readings

    assert spent > 0
    assert after.cpu_s["client"] >= before.cpu_s["client"] > 0


def test_the_middle_round_stands_for_a_cell_and_carries_the_errors_of_all() -> None:
    rounds = [result(rate=300, errors=1), result(rate=100), result(rate=200, errors=2)]

    (chosen,) = summary(rounds)

    assert (200, 3) == (chosen.steps_per_s, chosen.errors)


def test_disturbed_rounds_count_only_where_there_is_no_quiet_one() -> None:
    assert 50 == middle([result(rate=50), result(rate=500, other=1.0)]).steps_per_s
    assert 400 == middle([result(rate=400, other=0.8), result(rate=500, other=1.0)]).steps_per_s


def test_a_disturbed_cell_is_marked_in_the_table() -> None:
    assert "100 *" in table([result(other=0.5)])
    assert "100 *" not in table([result(other=0.0)])


def test_servers_are_compared_by_cell_without_the_clients_time() -> None:
    *_, line = comparison([result(), result("triton", rate=50)], "seqmesh", "triton").splitlines()

    assert ["accumulate", "grpc", "32", "100", "50", "2.00"] == [cell.strip() for cell in line.split("|")[1:7]]
    assert ["80", "80"] == [cell.strip() for cell in line.split("|")[-3:-1]]


def test_without_the_other_server_there_is_nothing_to_compare() -> None:
    assert not comparison([result()], "seqmesh", "triton")


def test_tables_are_aligned() -> None:
    assert ["| a | b |  c |", "| - | - | -: |", "| x | y | 10 |"] == markdown(
        ["a", "b", "c"], [["x", "y", "10"]]
    ).splitlines()


def test_a_plot_is_drawn_of_whatever_was_measured(tmp_path: Path) -> None:
    draw([result(), result("triton", rate=50), result(steps=0)], tmp_path / "plot.png")

    assert (tmp_path / "plot.png").read_bytes().startswith(PNG_SIGNATURE)


@pytest.mark.parametrize(("measured", "shown"), [({1, 8, 32, 128}, 32), ({64, 128}, 64), ({1, 8}, 8), (set[int](), 0)])
def test_cpu_time_is_shown_for_the_concurrency_nearest_to_the_usual(measured: set[int], shown: int) -> None:
    assert shown == cpu_concurrency(measured)


# -- plan and servers -------------------------------------------------------------------------------------------------


def server(label: str) -> BenchmarkMesh:
    return BenchmarkMesh(label, Addresses("127.0.0.1", 1, 2), {}, None)


def test_servers_alternate_cell_by_cell_and_triton_gets_only_models_of_its_backend() -> None:
    plan = MeasurementPlan(["accumulate", "lstm_512"], ["grpc"], [1, 8], 1.0, 0.1, 1)

    cells = [(s.label, cell.model, cell.concurrency) for s, cell in plan.cells([server("seqmesh"), server("triton")])]

    assert [
        ("seqmesh", "accumulate", 1), ("triton", "accumulate", 1), ("seqmesh", "accumulate", 8),
        ("triton", "accumulate", 8), ("seqmesh", "lstm_512", 1), ("seqmesh", "lstm_512", 8),
    ] == cells  # fmt: skip


def test_processes_are_grouped_by_service() -> None:
    children = [
        ChildState("redis", "redis", 1, ""), ChildState("executor-1", "executor", 2, ""),
        ChildState("executor-2", "executor", 3, ""), ChildState("gateway-1", "gateway", 4, "", 80, 81),
    ]  # fmt: skip

    mesh = mesh_of(MeshState(9, "127.0.0.1", "redis://127.0.0.1:1/0", ready=True, children=children))

    assert {"gateway": [4], "executor": [2, 3], "redis": [1]} == mesh.groups
    assert ("http://127.0.0.1:80", "127.0.0.1:81") == (mesh.address.http, mesh.address.grpc)


def test_triton_gets_the_same_configuration_without_states() -> None:
    """It would hand uninitialised memory to the model for each of them."""
    path = Path(command.__file__ or "").parent / "models" / "accumulate" / "config.pbtxt"
    whole: Any = text_format.Parse(path.read_text(), model_config_pb2.ModelConfig())

    without: Any = text_format.Parse(without_states(path.read_text()), model_config_pb2.ModelConfig())

    assert whole.sequence_batching.state
    whole.sequence_batching.ClearField("state")
    assert whole == without


def test_a_missing_triton_is_refused_with_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(TritonError, match="pip install nvidia-pytriton"):
        wheel_at(tmp_path, "3.11")


def test_a_python_that_does_not_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TritonError, match="--triton-python"):
        interpreter_of(str(tmp_path / "python"))


@pytest.mark.parametrize(
    "arguments", [["--concurrency", "0"], ["--concurrency", "1,x"], ["--models", "resnet"], ["--protocols", "smtp"]]
)
def test_what_cannot_be_measured_is_refused(arguments: list[str]) -> None:
    assert 2 == CliRunner().invoke(bench, arguments).exit_code


@pytest.mark.timeout(300)
def test_a_small_run_finds_every_answer_right_and_writes_its_results(tmp_path: Path) -> None:
    """One cell per protocol against a real mesh; nothing about speed."""
    small = [
        "--models=accumulate,device_direct",
        "--concurrency=4",
        "--seconds=2",  # longer than a busy machine keeps every step of a cell from its answer
        "--warmup=0.1",
        f"--out={tmp_path}",
    ]

    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", *small], capture_output=True, text=True, timeout=280, check=False
    )

    assert 0 == done.returncode, done.stdout + done.stderr
    results = json.loads((tmp_path / "results.json").read_text())["results"]
    cells = [(model, protocol) for model in ("accumulate", "device_direct") for protocol in PROTOCOLS]
    assert cells == [(row["cell"]["model"], row["cell"]["protocol"]) for row in results]
    assert [] == [row for row in results if not row["steps"] or row["wrong"] or row["errors"]]
    assert (tmp_path / "plot.png").exists()
    assert re.search(r"\| accumulate +\| grpc-stream +\|", (tmp_path / "results.md").read_text())


# -- the recovery dial ------------------------------------------------------------------------------------------------


def test_every_position_of_the_dial_is_a_model_that_loads_and_is_recovered_as_it_says(tmp_path: Path) -> None:
    recovered: dict[str, tuple[bool, bool]] = {}
    for setting in dial_figures.settings():
        dial.write_model(tmp_path, setting)
        repository = ModelRepository([tmp_path], Devices())
        config = repository.load(setting.name).record.config
        recovered[setting.name] = (config.state_in_mesh, config.replays)
        assert setting.recovers == config.recoverable
        assert setting.interval == config.checkpoint_interval

    assert {(True, False)} == {way for name, way in recovered.items() if name.startswith(("declared", "methods"))}
    assert ((False, True), (False, False)) == (recovered["replay"], recovered["nothing"])


def test_the_dial_shows_medians_and_draws_them(tmp_path: Path) -> None:
    turns = [
        dial_figures.Turn(setting.name, 100.0 * turn, 10.0 * turn, 1000.0 + turn if setting.recovers else None)
        for turn in (1, 9, 2)
        for setting in dial_figures.settings()
    ]

    dial.write(dial_figures.summary(turns), turns, tmp_path)

    text = (tmp_path / "dial.md").read_text()
    assert "| declared | 32    |     200 |               20 |        1002 |" in text
    assert "| nothing  |       |     200 |               20 |        lost |" in text
    assert len(turns) == len(json.loads((tmp_path / "dial.json").read_text()))
    assert (tmp_path / "dial.png").read_bytes().startswith(PNG_SIGNATURE)


# -- takeovers --------------------------------------------------------------------------------------------------------


def test_takeovers_are_shown_by_age_and_by_number(tmp_path: Path) -> None:
    old, many = takeover_figures.Case(1_000_000, takeover_figures.AGED, 10_000), takeover_figures.Case(3, 1000, 3)
    kills = [takeover_figures.Takeover(case, 5, 10.0 * turn, 20.0 * turn) for turn in (1, 9, 2) for case in (old, many)]
    idle = [takeover_figures.IdleTakeover(1000, 600, 1.0 * turn, 2.0 * turn, 3.0 * turn) for turn in (1, 9, 2)]

    takeover.write(kills, idle, tmp_path)

    text = (tmp_path / "takeover.md").read_text()
    assert "| 1000000      | 10000           |         8 |          5 |       20 |      40 |" in text
    assert "| 1000           | 600        |           2.0 |       4.0 |                      6 |" in text
    assert len(kills) + len(idle) == len(json.loads((tmp_path / "takeover.json").read_text()))
    assert (tmp_path / "takeover.png").read_bytes().startswith(PNG_SIGNATURE)


# -- live sequences ---------------------------------------------------------------------------------------------------


class Echo:
    """A mesh that answers every step at once: with the sums, or with one of them wrong."""

    def __init__(self, *, wrong: int = 0) -> None:
        self.sums: dict[int, int] = {}
        self.steps: Counter[int] = Counter()
        self.wrong = wrong

    async def session(self) -> Echo:
        return self

    async def step(self, sequence: int, data: bytes, *, start: bool, end: bool) -> bytes:
        assert start == (sequence not in self.sums)
        await asyncio.sleep(0)
        self.steps[sequence] += 1
        self.sums[sequence] = self.sums.get(sequence, 0) + int.from_bytes(data, "little")
        return (self.sums[sequence] + (sequence == self.wrong)).to_bytes(4, "little")

    async def close(self) -> None: ...


def tracks(count: int) -> list[paging.OpenSequence]:
    sums = RunningSums()
    return [paging.OpenSequence(number, sums.begin()) for number in range(1, count + 1)]


async def test_live_sequences_are_played_by_chance_each_one_step_at_a_time() -> None:
    mesh = Echo()
    play = paging.Play(mesh, 3)
    await play.start(tracks(10))
    assert 10 == len(play)

    waits_ms = await play.go_on(0.05)

    assert set(range(1, 11)) == set(mesh.steps)
    assert (10, len(waits_ms) + 10) == (len(play), mesh.steps.total())


async def test_as_many_callers_as_sequences_leave_none_out() -> None:
    play = paging.Play(Echo(), 3)
    await play.start(tracks(3))

    assert await play.go_on(0.02)


async def test_a_wrong_sum_ends_the_measurement() -> None:
    with pytest.raises(ExceptionGroup) as ended:
        await paging.Play(Echo(wrong=7), 3).start(tracks(10))

    assert ended.group_contains(StepError, match="sequence 7")


def test_the_numbers_of_live_sequences_rise_to_the_most() -> None:
    assert [512, 1000, 10_000, 100_000] == paging.live_numbers(100_000)
    assert [100] == paging.live_numbers(100)


def test_the_model_of_live_sequences_has_as_many_slots_as_asked_and_the_result_is_written(tmp_path: Path) -> None:
    paging.write_model(tmp_path)
    config = ModelRepository([tmp_path], Devices()).load(paging.MODEL).record.config
    assert (True, 5000, 64) == (
        config.pageable, slots_within(config, 5000 * paging.STATE_BYTES), config.configured_slots
    )  # fmt: skip

    per_step, memory = {"gateway": 500.0, "executor": 200.0, "client": 100.0}, {"executor": 70.0, "redis": 5.0}
    of_few = paging.Point(10, 512, 3, 30.0, 1.0, 2.0, 3.0, 4.0, 0.0, 0.0, 11.0, {"hset": 3.0}, per_step, memory, 0.1)
    of_many = replace(of_few, live=1000, share=0.8, paged_in=0.9)
    paging.write([of_few, of_many], 7, tmp_path)

    assert "| 10    | 1000 |      30 |  0.80 |" in (tmp_path / "paging.md").read_text()
    assert [0.0, 0.9] == [point["paged_in"] for point in json.loads((tmp_path / "paging.json").read_text())]
    assert (tmp_path / "paging.png").read_bytes().startswith(PNG_SIGNATURE)
