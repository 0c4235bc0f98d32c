"""Builds the HTTP application of a process that serves clients."""

from paddock.api.dispatcher import Dispatcher
from paddock.api.e2b.app import create_app as create_e2b
from paddock.api.federation.app import Application, FederationProxy
from paddock.api.federation.app import create_app as create_federation
from paddock.api.health import create_app as create_ops
from paddock.api.internal import FindRemote, OnReport
from paddock.api.internal import create_app as create_internal
from paddock.api.login_limits import LoginLimits
from paddock.app.wiring.assembly import Assembly
from paddock.kit.clock import Clock
from paddock.manager.service import Manager
from paddock.settings import Settings


def build_login_limits(settings: Settings, clock: Clock) -> LoginLimits:
    """Return the limits of wrong keys and tokens, which all APIs of a process share."""
    return LoginLimits(
        clock,
        burst=settings.wrong_keys_per_address,
        interval_seconds=settings.wrong_key_seconds,
    )


def build_application(
    assembly: Assembly,
    manager: Manager,
    *,
    kube: Application,
    logins: LoginLimits,
    token: str,
    on_report: OnReport,
) -> Dispatcher:
    """Return one application for all paths; `kube` serves the declarative API.

    In a federation, E2B's API also serves sandboxes of other clusters.
    """
    keyring = assembly.keyring
    domain = assembly.settings.domain or None
    local = create_e2b(manager, keyring, assembly.seed, logins=logins, domain=domain)
    e2b: Application = local
    peers: Application | None = None
    lookup: FindRemote | None = None
    if (parts := assembly.federation) is not None:
        e2b = FederationProxy(local, parts.federation, keyring, logins)
        router = assembly.environments.claim_queue
        peers = create_federation(parts.federation, parts.signer, manager, router, local)
        lookup = parts.federation.find
    return Dispatcher(
        e2b=e2b,
        kube=kube,
        ops=create_ops(assembly.provider),
        internal=create_internal(manager, token, on_report, lookup),
        federation=peers,
    )
