"""Lists of any length are read in pages."""

from typing import Any

import pytest

from paddock.kit import logs
from paddock.kit.errors import GoneError
from paddock.resources.kinds.builtin import Secret
from paddock.resources.kinds.sandbox import Sandbox
from tests.store.kubernetes.scripted import gives, refuses, sandbox, scripted_server


def page(*names: str, token: str = "", version: int = 9) -> Any:
    metadata = {"resourceVersion": str(version), "continue": token}
    return gives({"metadata": metadata, "items": [sandbox(name, 1) for name in names]})


async def test_a_list_reads_all_pages() -> None:
    async with scripted_server(
        page("a", "b", token="t1"), page("c", token="t2"), page("d")
    ) as server:
        store = server.store(page_size=2)
        found = await store.list(Sandbox, namespace="default")
        await store.close()
    assert [item.metadata.name for item in found.items] == ["a", "b", "c", "d"]
    assert (found.version, found.continue_token) == ("9", "")
    assert [request.query.get("continue") for request in server.asked] == [None, "t1", "t2"]
    assert {request.query["limit"] for request in server.asked} == {"2"}


async def test_a_list_whose_continue_token_expired_is_restarted() -> None:
    expired = refuses(410, "Expired")
    answers = (page("a", token="t1"), expired, page("a", token="t2", version=12), page("b"))
    async with scripted_server(*answers) as server:
        store = server.store()
        found = await store.list(Sandbox)
        await store.close()
    assert [item.metadata.name for item in found.items] == ["a", "b"]
    assert found.version == "12"


async def test_a_list_whose_tokens_always_expire_is_read_without_paging() -> None:
    expired = refuses(410, "Expired")
    answers = (*(page("a", token="t"), expired) * 3, page("a", "b"))
    async with scripted_server(*answers) as server:
        store = server.store()
        found = await store.list(Sandbox)
        await store.close()
    assert len(found.items) == 2
    assert "limit" not in server.asked[-1].query


async def test_an_expired_token_of_the_caller_is_gone() -> None:
    async with scripted_server(refuses(410, "Expired")) as server:
        store = server.store()
        with pytest.raises(GoneError):
            await store.list(Sandbox, limit=5, continue_token="old")
        await store.close()


async def test_a_list_over_all_namespaces_is_sorted_by_key() -> None:
    items = [sandbox("x", 1), sandbox("x", 1)]
    items[0]["metadata"]["namespace"] = "a-b"  # a server's order: "a-b/x" before "a/x"
    items[1]["metadata"]["namespace"] = "a"
    async with scripted_server(gives({"metadata": {}, "items": items})) as server:
        store = server.store()
        found = await store.list(Sandbox)
        await store.close()
    assert [item.metadata.namespace for item in found.items] == ["a", "a-b"]


async def test_builtin_objects_in_lists_get_kind_and_api_version() -> None:
    item = {"metadata": {"name": "s", "namespace": "n"}, "data": {"k": "dg=="}}
    async with scripted_server(gives({"metadata": {}, "items": [item]})) as server:
        store = server.store()
        (secret,) = (await store.list(Secret)).items
        await store.close()
    assert (secret.kind, secret.api_version) == ("Secret", "v1")


async def test_one_unreadable_object_does_not_hide_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bad = sandbox("bad", 1)
    bad["spec"] = {"paused": 3}
    async with scripted_server(gives({"metadata": {}, "items": [bad, sandbox("ok", 2)]})) as server:
        store = server.store()
        found = await store.list(Sandbox)
        await store.close()
    assert [item.metadata.name for item in found.items] == ["ok"]
    (record,) = caplog.records
    assert record.__dict__[logs._FIELDS]["object"] == "default/bad"
