"""The use cases of one control plane, grouped by subject and free of protocol.

APIs call these objects directly. `app/wiring/manager.py` builds them.
"""

from msgspec import Struct

from paddock.claims.cleanup import ClaimCleanup
from paddock.claims.engine import Claims
from paddock.claims.quota.usage import QuotaUsage
from paddock.manager.sandboxes.batches import Batches
from paddock.manager.sandboxes.lifecycle import Lifecycle
from paddock.manager.sandboxes.networks import SandboxNetworks
from paddock.manager.sandboxes.queries import SandboxQueries
from paddock.manager.sandboxes.snapshots import Snapshots
from paddock.manager.templates.builds import TemplateBuilds
from paddock.manager.templates.queries import Templates
from paddock.manager.templates.tags import TemplateTags


class Manager(Struct, frozen=True, kw_only=True, eq=False):
    """The use cases, by subject."""

    claims: Claims
    """Create a sandbox."""
    queries: SandboxQueries
    """Find and list sandboxes; usage and logs."""
    lifecycle: Lifecycle
    """Pause, resume, connect, extend, kill."""
    networks: SandboxNetworks
    """Network policies of sandboxes."""
    snapshots: Snapshots
    usage: QuotaUsage
    """What teams and keys use of their quotas."""
    templates: Templates
    builds: TemplateBuilds
    """Builds of templates."""
    tags: TemplateTags
    """Tags of templates: names of builds."""
    batches: Batches
    cleanup: ClaimCleanup
    """Deletes what failed claims left; its `run` must run beside the API."""
