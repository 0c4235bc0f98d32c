"""Builds the HTTP application of a process that serves clients, and the one at `/mcp`."""

from paddock.api.audit.described import (
    describe_e2b,
    describe_gateway,
    describe_mcp,
    describe_peer,
)
from paddock.api.audit.log import AuditLog
from paddock.api.audit.middleware import Audited
from paddock.api.call_limits import CallLimits
from paddock.api.dispatcher import Dispatcher
from paddock.api.e2b.app import create_app as create_e2b
from paddock.api.federation.app import Application, FederationProxy
from paddock.api.federation.app import create_app as create_federation
from paddock.api.health import create_app as create_ops
from paddock.api.internal import FindRemote, OnReport
from paddock.api.internal import create_app as create_internal
from paddock.api.kube.key_writes.request import KeyLimits
from paddock.api.kube.key_writes.writer import KeyWrites
from paddock.api.login_limits import LoginLimits
from paddock.api.mcp.http import McpApplication, McpProtocol
from paddock.api.mcp.origins import PageOrigins
from paddock.api.mcp.package import require_package, usable_package
from paddock.api.request_ids import RequestIds
from paddock.app.wiring.assembly import Assembly
from paddock.app.wiring.manager import claim_images
from paddock.kit.clock import Clock
from paddock.kit.errors import UnsupportedError
from paddock.manager.keys import Keyring
from paddock.manager.service import Manager
from paddock.resources import quantity
from paddock.resources.default_limits import DEFAULT_MEMORY_BYTES
from paddock.settings import Settings
from paddock.store.port import Store

_ANY = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}  # noqa: S104 - compared
"""Addresses that listen everywhere, and where this machine reaches them."""


def build_login_limits(settings: Settings, clock: Clock) -> LoginLimits:
    """Return the limits of calls and of wrong keys, which all APIs of a process share."""
    return LoginLimits(
        clock,
        burst=settings.wrong_keys_per_address,
        interval_seconds=settings.wrong_key_seconds,
        calls=CallLimits(
            clock,
            per_key=settings.calls_per_second_per_key,
            per_address=settings.calls_per_second_per_address,
        ),
    )


def build_application(
    assembly: Assembly,
    manager: Manager,
    *,
    kube: Application,
    mcp: Application,
    logins: LoginLimits,
    audit: AuditLog,
    token: str,
    on_report: OnReport,
) -> Dispatcher:
    """Return one application for all paths; `kube` serves the declarative API and records its
    own calls.

    In a federation, E2B's API also serves sandboxes of other clusters.
    """
    keyring = assembly.keyring
    domain = assembly.settings.domain or None
    local = create_e2b(manager, keyring, assembly.seed, logins=logins, domain=domain)
    e2b: Application = local
    peers: Application | None = None
    lookup: FindRemote | None = None
    if (parts := assembly.federation) is not None:
        e2b = RequestIds(FederationProxy(local, parts.federation, keyring, logins))
        router = assembly.environments.claim_queue
        recorded = Audited(local, audit, describe_e2b)
        peers = Audited(
            create_federation(parts.federation, parts.signer, manager, router, recorded),
            audit,
            describe_peer,
        )
        lookup = parts.federation.find
    return Dispatcher(
        e2b=Audited(e2b, audit, describe_e2b),
        kube=kube,
        ops=create_ops(assembly.provider),
        internal=Audited(
            create_internal(manager, token, on_report, lookup), audit, describe_gateway
        ),
        mcp=RequestIds(Audited(mcp, audit, describe_mcp)),
        federation=peers,
    )


def build_key_writes(assembly: Assembly, store: Store) -> KeyWrites | None:
    """Return the check, or None where several processes share the quotas: keys only read there."""
    if assembly.shares is not None:
        return None
    settings = assembly.settings
    memory = quantity.whole(settings.claim_memory) if settings.claim_memory else 0

    def limits_of(team: str) -> KeyLimits:
        return KeyLimits(
            max_timeout_seconds=settings.max_timeout_seconds,
            ceiling=assembly.ceilings.of(team),
            images=("base", *claim_images(settings)),
            memory_bytes=max(DEFAULT_MEMORY_BYTES, memory),
        )

    return KeyWrites(
        store,
        assembly.clock,
        limits_of=limits_of,
        reservations=assembly.reservations,
        declared=assembly.declared,
        stored=assembly.stored,
    )


def build_mcp(
    settings: Settings, keyring: Keyring, logins: LoginLimits, *, has_gateways: bool
) -> McpApplication:
    """Return the application. `has_gateways`: gateways listen on this machine."""

    def load() -> McpProtocol:
        require_package()
        gateway = settings.mcp_gateway
        if not gateway and not has_gateways:
            raise UnsupportedError(
                "MCP is not served here: the setting mcp_gateway is not set",
                hint="set it to the URL of the gateways, or use `paddock mcp`",
            )
        # Not at the top: the package takes seconds to import.
        with usable_package():
            from paddock.api.mcp.sdk_http import SdkProtocol

        return SdkProtocol(
            api=_url(settings.api_host, settings.api_port),
            gateway=gateway or _url(settings.host, settings.port),
            template=settings.mcp_template,
        )

    return McpApplication(load, keyring, logins, PageOrigins(settings.domain))


def _url(host: str, port: int) -> str:
    return f"http://{_ANY.get(host, host)}:{port}"
