"""The HTTP server: keep-alive, pipelining, chunks, limits, CORS, listeners."""

import asyncio
import contextlib
import gc
import json
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from paddock.envd.config import Config
from paddock.envd.metrics import Meter
from paddock.envd.process.direct_spawner import DirectSpawner
from paddock.envd.sandbox_context import InitRequest
from paddock.envd.server import Envd
from tests.envd.rig import Rig, close_rig, frame, open_rig

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    opened = await open_rig(tmp_path)
    yield opened
    await close_rig(opened)


async def test_connections_are_reused_and_pipelined_responses_keep_their_order(
    rig: Rig,
) -> None:
    wire = await rig.wire()
    stat = json.dumps({"path": "x"}).encode()
    request = b"POST /filesystem.Filesystem/%b HTTP/1.1\r\nContent-Type: application/json\r\n"
    request += b"Content-Length: %d\r\n\r\n%b"
    batch = b"GET /health HTTP/1.1\r\n\r\n"
    batch += request % (b"MakeDir", len(stat), stat)
    batch += request % (b"Stat", len(stat), stat)
    batch += request % (b"Remove", len(stat), stat)
    batch += request % (b"Stat", len(stat), stat)

    for _ in range(3):
        wire.writer.write(batch)
        statuses = [(await wire.response()).status for _ in range(5)]
        assert statuses == [204, 200, 200, 200, 404]
    wire.close()


async def test_a_request_split_into_single_bytes_is_parsed(rig: Rig) -> None:
    wire = await rig.wire()
    request = (
        b"POST /process.Process/List HTTP/1.1\r\nContent-Type: application/json\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n1\r\n}\r\n0\r\n\r\n"
    )
    for byte in request:
        wire.writer.write(bytes([byte]))
        await asyncio.sleep(0)

    assert (await wire.response()).status == 200
    wire.close()


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"NONSENSE\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nbroken header\r\n\r\n", 400),
        (b"GET /x HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n", 400),
        (b"GET /" + b"a" * 100_000, 431),
        (b"GET / HTTP/1.1\r\nX: " + b"a" * 100_000, 431),
        (b"POST /health HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", None),
    ],
)
async def test_malformed_requests_close_the_connection(
    rig: Rig, sent: bytes, status: int | None
) -> None:
    wire = await rig.wire()
    wire.writer.write(sent)
    async with asyncio.timeout(20):
        if status is not None:
            assert (await wire.response()).status == status
        with contextlib.suppress(ConnectionResetError):
            await wire.reader.read()
    assert (await rig.request("GET", "/health")).status == 204
    wire.close()


async def test_http_1_0_is_answered_and_closed(rig: Rig) -> None:
    wire = await rig.wire()
    wire.writer.write(b"GET /envs HTTP/1.0\r\n\r\n")

    answer = await wire.response()

    assert (answer.status, answer.headers["connection"]) == (200, "close")
    assert await wire.reader.read() == b""
    wire.close()


async def test_a_stream_response_starts_after_the_request_is_read(rig: Rig) -> None:
    wire = await rig.wire()
    await wire.send(
        "POST",
        "/process.Process/Start",
        {"content-type": "application/connect+json", "transfer-encoding": "chunked"},
    )
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await wire.reader.readexactly(1)

    wire.writer.write(b"0\r\n\r\n")

    answer = await wire.response()
    assert b"invalid_argument" in answer.body
    wire.close()


async def test_a_request_that_ends_after_its_response_keeps_the_connection(rig: Rig) -> None:
    wire = await rig.wire()
    message = frame({"process": {"cmd": "/bin/true"}})

    for _ in range(3):
        await wire.send(
            "POST",
            "/process.Process/Start",
            {"content-type": "application/connect+json", "transfer-encoding": "chunked"},
        )
        wire.writer.write(b"%x\r\n%b\r\n" % (len(message), message))
        answer = await wire.response()
        wire.writer.write(b"0\r\n\r\n")
        assert b"exit status 0" in answer.body
    wire.close()


async def test_cross_origin_requests_are_allowed(rig: Rig) -> None:
    asked = await rig.request(
        "OPTIONS",
        "/process.Process/Start",
        origin="https://app.example",
        access_control_request_method="POST",
    )
    answered = await rig.request("GET", "/envs", origin="https://app.example")
    plain = await rig.request("GET", "/envs")

    assert asked.status == 204
    assert asked.headers["access-control-allow-origin"] == "*"
    assert "POST" in asked.headers["access-control-allow-methods"]
    assert asked.headers["access-control-allow-headers"] == "*"
    assert answered.headers["access-control-allow-origin"] == "*"
    assert "access-control-allow-origin" not in plain.headers


