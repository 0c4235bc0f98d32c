"""User credentials have exactly the granted rights: every verb on every kind."""

import pytest

from paddock.resources.registry import KINDS, KindInfo
from tests.cluster.info import ClusterInfo, RefusedError
from tests.cluster.users import TENANT_NAMESPACE

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(180)]

READS = {"get", "list", "watch"}
WRITES = {"create", "update", "status", "patch", "delete", "deletecollection"}
FOREIGN = "default"
GRANTED = {
    ("reader", FOREIGN): READS,
    ("reader", TENANT_NAMESPACE): READS,
    ("tenant", FOREIGN): set[str](),
    ("tenant", TENANT_NAMESPACE): READS | WRITES,
    ("nobody", FOREIGN): set[str](),
    ("nobody", TENANT_NAMESPACE): set[str](),
    ("admin", FOREIGN): READS | WRITES,
}


def is_allowed(info: ClusterInfo, user: str, verb: str, kind: KindInfo, namespace: str) -> bool:
    """Whether a request is authorized; it may still fail for another reason. Changes nothing."""
    place = f"/apis/{kind.cls.API_VERSION}/namespaces/{namespace}/{kind.cls.PLURAL}"
    body = {"apiVersion": kind.cls.API_VERSION, "kind": kind.kind, "metadata": {"name": "none"}}
    method, path = {
        "get": ("GET", f"{place}/none"),
        "list": ("GET", place),
        "watch": ("GET", f"{place}?watch=1&timeoutSeconds=1&resourceVersion=x"),
        "create": ("POST", f"{place}?dryRun=All"),
        "update": ("PUT", f"{place}/none?dryRun=All"),
        "status": ("PUT", f"{place}/none/status?dryRun=All"),
        "patch": ("PATCH", f"{place}/none?dryRun=All"),
        "delete": ("DELETE", f"{place}/none?dryRun=All"),
        "deletecollection": ("DELETE", f"{place}?dryRun=All"),
    }[verb]
    try:
        info.request(method, path, body if method in ("POST", "PUT", "PATCH") else None, user=user)
    except RefusedError as refused:
        return refused.code != 403
    return True


@pytest.mark.parametrize(("user", "namespace"), sorted(GRANTED))
def test_a_credential_has_exactly_the_granted_rights(
    kube_cluster: ClusterInfo, user: str, namespace: str
) -> None:
    for kind in KINDS:
        done = {
            verb for verb in READS | WRITES if is_allowed(kube_cluster, user, verb, kind, namespace)
        }
        assert done == GRANTED[user, namespace], kind.kind
