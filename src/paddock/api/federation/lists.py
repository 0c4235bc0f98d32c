"""Merging of sandbox lists from several clusters. Pure.

A page token names the last item returned (`manager.sandboxes.paging`), so the same token means the
same position in every cluster: each returns its first items after it, and the first of all of them
form the page.
"""

from collections.abc import Sequence
from datetime import datetime
from typing import Any

import msgspec

from paddock.manager.federation.protocol import ForwardedReply
from paddock.manager.sandboxes import paging

NEXT = "x-next-token"
RUNNING = "x-total-running"
MISSING = "x-paddock-missing-clusters"
"""Names the clusters that did not answer, so that clients can detect a partial list."""


def merge(
    replies: Sequence[ForwardedReply], missing: Sequence[str], *, limit: int | None, ascending: bool
) -> ForwardedReply:
    """Merge several replies into one; without a limit all items, as older clients expect."""
    items = [item for reply in replies for item in _items(reply)]
    items.sort(key=_position, reverse=not ascending)
    headers = {"content-type": "application/json"}
    if missing:
        headers[MISSING] = ",".join(sorted(missing))
    if limit is not None:
        has_more = len(items) > limit or any(NEXT in reply.headers for reply in replies)
        items = items[:limit]
        if has_more and items:
            headers[NEXT] = paging.encode(_position(items[-1]), ascending=ascending)
        headers[RUNNING] = str(sum(int(reply.headers.get(RUNNING, 0)) for reply in replies))
    return ForwardedReply(status=200, body=msgspec.json.encode(items), headers=headers)


def _items(reply: ForwardedReply) -> list[dict[str, Any]]:
    return msgspec.json.decode(reply.body, type=list[dict[str, Any]])


def _position(item: dict[str, Any]) -> paging.Position:
    return datetime.fromisoformat(item["startedAt"]), item["sandboxID"]
