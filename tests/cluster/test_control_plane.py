"""The test cluster is a real one: RBAC and admission are on, our kinds are served."""

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


def test_every_kind_of_ours_is_served(kube_cluster: ClusterInfo) -> None:
    served = kube_cluster.request("GET", "/apis/paddock.dev/v1alpha1")
    names = {item["name"] for item in served["resources"]}
    for info in KINDS:
        assert {info.cls.PLURAL, f"{info.cls.PLURAL}/status"} <= names


def test_a_reader_reads_everywhere_and_writes_nowhere(
    kube_cluster: ClusterInfo, kube_namespace: str
) -> None:
    path = f"/api/v1/namespaces/{kube_namespace}/secrets"
    assert kube_cluster.request("GET", path, user="reader")["items"] == []
    assert refusal(kube_cluster, "POST", path, {"metadata": {"name": "x"}}, user="reader") == 403


def test_a_tenant_works_in_its_namespace_and_sees_no_other(
    kube_cluster: ClusterInfo, kube_namespace: str
) -> None:
    own = "/apis/paddock.dev/v1alpha1/namespaces/tenant/sandboxes"
    foreign = f"/apis/paddock.dev/v1alpha1/namespaces/{kube_namespace}/sandboxes"
    kube_cluster.request("GET", own, user="tenant")
    assert refusal(kube_cluster, "GET", foreign, user="tenant") == 403
    assert (
        refusal(kube_cluster, "GET", "/apis/paddock.dev/v1alpha1/sandboxes", user="tenant") == 403
    )


def test_a_user_who_was_granted_nothing_may_do_nothing(kube_cluster: ClusterInfo) -> None:
    assert refusal(kube_cluster, "GET", "/api/v1/secrets", user="nobody") == 403


def test_admission_refuses_objects_in_namespaces_that_do_not_exist(
    kube_cluster: ClusterInfo,
) -> None:
    path = "/api/v1/namespaces/nowhere/secrets"
    assert refusal(kube_cluster, "POST", path, {"metadata": {"name": "x"}}, user="admin") == 404


def test_its_own_kubectl_speaks_to_it(kube_cluster: ClusterInfo) -> None:
    done = subprocess.run(
        [kube_cluster.kubectl, "--kubeconfig", kube_cluster.kubeconfig, "get", "ns", "-o", "name"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "namespace/default" in done.stdout.split()


def test_a_cluster_of_ones_own_can_be_broken_and_leaves_nothing_behind() -> None:
    with KubeCluster(components=()) as cluster:
        cluster.info.request("POST", "/api/v1/namespaces", {"metadata": {"name": "kept"}})
        compact_etcd(cluster.info)
        cluster.restart_apiserver()
        kept = cluster.info.request("GET", "/api/v1/namespaces/kept")
        assert kept["status"]["phase"] == "Active"
        handles = [os.pidfd_open(process.pid) for process in cluster._processes.values()]
    assert not cluster.directory.exists()
    # Of those very processes: others may have their numbers by now.
    assert len(handles) == 2
    ended, _, _ = select.select(handles, [], [], 0)
    assert ended == handles
    for handle in handles:
        os.close(handle)
