"""Reading of request bodies up to a size limit."""

from starlette.requests import Request

from paddock.kit.errors import TooLargeError


async def read_limited(request: Request, limit: int) -> bytes:
    """Return the body; raise `TooLargeError` as soon as it exceeds the limit in bytes."""
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > limit:
            raise TooLargeError(f"the body is larger than {limit} bytes")
    return bytes(data)
