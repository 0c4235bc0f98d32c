"""How deeply documents may be nested, and whether one is nested more deeply than that."""

from typing import Any, cast

MAX_DEPTH = 200
"""Whoever goes through a document level by level must not meet the end of the stack."""


def is_too_deep(value: Any) -> bool:
    """Say whether a document has more levels than any may have."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for item in level
            if isinstance(item, (dict, list))
            for child in (
                cast("dict[str, Any]", item).values()
                if isinstance(item, dict)
                else cast("list[Any]", item)
            )
            if isinstance(child, (dict, list))
        ]
        if not level:
            return False
    return True
