"""The images and compose.yaml, as a user has them: driven from outside with tritonclient, and broken on purpose.

A step that was lost would be missing in every later sum of its sequence, one that ran twice would be in it twice.
"""

from __future__ import annotations

import asyncio
import base64
import json
import random
import re
import secrets
from pathlib import Path

import aiohttp
import pytest

from shared.contract.ids import sequence_id
from shared.traces.context import sequence_trace_id
from tests.e2e.compose_mesh import COMMAND_TIMEOUT_S, SERVICES, ComposeMesh, docker, wait_for
from tests.e2e.open_sums import MODEL, callers_of, open_sums
from tests.mesh.traffic import Step

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800)]

PROBE = """
import importlib.util, json, os, shutil
def is_writable(directory):
    try:
        open(os.path.join(directory, "probe"), "w").close()
    except OSError:
        return False
    return True
print(json.dumps({
    "user": os.getuid(),
    "torch": importlib.util.find_spec("torch") is not None,
    "compiler": shutil.which("gcc") is not None,
    "capabilities": next(line.split()[1] for line in open("/proc/self/status") if line.startswith("CapEff")),
    "writable": [directory for directory in ("/", "/opt/venv", "/models", "/tmp") if is_writable(directory)],
}))
"""


def test_images_hold_what_their_service_needs_and_containers_may_do_little(mesh: ComposeMesh) -> None:
    """torch is in the executor's image only; no compiler, no root, no capability; nothing is writable but /tmp."""
    found = {service: mesh.python(service, PROBE) for service in ("gateway", "scheduler", "executor", "console")}

    little = {"compiler": False, "capabilities": "0" * 16, "writable": ["/tmp"]}
    without_root = {service: {name: probe[name] for name in little} for service, probe in found.items()}
    assert dict.fromkeys(found, little) == without_root
    assert 0 not in [probe["user"] for probe in found.values()]
    assert ["executor"] == [service for service, probe in found.items() if probe["torch"]]


def test_every_container_is_bounded_and_sees_only_what_it_needs(mesh: ComposeMesh) -> None:
    services = json.loads(mesh.compose("config", "--format", "json"))["services"]

    for service, said in services.items():
        assert ["ALL"] == said["cap_drop"], service
        assert ["no-new-privileges:true"] == said["security_opt"], service
        assert said["read_only"], service
        assert int(said["mem_limit"]) > 0, service
        assert int(said["pids_limit"]) > 0, service
        assert {"max-size": "32m", "max-file": "2"} == said["logging"]["options"], service
    networks = {service: set(said.get("networks") or {}) for service, said in services.items()}
    assert {"gateway", "console"} == {service for service, seen in networks.items() if "front" in seen}
    behind = {"redis", "gateway", "scheduler", "executor", "console"}
    assert behind == {service for service, seen in networks.items() if "back" in seen}
    assert {"traces"} == networks["collector"]
    assert "none" == services["secret"]["network_mode"]


def test_no_container_has_a_volume_without_a_name(mesh: ComposeMesh) -> None:
    """Which `docker compose down` would leave behind, another one each time."""
    containers = [one for service in (*SERVICES, "secret") for one in mesh.containers(service)]
    mounts = [mount for one in containers for mount in mesh.inspect(one)["Mounts"]]

    named = {f"{mesh.project}_{name}" for name in ("redis", "secret")}
    assert named == {mount["Name"] for mount in mounts if mount["Type"] == "volume"}


def test_redis_wants_its_password_and_keeps_its_files_to_itself(mesh: ComposeMesh) -> None:
    said = mesh.compose("exec", "-T", "redis", "redis-cli", "ping")
    modes = mesh.compose("exec", "-T", "redis", "sh", "-c", "stat -c %a /data/appendonlydir /data/appendonlydir/*")
    environment = docker("inspect", "--format", "{{.Config.Env}} {{.Args}}", mesh.container("scheduler"))
    (password,) = mesh.compose("exec", "-T", "redis", "sh", "-c", "cut -d ' ' -f 2 /secret/redis.conf").split()

    assert "NOAUTH" in said
    assert 48 == len(password)
    assert password not in environment
    assert {"700", "600"} == set(modes.split())


