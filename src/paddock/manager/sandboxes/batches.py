"""Many sandboxes in one call, and shards of batches as sandboxes of their own.

A batch's status records which sandbox serves which shard. The sandbox itself is not written until
a client addresses it by its public id: then `materialize_claim` writes its claim, by one
compare-and-swap.
"""

import asyncio

from msgspec import Struct, structs

from paddock.cache import indexes
from paddock.cache.provider import Provider
from paddock.claims.caller import Caller
from paddock.claims.engine import Claims
from paddock.claims.requests import NewSandbox
from paddock.claims.terms import batch_owner, claimed_for_shard
from paddock.kit.clock import Clock
from paddock.kit.errors import FieldProblem, InvalidError, NotFoundError, PaddockError
from paddock.manager.ports import Agent
from paddock.resources.kinds.batch import Allocation, BatchSandbox
from paddock.resources.kinds.sandbox import Sandbox
from paddock.resources.kinds.template import SandboxTemplateSpec
from paddock.resources.meta import Key
from paddock.resources.tokens import TokenSeed

MAX_AT_ONCE = 1000
_IN_FLIGHT = 64


class CreateResult(Struct, frozen=True):
    """One of many creates: the sandbox, or the error."""

    index: int
    sandbox: Sandbox | None = None
    error: PaddockError | None = None


class Batches:
    """Creates many sandboxes, and makes shards of batches addressable."""

    def __init__(
        self, provider: Provider, claims: Claims, agent: Agent, seed: TokenSeed, clock: Clock
    ) -> None:
        self._provider = provider
        self._claims = claims
        self._agent = agent
        self._seed = seed
        self._clock = clock

    async def create_many(
        self, caller: Caller, request: NewSandbox, count: int
    ) -> tuple[CreateResult, ...]:
        """Create `count` sandboxes; each result is a sandbox or an error.

        With an idempotency key, the same call sent again finds the same sandboxes and creates
        those that are missing. If all fail, the first error is raised.
        """
        if not 0 < count <= MAX_AT_ONCE:
            problem = FieldProblem("count", f"between 1 and {MAX_AT_ONCE}")
            raise InvalidError(str(problem), problems=[problem])
        gate = asyncio.Semaphore(_IN_FLIGHT)

        async def one(index: int) -> CreateResult:
            key = f"{request.idempotency_key}#{index}" if request.idempotency_key else ""
            wanted = structs.replace(request, idempotency_key=key)
            async with gate:
                try:
                    return CreateResult(index, await self._claims.create(caller, wanted))
                except PaddockError as error:
                    return CreateResult(index, error=error)

        made = tuple(await asyncio.gather(*(one(index) for index in range(count))))
        first = made[0].error
        if first is not None and all(item.sandbox is None for item in made):
            raise first
        return made

    async def materialize_claim(
        self, sandbox_id: str, caller: Caller | None = None
    ) -> Sandbox | None:
        """Write the claim of a shard's sandbox and return it; `None` if no shard has this id.

        With a caller, only shards of their team. The first call writes; later ones find the claim.
        """
        found = self._shard(sandbox_id)
        if found is None:
            return None
        batch, allocation = found
        if caller is not None and caller.team != batch_owner(batch) and not caller.is_operator:
            return None
        key = Key(allocation.namespace or batch.metadata.namespace, allocation.sandbox)
        sandbox = self._provider.sandbox(key)
        if sandbox is None or sandbox.metadata.uid != allocation.uid:
            return None
        if sandbox.spec.claim is not None:
            return sandbox if sandbox.spec.claim.sandbox_id == sandbox_id else None

        def change(newest: Sandbox) -> Sandbox | None:
            if newest.spec.claim is not None or newest.is_deleting:
                return None
            return claimed_for_shard(newest, batch, allocation, self._seed, now=self._clock.now())

        try:
            written = await self._provider.write.mutate(
                Sandbox, key, change, uid=sandbox.metadata.uid
            )
        except NotFoundError:
            return None
        if written.spec.claim is None or written.spec.claim.sandbox_id != sandbox_id:
            return None
        await self._agent.configure(written, written.spec.template or SandboxTemplateSpec())
        return written

    def _shard(self, sandbox_id: str) -> tuple[BatchSandbox, Allocation] | None:
        for batch in self._provider.view(BatchSandbox, indexes.SHARD_ID, sandbox_id):
            for allocation in batch.status.allocations:
                if allocation.sandbox_id == sandbox_id and not batch.is_deleting:
                    return batch, allocation
        return None
