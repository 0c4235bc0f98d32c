"""NetworkPolicies of sandboxes on a real API server: created once, and deleted when unused."""

from pathlib import Path
from typing import Any

import pytest

from paddock.kit.clock import ManualClock
from paddock.resources.kinds.pods import NetworkPolicyManifest, Pod
from paddock.resources.meta import Key, ObjectMeta
from paddock.runtime.kubernetes import names
from paddock.runtime.kubernetes.network.policies import IDLE_SECONDS, NetworkPolicies
from paddock.runtime.port import EgressPolicy
from paddock.store.kubernetes import KubernetesStore, load_kubeconfig
from tests.cluster.info import ClusterInfo

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(180)]


class ObjectIndex:
    """The pods that are there."""

    def __init__(self) -> None:
        self.pods: tuple[Pod, ...] = ()

    def all(self) -> tuple[Pod, ...]:
        return self.pods


async def test_a_policy_is_created_once_and_deleted_after_its_last_pod(
    kube_cluster: ClusterInfo, kube_namespace: str
) -> None:
    access = load_kubeconfig([Path(kube_cluster.kubeconfig)], context="admin")
    store, clock, picture = KubernetesStore.open(access), ManualClock(), ObjectIndex()
    pictured: Any = picture
    policies = NetworkPolicies(
        store, pictured, system_namespace="paddock-system", clock=clock, namespace=kube_namespace
    )

    async def there() -> set[str]:
        found = await store.list(NetworkPolicyManifest, namespace=kube_namespace)
        return {item.metadata.name for item in found.items}

    try:
        used, unused = EgressPolicy(), EgressPolicy(allow_internet=False, allow_out=("10.0.0.1",))
        for policy in (used, unused, used):
            await policies.ensure(policy, kube_namespace)
        stranger = NetworkPolicyManifest(
            metadata=ObjectMeta(
                name="theirs",
                namespace=kube_namespace,
                labels={names.LABEL_MANAGED: names.MANAGER},
            ),
            spec={"podSelector": {}, "policyTypes": ["Ingress"]},
        )
        await store.create(stranger)
        labels = {names.LABEL_EGRESS: policies.name(used)}
        metadata = ObjectMeta(name="box", namespace=kube_namespace, labels=labels)
        picture.pods = (Pod(metadata=metadata),)
        assert await policies.sweep() == ()

        clock.advance(IDLE_SECONDS)
        assert await policies.sweep() == (Key(kube_namespace, policies.name(unused)),)
        assert await there() == {policies.name(used), "theirs"}

        await policies.ensure(unused, kube_namespace)
        assert await there() == {policies.name(used), policies.name(unused), "theirs"}
    finally:
        await store.close()
