"""The objects that the control plane, API replicas and the controllers process have in common.

Each of these roles builds one `Assembly` from its settings and its store, and adds the parts that
only it runs. HTTP applications are built in `applications.py`, stores and runtimes in
`backends.py`.
"""

import asyncio

from msgspec import Struct

from paddock.adapters.build_shell import EnvdBuildShell
from paddock.app.wiring import federation
from paddock.app.wiring.batches import BatchControllers, default_tasks, load_profiles
from paddock.app.wiring.controllers import Controllers
from paddock.app.wiring.environments import Environments
from paddock.app.wiring.federation import FederationParts
from paddock.app.wiring.manager import (
    build_ceilings,
    build_files,
    build_limiter,
    build_manager,
    build_overrides,
    claim_images,
    own_records,
)
from paddock.builds.files import BuildFiles
from paddock.cache.pool_members import PoolMembers
from paddock.cache.provider import KINDS, Provider
from paddock.claims.acquirer import Acquirer
from paddock.claims.idempotency import IdempotencyKeys
from paddock.claims.network.ceilings import NetworkCeilings
from paddock.claims.ports import Announcer
from paddock.claims.quota.declared import DeclaredQuota
from paddock.claims.quota.fair_limiter import FairLimiter
from paddock.claims.quota.ledger import Ledger
from paddock.claims.quota.reservations import QuotaReservations
from paddock.claims.quota.share_manager import ShareManager
from paddock.claims.quota.stored import StoredLedger, checkpoint_holding, sandbox_holding
from paddock.controllers.batch.tasks.runner import TaskRunner
from paddock.controllers.sandbox.waiting_requests import WaitingRequests
from paddock.controllers.template_build.controller import TemplateBuildController
from paddock.controllers.template_build.factory import new_controller
from paddock.controllers.template_build.ports import BuildShell
from paddock.engine.informer import Filter
from paddock.engine.recorder import Recorder
from paddock.kit import ids
from paddock.kit.clock import Clock
from paddock.manager.keys import Keyring
from paddock.manager.ports import Agent
from paddock.manager.service import Manager
from paddock.resources.kinds.batch import BatchSandbox
from paddock.resources.kinds.builtin import Lease, Secret
from paddock.resources.kinds.checkpoint import Checkpoint
from paddock.resources.kinds.pool import SandboxPool
from paddock.resources.kinds.sandbox import Sandbox
from paddock.resources.tokens import TokenSeed
from paddock.runtime.port import Runtime
from paddock.settings import Settings
from paddock.store.port import Store

KEY_FLUSH_SECONDS = 60.0


class Assembly(Struct, frozen=True, kw_only=True):
    """The common objects of one process, wired and not yet running.

    They follow the store as soon as `provider` runs.
    """

    settings: Settings
    seed: TokenSeed
    clock: Clock
    is_sole_writer: bool
    """Whether no other process writes to the store."""
    provider: Provider
    pool_members: PoolMembers
    ledger: Ledger
    keyring: Keyring
    reservations: QuotaReservations
    """Reserves quota for claims."""
    stored: StoredLedger
    """Stored bytes of teams and keys."""
    declared: DeclaredQuota
    """Quota held by pools and batches of API keys."""
    shares: ShareManager | None
    """The same object as `reservations`, if several processes share the quotas of teams."""
    idempotency_keys: IdempotencyKeys | None
    """Idempotency keys that several processes share; None if this process is alone."""
    limiter: FairLimiter
    ceilings: NetworkCeilings
    """The network policies of teams and of the installation."""
    federation: FederationParts | None
    environments: Environments
    build_files: BuildFiles | None
    """Logs and uploads of template builds; None where templates cannot be built."""

    def build_manager(self, agent: Agent, announcer: Announcer) -> Manager:
        """Wire the manager."""
        return build_manager(
            self.settings,
            provider=self.provider,
            pool_members=self.pool_members,
            reservations=self.reservations,
            idempotency_keys=self.idempotency_keys,
            agent=agent,
            announcer=announcer,
            seed=self.seed,
            clock=self.clock,
            limiter=self.limiter,
            ceilings=self.ceilings,
            environments=self.environments.claims,
            stored=self.stored,
            build_files=self.build_files,
        )

    def build_batches(
        self, runtime: Runtime, recorder: Recorder, tasks: TaskRunner | None = None
    ) -> BatchControllers:
        """Wire the controllers of batches; by default with the task runner of the runtime."""
        return BatchControllers(
            provider=self.provider,
            pool_members=self.pool_members,
            seed=self.seed,
            clock=self.clock,
            recorder=recorder,
            environments=self.environments,
            tasks=tasks or default_tasks(runtime, self.seed, self.clock),
            profiles=load_profiles(self.settings),
            is_sole_writer=self.is_sole_writer,
        )

    def build_controllers(
        self,
        runtime: Runtime,
        agent: Agent,
        recorder: Recorder,
        batches: BatchControllers,
        requests: WaitingRequests,
        build_shell: BuildShell | None = None,
    ) -> Controllers:
        """Wire all controllers."""
        acquirer = Acquirer(
            provider=self.provider,
            pool_members=self.pool_members,
            reservations=self.reservations,
            limiter=self.limiter,
            clock=self.clock,
        )
        return Controllers(
            provider=self.provider,
            pool_members=self.pool_members,
            runtime=runtime,
            seed=self.seed,
            clock=self.clock,
            recorder=recorder,
            batches=batches,
            environments=self.environments,
            acquirer=acquirer,
            builds=self._template_builds(runtime, acquirer, recorder, build_shell),
            overrides=build_overrides(self.settings, agent, self.provider),
            requests=requests,
            ceiling_of=self.ceilings.of,
            stored=self.stored,
            on_team_change=self.keyring.on_team_change,
            paused_retention_seconds=self.settings.paused_retention_seconds or None,
        )

    def _template_builds(
        self,
        runtime: Runtime,
        acquirer: Acquirer,
        recorder: Recorder,
        shell: BuildShell | None,
    ) -> TemplateBuildController | None:
        if self.build_files is None:
            return None
        return new_controller(
            self.build_files,
            shell or EnvdBuildShell(self.seed),
            provider=self.provider,
            runtime=runtime,
            acquirer=acquirer,
            seed=self.seed,
            clock=self.clock,
            recorder=recorder,
            builds_per_team=self.settings.template_builds_per_team,
            max_seconds=self.settings.template_build_seconds,
            images=claim_images(self.settings),
        )

    async def keep_keys_flushed(self) -> None:
        """Write the last use of API keys to the store at intervals, until cancelled."""
        while True:
            await asyncio.sleep(KEY_FLUSH_SECONDS)
            await self.keyring.flush_last_used()

    async def leave(self) -> None:
        """Release this process's shares of quotas."""
        if self.shares is not None:
            await self.shares.leave()


