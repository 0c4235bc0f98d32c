"""Images are pulled before sandboxes start: progress, reasons, pinned versions, backoff."""

import asyncio
import base64
import json
from collections.abc import Awaitable, Callable

import pytest
from msgspec import structs

from paddock.claims.requests import NewSandbox
from paddock.kit.errors import DeadlineExceededError, NotFoundError, UnavailableError
from paddock.resources.kinds.builtin import Event, Secret
from paddock.resources.kinds.claim import InplaceUpdate, SandboxClaim, SandboxClaimSpec
from paddock.resources.kinds.pool import CONDITION_DEGRADED, SandboxPool
from paddock.resources.kinds.sandbox import CONDITION_IMAGE, LABEL_POOL, Phase, Sandbox
from paddock.resources.kinds.template import (
    ImagePullPolicy,
    SandboxTemplate,
    SandboxTemplateSpec,
)
from paddock.resources.meta import Condition, ConditionStatus, Key, ObjectMeta, condition
from paddock.runtime.port import ReadyImage, RegistryCredentials
from paddock.runtime.simulated import ALL_CAPABILITIES, Operation, SimulatedRuntime
from tests.scenario.paddock import CALLER, World, paddock

pytestmark = pytest.mark.looptime

IMAGE = "python:3.13"
ONE, TWO = f"sha256:{'1' * 64}", f"sha256:{'2' * 64}"
PYTHON = NewSandbox(template="python", timeout_seconds=3600)
KEY = Key("default", "python")


async def apply(world: World, *, is_published: bool = True, **spec) -> None:
    """Create a template that names an image of the registry."""
    if is_published:
        world.runtime.images.publish(IMAGE, ONE)
    template = SandboxTemplate(
        metadata=ObjectMeta(namespace="default", name="python"),
        spec=SandboxTemplateSpec(image=IMAGE, **spec),
    )
    await world.provider.write.create(template)


async def apply_pool(world: World, replicas: int) -> None:
    pool = SandboxPool(metadata=ObjectMeta(namespace="default", name="python"))
    spec = structs.replace(pool.spec, template=SandboxTemplateSpec(image=IMAGE), replicas=replicas)
    await world.provider.write.create(structs.replace(pool, spec=spec))


def starting(world: World) -> list[Sandbox]:
    return [
        sandbox
        for sandbox in world.provider.all(Sandbox)
        if sandbox.spec.template is not None and sandbox.spec.template.image == IMAGE
    ]


def image_condition(sandbox: Sandbox) -> Condition | None:
    return condition(sandbox.status.conditions, CONDITION_IMAGE)


async def events(world: World, reason: str) -> list[str]:
    found = await world.provider.live.list(Event)
    return [event.message for event in found.items if event.reason == reason]


async def test_a_sandbox_waits_for_its_image_and_says_so() -> None:
    async with paddock() as world:
        await apply(world)
        world.runtime.set_latency(Operation.ENSURE_IMAGE, 20.0)
        creating = asyncio.create_task(world.manager.claims.create(CALLER, PYTHON))
        await world.until(lambda: any(image_condition(item) for item in starting(world)))
        [waiting] = starting(world)
        shown = image_condition(waiting)
        assert shown is not None
        assert (shown.status, shown.reason) == (ConditionStatus.FALSE, "Pulling")
        assert waiting.status.phase is Phase.PENDING
        ready = await creating
        shown = image_condition(ready)
        assert shown is not None
        assert (shown.status, shown.reason) == (ConditionStatus.TRUE, "Pulled")
        assert ready.status.image_digest == ONE


async def test_a_pull_holds_no_other_sandbox_up() -> None:
    async with paddock() as world:
        await apply(world)
        world.runtime.set_latency(Operation.ENSURE_IMAGE, 3600.0)
        pulls = [
            asyncio.create_task(world.manager.claims.create(CALLER, PYTHON)) for _ in range(40)
        ]
        await world.until(lambda: len(starting(world)) == 40)
        async with asyncio.timeout(1.0):
            await world.manager.claims.create(CALLER, NewSandbox(template="base"))
        for pull in pulls:
            pull.cancel()
        await asyncio.gather(*pulls, return_exceptions=True)


async def test_a_create_that_times_out_names_the_pull() -> None:
    async with paddock() as world:
        await apply(world)
        world.runtime.set_latency(Operation.ENSURE_IMAGE, 3600.0)
        with pytest.raises(DeadlineExceededError, match="pulling image 'python"):
            await world.manager.claims.create(
                CALLER, structs.replace(PYTHON, ready_timeout_seconds=10.0)
            )


