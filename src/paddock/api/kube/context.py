"""Shared by all handlers of the declarative API: context, calls, responses."""

from typing import Any

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from paddock.api.admission_webhook import Check
from paddock.api.kube.scheme import ResourceTarget
from paddock.api.kube.settings import KubeApiSettings
from paddock.kit.clock import Clock
from paddock.kit.errors import FieldProblem
from paddock.resources.meta import Resource
from paddock.store.port import Store

_encoder = msgspec.json.Encoder()


class KubeContext(Struct, frozen=True):
    """Dependencies of the handlers."""

    store: Store
    settings: KubeApiSettings
    clock: Clock
    checks: tuple[Check, ...] = ()
    """Further checks of new and changed objects, for example of what the runtime supports."""


class KubeCall(Struct, frozen=True):
    """One request and its target."""

    context: KubeContext
    request: Request
    target: ResourceTarget

    @property
    def store(self) -> Store:
        """The store of the resources."""
        return self.context.store

    def check(self, old: Resource | None, new: Resource) -> None:
        """Raise if a further check refuses the object; one that is being deleted may change."""
        if self.target.subresource or (old is not None and old.is_deleting):
            return
        for check in self.context.checks:
            check(old, new)


def json_response(
    document: Any,
    status_code: int = 200,
    *,
    media_type: str = "application/json",
    headers: dict[str, str] | None = None,
) -> Response:
    """Return a JSON response."""
    return Response(
        _encoder.encode(document), status_code=status_code, media_type=media_type, headers=headers
    )


def warnings_header(problems: list[FieldProblem]) -> dict[str, str]:
    """Return a Warning header for dropped fields; kubectl prints it."""
    if not problems:
        return {}
    texts = [f'299 - "unknown field \\"{_quotable(problem.path)}\\""' for problem in problems]
    return {"Warning": ", ".join(texts)}


def _quotable(text: str) -> str:
    return "".join(c if c.isascii() and c.isprintable() and c not in '"\\' else "?" for c in text)
