"""Bodies of requests: read whole, and no further than a bound."""

from starlette.requests import Request

from paddock.kit.errors import TooLargeError


async def whole(request: Request, most: int) -> bytes:
    """Give a body; `TooLargeError` as soon as it is longer than so many bytes."""
    data = bytearray()
    async for chunk in request.stream():
        data += chunk
        if len(data) > most:
            raise TooLargeError(f"the body is larger than {most} bytes")
    return bytes(data)
