"""The Kubernetes driver on an in-memory cluster whose kubelet starts every pod at once."""

import asyncio
import itertools
from datetime import UTC, datetime

import pytest

from paddock.kit.clock import ManualClock
from paddock.kit.errors import (
    AlreadyExistsError,
    ConflictError,
    DeadlineExceededError,
    InvalidError,
    NotFoundError,
    PaddockError,
    UnavailableError,
    UnsupportedError,
)
from paddock.resources.kinds.pods import (
    ContainerState,
    ContainerStateRunning,
    ContainerStatus,
    NetworkPolicyManifest,
    Pod,
    PodContainer,
    PodManifest,
    PodPlacement,
    PodStatus,
    VolumeClaim,
    VolumeClaimManifest,
)
from paddock.resources.meta import Key, ObjectMeta, OwnerReference, with_meta
from paddock.runtime.kubernetes import names
from paddock.runtime.kubernetes.driver import KubernetesRuntime
from paddock.runtime.kubernetes.network.policies import IDLE_SECONDS
from paddock.runtime.kubernetes.node_agents import NodeAgents
from paddock.runtime.kubernetes.pods.render import PodSettings
from paddock.runtime.kubernetes.pods.watch import CREATE_SECONDS
from paddock.runtime.port import (
    AgentConfig,
    Blueprint,
    EgressPolicy,
    InstanceState,
    Limits,
    LogLine,
)
from paddock.store.port import Page

NOW = datetime(2030, 1, 1, tzinfo=UTC)
VOLUME = {"metadata": {"name": "home"}, "spec": {"accessModes": ["ReadWriteOnce"]}}


class FakeCluster:
    """Objects by kind and key; pods run as soon as they are created."""

    def __init__(self):
        self.objects = {}
        self.handlers = []
        self.writes = []
        self._numbers = itertools.count(1)

    def _put(self, obj):
        self.objects[obj.KIND, obj.key] = obj
        return obj

    async def get(self, kind, key):
        found = self.objects.get((kind.KIND, key))
        if found is None:
            raise NotFoundError(f"no {kind.KIND} {key}")
        return found

    async def create(self, obj):
        if (obj.KIND, obj.key) in self.objects:
            raise AlreadyExistsError(f"{obj.key}")
        self.writes.append(("create", obj.KIND))
        number = str(next(self._numbers))
        made = with_meta(obj, uid=f"{obj.KIND}-{number}", resource_version=number)
        if isinstance(obj, PodManifest):
            self._put(self.running(made.metadata, obj.spec["containers"][0]["image"]))
            self.tell(None, self.objects["Pod", obj.key])
        elif isinstance(obj, VolumeClaimManifest):
            self._put(VolumeClaim(metadata=made.metadata))
        else:
            self._put(made)
        return made

    def running(self, metadata, image="i", container="c-1"):
        runs = ContainerState(running=ContainerStateRunning())
        main = ContainerStatus(name="sandbox", state=runs, container_id=container)
        status = PodStatus(
            phase="Running",
            start_time=NOW,
            pod_ip="10.0.0.9",
            container_statuses=(main,),
            init_container_statuses=(ContainerStatus(name="envd", state=runs),),
        )
        wanted = (PodContainer(name="sandbox", image=image),)
        place = PodPlacement(node_name="n", containers=wanted)
        return Pod(metadata=metadata, spec=place, status=status)

    async def list(self, kind, *, namespace=None, labels=None):
        found = [obj for obj in self.objects.values() if kind.KIND == obj.KIND]
        return Page(
            tuple(o for o in found if labels is None or labels.matches(o.metadata.labels)), "1"
        )

    async def update(self, obj):
        self.writes.append(("update", obj.KIND))
        old = self.objects[obj.KIND, obj.key]
        self._put(obj)
        if isinstance(obj, Pod):
            self.tell(old, obj)
        return obj

    async def delete(self, kind, key, *, uid=None):
        self.writes.append(("delete", kind.KIND))
        gone = self.objects.pop((kind.KIND, key), None)
        if gone is None:
            raise NotFoundError(f"no {kind.KIND} {key}")
        if isinstance(gone, Pod):
            self.tell(gone, None)
        return gone

    def tell(self, old, new):
        for handler in self.handlers:
            handler(old, new)


