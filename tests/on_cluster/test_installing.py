"""Installation on a real API server: kustomize, `paddock kube`, the chart, and rights."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from paddock.cli.kube.files import write_deploy
from paddock.cli.kube.manifests import manifests
from paddock.cli.kube.options import KubeOptions
from paddock.resources.registry import KINDS
from tests.cluster.binaries import BinariesMissingError
from tests.cluster.control_plane import CONTROLLER_MANAGER, KubeCluster
from tests.cluster.fixtures import REQUIRE
from tests.cluster.info import ClusterInfo, RefusedError
from tests.cluster.kubelet import ROOT

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(400)]

DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm" / "paddock"
KUBE_CACHE = Path(os.environ.get("PADDOCK_KUBE_CACHE", "/var/cache/paddock/kube"))


@pytest.fixture(scope="module")
def empty_cluster() -> Iterator[ClusterInfo]:
    """A control plane without Paddock; its controllers create no pods."""
    try:
        with KubeCluster(
            components=(CONTROLLER_MANAGER,),
            controllers="*,-deployment-controller,-daemonset-controller",
            our_kinds=False,
        ) as cluster:
            yield cluster.info
    except BinariesMissingError as error:
        if os.environ.get(REQUIRE):
            pytest.fail(str(error))
        pytest.skip(str(error))


BOXES = "/apis/paddock.dev/v1alpha1/namespaces/default/sandboxes"
POLICIES = "/apis/networking.k8s.io/v1/namespaces/default/networkpolicies"
WEBHOOKS = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations"
WEBHOOK_SECRET = "/api/v1/namespaces/paddock-system/secrets/paddock-webhook"


def kubectl(info: ClusterInfo, *arguments: str, given: str | None = None) -> str:
    done = subprocess.run(
        [info.kubectl, f"--kubeconfig={info.kubeconfig}", *arguments],
        input=given,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def paddock(info: ClusterInfo, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = f"{info.binaries}:{os.environ['PATH']}"
    return subprocess.run(
        [str(Path(sys.executable).parent / "paddock"), "-o", "json", "kube", *arguments],
        env={**os.environ, "PATH": path, "KUBECONFIG": info.kubeconfig},
        capture_output=True,
        text=True,
        check=False,
    )


def test_generated_files_are_up_to_date(tmp_path: Path) -> None:
    shutil.copytree(DEPLOY, tmp_path / "deploy", symlinks=True)
    for made in write_deploy(tmp_path / "deploy"):
        committed = DEPLOY / made.relative_to(tmp_path / "deploy")
        assert made.read_text() == committed.read_text(), f"{committed} is old"


def test_the_server_accepts_the_kustomize_output(kube_cluster: ClusterInfo) -> None:
    built = kubectl(kube_cluster, "kustomize", str(DEPLOY / "kustomize" / "base"))
    kinds = [item["kind"] for item in yaml.safe_load_all(built)]
    assert kinds.count("CustomResourceDefinition") == len(KINDS)
    kubectl(kube_cluster, "create", "namespace", "paddock-system", "--dry-run=client")
    others = [
        item
        for item in yaml.safe_load_all(built)
        if item["kind"] in ("ClusterRole", "ClusterRoleBinding", "SandboxTemplate", "SandboxPool")
    ]
    listed = {"apiVersion": "v1", "kind": "List", "items": others}
    command = ("apply", "--server-side", "--dry-run=server", "-f", "-")
    kubectl(kube_cluster, *command, given=json.dumps(listed))


def test_components_equal_the_options_of_the_command(
    kube_cluster: ClusterInfo, tmp_path: Path
) -> None:
    shutil.copytree(DEPLOY, tmp_path / "deploy")
    overlay = tmp_path / "deploy" / "kustomize" / "overlay"
    overlay.mkdir()
    names = ("webhook", "monitor", "tls")
    (overlay / "kustomization.yaml").write_text(
        yaml.safe_dump(
            {"resources": ["../base"], "components": [f"../components/{name}" for name in names]}
        )
    )
    built = yaml.safe_load_all(kubectl(kube_cluster, "kustomize", str(overlay)))
    found = {key_of(item): item for item in built}
    chosen = KubeOptions(has_webhook=True, monitoring="monitoring", tls_secret="paddock-tls")
    ours = {key_of(item): item for item in manifests(chosen)}
    issued = {("Issuer", "paddock-webhook"), ("Certificate", "paddock-webhook")}
    crds = {key for key in found if key[0] == "CustomResourceDefinition"}
    assert set(found) == {*ours, *issued, *crds}
    for role in ("paddock-api", "paddock-gateway"):
        pod = found["Deployment", role]["spec"]["template"]["spec"]
        wanted = ours["Deployment", role]["spec"]["template"]["spec"]
        containers = {item["name"]: item for item in pod["containers"]}
        assert set(containers) == {item["name"] for item in wanted["containers"]}
        for container in wanted["containers"]:
            for name in {"env", "ports", "volumeMounts"} & set(container):
                by_name = {item["name"]: item for item in containers[container["name"]][name]}
                assert by_name == {item["name"]: item for item in container[name]}
        assert {v["name"] for v in pod["volumes"]} == {v["name"] for v in wanted["volumes"]}
    served = found["Service", "paddock"]["spec"]
    assert served["ports"] == ours["Service", "paddock"]["spec"]["ports"]
    webhook = found["ValidatingWebhookConfiguration", "paddock"]
    assert webhook == ours["ValidatingWebhookConfiguration", "paddock"]
    for policy in ("paddock-api", "paddock-gateway"):
        rules = found["NetworkPolicy", policy]["spec"]["ingress"]
        assert all(r in rules for r in ours["NetworkPolicy", policy]["spec"]["ingress"]), policy


def test_the_component_without_agents_removes_them(
    kube_cluster: ClusterInfo, tmp_path: Path
) -> None:
    shutil.copytree(DEPLOY, tmp_path / "deploy")
    overlay = tmp_path / "deploy" / "kustomize" / "overlay"
    overlay.mkdir()
    chosen = {"resources": ["../base"], "components": ["../components/no-node"]}
    (overlay / "kustomization.yaml").write_text(yaml.safe_dump(chosen))
    built = list(yaml.safe_load_all(kubectl(kube_cluster, "kustomize", str(overlay))))
    names = {key_of(item) for item in built if item["kind"] != "CustomResourceDefinition"}
    assert names == {key_of(item) for item in manifests(KubeOptions(has_node=False))}


def test_paddock_kube_installs_upgrades_shows_and_removes(empty_cluster: ClusterInfo) -> None:
    missing = paddock(empty_cluster, "status")
    assert missing.returncode == 1
    assert "not installed" in missing.stderr

    first = paddock(empty_cluster, "install", "--image", "paddock:1", "--node")
    assert first.returncode == 0, first.stderr
    key = json.loads(first.stdout)["apiKey"]
    assert key.startswith("e2b_")
    shown = json.loads(paddock(empty_cluster, "status").stdout)
    assert {row["role"]: row["wanted"] for row in shown["roles"]} == {
        "controllers": 2,
        "api": 2,
        "gateway": 2,
        "node": 0,
    }
    assert shown["sandboxes"] == 0

    refused = paddock(empty_cluster, "install", "--image", "paddock:1", "--tls-secret", "absent")
    assert refused.returncode != 0
    assert "there is no Secret absent in namespace paddock-system" in refused.stderr
    chosen = ("--replicas", "3", "--node", "--webhook")
    again = paddock(empty_cluster, "install", "--image", "paddock:2", *chosen)
    assert again.returncode == 0, again.stderr
    configuration = empty_cluster.request("GET", f"{WEBHOOKS}/paddock")
    shown = empty_cluster.request("GET", WEBHOOK_SECRET)["data"]["ca.crt"]
    assert configuration["webhooks"][0]["clientConfig"]["caBundle"] == shown
    assert paddock(empty_cluster, "install", "--image", "paddock:2", *chosen).returncode == 0
    assert empty_cluster.request("GET", WEBHOOK_SECRET)["data"]["ca.crt"] == shown, "it is kept"
    assert json.loads(again.stdout)["apiKey"] is None, "the Secret stays as it is"
    path = "/apis/apps/v1/namespaces/paddock-system/deployments/paddock-api"
    deployment = empty_cluster.request("GET", path)
    assert deployment["spec"]["replicas"] == 3
    assert deployment["spec"]["template"]["spec"]["containers"][0]["image"] == "paddock:2"

    _abandon_a_sandbox(empty_cluster)
    gone = paddock(empty_cluster, "uninstall", "--purge")
    assert gone.returncode == 0, gone.stderr
    for left in ("/api/v1/pods", "/apis/networking.k8s.io/v1/networkpolicies"):
        assert not empty_cluster.request("GET", left)["items"], left
    for left in ("clusterroles", "clusterrolebindings"):
        found = empty_cluster.request("GET", f"/apis/rbac.authorization.k8s.io/v1/{left}")
        assert not [i for i in found["items"] if i["metadata"]["name"].startswith("paddock-")]
    crds = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    assert not empty_cluster.request("GET", crds)["items"]
    assert not empty_cluster.request("GET", WEBHOOKS)["items"]


def _abandon_a_sandbox(info: ClusterInfo) -> None:
    """Create the objects of a sandbox that its removed controllers will not delete."""
    labels = {"paddock.dev/sandbox-uid": "1", "app.kubernetes.io/managed-by": "paddock"}
    named = {"name": "abandoned", "namespace": "default", "labels": labels}
    container = {"name": "sandbox", "image": "base"}
    policy = {"podSelector": {}, "policyTypes": ["Ingress"]}
    box = {**named, "finalizers": ["paddock.dev/sandbox"]}
    for place, version, kind, metadata, spec in (
        (BOXES, "paddock.dev/v1alpha1", "Sandbox", box, {"templateRef": {"name": "base"}}),
        ("/api/v1/namespaces/default/pods", "v1", "Pod", named, {"containers": [container]}),
        (POLICIES, "networking.k8s.io/v1", "NetworkPolicy", named, policy),
    ):
        body = {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec}
        info.request("POST", place, body)


ALLOWED = {
    "gateway": {("get", "sandboxes"), ("watch", "sandboxes")},
    "api": {
        ("get", "sandboxes"),
        ("watch", "sandboxes"),
        ("update", "sandboxes"),
        ("delete", "sandboxes"),
        ("update", "sandboxenvs/status"),
        ("update", "sandboxpools/finalizers"),
        ("update", "sandboxtemplates"),
        ("create", "secrets/paddock-system"),
        ("get", "secrets/paddock-system"),
        ("get", "pods/resize"),
        ("patch", "pods/resize"),
    },
    "controllers": {
        ("get", "sandboxes"),
        ("watch", "sandboxes"),
        ("update", "sandboxes"),
        ("delete", "sandboxes"),
        ("create", "sandboxenvs"),
        ("update", "sandboxenvs/status"),
        ("update", "sandboxpools/finalizers"),
        ("get", "pods"),
        ("create", "pods"),
        ("delete", "pods"),
        ("patch", "pods"),
        ("create", "events"),
        ("list", "events"),
        ("delete", "networkpolicies"),
        ("get", "secrets/paddock-system"),
        ("create", "persistentvolumeclaims"),
        ("get", "pods/resize"),
        ("patch", "pods/resize"),
    },
}
SUBRESOURCES = ("exec", "resize", "status", "finalizers")
ASKED = sorted(
    {item for allowed in ALLOWED.values() for item in allowed}
    | {
        ("get", "secrets"),
        ("create", "secrets"),
        ("get", "nodes"),
        ("create", "sandboxtemplates"),
        ("delete", "sandboxenvs"),
        # Nothing is built in pods.
        ("update", "templatebuilds"),
        ("update", "templatebuilds/status"),
        ("delete", "templatebuilds"),
        ("create", "clusterrolebindings"),
        ("create", "pods/exec"),
        ("update", "pods"),
        ("get", "pods"),
        ("impersonate", "serviceaccounts"),
        ("delete", "namespaces"),
    }
)


@pytest.mark.parametrize("role", sorted(ALLOWED))
def test_each_role_has_exactly_the_rights_it_needs(role: str, kube_cluster: ClusterInfo) -> None:
    _install_rights(kube_cluster)
    user = f"system:serviceaccount:paddock-system:paddock-{role}"
    deadline = time.monotonic() + 60
    for right in sorted(ALLOWED[role]):
        # RBAC rules take effect when the server's watch has delivered them.
        while not is_allowed(kube_cluster, user, *right) and time.monotonic() < deadline:
            time.sleep(0.05)
    may = {right for right in ASKED if is_allowed(kube_cluster, user, *right)}
    assert may == ALLOWED[role]


def is_allowed(info: ClusterInfo, user: str, verb: str, resource: str) -> bool:
    """Return the API server's access review of a user."""
    name, _, namespace = resource.partition("/")
    subresource = namespace if namespace in SUBRESOURCES else ""
    namespace = "default" if namespace in ("", *SUBRESOURCES) else namespace
    group = "paddock.dev" if name.startswith(("sandbox", "templatebuild")) else ""
    if name == "clusterrolebindings":
        group = "rbac.authorization.k8s.io"
    if name == "networkpolicies":
        group = "networking.k8s.io"
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {
            "user": user,
            "resourceAttributes": {
                "verb": verb,
                "resource": name,
                "group": group,
                "namespace": namespace,
                "subresource": subresource,
            },
        },
    }
    path = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
    return info.request("POST", path, review)["status"]["allowed"]


