"""Which teams may use an image of the store. Pure.

What the operator imports, builds or pulls is for all teams, and so is what a registry gives without
credentials. An image that was pulled with the credentials of a team is for that team, and for each
other team to which its registry gives the same manifest.

A layer belongs to the images that have it. A team that names the checksum of a layer that only
others may use has to download it: the checksum alone does not show that it has the content.
"""

from collections.abc import Iterable

from msgspec import structs

from paddock.runtime.local.images.model import Manifest


def may_use(manifest: Manifest, team: str) -> bool:
    """Whether a team may use an image."""
    return manifest.teams is None or team in manifest.teams


def granted(manifest: Manifest, teams: tuple[str, ...] | None) -> Manifest:
    """Return the manifest with more teams; `None` stands for all."""
    if manifest.teams is None or teams is None:
        return structs.replace(manifest, teams=None)
    return structs.replace(manifest, teams=tuple(sorted({*manifest.teams, *teams})))


def may_replace(before: Manifest | None, after: Manifest) -> bool:
    """Whether a tag may name another version: not one for fewer than everyone, who have one."""
    return before is None or before.teams is not None or after.teams is None


def layers_of_team(manifests: Iterable[Manifest], team: str | None) -> frozenset[str]:
    """Return the layers of all images that a team may use; `None` is the operator."""
    return frozenset(
        layer
        for manifest in manifests
        if team is None or may_use(manifest, team)
        for layer in manifest.layers
    )
