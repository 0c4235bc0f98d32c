"""Secrets of a real installation are neither in logs, at any level, nor in the store."""

import stat
from pathlib import Path
from urllib.parse import quote

import pytest

from paddock.envd.files import signature
from tests.installation import Box, Installation

pytestmark = [pytest.mark.sandbox, pytest.mark.timeout(300)]

MARK = "/home/user/mine"


async def used(paddock: Installation) -> tuple[Box, str]:
    """Use every kind of token once; return the sandbox and a new API key."""
    made = await paddock.api("POST", "/api-keys", {"name": "another"})
    private = {"allowPublicTraffic": False}
    box = await paddock.create(timeout=600, secure=True, network=private)
    assert box.envd_access_token
    assert box.traffic_access_token
    await paddock.write_file(box, MARK, b"mine")
    assert await paddock.run(box, f"cat {MARK}") == "mine"
    headers = {"E2B-Traffic-Access-Token": box.traffic_access_token}
    assert (await paddock.call(box, 8000, headers=headers))[0] == 502  # Nothing listens there.
    signed = signature.sign(
        path=MARK, operation="read", username="user", token=box.envd_access_token, expiration=None
    )
    path = f"/files?path={MARK}&username=user&signature={quote(signed, safe='')}"
    assert await paddock.call(box, 49983, path, token=False) == (200, b"mine")
    await paddock.api("POST", f"/sandboxes/{box.id}/pause")
    await paddock.api("POST", f"/sandboxes/{box.id}/connect", {"timeout": 600})
    return box, made["key"]


async def test_secrets_are_in_no_log_and_not_in_the_store() -> None:
    async with Installation(log_level="debug", access_log="true") as paddock:
        box, key = await used(paddock)
        own = paddock.secrets
        secrets = (own.api_key, own.token, own.seed, key, box.envd_access_token)
        words = [word.encode() for word in (*secrets, box.traffic_access_token) if word]
        assert len(words) == 6

        def contains_secret(path: Path) -> bool:
            data = path.read_bytes()
            return any(word in data for word in words)

        logs = sorted(paddock.directory.glob("*.log"))
        stored = sorted((paddock.directory / "state").glob("store.db*"))
        assert len(logs) == 3
        assert stored
        assert [path.name for path in (*logs, *stored) if contains_secret(path)] == []
        # Files that must hold secrets are readable by their owner only.
        records = sorted((paddock.node_state / "sandboxes").glob("*/record.*"))
        assert records
        for path in (paddock.directory / "state" / "secrets.json", *records):
            if contains_secret(path):
                assert not stat.S_IMODE(path.stat().st_mode) & 0o077, path
