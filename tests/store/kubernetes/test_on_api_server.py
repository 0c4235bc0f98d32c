"""Schemas, roles, built-in kinds and credentials on a real API server."""

import asyncio
from datetime import UTC, datetime
from pathlib import Path
from typing import ClassVar
from urllib.parse import urlsplit

import msgspec
import pytest
from msgspec import structs

from paddock.kit.errors import (
    ConflictError,
    FieldProblem,
    ForbiddenError,
    InvalidError,
    NotFoundError,
    TooLargeError,
    UnauthenticatedError,
    UnsupportedError,
)
from paddock.resources.kinds.builtin import Event, EventSource, Lease, LeaseSpec, Namespace, Secret
from paddock.resources.kinds.builtin import ObjectReference as Reference
from paddock.resources.kinds.pool import Capacity, SandboxPool, SandboxPoolSpec
from paddock.resources.kinds.sandbox import Phase, Sandbox, SandboxSpec
from paddock.resources.kinds.template import TemplateRef
from paddock.resources.meta import Key, ObjectMeta, Resource, ResourcePart, with_meta
from paddock.resources.selectors import parse_fields
from paddock.store.kubernetes import Access, KubernetesStore, load_in_cluster
from paddock.store.kubernetes.credentials import StaticCredential
from tests.cluster.info import ClusterInfo, RefusedError
from tests.store.kubernetes.conftest import open_store

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(180)]


def sandbox(ns: str, name: str = "") -> Sandbox:
    return Sandbox(
        metadata=ObjectMeta(namespace=ns, name=name),
        spec=SandboxSpec(template_ref=TemplateRef(name="base")),
    )


def pool(ns: str, name: str) -> SandboxPool:
    return SandboxPool(
        metadata=ObjectMeta(namespace=ns, name=name),
        spec=SandboxPoolSpec(template_ref=TemplateRef(name="base"), replicas=1),
    )


# Errors


async def test_an_unknown_field_is_rejected_with_its_path(store: KubernetesStore, ns: str) -> None:
    body = {
        "apiVersion": "paddock.dev/v1alpha1",
        "kind": "Sandbox",
        "metadata": {"name": "a"},
        "spec": {"templateRef": {"name": "base"}, "pasued": True},
    }
    with pytest.raises(InvalidError) as caught:
        await store.client.request(
            "POST",
            f"/apis/paddock.dev/v1alpha1/namespaces/{ns}/sandboxes",
            params={"fieldValidation": "Strict"},
            body=msgspec.json.encode(body),
        )
    assert caught.value.problems == (FieldProblem("spec.pasued", "unknown field"),)


async def test_an_update_that_violates_the_schema_is_rejected_with_its_path(
    store: KubernetesStore, ns: str
) -> None:
    made = await store.create(pool(ns, "a"))
    bad = structs.replace(
        made.spec,
        replicas=None,
        capacity=Capacity(buffer_min=5, buffer_max=1, pool_min=0, pool_max=9),
    )
    with pytest.raises(InvalidError) as caught:
        await store.update(structs.replace(made, spec=bad))
    assert any(problem.path.startswith("spec.capacity") for problem in caught.value.problems)
    assert await store.get(SandboxPool, made.key) == made


async def test_an_object_beyond_the_limit_of_etcd_is_too_large(
    store: KubernetesStore, ns: str
) -> None:
    huge = Secret(metadata=ObjectMeta(namespace=ns, name="a"), data={"k": "eHh4" * 700_000})
    with pytest.raises((TooLargeError, InvalidError)):
        await store.create(huge)


async def test_the_error_for_a_missing_crd_says_what_to_install(
    store: KubernetesStore, ns: str
) -> None:
    class Missing(Resource):
        KIND: ClassVar[str] = "Missing"
        PLURAL: ClassVar[str] = "missings"

    with pytest.raises(UnsupportedError) as caught:
        await store.get(Missing, Key(ns, "a"))
    assert "paddock kube install" in str(caught.value.hint)


async def test_a_namespace_that_does_not_exist_is_not_found(store: KubernetesStore) -> None:
    with pytest.raises(NotFoundError, match="nowhere"):
        await store.create(sandbox("nowhere", "a"))


async def test_a_deleting_namespace_accepts_no_new_objects(store: KubernetesStore, ns: str) -> None:
    held = with_meta(sandbox(ns, "held"), finalizers=("test.dev/hold",))
    held = await store.create(held)
    await store.delete(Namespace, Key("", ns))
    with pytest.raises(ConflictError, match="terminated"):
        await store.create(sandbox(ns, "late"))
    current = await store.get(Sandbox, held.key)
    await store.update(with_meta(current, finalizers=()))


# Credentials and roles


async def test_a_read_only_credential_can_only_read(
    store: KubernetesStore, ns: str, kube_cluster: ClusterInfo
) -> None:
    made = await store.create(sandbox(ns, "a"))
    reader = open_store(kube_cluster, "reader")
    assert await reader.get(Sandbox, made.key) == made
    assert (await reader.list(Sandbox, namespace=ns)).items == (made,)
    for write in (
        reader.create(sandbox(ns, "b")),
        reader.update(with_meta(made, labels={"a": "b"})),
        reader.update_status(made),
        reader.delete(Sandbox, made.key),
    ):
        with pytest.raises(ForbiddenError, match='"reader" cannot'):
            await write
    await reader.close()
    assert await store.get(Sandbox, made.key) == made


