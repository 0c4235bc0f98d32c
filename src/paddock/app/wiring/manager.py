"""Builds the manager, which every process that serves the API has."""

from urllib.parse import urlsplit

from paddock.builds.files import BuildFiles
from paddock.cache.pool_members import PoolMembers
from paddock.cache.provider import Provider
from paddock.claims.acquirer import Acquirer
from paddock.claims.caller import LABEL_KIND, SYSTEM_NAMESPACE
from paddock.claims.cleanup import ClaimCleanup
from paddock.claims.engine import Claims
from paddock.claims.hand_over import HandOver
from paddock.claims.idempotency import IdempotencyKeys
from paddock.claims.network.ceilings import NetworkCeilings
from paddock.claims.overrides import ClaimOverrides
from paddock.claims.ports import Announcer
from paddock.claims.quota.fair_limiter import FairLimiter
from paddock.claims.quota.reservations import QuotaReservations
from paddock.claims.quota.share_store import KIND_SHARES
from paddock.claims.quota.stored import StoredLedger
from paddock.claims.quota.usage import QuotaUsage
from paddock.claims.template_resolver import TemplateResolver
from paddock.engine.informer import Filter
from paddock.kit.clock import Clock
from paddock.manager.environments.claims import EnvironmentClaims
from paddock.manager.keys import Keyring
from paddock.manager.ports import Agent
from paddock.manager.sandboxes.batches import Batches
from paddock.manager.sandboxes.lifecycle import Lifecycle
from paddock.manager.sandboxes.networks import SandboxNetworks
from paddock.manager.sandboxes.queries import SandboxQueries
from paddock.manager.sandboxes.snapshots import Snapshots
from paddock.manager.service import Manager
from paddock.manager.templates.build_requests import BuildLimits
from paddock.manager.templates.builds import TemplateBuilds
from paddock.manager.templates.queries import Templates
from paddock.manager.templates.registry import TemplateRegistry
from paddock.manager.templates.tags import TemplateTags
from paddock.resources import quantity
from paddock.resources.kinds.builtin import Lease, Secret
from paddock.resources.meta import Resource
from paddock.resources.network.internet import Internet
from paddock.resources.network.link_rates import LinkRates
from paddock.resources.selectors import parse_labels
from paddock.resources.tokens import TokenSeed
from paddock.runtime.local.storage.reserve import DiskReserve
from paddock.runtime.rate_settings import rates_of
from paddock.settings import Settings


def own_records(namespace: str = SYSTEM_NAMESPACE) -> dict[type[Resource], Filter]:
    """Return the filters for our own Secrets and Leases: keys, teams, and shares of quotas."""
    return {
        Secret: Filter(namespace=namespace, labels=parse_labels(LABEL_KIND)),
        Lease: Filter(namespace=namespace, labels=parse_labels(f"{LABEL_KIND}={KIND_SHARES}")),
    }


def build_limiter(settings: Settings, clock: Clock) -> FairLimiter:
    """Create the limiter that all cold creates share."""
    return FairLimiter(
        clock,
        per_second=settings.cold_creates_per_second,
        burst=max(int(settings.cold_creates_per_second), 1),
    )


def claim_images(settings: Settings) -> tuple[str, ...]:
    """Return the patterns of images that clients may choose."""
    return tuple(part.strip() for part in settings.claim_images.split(",") if part.strip())


def build_overrides(settings: Settings, agent: Agent, provider: Provider) -> ClaimOverrides:
    """Create the check of images and sizes that claims request."""
    return ClaimOverrides(
        agent,
        provider,
        memory_bytes=quantity.whole(settings.claim_memory) if settings.claim_memory else 0,
        images=claim_images(settings),
    )


def build_ceilings(settings: Settings, keyring: Keyring) -> NetworkCeilings:
    """Create the network policies of teams and of the installation."""
    urls = (
        settings.sandbox_pip_index,
        settings.sandbox_npm_registry,
        settings.sandbox_apt_mirror,
    )
    hosts = (urlsplit(url).hostname for url in urls if url)
    return NetworkCeilings(
        Internet(settings.sandbox_internet),
        lambda team: keyring.team(team).internet,
        mirrors=tuple(dict.fromkeys(filter(None, hosts))),
        needs_addresses=settings.runtime == "kubernetes",
    )


