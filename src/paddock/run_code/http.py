"""The HTTP session for requests that code in sandboxes may answer."""

import aiohttp


def sandbox_session() -> aiohttp.ClientSession:
    """Return a session that keeps no cookies and decompresses nothing.

    A cookie of one sandbox would go to the others, which have the same address; a small response
    could become a large one. Connections are not limited: each run of code holds one.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        cookie_jar=aiohttp.DummyCookieJar(),
        headers={"Accept-Encoding": "identity"},
        auto_decompress=False,
    )
