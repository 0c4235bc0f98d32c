"""Bodies of responses, whose size a registry does not choose."""

import aiohttp

from paddock.kit.errors import InvalidError

_CHUNK = 1 << 16


async def read_bounded(response: aiohttp.ClientResponse, limit: int) -> bytes:
    """Return the body. Raises `InvalidError` if it is larger than the limit."""
    data = bytearray()
    async for chunk in response.content.iter_chunked(_CHUNK):
        data += chunk
        if len(data) > limit:
            raise InvalidError(f"{response.url.host} sent more than {limit:,} bytes")
    return bytes(data)