def test_readers_can_read_and_other_tenants_see_nothing(kube_cluster: ClusterInfo) -> None:
    """User credentials: rights on Paddock's kinds are Kubernetes RBAC."""
    path = "/apis/paddock.dev/v1alpha1/namespaces/default/sandboxes"
    box = {
        "apiVersion": "paddock.dev/v1alpha1",
        "kind": "Sandbox",
        "metadata": {"name": "rights"},
        "spec": {"templateRef": {"name": "base"}},
    }
    kube_cluster.request("POST", path, box)
    try:
        assert kube_cluster.request("GET", f"{path}/rights", user="reader")["kind"] == "Sandbox"
        for user, method, where, body in (
            ("reader", "DELETE", f"{path}/rights", None),
            ("reader", "POST", path, box),
            ("tenant", "GET", f"{path}/rights", None),
            ("tenant", "POST", path, box),
            ("nobody", "GET", path, None),
        ):
            with pytest.raises(RefusedError) as refused:
                kube_cluster.request(method, where, body, user=user)
            assert refused.value.code == 403, f"{user} {method}"
        own = path.replace("/default/", "/tenant/")
        kube_cluster.request("POST", own, box, user="tenant")
        kube_cluster.request("DELETE", f"{own}/rights", user="tenant")
    finally:
        kube_cluster.request("DELETE", f"{path}/rights")


