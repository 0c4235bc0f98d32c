"""The unmodified E2B client against a real API server, with two replicas of every role.

One installation serves all tests, in any order.
"""

import asyncio
import signal
from contextlib import aclosing

import aiohttp
import pytest

from paddock.resources.kinds.builtin import Lease, LeaseSpec
from paddock.resources.kinds.pods import NetworkPolicyManifest, Pod, PodManifest, VolumeClaim
from paddock.resources.kinds.sandbox import Phase, Sandbox, SandboxSpec
from paddock.resources.kinds.template import (
    NetworkPolicy,
    SandboxTemplate,
    SandboxTemplateSpec,
    TemplateRef,
)
from paddock.resources.meta import Key, ObjectMeta
from tests.cluster.control_plane import KubeCluster
from tests.on_cluster.world.installation import API_KEY, LEASE_SECONDS, START_SECONDS, Installation

pytestmark = [
    pytest.mark.kubernetes,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="module"),
]

RETRY_SECONDS = 1.0
"""Interval in which a standby reads a lease of `LEASE_SECONDS`."""
STARVED_SECONDS = 30.0


async def test_a_client_creates_uses_and_kills_a_sandbox(paddock: Installation) -> None:
    await paddock.stocked(2)

    made = await paddock.sdk(
        """
box = Sandbox.create(envs={"COLOUR": "green"}, timeout=300)
ran = box.commands.run("echo $COLOUR; id -un; cat /etc/debian_version")
box.files.write("/tmp/hello", "world")
print(json.dumps([box.sandbox_id, ran.stdout, box.files.read("/tmp/hello")]))
"""
    )
    sandbox_id, output, content = made
    assert output.splitlines()[:2] == ["green", "user"]
    assert content == "world"

    # The other replica and the other gateway know it at once.
    seen = await paddock.sdk(
        """
box = Sandbox.connect(os.environ["ID"])
print(json.dumps([box.get_info().sandbox_id, box.files.read("/tmp/hello")]))
""",
        gateway=1,
        ID=sandbox_id,
    )
    assert seen == [sandbox_id, "world"]

    found = await paddock.sandbox(sandbox_id)
    pod = await paddock.store.get(Pod, found.key)
    assert [ref.uid for ref in pod.metadata.owner_references] == [found.metadata.uid]
    assert found.status.runtime == "kubernetes"
    policy = pod.metadata.labels["paddock.dev/egress"]
    await paddock.store.get(NetworkPolicyManifest, Key("default", policy))

    assert await paddock.sdk('print(json.dumps(Sandbox.kill(os.environ["ID"])))', ID=sandbox_id)

    async def is_gone() -> bool:
        page = await paddock.store.list(Pod, namespace="default")
        return all(item.metadata.uid != pod.metadata.uid for item in page.items)

    await paddock.eventually(is_gone)


async def _reached(paddock: Installation, key: Key) -> list[str]:
    """Return the networks that a pod may connect to, DNS apart."""
    pod = await paddock.store.get(Pod, key)
    name = pod.metadata.labels["paddock.dev/egress"]
    policy = await paddock.store.get(NetworkPolicyManifest, Key(key.namespace, name))
    rules = [rule for rule in policy.spec["egress"] if "ports" not in rule]
    return [peer["ipBlock"]["cidr"] for rule in rules for peer in rule["to"]]


