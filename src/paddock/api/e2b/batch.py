"""`POST /v2/sandboxes:batch`: create many sandboxes with one call."""

import re

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from paddock.api.audit.notes import notes_of
from paddock.api.e2b.context import E2bContext, RouteAccess, json_response, read_body, route
from paddock.api.e2b.from_e2b import new_sandbox
from paddock.api.e2b.schemas import CreateBody, SandboxBody
from paddock.api.errors import status_of
from paddock.claims.caller import Caller
from paddock.claims.requests import DEFAULT_TIMEOUT_SECONDS
from paddock.kit.errors import InvalidError
from paddock.manager.sandboxes.batches import CreateResult

_IDEMPOTENCY_KEY = re.compile(r"^[a-zA-Z0-9_-]{1,240}$")


class BatchBody(CreateBody, frozen=True, kw_only=True):
    """The spec of all sandboxes, and their number."""

    count: int


class BatchError(Struct, frozen=True):
    """Why one sandbox could not be created."""

    code: int
    message: str


class BatchResult(Struct, frozen=True, omit_defaults=True):
    """One sandbox of the batch, or its error."""

    index: int
    sandbox: SandboxBody | None = None
    error: BatchError | None = None


class BatchResponse(Struct, frozen=True):
    """The results of a batch."""

    requested: int
    created: int
    results: tuple[BatchResult, ...]


async def create_batch(context: E2bContext, request: Request, caller: Caller) -> Response:
    """Create many sandboxes; each result is a sandbox or an error."""
    wanted = await read_body(request, BatchBody)
    key = request.headers.get("idempotency-key", "")
    if key and not _IDEMPOTENCY_KEY.match(key):
        message = "up to 240 letters, digits, dashes, underscores"
        raise InvalidError.at("Idempotency-Key", message)
    new = new_sandbox(wanted, default_timeout=DEFAULT_TIMEOUT_SECONDS, idempotency_key=key)
    made = await context.manager.batches.create_many(caller, new, wanted.count)
    results = tuple(_shown(context, item) for item in made)
    ids = [result.sandbox.sandbox_id for result in results if result.sandbox is not None]
    notes = notes_of(request.scope)
    notes.created, notes.requested = ids, wanted.count
    return json_response(BatchResponse(wanted.count, len(ids), results), 201)


def _shown(context: E2bContext, item: CreateResult) -> BatchResult:
    if item.sandbox is not None:
        return BatchResult(item.index, sandbox=context.renderer.created(item.sandbox))
    error = item.error
    if error is None:
        return BatchResult(
            item.index,
            error=BatchError(500, "internal error: neither a sandbox nor an error was returned"),
        )
    return BatchResult(item.index, error=BatchError(status_of(error), error.message))


ROUTES = (
    route("/v2/sandboxes:batch", "POST", create_batch, RouteAccess("create", "sandboxclaims")),
)
