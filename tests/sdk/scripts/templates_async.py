"""Checks of template builds with E2B's asynchronous Python SDK against a whole installation."""

import asyncio
import uuid

from e2b import AsyncSandbox, AsyncTemplate
from e2b.template.types import TemplateBuildStatus
from harness import check, main_async


def new_name():
    return f"sdk-{uuid.uuid4().hex[:12]}"


async def build(template, name):
    return await AsyncTemplate.build(template, name, cpu_count=1, memory_mb=1024)


@check
async def a_template_is_built_and_used():
    name = new_name()
    template = AsyncTemplate().from_image("base").run_cmd("echo async > made")
    await build(template, name)
    box = await AsyncSandbox.create(name)
    assert await box.files.read("made") == "async\n"
    await box.kill()


@check
async def builds_with_different_tags_run_in_parallel():
    name = new_name()

    async def one(number):
        template = AsyncTemplate().from_image("base").run_cmd(f"echo {number} > made")
        made = await build(template, f"{name}:v{number}")
        box = await AsyncSandbox.create(f"{name}:v{number}")
        assert await box.files.read("made") == f"{number}\n"
        await box.kill()
        return made

    made = await asyncio.gather(*(one(number) for number in range(4)))
    assert len({item.build_id for item in made}) == 4
    assert len({item.template_id for item in made}) == 1


@check
async def a_background_build_is_building_at_first():
    template = AsyncTemplate().from_image("base").skip_cache().run_cmd("sleep 3")
    made = await AsyncTemplate.build_in_background(
        template, new_name(), cpu_count=1, memory_mb=1024
    )
    status = await AsyncTemplate.get_build_status(made)
    assert status.status == TemplateBuildStatus.BUILDING
    while status.status == TemplateBuildStatus.BUILDING:
        await asyncio.sleep(0.2)
        status = await AsyncTemplate.get_build_status(made)
    assert status.status == TemplateBuildStatus.READY


asyncio.run(main_async(hasattr(AsyncSandbox, "fork")))
