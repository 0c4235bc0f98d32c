"""Paddock installed on a cluster: every role is a pod on a node with a real kubelet.

Images, probes, security contexts, service accounts, rights, Secrets, Services, DNS names and
policies are those of `paddock kube install`. Gateways serve TLS, and clients verify it. The test
node replaces kube-proxy, cluster DNS and a network plugin that enforces policies.
"""

import asyncio
import json
from base64 import b64decode
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from paddock.installation.secrets import fingerprint
from paddock.runtime.kubernetes.freezer import CGROUPS
from tests.cluster.control_plane import KubeCluster
from tests.cluster.fixtures import cluster_for_nodes
from tests.cluster.info import RefusedError
from tests.cluster.node import images
from tests.cluster.node import machine as real
from tests.on_cluster.world.deployed import Deployed
from tests.on_cluster.world.installation import SDK
from tests.ports import free_port

pytestmark = [
    pytest.mark.kubernetes,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(900),
]
NAMESPACE = "sandboxing"
"""Not the default namespace: nothing may depend on that."""
REPLICAS = 2
SECRET = "certificate"
"""The Secret with which gateways serve TLS."""
LAST = "test_nothing_is_left_after_a_purge"


@pytest.fixture(scope="module")
def cluster() -> Iterator[KubeCluster]:
    """A control plane without Paddock."""
    with cluster_for_nodes(our_kinds=False, has_kubelets=True) as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def deployed(
    cluster: KubeCluster, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[Deployed]:
    """The result of `paddock kube install --wait`, which returns when all probes pass."""
    if not SDK.exists():
        pytest.skip("the E2B client is not installed (scripts/install-clients)")
    archive = await asyncio.to_thread(images.archive)
    async with real.RealNode(cluster, [archive], pause=images.PAUSE, has_services=True) as node:
        made = Deployed(cluster.info, node, NAMESPACE)
        await made.certify(tmp_path_factory.mktemp("tls"), SECRET)
        said = await made.paddock(
            *("install", "--image", images.PADDOCK, "--default-image", images.SANDBOX),
            *("--tls-secret", SECRET, "--tls-image", images.ENVOY),
            *("--webhook", "--replicas", str(REPLICAS), "--wait", "300"),
        )
        made.api_key = said["apiKey"]
        yield made


async def test_every_role_is_available_and_status_reports_it(deployed: Deployed) -> None:
    all_ready = {"node": (1, 1)}
    all_ready |= dict.fromkeys(("controllers", "api", "gateway"), (REPLICAS, REPLICAS))

    async def says_so() -> bool:
        shown = await deployed.paddock("status")
        rows = {row["role"]: (row["ready"], row["wanted"]) for row in shown["roles"]}
        names = [pod["metadata"]["name"] for pod in deployed.pods("controllers")]
        return rows == all_ready and any(shown["leader"].startswith(name) for name in names)

    # On a busy machine a probe may be late and a lease may expire.
    await deployed.eventually(says_so)
    await deployed.until(lambda: set(deployed.availability()) == {"True"})
    assert len(deployed.availability()) == 3


@pytest.mark.parametrize("role", ["controllers", "api", "gateway"])
async def test_a_role_has_only_the_privileges_it_needs(deployed: Deployed, role: str) -> None:
    for pod in deployed.pods(role):
        uid = pod["metadata"]["uid"]
        # A process that lost its lease exits and is restarted.
        await deployed.until(
            lambda uid=uid: len(deployed.node.processes_of(uid, b"paddock.app")) == 1
        )
        [process] = deployed.node.processes_of(uid, b"paddock.app")
        fields = _fields(process)
        assert fields["Uid"].split() == ["65532"] * 4
        assert int(fields["CapEff"], 16) == int(fields["CapBnd"], 16) == 0
        assert (fields["NoNewPrivs"], fields["Seccomp"]) == ("1", "2")
        mounts = [line.split() for line in (process / "mountinfo").read_text().splitlines()]
        [root] = [mount[5].split(",") for mount in mounts if mount[4] == "/"]
        assert "ro" in root


def _fields(process: Path) -> dict[str, str]:
    lines = (process / "status").read_text().splitlines()
    return dict(line.split(":\t", 1) for line in lines if ":\t" in line)


async def test_the_unmodified_client_works(deployed: Deployed) -> None:
    await deployed.until(lambda: deployed.is_stocked(2))
    sandbox_id, said, listed = await deployed.sdk(
        """
box = Sandbox.create(timeout=600, envs={"GREETING": "hello"}, metadata={"who": "test"})
box.files.write("/home/user/one", "through the gateway")
said = box.commands.run("id -un; echo $GREETING; cat one").stdout
listed = [item.sandbox_id for item in Sandbox.list().next_items()]
box.commands.run("while sleep 0.1; do echo >> /tmp/ticks; done", background=True)
box.pause() if hasattr(box, "pause") else box.beta_pause()
print(json.dumps([box.sandbox_id, said, listed]))
"""
    )
    assert said.splitlines() == ["user", "hello", "through the gateway"]
    assert sandbox_id in listed
    box = deployed.sandbox(sandbox_id)
    assert box["status"]["phase"] == "Paused"
    path = f"/api/v1/namespaces/default/pods/{box['metadata']['name']}"
    pod = deployed.info.request("GET", path)
    states = set(deployed.node.process_states(pod["metadata"]["uid"]))
    assert states == {"D"} or (CGROUPS / "cgroup.controllers").exists(), "by the node's agent"
    kept, killed = await deployed.sdk(
        """
box = Sandbox.connect(os.environ["ID"])
print(json.dumps([box.files.read("/home/user/one"), Sandbox.kill(os.environ["ID"])]))
""",
        ID=sandbox_id,
    )
    assert (kept, killed) == ("through the gateway", True)


async def test_a_forwarded_port_is_enough_for_clients_elsewhere(deployed: Deployed) -> None:
    async with deployed.forwarded(free_port()) as url:
        said, killed = await deployed.sdk(
            """
box = Sandbox.create(timeout=600)
print(json.dumps([box.commands.run("echo here").stdout, box.kill()]))
""",
            url=url,
        )
    assert (said, killed) == ("here\n", True)


async def test_a_rotation_of_the_seed_keeps_sandboxes_and_their_tokens(deployed: Deployed) -> None:
    [sandbox_id, token] = await deployed.sdk(
        """
box = Sandbox.create(timeout=600)
box.files.write("/home/user/one", "from before")
box.pause() if hasattr(box, "pause") else box.beta_pause()
print(json.dumps([box.sandbox_id, box._envd_access_token]))
"""
    )
    rotated = await deployed.paddock("rotate-seed")
    kept, same, said, metrics, killed = await deployed.sdk(
        """
box = Sandbox.connect(os.environ["ID"])
new = Sandbox.create(timeout=600)
print(json.dumps([
    box.files.read("/home/user/one"),
    box._envd_access_token == os.environ["TOKEN"],
    new.commands.run("echo new").stdout,
    len(box.get_metrics()),
    [box.kill(), new.kill()],
]))
""",
        ID=sandbox_id,
        TOKEN=token,
    )
    assert (kept, same, said, killed) == ("from before", True, "new\n", [True, True])
    assert metrics, "the control plane reaches the sidecar of a pod from before"
    path = f"/api/v1/namespaces/{NAMESPACE}/secrets/paddock"
    data = deployed.info.request("GET", path)["data"]
    assert fingerprint(b64decode(data["seed"]).decode()) == rotated["seed"]
    assert "next-seed" not in data
    assert len(b64decode(data["accepted-seeds"]).split(b",")) == 1


async def test_only_allowed_clients_reach_pods(deployed: Deployed) -> None:
    sandbox_id = await deployed.sdk("print(json.dumps(Sandbox.create(timeout=600).sandbox_id))")
    await deployed.until(lambda: deployed.is_stocked(1))
    idle = next(box for box in deployed.running() if "claim" not in box["spec"])
    addresses = {
        role: deployed.pods(role)[0]["status"]["podIP"]
        for role in ("controllers", "api", "gateway", "node")
    }
    # This is for clients.
    await deployed.eventually(lambda: deployed.reaches(addresses["gateway"], 3443))
    closed = {
        "the gateway without TLS": (addresses["gateway"], 3000),
        "what gateways tell each other": (addresses["gateway"], 3002),
        "the API, past the gateways": (addresses["api"], 3001),
        "what the leader tells of itself": (addresses["controllers"], 3001),
        "the agent that freezes": (addresses["node"], 49985),
        "a sandbox, past the gateways": (idle["status"]["address"]["ip"], 49983),
    }
    places = json.dumps([*closed.values(), ("10.0.0.1", 443)])

    async def are_closed() -> bool:
        """The rules of the node are updated with a delay."""
        if any([await deployed.reaches(*place) for place in closed.values()]):
            return False
        return await deployed.sdk(ASK, ID=sandbox_id, TRY=TRY, PLACES=places) == []

    await deployed.eventually(are_closed)
    assert await deployed.sdk(KILL, ID=sandbox_id)


KILL = 'print(json.dumps(Sandbox.kill(os.environ["ID"])))'
ASK = """
box = Sandbox.connect(os.environ["ID"])
box.files.write("/tmp/try.py", os.environ["TRY"])
print(box.commands.run(f"python3 /tmp/try.py '{os.environ['PLACES']}'").stdout.strip())
"""
TRY = """
import json, socket, sys

reached = []
for address, port in json.loads(sys.argv[1]):
    try:
        socket.create_connection((address, port), 30).close()
        reached.append([address, port])
    except ConnectionRefusedError:
        pass
print(json.dumps(reached))
"""
"""Run in a sandbox: prints which addresses of the cluster are reachable."""


async def test_the_webhook_rejects_what_schemas_accept(deployed: Deployed) -> None:
    reaching = {"spec": {"volumes": [{"name": "v", "hostPath": {"path": "/"}}]}}
    template = {
        "apiVersion": "paddock.dev/v1alpha1",
        "kind": "SandboxTemplate",
        "metadata": {"name": "reaching"},
        "spec": {"image": images.SANDBOX, "podTemplate": reaching},
    }
    path = "/apis/paddock.dev/v1alpha1/namespaces/default/sandboxtemplates"

    def is_refused() -> bool:
        try:
            deployed.info.request("POST", path, template)
        except RefusedError as error:
            return "gives access to the node" in str(error)
        # On a busy machine it may time out, and then the object is accepted.
        deployed.info.request("DELETE", f"{path}/reaching")
        return False

    await deployed.until(is_refused)


async def test_nothing_is_left_after_a_purge(deployed: Deployed) -> None:
    # One is in use, one is frozen, the others are in the pool.
    await deployed.until(lambda: deployed.is_stocked(2))
    await deployed.sdk(
        """
Sandbox.create(timeout=600)
box = Sandbox.create(timeout=600)
box.pause() if hasattr(box, "pause") else box.beta_pause()
print("null")
"""
    )
    assert (await deployed.paddock("status"))["sandboxes"] >= 2
    # A frozen pod would not end without a node agent.
    await deployed.until(lambda: set(deployed.availability()) == {"True"})
    await deployed.paddock("uninstall", "--purge")
    for path in LEFT:
        left = [item["metadata"]["name"] for item in deployed.items(path)]
        assert not [name for name in left if _is_ours(name)], path
    assert not deployed.items("/api/v1/pods")
    assert not deployed.items("/apis/networking.k8s.io/v1/networkpolicies")
    names = [item["metadata"]["name"] for item in deployed.items("/api/v1/namespaces")]
    assert NAMESPACE not in names


_RIGHTS = "/apis/rbac.authorization.k8s.io/v1"
LEFT = (
    "/apis/apiextensions.k8s.io/v1/customresourcedefinitions",
    "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations",
    *(f"{_RIGHTS}/{kind}" for kind in ("clusterroles", "clusterrolebindings", "rolebindings")),
    "/api/v1/persistentvolumeclaims",
    "/api/v1/secrets",
    "/apis/coordination.k8s.io/v1/leases",
)


def _is_ours(name: str) -> bool:
    return "paddock" in name
