"""The test cluster is real: RBAC and admission are enabled, the CRDs are served."""

import os
import select
import subprocess

import pytest

from paddock.resources.registry import KINDS
from tests.cluster.control_plane import ClusterInfo, KubeCluster, RefusedError, compact_etcd

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(180)]


def refusal(info: ClusterInfo, method: str, path: str, body: object = None, *, user: str) -> int:
    with pytest.raises(RefusedError) as caught:
        info.request(method, path, body, user=user)
    return caught.value.code


def test_every_kind_is_served(kube_cluster: ClusterInfo) -> None:
    served = kube_cluster.request("GET", "/apis/paddock.dev/v1alpha1")
    names = {item["name"] for item in served["resources"]}
    for info in KINDS:
        assert {info.cls.PLURAL, f"{info.cls.PLURAL}/status"} <= names


def test_a_reader_can_read_everywhere_and_write_nowhere(
    kube_cluster: ClusterInfo, kube_namespace: str
) -> None:
    path = f"/api/v1/namespaces/{kube_namespace}/secrets"
    assert kube_cluster.request("GET", path, user="reader")["items"] == []
    assert refusal(kube_cluster, "POST", path, {"metadata": {"name": "x"}}, user="reader") == 403


def test_a_tenant_is_restricted_to_its_namespace(
    kube_cluster: ClusterInfo, kube_namespace: str
) -> None:
    own = "/apis/paddock.dev/v1alpha1/namespaces/tenant/sandboxes"
    foreign = f"/apis/paddock.dev/v1alpha1/namespaces/{kube_namespace}/sandboxes"
    kube_cluster.request("GET", own, user="tenant")
    assert refusal(kube_cluster, "GET", foreign, user="tenant") == 403
    assert (
        refusal(kube_cluster, "GET", "/apis/paddock.dev/v1alpha1/sandboxes", user="tenant") == 403
    )


def test_a_user_without_roles_is_forbidden_everything(kube_cluster: ClusterInfo) -> None:
    assert refusal(kube_cluster, "GET", "/api/v1/secrets", user="nobody") == 403


def test_admission_rejects_objects_in_missing_namespaces(
    kube_cluster: ClusterInfo,
) -> None:
    path = "/api/v1/namespaces/nowhere/secrets"
    assert refusal(kube_cluster, "POST", path, {"metadata": {"name": "x"}}, user="admin") == 404


def test_kubectl_of_the_release_works(kube_cluster: ClusterInfo) -> None:
    done = subprocess.run(
        [kube_cluster.kubectl, "--kubeconfig", kube_cluster.kubeconfig, "get", "ns", "-o", "name"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "namespace/default" in done.stdout.split()


def test_a_separate_cluster_can_be_broken_and_leaves_nothing_behind() -> None:
    with KubeCluster(components=()) as cluster:
        cluster.info.request("POST", "/api/v1/namespaces", {"metadata": {"name": "kept"}})
        compact_etcd(cluster.info)
        cluster.restart_apiserver()
        kept = cluster.info.request("GET", "/api/v1/namespaces/kept")
        assert kept["status"]["phase"] == "Active"
        handles = [os.pidfd_open(process.pid) for process in cluster._processes.values()]
    assert not cluster.directory.exists()
    # Check these processes, not others that may have reused their pids.
    assert len(handles) == 2
    ended, _, _ = select.select(handles, [], [], 0)
    assert ended == handles
    for handle in handles:
        os.close(handle)
