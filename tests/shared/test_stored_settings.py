"""Log and trace settings: what a change may say, whom it reaches, and that two changes never undo each other."""

from __future__ import annotations

import asyncio
import io
from typing import Any

import pytest

from shared.contract.errors import Code, RequestError
from shared.process import log_settings, logs
from shared.process.log_settings import LogSettings
from shared.process.logs import Level
from shared.store.commands import Redis
from shared.store.keyspace import Keyspace
from shared.stored_settings import ChangedSettings, ProcessSettings, StoredSettings, changed_settings_of
from shared.traces import settings as trace_settings
from shared.traces.context import ALWAYS, Sampler, new_trace_id
from shared.traces.control import TraceControl
from shared.traces.tracing import NO_STEP, Tracing
from tests.shared.conftest import Configure
from tests.shared.traces.test_tracing import Kept


@pytest.fixture
def keys(key_prefix: str) -> Keyspace:
    return Keyspace(key_prefix)


@pytest.fixture
def own_logging(configured: Configure) -> io.StringIO:
    """Where this test's log lines go."""
    return configured()


# -- trace settings, what a request may say ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message", "code"),
    [
        ({"trace_rate": ["x"]}, "Unable to parse 'trace_rate', got: x", Code.INVALID_ARG),
        ({"trace_rate": [""]}, "Unable to parse 'trace_rate', got: ", Code.INVALID_ARG),
        ({"trace_rate": ["1", "2"]}, "expect only 1 value for 'trace_rate'", Code.INVALID_ARG),
        (
            {"trace_rate": ["99999999999999"]},
            "Unable to parse 'trace_rate', value is out of range [ 0, 4294967295 ], got: 99999999999999",
            Code.INVALID_ARG,
        ),
        (
            {"trace_count": ["-2"]},
            "Unable to parse 'trace_count'. Expecting value >= -1, got: -2",
            Code.INVALID_ARG,
        ),
        ({"log_frequency": ["x"]}, "Unable to parse 'log_frequency', got: x", Code.INVALID_ARG),
        ({"trace_level": ["OFF", "TENSORS"]}, "Expect only one trace level 'OFF' is specified", Code.INVALID_ARG),
        (
            {"trace_file": None},
            "trace file location can not be updated through network protocol",
            Code.UNSUPPORTED,
        ),
    ],
)
def test_wrong_trace_settings_are_refused_with_tritons_words(given: Any, message: str, code: Code) -> None:
    with pytest.raises(RequestError) as refused:
        trace_settings.parse(given, exporting=True)

    assert refused.value.message == message
    assert refused.value.code == code


def test_levels_need_an_exporter_as_tritons_need_a_file() -> None:
    with pytest.raises(RequestError, match="Attempting to set invalid trace setting :no exporter is given"):
        trace_settings.parse({"trace_level": ["TIMESTAMPS"]}, exporting=False)

    assert trace_settings.parse({"trace_level": ["OFF"]}, exporting=False) == {"trace_level": ("OFF",)}
    assert trace_settings.parse({"trace_level": ["TENSORS", "X"]}, exporting=True) == {"trace_level": ("TENSORS",)}


def test_traces_are_opentelemetrys() -> None:
    assert trace_settings.TraceSettings().texts()["trace_mode"] == ["opentelemetry"]


def test_null_takes_a_setting_back_and_unknown_names_are_ignored() -> None:
    changes = trace_settings.parse({"trace_rate": None, "trace_count": [], "color": ["red"]}, exporting=True)

    assert changes == {"trace_rate": None, "trace_count": None}


# -- trace settings, what they do --------------------------------------------------------------------------------------


def traced(control: TraceControl, model: str, requests: int) -> int:
    return sum(control.sampler(model).samples(new_trace_id()) and control.take(model) for _ in range(requests))


