"""What `seqmesh doctor` concludes from facts."""

from __future__ import annotations

from typing import Any

import pytest

from deploy.operate.diagnoses import (
    Diagnosis,
    ServerFacts,
    Severity,
    of_cluster,
    of_disk,
    of_executors,
    of_fitness,
    of_gpus,
    of_leaders,
    of_models,
    of_open_files,
    of_ports,
    of_server,
    of_services,
)
from deploy.operate.doctor import report
from shared.contract.ids import ExecutorId
from shared.contract.messages import ExecutorRegistration, RepositoryEntry, ServedModel
from shared.store.company import ServiceLine
from shared.store.membership import Member
from shared.store.release import FORMAT, RELEASE
from shared.store.waiting_line import WaitingLine

INFO = {"redis_version": "7.2.4", "connected_slaves": 0, "role": "master", "used_memory": 1 << 20}
CONFIG = {"maxmemory-policy": "noeviction", "appendonly": "yes", "appendfsync": "everysec"}


def of_told(
    info: dict[str, Any], config: dict[str, str], *, round_trip: float = 0.1, skew: float = 0
) -> list[Diagnosis]:
    facts = ServerFacts({**INFO, **info}, {**CONFIG, **config}, round_trip, skew)
    return [one for one in of_server(facts) if one.severity is not Severity.OK]


@pytest.mark.parametrize(
    ("info", "severity", "told"),
    [
        (INFO, Severity.OK, "version 7.2.4, 0 replicas"),
        ({**INFO, "valkey_version": "9.1.2"}, Severity.OK, "Valkey 9.1.2, 0 replicas"),
        ({}, Severity.WARN, "does not tell who it is"),
        ({**INFO, "redis_version": "6.2.1"}, Severity.FAIL, "too old"),
        ({**INFO, "cluster_enabled": 1}, Severity.FAIL, "Cluster"),
    ],
)
def test_a_server_that_no_mesh_can_be_in_fails(info: dict[str, Any], severity: Severity, told: str) -> None:
    diagnosis = of_fitness(info)

    assert severity is diagnosis.severity
    assert told in diagnosis.text


@pytest.mark.parametrize(
    ("good", "wanted", "told"),
    [
        (0, 1, [(Severity.FAIL, "takes no writes: 0 of 1 replicas keep up (min-replicas-to-write)")]),
        (
            1,
            1,
            [
                (
                    Severity.WARN,
                    "takes no writes once a replica is lost: 1 keep up, and as many must (min-replicas-to-write)",
                )
            ],
        ),
        (2, 1, []),
    ],
)
def test_a_primary_that_lacks_replicas_takes_no_writes_or_soon_none(
    good: int, wanted: int, told: list[tuple[Severity, str]]
) -> None:
    found = of_told({"min_slaves_good_slaves": good}, {"min-replicas-to-write": str(wanted)})

    assert told == [(one.severity, one.text) for one in found]


def member(
    name: str, *, models: tuple[str, ...] = (), alive: bool = True, says_ready: bool = True, failed: str = ""
) -> Member:
    served = tuple(ServedModel(model, "1", 1, 4, says_ready=says_ready) for model in models)
    index = (RepositoryEntry("broken", "1", "UNAVAILABLE", failed),) if failed else ()
    registration = ExecutorRegistration(ExecutorId(f"{name}-1"), name, "host", 1, 0, served, index)
    return Member(registration, alive)


def test_a_server_that_can_hold_a_mesh_needs_no_remedy() -> None:
    assert [] == of_told({}, {})


