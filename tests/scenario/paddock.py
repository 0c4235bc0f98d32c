"""A whole control plane in memory, on virtual time, with a simulated runtime."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TypeVar

import httpx
import pytest

from paddock.adapters.runtime_agent import RuntimeAgent
from paddock.api.audit.log import AuditLog
from paddock.app.roles.control_plane import ControlPlane
from paddock.app.wiring import default_resources
from paddock.app.wiring.secrets import Secrets
from paddock.claims.caller import Caller, Role
from paddock.controllers.template_build.ports import BuildShell
from paddock.kit.clock import Clock, LoopClock
from paddock.kit.tasks import background
from paddock.resources.kinds.pool import SandboxPool
from paddock.resources.kinds.sandbox import Sandbox
from paddock.resources.kinds.template import Resources
from paddock.resources.meta import Key
from paddock.runtime.simulated import SimulatedRuntime
from paddock.settings import Settings
from paddock.store.memory import MemoryStore
from paddock.store.port import Store

T = TypeVar("T")
SECRETS = Secrets(seed="seed", token="token", api_key="e2b_" + "a" * 40)
CALLER = Caller("default", "", Role.MEMBER)


class World:
    """One control plane and helpers to inspect it."""

    knows_at_once = True
    """Room of a quota that no other process has reserved."""

    def __init__(self, plane: ControlPlane, runtime: SimulatedRuntime) -> None:
        self.plane = plane
        self.runtime = runtime
        self.manager = plane.manager
        self.provider = plane.provider
        self.store = plane.store
        transport = httpx.ASGITransport(app=plane.application(), raise_app_exceptions=False)
        self.http = httpx.AsyncClient(
            transport=transport,
            base_url="http://paddock",
            headers={"X-API-Key": SECRETS.api_key},
        )

    async def within_quota(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Request all that a quota has room for."""
        return await ask()

    async def until(self, condition, *, seconds: float = 30) -> None:
        """Wait in virtual time until a condition holds."""
        async with asyncio.timeout(seconds):
            while not condition():
                await asyncio.sleep(0.01)

    def pool(self, name: str = "base", namespace: str = "default") -> SandboxPool:
        found = self.provider.get(SandboxPool, Key(namespace, name))
        assert found is not None
        return found

    async def stocked(self, count: int, name: str = "base") -> None:
        """Wait until a pool has this many available sandboxes."""
        key = Key("default", name)
        await self.until(lambda: len(self.plane.pool_members.members(key).available) >= count)


@contextlib.asynccontextmanager
async def paddock(
    *,
    pool_size: int = 2,
    store: Store | None = None,
    runtime: SimulatedRuntime | None = None,
    clock: Clock | None = None,
    audit: AuditLog | None = None,
    build_shell: BuildShell | None = None,
    **settings,
) -> AsyncGenerator[World]:
    """Run a control plane for the duration of a test."""
    clock = clock or LoopClock()
    runtime = runtime or SimulatedRuntime(clock=clock)
    plane = ControlPlane(
        Settings(pool_size=pool_size, **settings),
        SECRETS,
        store=store or MemoryStore(clock=clock),
        runtime=runtime,
        clock=clock,
        audit=audit,
        build_shell=build_shell,
    )
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(plane.provider.run())
        await default_resources.ensure(plane.store, plane.keyring, plane.settings, SECRETS.api_key)
        for name, work in plane.work().items():
            await stack.enter_async_context(background(work, name=name))
        world = World(plane, runtime)
        stack.push_async_callback(world.http.aclose)
        yield world


def resizing(monkeypatch: pytest.MonkeyPatch) -> list[Resources]:
    """Make the runtime resize in place; return the list of requested sizes."""
    asked: list[Resources] = []

    async def resize(_self: object, sandbox: Sandbox, _template: object) -> None:
        assert sandbox.spec.resources is not None
        asked.append(sandbox.spec.resources)

    monkeypatch.setattr(RuntimeAgent, "can_resize", lambda _self, _now, _wanted: True)
    monkeypatch.setattr(RuntimeAgent, "resize", resize)
    return asked
