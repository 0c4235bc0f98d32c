"""How claims end: phase, condition and event; the example of the documentation."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import yaml

from paddock.resources import codec
from paddock.resources.kinds.builtin import Event
from paddock.resources.kinds.claim import SandboxClaim
from paddock.resources.meta import with_meta
from tests.scenario.paddock import World, paddock

pytestmark = pytest.mark.looptime

PAGE = Path(__file__).parents[3] / "docs" / "claims.md"


def written(document: dict[str, Any]) -> SandboxClaim:
    return with_meta(codec.from_builtins(SandboxClaim, document), namespace="default")


async def end_of(world: World, wanted: SandboxClaim) -> tuple[SandboxClaim, list[tuple[str, str]]]:
    """Return a claim that has ended, and its events."""
    await world.provider.write.create(wanted)

    def ended() -> bool:
        found = world.provider.get(SandboxClaim, wanted.key)
        return found is not None and found.status.phase.is_final

    await world.until(ended, seconds=200)
    await asyncio.sleep(10)  # events are written later
    found = world.provider.get(SandboxClaim, wanted.key)
    assert found is not None
    events = (await world.store.list(Event)).items
    own = [item for item in events if item.involved_object.name == wanted.metadata.name]
    return found, [(item.type, item.reason) for item in own]


async def test_a_claim_on_a_missing_template_fails_with_a_warning() -> None:
    lost = {"metadata": {"name": "lost"}, "spec": {"templateName": "nowhere"}}
    async with paddock() as world:
        claim, events = await end_of(world, written(lost))
        assert claim.status.phase == "Failed"
        assert [item.type for item in claim.status.conditions] == ["Failed"]
        assert events == [("Warning", "ClaimFailed")]


async def test_the_example_of_the_documentation_completes_on_a_new_installation() -> None:
    example = yaml.safe_load(PAGE.read_text().split("```yaml\n")[1].split("```")[0])
    async with paddock() as world:
        claim, events = await end_of(world, written(example))
        assert claim.status.phase == "Completed", claim.status.message
        assert claim.status.claimed_replicas == example["spec"]["replicas"]
        assert {kind for kind, _ in events} == {"Normal"}