@pytest.mark.parametrize(
    ("info", "config", "severity", "told"),
    [
        ({}, {"maxmemory-policy": "allkeys-lru"}, Severity.FAIL, "allkeys-lru may drop"),
        ({"aof_last_write_status": "err"}, {}, Severity.FAIL, "aof_last_write_status is err"),
        (
            {"rdb_last_bgsave_status": "err"},
            {"stop-writes-on-bgsave-error": "yes", "save": "60 1"},
            Severity.FAIL,
            "takes no writes: rdb_last_bgsave_status is err",
        ),
        (
            {"rdb_last_bgsave_status": "err"},
            {"stop-writes-on-bgsave-error": "yes", "save": ""},
            Severity.FAIL,
            "rdb_last_bgsave_status is err",
        ),
        ({}, {"appendonly": "no"}, Severity.WARN, "not durable"),
        ({"connected_slaves": 1}, {"min-replicas-to-write": "0"}, Severity.WARN, "fails over with losses"),
        ({"used_memory": 9 << 30, "maxmemory": 10 << 30}, {}, Severity.WARN, "90% of its memory"),
        ({"used_memory": 10 << 30, "maxmemory": 10 << 30}, {}, Severity.FAIL, "is full: 100% of its memory"),
    ],
)
def test_a_server_that_loses_sequences_fails_and_one_that_may_is_warned_of(
    info: dict[str, Any], config: dict[str, str], severity: Severity, told: str
) -> None:
    (diagnosis,) = of_told(info, config)

    assert diagnosis.severity is severity
    assert told in diagnosis.text
    assert diagnosis.remedy


def test_a_server_that_is_far_away_or_keeps_another_time_is_warned_of() -> None:
    assert ["a round trip takes 7.0 ms"] == [one.text for one in of_told({}, {}, round_trip=7)]
    assert ["this machine is 3.0 s behind Redis"] == [one.text for one in of_told({}, {}, skew=3000)]
    assert ["this machine is 3.0 s ahead of Redis"] == [one.text for one in of_told({}, {}, skew=-3000)]


def test_a_server_that_tells_nothing_is_no_proof() -> None:
    found = list(of_server(ServerFacts({}, {}, 0.1, 0)))

    assert ["does not tell its configuration"] == [one.text for one in found if one.severity is Severity.WARN]


def test_nodes_of_a_cluster_that_see_it_down_or_keep_other_times_are_named() -> None:
    whole, late = ServerFacts(INFO, CONFIG, 0.1, 5), ServerFacts(INFO, CONFIG, 0.1, -3000)
    cut_off = ServerFacts(INFO, CONFIG, 0.1, 0, is_whole=False)

    assert [] == list(of_cluster({"": cut_off}))
    assert ["2 nodes with slots"] == [one.text for one in of_cluster({"a:1": whole, "b:1": whole})]
    broken, late_clock = of_cluster({"a:1": whole, "b:1": cut_off, "c:1": late})
    assert (Severity.FAIL, True) == (broken.severity, broken.text.startswith("is down, as b:1 sees it"))
    assert (Severity.WARN, "c:1 is 3.0 s behind a:1") == (late_clock.severity, late_clock.text)


def test_a_node_that_has_lost_its_replica_is_named() -> None:
    bare, backed = (ServerFacts({**INFO, "connected_slaves": count}, CONFIG, 0.1, 0) for count in (0, 1))

    (_, lost) = of_cluster({"a:1": backed, "b:1": bare, "c:1": backed})

    assert lost.severity is Severity.WARN
    assert lost.text.startswith("no replica of b:1 is connected")
    assert [Severity.OK] == [one.severity for one in of_cluster({"a:1": bare, "b:1": bare})]


def test_each_kind_of_service_must_run_and_all_of_one_format() -> None:
    lines = [
        ServiceLine("gateway", "gateway-1", RELEASE, FORMAT, 0),
        ServiceLine("executor", "executor-1", "9.9", "other", 0),
    ]

    found = {one.severity: one.text for one in of_services(lines, 0, ()) if one.severity is not Severity.OK}

    assert "no scheduler runs" == found[Severity.FAIL]
    assert found[Severity.WARN].endswith("executor-1 (9.9)")


