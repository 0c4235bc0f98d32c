"""Values of clients in the audit log: one bounded line each, without secrets."""

import asyncio
import json
import secrets as random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paddock.api.audit import event as events
from paddock.api.audit.described import describe_e2b
from paddock.api.audit.event import MAX_AGENT, MAX_PATH
from paddock.api.audit.middleware import Audited
from tests.api.audit.recorded import recording
from tests.scenario.paddock import SECRETS, paddock

FORGED = 'x\n{"kind":"Event"}\r\x00\x1b[2J\u2028\u202e\udcff"\\'
MAX_LINE = 16 << 10


@given(st.text(alphabet=st.characters(), max_size=300), st.integers(10, 200))
def test_text_of_clients_is_printable_and_bounded(text: str, limit: int) -> None:
    shown = events.visible(text, limit)
    assert shown.isprintable()
    assert len(shown) <= limit


@given(st.text(alphabet=st.characters(), max_size=3000))
@settings(max_examples=50)
def test_a_path_is_shown_as_a_uri(text: str) -> None:
    shown = events.request_uri("/" + text)
    assert shown.isascii()
    assert shown.isprintable()
    assert " " not in shown
    assert len(shown) <= MAX_PATH


@pytest.mark.looptime
async def test_forged_values_stay_one_bounded_line() -> None:
    lines, audit = recording()

    async def app(scope, _receive, send) -> None:
        await send({"type": "http.response.start", "status": 404, "headers": []})

    async def ignore(_message) -> None: ...

    for part in (FORGED, FORGED * 10_000):
        scope = {
            "type": "http",
            "method": "DELETE" + part,
            "path": "/sandboxes/" + part,
            "query_string": part.encode(errors="replace"),
            "headers": [
                (name, part.encode("utf-8", "surrogateescape"))
                for name in (b"user-agent", b"x-real-ip", b"x-request-id", b"x-api-key")
            ],
            "client": (part, 1),
            "state": {"request_id": part},
        }
        await Audited(app, audit, describe_e2b)(scope, None, ignore)  # pyright: ignore[reportArgumentType]
        assert len(lines.data) < MAX_LINE
        assert lines.data.count(b"\n") == 1
        assert lines.data[:-1].decode().isprintable()
        [event] = lines.take()
        assert len(event["userAgent"]) <= MAX_AGENT
        assert event["sourceIPs"] == []
        await asyncio.sleep(61)


@pytest.mark.looptime
async def test_secrets_of_requests_never_appear() -> None:
    lines, audit = recording()
    written = b""
    async with paddock(pool_size=0, audit=audit, wrong_keys_per_address=0) as world:
        for number in range(60):
            # Any of these may be a secret: what a client sends in it is not in the log.
            words = [random.token_hex(16) for _ in range(6)]
            key = SECRETS.api_key if number % 2 else f"e2b_{words[0]}"
            method, path = random.choice(
                (
                    ("POST", "/sandboxes"),
                    ("POST", "/v2/sandboxes:batch"),
                    ("PATCH", "/teams/default"),
                    ("POST", "/api-keys"),
                    ("DELETE", f"/sandboxes/e2b_{words[0]}"),
                    ("POST", "/apis/paddock.dev/v1alpha1/namespaces/default/sandboxtemplates"),
                    ("PATCH", "/apis/paddock.dev/v1alpha1/namespaces/default/sandboxpools/base"),
                    ("GET", "/api/v1/secrets"),
                )
            )
            answer = await world.http.request(
                method,
                path,
                params={"signature": words[1], "token": words[2], words[3]: "1"},
                json={
                    "templateID": "base",
                    "name": words[4],
                    "envVars": {"TOKEN": words[4]},
                    "metadata": {"name": words[4], "note": words[4]},
                    "spec": {"env": {"A": words[4]}},
                },
                headers={
                    "X-API-Key": key,
                    "Authorization": f"Bearer {words[5] if number % 3 else SECRETS.token}",
                    "Cookie": f"session={words[5]}",
                    "X-Access-Token": words[5],
                    "User-Agent": f"agent e2b_{words[0]}",
                    "X-Real-Ip": f"2001:db8:{number:x}::1",
                },
            )
            secret = answer.json().get("key") if answer.status_code == 201 else None
            written += lines.data
            assert not [word for word in (*words, secret) if word and word.encode() in lines.data]
            lines.data = b""
    assert written.count(b"\n") > 40
    assert SECRETS.api_key.encode() not in written
    assert all(json.loads(line)["level"] == "Metadata" for line in written.splitlines())
