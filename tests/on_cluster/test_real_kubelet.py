"""Sandboxes on a node with a real kubelet: client, API, controllers, scheduler, kubelet, runc.

Everything is real here: the sidecar that enters the main container, its capabilities, limits,
addresses, the freezer, and in-place resizes.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from paddock.cli.kube.manifests import node, secret
from paddock.cli.kube.options import KubeOptions
from paddock.resources.kinds.pods import Pod, PodManifest
from paddock.resources.kinds.sandbox import Phase, Sandbox, SandboxSpec
from paddock.resources.kinds.template import TemplateRef
from paddock.resources.meta import ObjectMeta
from paddock.runtime.kubernetes.freezer import find_cgroup
from tests.cluster.control_plane import KubeCluster
from tests.cluster.fixtures import cluster_for_nodes
from tests.cluster.node import images
from tests.cluster.node import machine as real
from tests.on_cluster.world.installation import API_KEY, SDK, Installation

pytestmark = [
    pytest.mark.kubernetes,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(900),
]
KILL = 'print(json.dumps(Sandbox.kill(os.environ["ID"])))'


@pytest.fixture(scope="module")
def cluster() -> Iterator[KubeCluster]:
    """A control plane with a scheduler, for this module."""
    with cluster_for_nodes() as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(cluster: KubeCluster) -> AsyncGenerator[tuple[Installation, real.RealNode]]:
    """Paddock's roles as processes, and a real node for pods."""
    if not SDK.exists():
        pytest.skip("the E2B client is not installed (scripts/install-clients)")
    archive = await asyncio.to_thread(images.archive)
    there = real.RealNode(cluster, [archive], pause=images.PAUSE)
    made = Installation(
        cluster.info,
        lambda _: there,  # type: ignore[arg-type,return-value]
        replicas=1,
        pool_size=1,
        lease_seconds=60,  # long enough that the leader stays on a slow machine
        image=images.SANDBOX,
        agent_image=images.PADDOCK,
    )
    made.client_seconds = 240
    async with made as paddock:
        await paddock.stocked(1)
        yield paddock, there


World = tuple[Installation, real.RealNode]


async def test_commands_run_in_the_main_container_without_privileges(world: World) -> None:
    paddock, _ = world
    await paddock.stocked(1)
    sandbox_id, said, read, status = await paddock.sdk(
        """
box = Sandbox.create(timeout=600, envs={"GREETING": "hello"})
box.files.write("/home/user/notes/one", "written through envd")
said = box.commands.run("id -un; echo $GREETING; cat notes/one; ls -d /usr/lib/paddock || true")
status = box.commands.run("cat /proc/self/status").stdout
print(json.dumps([box.sandbox_id, said.stdout, box.files.read("/home/user/notes/one"), status]))
"""
    )
    assert said.splitlines() == ["user", "hello", "written through envd"], said
    assert read == "written through envd"
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert int(fields["CapEff"], 16) == int(fields["CapPrm"], 16) == 0
    assert fields["NoNewPrivs"] == "1"
    assert fields["Seccomp"] == "2", "a filter"
    box = await paddock.sandbox(sandbox_id)
    pod = await paddock.store.get(PodManifest, box.key)
    assert pod.spec["nodeName"] == real.NAME
    group = find_cgroup(pod.metadata.uid)
    assert group.is_dir()
    assert await paddock.sdk(KILL, ID=sandbox_id)
    await paddock.eventually(lambda: paddock.is_gone(box.key))
    await paddock.until(lambda: not group.exists())


async def test_ports_are_reachable_and_exceeding_memory_ends_only_the_command(
    world: World,
) -> None:
    paddock, _ = world
    await paddock.stocked(1)
    sandbox_id, killed, after = await paddock.sdk(
        """
from e2b import CommandExitException
box = Sandbox.create(timeout=600)
box.files.write("/home/user/site/index.html", "served from a pod")
box.commands.run("python3 -m http.server 8000 -d site", background=True)
try:
    killed = box.commands.run("python3 -c 'bytearray(400 << 20)'").stderr
except CommandExitException as error:
    killed = str(error)
after = box.commands.run("echo still here").stdout
print(json.dumps([box.sandbox_id, killed, after]))
"""
    )
    assert "killed: the sandbox used its 256 MiB of memory" in killed, "the template's limit"
    assert after == "still here\n"
    url = f"http://127.0.0.1:{paddock.gateway_ports[0]}/"
    headers = {"E2b-Sandbox-Id": sandbox_id, "E2b-Sandbox-Port": "8000"}
    async with aiohttp.ClientSession(headers=headers) as http:

        async def is_served() -> bool:
            async with http.get(url) as answer:
                return (answer.status, await answer.text()) == (200, "served from a pod")

        await paddock.eventually(is_served)
    assert await paddock.sdk(KILL, ID=sandbox_id)