async def test_init_exists_on_the_control_listener_only(rig: Rig) -> None:
    settings = {
        "envVars": {"A": "1"},
        "accessToken": "new",
        "defaultUser": "root",
        "defaultWorkdir": "/tmp",
        "timestamp": "2026-01-01T00:00:02Z",
        "hyperloopIP": "ignored",
    }
    older = {"envVars": {"A": "old"}, "timestamp": "2026-01-01T00:00:01Z"}

    outside = await rig.request("POST", "/init", json.dumps(settings).encode())
    inside = await rig.request("POST", "/init", json.dumps(settings).encode(), control=True)
    late = await rig.request("POST", "/init", json.dumps(older).encode(), control=True)
    bad = await rig.request("POST", "/init", b'{"envVars":3}', control=True)
    envs = await rig.request("GET", "/envs", control=True)
    shut = await rig.request("GET", "/envs")

    assert [r.status for r in (outside, inside, late, bad, shut)] == [404, 204, 204, 400, 401]
    assert envs.json() == {
        "E2B_SANDBOX": "true",
        "E2B_SANDBOX_ID": "isbx",
        "E2B_TEMPLATE_ID": "base",
        "A": "1",
    }


async def test_new_variables_replace_the_old_ones(rig: Rig) -> None:
    for variables in ({"A": "1", "B": "2"}, {"C": "3"}):
        body = json.dumps({"envVars": variables}).encode()
        await rig.request("POST", "/init", body, control=True)

    envs = (await rig.request("GET", "/envs")).json()

    assert {k: v for k, v in envs.items() if not k.startswith("E2B")} == {"C": "3"}


async def test_metrics_are_plausible(rig: Rig) -> None:
    await rig.run("head -c 50000000 /dev/zero | md5sum")

    told = (await rig.request("GET", "/metrics")).json()

    assert set(told) == {
        "ts", "cpu_count", "cpu_used_pct", "mem_total", "mem_used", "mem_cache", "mem_total_mib",
        "mem_used_mib", "disk_used", "disk_total",
    }  # fmt: skip
    assert 0 <= told["cpu_used_pct"] <= 100
    assert 0 < told["mem_used"] <= told["mem_total"]
    assert 0 < told["disk_used"] <= told["disk_total"]


async def test_usage_of_a_shared_disk_comes_from_its_meter_or_is_absent(tmp_path: Path) -> None:
    count = tmp_path / "referenced"
    count.write_text("4096\n")
    config = Config(disk_total_bytes=1 << 20, disk_inherited_bytes=100)
    with count.open() as meter:
        counted = Meter(config, {"disk": meter.fileno()})

        assert counted.read().disk_used == 4196
        count.write_text("8192\n")
        assert counted.read().disk_used == 8292
    told = msgspec.to_builtins(Meter(config).read())
    assert told["disk_total"] == 1 << 20
    assert "disk_used" not in told


async def test_the_ids_are_written_as_files(rig: Rig) -> None:
    found = {p.name: p.read_text() for p in (rig.directory / "run").iterdir()}

    assert found == {
        ".E2B_SANDBOX": "true",
        ".E2B_SANDBOX_ID": "isbx",
        ".E2B_TEMPLATE_ID": "base",
    }


async def test_idle_time_is_reported_and_ends_with_work(rig: Rig) -> None:
    async def idle() -> float:
        return (await rig.request("GET", "/status", control=True)).json()["idle_seconds"]

    await rig.request("GET", "/health")
    await asyncio.sleep(0.05)
    assert await idle() >= 0.04
    stream = await rig.start("exec sleep 30")
    pid = (await stream.event())["start"]["pid"]
    stream.close()
    await asyncio.sleep(0.05)
    assert await idle() == 0
    await rig.process("SendSignal", {"process": {"pid": pid}, "signal": "SIGNAL_SIGKILL"})
    async with asyncio.timeout(20):
        while any(rig.envd.registry.running()):
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("method", "path", "kind", "status"),
    [
        ("GET", "/process.Process/List", "application/json", 405),
        ("POST", "/process.Process/List", "text/plain", 415),
        ("POST", "/process.Process/List", "application/connect+json", 415),
        ("POST", "/process.Process/Start", "application/json", 415),
        ("POST", "/process.Process/Nothing", "application/json", 404),
        ("POST", "/metrics", "application/json", 405),
        ("PUT", "/files", "application/json", 405),
        ("GET", "/status", "", 404),
    ],
)
async def test_unknown_paths_and_methods_are_refused(
    rig: Rig, method: str, path: str, kind: str, status: int
) -> None:
    answer = await rig.request(method, path, b"{}", content_type=kind)

    assert answer.status == status


async def test_a_thousand_commands_leave_no_descriptors(rig: Rig) -> None:
    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    await rig.run("true")
    gc.collect()  # do not count what other tests left
    before = descriptors()

    for _ in range(10):
        await asyncio.gather(*(rig.run("echo x") for _ in range(20)))

    async with asyncio.timeout(20):
        while descriptors() > before + 2:
            await asyncio.sleep(0.01)


async def test_a_reserved_envd_is_not_idle_until_it_has_an_id(tmp_path: Path) -> None:
    config = Config(is_reserved=True, idle_exit_seconds=60, identity_dir=str(tmp_path))
    envd = Envd(config, DirectSpawner())

    in_stock = envd.idle_seconds()
    envd.context.apply(InitRequest(sandbox_id="mine"))

    assert in_stock == 0.0
    assert envd.idle_seconds() > 0.0