async def test_a_credential_of_one_namespace_cannot_read_others(
    store: KubernetesStore, ns: str, kube_cluster: ClusterInfo
) -> None:
    await store.create(sandbox(ns, "a"))
    tenant = open_store(kube_cluster, "tenant")
    for read in (tenant.get(Sandbox, Key(ns, "a")), tenant.list(Sandbox, namespace=ns)):
        with pytest.raises(ForbiddenError):
            await read
    with pytest.raises(ForbiddenError, match="cluster scope"):
        await tenant.list(Sandbox)
    own = await tenant.create(with_meta(sandbox("tenant"), generate_name="own-"))
    await tenant.delete(Sandbox, own.key)
    await tenant.close()


async def test_an_unknown_token_is_unauthenticated_not_forbidden(
    kube_cluster: ClusterInfo,
) -> None:
    known = open_store(kube_cluster)
    access = known.client.access
    stranger = KubernetesStore.open(
        Access(server=access.server, tls=access.tls, credential=StaticCredential.bearer("made-up"))
    )
    with pytest.raises(UnauthenticatedError):
        await stranger.get(Sandbox, Key("default", "a"))
    await stranger.close()
    await known.close()


async def test_a_client_certificate_authenticates(kube_cluster: ClusterInfo) -> None:
    store = open_store(kube_cluster, "certificate")
    assert await store.get(Namespace, Key("", "default"))
    await store.close()


async def test_the_service_account_of_a_pod_authenticates(
    ns: str, kube_cluster: ClusterInfo, tmp_path: Path
) -> None:
    path = f"/api/v1/namespaces/{ns}/serviceaccounts"
    kube_cluster.request("POST", path, {"metadata": {"name": "worker"}})
    answer = kube_cluster.request(
        "POST", f"{path}/worker/token", {"spec": {"expirationSeconds": 600}}
    )
    (tmp_path / "token").write_text(answer["status"]["token"])
    (tmp_path / "ca.crt").write_text(Path(kube_cluster.ca_file).read_text())
    (tmp_path / "namespace").write_text(ns)
    server = urlsplit(kube_cluster.server)
    environment = {
        "KUBERNETES_SERVICE_HOST": str(server.hostname),
        "KUBERNETES_SERVICE_PORT": str(server.port),
    }
    store = KubernetesStore.open(load_in_cluster(tmp_path, environment))
    with pytest.raises(ForbiddenError, match=f"system:serviceaccount:{ns}:worker"):
        await store.get(Sandbox, Key(ns, "a"))
    await store.close()


# Built-in kinds


async def test_lease_times_keep_microseconds(store: KubernetesStore, ns: str) -> None:
    on_the_second = datetime(2030, 1, 1, 12, 0, 0, tzinfo=UTC)
    spec = LeaseSpec(
        holder_identity="me",
        lease_duration_seconds=15,
        acquire_time=on_the_second,
        renew_time=on_the_second,
    )
    made = await store.create(Lease(metadata=ObjectMeta(namespace=ns, name="a"), spec=spec))
    assert made.spec == spec
    later = datetime(2030, 1, 1, 12, 0, 7, 123456, tzinfo=UTC)
    renewed = await store.update(
        structs.replace(made, spec=structs.replace(made.spec, renew_time=later))
    )
    assert renewed.spec.renew_time == later
    with pytest.raises(ConflictError):
        await store.update(
            structs.replace(made, spec=structs.replace(made.spec, holder_identity="you"))
        )
    assert (await store.get(Lease, made.key)).spec.holder_identity == "me"


async def test_an_event_is_attached_to_its_object_and_found_by_it(
    store: KubernetesStore, ns: str
) -> None:
    about = await store.create(sandbox(ns, "a"))
    now = datetime(2030, 1, 1, tzinfo=UTC)
    made = await store.create(
        Event(
            metadata=ObjectMeta(namespace=ns, generate_name="a."),
            involved_object=Reference(
                api_version=about.API_VERSION,
                kind=about.KIND,
                namespace=ns,
                name="a",
                uid=about.metadata.uid,
            ),
            reason="Started",
            message="it runs",
            first_timestamp=now,
            last_timestamp=now,
            source=EventSource(component="paddock"),
        )
    )
    again = await store.update(structs.replace(made, count=2))
    assert again.count == 2
    found = await store.list(
        Event,
        namespace=ns,
        fields=parse_fields(f"involvedObject.uid={about.metadata.uid},reason=Started"),
    )
    assert [item.metadata.name for item in found.items] == [made.metadata.name]