async def test_pods_reach_what_template_and_team_allow(paddock: Installation) -> None:
    network = NetworkPolicy(
        allow_internet_access=False, allow_out=("8.8.8.8",), allow_public_traffic=False
    )
    template = SandboxTemplate(
        metadata=ObjectMeta(name="closed", namespace="default"),
        spec=SandboxTemplateSpec(network=network),
    )
    await paddock.store.create(template)
    sandbox_id, has_token = await paddock.sdk(
        """
box = Sandbox.create("closed", timeout=300, allow_internet_access=True)
print(json.dumps([box.sandbox_id, bool(box.traffic_access_token)]))
"""
    )
    assert has_token
    key = (await paddock.sandbox(sandbox_id)).key
    assert await _reached(paddock, key) == ["8.8.8.8/32"]

    async with aiohttp.ClientSession(headers={"X-API-Key": API_KEY}) as client:
        team = f"http://127.0.0.1:{paddock.api_ports[0]}/teams/default"

        async def set_internet(value: str | None) -> int:
            async with client.patch(team, json={"internet": value}) as answer:
                return answer.status

        assert await set_internet("registries") == 400  # NetworkPolicies support addresses only.
        assert await set_internet("closed") == 200
        try:

            async def is_closed() -> bool:
                return await _reached(paddock, key) == []

            await paddock.eventually(is_closed)
        finally:
            assert await set_internet(None) == 200
    assert await paddock.sdk('print(json.dumps(Sandbox.kill(os.environ["ID"])))', ID=sandbox_id)


async def test_a_replica_sees_the_writes_of_the_other(paddock: Installation) -> None:
    await paddock.stocked(1)
    one, two = (f"http://127.0.0.1:{port}" for port in paddock.api_ports)
    async with aiohttp.ClientSession(headers={"X-API-Key": API_KEY}) as http:
        body = {"templateID": "base", "timeout": 300}
        async with http.post(f"{one}/sandboxes", json=body) as answer:
            assert answer.status == 201, await answer.text()
            sandbox_id = (await answer.json())["sandboxID"]
        for timeout in (400, 500, 600):
            async with http.post(
                f"{one}/sandboxes/{sandbox_id}/timeout", json={"timeout": timeout}
            ) as answer:
                assert answer.status == 204
            async with http.get(f"{one}/sandboxes/{sandbox_id}") as answer:
                ends_here = (await answer.json())["endAt"]
            async with http.get(f"{two}/sandboxes/{sandbox_id}") as answer:
                assert answer.status == 200, await answer.text()
                assert (await answer.json())["endAt"] == ends_here
        async with http.delete(f"{two}/sandboxes/{sandbox_id}") as answer:
            assert answer.status == 204
        async with http.get(f"{one}/sandboxes/{sandbox_id}") as answer:
            assert answer.status == 404


async def test_a_stopped_sandbox_keeps_its_files_on_a_volume(paddock: Installation) -> None:
    sandbox_id = await paddock.sdk(
        """
box = Sandbox.create("kept", timeout=300)
box.files.write("/home/user/kept", "on the volume")
box.files.write("/tmp/lost", "in the container")
pause(box)
print(json.dumps(box.sandbox_id))
"""
    )
    stopped = await paddock.sandbox(sandbox_id)
    assert stopped.status.phase is Phase.PAUSED
    claim = await paddock.store.get(VolumeClaim, Key("default", f"home-{stopped.metadata.name}"))
    assert claim.metadata.annotations["paddock.dev/stopped"] == "1"

    await paddock.eventually(lambda: paddock.is_gone(stopped.key))

    kept, lost = await paddock.sdk(
        """
box = Sandbox.connect(os.environ["ID"])
print(json.dumps([box.files.read("/home/user/kept"), box.files.exists("/tmp/lost")]))
""",
        gateway=1,
        ID=sandbox_id,
    )
    assert (kept, lost) == ("on the volume", False)
    assert (await paddock.sandbox(sandbox_id)).status.incarnation == 2
    assert await paddock.sdk('print(json.dumps(Sandbox.kill(os.environ["ID"])))', ID=sandbox_id)


