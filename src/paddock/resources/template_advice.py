"""The next step of a caller whose template does not exist or has not been built yet. Pure."""

from collections.abc import Sequence

from paddock.resources.kinds.template_build import BuildPhase, TemplateBuild
from paddock.resources.template_references import DEFAULT_TAG, parse_reference

CODE_INTERPRETER = "code-interpreter-v1"
"""The template that E2B's code interpreter SDK requests by default."""
INTERPRETER_NAMES = frozenset({CODE_INTERPRETER, "code-interpreter"})
_INSTALL = "`paddock template install code-interpreter`"
_MAX_NAMES = 8


def is_interpreter(reference: str) -> bool:
    """Whether a reference means the template of the code interpreter, which Paddock can install."""
    wanted = parse_reference(reference)
    return wanted is not None and wanted.name in INTERPRETER_NAMES and wanted.tag == DEFAULT_TAG


def next_step(reference: str, names: Sequence[str], build: TemplateBuild | None = None) -> str:
    """Return the hint for a template that nothing can start from.

    `names` are the templates that the caller can use, `build` is the newest build of this one.
    """
    if build is not None and (step := _of_build(reference, build)):
        return step
    if is_interpreter(reference):
        purpose = (
            f"run_code() needs the code interpreter, which is not installed: an operator runs "
            f"{_INSTALL} once, for all teams"
        )
    else:
        purpose = (
            "build it with Template.build() of the SDK or 'paddock template build NAME DIRECTORY', "
            "or apply a SandboxTemplate with 'paddock apply -f'"
        )
    if not names:
        return purpose
    shown = ", ".join(names[:_MAX_NAMES]) + (", …" if len(names) > _MAX_NAMES else "")
    return f"{purpose}; templates that exist: {shown}"


def _of_build(reference: str, build: TemplateBuild) -> str:
    """Return what to do about a build that is not ready; nothing for one that is."""
    name, status = build.spec.template_name, build.status
    if status.phase is BuildPhase.FAILED:
        again = f"{_INSTALL} tries again" if is_interpreter(reference) else "build it again"
        return f"its last build failed: `paddock template logs {name}` shows why; {again}"
    if status.phase is BuildPhase.READY or not build.spec.started:
        return ""
    done = f" ({status.step} of {len(build.spec.steps)} steps are done)" if build.spec.steps else ""
    return f"it is being built{done}: wait until `paddock template logs {name} --follow` ends"
