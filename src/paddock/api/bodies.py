"""Bodies of requests: read whole, and no further than a bound."""

from starlette.requests import Request

from paddock.kit.errors import TooLargeError


async def read_limited(request: Request, limit: int) -> bytes:
    """Give a body; `TooLargeError` as soon as it is longer than so many bytes."""
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > limit:
            raise TooLargeError(f"the body is larger than {limit} bytes")
    return bytes(data)
