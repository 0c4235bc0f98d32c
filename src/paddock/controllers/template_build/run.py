"""Performs one build: the steps that are not cached, the start command, the stored result."""

import logging
from collections.abc import Sequence

from msgspec import Struct, structs

from paddock.builds.logs import BuildLogs
from paddock.cache.provider import Provider
from paddock.controllers.template_build import keys
from paddock.controllers.template_build.bases import Bases, ResolvedBase
from paddock.controllers.template_build.keys import StepContext
from paddock.controllers.template_build.layers import (
    FILES,
    FILES_AND_MEMORY,
    Layers,
    context_of,
)
from paddock.controllers.template_build.ports import BuildShell
from paddock.controllers.template_build.sandboxes import BuildBase, BuildSandboxes
from paddock.controllers.template_build.start import start_and_wait
from paddock.controllers.template_build.steps.instructions import Instructions
from paddock.controllers.template_build.steps.runner import StepFailedError, StepRunner
from paddock.kit.errors import UnsupportedError
from paddock.resources.kinds.checkpoint import Checkpoint
from paddock.resources.kinds.sandbox import Sandbox
from paddock.resources.kinds.template import SandboxTemplateSpec
from paddock.resources.kinds.template_build import (
    REASON_BASE,
    REASON_FINALIZE,
    BuildStep,
    TemplateBuild,
)
from paddock.runtime.port import Runtime

log = logging.getLogger(__name__)

SHOWN_KEY = 12
"""Digits of a key in the log."""


class BuildTools(Struct, frozen=True, kw_only=True):
    """What all builds share."""

    provider: Provider
    runtime: Runtime
    bases: Bases
    layers: Layers
    sandboxes: BuildSandboxes
    shell: BuildShell
    instructions: Instructions
    logs: BuildLogs


class BuiltTemplate(Struct, frozen=True, kw_only=True):
    """The result of a build."""

    template: SandboxTemplateSpec
    checkpoint: Checkpoint | None
    cached_steps: int
    digest: str


class BuildCommands(Struct, frozen=True):
    """The start and ready command of a build."""

    start: str = ""
    ready: str = ""
    context: StepContext | None = None
    """What they run with if they are those of the base; `None`: the context of the last step."""


