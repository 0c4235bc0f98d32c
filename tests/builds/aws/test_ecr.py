"""AWS keys become the password of a registry. A stand-in for AWS checks the signature.

The expected signatures were computed with botocore 1.44, which Paddock does not depend on.
"""

import base64
from collections.abc import AsyncGenerator
from datetime import UTC, datetime

import pytest
from aiohttp import web

from paddock.builds.aws import ecr
from paddock.builds.aws.signature import AwsKeys
from paddock.builds.credentials import RegistryLogin
from paddock.kit.clock import ManualClock
from paddock.kit.errors import ForbiddenError, InvalidError, PaddockError, UnavailableError
from tests.ports import free_port

NOW = datetime(2026, 11, 19, 2, 3, 4, tzinfo=UTC)
SECRET = "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"
KEYS = AwsKeys(access_key_id="AKIDEXAMPLE", secret_access_key=SECRET, region="eu-west-1")
CHINA = AwsKeys(access_key_id="AKIDCHINA", secret_access_key="another", region="cn-north-1")
SIGNATURES = {
    "AKIDEXAMPLE": "97791c92035b0e67aa72279ebf5bc9b032e26333e72a9035408e6158fae24fca",
    "AKIDCHINA": "ec085b126a0bd53c1f2ff6c1cf1cf8a6db04d274d5c000430201d0a58f016916",
}
HOSTS = {
    "AKIDEXAMPLE": "api.ecr.eu-west-1.amazonaws.com",
    "AKIDCHINA": "api.ecr.cn-north-1.amazonaws.com.cn",
}
IMAGE = "123456789012.dkr.ecr.eu-west-1.amazonaws.com/team/tools:1"


class StandIn:
    """A server that answers as AWS does, if a request has the expected signature."""

    def __init__(self) -> None:
        self.url = f"http://127.0.0.1:{free_port()}/"
        self.answer = web.json_response(self.token("AWS:the password"))
        self.count = 0

    @staticmethod
    def token(text: str) -> dict[str, object]:
        encoded = base64.b64encode(text.encode()).decode()
        data = {
            "authorizationToken": encoded,
            "expiresAt": 1.7e9,
            "proxyEndpoint": "https://123456789012.dkr.ecr.eu-west-1.amazonaws.com",
        }
        return {"authorizationData": [data]}

    async def serve(self, request: web.Request) -> web.Response:
        self.count += 1
        given = request.headers["Authorization"]
        [key_id] = [name for name in SIGNATURES if f"Credential={name}/" in given]
        assert request.headers["X-Amz-Date"] == "20261119T020304Z"
        assert request.headers["X-Amz-Target"].endswith(".GetAuthorizationToken")
        assert request.headers["Content-Type"] == "application/x-amz-json-1.1"
        assert request.headers["Host"] == HOSTS[key_id]
        assert await request.read() == b"{}"
        if not given.endswith(f"Signature={SIGNATURES[key_id]}"):
            kind = "com.amazon.coral.service#InvalidSignatureException"
            return web.json_response({"__type": kind, "message": SECRET}, status=400)
        return self.answer


@pytest.fixture
async def aws() -> AsyncGenerator[StandIn]:
    server = StandIn()
    app = web.Application()
    app.router.add_post("/", server.serve)
    runner = web.AppRunner(app)
    await runner.setup()
    port = int(server.url.rpartition(":")[2].rstrip("/"))
    await web.TCPSite(runner, "127.0.0.1", port).start()
    yield server
    await runner.cleanup()


async def log_in(aws: StandIn, keys: AwsKeys = KEYS, image: str = IMAGE) -> RegistryLogin:
    return await ecr.log_in(keys, image, ManualClock(NOW), endpoint=aws.url)


async def test_keys_become_a_login_for_the_host_of_the_image_alone(aws: StandIn) -> None:
    assert await log_in(aws) == RegistryLogin(
        username="AWS",
        password="the password",
        host="123456789012.dkr.ecr.eu-west-1.amazonaws.com",
    )


async def test_regions_in_china_have_their_own_domain(aws: StandIn) -> None:
    image = "123456789012.dkr.ecr.cn-north-1.amazonaws.com.cn/tools"
    assert (await log_in(aws, CHINA, image)).password == "the password"


async def test_a_wrong_key_is_refused_with_the_reason_of_aws_and_no_secret(aws: StandIn) -> None:
    wrong = AwsKeys(access_key_id="AKIDEXAMPLE", secret_access_key="wrong", region="eu-west-1")
    with pytest.raises(ForbiddenError) as caught:
        await log_in(aws, wrong)
    expected = "AWS refuses the credentials for eu-west-1: InvalidSignatureException"
    assert caught.value.message == expected


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (403, b"<html>", ForbiddenError),
        (400, b'{"__type": "a\\nb"}', ForbiddenError),
        (302, b"", UnavailableError),
        (429, b"", UnavailableError),
        (503, b"", UnavailableError),
        (200, b"no json", UnavailableError),
        (200, b'{"authorizationData": []}', UnavailableError),
        (200, b'{"authorizationData": [{"authorizationToken": "%"}]}', UnavailableError),
        (200, b'{"authorizationData": [{"authorizationToken": "QVdT"}]}', UnavailableError),
        (200, b" " * (2 << 20), UnavailableError),
    ],
    ids=lambda value: value.decode()[:20] if isinstance(value, bytes) else None,
)
async def test_an_answer_that_is_no_login_is_an_error(
    aws: StandIn, status: int, body: bytes, kind: type[PaddockError]
) -> None:
    aws.answer = web.Response(status=status, body=body, headers={"Location": aws.url})
    with pytest.raises(kind) as caught:
        await log_in(aws)
    assert SECRET not in str(caught.value)
    assert "\n" not in caught.value.message
    assert aws.count == 1


async def test_aws_that_does_not_answer_is_an_error_that_may_pass(aws: StandIn) -> None:
    aws.url = "http://127.0.0.1:9/"
    with pytest.raises(UnavailableError, match="cannot be reached"):
        await log_in(aws)


@pytest.mark.parametrize(
    "image",
    [
        IMAGE,
        "123456789012.dkr.ecr-fips.eu-west-1.amazonaws.com/tools",
        "123456789012.dkr-ecr.eu-west-1.on.aws/tools:1",
    ],
)
def test_registries_of_the_region_are_accepted(image: str) -> None:
    ecr.check_keys(KEYS, image)


@pytest.mark.parametrize(
    "image",
    [
        "tools",
        "registry.example/tools",
        "123456789012.dkr.ecr.us-east-1.amazonaws.com/tools",
        "123456789012.dkr.ecr.eu-west-1.amazonaws.com.evil.example/tools",
        "evil.example/123456789012.dkr.ecr.eu-west-1.amazonaws.com/tools",
        "123456789012.dkr.ecr.eu-west-1xamazonaws.com/tools",
    ],
)
def test_a_registry_that_is_not_of_the_region_gets_no_password(image: str) -> None:
    with pytest.raises(InvalidError, match="for registries of the region"):
        ecr.check_keys(KEYS, image)


@pytest.mark.parametrize("region", ["", "EU-WEST-1", "eu-west-1.evil.example/", "eu-west-1\n"])
def test_a_region_is_no_host(region: str) -> None:
    keys = AwsKeys(access_key_id="a", secret_access_key="b", region=region)
    with pytest.raises(InvalidError, match="region"):
        ecr.check_keys(keys, IMAGE)


def test_keys_are_not_printed() -> None:
    assert SECRET not in repr(KEYS)
    assert "AKIDEXAMPLE" not in repr(KEYS)
