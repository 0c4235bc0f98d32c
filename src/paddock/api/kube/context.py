"""Shared by all handlers of the declarative API: context, calls, responses."""

import contextlib
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from paddock.api.admission_webhook import Check
from paddock.api.audit.notes import CALLER
from paddock.api.kube import key_access
from paddock.api.kube.key_writes.writer import KeyWrites
from paddock.api.kube.scheme import ResourceTarget
from paddock.api.kube.settings import KubeApiSettings
from paddock.claims.caller import Caller
from paddock.kit.clock import Clock
from paddock.kit.errors import FieldProblem, ForbiddenError
from paddock.resources.meta import Key, Resource
from paddock.resources.rights import AccessDecision, AccessRequest
from paddock.resources.selectors import FieldTerm, Requirement
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
    key_writes: KeyWrites | None = None
    """Checks what API keys write; None: they write nothing."""

    def decide(self, caller: Caller, access: AccessRequest) -> AccessDecision:
        """Return whether the caller may do this."""
        return key_access.decide(caller, access, has_writes=self.key_writes is not None)


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
        decision = self.context.decide(self.caller, access)
        if not decision.is_allowed:
            raise ForbiddenError(decision.reason, hint="`kubectl auth can-i --list` shows rights")

    @property
    def owner_term(self) -> FieldTerm | None:
        """Selects the objects that the caller may see. None: all."""
        target = self.target
        return key_access.owner_term(self.caller, target.info.cls.PLURAL, target.namespace)

    @property
    def label_term(self) -> Requirement | None:
        """Leaves out objects that the caller must not see. None: no object."""
        return key_access.label_term(self.caller, self.target.info.cls.PLURAL)

    async def read(self, key: Key) -> Resource:
        """Return an object from the store; `NotFoundError` if the caller may not see it."""
        obj = await self.store.get(self.target.info.cls, key)
        term, label = self.owner_term, self.label_term
        is_foreign = term is not None and not selection.matches_field(obj, term)
        if is_foreign or (label is not None and not label.matches(obj.metadata.labels)):
            return semantics.found(self.target.info.cls, key, None)
        return obj

    def shown(self, obj: Resource) -> Resource:
        """Return an object as the caller may see it."""
        if key_access.hides_variables(self.caller):
            return key_access.without_variables(obj)
        return obj

    async def admitted(self, old: Resource | None, new: Resource) -> Resource:
        """Return the object to store; `ForbiddenError` if an API key may not write it."""
        writes = self.context.key_writes
        if writes is None or self.caller.is_operator:
            return new
        return await writes.admitted(self.caller, old, new)

    @contextlib.asynccontextmanager
    async def writing(
        self, old: Resource | None, new: Resource, *, dry_run: bool
    ) -> AsyncGenerator[None]:
        """Hold the quota that a write of an API key needs."""
        writes = self.context.key_writes
        if writes is None or self.caller.is_operator:
            yield
            return
        async with writes.reserving(self.caller, old, new, dry_run=dry_run):
            yield

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
