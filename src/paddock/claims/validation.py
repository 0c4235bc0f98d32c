"""Checks of a request for a sandbox that need no lookup. Pure."""

from paddock.claims.requests import NewSandbox
from paddock.kit.errors import FieldProblem, InvalidError

MAX_METADATA_BYTES = 16 * 1024
MAX_ENV_BYTES = 128 * 1024


MAX_TIMEOUT_SECONDS = 30 * 24 * 3600
"""Default of the longest timeout. Only an installation that sets less refuses sandboxes without a
timeout."""


def check_request(request: NewSandbox, *, max_timeout_seconds: int) -> None:
    """Raise `InvalidError` for a timeout, metadata or variables that are out of bounds."""
    seconds = request.timeout_seconds
    if seconds is None and max_timeout_seconds < MAX_TIMEOUT_SECONDS:
        problem = FieldProblem(
            "metadata[never-timeout]",
            f"sandboxes need a timeout here, of at most {max_timeout_seconds} seconds",
        )
        raise InvalidError(str(problem), problems=[problem])
    if seconds is not None and not 0 < seconds <= max_timeout_seconds:
        problem = FieldProblem("timeout", f"between 1 and {max_timeout_seconds} seconds")
        raise InvalidError(str(problem), problems=[problem])
    for path, limit, given in (
        ("metadata", MAX_METADATA_BYTES, request.metadata),
        ("envVars", MAX_ENV_BYTES, request.env_vars),
    ):
        size = sum(len(key) + len(value) for key, value in given.items())
        if size > limit:
            problem = FieldProblem(path, f"{size} characters; at most {limit} are kept")
            raise InvalidError(str(problem), problems=[problem])
    for name, value in request.env_vars.items():
        if not name or "=" in name or "\0" in name + value:
            what = "a value cannot hold NUL" if "\0" in value else "not a name for a variable"
            problem = FieldProblem(f"envVars[{name!r}]", what)
            raise InvalidError(str(problem), problems=[problem])
