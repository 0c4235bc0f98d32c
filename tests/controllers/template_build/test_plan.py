"""What the controller does next with a build."""

from datetime import UTC, datetime, timedelta

import pytest
from msgspec import structs

from paddock.controllers.steps import AddFinalizer, Fail, Step, Wait
from paddock.controllers.template_build.plan import (
    REGISTERED_FOR,
    Begin,
    CleanUp,
    Run,
    Settle,
    plan,
)
from paddock.resources.kinds.template_build import (
    FINALIZER_BUILD,
    BuildPhase,
    TemplateBuild,
    TemplateBuildSpec,
    TemplateBuildStatus,
)
from paddock.resources.meta import ObjectMeta

NOW = datetime(2030, 1, 1, tzinfo=UTC)


def build(phase: BuildPhase = BuildPhase.WAITING, **spec: object) -> TemplateBuild:
    wanted = TemplateBuildSpec(template_name="t", started=True, from_image="base")
    return TemplateBuild(
        metadata=ObjectMeta(name="b", creation_timestamp=NOW, finalizers=(FINALIZER_BUILD,)),
        spec=structs.replace(wanted, **spec),
        status=TemplateBuildStatus(phase=phase),
    )


def step(wanted: TemplateBuild, *, running: int = 0, after: timedelta = timedelta()) -> Step:
    return plan(wanted, running=running, limit=2, now=NOW + after)


def test_a_build_that_was_submitted_begins() -> None:
    assert step(build()) == Begin()


def test_a_build_waits_until_its_steps_are_submitted() -> None:
    assert step(build(started=False)) == Wait(
        NOW + REGISTERED_FOR, "the steps were not submitted yet"
    )


def test_a_build_whose_steps_never_come_fails_after_a_day() -> None:
    found = step(build(started=False), after=REGISTERED_FOR)
    assert isinstance(found, Fail)
    assert "within a day" in found.message


def test_a_build_waits_for_other_builds_of_its_team() -> None:
    assert step(build(), running=1) == Begin()
    assert step(build(), running=2) == Wait(None, "2 builds of the team are running")


def test_a_build_that_has_begun_continues_whatever_else_runs() -> None:
    assert step(build(BuildPhase.BUILDING), running=9) == Run()


@pytest.mark.parametrize("phase", [BuildPhase.WAITING, BuildPhase.BUILDING])
def test_a_canceled_build_fails_with_the_reason(phase: BuildPhase) -> None:
    assert step(build(phase, canceled="stopped by a test")) == Fail("stopped by a test", "Canceled")


@pytest.mark.parametrize("phase", [BuildPhase.READY, BuildPhase.FAILED])
def test_a_build_that_ended_stays_as_it_is(phase: BuildPhase) -> None:
    assert step(build(phase, canceled="too late")) == Settle()


@pytest.mark.parametrize("sources", [{"from_image": ""}, {"from_template": "x"}])
def test_a_build_has_exactly_one_base(sources: dict[str, str]) -> None:
    found = step(build(BuildPhase.WAITING, **sources))
    assert isinstance(found, Fail)
    assert "exactly one of" in found.message


def test_nothing_happens_before_the_finalizer_is_set() -> None:
    bare = build()
    bare = structs.replace(bare, metadata=structs.replace(bare.metadata, finalizers=()))
    assert step(bare) == AddFinalizer()


def test_a_deleted_build_is_cleaned_up() -> None:
    gone = build(BuildPhase.BUILDING)
    metadata = structs.replace(gone.metadata, deletion_timestamp=NOW)
    assert step(structs.replace(gone, metadata=metadata)) == CleanUp()
