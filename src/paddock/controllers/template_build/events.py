"""Which changes enqueue a build: its own, and the end of another one of its team."""

from collections.abc import Iterable

from paddock.cache import indexes
from paddock.cache.provider import Provider
from paddock.engine.controller import Controller, own_key
from paddock.resources.kinds.template_build import BuildPhase, TemplateBuild
from paddock.resources.meta import Key


def subscribe(controller: Controller[Key], provider: Provider) -> None:
    """Enqueue builds."""

    def waiting(old: TemplateBuild | None, new: TemplateBuild | None) -> Iterable[Key]:
        if old is None or old.status.phase is not BuildPhase.BUILDING or not provider.is_synced:
            return ()
        if new is not None and new.status.phase is BuildPhase.BUILDING and not new.is_deleting:
            return ()
        return [
            build.key
            for build in provider.view(TemplateBuild, indexes.OPEN_BUILD, old.team)
            if build.spec.started and build.status.phase is BuildPhase.WAITING
        ]

    controller.watches(provider.informer(TemplateBuild), own_key)
    controller.watches(provider.informer(TemplateBuild), waiting)