class FakeInformer:
    """A view of the cluster's objects of one kind."""

    def __init__(self, cluster, kind):
        self._cluster = cluster
        self._kind = kind

    def all(self):
        return tuple(obj for obj in self._cluster.objects.values() if isinstance(obj, self._kind))

    def get(self, key):
        return self._cluster.objects.get((self._kind.KIND, key))

    def by_index(self, name, value):
        assert name == "uid"
        return tuple(o for o in self.all() if o.metadata.labels.get(names.LABEL_UID) == value)

    def subscribe(self, handler):
        self._cluster.handlers.append(handler)
        return lambda: None

    def observe(self, obj):
        """Notify handlers of the newest version."""
        newest = self.get(obj.key)
        if newest is not None and self._kind is Pod:
            self._cluster.tell(None, newest)


class FakeEnvdClient:
    """Every sandbox is ready unless `busy_with` is set; records configurations."""

    def __init__(self):
        self.configured = {}
        self.busy_with = None
        self.main = "life-1"

    async def main_container_id(self, ip):
        return self.main

    async def wait_ready(self, uid, ip, *, seconds, former=""):
        return self.busy_with or (
            "envd is in the former container" if former == self.main else None
        )

    async def configure(self, uid, ip, agent):
        self.configured[uid] = (ip, agent)

    async def logs(self, uid, ip, *, since, limit):
        return tuple(LogLine(at=NOW, level="info", message=ip) for _ in range(limit))


class FakeNodeAgents(NodeAgents):
    """Agents that record requests, or are unavailable."""

    def __init__(self):
        super().__init__(None, lambda: "t")
        self.requests = []
        self.are_unavailable = False

    async def freeze(self, pod, *, frozen):
        if self.are_unavailable:
            raise UnavailableError("the node has no agent right now")
        self.requests.append((pod.metadata.name, frozen))


class World:
    def __init__(self, server=None, node_agents=None):
        self.clock = ManualClock()
        self.cluster = FakeCluster()
        self.envd_client = FakeEnvdClient()
        self.blueprints = {}
        self.driver = KubernetesRuntime(
            cluster=self.cluster,
            pods=FakeInformer(self.cluster, Pod),
            claims=FakeInformer(self.cluster, VolumeClaim),
            envd_client=self.envd_client,
            node_agents=node_agents or NodeAgents(None, lambda: "t"),
            settings=PodSettings(agent_image="paddock"),
            control_token=lambda uid: f"token of {uid}",
            blueprint_of=self.blueprints.get,
            clock=self.clock,
            server=server,
        )

    def blueprint(self, uid="u1", **changes):
        given = {"uid": uid, "name": f"box-{uid}", "namespace": "team", "image": "i", **changes}
        self.blueprints[uid] = Blueprint(**given)
        return self.blueprints[uid]

    async def make(self, uid="u1", **changes):
        await self.driver.create(self.blueprint(uid, **changes))
        return await self.driver.start(uid)


@pytest.fixture
def world():
    return World()


async def test_creating_a_sandbox_is_idempotent(world):
    made = await world.make()
    again = await world.make()
    assert made.state is InstanceState.RUNNING
    assert made == again
    assert made.address.envd == "http://10.0.0.9:49983"
    assert world.cluster.writes.count(("create", "Pod")) == 1


async def test_a_new_driver_adopts_existing_pods(world):
    await world.make()
    later = World()
    later.cluster.objects = world.cluster.objects
    found = await later.make()
    assert found.state is InstanceState.RUNNING
    assert ("create", "Pod") not in later.cluster.writes


async def test_a_pod_of_another_sandbox_is_not_adopted(world):
    other = OwnerReference(api_version="v", kind="Sandbox", name="x", uid="u9", controller=True)
    meta = ObjectMeta(name="box-u1", namespace="team", uid="p", owner_references=(other,))
    world.cluster.objects["Pod", meta_key(meta)] = Pod(metadata=meta)
    with pytest.raises(InvalidError, match="does not belong to this sandbox"):
        await world.driver.create(world.blueprint())
    assert await world.driver.inspect("u1") is None


@pytest.mark.parametrize(
    ("field", "value", "reason", "alternative"),
    [
        ("checkpoint_id", "cp", "cannot be stored", "use an image"),
        ("limits", Limits(io_read_iops=5), "Kubernetes does not limit it", "leave the rates out"),
        ("limits", Limits(egress_bandwidth=5), "limits bandwidth", "leave the rates out"),
        ("egress", EgressPolicy(allow_out=("pypi.org",)), "addresses only", "use addresses"),
        ("pod_template", {"spec": {"hostPID": True}}, "gives access to the node", "remove"),
    ],
)
async def test_what_pods_cannot_do_fails_the_sandbox_with_reason_and_alternative(
    world, field, value, reason, alternative
):
    """Without the webhook, nothing has refused it before."""
    with pytest.raises(PaddockError) as refused:
        await world.make(**{field: value})
    assert isinstance(refused.value, UnsupportedError | InvalidError)
    assert reason in refused.value.advice
    assert alternative in refused.value.advice
    assert ("create", "Pod") not in world.cluster.writes