def test_a_service_that_was_killed_is_not_said_to_run() -> None:
    """Its line stays for a minute. That of one that was started again under its name is left out."""

    def line(service: str, name: str, told_ms: int) -> ServiceLine:
        return ServiceLine(service, name, RELEASE, FORMAT, told_ms)

    lines = [
        *(line("gateway", name, told_ms) for name, told_ms in (("a", 99_000), ("b", 76_000), ("c", 60_000))),
        line("gateway", "c", 99_000),
        line("scheduler", "s", 85_000),
        line("executor", "e", 85_001),
    ]

    found = [(one.severity, one.text) for one in of_services(lines, 100_000, ())]

    assert [
        (Severity.WARN, "2 gateways: a, c; b has told nothing for 24 s"),
        (Severity.FAIL, "no scheduler runs: s has told nothing for 15 s"),
        (Severity.OK, "1 executor: e"),
    ] == found
    lines = [line("scheduler", "s", 98_000), line("scheduler", "t", 98_000), line("executor", "s", 98_000)]
    assert "1 scheduler: t; s has told nothing for 2 s" in [one.text for one in of_services(lines, 100_000, {"s"})]


def test_executors_that_do_not_serve_are_named() -> None:
    found = list(of_executors([member("executor-1"), member("executor-2", alive=False)], ["executor-3"]))

    assert ["executor-2 has lost", "executor-3 is drained", "executor-1 is the"] == [
        " ".join(one.text.split()[:3]) for one in found
    ]


@pytest.mark.parametrize("runs_again", [False, True])
def test_an_executor_that_was_started_again_need_not_be_started(*, runs_again: bool) -> None:
    found = list(of_executors([member("executor-1", alive=False), member("executor-1", alive=runs_again)], []))

    assert runs_again is ("it runs again" in found[0].remedy)


def test_a_model_that_no_scheduler_leads_fails() -> None:
    """As where the schedulers hang: they still count as running for a minute."""
    (found,) = of_leaders({"a": True, "b": False})

    assert (Severity.FAIL, "model b") == (found.severity, found.subject)


def test_models_that_are_not_loaded_say_why() -> None:
    members = [member("executor-1", models=("a", "b"), failed="unexpected inference input"), member("executor-2")]

    found = list(of_models(members, {"b": WaitingLine(first=3)}, {"a": 5}))

    assert [
        (Severity.FAIL, "model broken", "unexpected inference input"),
        (Severity.OK, "model a", ""),
        (Severity.WARN, "model b", "run more executors"),
    ] == [(one.severity, one.subject, one.remedy) for one in found]
    for lines, live, text in (
        ({"gone": WaitingLine(first=1)}, {"broken": 1}, "no executor serves it, and sequences wait"),
        ({}, {"gone": 2}, "no executor serves it, and it has 2 open sequences"),
    ):
        (unserved,) = [one for one in of_models(members, lines, live) if "no executor" in one.text]
        assert (Severity.FAIL, "model gone", text) == (unserved.severity, unserved.subject, unserved.text)
    lost = [member("executor-1", models=("a",), alive=False)]
    for drained_or_lost in ([], lost):
        assert ["no executor takes work, so none is served"] == [
            one.text for one in of_models(drained_or_lost, {}, {"a": 1})
        ]
    assert ["no model is loaded"] == [one.text for one in of_models([member("executor-1")], {}, {})]
    assert ["calls itself not ready on executor-1"] == [
        one.text
        for one in of_models([member("executor-1", models=("a",), says_ready=False)], {}, {})
        if one.severity is Severity.WARN
    ]


def test_a_model_that_is_being_loaded_is_named_with_the_time_since_when() -> None:
    since = "since 2026-11-29 03:00:00 UTC"
    index = (RepositoryEntry("m", "", "LOADING", since),)

    registration = ExecutorRegistration(ExecutorId("a-1"), "executor-1", "host", 1, 0, (), index)

    found = of_models([Member(registration, alive=True)], {}, {})

    assert ("model m", f"is being loaded {since} (executor-1)") in [(one.subject, one.text) for one in found]


def test_a_failure_that_executors_share_is_told_once() -> None:
    names = ("executor-1", "executor-2", "executor-3")
    members = [member(name, failed="no weights" if name == "executor-3" else "dims") for name in names]

    failures = [one for one in of_models(members, {}, {}) if one.subject == "model broken"]

    assert [("version 1 on executor-1, executor-2", "dims"), ("version 1 on executor-3", "no weights")] == [
        (one.text.removeprefix("is not loaded (").rstrip(")"), one.remedy) for one in failures
    ]


