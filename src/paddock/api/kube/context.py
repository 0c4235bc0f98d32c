"""What every handler of the API is given, and how answers leave it."""

from typing import Any

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from paddock.api.kube.scheme import ResourceTarget
from paddock.api.kube.settings import KubeApiSettings
from paddock.kit.clock import Clock
from paddock.kit.errors import FieldProblem
from paddock.store.port import Store

_encoder = msgspec.json.Encoder()


class KubeContext(Struct, frozen=True):
    """The API's surroundings."""

    store: Store
    settings: KubeApiSettings
    clock: Clock


class KubeCall(Struct, frozen=True):
    """One request and what it is about."""

    context: KubeContext
    request: Request
    target: ResourceTarget

    @property
    def store(self) -> Store:
        """Where the resources are."""
        return self.context.store


def json_response(
    document: Any,
    status_code: int = 200,
    *,
    media_type: str = "application/json",
    headers: dict[str, str] | None = None,
) -> Response:
    """Give a document as JSON."""
    return Response(
        _encoder.encode(document), status_code=status_code, media_type=media_type, headers=headers
    )


def warnings_header(problems: list[FieldProblem]) -> dict[str, str]:
    """Tell a client of fields that were dropped; it prints these and goes on."""
    if not problems:
        return {}
    texts = [f'299 - "unknown field \\"{_quotable(problem.path)}\\""' for problem in problems]
    return {"Warning": ", ".join(texts)}


def _quotable(text: str) -> str:
    return "".join(c if c.isascii() and c.isprintable() and c not in '"\\' else "?" for c in text)
