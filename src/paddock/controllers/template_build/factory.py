"""Builds the controller of template builds from what it needs."""

from paddock.builds.aws import ecr
from paddock.builds.files import BuildFiles
from paddock.cache.provider import Provider
from paddock.claims.acquirer import Acquirer
from paddock.controllers.template_build.bases import Bases
from paddock.controllers.template_build.collection import BuildCollector
from paddock.controllers.template_build.controller import TemplateBuildController
from paddock.controllers.template_build.layers import Layers
from paddock.controllers.template_build.ports import BuildShell
from paddock.controllers.template_build.run import BuildTools
from paddock.controllers.template_build.sandboxes import BuildSandboxes
from paddock.controllers.template_build.steps.instructions import Instructions
from paddock.engine.recorder import Recorder
from paddock.kit.clock import Clock
from paddock.resources.tokens import TokenSeed
from paddock.runtime.port import Runtime


def new_controller(
    files: BuildFiles,
    shell: BuildShell,
    *,
    provider: Provider,
    runtime: Runtime,
    acquirer: Acquirer,
    seed: TokenSeed,
    clock: Clock,
    recorder: Recorder,
    builds_per_team: int,
    max_seconds: float,
    images: tuple[str, ...] = (),
) -> TemplateBuildController:
    """Return the controller."""
    tools = BuildTools(
        provider=provider,
        runtime=runtime,
        bases=Bases(
            provider,
            runtime,
            files.credentials,
            log_in=lambda keys, image: ecr.log_in(keys, image, clock),
            images=images,
        ),
        layers=Layers(provider, clock),
        sandboxes=BuildSandboxes(provider, acquirer, seed, clock, max_seconds=max_seconds),
        shell=shell,
        instructions=Instructions(files.uploads),
        logs=files.logs,
    )
    return TemplateBuildController(
        provider,
        tools,
        BuildCollector(provider, files, clock),
        files.credentials,
        clock,
        recorder,
        concurrency=builds_per_team,
        max_seconds=max_seconds,
    )
