"""Parsing of query strings of E2B's routes."""

from collections.abc import Mapping
from datetime import datetime
from urllib.parse import unquote

from paddock.kit.errors import InvalidError
from paddock.manager.sandboxes.requests import SandboxFilter

MAX_LIMIT = 100
_MILLISECONDS = 10**11
"""A number from here on is in milliseconds: as seconds it would be the year 5138."""
STATES = frozenset({"running", "paused"})


def metadata_filter(text: str) -> Mapping[str, str]:
    """Parse `k=v&k=v` whose keys and values are percent-encoded twice.

    The framework has decoded the outermost layer; clients quote each key and value, then the
    whole, then the URL.
    """
    pairs: dict[str, str] = {}
    for part in text.split("&"):
        if not part:
            continue
        key, separator, value = part.partition("=")
        if not separator:
            raise InvalidError.at("metadata", f"{part!r} is not key=value")
        pairs[unquote(unquote(key))] = unquote(unquote(value))
    return pairs


def sandbox_filter(query: Mapping[str, str]) -> SandboxFilter:
    """Parse which sandboxes to list."""
    states = STATES
    if text := query.get("state"):
        states = frozenset(part.strip() for part in text.split(","))
        if unknown := states - STATES:
            raise InvalidError.at(
                "state", f"{', '.join(sorted(unknown))!r} is neither running nor paused"
            )
    return SandboxFilter(
        states=states,
        metadata=metadata_filter(query.get("metadata", "")),
        template=query.get("template") or None,
        started_after=moment(query.get("startedAfter"), "startedAfter"),
    )


def moment(text: str | None, field: str) -> datetime | None:
    """Parse an RFC 3339 time."""
    if not text:
        return None
    try:
        # A plus sign in a query string is decoded as a space.
        when = datetime.fromisoformat(text.replace(" ", "+"))
    except ValueError as error:
        raise InvalidError.at(field, f"{text!r} is not an RFC 3339 time") from error
    if when.tzinfo is None:
        raise InvalidError.at(field, f"{text!r} has no time zone")
    return when


def number(query: Mapping[str, str], field: str, *, default: int, low: int, high: int) -> int:
    """Parse a number within bounds."""
    text = query.get(field)
    if text is None or text == "":
        return default
    digits = text.removeprefix("-")
    if not digits.isascii() or not digits.isdigit() or len(digits) > 18:
        raise InvalidError.at(field, f"{text!r} is not a number")
    if not low <= int(text) <= high:
        raise InvalidError.at(field, f"{text} is not between {low} and {high}")
    return int(text)


def unix_seconds(query: Mapping[str, str], field: str) -> int | None:
    """Parse a Unix time in seconds; older clients send milliseconds. 0 means None."""
    moment = number(query, field, default=0, low=0, high=10**14)
    return (moment // 1000 if moment >= _MILLISECONDS else moment) or None


def is_ascending(query: Mapping[str, str]) -> bool:
    """Parse the order of a list; the default is newest first."""
    order = query.get("order") or "desc"
    if order not in ("asc", "desc"):
        raise InvalidError.at("order", f"{order!r} is neither asc nor desc")
    return order == "asc"
