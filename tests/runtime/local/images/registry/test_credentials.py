"""Credentials come from config.json and credential helpers, and are never shown."""

import base64
import json
import os
from pathlib import Path

import pytest
from msgspec import structs

from paddock.kit.errors import InvalidError, UnavailableError
from paddock.runtime.local.images.registry.challenge import Challenge, parse_challenges
from paddock.runtime.local.images.registry.credentials import (
    RegistryCredentials,
    credentials_of,
    read_config,
)

TOKEN = RegistryCredentials(host="a.example", identity_token="t")
ALICE = RegistryCredentials(host="a.example", username="alice", password="p:w")
AUTH = base64.b64encode(b"alice:p:w").decode()


def config(tmp_path: Path, **document: object):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(document))
    return read_config(path)


def helper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    path = tmp_path / "bin" / "docker-credential-test"
    path.parent.mkdir()
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{path.parent}:{os.environ['PATH']}")


@pytest.mark.parametrize(
    ("key", "host"),
    [
        ("https://index.docker.io/v1/", "docker.io"),
        ("registry.example", "registry.example"),
        ("https://registry.example/v2/", "registry.example"),
        ("127.0.0.1:5000", "127.0.0.1:5000"),
    ],
)
async def test_a_password_is_found_by_host(tmp_path: Path, key: str, host: str) -> None:
    found = config(tmp_path, auths={key: {"auth": AUTH}, "other.example": {"auth": "eDp5"}})
    assert await credentials_of(found, host) == structs.replace(ALICE, host=host)
    assert await credentials_of(found, "unknown.example") is None


async def test_an_identity_token_is_found(tmp_path: Path) -> None:
    found = config(tmp_path, auths={"a.example": {"auth": AUTH, "identitytoken": "t"}})
    assert await credentials_of(found, "a.example") == TOKEN


async def test_a_missing_file_has_no_credentials(tmp_path: Path) -> None:
    assert await credentials_of(read_config(tmp_path / "none"), "a.example") is None


@pytest.mark.parametrize(
    "text",
    ["{", '{"auths": 7}', '{"auths": {"a.example": {"auth": "%"}}}', '{"credsStore": "../x"}'],
)
async def test_a_damaged_file_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(InvalidError, match=r"config\.json"):
        await credentials_of(read_config(path), "a.example")


@pytest.mark.parametrize(
    "document", [{"credHelpers": {"a.example": "test"}}, {"credsStore": "test"}]
)
async def test_a_credential_helper_is_asked_with_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, document: dict
) -> None:
    answer = '{"ServerURL":"x","Username":"alice","Secret":"p:w"}'
    helper(tmp_path, monkeypatch, f"[ $1 = get ] && [ $(cat) = a.example ] && echo '{answer}'")
    assert await credentials_of(config(tmp_path, **document), "a.example") == ALICE


async def test_a_credential_helper_can_have_an_identity_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    helper(tmp_path, monkeypatch, """echo '{"Username":"<token>","Secret":"t"}'""")
    found = config(tmp_path, credHelpers={"a.example": "test"})
    assert await credentials_of(found, "a.example") == TOKEN


async def test_a_credential_helper_without_credentials_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    helper(tmp_path, monkeypatch, "echo credentials not found in native keychain; exit 1")
    found = config(tmp_path, credsStore="test", auths={"a.example": {"auth": AUTH}})
    assert await credentials_of(found, "a.example") == ALICE


@pytest.mark.parametrize("script", ["echo secret; exit 2", "echo secret"])
async def test_a_failing_credential_helper_is_named_without_its_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    helper(tmp_path, monkeypatch, script)
    found = config(tmp_path, credHelpers={"a.example": "test"})
    with pytest.raises(UnavailableError, match="docker-credential-test") as caught:
        await credentials_of(found, "a.example")
    assert "secret" not in str(caught.value) + (caught.value.hint or "")


async def test_a_missing_credential_helper_is_named(tmp_path: Path) -> None:
    found = config(tmp_path, credHelpers={"a.example": "absent"})
    with pytest.raises(UnavailableError, match="docker-credential-absent is not installed"):
        await credentials_of(found, "a.example")


def test_credentials_are_not_printed(tmp_path: Path) -> None:
    assert "p:w" not in repr(ALICE)
    assert AUTH not in repr(config(tmp_path, auths={"a.example": {"auth": AUTH}}))


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        (
            ['Bearer realm="https://a/t",service="s",scope="repository:x:pull,push"'],
            [("bearer", "https://a/t", "s", "repository:x:pull,push")],
        ),
        (["Basic realm=x"], [("basic", "x", "", "")]),
        (
            ['Basic realm="a\\"b", Bearer realm="r"'],
            [("basic", 'a"b', "", ""), ("bearer", "r", "", "")],
        ),
        (["Basic", "Bearer realm=r"], [("basic", "", "", ""), ("bearer", "r", "", "")]),
        ([""], []),
        (['="'], []),
    ],
)
def test_challenges_are_parsed(headers: list[str], expected: list[tuple]) -> None:
    assert parse_challenges(headers) == tuple(
        Challenge(scheme=scheme, realm=realm, service=service, scope=scope)
        for scheme, realm, service, scope in expected
    )