async def test_an_update_keeps_unknown_fields_of_builtin_objects(
    store: KubernetesStore, ns: str, kube_cluster: ClusterInfo
) -> None:
    path = f"/api/v1/namespaces/{ns}/secrets"
    body = {"metadata": {"name": "a"}, "immutable": False, "data": {"x": "eA==", "y": "eQ=="}}
    kube_cluster.request("POST", path, body)
    made = await store.get(Secret, Key(ns, "a"))
    changed = await store.update(
        structs.replace(with_meta(made, labels={"l": "1"}), data={"x": "eA=="})
    )
    assert changed.data == {"x": "eA=="}
    stored = kube_cluster.request("GET", f"{path}/a")
    assert stored["immutable"] is False
    assert stored["data"] == {"x": "eA=="}
    assert stored["metadata"]["labels"] == {"l": "1"}


class PartialPodStatus(ResourcePart):
    phase: str = ""
    message: str = ""


class PartialPod(Resource):
    """A Pod with only two fields of its status."""

    KIND: ClassVar[str] = "Pod"
    API_VERSION: ClassVar[str] = "v1"
    PLURAL: ClassVar[str] = "pods"

    status: PartialPodStatus = PartialPodStatus()


async def test_a_partially_modelled_kind_can_be_labelled_and_given_a_status(
    store: KubernetesStore, ns: str, kube_cluster: ClusterInfo
) -> None:
    path = f"/api/v1/namespaces/{ns}"
    await until_served(kube_cluster, f"{path}/serviceaccounts/default")
    spec = {"containers": [{"name": "main", "image": "base"}], "nodeName": "nowhere"}
    body = {"metadata": {"name": "a", "labels": {"old": "1"}}, "spec": spec}
    before = kube_cluster.request("POST", f"{path}/pods", body)

    pod = await store.get(PartialPod, Key(ns, "a"))
    pod = await store.update(with_meta(pod, labels={"new": "1"}))
    status = PartialPodStatus(phase="Running", message="it runs")
    pod = await store.update_status(structs.replace(pod, status=status))

    after = kube_cluster.request("GET", f"{path}/pods/a")
    assert after["spec"] == before["spec"]
    assert after["metadata"]["labels"] == {"new": "1"}
    assert after["status"]["phase"] == "Running"
    assert after["status"]["qosClass"] == before["status"]["qosClass"]
    assert await store.update(pod) == pod, "a write without changes is not sent"


async def until_served(info: ClusterInfo, path: str) -> None:
    async with asyncio.timeout(60):
        while True:
            try:
                await asyncio.to_thread(info.request, "GET", path)
            except RefusedError as refusal:
                if refusal.code != 404:
                    raise
                await asyncio.sleep(0.05)
            else:
                return


async def test_an_update_with_another_uid_is_a_conflict(store: KubernetesStore, ns: str) -> None:
    made = await store.create(Secret(metadata=ObjectMeta(namespace=ns, name="a")))
    other = with_meta(made, uid="11111111-1111-1111-1111-111111111111", labels={"l": "1"})
    with pytest.raises(ConflictError):
        await store.update(other)


async def test_managed_fields_are_dropped_from_objects_with_generated_names(
    store: KubernetesStore, kube_cluster: ClusterInfo, ns: str
) -> None:
    where = f"/apis/paddock.dev/v1alpha1/namespaces/{ns}/sandboxes"
    named = await store.create(sandbox(ns, "mine"))
    generated = await store.create(with_meta(sandbox(ns), generate_name="theirs-"))
    for made in (named, generated):
        changed = await store.update(with_meta(made, labels={"turn": "1"}))
        running = structs.replace(changed.status, phase=Phase.RUNNING)
        await store.update_status(structs.replace(changed, status=running))
        with pytest.raises(ConflictError):
            await store.update(with_meta(made, labels={"turn": "2"}))
    kept = kube_cluster.request("GET", f"{where}/{named.metadata.name}")
    assert {item["manager"] for item in kept["metadata"]["managedFields"]} == {"paddock"}
    lean = kube_cluster.request("GET", f"{where}/{generated.metadata.name}")
    assert "managedFields" not in lean["metadata"]
    assert lean["metadata"]["labels"] == {"turn": "1"}
    assert lean["spec"] == kept["spec"]
    assert lean["status"]["phase"] == "Running"


# Selecting by fields


async def test_fields_are_selected_by_the_server_or_else_by_the_client(
    store: KubernetesStore, ns: str
) -> None:
    made = {name: await store.create(sandbox(ns, name)) for name in ("idle", "busy", "held")}
    for name in ("busy", "held"):
        running = structs.replace(made[name].status, phase=Phase.RUNNING)
        made[name] = await store.update_status(structs.replace(made[name], status=running))
    await store.update(
        structs.replace(made["held"], spec=structs.replace(made["held"].spec, paused=True))
    )

    async def names(selector: str) -> list[str]:
        page = await store.list(Sandbox, namespace=ns, fields=parse_fields(selector))
        return [item.metadata.name for item in page.items]

    assert await names("status.phase=Running") == ["busy", "held"]
    assert await names("status.phase=Pending") == ["idle"]
    assert await names("status.phase!=Pending") == ["busy", "held"]
    assert await names("status.phase=Running,spec.paused=true") == ["held"]
    assert await names("status.phase=Running,spec.paused!=true") == ["busy"]
