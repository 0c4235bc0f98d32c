"""Pages of a list that is sorted by start time and id, stable while the list changes.

The token names the last item returned: the next page begins after it, whatever was added or
removed.
"""

import base64
import binascii
import heapq
from collections.abc import Iterable
from datetime import datetime
from typing import TypeVar

from paddock.kit.errors import FieldProblem, InvalidError

T = TypeVar("T")
Position = tuple[datetime, str]


def encode(position: Position, *, ascending: bool) -> str:
    """Return the token of a position."""
    moment, identifier = position
    text = f"{moment.isoformat()}__{identifier}" + ("__asc" if ascending else "")
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def decode(token: str) -> Position:
    """Return the position of a token; `InvalidError` if it is malformed."""
    try:
        text = base64.b64decode(token + "=" * (-len(token) % 4), b"-_", validate=True).decode()
        moment, identifier = text.removesuffix("__asc").split("__")
        when = datetime.fromisoformat(moment)
    except (binascii.Error, UnicodeDecodeError, ValueError) as error:
        problem = FieldProblem("nextToken", "this is not a token that a list returned")
        raise InvalidError(str(problem), problems=[problem]) from error
    if when.tzinfo is None:
        problem = FieldProblem("nextToken", "this is not a token that a list returned")
        raise InvalidError(str(problem), problems=[problem])
    return when, identifier


def page(
    items: Iterable[tuple[Position, T]], *, limit: int, token: str | None, ascending: bool
) -> tuple[tuple[T, ...], str | None]:
    """Return one page of the items, and the token of the next page if there is one."""
    if token:
        after = decode(token)
        items = (item for item in items if (item[0] > after if ascending else item[0] < after))
    first = heapq.nsmallest if ascending else heapq.nlargest
    found = first(limit + 1, items, key=lambda item: item[0])
    chosen = found[:limit]
    more = len(found) > limit
    following = encode(chosen[-1][0], ascending=ascending) if more and chosen else None
    return tuple(item for _, item in chosen), following
