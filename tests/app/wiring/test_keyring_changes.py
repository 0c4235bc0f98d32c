"""Changes of the keyring: running processes follow them; earlier secrets are pruned; copies."""

import asyncio
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from msgspec import structs

from paddock.app.wiring.secrets import load_or_create, token_seed
from paddock.gateway.routing.hops import GatewayHops
from paddock.installation import secrets_file
from paddock.installation.pruning import pruned
from paddock.installation.reloading import ADOPT_SECONDS, KeyringFollower
from paddock.installation.secrets import (
    Secrets,
    fingerprint,
    generated,
    with_new_encryption_key,
    with_new_seed,
    with_new_token,
)
from paddock.kit.clock import system
from paddock.kit.encryption import DataCipher
from paddock.kit.errors import AlreadyExistsError, NotFoundError
from paddock.kit.tasks import background
from paddock.resources.kinds.sandbox import ClaimIdentity
from paddock.resources.tokens import TokenSeed, hashed
from paddock.settings import Settings


class Process:
    """What one process made from the keyring at its start."""

    def __init__(self, settings: Settings) -> None:
        secrets = load_or_create(settings)
        self.seed = token_seed(secrets)
        self.cipher = DataCipher(secrets.encryption_keys)
        self.hops = GatewayHops(self.seed)
        load = partial(load_or_create, settings)
        self.follower = KeyringFollower(settings.keyring, load, secrets, self.seed, self.cipher)


@pytest.mark.looptime
async def test_processes_that_follow_a_rotation_understand_each_other_at_every_moment(
    tmp_path: Path,
) -> None:
    settings = Settings(state_dir=str(tmp_path))
    processes = [Process(settings) for _ in range(2)]
    first, second = processes
    old = first.seed.access_token("abc")
    async with background(first.follower.run(), name="first"):
        await asyncio.sleep(0.7)  # the second looks at the file at other moments
        async with background(second.follower.run(), name="second"):
            await asyncio.sleep(2)
            new = secrets_file.update(settings.keyring, with_new_seed)
            expected = TokenSeed(new.seed.encode()).access_token("abc")
            seen: list[bool] = []
            for _ in range(100):
                for one, other in ((first, second), (second, first)):
                    assert other.hops.is_signed("x", one.hops.sign("x"))
                    assert one.seed.access_token("abc", hashed(old)) == old
                    made = one.seed.access_token("abc")
                    assert other.seed.access_token("abc", hashed(made)) == made
                seen.append(first.seed.access_token("abc") == expected)
                await asyncio.sleep(0.1)
            assert seen[0] is False
            assert seen[-1] is True
            assert seen.index(True) / 10 >= ADOPT_SECONDS - 0.2
            assert second.seed.access_token("abc") == expected


@pytest.mark.looptime
async def test_a_new_encryption_key_is_used_and_a_damaged_file_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = Settings(state_dir=str(tmp_path))
    process = Process(settings)
    async with background(process.follower.run(), name="keyring"):
        await asyncio.sleep(2)
        new = secrets_file.update(settings.keyring, with_new_encryption_key)
        await asyncio.sleep(2)
        assert process.cipher.key_id == new.encryption_keys[0].id
        settings.keyring.write_text("{")
        await asyncio.sleep(2)
        assert process.cipher.key_id == new.encryption_keys[0].id
    assert sum(item.message == "keyring not reloaded" for item in caplog.records) == 1


# ---- pruning -----------------------------------------------------------------------------


def a_claim(seed: str, call: str) -> ClaimIdentity:
    token = getattr(TokenSeed(seed.encode()), call)("abc")
    field = "access_token_hash" if call == "access_token" else "traffic_token_hash"
    claim = ClaimIdentity(sandbox_id="abc", owner="red", lock="l", claim_time=system().now())
    return structs.replace(claim, **{field: hashed(token)})


@pytest.mark.parametrize("call", ["access_token", "traffic_token"])
def test_a_seed_stays_while_a_sandbox_has_a_token_of_it(call: str) -> None:
    used = with_new_seed(generated())
    current = with_new_seed(used)
    done = pruned(current, [a_claim(used.seed, call), a_claim(current.seed, call)], ())
    assert done.secrets.previous_seeds == (used.seed,)
    assert done.secrets.seed == current.seed
    assert [item.name for item in done.kept] == [f"seed {fingerprint(used.seed)}"]
    assert done.dropped == (f"seed {fingerprint(current.previous_seeds[1])}",)


def test_an_encryption_key_stays_while_rows_may_have_it() -> None:
    current = with_new_encryption_key(with_new_encryption_key(generated()))
    newest, used, unused = current.encryption_keys
    done = pruned(current, (), {used.id, ""})
    assert done.secrets.encryption_keys == (newest, used)
    assert done.dropped == (f"encryption {unused.id}",)
    assert pruned(done.secrets, (), set()).secrets.encryption_keys == (newest,)


# ---- copies ------------------------------------------------------------------------------


def test_a_copy_is_private_and_restores_the_keyring(tmp_path: Path) -> None:
    path, copy = tmp_path / "state" / "secrets.json", tmp_path / "copy.json"
    created = secrets_file.create(path)
    secrets_file.back_up(path, copy)
    assert stat.S_IMODE(copy.stat().st_mode) == 0o600
    path.unlink()
    assert secrets_file.restore(path, copy) is True
    assert secrets_file.read(path) == created
    assert secrets_file.restore(path, copy) is False


@pytest.mark.parametrize("change", [with_new_seed, with_new_encryption_key, with_new_token])
def test_a_keyring_with_other_secrets_is_replaced_only_by_force(
    tmp_path: Path, change: Callable[[Secrets], Secrets]
) -> None:
    path, copy = tmp_path / "secrets.json", tmp_path / "copy.json"
    created = secrets_file.create(path)
    secrets_file.back_up(path, copy)
    changed = secrets_file.update(path, change)
    with pytest.raises(AlreadyExistsError, match="has other secrets"):
        secrets_file.restore(path, copy)
    assert secrets_file.read(path) == changed
    assert secrets_file.restore(path, copy, force=True) is True
    assert secrets_file.read(path) == created


def test_a_copy_replaces_no_file_and_must_exist(tmp_path: Path) -> None:
    path, copy = tmp_path / "secrets.json", tmp_path / "copy.json"
    secrets_file.create(path)
    copy.write_text("mine")
    with pytest.raises(AlreadyExistsError):
        secrets_file.back_up(path, copy)
    assert copy.read_text() == "mine"
    with pytest.raises(NotFoundError):
        secrets_file.restore(path, tmp_path / "none")
