"""The admission webhook without a cluster: its protocol and its certificate."""

import asyncio
import base64
import ssl
from pathlib import Path
from typing import Any

import httpx
import pytest

from paddock.api.admission_webhook import MAX_BODY_BYTES, create_app
from paddock.app.wiring.tls import webhook
from paddock.cli.kube.webhook import certificate
from paddock.kit.errors import InvalidError
from paddock.settings import Settings
from tests.ports import free_ports

BAD: dict[str, Any] = {"image": "i", "env": {"1=x": "y"}}


HOST: dict[str, Any] = {"podTemplate": {"spec": {"hostPID": True}}}
DOMAIN = {"allowInternetAccess": False, "allowOut": ["pypi.org"]}


def review(
    operation: str, spec: Any, *, old: Any = None, kind: str = "SandboxTemplate", **metadata: Any
) -> dict[str, Any]:
    def template(content: Any) -> dict[str, Any]:
        return {"metadata": {"name": "t", "namespace": "n", **metadata}, "spec": content}

    request = {
        "uid": "r1",
        "kind": {"group": "paddock.dev", "version": "v1alpha1", "kind": kind},
        "operation": operation,
        "object": None if spec is None else template(spec),
        "oldObject": None if old is None else template(old),
    }
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}


async def post(body: Any) -> httpx.Response:
    transport = httpx.ASGITransport(create_app(webhook.checks(Settings())))
    async with httpx.AsyncClient(transport=transport, base_url="http://webhook") as client:
        if isinstance(body, bytes):
            return await client.post("/validate", content=body)
        return await client.post("/validate", json=body)


async def verdict(body: Any) -> dict[str, Any]:
    answer = (await post(body)).json()
    assert answer["kind"] == "AdmissionReview"
    assert answer["response"]["uid"] == "r1"
    return answer["response"]


async def test_a_refusal_lists_every_problem_with_its_path():
    response = await verdict(review("CREATE", {**BAD, "network": {"denyOut": ["nowhere"]}}))
    assert response["allowed"] is False
    assert response["status"]["code"] == 422
    assert "spec.env" in response["status"]["message"]
    assert "spec.network.denyOut[0]" in response["status"]["message"]


def environment(member: dict[str, Any], **spec: Any) -> dict[str, Any]:
    return {"templateRef": {"name": "t"}, "clusters": {"local": {"members": {"m": member}}}, **spec}


def pooled(template: dict[str, Any]) -> dict[str, Any]:
    return environment({"spec": {"template": template, "replicas": 1}})


@pytest.mark.parametrize(
    ("kind", "spec", "path", "alternative"),
    [
        ("SandboxTemplate", HOST, "spec.podTemplate.spec.hostPID", "remove these fields"),
        ("SandboxPool", {"template": HOST, "replicas": 1}, "spec.template.podTemplate", "remove"),
        (
            "BatchSandbox",
            {"template": {}, "shardPatches": [{}, HOST]},
            "spec.shardPatches[1].podTemplate.spec.hostPID",
            "remove these fields",
        ),
        (
            "BatchSandbox",
            {"template": {}, "shardPatches": [{"pauseStrategy": "Hibernate"}]},
            "spec.shardPatches[0].pauseStrategy",
            "use Freeze",
        ),
        (
            "BatchSandbox",
            {"template": {}, "shardPatches": [{"network": DOMAIN}]},
            "spec.shardPatches[0].network.allowOut[0]",
            "use addresses or CIDRs",
        ),
        (
            "SandboxEnv",
            pooled(HOST),
            "spec.clusters[local].members[m].spec.template.podTemplate.spec.hostPID",
            "remove these fields",
        ),
        (
            "SandboxEnv",
            pooled({"pauseStrategy": "Stop"}),
            "spec.clusters[local].members[m].spec.template.pauseStrategy",
            "volumeClaimTemplates",
        ),
        (
            "SandboxEnv",
            environment({}, overrides={"networkPolicy": DOMAIN}),
            "spec.overrides.networkPolicy.allowOut[0]",
            "use addresses or CIDRs",
        ),
    ],
)
async def test_every_template_of_an_object_is_checked(
    kind: str, spec: dict[str, Any], path: str, alternative: str
) -> None:
    response = await verdict(review("CREATE", spec, kind=kind))
    assert response["allowed"] is False
    assert path in response["status"]["message"]
    assert alternative in response["status"]["message"]
    # What an update does not change is not refused.
    assert (await verdict(review("UPDATE", spec, old=spec, kind=kind)))["allowed"]


async def test_an_invalid_object_may_stay_unchanged_and_be_deleted():
    labelled = review("UPDATE", BAD, old=BAD, labels={"a": "b"})
    assert (await verdict(labelled))["allowed"]
    leaving = {"deletionTimestamp": "2030-01-01T00:00:00Z", "finalizers": []}
    host = {"image": "i", "podTemplate": {"spec": {"hostPID": True}}}
    assert (await verdict(review("UPDATE", host, old={"image": "i"}, **leaving)))["allowed"]
    assert (await verdict(review("DELETE", None, old=BAD)))["allowed"]


async def test_foreign_kinds_are_allowed():
    body = review("CREATE", BAD)
    body["request"]["kind"]["kind"] = "Deployment"
    assert (await verdict(body))["allowed"]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"{}", b"x" * (MAX_BODY_BYTES + 1)])
async def test_a_malformed_review_is_a_bad_request(body: bytes):
    assert (await post(body)).status_code == 400


def _settings(directory: Path, port: int) -> Settings:
    return Settings(
        webhook_certificate=str(directory / "tls.crt"),
        webhook_key=str(directory / "tls.key"),
        webhook_port=port,
    )


def _renew(directory: Path) -> str:
    made = certificate("paddock-system", {})
    for name, text in made["data"].items():
        (directory / name).write_bytes(base64.b64decode(text))
    return (directory / "tls.crt").read_text()


@pytest.mark.timeout(90)
async def test_a_renewed_certificate_is_served_without_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(webhook, "RELOAD_SECONDS", 0.02)
    port = free_ports(1)[0]
    first = _renew(tmp_path)

    async def shown() -> str:
        return await asyncio.to_thread(ssl.get_server_certificate, ("127.0.0.1", port), timeout=30)

    async with asyncio.timeout(60), webhook.serving(_settings(tmp_path, port)):
        assert (await shown()).split() == first.split()
        old_key = (tmp_path / "tls.key").read_bytes()
        second = _renew(tmp_path)
        new_key = (tmp_path / "tls.key").read_bytes()
        (tmp_path / "tls.key").write_bytes(old_key)
        # With half of the new pair written, the old certificate is served.
        while "webhook certificate not loaded" not in caplog.messages:
            await asyncio.sleep(0.02)
        assert (await shown()).split() == first.split()
        (tmp_path / "tls.key").write_bytes(new_key)
        while (await shown()).split() != second.split():
            await asyncio.sleep(0.02)


async def test_an_unusable_certificate_is_reported_at_the_start(tmp_path: Path):
    (tmp_path / "tls.crt").write_text("no certificate")
    (tmp_path / "tls.key").write_text("no key")
    with pytest.raises(InvalidError, match=r"tls\.crt"):
        async with webhook.serving(_settings(tmp_path, 0)):
            pass
