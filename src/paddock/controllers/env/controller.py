"""Performs what `render`, `autoscale` and admission decide for one environment.

The order of writes makes a crash harmless: admission, then the autoscaler's state (so that nothing
happens twice within a cooldown), then the member's size in the environment, then the pool. A later
reconcile continues from what was written. Only this cluster's segment is read or written.
"""

import asyncio
import random
from collections.abc import Mapping

from msgspec import structs

from paddock.cache.environments import EnvSnapshots, WaitingClaims
from paddock.cache.pool_members import PoolMembers
from paddock.cache.provider import Provider
from paddock.controllers.admission.gate import AdmissionGate
from paddock.controllers.admission.plugin import PoolRequest
from paddock.controllers.env import status as statuses
from paddock.controllers.env.admission_step import AdmissionStep
from paddock.controllers.env.autoscale import PROTECTION_SECONDS, ScalingAction
from paddock.controllers.env.autoscale_step import (
    AutoscaleStep,
    ClaimDemand,
    NoClaimDemand,
    with_reported_queues,
)
from paddock.controllers.env.claim_rate import ClaimRate, is_worth_writing
from paddock.controllers.env.instance_types import INSTANCE_TYPES
from paddock.controllers.env.member_reconcile import MemberProblem, MemberReconcile
from paddock.controllers.env.render import drift, pool_name, size_of
from paddock.controllers.pool.controller import Supply, no_supply
from paddock.controllers.sandbox.templates import resolve
from paddock.engine.controller import Done, RequeueAfter, Result
from paddock.engine.recorder import Recorder
from paddock.kit.clock import Clock
from paddock.kit.errors import AlreadyExistsError, FieldProblem, InvalidError, NotFoundError
from paddock.resources.kinds.env import EnvCluster, SandboxEnv, SandboxEnvStatus
from paddock.resources.kinds.pool import SandboxPool
from paddock.resources.kinds.template import Resources, SandboxTemplate, SandboxTemplateSpec
from paddock.resources.meta import Key, controller_of

PERIOD_SECONDS = 10.0
JITTER = 0.2
STATUS_SECONDS = 1.0
"""Counts in the status are written at most this often; other changes at once."""


