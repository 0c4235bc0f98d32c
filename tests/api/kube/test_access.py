"""Authentication of the declarative API."""

import httpx
import pytest

from paddock.api.kube.app import create_app
from paddock.api.kube.settings import KubeApiSettings
from paddock.store.memory import MemoryStore
from tests.api.kube.objects import SANDBOXES


async def answer(
    settings: KubeApiSettings,
    *,
    peer: str = "127.0.0.1",
    host: str = "localhost:1",
    **headers: str,
) -> httpx.Response:
    store = MemoryStore()
    transport = httpx.ASGITransport(create_app(store, settings), client=(peer, 1))
    async with httpx.AsyncClient(transport=transport, base_url=f"http://{host}") as client:
        response = await client.get(SANDBOXES, headers=headers)
    await store.close()
    return response


@pytest.mark.parametrize(
    "header", ["", "Bearer", "Bearer ", "Bearer wrong", "Basic c2VjcmV0", "secret", "Bearer sécret"]
)
async def test_unknown_tokens_are_refused(header: str):
    headers = {"Authorization": header.encode("latin-1")} if header else {}
    response = await answer(KubeApiSettings(tokens=("secret",)), **headers)
    assert response.status_code == 401
    assert response.json()["reason"] == "Unauthorized"
    assert response.headers["www-authenticate"].startswith("Bearer")
    assert "secret" not in response.text


async def test_every_configured_token_is_accepted():
    settings = KubeApiSettings(tokens=("one", "two"))
    for token in settings.tokens:
        response = await answer(settings, peer="192.0.2.7", Authorization=f"bearer {token}")
        assert response.status_code == 200


async def test_without_tokens_the_api_is_closed():
    assert (await answer(KubeApiSettings())).status_code == 401
    response = await answer(KubeApiSettings(), Authorization="Bearer ")
    assert response.status_code == 401


async def test_an_empty_token_is_never_accepted():
    response = await answer(KubeApiSettings(tokens=("",)), Authorization="Bearer ")
    assert response.status_code == 401


async def test_anonymous_access_is_limited_to_this_machine():
    settings = KubeApiSettings(allow_anonymous=True)
    assert (await answer(settings)).status_code == 200
    assert (await answer(settings, peer="::1", host="127.0.0.1:8080")).status_code == 200
    assert (await answer(settings, peer="::1", host="[::1]:8080")).status_code == 200
    assert (await answer(settings, peer="192.0.2.7")).status_code == 401


async def test_a_web_page_cannot_use_anonymous_access():
    settings = KubeApiSettings(allow_anonymous=True)
    assert (await answer(settings, Origin="https://evil.example")).status_code == 403
    assert (await answer(settings, host="evil.example")).status_code == 403


@pytest.mark.parametrize("host", ["[", "[::1", "a b", "]", "\x01", "[x]:y", "a:b:c"])
@pytest.mark.parametrize("is_open", [True, False])
async def test_an_invalid_host_header_is_handled(host: str, is_open: bool):
    settings = KubeApiSettings(tokens=("t",), allow_anonymous=is_open)
    response = await answer(settings, Host=host)
    assert 400 <= response.status_code < 500
    assert response.json()["kind"] == "Status"
    known = await answer(settings, Host=host, Authorization="Bearer t")
    assert known.status_code < 500


async def test_anonymous_access_is_refused_for_forwarded_remote_clients():
    settings = KubeApiSettings(allow_anonymous=True)
    near = await answer(settings, **{"X-Forwarded-For": "127.0.0.1"})
    far = await answer(settings, **{"X-Forwarded-For": "203.0.113.9"})
    assert (near.status_code, far.status_code) == (200, 401)
