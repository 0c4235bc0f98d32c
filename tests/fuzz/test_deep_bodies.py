"""Bodies nested too deeply are refused, never a server error."""

import pytest

from tests.scenario.paddock import SECRETS, paddock

pytestmark = pytest.mark.looptime

DEPTHS = (500, 20_000)


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("opening", [b"[", b'{"a":'])
@pytest.mark.parametrize(
    "path",
    [
        "/sandboxes",
        "/sandboxes/i0/connect",
        "/api-keys",
        "/apis/paddock.dev/v1alpha1/namespaces/default/sandboxes",
    ],
)
async def test_a_body_nested_too_deeply_is_refused(path: str, opening: bytes, depth: int) -> None:
    async with paddock() as world:
        for body in (opening * depth, b'{"metadata":' + opening * depth):
            answer = await world.http.post(
                path,
                content=body,
                headers={
                    "Content-Type": "application/json",
                    "Authorization": f"Bearer {SECRETS.token}",
                },
            )
            assert 400 <= answer.status_code < 500, answer.text
