"""Random requests to a real envd: each gets a response, never a 500.

envd has no OpenAPI document, so requests are generated here. Only calls that read: this envd runs
outside a sandbox.
"""

import asyncio
import json
import shutil
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from paddock.envd import blocking
from tests.envd.rig import Response, Rig, open_rig
from tests.fuzz import fuzz_budget

UNARY = (
    "/filesystem.Filesystem/Stat",
    "/filesystem.Filesystem/ListDir",
    "/filesystem.Filesystem/GetWatcherEvents",
    "/filesystem.Filesystem/RemoveWatcher",
    "/process.Process/List",
    "/process.Process/SendInput",
    "/process.Process/Update",
    "/process.Process/CloseStdin",
)
PLAIN = (
    *("/health", "/metrics", "/envs", "/files", "/init", "/status", "/nothing"),
    *("/tasks", "/getTasks", "/setTasks", "/tasks/x", "/tasks/x/output"),
)
POSTED = ("/init", "/setTasks")
TYPES = (
    "application/json",
    "application/proto",
    "application/connect+json",
    "application/connect+proto",
    "text/plain",
    "multipart/form-data; boundary=x",
    "",
)
KEYS = ("path", "depth", "process", "selector", "pid", "tag", "input", "pty", "watcherId", "size")
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["", "/", "..", "~", "/dev/null", "\0", "x" * 5000, "/proc/self/fd/0"]),
)
TREES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    ),
    max_leaves=6,
)


def framed(payload: bytes) -> bytes:
    return struct.pack(">BI", 0, len(payload)) + payload


BODIES = st.one_of(
    TREES.map(lambda tree: json.dumps(tree).encode()),
    TREES.map(lambda tree: framed(json.dumps(tree).encode())),
    st.binary(max_size=40),
    st.binary(max_size=40).map(framed),
    st.just(b"[" * 20000),
)
QUERIES = st.one_of(
    st.just(""),
    st.lists(
        st.tuples(
            st.sampled_from(["path", "username", "signature", "signature_expiration", "limit"]),
            st.sampled_from(
                ["", "/", "%00", "%ff%fe", "..%2f..", "nobody", "user", "9" * 30, "-1"]
            ),
        ),
        max_size=3,
    ).map(lambda pairs: "?" + "&".join(f"{name}={value}" for name, value in pairs)),
)


@pytest.fixture
def directory() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="paddock-fuzz-"))
    made.chmod(0o755)
    yield made
    blocking.stop_threads()
    shutil.rmtree(made, ignore_errors=True)


async def ask(rig: Rig, method: str, target: str, kind: str, body: bytes) -> Response:
    wire = await rig.wire()
    try:
        async with asyncio.timeout(60):
            await wire.send(method, target, {"Content-Type": kind}, body)
            return await wire.response(method)
    finally:
        wire.close()


def judge(response: Response, said: object) -> None:
    assert response.status < 500, (said, response)
    if response.headers.get("content-type", "").startswith("application/connect+json"):
        # In a stream, the last message carries the status.
        last = response.body[response.body.rfind(b"\x02") + 5 :]
        assert b'"internal"' not in last, (said, last)
        assert b'"unknown"' not in last, (said, last)


@pytest.mark.timeout(fuzz_budget.seconds(180))
def test_no_request_makes_envd_return_a_500(directory: Path) -> None:
    with asyncio.Runner() as runner:
        rig = runner.run(open_rig(directory))

        @settings(
            max_examples=fuzz_budget.examples(300),
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(
            other=st.sampled_from([None] * 12 + ["POST", "GET", "PUT", "DELETE", "OPTIONS"]),
            place=st.one_of(st.sampled_from(UNARY), st.sampled_from(PLAIN)),
            query=QUERIES,
            kind=st.sampled_from(TYPES),
            body=BODIES,
        )
        @example(None, UNARY[0], "", TYPES[0], b'{"path": "\\u0000"}')
        @example(None, UNARY[1], "", TYPES[0], b'{"path": "/etc/passwd", "depth": 4294967296}')
        def fuzz(other: str | None, place: str, query: str, kind: str, body: bytes) -> None:
            method = other or ("POST" if place in (*UNARY, *POSTED) else "GET")
            if method in ("POST", "PUT", "DELETE") and place == "/files":
                method = "GET"  # Writing would be outside of any sandbox.
            said = (method, place + query, kind, body[:80])
            judge(runner.run(ask(rig, method, place + query, kind, body)), said)

        async def close() -> None:
            rig.envd.close()
            await asyncio.sleep(0.05)

        try:
            fuzz()
        finally:
            runner.run(close())
