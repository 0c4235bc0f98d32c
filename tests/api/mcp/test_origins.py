"""Which web pages may use `/mcp`."""

import pytest

from paddock.api.mcp.origins import PageOrigins

ORIGINS = PageOrigins("sandboxes.example")


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "paddock.internal:3000"},
        {"host": "paddock.internal:3000", "sec-fetch-site": "none"},
        {"host": "localhost:3000", "origin": "http://localhost:6274"},
        {"host": "127.0.0.1:3000", "origin": "http://127.0.0.1:3000"},
        {"host": "[::1]:3000", "origin": "http://[::1]:3000"},
        {"host": "api.sandboxes.example", "origin": "https://sandboxes.example"},
    ],
    ids=["program", "typed", "localhost", "ipv4", "ipv6", "domain"],
)
def test_programs_and_known_pages_are_served(headers: dict[str, str]) -> None:
    assert ORIGINS.refusal(headers) is None


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "localhost:3000", "origin": "https://evil.example"},
        {"host": "evil.example:3000", "origin": "http://evil.example:3000"},
        {"host": "evil.example:3000", "origin": "http://localhost:3000"},
        {"host": "localhost:3000", "origin": "null"},
        {"host": "localhost:3000", "sec-fetch-site": "cross-site"},
        {"host": "sandboxes.example", "origin": "https://8000-i1.sandboxes.example"},
        {"host": "localhost:3000", "origin": "http://8000-i1.localhost:3000"},
        {"host": "localhost:3000", "origin": "http://[bad"},
    ],
    ids=["other", "rebound", "host", "null", "hidden", "sandbox", "local sandbox", "malformed"],
)
def test_other_pages_are_refused(headers: dict[str, str]) -> None:
    assert ORIGINS.refusal(headers)