@pytest.mark.parametrize(
    ("index", "remedy"),
    [
        ((), "give the executors a repository with models (--models)"),
        (
            (RepositoryEntry("b"), RepositoryEntry("a #1", "1", "UNAVAILABLE", "unloaded")),
            "ask a gateway to load one of a #1, b: POST /v2/repository/models/a%20%231/load",
        ),
        ((RepositoryEntry("broken", "1", "UNAVAILABLE", "dims"),), "mend those above"),
    ],
)
def test_where_no_model_is_loaded_the_remedy_is_by_what_there_is(
    index: tuple[RepositoryEntry, ...], remedy: str
) -> None:
    """In mode explicit none is loaded until somebody asks for it."""
    registration = ExecutorRegistration(ExecutorId("a-1"), "a", "host", 1, 0, (), index)

    *_, last = of_models([Member(registration, alive=True)], {}, {})

    assert "no model is loaded" == last.text
    assert last.remedy.startswith(remedy)


def test_a_model_that_is_served_as_it_was_before_its_last_load_is_warned_of() -> None:
    served = (ServedModel("m", "1", 1, 4, says_ready=True),)
    index = (RepositoryEntry("m", "1", "READY", "the last load failed: dims"), RepositoryEntry("n", "1", "READY"))
    registration = ExecutorRegistration(ExecutorId("a-1"), "a", "host", 1, 0, served, index)

    told = [one for one in of_models([Member(registration, alive=True)], {}, {}) if one.severity is not Severity.OK]

    assert [(Severity.WARN, "model m", "the last load failed: dims")] == [
        (o.severity, o.subject, o.remedy) for o in told
    ]


def test_what_a_machine_lacks_is_warned_of() -> None:
    assert [Severity.WARN, Severity.OK, Severity.OK] == [of_open_files(limit).severity for limit in (1024, 65536, -1)]
    severities = [of_disk(free, "/data").severity for free in (1 << 20, 1 << 25, 1 << 40)]
    assert [Severity.FAIL, Severity.WARN, Severity.OK] == severities
    assert Severity.WARN is of_gpus(["H200"], "", "2.13.0+cpu").severity
    assert Severity.OK is of_gpus(["H200"], "", "2.13.0+cu130").severity
    assert Severity.OK is of_gpus([], "", "2.13.0+cpu").severity
    assert Severity.WARN is of_gpus([], "the driver does not answer", "").severity
    found = list(of_ports([("--http-port", 8000, "in use"), ("--grpc-port", 8001, "")]))

    assert ["8000: in use", "free: 8001"] == [one.text for one in found]
    assert "stop what runs there, or give `seqmesh up` another --http-port" == found[0].remedy


def test_a_remedy_stands_below_its_finding() -> None:
    text = report([Diagnosis(Severity.OK, "disk", "room"), Diagnosis(Severity.FAIL, "redis", "gone", "start it")])

    assert ["ok    disk   room", "FAIL  redis  gone", "             -> start it"] == text.replace(
        "\x1b[0m", ""
    ).replace("\x1b[32m", "").replace("\x1b[31m", "").splitlines()[:3]
    assert text.endswith("2 diagnoses: 1 failed, 0 to look at")


def test_a_remedy_of_several_lines_stays_below_its_finding() -> None:
    text = report([Diagnosis(Severity.FAIL, "model a", "is not loaded", "SyntaxError\n\nAt:\n  model.py(5)\n")])

    assert ["               -> SyntaxError", "", "                  At:", "                    model.py(5)"] == (
        text.splitlines()[1:5]
    )


def test_the_terminal_obeys_nothing_that_a_model_says() -> None:
    text = report([Diagnosis(Severity.FAIL, "model a", "is not loaded", "boom \x1b[2J \x07")])

    assert "               -> boom \\x1b[2J \\x07" == text.splitlines()[1]
