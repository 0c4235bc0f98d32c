"""The limit on the nesting depth of documents."""

from typing import Any, cast

MAX_DEPTH = 200
"""Recursive functions over a document must not overflow the stack."""


def is_too_deep(value: Any) -> bool:
    """Whether a document has more than `MAX_DEPTH` levels."""
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
