"""From what is wanted to what is admitted: sizes rendered pools, asks admission where they differ.

Nothing is written here. A refusal is remembered in the case's state, so that a pool which may not
grow is left in peace until its saturation time is over.
"""

from collections.abc import Mapping
from datetime import datetime, timedelta

from msgspec import structs

from paddock.controllers.admission.gate import AdmissionGate, Outcome, Verdict
from paddock.controllers.admission.plugin import PoolRequest
from paddock.controllers.env.autoscale import Action
from paddock.controllers.env.member_state import Case, Problem
from paddock.controllers.env.render import drift, render, resized, size_of
from paddock.kit.errors import InvalidError, NotFoundError
from paddock.resources.kinds.env import SandboxEnv, ScalingGroup
from paddock.resources.kinds.pool import SandboxPool
from paddock.resources.kinds.template import Resources, SandboxTemplateSpec

_DEFAULTS = ScalingGroup()


class Sizer:
    """Finds out how large each member may be."""

    def __init__(self, gate: AdmissionGate, shapes: Mapping[str, Resources]) -> None:
        self._gate = gate
        self._shapes = shapes

    def render(self, env: SandboxEnv, case: Case, template: SandboxTemplateSpec | None) -> None:
        """Find out what a member makes, or what is wrong with it, before anything is expected.

        Once in a reconcile: an environment that is changed meanwhile has its turn in the next.
        """
        if case.problem is not None:
            return
        try:
            case.draft = render(
                env, case.name, case.member, template, size=case.size, shapes=self._shapes
            )
        except InvalidError as error:
            case.problem = Problem("MemberInvalid", error.message)
        except NotFoundError as error:
            case.problem = Problem("TemplateNotFound", error.message)

    def prepare(self, case: Case, now: datetime) -> SandboxPool | None:
        """Give the pool that admission is to be asked about; `None` where nothing changes."""
        case.granted = case.size
        if case.draft is None:
            return None
        wanted = self._patient(case, now)
        rendered = resized(case.draft, wanted)
        if case.pool is not None and drift(case.pool, rendered) is None:
            case.granted = wanted
            return None
        return rendered

    async def ask(self, case: Case, rendered: SandboxPool, now: datetime) -> None:
        """Fill in what is granted and what the pool should be."""
        wanted = size_of(rendered)
        request = PoolRequest(pool=rendered, current=case.pool, replicas=wanted)
        verdict = await self._gate.size(request)
        if verdict.outcome is Outcome.FAILED and not self._only_shrinks(case, rendered, wanted):
            self._refused(case, wanted, verdict, now)
            return
        case.granted = _granted(case, rendered, wanted, verdict)
        case.rendered = resized(rendered, case.granted)
        if case.granted < wanted:
            self._refused(case, wanted, verdict, now)
        elif wanted > case.size:
            case.state = structs.replace(
                case.state,
                last_attempt_time=now,
                last_attempt_result=Outcome.ENOUGH.value,
                saturated_until=None,
            )

    @staticmethod
    def _patient(case: Case, now: datetime) -> int:
        """Give the size to ask for: not more than there is while growing has just been refused."""
        until = case.state.saturated_until
        if case.pool is not None and until is not None and until > now and case.wanted > case.size:
            why = case.state.message or "growing was refused a while ago"
            failed = case.state.last_attempt_result == Outcome.FAILED
            case.refusal = Problem("PluginFailed" if failed else "Saturated", why)
            return case.size
        return case.wanted

    @staticmethod
    def _only_shrinks(case: Case, rendered: SandboxPool, wanted: int) -> bool:
        found = drift(case.pool, rendered) if case.pool is not None else None
        return found is not None and found.parts == ("replicas",) and wanted < case.size

    @staticmethod
    def _refused(case: Case, wanted: int, verdict: Verdict, now: datetime) -> None:
        """Remember a refusal, whole or in part, and say so instead of what was decided."""
        case.refusal = Problem(verdict.reason or verdict.outcome, verdict.message)
        outcome = verdict.outcome
        if outcome is not Outcome.FAILED:
            is_part = case.granted > case.size
            outcome = Outcome.JUST_RIGHT if is_part else Outcome.INSUFFICIENT
        cooldown = float((case.group or _DEFAULTS).saturation_cooldown_seconds)
        wait = max(cooldown, verdict.retry_after_seconds or 0.0)
        before = case.pool.status.autoscaling if case.pool is not None else None
        state = structs.replace(
            case.state,
            last_attempt_time=now,
            last_attempt_result=outcome.value,
            saturated_until=now + timedelta(seconds=wait),
            message=f"asked for {wanted}, got {case.granted}: {verdict.message}",
        )
        if case.action is Action.GROW and case.granted <= case.size:
            # It did not grow after all, so nothing has to cool down.
            last = before.last_scale_up_time if before is not None else None
            state = structs.replace(state, last_scale_up_time=last)
        case.state = state


def _granted(case: Case, rendered: SandboxPool, wanted: int, verdict: Verdict) -> int:
    if verdict.outcome in (Outcome.ENOUGH, Outcome.FAILED):
        return wanted
    admitted = min(verdict.admitted, wanted)
    if case.pool is not None and case.pool.spec.template == rendered.spec.template:
        # What is there stays there: a quota that was lowered refuses growth, it takes nothing.
        return max(admitted, min(case.size, wanted))
    return max(admitted, min(case.running, wanted))
