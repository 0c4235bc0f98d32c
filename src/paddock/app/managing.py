"""The manager, wired: what every process has that answers clients' calls."""

from paddock.cache.census import Census
from paddock.cache.provider import Provider
from paddock.engine.informer import Filter
from paddock.kit.clock import Clock
from paddock.kit.settings import Settings
from paddock.kit.tokens import TokenSeed
from paddock.manager.allowance import Allowance
from paddock.manager.batches import Batches
from paddock.manager.books import KIND_SHARES
from paddock.manager.claims import Claims
from paddock.manager.disowning import Disowning
from paddock.manager.envclaims import EnvClaims
from paddock.manager.firsts import Firsts
from paddock.manager.fitting import Fitting
from paddock.manager.keys import LABEL_KIND, SYSTEM_NAMESPACE
from paddock.manager.lifecycle import Lifecycle
from paddock.manager.limiter import FairLimiter
from paddock.manager.ports import Agent, Announcer
from paddock.manager.service import Manager
from paddock.manager.snapshots import Snapshots
from paddock.manager.targets import Targets
from paddock.resources import quantity
from paddock.resources.builtin import Lease, Secret
from paddock.resources.meta import Resource
from paddock.resources.selectors import parse_labels


def own_records(namespace: str = SYSTEM_NAMESPACE) -> dict[type[Resource], Filter]:
    """Say which Secrets and Leases are ours: keys, teams, and shares of quotas."""
    return {
        Secret: Filter(namespace=namespace, labels=parse_labels(LABEL_KIND)),
        Lease: Filter(namespace=namespace, labels=parse_labels(f"{LABEL_KIND}={KIND_SHARES}")),
    }


def build_limiter(settings: Settings, clock: Clock) -> FairLimiter:
    """Make the one gate through which everything goes that is made because stock is out."""
    return FairLimiter(
        clock,
        per_second=settings.cold_creates_per_second,
        burst=max(int(settings.cold_creates_per_second), 1),
    )


def build_fitting(settings: Settings, agent: Agent, provider: Provider) -> Fitting:
    """Make what says which images and sizes claims may have."""
    return Fitting(
        agent,
        provider,
        memory_bytes=quantity.whole(settings.claim_memory) if settings.claim_memory else 0,
        images=tuple(filter(None, map(str.strip, settings.claim_images.split(",")))),
    )


def build_manager(
    settings: Settings,
    *,
    provider: Provider,
    census: Census,
    allowance: Allowance,
    agent: Agent,
    announcer: Announcer,
    seed: TokenSeed,
    clock: Clock,
    limiter: FairLimiter | None = None,
    environments: EnvClaims | None = None,
    firsts: Firsts | None = None,
) -> Manager:
    """Wire one manager; census, ledger and keyring hear of changes by their own subscriptions."""
    disowning = Disowning(provider, allowance.ledger, census)
    targets = Targets(provider)
    claims = Claims(
        provider=provider,
        census=census,
        targets=targets,
        allowance=allowance,
        disowning=disowning,
        firsts=firsts,
        limiter=limiter or build_limiter(settings, clock),
        agent=agent,
        fitting=build_fitting(settings, agent, provider),
        announcer=announcer,
        seed=seed,
        clock=clock,
        environments=environments,
        max_timeout_seconds=settings.max_timeout_seconds,
    )
    lifecycle = Lifecycle(
        provider=provider,
        allowance=allowance,
        disowning=disowning,
        agent=agent,
        announcer=announcer,
        clock=clock,
        max_timeout_seconds=settings.max_timeout_seconds,
    )
    snapshots = Snapshots(
        provider=provider,
        claims=claims,
        lifecycle=lifecycle,
        targets=targets,
        clock=clock,
    )
    return Manager(
        provider=provider,
        claims=claims,
        lifecycle=lifecycle,
        snapshots=snapshots,
        targets=targets,
        agent=agent,
        clock=clock,
        batches=Batches(provider, claims, agent, seed, clock),
        disowning=disowning,
    )
