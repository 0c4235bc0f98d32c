"""The resources of a new installation, so that `Sandbox.create()` works without preparation.

Each is created once. A marker in the store records it, so that what an operator deletes stays
deleted over restarts; `paddock apply` creates it again.
"""

import contextlib

from paddock.claims.caller import DEFAULT_TEAM, Role
from paddock.kit.errors import AlreadyExistsError, NotFoundError
from paddock.manager.key_records import key_hash
from paddock.manager.keys import Keyring
from paddock.resources.kinds.builtin import Namespace, Secret
from paddock.resources.kinds.pool import SandboxPool, SandboxPoolSpec
from paddock.resources.kinds.template import (
    Resources,
    SandboxTemplate,
    SandboxTemplateSpec,
    TemplateRef,
)
from paddock.resources.meta import Key, ObjectMeta, Resource
from paddock.settings import Settings
from paddock.store.port import Store

BASE = "base"
_FIRST_KEY = "first-key-was-made"


async def ensure(store: Store, keyring: Keyring, settings: Settings, api_key: str) -> None:
    """Create what no earlier start has created; existing resources are left unchanged."""
    home = settings.system_namespace
    for name in (DEFAULT_TEAM, home):
        await _create(store, Namespace(metadata=ObjectMeta(name=name)))
    defaults = {
        "default-template-was-made": SandboxTemplate(
            metadata=ObjectMeta(name=BASE, namespace=DEFAULT_TEAM),
            spec=SandboxTemplateSpec(
                image=settings.default_image,
                resources=Resources(cpu="2", memory="1Gi", disk="10Gi", pids=4096),
                description="Debian with Python, Node.js, git, gcc and a user with sudo.",
            ),
        ),
        "default-pool-was-made": SandboxPool(
            metadata=ObjectMeta(name=BASE, namespace=DEFAULT_TEAM),
            spec=SandboxPoolSpec(template_ref=TemplateRef(name=BASE), replicas=settings.pool_size),
        ),
    }
    for marker, obj in defaults.items():
        if not await _is_marked(store, home, marker):
            await _create(store, obj)
            await _mark(store, home, marker)
    if not await _is_marked(store, home, _FIRST_KEY):
        if not _has_key(keyring, api_key):
            await keyring.create(name="first key", role=Role.OPERATOR, secret=api_key)
        await _mark(store, home, _FIRST_KEY)


async def ensure_first_key(keyring: Keyring, api_key: str) -> None:
    """Create the first key if it is missing; replicas that start together create it once."""
    if not api_key or _has_key(keyring, api_key):
        return
    with contextlib.suppress(AlreadyExistsError):
        await keyring.create(
            name="first key",
            role=Role.OPERATOR,
            secret=api_key,
            key_id=f"first-key-{key_hash(api_key)[:12]}",
        )


def _has_key(keyring: Keyring, api_key: str) -> bool:
    return any(key.hash == key_hash(api_key) for key in keyring.listed())


async def _is_marked(store: Store, namespace: str, name: str) -> bool:
    """Whether an earlier start made this object: a deleted one must not be created again."""
    try:
        await store.get(Secret, Key(namespace, name))
    except NotFoundError:
        return False
    return True


async def _mark(store: Store, namespace: str, name: str) -> None:
    """Record that the object was made; after it, so that a crash in between loses nothing."""
    meta = ObjectMeta(name=name, namespace=namespace)
    await _create(store, Secret(metadata=meta, type="paddock.dev/marker"))


async def _create(store: Store, obj: Resource) -> None:
    try:
        await store.create(obj)
    except AlreadyExistsError:
        return
