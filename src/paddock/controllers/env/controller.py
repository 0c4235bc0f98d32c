"""Performs what `render`, `autoscale` and admission decide for one environment.

The order of writes is what makes a crash harmless: admission, then what the autoscaler must
remember (so that nothing is done twice within a cooldown), then the member's size in the
environment, then the pool. Whatever was written is found again, and the rest follows. Only this
cluster's segment is read or written.
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
from paddock.controllers.env.admission_step import Sizer
from paddock.controllers.env.autoscale import PROTECTION_SECONDS, Action
from paddock.controllers.env.autoscale_step import Demand, NoDemand, Scaler, heard
from paddock.controllers.env.claim_rate import ClaimMeter, is_worth_writing
from paddock.controllers.env.instance_types import SHAPES
from paddock.controllers.env.member_state import Case, Problem
from paddock.controllers.env.render import drift, pool_name, size_of
from paddock.controllers.pool.controller import Supply, no_supply
from paddock.controllers.sandbox.templates import resolve
from paddock.engine.controller import After, Done, Result
from paddock.engine.recorder import Recorder
from paddock.kit.clock import Clock
from paddock.kit.errors import AlreadyExistsError, FieldProblem, InvalidError, NotFoundError
from paddock.resources.kinds.env import EnvCluster, ObservedQueue, SandboxEnv, SandboxEnvStatus
from paddock.resources.kinds.pool import SandboxPool
from paddock.resources.kinds.template import Resources, SandboxTemplate, SandboxTemplateSpec
from paddock.resources.meta import Key, controller_of

PERIOD_SECONDS = 10.0
JITTER = 0.2
STATUS_SECONDS = 1.0
"""Numbers in the status are written at most this often; what matters is written at once."""


class EnvController:
    """Keeps each environment's pools of this cluster as its spec and its demand ask."""

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
        demand: Demand | None = None,
        supply: Supply = no_supply,
        shapes: Mapping[str, Resources] = SHAPES,
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
        self._demand = demand or NoDemand()
        self._random = random.Random()  # noqa: S311 - spreads load, guards nothing
        self.meter = ClaimMeter()
        """To be subscribed to the Sandbox informer."""
        self._scaler = Scaler(pool_members, self.meter, supply)
        self._sizer = Sizer(gate, shapes)
        self._admitting = asyncio.Lock()
        self._written_at: dict[Key, float] = {}

    async def reconcile(self, key: Key) -> Result:
        """Bring one environment a step nearer to what is wanted."""
        env = self._provider.get(SandboxEnv, key)
        if env is None or env.is_deleting:
            self._env_snapshots.drop(key)
            self._written_at.pop(key, None)
            return Done()
        now = self._clock.now()
        template, template_problem = self._template(env)
        cases = self._cases(env)
        waiting = heard(self._demand.waiting(key), env, now)
        for case in cases:
            self._sizer.render(env, case, template)
            self._scaler.look(case, now)
        self._scaler.decide(cases, waiting, now)
        for case in cases:
            rendered = self._sizer.prepare(case, now)
            if rendered is None:
                await self._write_state(case)
                env = await self._write_size(env, case)
                continue
            # One at a time, over all environments: what one is granted counts against the next.
            async with self._admitting:
                await self._sizer.ask(case, rendered, now)
                await self._write_state(case)
                env = await self._write_size(env, case)
                await self._write_pool(env, case)
        await self._delete_obsolete(env, cases)
        self._env_snapshots.put(statuses.snapshot(env, cases, cluster=self._cluster, now=now))
        return await self._report(env, cases, waiting, template_problem)

    # ---- looking -------------------------------------------------------------------------

    def _template(self, env: SandboxEnv) -> tuple[SandboxTemplateSpec | None, Problem | None]:
        try:
            templates = self._provider.informer(SandboxTemplate)
            return resolve(templates, env.spec.template_ref, env.metadata.namespace), None
        except NotFoundError as error:
            return None, Problem("TemplateNotFound", error.message)

    def _cases(self, env: SandboxEnv) -> list[Case]:
        segment = env.spec.clusters.get(self._cluster) or EnvCluster()
        cases: list[Case] = []
        taken: dict[Key, str] = {}
        for name, member in sorted(segment.members.items()):
            key = Key(env.metadata.namespace, pool_name(env.metadata.name, name))
            pool = self._provider.get(SandboxPool, key)
            case = Case(name=name, member=member, key=key)
            case.group = env.spec.autoscaling.groups.get(member.config.scaling_group)
            if key in taken:
                words = f"its pool would have the name of {taken[key]}'s, {key.name}"
                case.problem = Problem("NameCollision", words)
            elif pool is not None and not _is_of(pool, env):
                words = f"there is a pool {key.name} that is not this environment's"
                case.problem = Problem("NameCollision", words)
            elif pool is not None and not pool.is_deleting:
                case.pool = pool
            taken.setdefault(key, name)
            cases.append(case)
        return cases

    # ---- writing -------------------------------------------------------------------------

    async def _write_size(self, env: SandboxEnv, case: Case) -> SandboxEnv:
        """Write what the autoscaler was granted into this cluster's segment, and nothing else."""
        is_ours = case.is_scaled and case.problem is None and (case.pool or case.rendered)
        if not is_ours or self._size_in(env, case.name) == case.granted:
            return env

        def change(found: SandboxEnv) -> SandboxEnv | None:
            segment = found.spec.clusters.get(self._cluster)
            if segment is None or case.name not in segment.members:
                return None
            member = structs.replace(segment.members[case.name], replicas=case.granted)
            new = structs.replace(segment, members={**segment.members, case.name: member})
            clusters = {**found.spec.clusters, self._cluster: new}
            return structs.replace(found, spec=structs.replace(found.spec, clusters=clusters))

        return await self._provider.write.mutate(SandboxEnv, env.key, change, uid=env.metadata.uid)

    def _size_in(self, env: SandboxEnv, name: str) -> int | None:
        segment = env.spec.clusters.get(self._cluster)
        member = segment.members.get(name) if segment is not None else None
        return member.replicas if member is not None else None

    async def _write_pool(self, env: SandboxEnv, case: Case) -> None:
        wanted = case.rendered
        if wanted is None:
            return
        if case.pool is None:
            try:
                case.pool = await self._provider.write.create(wanted)
            except AlreadyExistsError:
                case.problem = Problem("NameCollision", f"a pool {case.key.name} came up meanwhile")
                return
            except InvalidError as error:
                case.problem = Problem("MemberInvalid", error.message)
                return
            words = f"made pool {case.key.name} with {case.granted} sandboxes"
            self._recorder.normal(env, "PoolCreated", words)
            await self._write_state(case)
            return
        found = drift(case.pool, wanted)
        if found is None:
            return
        before = size_of(case.pool)
        try:
            case.pool = await self._provider.write.mutate(
                SandboxPool,
                case.key,
                lambda pool: None if (new := drift(pool, wanted)) is None else new.pool,
                uid=case.pool.metadata.uid,
            )
        except InvalidError as error:
            case.problem = Problem("MemberInvalid", error.message)
            return
        others = [part for part in found.parts if part != "replicas"]
        if others:
            words = f"pool {case.key.name}: {', '.join(others)} brought back in line"
            self._recorder.normal(env, "DriftCorrected", words)
        elif not case.is_scaled:
            words = f"pool {case.key.name}: size {before} → {case.granted}"
            self._recorder.normal(env, "PoolResized", words)

    async def _write_state(self, case: Case) -> None:
        """Keep what the autoscaler must not forget, and say what was decided."""
        pool, state = case.pool, case.state
        if pool is None or case.problem is not None or not (case.is_scaled or case.refusal):
            return
        if case.action is not Action.HOLD or (case.refusal and case.rendered is not None):
            say = self._recorder.warning if case.refusal else self._recorder.normal
            say(pool, "ScaleUpRefused" if case.refusal else case.action.value, state.message)
        if case.action is Action.HOLD and not state.message and case.decision is not None:
            state = structs.replace(state, message=case.decision.sentence)
        state = structs.replace(state, observed_generation=pool.metadata.generation)
        case.state = state
        if not is_worth_writing(pool.status.autoscaling, state):
            return

        def change(found: SandboxPool) -> SandboxPool | None:
            return structs.replace(found, status=structs.replace(found.status, autoscaling=state))

        case.pool = await self._provider.write.mutate(
            SandboxPool, pool.key, change, uid=pool.metadata.uid, is_status=True
        )

    async def _delete_obsolete(self, env: SandboxEnv, cases: list[Case]) -> None:
        wanted = {case.key for case in cases}
        for pool in self._provider.children(SandboxPool, env):
            if pool.key in wanted or pool.is_deleting:
                continue
            size = size_of(pool)
            request = PoolRequest(pool=pool, current=pool, replicas=size)
            verdict = await self._gate.deletion(request)
            if not verdict.allows(size):
                words = f"pool {pool.key.name} stays: {verdict.message or verdict.reason}"
                self._recorder.warning(env, "DeletionRefused", words)
                continue
            await self._provider.write.delete(pool)
            self.meter.forget(pool.key)
            self._recorder.normal(env, "PoolDeleted", f"pool {pool.key.name} is no longer wanted")

    # ---- telling -------------------------------------------------------------------------

    async def _report(
        self,
        env: SandboxEnv,
        cases: list[Case],
        waiting: WaitingClaims,
        template_problem: Problem | None,
    ) -> Result:
        now = self._clock.now()
        new = statuses.aggregate(
            env,
            cases,
            cluster=self._cluster,
            waiting=waiting.total,
            template_problem=template_problem,
            now=now,
        )
        again = self._period(cases)
        if new == env.status:
            return After(again)
        since = self._clock.monotonic() - self._written_at.get(env.key, float("-inf"))
        if since < STATUS_SECONDS and statuses.is_only_counts(env.status, new):
            return After(min(again, STATUS_SECONDS - since))
        await self._write_status(env, new)
        self._written_at[env.key] = self._clock.monotonic()
        return After(again)

    async def _write_status(self, env: SandboxEnv, new: SandboxEnvStatus) -> None:
        def change(found: SandboxEnv) -> SandboxEnv | None:
            # Another cluster may have written its segment meanwhile: ours alone is replaced.
            ours = [item for item in new.clusters if item.cluster_id == self._cluster]
            rest = [item for item in found.status.clusters if item.cluster_id != self._cluster]
            clusters = tuple(sorted((*rest, *ours), key=lambda item: item.cluster_id))
            status = structs.replace(new, clusters=clusters, queues=found.status.queues)
            return structs.replace(found, status=status)

        await self._provider.write.mutate(
            SandboxEnv, env.key, change, uid=env.metadata.uid, is_status=True
        )

    def _period(self, cases: list[Case]) -> float:
        """Say when to look again: soon where a drain is under way, else at the usual pace."""
        usual = PERIOD_SECONDS * self._random.uniform(1 - JITTER, 1 + JITTER)
        now = self._clock.now()
        for case in cases:
            if (since := case.state.drain_since) is not None:
                left = PROTECTION_SECONDS - (now - since).total_seconds()
                usual = min(usual, max(left, 0.05))
        return usual


def _is_of(pool: SandboxPool, env: SandboxEnv) -> bool:
    owner = controller_of(pool)
    return owner is not None and owner.uid == env.metadata.uid


def changed_generation(old: SandboxEnv | None, new: SandboxEnv | None) -> tuple[Key, ...]:
    """Map a change of an environment to its key, unless only what we write ourselves changed."""
    env = new if new is not None else old
    if env is None:
        return ()
    same = (
        old is not None
        and new is not None
        and old.metadata.generation == new.metadata.generation
        and old.metadata.uid == new.metadata.uid
        and old.is_deleting == new.is_deleting
        and _waiting(old) == _waiting(new)
    )
    return () if same else (env.key,)


def _waiting(env: SandboxEnv) -> tuple[ObservedQueue, ...]:
    return tuple(structs.replace(item, time=None) for item in env.status.queues)
