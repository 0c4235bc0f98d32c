"""A rotated seed: sandboxes keep their tokens, new ones use the new seed."""

import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import quote

import pytest

from paddock.app.wiring.secrets import load_or_create, token_seed
from paddock.envd.files import signature
from paddock.installation import secrets_file
from paddock.installation.secrets import with_new_seed, with_new_token
from paddock.resources.tokens import TokenSeed, hashed
from paddock.settings import Settings
from tests.installation import Box, Installation

OLD, NEW = b"old" * 16, b"new" * 16
CALLS = ("access_token", "traffic_token")


@pytest.mark.parametrize("call", CALLS)
def test_the_hash_selects_the_seed_of_a_sandbox(call: str) -> None:
    before = getattr(TokenSeed(OLD), call)("abc")
    rotated = TokenSeed(NEW, b"between", OLD)
    assert getattr(rotated, call)("abc", hashed(before)) == before
    new = getattr(rotated, call)("abc")
    assert new == getattr(TokenSeed(NEW), call)("abc") != before
    assert getattr(rotated, call)("abc", hashed(new)) == new


@pytest.mark.parametrize("call", CALLS)
def test_a_seed_that_was_removed_makes_no_tokens(call: str) -> None:
    before = getattr(TokenSeed(OLD), call)("abc")
    assert getattr(TokenSeed(NEW, b"between"), call)("abc", hashed(before)) != before


def test_a_rotation_keeps_the_previous_seeds_and_replaces_the_token(tmp_path: Path) -> None:
    settings = Settings(state_dir=str(tmp_path))
    first = load_or_create(settings)
    for change in (with_new_seed, with_new_token, with_new_seed):
        secrets_file.update(settings.keyring, change)
    last = load_or_create(settings)
    assert last.previous_seeds[-1] == first.seed
    assert len({last.seed, *last.previous_seeds}) == 3
    assert last.token != first.token
    known = hashed(token_seed(first).access_token("abc"))
    assert hashed(token_seed(last).access_token("abc", known)) == known


def test_a_seed_of_the_settings_keeps_the_sandboxes_of_the_stored_one(tmp_path: Path) -> None:
    first = load_or_create(Settings(state_dir=str(tmp_path)))
    given = load_or_create(Settings(state_dir=str(tmp_path), seed="given"))
    assert (given.seed, given.previous_seeds) == ("given", (first.seed,))


async def read_signed(paddock: Installation, box: Box) -> tuple[int, bytes]:
    """Read a file with a URL that the sandbox's token signed."""
    assert box.envd_access_token
    signed = signature.sign(
        path="/home/user/a", operation="read", username="user",
        token=box.envd_access_token, expiration=None,
    )  # fmt: skip
    path = f"/files?path=/home/user/a&username=user&signature={quote(signed, safe='')}"
    return await paddock.call(box, 49983, path, token=False)


@pytest.mark.sandbox
@pytest.mark.timeout(300)
async def test_running_and_hibernated_sandboxes_stay_reachable_after_a_rotation() -> None:
    async with Installation() as paddock:
        private = {"allowPublicTraffic": False}
        boxes = [await paddock.create(timeout=600, secure=True, network=private) for _ in range(2)]
        for box in boxes:
            await paddock.write_file(box, "/home/user/a", b"mine")
        await paddock.api("POST", f"/sandboxes/{boxes[1].id}/pause")
        before = paddock.secrets
        for what in ("seed", "encryption", "token"):
            done = subprocess.run(
                [shutil.which("paddock", path=str(Path(sys.executable).parent)) or "paddock",
                 "keyring", "rotate", what],
                env=paddock.environment, capture_output=True, text=True, check=False,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
        await paddock.stop("control")
        await paddock.stop("gateway-0")
        await paddock.start_control()
        await paddock.start_gateway()
        after = paddock.secrets
        assert after.previous_seeds == (before.seed,)
        assert after.token != before.token
        assert [key.id for key in after.encryption_keys][1:] == [before.encryption_keys[0].id]
        for box in boxes:
            shown = await paddock.api("POST", f"/sandboxes/{box.id}/connect", {"timeout": 600})
            assert shown["envdAccessToken"] == box.envd_access_token
            assert shown["trafficAccessToken"] == box.traffic_access_token
            assert await paddock.run(box, "cat /home/user/a") == "mine"
            assert await read_signed(paddock, box) == (200, b"mine")
        new = await paddock.create(timeout=600, secure=True)
        await paddock.write_file(new, "/home/user/a", b"new")
        assert await read_signed(paddock, new) == (200, b"new")
        expected = TokenSeed(after.seed.encode()).access_token(new.id)
        assert new.envd_access_token == expected