async def test_a_start_command_is_awaited_and_logged(
    paddock: Installation,
) -> None:
    command = "sleep 1; touch /tmp/up; echo hello from $0; echo something broke >&2; sleep 600"
    await paddock.template("talking", start_command=command, ready_command="test -e /tmp/up")
    sandbox_id, is_up = await paddock.sdk(
        """
box = Sandbox.create("talking", timeout=300)
print(json.dumps([box.sandbox_id, box.files.exists("/tmp/up")]))
"""
    )
    assert is_up, "it is ready when its ready command says so, not when its container runs"
    url = f"http://127.0.0.1:{paddock.api_ports[1]}/v2/sandboxes/{sandbox_id}/logs"
    async with aiohttp.ClientSession(headers={"X-API-Key": API_KEY}) as http:

        async def is_said() -> bool:
            async with http.get(url) as answer:
                assert answer.status == 200, await answer.text()
                entries = (await answer.json())["logs"]
            said = {(entry["level"], entry["message"]) for entry in entries}
            return said >= {("info", "hello from /bin/bash"), ("error", "something broke")}

        await paddock.eventually(is_said)
    assert await paddock.sdk('print(json.dumps(Sandbox.kill(os.environ["ID"])))', ID=sandbox_id)


SMALLER = """
wish = {"e2b.agents.kruise.io/cpu-limit": "500m"}
box = Sandbox.create(timeout=300, metadata=wish)
print(json.dumps([box.sandbox_id, box.commands.run("echo runs on").stdout]))
"""


async def test_less_cpu_is_resized_in_place_if_the_node_supports_it(paddock: Installation) -> None:
    await paddock.stocked(2)
    pods = (await paddock.store.list(PodManifest, namespace="default")).items
    before = {pod.metadata.uid for pod in pods}

    # The cluster does not support resize yet: a smaller pod is created.
    first, output = await paddock.sdk(SMALLER)
    assert output == "runs on\n"
    made = await paddock.store.get(PodManifest, (await paddock.sandbox(first)).key)
    assert made.metadata.uid not in before
    assert made.spec["resources"]["limits"]["cpu"] == "500m"

    await paddock.stocked(2)
    await paddock.kubelet.enable_resize()
    pods = (await paddock.store.list(PodManifest, namespace="default")).items
    before = {pod.metadata.uid for pod in pods}
    second, output = await paddock.sdk(SMALLER)
    assert output == "runs on\n"
    pod = await paddock.store.get(PodManifest, (await paddock.sandbox(second)).key)
    assert pod.metadata.uid in before, "it was in stock, and was not created for the claim"
    assert pod.spec["resources"]["limits"]["cpu"] == "500m"
    assert pod.metadata.generation == 2, "its spec was changed once"
    for sandbox_id in (first, second):
        killed = 'print(json.dumps(Sandbox.kill(os.environ["ID"])))'
        assert await paddock.sdk(killed, ID=sandbox_id)


async def test_freezing_is_rejected_without_node_agents(paddock: Installation) -> None:
    await paddock.stocked(1)
    said, output = await paddock.sdk(
        """
box = Sandbox.create(timeout=300)
try:
    pause(box)
    said = "paused"
except Exception as error:
    said = str(error)
# Gateways see with a delay that the pause was reverted.
output = patiently(lambda: box.commands.run("echo still here").stdout)
box.kill()
print(json.dumps([said, output]))
"""
    )
    assert "node DaemonSet is not installed" in said
    assert output == "still here\n"


async def test_a_frozen_sandbox_continues_where_it_was(paddock: Installation) -> None:
    await paddock.stocked(1)
    async with paddock.node_agent():
        sandbox_id, pid = await paddock.sdk(
            """
box = Sandbox.create(timeout=300)
handle = box.commands.run("echo $$; exec sleep 600", background=True)
box.files.write("/tmp/kept", "in memory")
pause_by_agent(box)
print(json.dumps([box.sandbox_id, handle.pid]))
"""
        )
        frozen = await paddock.sandbox(sandbox_id)
        assert frozen.status.phase is Phase.PAUSED
        pod = await paddock.store.get(Pod, frozen.key)
        assert pod.metadata.annotations["paddock.dev/frozen"] == "true"
        kept, pids = await paddock.sdk(
            """
box = Sandbox.connect(os.environ["ID"])
pids = [process.pid for process in box.commands.list()]
print(json.dumps([box.files.read("/tmp/kept"), pids]))
""",
            gateway=1,
            ID=sandbox_id,
        )
        assert kept == "in memory"
        assert pid in pids, "its processes never ended"
        assert await paddock.sdk('print(json.dumps(Sandbox.kill(os.environ["ID"])))', ID=sandbox_id)


