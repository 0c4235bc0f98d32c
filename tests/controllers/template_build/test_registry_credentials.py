"""Credentials of a build's registry: exchanged when the image is pulled, lost by a restart."""

from unittest.mock import patch

import pytest
from msgspec import structs

from paddock.builds.aws import ecr
from paddock.builds.aws.signature import AwsKeys
from paddock.builds.credentials import RegistryLogin
from paddock.kit.errors import ForbiddenError, UnavailableError
from paddock.resources.kinds.template_build import ANNOTATION_LOGIN, BuildPhase, TemplateBuild
from paddock.resources.meta import with_meta
from paddock.runtime.port import RegistryCredentials
from paddock.runtime.simulated_operations import Operation
from tests.controllers.template_build.test_builds import Factory, in_a_world

pytestmark = pytest.mark.looptime
KEYS = AwsKeys(access_key_id="id", secret_access_key="secret", region="eu-west-1")
LOGIN = RegistryLogin(username="AWS", password="password", host="registry.example")
IMAGE = "registry.example/tools:1"


async def started(factory: Factory) -> TemplateBuild:
    """Start a build of a private image, whose credentials are in memory."""
    build = await factory.start("one", started=False, from_image=IMAGE)
    files = factory.world.plane.assembly.build_files
    assert files is not None
    files.credentials.put(build.metadata.uid, KEYS)

    def start(now: TemplateBuild) -> TemplateBuild:
        spec = structs.replace(now.spec, started=True)
        annotations = {ANNOTATION_LOGIN: "in memory"}
        return with_meta(structs.replace(now, spec=spec), annotations=annotations)

    return await factory.world.provider.write.mutate(TemplateBuild, build.key, start)


@in_a_world
async def test_aws_keys_are_exchanged_when_the_image_is_pulled(factory: Factory) -> None:
    given: list[tuple[RegistryCredentials, ...]] = []
    ensure = factory.world.runtime.ensure_image

    async def log_in(keys: AwsKeys, image: str, _clock: object) -> RegistryLogin:
        assert (keys, image) == (KEYS, IMAGE)
        return LOGIN

    async def recorded(*args, credentials=(), **more):
        given.append(credentials)
        return await ensure(*args, credentials=credentials, **more)

    with patch.object(ecr, "log_in", log_in):
        factory.world.runtime.ensure_image = recorded
        ended = await factory.end(await started(factory))
    assert ended.status.phase is BuildPhase.READY
    expected = RegistryCredentials(host="registry.example", username="AWS", password="password")
    assert (expected,) in given


@in_a_world
async def test_keys_that_aws_refuses_fail_the_build_with_its_reason(factory: Factory) -> None:
    async def refuse(*_: object) -> RegistryLogin:
        raise ForbiddenError("AWS refuses the credentials for eu-west-1: ExpiredToken")

    with patch.object(ecr, "log_in", refuse):
        ended = await factory.end(await started(factory))
    assert (ended.status.phase, ended.status.failed_step) == (BuildPhase.FAILED, "base")
    assert ended.status.message == "AWS refuses the credentials for eu-west-1: ExpiredToken"


@in_a_world
async def test_a_build_asks_again_while_aws_does_not_answer(factory: Factory) -> None:
    problems = [UnavailableError("api.ecr cannot be reached")] * 2

    async def log_in(*_: object) -> RegistryLogin:
        if problems:
            raise problems.pop()
        return LOGIN

    with patch.object(ecr, "log_in", log_in):
        ended = await factory.end(await started(factory))
    assert ended.status.phase is BuildPhase.READY


@in_a_world
async def test_a_build_whose_credentials_a_restart_has_lost_says_so(factory: Factory) -> None:
    files = factory.world.plane.assembly.build_files
    assert files is not None
    refusal = ForbiddenError(f"access denied to '{IMAGE}': it requires credentials")
    factory.world.runtime.fail_next(Operation.ENSURE_IMAGE, refusal)
    with patch.object(files.credentials, "get", return_value=None):
        ended = await factory.end(await started(factory))
    assert ended.status.message == (
        f"access denied to '{IMAGE}': it requires credentials; the registry credentials of the "
        "build were lost when the control plane restarted: start the build again"
    )