async def test_a_client_learns_at_once_that_the_registry_refuses() -> None:
    async with paddock() as world:
        await apply(world)
        refusal = NotFoundError("image 'python:3.13' not found: registry.example does not have it")
        world.runtime.fail_next(Operation.ENSURE_IMAGE, refusal)
        with pytest.raises(UnavailableError, match="does not have it"):
            await world.manager.claims.create(CALLER, PYTHON)


async def test_a_pool_whose_image_cannot_be_pulled_says_why_and_recovers() -> None:
    async with paddock() as world:
        world.runtime.images.publish(IMAGE, ONE)
        for _ in range(2):
            world.runtime.fail_next(
                Operation.ENSURE_IMAGE, UnavailableError("registry.example cannot be reached")
            )
        await apply_pool(world, 1)

        def problem() -> str:
            found = condition(world.pool("python").status.conditions, CONDITION_DEGRADED)
            return found.message if found and found.reason == "ErrImagePull" else ""

        await world.until(lambda: "registry.example cannot be reached" in problem())
        # It is not the fault of the template: nothing is replaced, and nothing counts as a crash.
        assert world.pool("python").status.failures == 0
        await world.until(lambda: world.pool("python").status.available == 1, seconds=60)
        assert problem() == ""
        assert len(starting(world)) == 1
        assert any("cannot be reached" in text for text in await events(world, "ErrImagePull"))


async def test_a_moved_tag_does_not_change_a_running_pool() -> None:
    async with paddock() as world:
        world.runtime.images.publish(IMAGE, ONE)
        await apply_pool(world, 1)
        await world.stocked(1, "python")
        await world.until(lambda: world.pool("python").status.image_digest == ONE)
        # The tag moves, and somebody else pulls it to this machine.
        world.runtime.images.publish(IMAGE, TWO)
        await world.runtime.ensure_image(IMAGE, team="other", policy=ImagePullPolicy.ALWAYS)
        first = await world.manager.claims.create(CALLER, PYTHON)
        await world.stocked(1, "python")
        second = await world.manager.claims.create(CALLER, PYTHON)
        assert [first.status.image_digest, second.status.image_digest] == [ONE, ONE]


async def test_the_first_sandbox_of_a_template_pins_its_version() -> None:
    async with paddock() as world:
        await apply(world)
        await world.manager.claims.create(CALLER, PYTHON)
        template = world.provider.get(SandboxTemplate, KEY)
        assert template is not None
        assert (template.status.image, template.status.image_digest) == (IMAGE, ONE)
        world.runtime.images.publish(IMAGE, TWO)
        await world.runtime.ensure_image(IMAGE, team="other", policy=ImagePullPolicy.ALWAYS)
        again = await world.manager.claims.create(CALLER, PYTHON)
        assert again.status.image_digest == ONE


async def test_the_policy_always_follows_the_tag() -> None:
    async with paddock() as world:
        await apply(world, image_pull_policy=ImagePullPolicy.ALWAYS)
        first = await world.manager.claims.create(CALLER, PYTHON)
        world.runtime.images.publish(IMAGE, TWO)
        second = await world.manager.claims.create(CALLER, PYTHON)
        assert [first.status.image_digest, second.status.image_digest] == [ONE, TWO]


class Recording(SimulatedRuntime):
    """A runtime that records the credentials of pulls."""

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.given: list[tuple[str, tuple[RegistryCredentials, ...]]] = []

    async def ensure_image(
        self,
        reference: str,
        *,
        team: str,
        policy: ImagePullPolicy = ImagePullPolicy.IF_NOT_PRESENT,
        credentials: tuple[RegistryCredentials, ...] = (),
    ) -> ReadyImage:
        self.given.append((team, credentials))
        return await super().ensure_image(
            reference, team=team, policy=policy, credentials=credentials
        )


def pull_secret(name: str) -> Secret:
    auths = {"registry.example": {"username": "u", "password": "never tell"}}
    text = base64.b64encode(json.dumps({"auths": auths}).encode()).decode()
    return Secret(
        metadata=ObjectMeta(namespace="default", name=name),
        type="kubernetes.io/dockerconfigjson",
        data={".dockerconfigjson": text},
    )


async def test_pull_secrets_are_those_of_the_namespace_of_the_template() -> None:
    runtime = Recording()
    async with paddock(runtime=runtime) as world:
        await world.store.create(pull_secret("login"))
        await apply(world, image_pull_secrets=("login",))
        await world.manager.claims.create(CALLER, PYTHON)
        [(team, credentials)] = runtime.given
        assert team == "default"
        expected = RegistryCredentials(host="registry.example", username="u", password="never tell")
        assert credentials == (expected,)


OTHER = "registry.example/private:1"