def meta_key(meta):
    return Pod(metadata=meta).key


@pytest.mark.parametrize("kind", [Pod, VolumeClaim])
async def test_a_conflicting_object_that_is_deleted_in_between_causes_a_retry(world, kind):
    name = "box-u1" if kind is Pod else "home-box-u1"
    key = Key("team", name)
    world.cluster.objects[kind.KIND, key] = kind(metadata=ObjectMeta(name=name, namespace="team"))
    get = world.cluster.get

    async def too_late(wanted, where):
        if where == key:
            world.cluster.objects.pop((kind.KIND, key), None)
        return await get(wanted, where)

    world.cluster.get = too_late
    blueprint = world.blueprint(volume_claim_templates=(VOLUME,))
    with pytest.raises(UnavailableError, match="was just deleted") as raised:
        await world.driver.create(blueprint)
    assert raised.value.retry_after_seconds, "it is requeued"
    assert (await world.driver.create(blueprint)).state is InstanceState.RUNNING


async def test_a_label_alone_does_not_make_a_pod_owned(world):
    meta = ObjectMeta(name="x", namespace="team", uid="p", labels={names.LABEL_UID: "u1"})
    world.cluster.tell(None, Pod(metadata=meta))
    assert await world.driver.inspect("u1") is None


async def test_envd_is_configured_again_after_every_start(world):
    agent = AgentConfig(access_token="secret")
    await world.make(agent=agent, volume_claim_templates=(VOLUME,))
    world.envd_client.configured.clear()
    await world.driver.stop("u1")
    await world.driver.restore("u1")
    assert world.envd_client.configured["u1"] == ("10.0.0.9", agent)


async def test_a_running_container_is_not_ready_until_its_envd_is(world):
    await world.driver.create(world.blueprint(ready_timeout_seconds=60))
    world.envd_client.busy_with = "its ready command has not succeeded yet"
    with pytest.raises(UnavailableError, match="ready command") as waits:
        await world.driver.start("u1")
    assert waits.value.retry_after_seconds, "it is requeued"
    assert world.envd_client.configured == {}, "it is not configured before it is ready"
    world.clock.advance(60 + CREATE_SECONDS)
    with pytest.raises(DeadlineExceededError, match="it was not ready within 60 s"):
        await world.driver.start("u1")
    world.envd_client.busy_with = None
    assert (await world.driver.start("u1")).state is InstanceState.RUNNING


async def test_stopping_keeps_the_volume_and_counts_incarnations(world):
    await world.make(volume_claim_templates=(VOLUME,))
    stopped = await world.driver.stop("u1")
    assert stopped.state is InstanceState.STOPPED
    assert (await world.driver.inspect("u1")).state is InstanceState.STOPPED
    assert [found.state for found in await world.driver.instances()] == [InstanceState.STOPPED]
    again = await world.driver.restore("u1")
    assert (again.state, again.incarnation) == (InstanceState.RUNNING, 2)
    await world.driver.destroy("u1")
    assert not [kind for kind, _ in world.cluster.objects if kind != "NetworkPolicy"]


async def test_frozen_pods_are_thawed_on_deletion_because_cgroup_v1_blocks_kills():
    node_agents = FakeNodeAgents()
    world = World(node_agents=node_agents)
    for uid in ("u1", "u2", "u3"):
        await world.make(uid)
    await world.driver.freeze("u1")
    await world.driver.freeze("u2")
    await world.driver.destroy("u1")
    await world.driver.destroy("u3")
    assert node_agents.requests == [("box-u1", True), ("box-u2", True), ("box-u1", False)]
    node_agents.are_unavailable = True
    with pytest.raises(UnavailableError, match="no agent right now"):
        await world.driver.destroy("u2")


async def test_operations_that_would_lose_files_or_memory_are_refused(world):
    await world.make()
    with pytest.raises(UnsupportedError, match="its files would be lost"):
        await world.driver.stop("u1")
    with pytest.raises(UnsupportedError, match="node DaemonSet is not installed"):
        await world.driver.freeze("u1")
    with pytest.raises(UnsupportedError):
        await world.driver.hibernate("u1")
    able = await world.driver.capabilities()
    assert not able.can_freeze
    assert "DaemonSet" in able.reasons["can_freeze"]