@pytest.mark.parametrize(
    ("name", "wish", "granted"),
    [
        ("e2b.agents.kruise.io/cpu-limit", "500m", (0.5, 256 << 20)),
        ("paddock.dev/memory-limit", "512Mi", (1.0, 512 << 20)),
        ("paddock.dev/memory-limit", "200Mi", (1.0, 200 << 20)),
    ],
)
async def test_a_running_pod_is_resized(
    world: World, name: str, wish: str, granted: tuple[float, int]
) -> None:
    paddock, there = world
    await paddock.stocked(1)
    pods = (await paddock.store.list(PodManifest, namespace="default")).items
    before = {pod.metadata.uid for pod in pods}
    sandbox_id, output = await paddock.sdk(
        """
box = Sandbox.create(timeout=600, metadata={os.environ["NAME"]: os.environ["WISH"]})
print(json.dumps([box.sandbox_id, box.commands.run("echo runs on").stdout]))
""",
        NAME=name,
        WISH=wish,
    )
    assert output == "runs on\n"
    pod = await paddock.store.get(PodManifest, (await paddock.sandbox(sandbox_id)).key)
    assert pod.metadata.uid in before, "it was in stock, and was not created for the claim"
    await paddock.until(lambda: there.granted(pod.metadata.uid) == granted)
    assert await paddock.sdk(KILL, ID=sandbox_id)


async def test_the_image_of_a_running_pod_is_updated(world: World) -> None:
    paddock, _ = world
    await paddock.stocked(1)
    pods = (await paddock.store.list(PodManifest, namespace="default")).items
    before = {pod.metadata.uid for pod in pods}
    sandbox_id, output = await paddock.sdk(
        """
box = Sandbox.create(timeout=600, metadata={"e2b.agents.kruise.io/image": os.environ["IMAGE"]})
print(json.dumps([box.sandbox_id, box.commands.run("cat /" + os.environ["SIGN"]).stdout]))
""",
        IMAGE=images.OTHER,
        SIGN=images.SIGN,
    )
    assert output == images.OTHER, "commands run in the new container"
    pod = await paddock.store.get(PodManifest, (await paddock.sandbox(sandbox_id)).key)
    assert pod.metadata.uid in before, "it was in stock, and was not created for the claim"
    assert await paddock.sdk(KILL, ID=sandbox_id)

    await paddock.stocked(1)
    said = await paddock.sdk(
        """
try:
    Sandbox.create(timeout=600, metadata={"e2b.agents.kruise.io/image": "localhost/absent:1"})
    said = "made"
except Exception as error:
    said = str(error)
print(json.dumps(said))
"""
    )
    assert 'Failed to pull image "localhost/absent:1"' in said