def test_an_executor_reaches_nothing_outside(mesh: ComposeMesh) -> None:
    """Of its networks none has a way out: not to this machine either."""
    program = "import json; print(json.dumps([line.split()[1] for line in open('/proc/net/route')][1:]))"

    assert "00000000" not in mesh.python("executor", program)


def test_the_file_for_gpus_asks_for_all_of_them_and_changes_nothing_else(mesh: ComposeMesh) -> None:
    plain, with_gpus = (
        json.loads(mesh.compose("-f", "compose.yaml", *more, "config", "--format", "json"))
        for more in ((), ("-f", "deploy/compose.gpu.yaml"))
    )

    resources = with_gpus["services"]["executor"]["deploy"].pop("resources")
    (devices,) = resources["reservations"]["devices"]
    assert ("nvidia", ["gpu"]) == (devices["driver"], devices["capabilities"])
    assert devices["count"] in {-1, "all"}
    assert "SEQMESH_GPU" in with_gpus["services"]["executor"]["environment"]
    del with_gpus["services"]["executor"]["environment"]["SEQMESH_GPU"]
    plain["services"]["executor"]["deploy"].pop("resources", None)
    assert plain == with_gpus


def test_the_file_for_traces_adds_a_viewer_and_tells_the_collector_of_it(mesh: ComposeMesh) -> None:
    plain, with_viewer = (
        json.loads(mesh.compose("-f", "compose.yaml", *more, "config", "--format", "json"))
        for more in ((), ("-f", "deploy/compose.traces.yaml"))
    )

    viewer = with_viewer["services"].pop("viewer")
    assert "traces" in viewer["networks"]
    assert plain["services"]["collector"]["logging"] == viewer["logging"]
    assert ["127.0.0.1"] == [port["host_ip"] for port in viewer["ports"]]
    before, after = plain["services"].pop("collector"), with_viewer["services"].pop("collector")
    assert before["command"] == after["command"][:1]
    sources = [volume["source"] for volume in after["volumes"]]
    assert all(Path(source).is_file() for source in sources)
    assert plain == with_viewer


async def test_sums_are_right_and_nobody_sees_an_error_though_an_executor_is_killed(
    mesh: ComposeMesh, chance: random.Random
) -> None:
    executors = {mesh.host_of(container): container for container in mesh.containers("executor")}
    async with open_sums(mesh, chance) as sums:
        owned = await asyncio.to_thread(mesh.sequences_of, MODEL)
        assert set(executors) == {host for host, count in owned.items() if count > 0}, "both have some to lose"
        victim = executors[chance.choice(list(executors))]
        restarts = mesh.inspect(victim)["RestartCount"]

        mesh.kill_process(victim)

        await sums.all_answer()
    wait_for(lambda: mesh.inspect(victim)["RestartCount"] == restarts + 1, "Docker starts it again, once")
    mesh.wait_until_healthy(victim)


async def test_sums_are_right_and_nobody_sees_an_error_though_redis_restarts(
    mesh: ComposeMesh, chance: random.Random
) -> None:
    """A restart, not SIGKILL: with `appendfsync everysec` a killed server may lose the writes of its last moments."""
    async with open_sums(mesh, chance) as sums:
        await asyncio.to_thread(restart, mesh, mesh.container("redis"))
        await sums.all_answer()


async def test_executors_stopped_one_after_the_other_hand_their_sequences_over(
    mesh: ComposeMesh, chance: random.Random
) -> None:
    """As in a rolling update: each leaves by itself within its grace period, and no caller sees an error."""
    executors = mesh.containers("executor")
    async with open_sums(mesh, chance) as sums:
        for container in executors:
            await asyncio.to_thread(restart, mesh, container)
            await sums.all_answer()


def restart(mesh: ComposeMesh, container: str) -> None:
    """Stops a container, starts it again, and waits until it is healthy. 137: it had to be killed."""
    grace_s = mesh.inspect(container)["Config"]["StopTimeout"]
    docker("stop", "--time", str(grace_s), container)
    assert 0 == exit_code(mesh, container)
    docker("start", container)
    mesh.wait_until_healthy(container)


