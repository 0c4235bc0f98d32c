"""Shared by all handlers of the declarative API: context, calls, responses."""

from typing import Any

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from paddock.api.admission_webhook import Check
from paddock.api.audit.notes import CALLER
from paddock.api.kube import key_access
from paddock.api.kube.scheme import ResourceTarget
from paddock.api.kube.settings import KubeApiSettings
from paddock.claims.caller import Caller
from paddock.kit.clock import Clock
from paddock.kit.errors import FieldProblem, ForbiddenError
from paddock.resources.meta import Key, Resource
from paddock.resources.rights import AccessRequest
from paddock.resources.selectors import FieldTerm
from paddock.store import selection, semantics
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

    @property
    def caller(self) -> Caller:
        """The authenticated caller."""
        return self.request.scope[CALLER]

    def authorize(self, verb: str) -> None:
        """Raise `ForbiddenError` unless the caller may do this to the target."""
        target = self.target
        plural = target.info.cls.PLURAL
        access = AccessRequest(
            verb=verb,
            resource=f"{plural}/{target.subresource}" if target.subresource else plural,
            namespace=target.namespace or "",
            name=target.name,
        )
        decision = key_access.decide(self.caller, access)
        if not decision.is_allowed:
            raise ForbiddenError(decision.reason, hint="`kubectl auth can-i --list` shows rights")

    @property
    def owner_term(self) -> FieldTerm | None:
        """Selects the objects that the caller may see. None: all."""
        target = self.target
        return key_access.owner_term(self.caller, target.info.cls.PLURAL, target.namespace)

    async def read(self, key: Key) -> Resource:
        """Return an object from the store; `NotFoundError` if the caller may not see it."""
        obj = await self.store.get(self.target.info.cls, key)
        term = self.owner_term
        if term is not None and selection.field_text(obj, term.path) != term.value:
            return semantics.found(self.target.info.cls, key, None)
        return obj

    def shown(self, obj: Resource) -> Resource:
        """Return an object as the caller may see it."""
        if key_access.hides_variables(self.caller):
            return key_access.without_variables(obj)
        return obj

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