def _install_rights(info: ClusterInfo) -> None:
    wanted = ("Namespace", "ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Role")
    items = [m for m in manifests(KubeOptions()) if m["kind"] in (*wanted, "RoleBinding")]
    listed = {"apiVersion": "v1", "kind": "List", "items": items}
    kubectl(info, "apply", "--server-side", "-f", "-", given=json.dumps(listed))


# ---- the chart -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def helm() -> str:
    """The Helm built by tools/helm."""
    found = [str(path) for path in sorted(KUBE_CACHE.glob("helm-*/helm"))]
    found += [path for path in (os.environ.get("PADDOCK_HELM"), shutil.which("helm")) if path]
    if not found:
        pytest.skip("Helm is not built; run tools/helm/build")
    return found[-1]


def run_helm(helm: str, info: ClusterInfo | None, *arguments: str) -> str:
    command = [helm, *arguments]
    if info is not None:
        command += [f"--kubeconfig={info.kubeconfig}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def key_of(item: dict[str, Any]) -> tuple[str, str]:
    return item["kind"], item["metadata"]["name"]


def test_the_chart_lints_and_equals_paddock_kube(helm: str) -> None:
    run_helm(helm, None, "lint", "--strict", str(CHART))
    text = run_helm(
        helm,
        None,
        "template",
        "paddock",
        str(CHART),
        "-n",
        "paddock-system",
        "--set",
        "webhook.enabled=true,serviceMonitor.enabled=true,tls.enabled=true",
    )
    rendered = {key_of(item): item for item in yaml.safe_load_all(text) if item}
    certificate = rendered["Secret", "paddock-webhook"]["data"]["tls.crt"]
    chosen = KubeOptions(
        has_webhook=True,
        ca_bundle=certificate,
        monitoring="monitoring",
        tls_secret="paddock-tls",
    )
    ours = {key_of(item): item for item in manifests(chosen)}
    ours.pop(("Namespace", "paddock-system"))
    extra = {key for key in rendered if key[0] not in ("CustomResourceDefinition", "Secret")}
    assert extra == set(ours)
    for key, item in ours.items():
        if "rules" in item:
            assert rendered[key]["rules"] == item["rules"], key
        elif item["kind"] == "ValidatingWebhookConfiguration":
            assert rendered[key]["webhooks"] == item["webhooks"]
        elif item["kind"] in ("Service", "PodDisruptionBudget", "NetworkPolicy", "PodMonitor"):
            theirs = {k: v for k, v in rendered[key]["spec"].items() if k != "type"}
            assert theirs == item["spec"], key
        elif item["kind"] in ("Deployment", "DaemonSet"):
            pods = [one["spec"]["template"]["spec"] for one in (item, rendered[key])]
            containers = [pod.pop("containers") for pod in pods]
            assert pods[0] == pods[1], key
            for mine, theirs in zip(*containers, strict=True):
                theirs.pop("imagePullPolicy")
                by_name = {one["name"]: one for one in theirs.pop("env", ())}
                assert by_name == {one["name"]: one for one in mine.pop("env", ())}, key
                assert theirs == mine, key
        elif item["kind"] == "ConfigMap":
            assert rendered[key]["data"] == item["data"]


def test_the_default_chart_can_pause_and_one_without_agents_says_that_it_cannot(
    helm: str,
) -> None:
    default = rendered(helm)
    assert ("DaemonSet", "paddock-node") in default
    without = rendered(helm, "node.enabled=false")
    assert {key for key in default if "node" in key[1]} == set(default) - set(without)
    narrow = rendered(helm, "node.cgroupPath=/sys/fs/cgroup/kubepods.slice")
    pod = narrow["DaemonSet", "paddock-node"]["spec"]["template"]["spec"]
    assert {"path": "/sys/fs/cgroup/kubepods.slice"} in [v.get("hostPath") for v in pod["volumes"]]


def rendered(helm: str, chosen: str = "") -> dict[tuple[str, str], dict[str, Any]]:
    options = ("--set", chosen) if chosen else ()
    text = run_helm(helm, None, "template", "p", str(CHART), "-n", "paddock-system", *options)
    return {key_of(item): item for item in yaml.safe_load_all(text) if item}


def test_with_tls_clients_reach_only_the_tls_port_and_cert_manager_issues_the_certificate(
    helm: str,
) -> None:
    issued = "tls.certManager.enabled=true,tls.certManager.issuerRef.name=le"
    names = "tls.certManager.dnsNames={sandboxes.example.com,*.sandboxes.example.com}"
    found = rendered(helm, f"tls.enabled=true,tls.secretName=own,{issued},{names}")
    assert [p["port"] for p in found["Service", "paddock"]["spec"]["ports"]] == [443]
    open_to_all = [
        port["port"]
        for rule in found["NetworkPolicy", "paddock-gateway"]["spec"]["ingress"]
        for port in rule["ports"]
        if "from" not in rule
    ]
    assert open_to_all == [3443]
    spec = found["Certificate", "paddock-tls"]["spec"]
    assert spec["secretName"] == "own"
    assert spec["dnsNames"] == ["sandboxes.example.com", "*.sandboxes.example.com"]
    assert spec["issuerRef"] == {"kind": "ClusterIssuer", "name": "le"}
    pod = found["Deployment", "paddock-gateway"]["spec"]["template"]["spec"]
    assert {"secretName": "own"} in [volume.get("secret") for volume in pod["volumes"]]
    assert ("Certificate", "paddock-tls") not in rendered(helm, "tls.enabled=true")
    with pytest.raises(AssertionError, match=r"tls\.certManager needs dnsNames"):
        rendered(helm, f"tls.enabled=true,{issued}")


def test_the_placement_of_roles_does_not_affect_node_agents(helm: str) -> None:
    chosen = "nodeSelector.pool=system,node.nodeSelector.pool=sandboxes"
    text = run_helm(helm, None, "template", "paddock", str(CHART), "--set", chosen)
    found = {
        item["metadata"]["name"]: item["spec"]["template"]["spec"]["nodeSelector"]["pool"]
        for item in yaml.safe_load_all(text)
        if item and item["kind"] in ("Deployment", "DaemonSet")
    }
    assert found.pop("paddock-node") == "sandboxes"
    assert set(found.values()) == {"system"}
    text = run_helm(helm, None, "template", "p", str(CHART), "--set", chosen.rpartition(",")[0])
    [node] = [item for item in yaml.safe_load_all(text) if item and item["kind"] == "DaemonSet"]
    assert "nodeSelector" not in node["spec"]["template"]["spec"]


def test_roles_meet_the_restricted_pod_security_standard(
    kube_cluster: ClusterInfo, kube_namespace: str
) -> None:
    """Except the node agents, which write to the host's cgroups."""
    profile = "pod-security.kubernetes.io/warn=restricted"
    kubectl(kube_cluster, "label", "namespace", kube_namespace, profile)
    warned = set[str]()
    chosen = KubeOptions(namespace=kube_namespace, tls_secret="paddock-tls")
    for item in manifests(chosen):
        if item["kind"] not in ("Deployment", "DaemonSet"):
            continue
        done = subprocess.run(
            [
                *(kube_cluster.kubectl, f"--kubeconfig={kube_cluster.kubeconfig}"),
                *("create", "--dry-run=server", "-f", "-"),
            ],
            input=json.dumps(item),
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        if "would violate PodSecurity" in done.stderr:
            warned.add(item["metadata"]["name"])
    assert warned == {"paddock-node"}


@pytest.mark.parametrize(
    "setting",
    [
        "api.replicas=-1",
        "gateway.service.type=Bogus",
        "unknown=1",
        "image=",
        "webhook.failurePolicy=Maybe",
        "tls.secretName=",
        "node.cgroupPath=/etc",
    ],
)
def test_the_schema_names_a_wrong_value(helm: str, setting: str) -> None:
    done = subprocess.run(
        [helm, "template", "paddock", str(CHART), "--set", setting],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert setting.partition("=")[0].split(".")[-1] in done.stderr


@pytest.fixture
def released(helm: str, empty_cluster: ClusterInfo) -> Iterator[Callable[..., str]]:
    """Helm on the empty cluster, in Paddock's namespace; everything is removed afterwards."""

    def run(command: str, *arguments: str) -> str:
        return run_helm(helm, empty_cluster, command, "paddock", *arguments, *PLACE)

    yield run
    gone = paddock(empty_cluster, "uninstall", "--purge")
    assert gone.returncode == 0, gone.stderr
    assert not empty_cluster.request("GET", CRDS)["items"]


PLACE = ("-n", "paddock-system")
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
SECRET = "/api/v1/namespaces/paddock-system/secrets/paddock"
GATEWAYS = "/apis/apps/v1/namespaces/paddock-system/deployments/paddock-gateway"
POOL = "/apis/paddock.dev/v1alpha1/namespaces/default/sandboxpools/base"


def test_the_chart_installs_upgrades_and_uninstalls_cleanly(
    released: Callable[..., str], empty_cluster: ClusterInfo
) -> None:
    # Fail: no webhook answers here, and the chart's own objects must not need it.
    settings = "gateway.replicas=3,webhook.enabled=true,webhook.failurePolicy=Fail"
    chosen = (str(CHART), "--set", settings)
    released("install", *chosen, "--create-namespace")
    shown = empty_cluster.request("GET", WEBHOOK_SECRET)["data"]["tls.crt"]
    released("upgrade", *chosen)
    assert empty_cluster.request("GET", WEBHOOK_SECRET)["data"]["tls.crt"] == shown, "it is kept"
    client = empty_cluster.request("GET", f"{WEBHOOKS}/paddock")["webhooks"][0]["clientConfig"]
    assert client["caBundle"] == shown
    seed = empty_cluster.request("GET", SECRET)["data"]["seed"]
    pool = empty_cluster.request("GET", POOL)
    assert pool["spec"]["replicas"] == 2

    released("upgrade", str(CHART))
    assert empty_cluster.request("GET", SECRET)["data"]["seed"] == seed, "tokens stay valid"
    service = "/api/v1/namespaces/paddock-system/services/paddock"
    assert _ports(empty_cluster.request("GET", service)) == [80]
    # As in the guide: TLS later, with the values of before.
    released("upgrade", str(CHART), "--set", "gateway.replicas=4")
    released("upgrade", str(CHART), "--reuse-values", "--set", "tls.enabled=true")
    assert _ports(empty_cluster.request("GET", service)) == [443]
    assert empty_cluster.request("GET", GATEWAYS)["spec"]["replicas"] == 4
    assert empty_cluster.request("GET", SECRET)["data"]["seed"] == seed
    released("uninstall")
    deployments = "/apis/apps/v1/namespaces/paddock-system/deployments"
    assert not empty_cluster.request("GET", deployments)["items"]
    left = empty_cluster.request("GET", CRDS)["items"]
    assert len(left) == len(KINDS), "sandboxes outlive an uninstall"
    pool["spec"]["replicas"] = 7
    _replace(empty_cluster, POOL, pool)
    released("install", str(CHART))
    again = empty_cluster.request("GET", POOL)
    assert again["metadata"]["uid"] == pool["metadata"]["uid"], "people's pools stay theirs"
    assert again["spec"]["replicas"] == 7


def _ports(service: dict[str, Any]) -> list[int]:
    return [port["port"] for port in service["spec"]["ports"]]


def _replace(info: ClusterInfo, path: str, body: dict[str, Any]) -> None:
    """Update; the API server may still call a webhook shortly after its removal."""
    deadline = time.monotonic() + 60
    while True:
        try:
            info.request("PUT", path, body)
        except RefusedError as refused:
            if "failed calling webhook" not in str(refused) or time.monotonic() > deadline:
                raise
            time.sleep(0.1)
        else:
            return


def test_a_chart_upgrade_requires_upgraded_crds(
    helm: str, released: Callable[..., str], empty_cluster: ClusterInfo
) -> None:
    released("install", str(CHART), "--create-namespace")
    kind = "sandboxpools.paddock.dev"
    kubectl(empty_cluster, "annotate", "--overwrite", "crd", kind, "paddock.dev/definition=older")
    with pytest.raises(AssertionError, match=f"definition of {kind} is not this chart's: run"):
        released("upgrade", str(CHART))
    released("upgrade", str(CHART), "--set", "crds.check=false")

    definitions = run_helm(helm, None, "show", "crds", str(CHART))
    apply = ("apply", "--server-side", "--force-conflicts", "-f", "-")
    applied = kubectl(empty_cluster, *apply, given=definitions)
    assert applied.count("serverside-applied") == len(KINDS)
    released("upgrade", str(CHART))