async def test_sequences_spread_over_executors_that_are_added_and_move_from_those_that_go(
    mesh: ComposeMesh, chance: random.Random
) -> None:
    await asyncio.to_thread(mesh.up, executor=4)
    hosts = {mesh.host_of(container) for container in mesh.containers("executor")}
    async with open_sums(mesh, chance):
        owned = await asyncio.to_thread(mesh.sequences_of, MODEL)

        await asyncio.to_thread(mesh.up, executor=2)

    assert 4 == len(hosts)
    assert hosts == {host for host, count in owned.items() if count > 0}
    assert 2 == len(mesh.containers("executor"))


async def test_a_mesh_stopped_and_started_again_goes_on_where_it_was(mesh: ComposeMesh, chance: random.Random) -> None:
    """Every service stops by itself within its grace period; the sequences wait in the volume of redis."""
    identity, first, second = chance.randint(1, 1 << 62), 41, 1
    async with callers_of(mesh) as callers:
        assert first == await callers[0](MODEL, Step(identity, first, start=True))

    await asyncio.to_thread(mesh.compose, "stop")
    services = ("gateway", "executor", "scheduler", "console", "redis")
    codes = {service: {exit_code(mesh, container) for container in mesh.containers(service)} for service in services}
    await asyncio.to_thread(mesh.up)

    assert {service: {0} for service in services} == codes
    async with callers_of(mesh) as callers:
        assert first + second == await callers[1](MODEL, Step(identity, second, end=True))


def exit_code(mesh: ComposeMesh, container: str) -> int:
    """With which a stopped container's process ended."""
    state = mesh.inspect(container)["State"]
    assert not state["Running"]
    return state["ExitCode"]


async def test_the_console_shows_the_executors_to_whoever_has_the_token_of_its_log(mesh: ComposeMesh) -> None:
    """Its page comes to everybody; what it shows does not."""
    url = f"http://{mesh.address(8003, mesh.container('console'))}"
    tokens = re.findall(r"#token=([\w-]+)", mesh.logs("console"))
    signed_in = {"authorization": f"Bearer {tokens[-1]}"}
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{url}/") as page:
            assert 200 == page.status
            assert "<title>" in await page.text()
        async with session.get(f"{url}/api/live") as refused:
            assert 403 == refused.status
        async with session.get(f"{url}/api/live", headers=signed_in) as live:
            assert 200 == live.status
            shown = ""
            async with asyncio.timeout(COMMAND_TIMEOUT_S):
                while not all(executor.name in shown for executor in mesh.executors()):
                    shown += (await live.content.readany()).decode()


async def test_the_spans_of_a_sequence_reach_the_collector(mesh: ComposeMesh) -> None:
    """All under one trace, whose id is known beforehand, from every service that touched the sequence."""
    identity = f"traced {secrets.token_hex(8)}"
    async with callers_of(mesh) as callers:
        for number in range(3):
            await callers[number % 2](MODEL, Step(identity, number, start=number == 0, end=number == 2))

    expected = {"sequence.start", "step", "gateway", "queue", "compute", "checkpoint", "reply", "sequence.end"}
    trace = sequence_trace_id(sequence_id(MODEL, "", identity))
    wait_for(
        lambda: expected <= spans_of(mesh, trace), f"the collector prints, of trace {trace:032x}: {sorted(expected)}"
    )


def spans_of(mesh: ComposeMesh, trace_id: int) -> set[str]:
    """Names of the spans that the collector has printed of a trace, one line each.

    Collectors differ: `<name> <trace id in hex> ...` (the `debug` exporter), or the span as JSON, its id in base64.
    """
    text = base64.b64encode(trace_id.to_bytes(16, "big")).decode()
    lines = mesh.logs("collector").splitlines()
    return {line.split()[0] for line in lines if f"{trace_id:032x}" in line} | {
        json.loads(line)["data"]["name"] for line in lines if line.startswith("{") and text in line
    }