async def failed_sandbox(paddock: Installation, name: str, *, template: str) -> Sandbox:
    """Create a sandbox and wait until it has failed."""
    box = Sandbox(
        metadata=ObjectMeta(name=name, namespace="default"),
        spec=SandboxSpec(template_ref=TemplateRef(name=template)),
    )
    await paddock.store.create(box)

    async def has_failed() -> bool:
        return (await paddock.store.get(Sandbox, box.key)).status.phase is Phase.FAILED

    await paddock.eventually(has_failed)
    return await paddock.store.get(Sandbox, box.key)


async def test_a_pull_failure_names_the_image(paddock: Installation) -> None:
    await paddock.template("broken", image="registry.example/missing:1")
    failed = await failed_sandbox(paddock, "no-image", template="broken")
    assert "ImagePullBackOff" in failed.status.message
    assert "registry.example/missing:1" in failed.status.message


async def test_a_foreign_pod_is_never_adopted(paddock: Installation) -> None:
    spec = {"containers": [{"name": "theirs", "image": "registry.example/missing"}]}
    stranger = PodManifest(metadata=ObjectMeta(name="taken", namespace="default"), spec=spec)
    theirs = await paddock.store.create(stranger)
    failed = await failed_sandbox(paddock, "taken", template="base")
    assert "does not belong" in failed.status.message
    await paddock.store.delete(Sandbox, failed.key)
    await asyncio.sleep(0)
    left = await paddock.store.get(Pod, theirs.key)
    assert left.metadata.uid == theirs.metadata.uid
    assert left.metadata.deletion_timestamp is None


async def test_a_failed_pod_fails_its_sandbox_and_the_pool_replaces_it(
    paddock: Installation,
) -> None:
    await paddock.stocked(2)
    victim = (await paddock.idle())[0]
    await paddock.kubelet.lose(victim.metadata.name)

    async def is_replaced() -> bool:
        names = {item.metadata.name for item in await paddock.idle()}
        return victim.metadata.name not in names and len(names) >= 2

    await paddock.eventually(is_replaced)


async def kill_the_leader(paddock: Installation) -> tuple[str, LeaseSpec]:
    """Kill the leader while a standby runs; return its name and its last lease."""
    while True:
        # An earlier test or a slow machine may have changed the leader.
        leader = (await paddock.lease()).holder_identity
        if not leader:
            await asyncio.sleep(0.1)
            continue
        [other] = {"controllers-0", "controllers-1"} - {leader}
        await paddock.serving(other)
        await paddock.kill(leader)
        last = await paddock.lease()
        if last.holder_identity == leader:
            return leader, last
        paddock.start("controllers", int(leader.rpartition("-")[2]))


async def successor(paddock: Installation, leader: str) -> LeaseSpec:
    """Return the lease as the next leader acquired it."""
    key = Key("paddock-system", "paddock-controllers")
    async with (
        asyncio.timeout(START_SECONDS),
        aclosing(paddock.store.watch(Lease, namespace=key.namespace)) as events,
    ):
        async for event in events:
            lease = event.object
            if lease is None or lease.key != key:
                continue
            if lease.spec.holder_identity not in (None, "", leader):
                return lease.spec
    raise AssertionError(f"nobody followed {leader}")