class BuildRun:
    """One attempt at one build. It begins at the last layer that is stored."""

    def __init__(self, build: TemplateBuild, tools: BuildTools) -> None:
        self._build = build
        self._tools = tools
        self._sandbox: Sandbox | None = None
        self._from = BuildBase(template=SandboxTemplateSpec())
        self._current: Checkpoint | None = None
        """The layer that the next step runs on; None: the base."""
        self.step = REASON_BASE
        """What it is at: `base`, the number of a step from 1, or `finalize`."""
        self.has_progressed = False
        """Whether this attempt has stored a layer."""

    async def perform(self) -> BuiltTemplate:
        """Build and return the result; `StepFailedError` names the step."""
        build, tools = self._build, self._tools
        if not (await tools.runtime.capabilities()).can_snapshot_files:
            raise UnsupportedError(
                "templates cannot be built here: this runtime cannot store files of sandboxes"
            )
        await tools.sandboxes.delete_all(build)
        base = await tools.bases.resolve(build)
        self._from = base.base
        commands = self._commands(base)
        chain = keys.step_keys(base.key, build.spec.steps)
        last = chain[-1] if chain else base.key
        key = keys.result_key(
            last, commands.start, commands.ready, build.spec.resources, commands.context
        )
        usable = keys.first_forced(build.spec.steps, force=build.spec.force)
        is_forced = build.spec.force or usable < len(chain)
        self._log_base()
        stored = await self._usable(key, is_forced=is_forced)
        if stored is not None and (context := context_of(stored)) is not None:
            self._log_cached(chain, len(chain))
            return self._result(base, context, stored, commands, len(chain))
        context, cached = await self._cached(base.context, chain, usable)
        self._log_cached(chain, cached)
        for number in range(cached, len(chain)):
            context = await self._step(number, chain[number], context)
        self.step = REASON_FINALIZE
        stored = await self._finish(context, commands, key)
        return self._result(base, context, stored, commands, cached)

    def _commands(self, base: ResolvedBase) -> BuildCommands:
        """Return the start and ready command; those of the base if the build has none.

        Those of the base run as they did there, whatever the steps have set.
        """
        spec = self._build.spec
        if spec.start_command or spec.ready_command:
            return BuildCommands(spec.start_command, spec.ready_command)
        if base.start_command or base.ready_command:
            return BuildCommands(base.start_command, base.ready_command, base.start_context)
        return BuildCommands()

    async def _usable(self, key: str, *, is_forced: bool) -> Checkpoint | None:
        """Return the layer with this key, which is kept from now on.

        Forced steps use only what this build itself has stored, before it was interrupted.
        """
        layers = self._tools.layers
        layer = layers.find(self._build, key, only_own=is_forced)
        return layer if layer is not None and await layers.mark_used(layer) else None

    async def _cached(
        self, context: StepContext, chain: Sequence[str], unforced: int
    ) -> tuple[StepContext, int]:
        """Return the context after the deepest layer that is stored, and the number of steps."""
        for number in range(len(chain), 0, -1):
            layer = await self._usable(chain[number - 1], is_forced=number > unforced)
            if layer is not None and (found := context_of(layer)) is not None:
                self._current = layer
                return found, number
        return context, 0

    async def _step(self, number: int, key: str, context: StepContext) -> StepContext:
        step = self._build.spec.steps[number]
        self.step = str(number + 1)
        self._log_step(number, key)
        runner = self._runner(step, str(number + 1), self._prefix(number), context)
        try:
            after = await self._tools.instructions.perform(runner)
        except StepFailedError as error:
            raise StepFailedError(error.message, step=error.step or str(number + 1)) from error
        if keys.needs_sandbox(step):
            sandbox = await self._running()
            self._current = await self._tools.layers.store(self._build, sandbox, key, after)
            self.has_progressed = True
        return after

    async def _finish(
        self, context: StepContext, commands: BuildCommands, key: str
    ) -> Checkpoint | None:
        """Run the start command and store the result.

        Without commands the last layer is the result, or the base itself if there is none.
        """
        if not commands.start and not commands.ready:
            return self._current
        used = commands.context or context
        runner = self._runner(BuildStep(type="START"), REASON_FINALIZE, "start", used)
        await self._running()
        await start_and_wait(runner, start=commands.start, ready=commands.ready)
        can_store = (await self._tools.runtime.capabilities()).can_checkpoint
        contents = FILES_AND_MEMORY if commands.start and can_store else FILES
        return await self._tools.layers.store(
            self._build,
            await self._running(),
            key,
            context,
            contents=contents,
            start_context=commands.context,
        )

    async def _running(self) -> Sandbox:
        """Return the sandbox of the build; acquire it on first use, from the current layer."""
        if self._sandbox is None:
            base = self._from
            if self._current is not None:
                base = structs.replace(base, checkpoint_id=self._current.status.checkpoint_id)
            self._sandbox = await self._tools.sandboxes.acquire(self._build, base)
        return self._sandbox

    def _runner(
        self, step: BuildStep, number: str, prefix: str, context: StepContext
    ) -> StepRunner:
        return StepRunner(
            build=self._build,
            step=step,
            number=number,
            prefix=prefix,
            context=context,
            sandbox=self._running,
            shell=self._tools.shell,
            logs=self._tools.logs,
        )

    def _result(
        self,
        base: ResolvedBase,
        context: StepContext,
        stored: Checkpoint | None,
        commands: BuildCommands,
        cached: int,
    ) -> BuiltTemplate:
        has_memory = stored is not None and stored.status.has_memory
        template = structs.replace(
            base.base.template,
            restore_from=stored.status.checkpoint_id if stored else base.base.checkpoint_id,
            resources=self._build.spec.resources,
            env=dict(context.env),
            user=context.user,
            workdir=context.workdir,
            start_command=commands.start or None,
            # What runs in the stored memory was ready when it was stored.
            ready_command=None if has_memory else (commands.ready or None),
        )
        return BuiltTemplate(
            template=template, checkpoint=stored, cached_steps=cached, digest=base.digest
        )

    # ---- log -----------------------------------------------------------------------------

    def _log(self, message: str, step: str) -> None:
        self._tools.logs.append(self._build.metadata.uid, message, step=step)

    def _log_base(self) -> None:
        spec = self._build.spec
        self._log(f"[base] FROM {spec.from_image or spec.from_template}", REASON_BASE)

    def _log_cached(self, chain: Sequence[str], count: int) -> None:
        for number, key in enumerate(chain[:count]):
            self._log_step(number, key, cached="CACHED ")

    def _log_step(self, number: int, key: str, *, cached: str = "") -> None:
        step = self._build.spec.steps[number]
        text = " ".join((step.type, *step.args))
        prefix = self._prefix(number)
        self._log(f"{cached}[{prefix}] {text} [{key[:SHOWN_KEY]}]", str(number + 1))

    def _prefix(self, number: int) -> str:
        return f"builder {number + 1}/{len(self._build.spec.steps)}"