async def test_sandboxes_share_a_networkpolicy_per_policy_and_switch_by_label(world):
    for number in range(5):
        await world.make(f"u{number}")
    assert world.cluster.writes.count(("create", "NetworkPolicy")) == 1
    await world.driver.set_egress("u1", EgressPolicy(allow_internet=False))
    pod = world.cluster.objects["Pod", ("team", "box-u1")]
    policy = world.cluster.objects[
        "NetworkPolicy", ("team", pod.metadata.labels[names.LABEL_EGRESS])
    ]
    assert isinstance(policy, NetworkPolicyManifest)
    assert len(policy.spec["egress"]) == 1, "name servers only"


async def test_concurrent_callers_create_a_policy_once(world):
    create, asked = world.cluster.create, []

    async def slowly(obj):
        asked.append(obj.KIND)
        await asyncio.sleep(0)
        return await create(obj)

    world.cluster.create = slowly
    await asyncio.gather(*(world.make(f"u{number}") for number in range(20)))
    assert asked.count("NetworkPolicy") == 1
    assert asked.count("Pod") == 20


def policies_of(world):
    return {key.name for kind, key in world.cluster.objects if kind == "NetworkPolicy"}


async def test_an_unused_policy_is_deleted_after_the_idle_time(world):
    closed = EgressPolicy(allow_internet=False)
    await world.make("u1")
    await world.make("u2", egress=closed)
    open_name, closed_name = (world.driver.policies.name(p) for p in (EgressPolicy(), closed))
    await world.driver.destroy("u2")
    assert await world.driver.policies.sweep() == (), "it may be needed again at once"
    world.clock.advance(IDLE_SECONDS + 1)
    assert await world.driver.policies.sweep() == (Key("team", closed_name),)
    assert policies_of(world) == {open_name}, "a policy in use is kept"
    await world.make("u3", egress=closed)
    assert policies_of(world) == {open_name, closed_name}


async def test_a_policy_that_was_needed_in_between_is_kept(world):
    await world.make("u1")
    await world.driver.destroy("u1")
    await world.driver.policies.sweep()
    world.clock.advance(IDLE_SECONDS + 1)
    # Its pod is about to be created and not yet in the cache.
    await world.driver.policies.ensure(EgressPolicy(), "team")
    assert await world.driver.policies.sweep() == ()
    assert policies_of(world)


async def test_foreign_policies_are_never_deleted(world):
    labels = {names.LABEL_MANAGED: names.MANAGER}
    for name, selected in (("paddock-api", "paddock-api"), ("paddock-0123456789ab", "other")):
        selector = {"matchLabels": {names.LABEL_EGRESS: selected}}
        await world.cluster.create(
            NetworkPolicyManifest(
                metadata=ObjectMeta(name=name, namespace="team", labels=labels),
                spec={"podSelector": selector},
            )
        )
    for _ in range(2):
        assert await world.driver.policies.sweep() == ()
        world.clock.advance(IDLE_SECONDS + 1)


async def test_a_deleted_pod_causes_an_event(world):
    await world.make()
    events = world.driver.watch()
    waiting = anext(events)
    told = await first(waiting, lambda: world.cluster.tell(lost(world), None))
    assert (told.uid, told.state, told.reason) == ("u1", InstanceState.FAILED, "its pod is gone")
    assert await world.driver.inspect("u1") is None
    await events.aclose()


def lost(world):
    return world.cluster.objects.pop(("Pod", ("team", "box-u1")))


async def first(waiting, act):
    task = asyncio.ensure_future(waiting)
    await asyncio.sleep(0)
    act()
    return await task


async def test_logs_are_read_from_the_sidecar_unless_it_is_frozen(world):
    await world.make()
    assert [line.message for line in await world.driver.logs("u1", limit=1)] == ["10.0.0.9"]
    pod = world.cluster.objects["Pod", ("team", "box-u1")]
    frozen = with_meta(pod, annotations={names.ANNOTATION_FROZEN: "true"})
    await world.cluster.update(frozen)
    with pytest.raises(ConflictError, match="thaw it first"):
        await world.driver.logs("u1")
    with pytest.raises(NotFoundError):
        await world.driver.logs("never")


async def test_destroying_is_idempotent(world):
    await world.make()
    await world.driver.destroy("u1")
    await world.driver.destroy("u1")
    await world.driver.destroy("never")
    assert await world.driver.instances() == ()
