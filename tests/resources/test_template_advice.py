"""What a caller is told whose template does not exist or is not ready."""

import pytest
from msgspec import structs

from paddock.resources.kinds.template_build import (
    BuildPhase,
    BuildStep,
    TemplateBuild,
    TemplateBuildSpec,
    TemplateBuildStatus,
)
from paddock.resources.meta import ObjectMeta
from paddock.resources.template_advice import is_interpreter, next_step

INSTALL = "paddock template install code-interpreter"


def build(phase: BuildPhase, *, step: int = 0, started: bool = True) -> TemplateBuild:
    return TemplateBuild(
        metadata=ObjectMeta(name="b", namespace="default"),
        spec=TemplateBuildSpec(
            template_name="web", started=started, steps=(BuildStep(type="RUN"),) * 3
        ),
        status=TemplateBuildStatus(phase=phase, step=step),
    )


@pytest.mark.parametrize(
    ("reference", "expected"),
    [
        ("code-interpreter-v1", True),
        ("code-interpreter", True),
        ("default/code-interpreter-v1", True),
        ("Code-Interpreter-V1:default", True),
        ("code-interpreter-v1:old", False),
        ("code-interpreter-v2", False),
        ("not a name", False),
    ],
)
def test_the_names_of_the_code_interpreter_are_known(reference: str, expected: bool) -> None:
    assert is_interpreter(reference) is expected


def test_a_missing_code_interpreter_is_installed_by_one_command() -> None:
    for reference in ("code-interpreter-v1", "code-interpreter"):
        assert INSTALL in next_step(reference, ["base"])
        assert "templates that exist: base" in next_step(reference, ["base"])


def test_other_templates_are_built_or_declared() -> None:
    advice = next_step("web", [])
    assert "paddock template build" in advice
    assert INSTALL not in advice


def test_a_build_that_runs_is_worth_waiting_for() -> None:
    advice = next_step("web", ["base"], build(BuildPhase.BUILDING, step=2))
    assert "being built (2 of 3 steps are done)" in advice
    assert "paddock template logs web --follow" in advice


def test_a_failed_build_has_a_log_and_can_be_repeated() -> None:
    failed = build(BuildPhase.FAILED)
    assert "paddock template logs web" in next_step("web", [], failed)
    named = structs.replace(failed.spec, template_name="code-interpreter-v1")
    advice = next_step("code-interpreter-v1", [], structs.replace(failed, spec=named))
    assert f"`{INSTALL}` tries again" in advice


def test_a_build_that_was_only_requested_is_no_reason_to_wait() -> None:
    waiting = build(BuildPhase.WAITING, started=False)
    assert "being built" not in next_step("web", [], waiting)
