"""Decides the next step for one build. Pure.

The steps of a build run in a task of their own (`run.py`), as they may take hours. A reconcile
starts it, cancels it, and cleans up.
"""

from datetime import datetime, timedelta

from paddock.controllers.steps import AddFinalizer, Fail, Step, Wait
from paddock.resources.kinds.template_build import FINALIZER_BUILD, BuildPhase, TemplateBuild

REGISTERED_FOR = timedelta(days=1)
"""A build that is not started within this time fails."""
DEFAULT_CONCURRENCY = 4


class Begin(Step, frozen=True):
    """Record that the build begins, then run it."""


class Run(Step, frozen=True):
    """Make sure that the task of the build runs."""


class CleanUp(Step, frozen=True):
    """End the task and delete what the build has outside of its layers; remove the finalizer."""


class Settle(Step, frozen=True):
    """The build has ended: delete its sandboxes."""


def plan(build: TemplateBuild, *, running: int, limit: int, now: datetime) -> Step:
    """Return the next step. `running` builds of the same team have begun, of at most `limit`."""
    held = FINALIZER_BUILD in build.metadata.finalizers
    if build.is_deleting:
        return CleanUp() if held else Wait(None)
    if build.has_ended:
        return Settle()
    if not held:
        return AddFinalizer()
    if build.spec.canceled:
        return Fail(build.spec.canceled, "Canceled")
    if build.status.phase is BuildPhase.BUILDING:
        return Run()
    if not build.spec.started:
        return _until_started(build, now)
    if bool(build.spec.from_image) == bool(build.spec.from_template):
        return Fail("exactly one of fromImage and fromTemplate is required", "Invalid")
    if running >= limit:
        return Wait(None, f"{running} builds of the team are running")
    return Begin()


def _until_started(build: TemplateBuild, now: datetime) -> Step:
    end = (build.metadata.creation_timestamp or now) + REGISTERED_FOR
    if end <= now:
        return Fail("the build was not started within a day", "NotStarted")
    return Wait(end, "the steps were not submitted yet")