def assemble(
    settings: Settings,
    store: Store,
    seed: TokenSeed,
    clock: Clock,
    *,
    is_sole_writer: bool,
    is_federated: bool,
    idempotency_store: Store | None = None,
) -> Assembly:
    """Wire the common objects.

    `is_federated` is false for a process that does not serve claims of other clusters.
    `idempotency_store` is where idempotency keys are written, by default `store`.
    """
    home = settings.system_namespace
    only = Filter(namespace=settings.namespace or None)
    provider = Provider(
        store,
        kinds=(*KINDS, Secret) if is_sole_writer else (*KINDS, Secret, Lease),
        # Our own records include the quotas of teams, which admission of environments reads.
        filters={**dict.fromkeys(KINDS, only), **own_records(home)},
        clock=clock,
    )
    pool_members = PoolMembers()
    ledger = Ledger("" if is_sole_writer else ids.sandbox_id())
    keyring = Keyring(store, clock, home)
    provider.informer(Sandbox).subscribe(pool_members.observe)
    provider.informer(Sandbox).subscribe(ledger.observe)
    provider.informer(BatchSandbox).subscribe(pool_members.observe_batch)
    provider.informer(Secret).subscribe(keyring.observe)
    declared = DeclaredQuota(ledger, keyring)
    provider.informer(SandboxPool).subscribe(declared.observe)
    provider.informer(BatchSandbox).subscribe(declared.observe)
    stored = StoredLedger(keyring)
    stored.watch(provider.informer(Checkpoint), checkpoint_holding)
    stored.watch(provider.informer(Sandbox), sandbox_holding)
    shares: ShareManager | None = None
    idempotency_keys: IdempotencyKeys | None = None
    if not is_sole_writer:
        shares = ShareManager(ledger, keyring, provider, clock)
        idempotency_keys = IdempotencyKeys(
            idempotency_store or store, provider, clock, ledger.account, home
        )
    peers = federation.connect(settings, seed, clock) if is_federated else None
    return Assembly(
        settings=settings,
        seed=seed,
        clock=clock,
        is_sole_writer=is_sole_writer,
        provider=provider,
        pool_members=pool_members,
        ledger=ledger,
        keyring=keyring,
        reservations=shares or QuotaReservations(ledger, keyring),
        stored=stored,
        declared=declared,
        shares=shares,
        idempotency_keys=idempotency_keys,
        limiter=build_limiter(settings, clock),
        ceilings=build_ceilings(settings, keyring),
        federation=peers,
        environments=Environments(
            settings, provider, pool_members, keyring, clock, peers.federation if peers else None
        ),
        build_files=build_files(settings, clock),
    )