def is_running(world: World, sandbox: Sandbox) -> bool:
    found = world.provider.get(Sandbox, sandbox.key)
    return found is not None and found.status.phase is Phase.RUNNING


async def own_image_by_create(world: World) -> Sandbox:
    return await world.manager.claims.create(CALLER, structs.replace(PYTHON, image=OTHER))


async def own_image_by_claim(world: World) -> Sandbox:
    spec = SandboxClaimSpec(template_name="python", inplace_update=InplaceUpdate(image=OTHER))
    meta = ObjectMeta(namespace="default", name="own")
    await world.store.create(SandboxClaim(metadata=meta, spec=spec))
    await world.until(lambda: any(item.spec.claim for item in world.provider.all(Sandbox)))
    return next(item for item in world.provider.all(Sandbox) if item.spec.claim is not None)


@pytest.mark.parametrize("has_digest", [False, True])
@pytest.mark.parametrize("claim", [own_image_by_create, own_image_by_claim])
@pytest.mark.parametrize("is_cluster", [False, True])
async def test_an_image_that_a_client_names_has_nothing_of_the_template(
    claim: Callable[[World], Awaitable[Sandbox]], is_cluster: bool, has_digest: bool
) -> None:
    """Neither its pull secrets, also not those that a pod names, nor the version of its image."""
    capabilities = structs.replace(
        ALL_CAPABILITIES, can_pull_images=not is_cluster, can_update_image=is_cluster
    )
    runtime = Recording(capabilities=capabilities)
    async with paddock(runtime=runtime, claim_images="*") as world:
        await world.store.create(pull_secret("login"))
        await apply(world, image_pull_secrets=("login",), image_digest=ONE if has_digest else None)
        if not is_cluster:
            runtime.images.publish(OTHER, TWO)
        sandbox = await claim(world)
        await world.until(lambda: is_running(world, sandbox))
        used = runtime.blueprint(sandbox.metadata.uid)
        assert (used.image, used.image_pull_secrets) == (OTHER, ())
        assert used.image_digest in ("", TWO)
    assert [credentials for _, credentials in runtime.given] == ([] if is_cluster else [()])


async def test_an_image_that_a_client_names_is_pulled_as_its_team() -> None:
    runtime = Recording(capabilities=structs.replace(ALL_CAPABILITIES, can_update_image=False))
    async with paddock(runtime=runtime, claim_images="*") as world:
        runtime.images.publish(OTHER, TWO)
        await apply(world)
        await world.manager.claims.create(
            structs.replace(CALLER, team="research"), structs.replace(PYTHON, image=OTHER)
        )
        template = world.provider.get(SandboxTemplate, KEY)
        assert template is not None
        assert template.status.image_digest == ""
    assert [team for team, _ in runtime.given] == ["research"]


async def test_a_warm_sandbox_with_pull_secrets_gets_no_other_image() -> None:
    async with paddock(runtime=Recording(), claim_images="*") as world:
        await world.store.create(pull_secret("login"))
        world.runtime.images.publish(IMAGE, ONE)
        pool = SandboxPool(metadata=ObjectMeta(namespace="default", name="python"))
        template = SandboxTemplateSpec(image=IMAGE, image_pull_secrets=("login",))
        spec = structs.replace(pool.spec, template=template, replicas=1)
        await world.provider.write.create(structs.replace(pool, spec=spec))
        await world.stocked(1, "python")
        made = await world.manager.claims.create(CALLER, structs.replace(PYTHON, image=OTHER))
        assert LABEL_POOL not in made.metadata.labels
        assert world.runtime.blueprint(made.metadata.uid).image_pull_secrets == ()
        own = await world.manager.claims.create(CALLER, structs.replace(PYTHON, image=IMAGE))
        assert world.runtime.blueprint(own.metadata.uid).image_pull_secrets == ("login",)


async def test_pull_secrets_are_not_read_where_machines_pull_by_themselves() -> None:
    """Controllers may not read them on a cluster: each pod names its own."""
    cannot_pull = structs.replace(ALL_CAPABILITIES, can_pull_images=False)
    runtime = Recording(capabilities=cannot_pull)
    async with paddock(runtime=runtime) as world:
        await apply(
            world,
            is_published=False,
            image_pull_policy=ImagePullPolicy.ALWAYS,
            image_pull_secrets=("unreadable",),
        )
        await world.manager.claims.create(CALLER, PYTHON)
    assert runtime.given == []


async def test_a_missing_pull_secret_is_named() -> None:
    async with paddock() as world:
        await apply(world, image_pull_secrets=("absent",))
        with pytest.raises(UnavailableError, match="the pull secret default/absent does not exist"):
            await world.manager.claims.create(CALLER, PYTHON)
