"""Create a sandbox that is claimed from the start: the cold start of a claim."""

from datetime import datetime

from paddock.cache.provider import Provider
from paddock.claims.lost_replies import AMBIGUOUS_ERRORS, find_written
from paddock.kit.errors import PaddockError, UnavailableError
from paddock.resources.kinds.sandbox import (
    FINALIZER_SANDBOX,
    LABEL_TEMPLATE,
    Sandbox,
    SandboxSpec,
)
from paddock.resources.kinds.template import SandboxTemplateSpec
from paddock.resources.meta import ObjectMeta
from paddock.resources.transitions.claim import Terms, claimed


def new_sandbox(
    terms: Terms,
    template: SandboxTemplateSpec,
    *,
    namespace: str,
    template_name: str,
    now: datetime,
    name: str = "",
    name_prefix: str = "",
    restore_from: str | None = None,
    restore_memory: bool = True,
) -> Sandbox:
    """Return the claimed sandbox to create; by default it is named after its public id."""
    wanted = Sandbox(
        metadata=ObjectMeta(
            name=name or f"{name_prefix or 'sbx-'}{terms.identity.sandbox_id}",
            namespace=namespace,
            finalizers=(FINALIZER_SANDBOX,),
            labels={LABEL_TEMPLATE: template_name},
        ),
        spec=SandboxSpec(
            template=template, restore_from=restore_from, restore_memory=restore_memory
        ),
    )
    return claimed(wanted, terms, now=now)


async def create(provider: Provider, wanted: Sandbox, *, unresolved: list[Sandbox]) -> Sandbox:
    """Write the sandbox; a lost reply is looked up by the lock.

    If it is not in the store then, it stays in `unresolved`: a request that was given up may
    still be on its way to the store.
    """
    unresolved.append(wanted)
    try:
        created = await provider.write.create(wanted)
    except AMBIGUOUS_ERRORS as error:
        found = await find_written(provider, wanted)
        if found is None:
            raise UnavailableError("the store did not answer", retry_after_seconds=1) from error
        created = found
    except PaddockError:
        unresolved.pop()
        raise
    unresolved.pop()
    return created
