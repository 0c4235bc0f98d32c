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


@pytest.mark.parametrize("host", ["[", "[::1", "a b", "]", "\x01", "[x]:y", "a:b:c"])
async def test_an_invalid_host_header_is_handled(host: str):
    settings = KubeApiSettings(tokens=("t",))
    response = await answer(settings, Host=host)
    assert 400 <= response.status_code < 500
    assert response.json()["kind"] == "Status"
    known = await answer(settings, Host=host, Authorization="Bearer t")
    assert known.status_code < 500


@pytest.mark.parametrize("peer", ["127.0.0.1", "::1", "192.0.2.7"])
async def test_no_client_is_served_without_a_token(peer: str):
    """Programs of other users run on this machine, too."""
    assert (await answer(KubeApiSettings(tokens=("t",)), peer=peer)).status_code == 401