class EnvController:
    """Manages the pools of each environment in this cluster."""

    def __init__(
        self,
        *,
        provider: Provider,
        pool_members: PoolMembers,
        gate: AdmissionGate,
        env_snapshots: EnvSnapshots,
        cluster_id: str,
        clock: Clock,
        recorder: Recorder,
        demand: ClaimDemand | None = None,
        supply: Supply = no_supply,
        instance_types: Mapping[str, Resources] = INSTANCE_TYPES,
    ) -> None:
        if not cluster_id:
            problem = FieldProblem("cluster_id", "must name this cluster's segment")
            raise InvalidError(str(problem), problems=[problem], hint="set PADDOCK_CLUSTER_ID")
        self._provider = provider
        self._gate = gate
        self._env_snapshots = env_snapshots
        self._cluster = cluster_id
        self._clock = clock
        self._recorder = recorder
        self._demand = demand or NoClaimDemand()
        self._random = random.Random()  # noqa: S311 - spreads load, guards nothing
        self.claim_rate = ClaimRate()
        """Must be subscribed to the Sandbox informer."""
        self._autoscale = AutoscaleStep(pool_members, self.claim_rate, supply)
        self._admission = AdmissionStep(gate, instance_types)
        self._admitting = asyncio.Lock()
        self._written_at: dict[Key, float] = {}

    async def reconcile(self, key: Key) -> Result:
        """Reconcile one environment."""
        env = self._provider.get(SandboxEnv, key)
        if env is None or env.is_deleting:
            self._env_snapshots.drop(key)
            self._written_at.pop(key, None)
            return Done()
        now = self._clock.now()
        template, template_problem = self._template(env)
        runs = self._cases(env)
        waiting = with_reported_queues(self._demand.waiting(key), env, now)
        for run in runs:
            self._admission.render(env, run, template)
            self._autoscale.observe(run, now)
        self._autoscale.decide(runs, waiting, now)
        for run in runs:
            rendered = self._admission.prepare(run, now)
            if rendered is None:
                await self._write_state(run)
                env = await self._write_size(env, run)
                continue
            # One at a time over all environments: each grant counts against the next request.
            async with self._admitting:
                await self._admission.admit(run, rendered, now)
                await self._write_state(run)
                env = await self._write_size(env, run)
                await self._write_pool(env, run)
        await self._delete_obsolete(env, runs)
        self._env_snapshots.put(statuses.snapshot(env, runs, cluster=self._cluster, now=now))
        return await self._report(env, runs, waiting, template_problem)

    # ---- reading -------------------------------------------------------------------------

    def _template(self, env: SandboxEnv) -> tuple[SandboxTemplateSpec | None, MemberProblem | None]:
        try:
            templates = self._provider.informer(SandboxTemplate)
            return resolve(templates, env.spec.template_ref, env.metadata.namespace), None
        except NotFoundError as error:
            return None, MemberProblem("TemplateNotFound", error.message)

    def _cases(self, env: SandboxEnv) -> list[MemberReconcile]:
        segment = env.spec.clusters.get(self._cluster) or EnvCluster()
        runs: list[MemberReconcile] = []
        taken: dict[Key, str] = {}
        for name, member in sorted(segment.members.items()):
            key = Key(env.metadata.namespace, pool_name(env.metadata.name, name))
            pool = self._provider.get(SandboxPool, key)
            run = MemberReconcile(name=name, member=member, key=key)
            run.group = env.spec.autoscaling.groups.get(member.config.scaling_group)
            if key in taken:
                message = f"its pool {key.name} has the same name as that of member {taken[key]}"
                run.problem = MemberProblem("NameCollision", message)
            elif pool is not None and not _is_of(pool, env):
                message = f"pool {key.name} exists and belongs to another owner"
                run.problem = MemberProblem("NameCollision", message)
            elif pool is not None and not pool.is_deleting:
                run.pool = pool
            taken.setdefault(key, name)
            runs.append(run)
        return runs

    # ---- writing -------------------------------------------------------------------------

    async def _write_size(self, env: SandboxEnv, run: MemberReconcile) -> SandboxEnv:
        """Write the granted size into this cluster's segment, and nothing else."""
        is_ours = run.is_scaled and run.problem is None and (run.pool or run.rendered)
        if not is_ours or self._size_in(env, run.name) == run.granted:
            return env

        def change(found: SandboxEnv) -> SandboxEnv | None:
            segment = found.spec.clusters.get(self._cluster)
            if segment is None or run.name not in segment.members:
                return None
            member = structs.replace(segment.members[run.name], replicas=run.granted)
            new = structs.replace(segment, members={**segment.members, run.name: member})
            clusters = {**found.spec.clusters, self._cluster: new}
            return structs.replace(found, spec=structs.replace(found.spec, clusters=clusters))

        return await self._provider.write.mutate(SandboxEnv, env.key, change, uid=env.metadata.uid)

    def _size_in(self, env: SandboxEnv, name: str) -> int | None:
        segment = env.spec.clusters.get(self._cluster)
        member = segment.members.get(name) if segment is not None else None
        return member.replicas if member is not None else None

    async def _write_pool(self, env: SandboxEnv, run: MemberReconcile) -> None:
        wanted = run.rendered
        if wanted is None:
            return
        if run.pool is None:
            try:
                run.pool = await self._provider.write.create(wanted)
            except AlreadyExistsError:
                run.problem = MemberProblem(
                    "NameCollision", f"pool {run.key.name} was created by another owner"
                )
                return
            except InvalidError as error:
                run.problem = MemberProblem("MemberInvalid", error.advice)
                return
            message = f"created pool {run.key.name} with {run.granted} sandboxes"
            self._recorder.normal(env, "PoolCreated", message)
            await self._write_state(run)
            return
        found = drift(run.pool, wanted)
        if found is None:
            return
        before = size_of(run.pool)
        try:
            run.pool = await self._provider.write.mutate(
                SandboxPool,
                run.key,
                lambda pool: None if (new := drift(pool, wanted)) is None else new.pool,
                uid=run.pool.metadata.uid,
            )
        except InvalidError as error:
            run.problem = MemberProblem("MemberInvalid", error.advice)
            return
        others = [part for part in found.parts if part != "replicas"]
        if others:
            message = f"pool {run.key.name}: {', '.join(others)} restored"
            self._recorder.normal(env, "DriftCorrected", message)
        elif not run.is_scaled:
            message = f"pool {run.key.name}: size {before} → {run.granted}"
            self._recorder.normal(env, "PoolResized", message)

    async def _write_state(self, run: MemberReconcile) -> None:
        """Write the autoscaler's state, and record its decision as an event."""
        pool, state = run.pool, run.state
        if pool is None or run.problem is not None or not (run.is_scaled or run.refusal):
            return
        if run.action is not ScalingAction.HOLD or (run.refusal and run.rendered is not None):
            record = self._recorder.warning if run.refusal else self._recorder.normal
            record(pool, "ScaleUpRefused" if run.refusal else run.action.value, state.message)
        if run.action is ScalingAction.HOLD and not state.message and run.decision is not None:
            state = structs.replace(state, message=run.decision.sentence)
        state = structs.replace(state, observed_generation=pool.metadata.generation)
        run.state = state
        if not is_worth_writing(pool.status.autoscaling, state):
            return

        def change(found: SandboxPool) -> SandboxPool | None:
            return structs.replace(found, status=structs.replace(found.status, autoscaling=state))

        run.pool = await self._provider.write.mutate(
            SandboxPool, pool.key, change, uid=pool.metadata.uid, is_status=True
        )

    async def _delete_obsolete(self, env: SandboxEnv, runs: list[MemberReconcile]) -> None:
        wanted = {run.key for run in runs}
        for pool in self._provider.children(SandboxPool, env):
            if pool.key in wanted or pool.is_deleting:
                continue
            size = size_of(pool)
            request = PoolRequest(pool=pool, current=pool, replicas=size)
            verdict = await self._gate.deletion(request)
            if not verdict.allows(size):
                message = (
                    f"pool {pool.key.name} was not deleted: {verdict.message or verdict.reason}"
                )
                self._recorder.warning(env, "DeletionRefused", message)
                continue
            await self._provider.write.delete(pool)
            self.claim_rate.forget(pool.key)
            self._recorder.normal(env, "PoolDeleted", f"pool {pool.key.name} is no longer wanted")

    # ---- status -------------------------------------------------------------------------

    async def _report(
        self,
        env: SandboxEnv,
        runs: list[MemberReconcile],
        waiting: WaitingClaims,
        template_problem: MemberProblem | None,
    ) -> Result:
        now = self._clock.now()
        new = statuses.aggregate(
            env,
            runs,
            cluster=self._cluster,
            waiting=waiting.total,
            template_problem=template_problem,
            now=now,
        )
        again = self._period(runs)
        if new == env.status:
            return RequeueAfter(again)
        since = self._clock.monotonic() - self._written_at.get(env.key, float("-inf"))
        if since < STATUS_SECONDS and statuses.only_counts_changed(env.status, new):
            return RequeueAfter(min(again, STATUS_SECONDS - since))
        await self._write_status(env, new)
        self._written_at[env.key] = self._clock.monotonic()
        return RequeueAfter(again)

    async def _write_status(self, env: SandboxEnv, new: SandboxEnvStatus) -> None:
        def change(found: SandboxEnv) -> SandboxEnv | None:
            # Another cluster may have written its segment: replace only ours.
            ours = [item for item in new.clusters if item.cluster_id == self._cluster]
            rest = [item for item in found.status.clusters if item.cluster_id != self._cluster]
            clusters = tuple(sorted((*rest, *ours), key=lambda item: item.cluster_id))
            status = structs.replace(new, clusters=clusters, queues=found.status.queues)
            return structs.replace(found, status=status)

        await self._provider.write.mutate(
            SandboxEnv, env.key, change, uid=env.metadata.uid, is_status=True
        )

    def _period(self, runs: list[MemberReconcile]) -> float:
        """Return the seconds until the next reconcile: soon during a drain."""
        usual = PERIOD_SECONDS * self._random.uniform(1 - JITTER, 1 + JITTER)
        now = self._clock.now()
        for run in runs:
            if (since := run.state.drain_since) is not None:
                left = PROTECTION_SECONDS - (now - since).total_seconds()
                usual = min(usual, max(left, 0.05))
        return usual


def _is_of(pool: SandboxPool, env: SandboxEnv) -> bool:
    owner = controller_of(pool)
    return owner is not None and owner.uid == env.metadata.uid
