"""Quotas count the limits that the node enforces."""

from pathlib import Path

import pytest

from paddock.claims.quota.ledger import footprint
from paddock.controllers.env.instance_types import footprint as pool_footprint
from paddock.resources import quantity
from paddock.resources.kinds.template import Resources
from paddock.runtime.blueprint import limits
from paddock.runtime.local.node.node_context import NodeSettings


@pytest.mark.parametrize(
    "resources", [Resources(), Resources(cpu="1"), Resources(memory="256Mi"), Resources(disk="1Gi")]
)
def test_a_sandbox_counts_for_the_limits_that_the_kernel_enforces(resources: Resources) -> None:
    given = limits(resources)
    default = NodeSettings(state=Path("/s"), socket_path=Path("/s/node")).default_limits
    memory = given.memory_bytes or default.memory_bytes
    cpu = given.cpu_millis or default.cpu_millis
    assert memory is not None
    counted = footprint(resources)
    assert (counted.cpu_millis, counted.memory_mib) == (cpu, quantity.mebibytes(memory))
    assert pool_footprint(resources) == (cpu, memory)
