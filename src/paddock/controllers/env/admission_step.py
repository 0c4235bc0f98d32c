"""Admits the sizes of rendered pools: requests admission where a pool would change.

Nothing is written here. A refusal is kept in the run's state, so that a pool which may not grow is
not retried before its saturation cooldown has ended.
"""

from collections.abc import Mapping
from datetime import datetime, timedelta

from msgspec import structs

from paddock.controllers.admission.gate import AdmissionGate, AdmissionOutcome, AdmissionVerdict
from paddock.controllers.admission.plugin import PoolRequest
from paddock.controllers.env.autoscale import ScalingAction
from paddock.controllers.env.member_reconcile import MemberProblem, MemberReconcile
from paddock.controllers.env.render import drift, render, resized, size_of
from paddock.kit.errors import InvalidError, NotFoundError
from paddock.resources.kinds.env import SandboxEnv, ScalingGroup
from paddock.resources.kinds.pool import SandboxPool
from paddock.resources.kinds.template import Resources, SandboxTemplateSpec

_DEFAULTS = ScalingGroup()


class AdmissionStep:
    """Determines the admitted size of each member."""

    def __init__(self, gate: AdmissionGate, instance_types: Mapping[str, Resources]) -> None:
        self._gate = gate
        self._shapes = instance_types

    def render(
        self, env: SandboxEnv, run: MemberReconcile, template: SandboxTemplateSpec | None
    ) -> None:
        """Render a member's pool, or record its problem, before anything is decided.

        Once per reconcile: an environment that changes in the meantime is reconciled again.
        """
        if run.problem is not None:
            return
        try:
            run.draft = render(
                env, run.name, run.member, template, size=run.size, instance_types=self._shapes
            )
        except InvalidError as error:
            run.problem = MemberProblem("MemberInvalid", error.advice)
        except NotFoundError as error:
            run.problem = MemberProblem("TemplateNotFound", error.message)

    def prepare(self, run: MemberReconcile, now: datetime) -> SandboxPool | None:
        """Return the pool to request admission for; `None` if nothing changes."""
        run.granted = run.size
        if run.draft is None:
            return None
        wanted = self._size_to_request(run, now)
        rendered = resized(run.draft, wanted)
        if run.pool is not None and drift(run.pool, rendered) is None:
            run.granted = wanted
            return None
        return rendered

    async def admit(self, run: MemberReconcile, rendered: SandboxPool, now: datetime) -> None:
        """Request admission; set the granted size and the rendered pool."""
        wanted = size_of(rendered)
        request = PoolRequest(pool=rendered, current=run.pool, replicas=wanted)
        verdict = await self._gate.size(request)
        if verdict.outcome is AdmissionOutcome.FAILED and not self._only_shrinks(
            run, rendered, wanted
        ):
            self._refused(run, wanted, verdict, now)
            return
        run.granted = _granted(run, rendered, wanted, verdict)
        run.rendered = resized(rendered, run.granted)
        if run.granted < wanted:
            self._refused(run, wanted, verdict, now)
        elif wanted > run.size:
            run.state = structs.replace(
                run.state,
                last_attempt_time=now,
                last_attempt_result=AdmissionOutcome.ENOUGH.value,
                saturated_until=None,
            )

    @staticmethod
    def _size_to_request(run: MemberReconcile, now: datetime) -> int:
        """Return the size to request: the current one while growth is in cooldown."""
        until = run.state.saturated_until
        if run.pool is not None and until is not None and until > now and run.wanted > run.size:
            why = run.state.message or "growth was refused recently"
            failed = run.state.last_attempt_result == AdmissionOutcome.FAILED
            run.refusal = MemberProblem("PluginFailed" if failed else "Saturated", why)
            return run.size
        return run.wanted

    @staticmethod
    def _only_shrinks(run: MemberReconcile, rendered: SandboxPool, wanted: int) -> bool:
        found = drift(run.pool, rendered) if run.pool is not None else None
        return found is not None and found.parts == ("replicas",) and wanted < run.size

    @staticmethod
    def _refused(
        run: MemberReconcile, wanted: int, verdict: AdmissionVerdict, now: datetime
    ) -> None:
        """Record a full or partial refusal."""
        run.refusal = MemberProblem(verdict.reason or verdict.outcome, verdict.message)
        outcome = verdict.outcome
        if outcome is not AdmissionOutcome.FAILED:
            is_part = run.granted > run.size
            outcome = AdmissionOutcome.JUST_RIGHT if is_part else AdmissionOutcome.INSUFFICIENT
        cooldown = float((run.group or _DEFAULTS).saturation_cooldown_seconds)
        wait = max(cooldown, verdict.retry_after_seconds or 0.0)
        before = run.pool.status.autoscaling if run.pool is not None else None
        state = structs.replace(
            run.state,
            last_attempt_time=now,
            last_attempt_result=outcome.value,
            saturated_until=now + timedelta(seconds=wait),
            message=f"requested {wanted}, admitted {run.granted}: {verdict.message}",
        )
        if run.action is ScalingAction.GROW and run.granted <= run.size:
            # It did not grow, so no cooldown starts.
            last = before.last_scale_up_time if before is not None else None
            state = structs.replace(state, last_scale_up_time=last)
        run.state = state


def _granted(
    run: MemberReconcile, rendered: SandboxPool, wanted: int, verdict: AdmissionVerdict
) -> int:
    if verdict.outcome in (AdmissionOutcome.ENOUGH, AdmissionOutcome.FAILED):
        return wanted
    admitted = min(verdict.admitted, wanted)
    if run.pool is not None and run.pool.spec.template == rendered.spec.template:
        # A lowered quota refuses growth; it does not shrink what exists.
        return max(admitted, min(run.size, wanted))
    return max(admitted, min(run.running, wanted))