async def test_a_new_leader_continues_during_a_storm(paddock: Installation) -> None:
    before = len(paddock.kubelet.started)
    names = [f"storm-{number}" for number in range(8)]
    for name in names:
        await paddock.store.create(
            Sandbox(
                metadata=ObjectMeta(name=name, namespace="default"),
                spec=SandboxSpec(template_ref=TemplateRef(name="base")),
            )
        )

    async def has_begun() -> bool:
        return len(paddock.kubelet.started) > before

    await paddock.eventually(has_begun)
    leader, last = await kill_the_leader(paddock)
    next_one = await successor(paddock, leader)
    assert last.renew_time is not None
    assert next_one.acquire_time is not None
    waited = (next_one.acquire_time - last.renew_time).total_seconds()
    # According to the lease: not before it had expired, and soon afterwards. Tests on virtual time
    # check the exact delay; here processes also wait for CPU time.
    assert LEASE_SECONDS <= waited < LEASE_SECONDS + RETRY_SECONDS * 1.2 + STARVED_SECONDS
    assert next_one.lease_transitions == (last.lease_transitions or 0) + 1

    async def all_run() -> bool:
        found = {s.metadata.name: s.status.phase for s in await paddock.sandboxes()}
        return all(found.get(name) is Phase.RUNNING for name in names)

    await paddock.eventually(all_run)
    started = [name for name in paddock.kubelet.started if name in names]
    assert sorted(started) == sorted(names), "each pod was made once"
    paddock.start("controllers", int(leader.rpartition("-")[2]))
    for name in names:
        await paddock.store.delete(Sandbox, Key("default", name))

    async def all_gone() -> bool:
        pods = await paddock.store.list(Pod, namespace="default")
        return not any(pod.metadata.name in names for pod in pods.items)

    await paddock.eventually(all_gone)


async def test_traffic_flows_while_the_api_server_hangs(
    paddock: Installation, own_cluster: KubeCluster
) -> None:
    await paddock.stocked(1)
    sandbox_id, token = await paddock.sdk(
        """
box = Sandbox.create(timeout=300)
box.files.write("/tmp/hello", "world")
print(json.dumps([box.sandbox_id, box._envd_access_token]))
"""
    )
    ended = len(paddock.restarts)
    server = own_cluster.process("kube-apiserver")
    server.send_signal(signal.SIGSTOP)
    try:
        headers = {
            "E2b-Sandbox-Id": sandbox_id,
            "E2b-Sandbox-Port": "49983",
            "X-Access-Token": token,
        }
        async with aiohttp.ClientSession(headers=headers) as http:
            for port in paddock.gateway_ports:
                url = f"http://127.0.0.1:{port}/files?path=/tmp/hello&username=user"
                async with http.get(url) as answer:
                    assert (answer.status, await answer.text()) == (200, "world")
            # Longer than the lease: its holder must have stopped.
            await asyncio.sleep(LEASE_SECONDS * 1.5)
            async with http.get(url) as answer:
                assert answer.status == 200
    finally:
        server.send_signal(signal.SIGCONT)
    # A kill whose response was lost may have succeeded.
    await paddock.sdk(
        """
print(json.dumps(patiently(lambda: Sandbox.kill(os.environ["ID"]))))
""",
        ID=sandbox_id,
    )

    async def is_killed() -> bool:
        claims = [item.spec.claim for item in await paddock.sandboxes()]
        return all(claim is None or claim.sandbox_id != sandbox_id for claim in claims)

    await paddock.eventually(is_killed)
    await paddock.stocked(2)
    assert all(name.startswith("controllers-") for name in paddock.restarts[ended:])


async def test_everything_recovers_after_an_api_server_restart_and_compaction(
    paddock: Installation, own_cluster: KubeCluster
) -> None:
    await paddock.stocked(2)
    ended = len(paddock.restarts)
    own_cluster.restart_apiserver()
    own_cluster.compact_etcd()
    ran = await paddock.sdk(
        """
box = patiently(lambda: Sandbox.create(timeout=300))
output = box.commands.run("echo again").stdout
box.kill()
print(json.dumps(output))
"""
    )
    assert ran == "again\n"
    await paddock.stocked(2)
    # Only a leader that cannot renew its lease exits, and becomes a standby.
    assert all(name.startswith("controllers-") for name in paddock.restarts[ended:])
