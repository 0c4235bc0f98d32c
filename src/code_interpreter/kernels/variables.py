"""Which variables of the environment a context sets before a run, and resets after it. Pure."""

from collections.abc import Mapping

from code_interpreter.kernels.literals import Variables


def before_run(
    known: Mapping[str, str], sandbox: Mapping[str, str] | None, request: Mapping[str, str]
) -> Variables:
    """Return what to set before a run.

    `known` are the sandbox's variables that the context has; `sandbox` are the present ones, or
    None if they are not new; `request` are those of this run.
    """
    changed: dict[str, str | None] = {}
    if sandbox is not None:
        changed.update({name: None for name in known if name not in sandbox})
        changed.update({n: value for n, value in sandbox.items() if known.get(n) != value})
    changed.update(request)
    return changed


def after_run(
    initial: Mapping[str, str], sandbox: Mapping[str, str], request: Mapping[str, str]
) -> Variables:
    """Return what to set after a run: each variable of it gets its usual value, or is removed.

    `initial` are the variables with which kernels start.
    """
    usual = {**initial, **sandbox}
    return {name: usual.get(name) for name in request}


def problem(variables: Mapping[str, str]) -> str | None:
    """Return why variables cannot be set, or None."""
    for name, value in variables.items():
        if not name or "=" in name or "\0" in name:
            return f"{name!r} cannot be the name of an environment variable"
        if "\0" in value:
            return f"the environment variable {name} contains a NUL character"
        if not _is_unicode(name + value):
            return f"the environment variable {name!r} is not valid Unicode"
    return None


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
