"""The resources of a new installation, so that `Sandbox.create()` works without preparation."""

import contextlib

from paddock.claims.caller import DEFAULT_TEAM, Role
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
    """Create what is missing; existing resources are left unchanged."""
    home = settings.system_namespace
    for name in (DEFAULT_TEAM, home):
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
    if await _is_first_start(store, home) and not _has_key(keyring, api_key):
        await keyring.create(name="first key", role=Role.ADMIN, secret=api_key)


async def ensure_first_key(keyring: Keyring, api_key: str) -> None:
    """Create the first key if it is missing; replicas that start together create it once."""
    if not api_key or _has_key(keyring, api_key):
        return
    with contextlib.suppress(AlreadyExistsError):
        await keyring.create(
            name="first key",
            role=Role.ADMIN,
            secret=api_key,
            key_id=f"first-key-{key_hash(api_key)[:12]}",
        )


def _has_key(keyring: Keyring, api_key: str) -> bool:
    return any(key.hash == key_hash(api_key) for key in keyring.listed())


async def _is_first_start(store: Store, namespace: str) -> bool:
    """Whether this store never had a first key: a revoked one must not be created again."""
    marker = Secret(
        metadata=ObjectMeta(name="first-key-was-made", namespace=namespace),
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