def build_link_rates(settings: Settings) -> LinkRates | None:
    """Return the rates of the installation; `None` where the runtime enforces none."""
    if settings.runtime == "kubernetes":
        return None
    found = rates_of(settings)
    return LinkRates(ingress=found.ingress_bandwidth or 0, egress=found.egress_bandwidth or 0)


def build_files(settings: Settings, clock: Clock) -> BuildFiles | None:
    """Return the files of template builds; None for a runtime that cannot store sandboxes."""
    if settings.runtime == "kubernetes":
        return None
    directory = settings.state / "builds"
    if settings.runtime != "local":
        return BuildFiles.below(directory, clock)
    reserve = DiskReserve(settings.state, settings.disk_reserve_bytes)
    return BuildFiles.below(directory, clock, ensure_room=reserve.ensure_room)


def build_limits(settings: Settings) -> BuildLimits:
    """Return the limits of template builds."""
    return BuildLimits(
        builds_per_team=settings.template_builds_per_team,
        cpu_count=settings.template_max_cpu,
        memory_mb=quantity.whole(settings.template_max_memory) >> 20,
        disk_mb=quantity.whole(settings.template_max_disk) >> 20,
    )


def build_manager(
    settings: Settings,
    *,
    provider: Provider,
    pool_members: PoolMembers,
    reservations: QuotaReservations,
    agent: Agent,
    announcer: Announcer,
    seed: TokenSeed,
    clock: Clock,
    ceilings: NetworkCeilings,
    stored: StoredLedger,
    limiter: FairLimiter | None = None,
    environments: EnvironmentClaims | None = None,
    idempotency_keys: IdempotencyKeys | None = None,
    build_files: BuildFiles | None = None,
) -> Manager:
    """Wire one manager; pool members, ledger and keyring subscribe to changes themselves.

    `build_files` is None where templates cannot be built.
    """
    cleanup = ClaimCleanup(provider, reservations.ledger, pool_members)
    resolver = TemplateResolver(provider)
    queries = SandboxQueries(provider, agent, clock)
    overrides = build_overrides(settings, agent, provider)
    claims = Claims(
        provider=provider,
        acquirer=Acquirer(
            provider=provider,
            pool_members=pool_members,
            reservations=reservations,
            limiter=limiter or build_limiter(settings, clock),
            clock=clock,
        ),
        resolver=resolver,
        cleanup=cleanup,
        hand_over=HandOver(
            provider=provider,
            agent=agent,
            overrides=overrides,
            announcer=announcer,
            cleanup=cleanup,
            clock=clock,
            ceiling_of=ceilings.of,
        ),
        overrides=overrides,
        seed=seed,
        clock=clock,
        environments=environments,
        idempotency_keys=idempotency_keys,
        max_timeout_seconds=settings.max_timeout_seconds,
        paused_retention_seconds=settings.paused_retention_seconds or None,
        ceiling_of=ceilings.of,
    )
    lifecycle = Lifecycle(
        provider=provider,
        queries=queries,
        reservations=reservations,
        cleanup=cleanup,
        agent=agent,
        announcer=announcer,
        clock=clock,
        max_timeout_seconds=settings.max_timeout_seconds,
    )
    registry = TemplateRegistry(provider, max_templates=settings.templates_per_team)
    tags = TemplateTags(provider, registry, clock)
    return Manager(
        claims=claims,
        queries=queries,
        lifecycle=lifecycle,
        networks=SandboxNetworks(
            provider=provider,
            queries=queries,
            agent=agent,
            ceilings=ceilings,
            rates=build_link_rates(settings),
        ),
        snapshots=Snapshots(
            provider=provider,
            claims=claims,
            queries=queries,
            clock=clock,
            stored=stored,
            registry=registry,
        ),
        usage=QuotaUsage(reservations.ledger, stored, reservations.quotas),
        templates=Templates(provider, resolver, registry),
        builds=TemplateBuilds(
            provider=provider,
            registry=registry,
            tags=tags,
            files=build_files,
            clock=clock,
            limits=build_limits(settings),
        ),
        tags=tags,
        batches=Batches(provider, claims, agent, seed, clock),
        cleanup=cleanup,
    )
