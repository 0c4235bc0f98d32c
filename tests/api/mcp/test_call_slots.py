"""How many calls one API key may have under way."""

import pytest

from paddock.api.mcp.call_slots import CallSlots
from paddock.kit.errors import RateLimitedError


def test_a_key_has_so_many_calls_at_once_and_other_keys_do_not_count() -> None:
    slots = CallSlots(limit=2)
    refused = pytest.raises(RateLimitedError, match="2 calls")
    with slots.taken("a"), slots.taken("a"), slots.taken("b"), refused, slots.taken("a"):
        pass
    with slots.taken("a"), slots.taken("a"):
        pass