async def test_a_pod_is_frozen_by_the_agent_of_its_node(world: World) -> None:
    paddock, there = world
    options = KubeOptions(image=images.PADDOCK)
    own = {"seed": "seed", "token": "token", "api_key": API_KEY}
    for manifest in (secret(options, **own), *node(options)):
        if manifest["kind"] != "NetworkPolicy":  # not enforced here
            paddock.post(manifest)

    async def has_agent() -> bool:
        pods = (await paddock.store.list(Pod, namespace="paddock-system")).items
        return any(pod.status.phase == "Running" and pod.status.pod_ip for pod in pods)

    await paddock.eventually(has_agent)
    await paddock.stocked(1)
    sandbox_id, pid = await paddock.sdk(
        """
box = Sandbox.create(timeout=600)
counting = "while sleep 0.1; do echo >> /tmp/ticks; done"
handle = box.commands.run(counting, background=True)
while not box.files.exists("/tmp/ticks"):
    time.sleep(0.1)
pause_by_agent(box)
print(json.dumps([box.sandbox_id, handle.pid]))
"""
    )
    box = await paddock.sandbox(sandbox_id)
    assert box.status.phase is Phase.PAUSED
    pod = await paddock.store.get(Pod, box.key)
    states = there.process_states(pod.metadata.uid)
    assert len(states) >= 4, "pause, main container, envd, the command"
    assert set(states) == {"D"}, "all stand still"
    pids, grows = await paddock.sdk(
        """
box = Sandbox.connect(os.environ["ID"])
pids = [process.pid for process in box.commands.list()]
first = len(box.files.read("/tmp/ticks"))
for attempt in range(600):
    if len(box.files.read("/tmp/ticks")) > first:
        break
    time.sleep(0.1)
print(json.dumps([pids, len(box.files.read("/tmp/ticks")) > first]))
""",
        ID=sandbox_id,
    )
    assert pid in pids
    assert grows, "it goes on counting"
    assert await paddock.sdk(KILL, ID=sandbox_id)


async def test_a_batch_runs_in_pods_and_its_logs_are_collected(
    world: World, tmp_path: Path
) -> None:
    paddock, _ = world
    await paddock.stocked(1)
    logs = tmp_path / "logs"
    code, out, problem = await paddock.command(
        *("batch", "run", "--replicas", "2", "--pool", "base", "--logs", str(logs)),
        *("--env", "WHO=world", "--", "echo hello $WHO from $PADDOCK_SHARD; id -un; pwd"),
    )
    assert code == 0, problem
    assert out.count("hello world from") == 2, out
    written = [(logs / f"{shard}.log").read_text() for shard in range(2)]
    assert written == [f"hello world from {shard}\nuser\n/home/user\n" for shard in range(2)]
    code, out, problem = await paddock.command(
        *("-o", "json", "batch", "run", "--pool", "base", "--timeout", "2", "--"),
        "trap '' TERM; (setsid sleep 1000 &) ; sleep 1000",
    )
    assert code == 1, (out, problem)
    status = json.loads(out)["status"]
    assert (status["phase"], status["tasks"][0]["reason"]) == ("Failed", "TaskTimeout")


async def test_a_stopped_sandbox_keeps_its_files_on_a_volume(world: World) -> None:
    paddock, there = world
    paddock.post(there.volume("kept"))
    sandbox_id = await paddock.sdk(
        """
box = Sandbox.create("kept", timeout=600)
box.files.write("/home/user/kept", "on the volume")
box.files.write("/tmp/lost", "in the container")
pause(box)
print(json.dumps(box.sandbox_id))
"""
    )
    stopped = await paddock.sandbox(sandbox_id)
    assert stopped.status.phase is Phase.PAUSED
    await paddock.eventually(lambda: paddock.is_gone(stopped.key))
    kept, lost = await paddock.sdk(
        """
box = Sandbox.connect(os.environ["ID"])
print(json.dumps([box.files.read("/home/user/kept"), box.files.exists("/tmp/lost")]))
""",
        ID=sandbox_id,
    )
    assert (kept, lost) == ("on the volume", False)
    assert await paddock.sdk(KILL, ID=sandbox_id)


async def test_failures_have_the_kubelets_reason(world: World) -> None:
    paddock, there = world
    await paddock.template("absent", image="localhost/absent:1")
    box = Sandbox(
        metadata=ObjectMeta(name="absent", namespace="default"),
        spec=SandboxSpec(template_ref=TemplateRef(name="absent")),
    )
    await paddock.store.create(box)

    async def has_failed() -> bool:
        return (await paddock.store.get(Sandbox, box.key)).status.phase is Phase.FAILED

    await paddock.eventually(has_failed)
    assert "localhost/absent:1" in (await paddock.store.get(Sandbox, box.key)).status.message
    await paddock.store.delete(Sandbox, box.key)

    await paddock.stocked(1)
    victim = (await paddock.idle())[0]
    there.end_main_container((await paddock.store.get(Pod, victim.key)).metadata.uid)

    async def is_replaced() -> bool:
        found = await paddock.sandboxes()
        names = {item.metadata.name for item in found if item.status.phase is Phase.RUNNING}
        return bool(names) and victim.metadata.name not in names

    await paddock.eventually(is_replaced)