def test_without_changes_the_environment_decides() -> None:
    assert traced(TraceControl(Sampler(), exporting=True), "m", 10) == 10
    assert traced(TraceControl(Sampler(0), exporting=True), "m", 10) == 0
    assert TraceControl(Sampler(ALWAYS // 4), exporting=True).settings().texts()["trace_rate"] == ["4"]
    assert TraceControl(Sampler(), exporting=False).settings().texts()["trace_level"] == ["OFF"]


def test_a_models_settings_win_over_the_meshs() -> None:
    control = TraceControl(Sampler(), exporting=True)
    control.apply({"": {"trace_level": ("OFF",)}, "loud": {"trace_level": ("TIMESTAMPS",)}})

    assert traced(control, "quiet", 10) == 0
    assert traced(control, "loud", 10) == 10

    control.apply({})
    assert traced(control, "quiet", 10) == 10


def test_a_rate_samples_about_one_trace_in_so_many_and_every_process_the_same_ones() -> None:
    here, there = TraceControl(Sampler(), exporting=True), TraceControl(Sampler(), exporting=False)
    for control in (here, there):
        control.apply({"": {"trace_rate": 8, "trace_level": ("TIMESTAMPS",)}})
    ids = [new_trace_id() for _ in range(4000)]
    chosen = [trace_id for trace_id in ids if here.sampler("m").samples(trace_id)]

    assert 300 < len(chosen) < 750
    assert chosen == [trace_id for trace_id in ids if there.sampler("m").samples(trace_id)]


def test_a_count_is_used_up() -> None:
    control = TraceControl(Sampler(), exporting=True)
    control.apply({"": {"trace_count": 3}, "own": {"trace_count": 1}})

    assert traced(control, "m", 10) == 3
    assert traced(control, "own", 10) == 1
    assert control.used() == {"": 3, "own": 1}
    control.counted({"": 2, "own": 1})
    assert control.used() == {"": 1}


def test_settings_reach_the_spans() -> None:
    spans = Kept()
    tracing = Tracing(spans, Sampler())
    tracing.control.apply({"m": {"trace_count": 1}})
    first, second = (tracing.begin_step(None, "m", start=False, trace_headers={}) for _ in range(2))
    first.end()
    second.end()

    assert second is NO_STEP
    assert len([span for span in spans.spans if span.name == "step"]) == 1


@pytest.mark.parametrize(
    ("text", "refusal"),
    [("9" * 5000, "value is out of range"), ("-" + "9" * 5000, "value is out of range"), ("٣", "Unable to parse")],
)
def test_a_number_is_read_by_no_more_than_its_digits(text: str, refusal: str) -> None:
    with pytest.raises(RequestError, match=refusal):
        trace_settings.parse({"trace_rate": [text]}, exporting=True)


def test_zeros_before_a_number_do_not_count() -> None:
    assert {"trace_rate": 5, "trace_count": -1} == trace_settings.parse(
        {"trace_rate": ["0" * 30 + "5"], "trace_count": ["-" + "0" * 30 + "1"]}, exporting=True
    )
    assert {"trace_rate": 0} == trace_settings.parse({"trace_rate": ["00"]}, exporting=True)


# -- log settings ------------------------------------------------------------------------------------------------------


def test_a_process_begins_with_its_own_level() -> None:
    assert log_settings.of_level(Level.INFO) == LogSettings()
    assert log_settings.of_level(Level.WARNING).levels() == {Level.WARNING, Level.ERROR}
    assert log_settings.of_level(Level.DEBUG).log_verbose_level == 1


def test_wrong_log_settings_are_refused_with_tritons_words() -> None:
    with pytest.raises(RequestError, match="invalid argument for log_format, got: x"):
        log_settings.check({"log_format": "x"})
    with pytest.raises(RequestError, match="invalid argument for log_verbose_level, got: 4294967296"):
        log_settings.check({"log_verbose_level": 1 << 32})  # the gRPC extension has no room for it
    with pytest.raises(RequestError, match="log file location can not be updated through network protocol") as refused:
        log_settings.check({"log_file": "x"})
    assert refused.value.code == Code.UNSUPPORTED


def test_only_the_chosen_levels_are_written(own_logging: io.StringIO) -> None:
    logs.choose(LogSettings(log_warning=False, log_verbose_level=1).levels())
    logs.debug("small")
    logs.info("usual")
    logs.warning("odd")
    logs.error("broken")
    written = [line.split()[2] for line in own_logging.getvalue().splitlines()]

    assert written == ["small", "usual", "broken"]


# -- for the whole mesh ------------------------------------------------------------------------------------------------


async def test_changes_reach_every_process_and_leave_each_other_alone(
    redis: Redis, keys: Keyspace, own_logging: io.StringIO
) -> None:
    mesh = StoredSettings(redis, keys)
    here, there = TraceControl(Sampler(), exporting=True), TraceControl(Sampler(), exporting=False)
    processes = [ProcessSettings(mesh, control, Level.INFO) for control in (here, there)]
    await asyncio.gather(
        mesh.change_logs({"log_info": False, "unknown": 1}),
        mesh.change_logs({"log_verbose_level": 2}),
        mesh.change_traces("", {"trace_rate": 5}),
        mesh.change_traces("m", {"trace_count": 7, "trace_level": ("TIMESTAMPS",)}),
    )
    for process in processes:
        await process.refresh()

    for process in processes:
        assert process.logs == LogSettings(log_info=False, log_verbose_level=2)
    assert here.settings("m") == there.settings("m")
    assert (here.settings("m").trace_rate, here.settings("m").trace_count) == (5, 7)

    await mesh.change_traces("m", {"trace_count": None})
    await processes[0].refresh()
    assert here.settings("m").trace_count == trace_settings.UNLIMITED


async def test_traced_requests_are_counted_over_all_gateways(
    redis: Redis, keys: Keyspace, own_logging: io.StringIO
) -> None:
    mesh = StoredSettings(redis, keys)
    controls = [TraceControl(Sampler(), exporting=True) for _ in range(2)]
    processes = [ProcessSettings(mesh, control, Level.INFO) for control in controls]
    await mesh.change_traces("", {"trace_count": 5})
    for process in processes:
        await process.refresh()
    assert traced(controls[0], "m", 3) == 3
    for process in processes:
        await process.refresh()

    assert traced(controls[1], "m", 10) == 2


@pytest.mark.parametrize("lost", ["count_traces", "read"])
async def test_a_traced_request_is_counted_once_though_redis_is_lost_meanwhile(
    redis: Redis, keys: Keyspace, own_logging: io.StringIO, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    mesh = StoredSettings(redis, keys)
    control = TraceControl(Sampler(), exporting=True)
    process = ProcessSettings(mesh, control, Level.INFO)
    for model in ("first", "second"):
        await mesh.change_traces(model, {"trace_count": 10})
    await process.refresh()
    assert [3, 3] == [traced(control, model, 3) for model in ("first", "second")]
    work = getattr(mesh, lost)

    async def losing(*of: Any) -> Any:
        if of[:1] != ("first",):
            raise ConnectionError
        return await work(*of)

    with monkeypatch.context() as away:
        away.setattr(mesh, lost, losing)
        for _ in range(2):
            with pytest.raises(ConnectionError):
                await process.refresh()
    await process.refresh()

    assert [7, 7] == [traced(control, model, 100) for model in ("first", "second")]


def test_fields_of_a_newer_release_are_left_out() -> None:
    assert (
        changed_settings_of({b"log:log_color": b'"red"', b"trace:trace_color:m": b"1", b"x": b"{}"}, "key")
        == ChangedSettings()
    )


async def test_a_count_that_several_gateways_use_up_never_becomes_unlimited(
    redis: Redis, keys: Keyspace, own_logging: io.StringIO
) -> None:
    mesh = StoredSettings(redis, keys)
    controls = [TraceControl(Sampler(), exporting=True) for _ in range(2)]
    processes = [ProcessSettings(mesh, control, Level.INFO) for control in controls]
    await mesh.change_traces("", {"trace_count": 1})
    for process in processes:
        await process.refresh()
    assert [1, 1] == [traced(control, "m", 5) for control in controls], "each still has the one"
    for _ in range(2):
        await asyncio.gather(*(process.refresh() for process in processes))

    assert [0, 0] == [traced(control, "m", 5) for control in controls]
    assert ["0"] == controls[0].settings().texts()["trace_count"]


@pytest.mark.parametrize("unlimited", [None, trace_settings.UNLIMITED])
async def test_a_count_that_was_taken_back_stays_away(
    redis: Redis, keys: Keyspace, own_logging: io.StringIO, unlimited: int | None
) -> None:
    mesh = StoredSettings(redis, keys)
    control = TraceControl(Sampler(), exporting=True)
    process = ProcessSettings(mesh, control, Level.INFO)
    await mesh.change_traces("m", {"trace_count": 5})
    await process.refresh()
    assert traced(control, "m", 3) == 3
    await mesh.change_traces("m", {"trace_count": unlimited})
    await process.refresh()

    if unlimited is None:
        assert ChangedSettings() == await mesh.read()
    assert traced(control, "m", 10) == 10


async def test_who_silences_a_mesh_is_named_in_every_log_and_the_way_back_is_open(
    redis: Redis, keys: Keyspace, own_logging: io.StringIO
) -> None:
    mesh = StoredSettings(redis, keys)
    process = ProcessSettings(mesh, TraceControl(Sampler(), exporting=True), Level.INFO)
    silence = {"log_info": False, "log_warning": False, "log_error": False}
    for _ in range(2):
        await mesh.change_logs(silence, "HTTP client 10.0.0.7:5 through g")
        await process.refresh()
        await process.refresh()
    logs.error("nobody hears this")

    # Each change once, though nothing else is written.
    said = own_logging.getvalue().splitlines()
    assert ["NOTICE", "NOTICE"] == [line.split()[1] for line in said]
    assert all('by="HTTP client 10.0.0.7:5 through g at ' in line for line in said)
    assert Level.NOTICE is logs.level_of_line(said[0])

    await mesh.change_traces("m", {"trace_rate": 5}, "gRPC client ipv4:10.0.0.8:6 through g")
    await mesh.reset("an operator")
    await process.refresh()
    logs.error("everybody hears this")

    said = own_logging.getvalue().splitlines()[len(said) :]
    assert ["NOTICE", "NOTICE", "ERROR"] == [line.split()[1] for line in said]
    assert LogSettings() == process.logs
    assert {} == (changed := await mesh.read()).logs == changed.traces
    assert changed.by["traces"].startswith("an operator at ")

    await mesh.reset("another operator")
    await ProcessSettings(mesh, TraceControl(Sampler(), exporting=True), Level.INFO).refresh()
    assert said == own_logging.getvalue().splitlines()[-len(said) :], "nothing is changed any more"


async def test_a_reset_where_nothing_was_changed_leaves_nothing(redis: Redis, keys: Keyspace) -> None:
    """Every process that starts later would tell of it."""
    settings = StoredSettings(redis, keys)

    await settings.reset("somebody")

    assert ChangedSettings() == await settings.read()
