"""What a client with a member's key gets of a closed template; prints the facts as JSON."""

import json
import sys

from e2b import Sandbox

PROBE = "timeout 3 bash -c 'exec 3<>/dev/tcp/203.0.113.1/80' 2>&1 | tail -1"
"""An address for documentation, which nobody has: only a firewall rejects it at once."""


def refusal(**options) -> str:
    try:
        Sandbox.create("closed", timeout=60, **options).kill()
    except Exception as error:
        return str(error)
    return ""


def facts_of(sandbox: Sandbox) -> dict:
    return {
        "egress": sandbox.commands.run(PROBE).stdout.strip(),
        "has_token": bool(sandbox.traffic_access_token),
    }


facts = {
    "allow_out": refusal(network={"allow_out": ["8.8.8.8"], "deny_out": ["0.0.0.0/0"]}),
    "public": refusal(network={"allow_public_traffic": True}),
}
with Sandbox.create("closed", timeout=60) as sandbox:
    facts["default"] = facts_of(sandbox)
with Sandbox.create("closed", timeout=60, allow_internet_access=True) as sandbox:
    facts["explicit default"] = facts_of(sandbox)
    if hasattr(sandbox, "create_snapshot"):
        snapshot = sandbox.create_snapshot()
        with Sandbox.create(snapshot.snapshot_id, timeout=60) as clone:
            facts["snapshot"] = facts_of(clone)
json.dump(facts, sys.stdout)
