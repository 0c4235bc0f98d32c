"""Default content: what a fresh installation has, so that `Sandbox.create()` works at once."""

from paddock.claims.caller import DEFAULT_TEAM, SYSTEM_NAMESPACE, Role
from paddock.kit.errors import AlreadyExistsError
from paddock.manager.keys import Keyring, key_hash
from paddock.resources.kinds.builtin import Namespace, Secret
from paddock.resources.kinds.pool import SandboxPool, SandboxPoolSpec
from paddock.resources.kinds.template import (
    Resources,
    SandboxTemplate,
    SandboxTemplateSpec,
    TemplateRef,
)
from paddock.resources.meta import ObjectMeta, Resource
from paddock.settings import Settings
from paddock.store.port import Store

BASE = "base"


async def ensure(store: Store, keyring: Keyring, settings: Settings, api_key: str) -> None:
    """Create what is missing; what is there stays as people made it."""
    for name in (DEFAULT_TEAM, SYSTEM_NAMESPACE):
        await _create(store, Namespace(metadata=ObjectMeta(name=name)))
    await _create(
        store,
        SandboxTemplate(
            metadata=ObjectMeta(name=BASE, namespace=DEFAULT_TEAM),
            spec=SandboxTemplateSpec(
                image=settings.default_image,
                resources=Resources(cpu="2", memory="1Gi", disk="10Gi", pids=4096),
                description="Debian with bash, python3, git, curl and a user with sudo.",
            ),
        ),
    )
    await _create(
        store,
        SandboxPool(
            metadata=ObjectMeta(name=BASE, namespace=DEFAULT_TEAM),
            spec=SandboxPoolSpec(template_ref=TemplateRef(name=BASE), replicas=settings.pool_size),
        ),
    )
    if await _is_first_time(store) and all(
        key.hash != key_hash(api_key) for key in keyring.listed()
    ):
        await keyring.create(name="first key", role=Role.ADMIN, secret=api_key)


async def _is_first_time(store: Store) -> bool:
    """Say whether this store has had its first key; revoked, it must not come back."""
    marker = Secret(
        metadata=ObjectMeta(name="first-key-was-made", namespace=SYSTEM_NAMESPACE),
        type="paddock.dev/marker",
    )
    try:
        await store.create(marker)
    except AlreadyExistsError:
        return False
    return True


async def _create(store: Store, obj: Resource) -> None:
    try:
        await store.create(obj)
    except AlreadyExistsError:
        return
